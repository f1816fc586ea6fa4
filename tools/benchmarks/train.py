"""Training in one process, against transformers on the same weights and batch, and against bare
matrix products."""

import tempfile
from collections.abc import Callable, Iterator

import torch
from benchmarks.common import CORES, Job, Result, Setup, alone, jobs_in_turn, seconds_in_turn

ROWS, SEQUENCE = 8, 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(setup: Setup) -> Iterator[Result]:
    for model in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as directory:
            alone(make, model, directory)
            for our_dtype, their_dtype in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
                jobs = [
                    Job(1, ours, (directory, our_dtype)),
                    Job(1, theirs, (directory, their_dtype)),
                ]
                name = f"train {model} in {our_dtype}, against transformers in {their_dtype}"
                yield rates(name, jobs_in_turn(jobs, setup.pairs), ROWS)
            found = alone(rates_of_products, directory, setup.pairs)
            yield Result(
                f"train {model} in fp32, against bare products of its sizes", *found, (), "GFLOP/s"
            )


def rates(name: str, found: list[tuple[list[float], int]], rows: int) -> Result:
    """In tokens/s, of the seconds and peaks of two jobs that train so many rows a step."""
    seconds, peaks = zip(*found, strict=True)
    return Result(
        name, *([rows * SEQUENCE / each for each in side] for side in seconds), peaks, "tokens/s"
    )


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


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, 8192, (rows, SEQUENCE), generator=torch.Generator().manual_seed(0))


def ours(
    directory: str,
    dtype: str,
    layout: tuple[int, int, int] = (1, 1, 1),
    rows: int = ROWS,
    micro_batches: int = 1,
    schedule: str = "1f1b",
) -> Callable[[], object]:
    """A function that trains a step of `rows` rows, on all cores together."""
    import megazoo

    ctx = megazoo.ParallelContext.from_torch(*layout, device="cpu")
    torch.set_num_threads(max(1, CORES // ctx.world_size))
    model, ids = (
        megazoo.from_pretrained(directory, ctx, dtype=DTYPES[dtype]),
        batch(rows).chunk(ctx.dp_size),
    )
    optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)
    mine = ids[ctx.dp_rank]

    def step():
        model.train_batch(mine, labels=mine, num_microbatches=micro_batches, schedule=schedule)
        optimizer.step()

    return step


def theirs(directory: str, dtype: str) -> Callable[[], object]:
    """Likewise of transformers, with torch's fused AdamW, the fastest there is."""
    import transformers

    torch.set_num_threads(CORES)
    model, ids = (
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype]).train(),
        batch(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rates_of_products(directory: str, pairs: int) -> list[list[float]]:
    """GFLOP/s of a step, by the FLOPs of its products, and of forward and backward of its layers'
    products alone."""
    import megazoo
    from megazoo.models.counts import flops_per_token

    tokens, step = ROWS * SEQUENCE, ours(directory, "fp32")
    model = megazoo.from_pretrained(directory)
    weights = [p.detach() for p in model.layers["0"].parameters() if p.dim() == 2]
    inputs = [torch.randn(tokens, weight.shape[1]) for weight in weights]

    def products():
        for x, weight in zip(inputs, weights, strict=True):
            y = x @ weight.t()
            y @ weight
            y.t() @ x

    amounts = (
        flops_per_token(model.config, SEQUENCE) * tokens,
        6 * tokens * sum(w.numel() for w in weights),
    )
    seconds = seconds_in_turn([step, products], pairs)
    return [
        [1e-9 * amount / each for each in side]
        for side, amount in zip(seconds, amounts, strict=True)
    ]
