"""Compare training on a CUDA device under torch.compile with the bf16 peak and with transformers,
and generation with the memory bandwidth."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from benchmarks.results import Result, Setup
from benchmarks.turns import Job, alone, jobs_in_turn, seconds_in_turn

from megazoo.errors import UserError

PRESETS = ("gpt2-1.5b", "llama3.2-1b")
LENGTHS = {1024: 16, 4096: 4}  # sequence length: rows per step
NEW_TOKENS = 128


def cases(setup: Setup) -> Iterator[Result]:
    if not torch.cuda.is_available():
        raise UserError("the case gpu needs a CUDA device; this machine has none")
    for preset in PRESETS:
        for length, rows in LENGTHS.items():
            yield from training(preset, length, rows, setup.pairs)
        for how, compiled in {"": False, ", compiled": True}.items():
            ours, reference = alone(generating, preset, setup.pairs, compiled=compiled)
            name = f"generate, {preset} in bf16{how}, batch 1, against moving its weights' bytes"
            yield Result(name, ours, reference, unit="tokens/s")


def training(preset: str, length: int, rows: int, pairs: int) -> Iterator[Result]:
    """Compare a training step with transformers, with the device's peak, and with its own parts."""
    name = f"train {preset} in bf16, compiled, {rows} x {length:,} tokens"
    size = (preset, length, rows)
    found = jobs_in_turn([Job(1, our_step, size), Job(1, their_step, size)], pairs)
    ours, theirs = ([rows * length / each for each in seconds] for seconds, _ in found)
    peaks = tuple(peak for _, peak in found)
    yield Result(f"{name}, against transformers", ours, theirs, peaks, "tokens/s")
    ours, peak = alone(of_the_peak, *size, pairs)
    yield Result(f"{name}, against the device's peak", ours, peak, unit="TFLOP/s")
    parts, steps = alone(parts_of_a_step, *size, pairs)
    for part, seconds in parts.items():
        yield Result(f"{name}: {part}, of the step", seconds, steps)


def model_of(preset: str, length: int, device: str, layers: int | None = None, zero: int = 0):
    """Build the preset in bf16, without dropout, for this sequence length and number of layers."""
    import megazoo
    from megazoo.models.registry import find_config

    rates = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0)
    config = replace(find_config(preset), max_positions=length)
    config = replace(config, layers=layers or config.layers)
    if hasattr(config, "embedding_dropout"):
        config = replace(config, **rates)
    ctx = megazoo.ParallelContext.from_torch(device=device, zero=zero)
    return megazoo.from_config(config, ctx, dtype=torch.bfloat16)


def our_step(preset: str, length: int, rows: int, device: str = "cuda") -> Callable[[], object]:
    """Return a function that runs a training step of megazoo with fp32 master weights, and
    synchronizes."""
    import megazoo
    from megazoo.parallel.timing import spent

    model = model_of(preset, length, device).compile()
    optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)

    def step():
        model.train_batch(ids, labels=ids)
        with spent("optimizer"):
            optimizer.step()
        synchronize(device)

    return step


def their_step(preset: str, length: int, rows: int, device: str = "cuda") -> Callable[[], object]:
    """Return a function that runs a training step of transformers: fp32 weights under autocast,
    torch's flash attention, fused AdamW, torch.compile."""
    import transformers

    config = transformers.AutoConfig.for_model(**their_config(preset, length))
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa"
        ).train()
    compiled = torch.compile(model)
    ids = torch.randint(0, config.vocab_size, (rows, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)

    return step


def their_config(preset: str, length: int) -> dict:
    """Return the values of transformers' config for the preset."""
    from megazoo.models.registry import find_config

    config = replace(find_config(preset), max_positions=length)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    values = config.to_hugging_face()
    return {**values, **(dropout if values["model_type"] == "gpt2" else {})}


def of_the_peak(preset: str, length: int, rows: int, pairs: int) -> list[list[float]]:
    """Return the TFLOP/s of each step (with the FLOPs of MFU), and the manufacturer's bf16 peak."""
    from megazoo.models.counts import flops_per_token
    from megazoo.models.registry import find_config
    from megazoo.trainer.metrics import peak_flops

    peak = peak_flops(torch.device("cuda"))
    if peak is None:
        raise UserError(
            f"no peak is known for {torch.cuda.get_device_name()}: see megazoo/trainer/metrics.py"
        )
    config = replace(find_config(preset), max_positions=length)
    flops = flops_per_token(config, length) * rows * length
    (seconds,) = seconds_in_turn([our_step(preset, length, rows)], pairs)
    return [[flops / each / 1e12 for each in seconds], [peak / 1e12] * len(seconds)]


def parts_of_a_step(
    preset: str, length: int, rows: int, pairs: int, device: str = "cuda"
) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of each part per step, and the seconds per step."""
    from megazoo.parallel.timing import Stopwatch

    step, steps, parts = our_step(preset, length, rows, device), [], {}
    step()
    for _ in range(pairs):
        with Stopwatch(torch.device(device)) as watch:
            step()
        steps.append(watch.seconds)
        for part, seconds in watch.times().items():
            parts.setdefault(part, []).append(seconds)
    return {part: seconds for part, seconds in parts.items() if any(seconds)}, steps


def generating(
    preset: str, pairs: int, device: str = "cuda", compiled: bool = False
) -> list[list[float]]:
    """Return the tokens/s of generation, and of copying each weight once per token at the device's
    copy rate. compiled: whether the layers are under torch.compile."""
    model = model_of(preset, 1024, device).eval()
    if compiled:
        model.compile()
    ids = torch.randint(0, model.config.vocab_size, (1, 16), device=device)
    size = sum(parameter.nbytes for parameter in model.parameters())
    half = torch.empty(size // 2, dtype=torch.uint8, device=device)  # is read and written
    copy = torch.empty_like(half)

    def generate():
        model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        synchronize(device)

    def move():
        for _ in range(NEW_TOKENS):
            copy.copy_(half)
        synchronize(device)

    seconds = seconds_in_turn([generate, move], pairs)
    return [[NEW_TOKENS / each for each in side] for side in seconds]


def synchronize(device: str) -> None:
    """Wait until a CUDA device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
