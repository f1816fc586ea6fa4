"""The estimated time of a step: what is hidden and what is not, by hand; and what a meter counts
for it."""

from dataclasses import fields

import pytest
import torch

from megazoo.models.registry import find_config
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.schedule import gpipe, one_f_one_b, tables_of, zb_h1
from megazoo.planning import GPUS, PlannedRun, Planner
from megazoo.planning.meter import META, Cost, Meter
from megazoo.planning.plan import schedule_tables
from megazoo.planning.ranks import place_in
from megazoo.planning.static import Static
from megazoo.planning.step_time import COLLECTIVE, KERNEL, Speed, step_time
from tests.support.training import tiny_config

UNIT = Speed(flops=1, memory=10, tp=2, cp=4, dp=1, pp=10)  # a second: FLOPs, and bytes


def some(kind, **values):
    """A Cost or Static with these values, and zeros else."""
    return kind(**{field.name: values.get(field.name, 0) for field in fields(kind)})


def time_of(tables, forward, backward, static=None, boundary=0, speed=UNIT, kind="B"):
    """The time of a step whose stages all cost the same."""
    stages = {action.stage for table in tables for action in table}
    costs = {("F", stage): some(Cost, **forward) for stage in stages}
    costs |= {(kind, stage): some(Cost, **backward) for stage in stages}
    costs |= {("W", stage): some(Cost, flops=1) for stage in stages if kind == "I"}
    statics = [some(Static, **(static or {})) for _ in tables]
    return step_time(tables, costs, statics, boundary, speed)


def test_sums_over_replicas_hide_under_the_last_backward_and_gathers_do_not():
    one_rank = tables_of(one_f_one_b, 1, 1, 3)  # of 3 x (1 + 2) seconds
    work = dict(flops=1), dict(flops=2)
    assert time_of(one_rank, *work).total == 9
    hidden = time_of(one_rank, *work, dict(sent_dp=2, sent_early=2))
    assert (hidden.total, hidden.exposed) == (9, 0)
    longer = time_of(one_rank, *work, dict(sent_dp=5, sent_early=5))
    assert longer.total == 7 + 5  # the last backward begins after 7
    gathered = time_of(one_rank, *work, dict(sent_dp=3, sent_early=2))
    assert gathered.total == 9 + 1
    assert gathered.exposed == pytest.approx(1 / 10)
    tied = time_of(one_rank, *work, dict(sent_tied=20, sent_tp=2, optimizer_flops=4))
    assert tied.total == 9 + 20 / UNIT.pp + 2 / UNIT.tp + 4
    assert tied.computing == 9 + 4


def test_sums_of_each_stage_of_a_rank_leave_under_its_own_last_backward():
    """gpipe, a micro-batch, two stages a rank: rank 0 has its second stage's backward from 6 to 8
    and its first's from 10 to 12, rank 1 has its own from 4 to 6 and 8 to 10."""
    tables, work = tables_of(gpipe, 2, 2, 1), (dict(flops=1), dict(flops=2))
    assert time_of(tables, *work).total == 12
    assert time_of(tables, *work, dict(sent_dp=4, sent_early=4)).total == 12
    assert time_of(tables, *work, dict(sent_dp=12, sent_early=12)).total == 6 + 12


def test_what_tp_sends_beside_products_takes_time_where_it_lasts_longer():
    one_rank = tables_of(one_f_one_b, 1, 1, 1)
    sent = dict(sent_tp=6, sent_beside=4)  # 1 second that is waited for, 2 beside products
    assert time_of(one_rank, dict(flops=1), dict(flops=2, **sent)).total == 1 + 2 + 1
    assert time_of(one_rank, dict(flops=1), dict(flops=0.5, **sent)).total == 1 + 2 + 1
    waited = time_of(one_rank, dict(flops=1, sent_tp=2, sent_cp=8), dict(flops=2))
    assert (waited.total, waited.computing) == (1 + 1 + 2 + 2, 3)
    split = time_of(tables_of(zb_h1, 1, 1, 1), dict(flops=1), dict(flops=2, **sent), kind="I")
    assert split.total == 1 + 2 + 3 + 1  # nothing is left beside it


def test_a_stage_waits_for_what_has_not_come_in_time():
    """Two stages: F, a transfer, F, B, a transfer, B; with more micro-batches a transfer is beside
    other work on one side, and both are waited for where 1F1B sends one there and one back."""
    work = dict(flops=1), dict(flops=2)
    alone = time_of(tables_of(one_f_one_b, 2, 1, 1), *work, boundary=5)
    assert (alone.total, alone.computing) == (6 + 2 * 0.5, 6)
    many = [time_of(tables_of(one_f_one_b, 2, 1, m), *work, boundary=5).total for m in (10, 20)]
    assert many[1] - many[0] == pytest.approx(10 * (3 + 0.5))  # 2 x (pp - 1) / pp transfers each
    free = time_of(tables_of(one_f_one_b, 2, 1, 10), *work)
    assert free.exposed == 0


