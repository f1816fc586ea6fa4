"""V-shaped schedules as tables: those of torch, and the published bubbles and memory. A stage is
half as large as with one stage per rank."""

from itertools import product

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

from megazoo.parallel.actions import Action, in_flight
from megazoo.parallel.schedule import tables_of, timeline
from megazoo.parallel.v_schedules import dualpipe_v, v_half, v_min, zb_v


def table_of_torch(schedule, rank, pp, m) -> list[Action]:
    """Return the table of the schedule of torch.distributed.pipelining, with its pairs and its full
    backwards split into their actions."""
    kinds = {
        "FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "IW",
    }  # fmt: skip
    of_torch = schedule.__new__(schedule)
    of_torch.pp_group_size, of_torch.num_stages, of_torch._n_microbatches = pp, 2 * pp, m
    of_torch.rank = rank
    table = []
    for action in filter(None, of_torch._calculate_single_rank_operations(rank)):
        for part in action.sub_actions or [action]:
            for kind in kinds[part.computation_type.name]:
                table.append(Action(kind, part.stage_index, part.microbatch_index))
    return table


@pytest.mark.parametrize("pp", range(1, 7))
def test_zb_v_and_dualpipe_v_are_the_tables_of_torch(pp):
    for rank, m in product(range(pp), [*range(1, 2 * pp + 3), 4 * pp]):
        assert zb_v(rank, pp, 2, m) == table_of_torch(ScheduleZBVZeroBubble, rank, pp, m), m
        if m >= 2 * pp:  # torch has no table for fewer
            assert dualpipe_v(rank, pp, 2, m) == table_of_torch(ScheduleDualPipeV, rank, pp, m), m


def bubble(schedule, pp, m) -> float:
    """Return the time of a batch minus the time of a rank's actions, with F = I = W = 1."""
    spans = timeline(tables_of(schedule, pp, 2, m)).values()
    return max(span.end for span in spans) - 6 * m


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("times", [2, 4])
def test_v_shaped_bubbles_are_those_published(pp, times):
    """That of 1F1B is (pp - 1) (F + B) of a rank with one stage, so 6 (pp - 1) here. v-half has
    half of it, v-min two thirds; zb-v and dualpipe-v have pp - 1, the start of the last rank."""
    m = times * pp
    for schedule in (zb_v, dualpipe_v):
        spans = timeline(tables_of(schedule, pp, 2, m))
        assert bubble(schedule, pp, m) == pp - 1  # rank pp - 1 starts at pp - 1
        for rank, table in enumerate(tables_of(schedule, pp, 2, m)):
            assert spans[table[0]].start == rank
            if schedule is zb_v:  # a rank is never idle between its first and last action
                assert spans[table[-1]].end - rank == 6 * m
    assert bubble(v_half, pp, m) <= 3 * (pp - 1)
    assert bubble(v_min, pp, m) <= 4 * (pp - 1)


@pytest.mark.parametrize("pp", [2, 3, 4, 7, 8, 16])
def test_v_shaped_memory_is_that_published(pp):
    """That of 1F1B is pp activations of a rank with one stage, so 2 pp here: zb-v has as much on
    every rank, dualpipe-v one more, v-half about half, v-min about a third."""
    for m in (pp, 2 * pp, 3 * pp):
        held = {
            s: max(map(in_flight, tables_of(s, pp, 2, m)))
            for s in (zb_v, v_half, v_min, dualpipe_v)
        }
        assert held[zb_v] == min(2 * pp, 2 * m)
        assert held[dualpipe_v] <= 2 * pp + 1
        assert held[v_half] <= pp + 2
        assert held[v_min] <= 2 * pp / 3 + 3
        assert held[v_min] <= held[v_half] <= held[zb_v]
