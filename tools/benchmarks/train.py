"""Training in one process, against transformers on the same weights and batch, and against bare matrix products."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.common import CORES, Result, Setup, alone, on_ranks, seconds_in_turn

ROWS, SEQUENCE = 8, 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(setup: Setup) -> Iterator[Result]:
    for model in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as directory:
            alone(make, model, directory)
            for ours, theirs in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
                sides = on_ranks(rates_and_peak, 2, directory, (ours, theirs), setup.pairs)
                rates, peaks = zip(*sides, strict=True)
                yield Result(f"train {model} in {ours}, against transformers in {theirs}", *rates, peaks, "tokens/s")
            rates = alone(rates_of_products, directory, setup.pairs)
            yield Result(f"train {model} in fp32, against bare products of its sizes", *rates, (), "GFLOP/s")


def rates_and_peak(directory: str, dtypes: tuple[str, str], pairs: int) -> tuple[list[float], int]:
    """Tokens/s of each step, and the most resident memory above that before the model was built.

    Rank 0 trains ours and rank 1 transformers', in turn: each in its own process, as it would be used.
    """
    import transformers  # noqa: F401, part of the level before

    import megazoo  # noqa: F401, likewise

    rank, seconds = dist.get_rank(), []
    torch.set_num_threads(CORES)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    step = (ours, theirs)[rank](directory, DTYPES[dtypes[rank]])
    for _ in range(pairs + 1):
        for turn in range(2):
            dist.barrier()
            if turn == rank:
                began = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - began)
    return [ROWS * SEQUENCE / each for each in seconds[1:]], resident("VmHWM") - before


def in_turn(sides: list[Callable[[], object]], pairs: int, amount: float) -> list[list[float]]:
    """Amount / seconds of each run of each side."""
    return [[amount / seconds for seconds in side] for side in seconds_in_turn(sides, pairs)]


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def make(model: str, directory: str) -> None:
    """A Hugging Face directory with random weights."""
    import transformers

    if model == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            vocab_size=8192, n_positions=SEQUENCE, n_embd=512, n_layer=8, n_head=8, **dropout
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    else:
        sizes = {"vocab_size": 8192, "max_position_embeddings": SEQUENCE, "hidden_size": 512}
        sizes |= {"num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1408}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(directory)


def batch() -> torch.Tensor:
    return torch.randint(0, 8192, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(0))


def ours(directory: str, dtype: torch.dtype) -> Callable[[], object]:
    """A function that trains a step."""
    import megazoo

    model, ids = megazoo.from_pretrained(directory, dtype=dtype), batch()
    optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)

    def step():
        model.train_batch(ids, labels=ids)
        optimizer.step()

    return step


def theirs(directory: str, dtype: torch.dtype) -> Callable[[], object]:
    """Likewise; with torch's fused AdamW, the fastest there is."""
    import transformers

    model, ids = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).train(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rates_of_products(directory: str, pairs: int) -> list[list[float]]:
    """GFLOP/s of a step, by the FLOPs of its products, and of forward and backward of its layers' products alone."""
    import megazoo
    from megazoo.models import flops_per_token

    torch.set_num_threads(CORES)
    tokens, step = ROWS * SEQUENCE, ours(directory, torch.float32)
    model = megazoo.from_pretrained(directory)
    weights = [p.detach() for p in model.layers["0"].parameters() if p.dim() == 2]
    inputs = [torch.randn(tokens, weight.shape[1]) for weight in weights]

    def products():
        for x, weight in zip(inputs, weights, strict=True):
            y = x @ weight.t()
            y @ weight
            y.t() @ x

    amounts = flops_per_token(model.config, SEQUENCE) * tokens, 6 * tokens * sum(w.numel() for w in weights)
    rates = in_turn([step, products], pairs, 1e-9)
    return [[rate * amount for rate in side] for side, amount in zip(rates, amounts, strict=True)]
