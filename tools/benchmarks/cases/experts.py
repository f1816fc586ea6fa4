"""Compare training of a mixture of experts in one process with transformers on the same weights and
batch, and with a dense model of the same active FLOPs."""

import tempfile
from collections.abc import Callable, Iterator

import torch
from benchmarks.cases.train import (
    DTYPES,
    ROWS,
    SEQUENCE,
    VOCABULARY,
    batch,
    ours,
    rates,
    theirs,
    trained_dtypes,
)
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, Job, alone, jobs_in_turn, seconds_in_turn

HIDDEN, ACTIVE, EXPERTS, TOP_K = 512, 1408, 8, 2  # ACTIVE: inner features that a token uses
SIZES = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=SEQUENCE,
    hidden_size=HIDDEN,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
)


def cases(setup: Setup) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as sparse, tempfile.TemporaryDirectory() as dense:
        alone(make, sparse, dense)
        for dtype in trained_dtypes():
            jobs = [Job(1, ours, (sparse, dtype)), Job(1, theirs, (sparse, dtype))]
            name = f"train mixtral in {dtype}, against transformers"
            yield rates(name, jobs_in_turn(jobs, setup.pairs), ROWS)
            jobs = [Job(1, gradients, (path, dtype)) for path in (sparse, dense)]
            name = f"gradients of mixtral in {dtype}, against llama of the same active FLOPs"
            yield rates(name, jobs_in_turn(jobs, setup.pairs), ROWS)
        routed, bare = alone(experts_and_products, setup.pairs)
        yield Result("a layer of experts in fp32, against its matrix products", routed, bare)


def make(sparse: str, dense: str) -> None:
    """Write Hugging Face directories of a Mixtral, and of a Llama with the same active FLOPs."""
    import transformers

    inner = {"intermediate_size": ACTIVE // TOP_K, "num_local_experts": EXPERTS}
    configs = {
        sparse: transformers.MixtralConfig(**SIZES, **inner, num_experts_per_tok=TOP_K),
        dense: transformers.LlamaConfig(**SIZES, intermediate_size=ACTIVE),
    }
    for directory, config in configs.items():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def gradients(directory: str, dtype: str) -> Callable[[], object]:
    """Return a function that computes the gradients of a batch, without an optimizer step."""
    import megazoo

    torch.set_num_threads(CORES)
    model, ids = megazoo.from_pretrained(directory, dtype=DTYPES[dtype]).train(), batch()
    return lambda: model.train_batch(ids, labels=ids)


def experts_and_products(pairs: int) -> list[list[float]]:
    """Return the seconds of forward and backward of a layer of experts, and of only its matrix
    products with evenly spread tokens: the difference is the cost of routing."""
    from megazoo.layers import MixtureOfExperts, Router

    torch.set_num_threads(CORES)
    layer = MixtureOfExperts(HIDDEN, ACTIVE // TOP_K, Router(HIDDEN, EXPERTS, TOP_K))
    x = torch.randn(ROWS, SEQUENCE, HIDDEN, requires_grad=True)
    rows = torch.randn(EXPERTS, ROWS * SEQUENCE * TOP_K // EXPERTS, HIDDEN)
    inner = torch.randn(*rows.shape[:2], ACTIVE // TOP_K)
    pairs_of = [(rows, layer.gate_up.weight.detach()), (inner, layer.down.weight.detach())]

    def products():
        for given, weights in pairs_of:
            for part, weight in zip(given, weights, strict=True):
                y = part @ weight.t()
                y @ weight
                y.t() @ part

    return seconds_in_turn([lambda: layer(x).sum().backward(), products], pairs)
