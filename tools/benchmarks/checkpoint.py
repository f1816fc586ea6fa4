"""Hugging Face to shards of tp 2 x pp 2, checksums included, against copying the bytes, and against transformers."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import TOOLS, Result, Setup, Side, alone, in_turn

RESAVE = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""


def cases(setup: Setup) -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as name:
        directory = Path(name)
        hf, shards = directory / "hf", directory / "shards"
        alone(make_llama, hf, setup.gigabytes)
        convert = [sys.executable, TOOLS / "convert_hf.py", hf, shards, "--tp", 2, "--pp", 2]
        copy, saved = directory / "copy", directory / "saved"
        ours, sync = Side([convert, ["sync"]], shards), ["sync"]
        yield in_turn("convert_hf, against cp -r", setup.pairs, ours, Side([["cp", "-r", hf, copy], sync], copy))
        shutil.rmtree(copy)
        resave = [sys.executable, "-c", RESAVE, hf, saved]
        name = "convert_hf, against transformers' from_pretrained and save_pretrained"
        yield in_turn(name, setup.pairs, ours, Side([resave, sync], saved))


def make_llama(directory: Path, gigabytes: float) -> None:
    """A Hugging Face directory with a LLaMA of about this size, of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = round((gigabytes * 1e9 - 2 * 4 * 32000 * 2048) / (4 * (4 * 2048**2 + 3 * 2048 * 5504)))
    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=max(1, layers))).save_pretrained(directory)
