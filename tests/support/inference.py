"""Inference for tests: a model with its tokenizer on disk, and the tools run on it."""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megazoo.cli.program import run_program
from megazoo.formats.resharding import write_shards
from megazoo.models.pretrained import open_source
from tests.support.transformers_models import deep_llama

ROOT = Path(__file__).parents[2]
PROMPT = "def tensors_of(model):"


def write_model(path, tokenizer):
    """Write a LLaMA of transformers with its tokenizer, and the same in shards; returns `path`."""
    hf = deep_llama(vocab_size=len(tokenizer), kv_heads=2, max_positions=64)
    for ids in (hf.config, hf.generation_config):
        ids.bos_token_id, ids.eos_token_id, ids.pad_token_id = 1, 2, 0
    hf.save_pretrained(path / "hf")
    tokenizer.save_pretrained(path / "hf")
    write_shards(open_source(path / "hf"), path / "shards", tp=2, pp=1)
    return path


def expected_text(directory, prompt=PROMPT, new=20, **settings):
    """What transformers makes of a prompt."""
    tokens = AutoTokenizer.from_pretrained(directory)
    model, inputs = (
        AutoModelForCausalLM.from_pretrained(directory),
        tokens(prompt, return_tensors="pt"),
    )
    out = model.generate(
        **{name: inputs[name] for name in ("input_ids", "attention_mask")},
        max_new_tokens=new,
        **settings,
    )
    return tokens.decode(out[0], skip_special_tokens=True)


def output_of(main, arguments: list[str]) -> str:
    """What the `main` of a tool prints on this rank, without the lines of speed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(arguments)
    return "".join(
        line for line in printed.getvalue().splitlines(keepends=True) if "tokens/s" not in line
    )


def assert_same_output(found: str, expected: str) -> None:
    """The words are the same, and decimals are, up to rounding."""
    decimal = re.compile(r"\d+\.\d+")
    assert decimal.sub("", found) == decimal.sub("", expected) != ""
    numbers, wanted = ([float(each) for each in decimal.findall(t)] for t in (found, expected))
    assert numbers == pytest.approx(wanted, rel=1e-5)


def script_of(tool) -> str:
    """The name of a program's script in a clone."""
    name = Path(tool.__file__).name
    return "pretrain_gpt.py" if name == "pretrain.py" else name


def run_main(tool, monkeypatch, capsys, *arguments, typed=""):
    """What a tool prints: its exit code, what went to stdout, and to stderr."""
    monkeypatch.setattr(sys, "argv", [script_of(tool), *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    code = 0
    try:
        run_program(tool.main)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err
