"""All ranks issue the collectives of a training step in one order, as NCCL needs it: those of
context parallelism among those of tensors, replicas and gradients, in every schedule."""

from unittest import mock

import pytest
import torch.distributed as dist

import megazoo
from megazoo.parallel import collectives
from tests.support.nccl_rules import run_collectives
from tests.support.training import MODELS, context, layout_name, make_batch, replica_rows, world


def issued(config, layout, schedule, recompute):
    """Return what this rank issues in a batch and a step of the optimizer."""
    ctx, made, run = context(**layout), [], collectives._run
    names = {
        id(axis.group): tuple(dist.get_process_group_ranks(axis.group))
        for axis in (*ctx.axes, ctx.token_axis)
    }

    def noted(collective, *tensors, group, whole, **options):
        made.append((collective.__name__, names[id(group)], whole.numel()))
        return run(collective, *tensors, group=group, whole=whole, **options)

    with (
        mock.patch.object(collectives, "_run", noted),
        mock.patch.object(collectives, "_reducer_for", return_value=None),
    ):
        model = megazoo.from_config(config, ctx, seed=3).recompute(recompute)
        optimizer = megazoo.optim.AdamW(model, lr=1e-3, zero=1)
        ids, targets = (replica_rows(each, ctx) for each in make_batch(0))
        model.train_batch(ids, targets=targets, num_microbatches=4, schedule=schedule)
        optimizer.step()
    return made, names[id(ctx.cp_group)]


CASES = [
    ("llama", dict(cp=2, dp=2), "1f1b", "none"),
    ("mpt", dict(cp=2, pp=2), "1f1b", "full"),
    ("llama", dict(cp=2, pp=2), "zb-h1", "none"),
    ("gpt2", dict(cp=2, pp=2, v=2), "1f1b", "selective"),
    ("llama", dict(cp=2, tp=2, sp=True), "1f1b", "selective"),
    ("gpt2", dict(cp=2, dp=2, pp=2), "zb-h1", "full"),
]


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
@pytest.mark.parametrize(
    ("model", "layout", "schedule", "recompute"),
    CASES,
    ids=lambda part: layout_name(part) if isinstance(part, dict) else part,
)
def test_no_rank_waits_for_another_in_a_circle(ranks, model, layout, schedule, recompute, method):
    layout = {**layout, "method": method}
    found = ranks(issued, world(layout), MODELS[model], layout, schedule, recompute)
    run_collectives([made for made, _ in found])
    made, of_context = found[0]
    if method == "allgather" and layout.get("dp", 1) > 1 and layout.get("pp", 1) == 1:
        gathers = [name for name, group, _ in made if group == of_context and "gather" in name]
        times = 3 if recompute == "full" else 2  # forward, backward, and what is recomputed
        assert len(gathers) == times * 4 * 5  # of four micro-batches each of five layers


def test_backward_gathers_again(ranks):
    """Once, since keys and values of other ranks are not kept; where all of a layer is computed
    again, that gathers them, too. Recomputed attention alone has them from its recomputation."""
    counts = {}
    for recompute in ("none", "selective", "full"):
        found = ranks(issued, 2, MODELS["gpt2"], dict(cp=2), "1f1b", recompute)
        made, of_context = found[0]
        names = [name for name, group, whole in made if group == of_context]
        counts[recompute] = sum("all_gather" in name for name in names)
    layers = 4 * 5  # of four micro-batches each of five layers
    of_zero = counts["none"] - 2 * layers  # ZeRO-1 gathers the parameters once over the same ranks
    assert 0 <= of_zero <= 1
    assert counts["selective"] - of_zero == 2 * layers
    assert counts["full"] - of_zero == 3 * layers


def test_the_check_finds_ranks_that_issue_in_different_orders():
    a, b = ("all_reduce", (0, 1), 4), ("all_gather_single", (0, 1), 4)
    run_collectives([[a, b], [a, b]])
    for wrong in ([b, a], [a], [a, ("all_gather_single", (0, 1), 8)]):
        with pytest.raises(AssertionError, match="wait for each other"):
            run_collectives([[a, b], wrong])
