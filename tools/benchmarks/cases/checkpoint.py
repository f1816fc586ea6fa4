"""Compare conversion from Hugging Face to tp 2 x pp 2 shards (with checksums) with copying the
bytes and with transformers; and a large model with a small one."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch.distributed as dist
from benchmarks.memory import proportional
from benchmarks.results import Result, Setup
from benchmarks.turns import TOOLS, Side, alone, in_turn, on_ranks, seconds_in_turn


def cases(setup: Setup) -> Iterator[Result]:
    yield growth(setup)
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as name:
        directory = Path(name)
        hf, shards = directory / "hf", directory / "shards"
        alone(make_llama, hf, setup.gigabytes)
        copy, saved, sync = directory / "copy", directory / "saved", ["sync"]
        ours = Side([conversion(hf, shards), sync], shards)
        copying = Side([["cp", "-r", hf, copy], sync], copy)
        yield in_turn("convert_hf, against cp -r", setup.pairs, ours, copying)
        shutil.rmtree(copy)
        yield verifying(shards, setup)
        resaving = Side([[sys.executable, TOOLS / "benchmarks/resave.py", hf, saved], sync], saved)
        name = "convert_hf, against transformers' from_pretrained and save_pretrained"
        yield in_turn(name, setup.pairs, ours, resaving)


def conversion(hf: Path, shards: Path) -> list:
    """Return the command that converts a Hugging Face directory."""
    tool = TOOLS / "convert_hf.py"
    return [sys.executable, tool, hf, shards, "--tp", 2, "--pp", 2, "--overwrite"]


def verifying(shards: Path, setup: Setup) -> Result:
    """Compare loading with and without checksums, on two ranks, from the page cache."""
    seconds = on_ranks(loads, 2, shards, setup.pairs)[0]
    return Result("load at tp 2, checksums compared, against not", *seconds)


def loads(shards: Path, pairs: int) -> list[list[float]]:
    """Return the seconds to load with checksums, and without."""
    import megazoo

    ctx = megazoo.ParallelContext.from_torch(2, device="cpu")

    def load(verify: bool) -> None:
        megazoo.from_pretrained(shards, ctx, verify=verify)
        dist.barrier()

    return seconds_in_turn([partial(load, True), partial(load, False)], pairs)


def growth(setup: Setup) -> Result:
    """Compare a large model with one of a quarter of its size: seconds per GB, and memory."""
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as name:
        converts, sizes = [], []
        for gigabytes in (setup.gigabytes, setup.gigabytes / 4):
            hf, shards = Path(name) / f"hf-{gigabytes}", Path(name) / f"shards-{gigabytes}"
            alone(make_llama, hf, gigabytes)
            sizes.append(sum(file.stat().st_size for file in hf.iterdir()) / 1e9)
            converts.append(partial(proportional, conversion(hf, shards), "Pss_Anon"))
        seconds, peaks = seconds_in_turn(converts, setup.pairs), [convert() for convert in converts]
        ours, reference = (
            [each / size for each in side] for side, size in zip(seconds, sizes, strict=True)
        )
        name = f"convert_hf, a GB of {sizes[0]:.1f}, against a GB of {sizes[1]:.1f}"
        return Result(f"{name}; anonymous memory", ours, reference, tuple(peaks), "s")


def make_llama(directory: Path, gigabytes: float) -> None:
    """Write a Hugging Face directory with a randomly initialized LLaMA of about this size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = round((gigabytes * 1e9 - 2 * 4 * 32000 * 2048) / (4 * (4 * 2048**2 + 3 * 2048 * 5504)))
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5504,
        num_attention_heads=16,
        num_hidden_layers=max(1, layers),
    )
    LlamaForCausalLM(config).save_pretrained(directory)
