"""Compare training in one process with transformers on the same weights and batch, and with matrix
products only."""

import tempfile
from collections.abc import Callable, Iterator

import torch
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, Job, alone, jobs_in_turn, seconds_in_turn

ROWS, SEQUENCE, VOCABULARY = 8, 256, 8192
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(setup: Setup) -> Iterator[Result]:
    for model in ("gpt2", "llama", "mpt"):
        with tempfile.TemporaryDirectory() as directory:
            alone(make, model, directory)
            for dtype in trained_dtypes():
                jobs = [Job(1, side, (directory, dtype)) for side in (ours, theirs)]
                name = f"train {model} in {dtype}, against transformers"
                yield rates(name, jobs_in_turn(jobs, setup.pairs), ROWS)
            steps, products = alone(rates_of_products, directory, setup.pairs)
            name = f"train {model} in fp32, against bare products of its sizes"
            yield Result(name, steps, products, unit="GFLOP/s")


def trained_dtypes() -> list[str]:
    """Return the names of the dtypes to train in. If oneDNN does not multiply bfloat16 on this CPU,
    transformers and Muon need minutes per step in bf16, which is omitted."""
    from megazoo.torch_internals import onednn_multiplies

    return [*DTYPES] if onednn_multiplies(torch.bfloat16) else ["fp32"]


def rates(
    name: str, found: list[tuple[list[float], int]], rows: int, sequence: int = SEQUENCE
) -> Result:
    """Compare the tokens/s of two jobs that train on, or generate, `rows` rows of `sequence` tokens
    per step.

    Args:
        name: Name of the comparison.
        found: Seconds per step and peak memory of each job.
        rows: Rows per step.
        sequence: Tokens per row.
    """
    ours, reference = ([rows * sequence / each for each in seconds] for seconds, _ in found)
    return Result(name, ours, reference, tuple(peak for _, peak in found), "tokens/s")


def make(model: str, directory: str, layers: int = 8, positions: int = SEQUENCE) -> None:
    """Write a Hugging Face directory with random weights."""
    import transformers

    if model == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=positions,
            n_embd=512,
            n_layer=layers,
            n_head=8,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    elif model == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=positions,
            hidden_size=512,
            num_hidden_layers=layers,
            num_attention_heads=8,
            intermediate_size=1408,
        )
    else:
        config = transformers.MptConfig(
            vocab_size=VOCABULARY, max_seq_len=positions, d_model=512, n_layers=layers, n_heads=8
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def batch(rows: int = ROWS, sequence: int = SEQUENCE) -> torch.Tensor:
    """Return random tokens, [rows, sequence]; the same on each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (rows, sequence), generator=generator)


def ours(
    directory: str,
    dtype: str,
    layout: tuple[int, int, int] = (1, 1, 1),
    rows: int = ROWS,
    micro_batches: int = 1,
    schedule: str = "1f1b",
) -> Callable[[], object]:
    """Return a function that runs a training step of `rows` rows. The ranks share all cores."""
    import megazoo

    ctx = megazoo.ParallelContext.from_torch(*layout, device="cpu")
    torch.set_num_threads(max(1, CORES // ctx.world_size))
    model = megazoo.from_pretrained(directory, ctx, dtype=DTYPES[dtype]).train()
    optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)
    mine = batch(rows).chunk(ctx.dp_size)[ctx.dp_rank]

    def step():
        model.train_batch(mine, labels=mine, num_microbatches=micro_batches, schedule=schedule)
        optimizer.step()

    return step


def theirs(directory: str, dtype: str) -> Callable[[], object]:
    """Return a function that runs a training step of transformers with torch's fused AdamW, its
    fastest."""
    import transformers

    torch.set_num_threads(CORES)
    load, ids = transformers.AutoModelForCausalLM.from_pretrained, batch()
    model = load(directory, dtype=DTYPES[dtype]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rates_of_products(directory: str, pairs: int) -> list[list[float]]:
    """Return the GFLOP/s of a step (counting its matrix products), and of only the forward and
    backward matrix products of its layers."""
    import megazoo
    from megazoo.models.counts import flops_per_token

    tokens, step = ROWS * SEQUENCE, ours(directory, "fp32")
    model = megazoo.from_pretrained(directory).train()
    weights = [p.detach() for p in model.layers["0"].parameters() if p.dim() == 2]
    inputs = [torch.randn(tokens, weight.shape[1]) for weight in weights]

    def products():
        for x, weight in zip(inputs, weights, strict=True):
            y = x @ weight.t()
            y @ weight
            y.t() @ x

    of_step = flops_per_token(model.config, SEQUENCE) * tokens
    of_products = 6 * tokens * sum(weight.numel() for weight in weights)
    seconds = seconds_in_turn([step, products], pairs)
    return [
        [1e-9 * flops / each for each in side]
        for side, flops in zip(seconds, (of_step, of_products), strict=True)
    ]