def test_kernels_collectives_and_memory_take_time():
    one_rank = tables_of(one_f_one_b, 1, 1, 1)
    told = time_of(one_rank, dict(flops=1, moved=20, kernels=100, collectives=10), dict(flops=2))
    assert told.computing == pytest.approx(3 + 2 + 100 * KERNEL)
    assert told.total == pytest.approx(3 + 2 + 100 * KERNEL + 10 * COLLECTIVE)


def test_links_are_those_of_where_ranks_lie():
    """tp's ranks are neighbours, then cp's, dp's and pp's; eight share a node, and each has a
    network adapter. A ring of several ranks of each node uses as many adapters."""
    gpu = GPUS["a100"]

    def links(**sizes):
        speed = Speed.of(gpu, "bfloat16", **dict(tp=1, pp=1, cp=1, dp=1) | sizes)
        return [round(each / 0.7e9) for each in (speed.tp, speed.cp, speed.dp, speed.pp)]

    assert links(tp=2, dp=4) == [300, 300, 300, 300]
    assert links(tp=8, dp=16)[2] == 25
    assert links(tp=4, dp=16)[2] == 50
    assert links(dp=64)[2] == 200
    assert links(tp=2, cp=4, dp=2)[1:3] == [300, 100]
    assert links(tp=4, cp=4)[1] == 50
    assert links(tp=4, pp=2)[3] == 300
    assert links(tp=8, pp=2)[3] == 25
    half = Speed.of(gpu, "float32", 1, 1, 1, 1).flops
    assert 2 * half == Speed.of(gpu, "bfloat16", 1, 1, 1, 1).flops


def test_a_meter_counts_what_kernels_read_and_write():
    a, b = (torch.empty(4, 4, dtype=torch.bfloat16, device=META) for _ in range(2))
    with Meter(ParallelContext(device=META)) as meter:
        a + b  # 32 bytes each: two read, one written
        a.add_(b)  # the same
        a.view(16)[:4].detach()  # views
        torch.empty_like(a)
        a @ b  # a product
    cost = meter.take()
    assert (cost.moved, cost.kernels, cost.flops) == (6 * 32, 3, 2 * 4**3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_goes_on_beside_products_by_hand(family):
    """Of a layer, in backward, under sequence parallelism: both column-parallel layers gather their
    input again and scatter its gradient beside products; both row-parallel ones gather theirs. The
    head is a column-parallel layer."""
    config = tiny_config(tied=False) if family == "gpt2" else find_config("llama-tiny")
    run = PlannedRun(micro_batch_size=2, global_batch_size=4, seq_length=16, dtype="float32")
    part = 4 * 2 * 16 * config.hidden_size / 2  # what a rank of two sends of an activation
    for cut, beside in ((True, 4), (False, 2 * 2)):  # an all-reduce sends twice as much
        layout = Layout(tp=2, sequence_parallel=cut)
        planner = Planner(config)
        (table,) = schedule_tables(layout, run)
        (costs,) = planner.costs(planner.build(place_in(layout, 0)), run, table)
        assert costs["F"].sent_beside == 0
        assert costs["B"].sent_beside == (beside * config.layers + beside // 2) * part


def test_a_zero_bubble_schedule_delays_the_weights_of_experts():
    """Of a stage in the middle: all products but attention's and the router's wait for W."""
    config = find_config("mixtral-tiny")
    run = PlannedRun(micro_batch_size=2, global_batch_size=8, seq_length=16, dtype="float32")
    layout, planner = Layout(pp=4, schedule="zb-h1"), Planner(config)
    model = planner.build(place_in(layout, 1))
    (costs,) = planner.costs(model, run, schedule_tables(layout, run)[1])
    tokens, hidden = 2 * 16, config.hidden_size
    projections = sum(entry.parameter.numel() for entry in model.entries() if "qkv" in entry.name)
    projections += hidden * hidden
    experts = config.experts_per_token * 3 * hidden * config.ffn_size
    assert costs["W"].flops == 2 * tokens * (projections + experts)
    gate_up = next(entry for entry in model.entries() if "gate_up" in entry.name)
    assert costs["W"].peak - costs["W"].held >= gate_up.parameter.nbytes
