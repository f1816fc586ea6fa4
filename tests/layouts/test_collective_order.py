"""All ranks issue the collectives of a training step in one order, as NCCL needs it: those of
context parallelism among those of tensors, replicas and gradients, in every schedule."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megazoo
from megazoo.parallel import collectives
from megazoo.parallel.collectives import exchange_parts
from tests.support.nccl_rules import run_collectives
from tests.support.sampling import marked_slow
from tests.support.training import MODELS, context, make_batch, replica_rows, world


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


CASES = [  # model, layout, schedule, what is recomputed; the last ones are slow
    ("llama", dict(cp=2, dp=2), "1f1b", "none"),
    ("mpt", dict(cp=2, pp=2), "1f1b", "full"),
    ("gpt2", dict(cp=2, pp=2, v=2, method="ulysses"), "1f1b", "selective"),
    ("llama", dict(cp=2, tp=2, sp=True, method="ulysses"), "1f1b", "selective"),
    ("gpt2", dict(cp=2, dp=2, pp=2), "zb-h1", "full"),
    ("llama", dict(cp=2, dp=2, method="ulysses"), "1f1b", "none"),
    ("mpt", dict(cp=2, pp=2, method="ulysses"), "1f1b", "full"),
    ("llama", dict(cp=2, pp=2), "zb-h1", "none"),
    ("llama", dict(cp=2, pp=2, method="ulysses"), "zb-h1", "none"),
    ("gpt2", dict(cp=2, pp=2, v=2), "1f1b", "selective"),
    ("llama", dict(cp=2, tp=2, sp=True), "1f1b", "selective"),
    ("gpt2", dict(cp=2, dp=2, pp=2, method="ulysses"), "zb-h1", "full"),
]


@pytest.mark.parametrize(
    ("model", "layout", "schedule", "recompute"), marked_slow(CASES, lambda number, _: number > 2)
)
def test_no_rank_waits_for_another_in_a_circle(ranks, model, layout, schedule, recompute):
    found = ranks(issued, world(layout), MODELS[model], layout, schedule, recompute)
    run_collectives([made for made, _ in found])
    made, of_context = found[0]
    if "method" not in layout and layout.get("dp", 1) > 1 and layout.get("pp", 1) == 1:
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


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = [[1, 2, 0], [3, 0, 1], [0, 0, 2]]  # that rank r sends to each


def exchanged(dtype, rank):
    x = torch.arange(sum(ROWS[rank]) * 4).view(-1, 4) + 100 * rank
    receives = [row[rank] for row in ROWS]
    return exchange_parts(x.to(dtype), dist.group.WORLD, ROWS[rank], receives).long()


def exchanged_in_each_dtype():
    rank = context(cp=3).cp_rank
    return [exchanged(dtype, rank) for dtype in DTYPES]


def test_uneven_and_empty_parts_are_exchanged(ranks):
    sent = [(torch.arange(sum(ROWS[r]) * 4).view(-1, 4) + 100 * r).split(ROWS[r]) for r in range(3)]
    for rank, found in enumerate(ranks(exchanged_in_each_dtype, 3)):
        for dtype, received in zip(DTYPES, found, strict=True):
            expected = torch.cat([sent[other][rank] for other in range(3)])
            assert torch.equal(received, expected), dtype
