"""--compile: the layers under torch.compile train to the same losses."""

from dataclasses import replace

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.errors import UserError
from megazoo.layers import CausalSelfAttention
from megazoo.models.registry import find_config
from megazoo.parallel.compile import prepare_to_compile
from tests.support.sampling import pairs_covered
from tests.support.training import (
    CLIP,
    MODELS,
    context,
    layout_name,
    make_batch,
    randomize,
    replica_rows,
    world,
    worst_relative,
)

SHORT, SHORTEST = (replace(MODELS["llama"], layers=layers) for layers in (2, 1))


def losses(config, layout, mode, schedule="1f1b", compiled=True, dtype=torch.float32, **options):
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3, dtype=dtype)).recompute(*mode)
    if compiled:
        model.compile(**options)
    optimizer = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=CLIP)
    history = []
    for step in range(2):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        loss = model.train_batch(
            ids, targets=targets, num_microbatches=2, schedule=schedule, step=step
        )
        history.append((loss.item(), optimizer.step().item()))
    return history


def assert_trains_alike(ranks, config, layout, mode=("none",), schedule="1f1b", **options):
    expected = losses(config, {}, ("none",), compiled=False)
    how = (config, layout, mode, schedule)
    for history in ranks(losses, world(layout), *how, timeout=500, **options):
        assert worst_relative(history, expected) < 1e-4


GRAPHS = {"backend": "aot_eager"}  # without the minutes that a C++ compiler takes
CUT = [dict(cp=2, method="ulysses"), dict(cp=2, method="allgather")]


@pytest.mark.slow
def test_the_graphs_of_a_pipeline_with_full_recomputation_train_alike(ranks):
    assert_trains_alike(ranks, SHORT, dict(pp=2), ("full",), **GRAPHS)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_graphs_of_experts_train_alike(ranks, stages):
    sizes = {"experts": 4, "vocab_size": SHORT.vocab_size, "max_positions": SHORT.max_positions}
    config = replace(find_config("mixtral-tiny"), layers=stages, **sizes)
    assert_trains_alike(ranks, config, dict(pp=stages), schedule="zb-h1", **GRAPHS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", CUT, ids=layout_name)
def test_the_graphs_of_a_cut_sequence_train_alike(ranks, layout):
    assert_trains_alike(ranks, SHORTEST, layout, **GRAPHS)


CASES = pairs_covered(
    ["gpt2", "llama", "mpt"],
    [dict(pp=2), dict(tp=2), dict(tp=2, pp=2, sp=True)],
    ["1f1b", "gpipe", "zb-h1"],
    [("none",), ("selective",), ("full",)],
    possible=lambda model, layout, schedule, mode: "pp" in layout or schedule == "1f1b",
)
CASES += [("llama", {}, "1f1b", ("none",)), ("llama", dict(pp=2), "1f1b", ("full",))]
CASES += [("llama", layout, "1f1b", ("none",)) for layout in CUT]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "layout", "schedule", "mode"), CASES, ids=str)
def test_every_two_of_models_layouts_schedules_and_modes(ranks, model, layout, schedule, mode):
    assert_trains_alike(ranks, MODELS[model], layout, mode, schedule)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dropout_and_low_precision(ranks):
    config = replace(
        MODELS["gpt2"], embedding_dropout=0.1, attention_dropout=0.1, residual_dropout=0.1
    )
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        expected = ranks(losses, 2, config, dict(tp=2), ("none",), compiled=False, dtype=dtype)[0]
        history = ranks(losses, 2, config, dict(tp=2), ("selective",), dtype=dtype, timeout=500)[0]
        assert worst_relative(history, expected) < tolerance


def graphs_of_attention(**layout):
    """Return the graphs of an attention of grouped heads, and why each but the last ends."""
    prepare_to_compile(torch.device("cpu"))
    layer = CausalSelfAttention(32, 4, 2, ctx=context(**layout))
    explained = torch._dynamo.explain(layer)(torch.randn(2, 6, 32))
    return explained.graph_count, [each.reason for each in explained.break_reasons]


@pytest.mark.slow
def test_attention_breaks_only_where_ranks_meet(ranks):
    """Over a cut sequence each of the functions that call each other ends a graph there, and begins
    another after."""
    assert ranks(graphs_of_attention, 1) == [(1, [])]
    for layout in CUT:
        for graphs, reasons in ranks(graphs_of_attention, 2, **layout, timeout=240):
            assert graphs == 4
            assert reasons
            assert all("_across_ranks" in reason for reason in reasons)


def test_a_machine_without_a_compiler_gets_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "c++-that-is-not-there")
    with pytest.raises(
        UserError,
        match=r"--compile needs a C\+\+ compiler, but there is no c\+\+-that-is-not-there",
    ):
        pretrain.main(["--compile", "--device", "cpu", "--steps", "1"])
