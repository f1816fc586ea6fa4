"""Hugging Face to shards of tp 2 x pp 2, checksums included, against copying the bytes, against
transformers, and of a large model against a small one."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.common import (
    TOOLS,
    Result,
    Setup,
    Side,
    alone,
    in_turn,
    proportional,
    seconds_in_turn,
)

RESAVE = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""


def cases(setup: Setup) -> Iterator[Result]:
    yield growth(setup)
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as name:
        directory = Path(name)
        hf, shards = directory / "hf", directory / "shards"
        alone(make_llama, hf, setup.gigabytes)
        convert = [sys.executable, TOOLS / "convert_hf.py", hf, shards, "--tp", 2, "--pp", 2]
        copy, saved = directory / "copy", directory / "saved"
        ours, sync = Side([convert, ["sync"]], shards), ["sync"]
        yield in_turn(
            "convert_hf, against cp -r",
            setup.pairs,
            ours,
            Side([["cp", "-r", hf, copy], sync], copy),
        )
        shutil.rmtree(copy)
        resave = [sys.executable, "-c", RESAVE, hf, saved]
        name = "convert_hf, against transformers' from_pretrained and save_pretrained"
        yield in_turn(name, setup.pairs, ours, Side([resave, sync], saved))


def growth(setup: Setup) -> Result:
    """Seconds a GB of a large model and of one of a quarter of its size, and the memory of both."""
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as name:
        converts, sizes = [], []
        for gigabytes in (setup.gigabytes, setup.gigabytes / 4):
            hf, shards = Path(name) / f"hf-{gigabytes}", Path(name) / f"shards-{gigabytes}"
            alone(make_llama, hf, gigabytes)
            sizes.append(sum(file.stat().st_size for file in hf.iterdir()) / 1e9)
            command = [
                sys.executable,
                TOOLS / "convert_hf.py",
                hf,
                shards,
                "--tp",
                2,
                "--pp",
                2,
                "--overwrite",
            ]
            converts.append(partial(proportional, command, "Pss_Anon"))
        seconds, peaks = seconds_in_turn(converts, setup.pairs), [convert() for convert in converts]
        ours, reference = (
            [each / size for each in side] for side, size in zip(seconds, sizes, strict=True)
        )
        what = (
            f"convert_hf, a GB of {sizes[0]:.1f}, against a GB of {sizes[1]:.1f}; anonymous memory"
        )
        return Result(what, ours, reference, tuple(peaks), "s")


def make_llama(directory: Path, gigabytes: float) -> None:
    """A Hugging Face directory with a LLaMA of about this size, of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = round((gigabytes * 1e9 - 2 * 4 * 32000 * 2048) / (4 * (4 * 2048**2 + 3 * 2048 * 5504)))
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_attention_heads": 16,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=max(1, layers))).save_pretrained(
        directory
    )
