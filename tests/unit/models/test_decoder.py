"""The base class of decoders, and the costs by which layers are divided into stages."""

import ast
from pathlib import Path

import pytest

import megazoo
from megazoo.engine.microbatch import static_steps, takes_static_steps
from megazoo.families.registry import FAMILIES, family_of
from megazoo.models import find_config, llama
from megazoo.parallel.context import ParallelContext

MODELS = Path(megazoo.__file__).parent / "models"


def definitions(name: str) -> list[str]:
    """The files of models/ that define a method of this name."""
    return [
        path.name
        for path in sorted(MODELS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name == name
    ]


def test_the_forward_of_a_stage_is_written_once():
    assert definitions("forward_stage") == ["base.py", "decoder.py"]  # the first is abstract
    assert definitions("stage_costs") == ["base.py"]


def test_a_rank_has_none_for_what_its_stages_lack():
    first, last = (
        FAMILIES["llama"].on_meta(
            find_config("llama-tiny"), ParallelContext.virtual(pp=2, rank=rank)
        )
        for rank in range(2)
    )
    assert first.embedding is not None
    assert (first.norm, first.head, first.score) == (None, None, None)
    assert last.embedding is None
    assert last.norm is not None
    assert last.head is not None


@pytest.mark.parametrize(
    ("preset", "expected"),
    [  # matrices, and the scores of half of a sequence of at most 4096 tokens or of a window
        ("gpt2-124m", 12 * 768**2 + 1024 * 768),
        ("llama-7b", 4 * 4096**2 + 3 * 4096 * 11008 + 2048 * 4096),
        ("mistral-7b-v0.1", 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 4096 * 4096),
        ("llama3-8b", 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 4096 * 4096),
        ("mistral-tiny", 2 * 128 * (128 + 64) + 3 * 128 * 384 + 2 * 48 * 128),
        ("mixtral-8x7b", 2 * 4096 * 5120 + 8 * 4096 + 2 * 3 * 4096 * 14336 + 4096 * 4096),
    ],
)
def test_the_cost_of_a_layer_is_counted(preset, expected):
    config = find_config(preset)
    layer, _, head = FAMILIES[family_of(config)].stage_costs(config)
    assert layer == pytest.approx(expected, rel=1e-9)
    assert head == config.vocab_size * config.hidden_size


def test_a_part_without_static_steps_has_a_growing_cache():
    class Reads(llama.Llama):
        def layer_inputs(self, x, batch):
            return super().layer_inputs(x, batch)

    class Marked(llama.Llama):
        @static_steps
        def layer_inputs(self, x, batch):
            return super().layer_inputs(x, batch)

    config = find_config("llama-tiny")
    for family, takes in ((llama.Llama, True), (Reads, False), (Marked, True)):
        assert takes_static_steps(family.on_meta(config, ParallelContext())) is takes
