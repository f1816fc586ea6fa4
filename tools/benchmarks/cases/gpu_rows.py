"""Train and decode on one GPU: a row per model and task, against the device's bf16 peak or its
memory bandwidth. tools/gpu_rows.sh runs the GPU tests, then each row for at most 95 seconds, except
those of compiled decoding."""

import functools
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from benchmarks.cases.gpu import generating, model_of, synchronize
from benchmarks.results import Result, Setup
from benchmarks.turns import alone

from megazoo.errors import UserError

# Tokens of a training step that is tried on the CPU, and its rows.
TINY_STEP = 64, 2


def cases(setup: Setup) -> Iterator[Result]:
    if not setup.tiny and not torch.cuda.is_available():
        raise UserError("the case gpu_rows needs a CUDA device: pass --tiny to try it on a CPU")
    unknown = set(setup.rows) - set(ROWS)
    if unknown:
        raise UserError(f"unknown row {min(unknown)}: use {', '.join(ROWS)}")
    for name in setup.rows or ROWS:
        row, *arguments = ROWS[name]
        yield row(*arguments, setup)


def trained(preset: str, length: int, rows: int, setup: Setup) -> Result:
    """Compare the tokens/s of compiled training in bf16 with those at the device's peak."""
    if setup.tiny:
        preset, (length, rows) = tiny_preset(preset), TINY_STEP
    found = alone(train, preset, length, rows, setup.pairs, "cpu" if setup.tiny else "cuda")
    layers, tokens, at_the_peak, memory = found
    text = f"train {preset} with {layers} layers in bf16, compiled, {rows} x {length:,} tokens"
    return Result(f"{text}, against the peak", tokens, at_the_peak, (memory, 0), "tokens/s")


def varied(what: str, preset: str, length: int, rows: int, setup: Setup) -> Result:
    """Compare the tokens/s of compiled training in bf16 with and without a setting."""
    if setup.tiny:
        preset, (length, rows) = tiny_preset(preset), TINY_STEP
    device = "cpu" if setup.tiny else "cuda"
    found = [
        alone(train, preset, length, rows, setup.pairs, device, **settings)
        for settings in (VARIED[what], {})
    ]
    (layers, tokens, _, memory), (_, plain, _, memory_of_plain) = found
    text = f"train {preset} with {layers} layers in bf16, compiled, {rows} x {length:,} tokens"
    peaks = memory, memory_of_plain
    return Result(f"{text}: {what}, against none", tokens, plain, peaks, "tokens/s")


def decoded(preset: str, compiled: bool, setup: Setup) -> Result:
    """Compare the tokens/s of greedy decoding with those of moving the weights' bytes."""
    if setup.tiny:
        preset = tiny_preset(preset)
    device = "cpu" if setup.tiny else "cuda"
    ours, reference = alone(generating, preset, setup.pairs, device, compiled)
    how = ", compiled" if compiled else ""
    text = f"decode {preset} in bf16{how}, batch 1, against moving its weights' bytes"
    return Result(text, ours, reference, unit="tokens/s")


VARIED: dict[str, dict] = {
    "float8 tensorwise": {"float8": "tensorwise"},
    "zero 3 at one rank": {"zero": 3},
}
ROWS: dict[str, tuple] = {
    "train-llama3.2-1b": (trained, "llama3.2-1b", 4096, 4),
    "train-gpt2-1.5b": (trained, "gpt2-1.5b", 1024, 16),
    "train-llama3-8b": (trained, "llama3-8b", 4096, 2),
    "train-olmoe-1b-7b": (trained, "olmoe-1b-7b", 4096, 2),
    "float8-llama3-8b": (varied, "float8 tensorwise", "llama3-8b", 4096, 2),
    "zero3-llama3.2-1b": (varied, "zero 3 at one rank", "llama3.2-1b", 4096, 4),
    "decode-llama3.2-1b": (decoded, "llama3.2-1b", False),
    "decode-gpt2-1.5b": (decoded, "gpt2-1.5b", False),
    "decode-compiled-llama3.2-1b": (decoded, "llama3.2-1b", True),
    "decode-compiled-gpt2-1.5b": (decoded, "gpt2-1.5b", True),
}


def tiny_preset(preset: str) -> str:
    """Return the tiny preset of the same family."""
    from megazoo.families.registry import family_of
    from megazoo.models.registry import find_config

    return f"{family_of(find_config(preset))}-tiny"


def train(
    preset: str,
    length: int,
    rows: int,
    steps: int,
    device: str,
    float8: str | None = None,
    zero: int = 0,
) -> tuple[int, list[float], list[float], int]:
    """Return the number of layers that fit, the tokens/s of each step, those at the device's peak,
    and the peak of memory in bytes. Two steps before the measurement compile."""
    import megazoo
    from megazoo.layers import multiply_in_float8
    from megazoo.models.counts import flops_per_token
    from megazoo.trainer.metrics import peak_flops, peak_memory

    layers = layers_that_fit(preset, length, rows, memory_of(device))
    model = model_of(preset, length, device, layers, zero)
    if float8:
        multiply_in_float8(model, float8)
    model.compile()
    optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)
    tokens = []
    for step in range(steps + 2):
        began = time.perf_counter()
        model.train_batch(ids, labels=ids)
        optimizer.step()
        synchronize(device)
        if step >= 2:
            tokens.append(rows * length / (time.perf_counter() - began))
    peak = peak_flops(torch.device(device)) or product_flops(device)
    at_the_peak = peak / flops_per_token(model.config, length)
    return layers, tokens, [at_the_peak] * steps, peak_memory(torch.device(device))


def memory_of(device: str) -> int:
    """Return the bytes of the device that a model may use: 0.9 of those that are free; of a CPU,
    1 GB."""
    return int(0.9 * torch.cuda.mem_get_info()[0]) if device == "cuda" else 10**9


@functools.cache
def layers_that_fit(preset: str, length: int, rows: int, memory: int) -> int:
    """Return how many layers of a preset can be trained in this memory, as the planner counts it.

    Raises:
        UserError: Not one layer fits.
    """
    from megazoo.models.registry import find_config

    config = replace(find_config(preset), max_positions=length)

    def fits(layers: int) -> bool:
        return planned_memory(replace(config, layers=layers), length, rows) <= memory

    if not fits(1):
        raise UserError(f"one layer of {preset} needs more than {memory / 1e9:.0f} GB")
    low, high = 1, config.layers  # `low` layers fit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def planned_memory(config, length: int, rows: int) -> int:
    """Return the bytes on the device that a training step of one micro-batch needs."""
    from megazoo.parallel.layout import Layout
    from megazoo.planning import PlannedRun, Planner

    run = PlannedRun(
        global_batch_size=rows, micro_batch_size=rows, seq_length=length, dtype="bfloat16"
    )
    planner, layout = Planner(config, quick=True), Layout()
    planner.check(layout, run)
    return max(rank.total for rank in planner.plan(layout, run).ranks)


def product_flops(device: str, size: int = 1024) -> float:
    """Return the FLOP/s of a square bf16 product, for a device whose peak is not known."""
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        x @ x
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)
