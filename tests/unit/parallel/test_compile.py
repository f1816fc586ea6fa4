"""--compile: the layers under torch.compile train to the same losses."""

import pytest
import torch

import megazoo
import pretrain_gpt
from megazoo.errors import UserError
from megazoo.layers import CausalSelfAttention
from megazoo.parallel.compile import prepare_to_compile
from tests.support.sampling import pairs_covered
from tests.support.training import (
    CLIP,
    MODELS,
    context,
    make_batch,
    randomize,
    replica_rows,
    world,
    worst_relative,
)


def losses(config, layout, mode, schedule="1f1b", compiled=True, dtype=torch.float32):
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3, dtype=dtype)).recompute(*mode)
    if compiled:
        model.compile()
    optimizer = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=CLIP)
    history = []
    for step in range(3):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        loss = model.train_batch(
            ids, targets=targets, num_microbatches=4, schedule=schedule, step=step
        )
        history.append((loss.item(), optimizer.step().item()))
    return history


def test_training_under_1f1b_with_full_recomputation(ranks):
    config = MODELS["llama"]
    expected = losses(config, {}, ("none",), compiled=False)
    for history in ranks(losses, 2, config, dict(pp=2), ("full",), timeout=240):
        assert worst_relative(history, expected) < 1e-4


CASES = pairs_covered(
    ["gpt2", "llama", "mpt"],
    [dict(pp=2), dict(tp=2), dict(tp=2, pp=2, sp=True)],
    ["1f1b", "gpipe", "zb-h1"],
    [("none",), ("selective",), ("full",)],
    possible=lambda model, layout, schedule, mode: "pp" in layout or schedule == "1f1b",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "layout", "schedule", "mode"), CASES, ids=str)
def test_every_two_of_models_layouts_schedules_and_modes(ranks, model, layout, schedule, mode):
    expected = losses(MODELS[model], {}, ("none",), compiled=False)
    history = ranks(losses, world(layout), MODELS[model], layout, mode, schedule, timeout=500)[0]
    assert worst_relative(history, expected) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dropout_and_low_precision(ranks):
    from dataclasses import replace

    config = replace(
        MODELS["gpt2"], embedding_dropout=0.1, attention_dropout=0.1, residual_dropout=0.1
    )
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        expected = ranks(losses, 2, config, dict(tp=2), ("none",), compiled=False, dtype=dtype)[0]
        history = ranks(losses, 2, config, dict(tp=2), ("selective",), dtype=dtype, timeout=500)[0]
        assert worst_relative(history, expected) < tolerance


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_training_with_a_sequence_that_is_cut(ranks, method):
    layout = dict(cp=2, method=method)
    expected = losses(MODELS["llama"], {}, ("none",), compiled=False)
    for history in ranks(losses, 2, MODELS["llama"], layout, ("none",), timeout=240):
        assert worst_relative(history, expected) < 1e-4


def breaks_of_attention(method):
    """Return the graphs of an attention over a cut sequence, and why each but the last ends."""
    prepare_to_compile(torch.device("cpu"))
    layer = CausalSelfAttention(32, 4, 2, ctx=context(cp=2, method=method))
    explained = torch._dynamo.explain(layer)(torch.randn(2, 6, 32))
    return explained.graph_count, [each.reason for each in explained.break_reasons]


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_attention_over_a_cut_sequence_breaks_where_ranks_meet(ranks, method):
    """Each of the functions that call each other ends a graph there, and begins another after."""
    for graphs, reasons in ranks(breaks_of_attention, 2, method, timeout=240):
        assert graphs == 4
        assert reasons
        assert all("_attend_across_ranks" in reason for reason in reasons)


def graphs_of_attention(kv_heads):
    prepare_to_compile(torch.device("cpu"))
    layer = CausalSelfAttention(32, 4, kv_heads, ctx=context())
    return torch._dynamo.explain(layer)(torch.randn(2, 6, 32)).graph_count


def test_attention_of_grouped_heads_is_one_graph(ranks):
    assert ranks(graphs_of_attention, 1, 2) == [1]


def test_a_machine_without_a_compiler_gets_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "c++-that-is-not-there")
    with pytest.raises(
        UserError,
        match=r"--compile needs a C\+\+ compiler, but there is no c\+\+-that-is-not-there",
    ):
        pretrain_gpt.main(["--compile", "--device", "cpu", "--steps", "1"])
