"""Megatron-LM's checkpoints, written here by its rules, against the models of transformers whose
weights they hold."""

import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers_megatron import (
    TWINS,
    arguments_of,
    megatron_tensors,
    twin,
    write_distributed,
    write_legacy,
)

import megazoo

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))


IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(2))


@cache
def expected(name: str):
    hf = twin(name)
    with torch.no_grad():
        return hf, hf(IDS).logits


def logits_of(directory, ctx=None):
    with torch.no_grad():
        return megazoo.from_pretrained(directory, ctx).eval()(IDS).logits


def close(logits, name: str) -> bool:
    return logits.shape == (2, 16, 61) and (logits - expected(name)[1]).abs().max() < 1e-5 * scale(
        name
    )


def scale(name):
    return max(1.0, float(expected(name)[1].abs().max()))


WRITERS = {
    "stacked": lambda *about: write_distributed(*about),
    "by layer": lambda *about: write_distributed(*about, stacked=False, prefix="model."),
    "legacy": lambda *about: write_legacy(*about),
    "legacy, tp 2 pp 2": lambda *about: write_legacy(*about, tp=2, pp=2),
    "legacy, interleaved": lambda *about: write_legacy(*about, tp=2, pp=2, virtual=2),
}


@pytest.mark.parametrize(("name", "writer"), product(TWINS, WRITERS))
@pytest.mark.parametrize("fused_norms", [True, False])
def test_logits_are_those_of_the_twin(name, writer, fused_norms, tmp_path):
    tensors = megatron_tensors(expected(name)[0], fused_norms)
    WRITERS[writer](tmp_path, tensors, arguments_of(name, vocab_size=61))
    assert close(logits_of(tmp_path), name)
