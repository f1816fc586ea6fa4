"""Find the layouts of a number of GPUs in which a run fits into memory."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, Literal

import torch

from megazoo.errors import UserError
from megazoo.models.base import Model
from megazoo.models.counts import parameter_count
from megazoo.parallel.layout import ONE_RANK, Layout
from megazoo.parallel.recompute import MODES
from megazoo.parallel.schedule import placement_named_by
from megazoo.planning.meter import Cost, boundary_bytes
from megazoo.planning.plan import Planner, RankPlan, bubble_and_time, schedule_tables
from megazoo.planning.ranks import place_in
from megazoo.planning.run import PlannedRun
from megazoo.planning.static import Static
from megazoo.planning.step_time import GPU, GPUS, NODE, Speed, step_time

LARGEST_TP = NODE
LARGEST_PP = 1024
LARGEST_VIRTUAL_PP = 4
# Settings of a layout that the search selects.
SEARCHED = ("tp", "pp", "cp", "dp", "ep", "virtual_pp", "sequence_parallel", "zero")
SHORTEST_PART = 1024  # tokens of a context-parallel rank


@dataclass(frozen=True)
class FoundLayout:
    """A layout that fits, with the maximum requirements of a rank.

    total: bytes of memory. sent_tp, sent_pp, sent_cp, sent_dp: bytes sent over each axis per step.
    bubble, step_flops: as bubble_of_stages and step_flops of a Plan. time: estimated seconds per
    step, by which layouts are ranked. exposed: share of it for communication that is not overlapped
    (see step_time.py).
    """

    layout: Layout
    recompute: str
    microbatches: int
    total: int
    bubble: float
    sent_tp: float
    sent_pp: float
    sent_cp: float
    sent_dp: float
    step_flops: float
    exposed: float
    time: float

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON, the sizes by the names of the flags."""
        sizes = {name: getattr(self.layout, name) for name in SEARCHED}
        return sizes | {name: value for name, value in vars(self).items() if name != "layout"}


def find_layouts(
    planner: Planner,
    gpus: int,
    memory: int,
    run: PlannedRun,
    gpu: GPU = GPUS["h100"],
    layout: Layout = ONE_RANK,
    progress: Callable[[int], object] = lambda _: None,
) -> Iterator[FoundLayout]:
    """Yield the layouts of `gpus` ranks that fit, in no particular order.

    The search covers these settings; all others stay as in `run` and `layout`:

    - tp: powers of two up to LARGEST_TP. Only the first tp rank is measured; its shard is the
      largest.
    - pp: after a pp fits without recomputation, at most twice the pp of the fastest layout.
    - cp: powers of two, until one fits without recomputation. A larger cp is yielded only if it
      needs less recomputation than a smaller one. No rank gets less than SHORTEST_PART tokens.
    - dp: the remaining ranks.
    - ep: powers of two that divide dp x cp and the number of experts.
    - virtual-pp: up to LARGEST_VIRTUAL_PP, if it divides the layers.
    - recompute: the least that fits.
    - Sequence parallelism and ZeRO-1: on if tp or dp x cp allow it, because they do not send more
      bytes than the collectives that they replace. ZeRO-2 and 3 only if nothing before them fits.

    Args:
        planner: Plans the layouts.
        gpus: Number of ranks.
        memory: Bytes of memory of each rank.
        run: The run; its recompute is replaced.
        gpu: GPU type for the estimate of the time.
        layout: Settings of the layouts that the search does not cover, such as the schedule.
        progress: Called after each layout with the number of layouts that are done: tried, or
            found to be unnecessary. It is at most `most_layouts`.

    Raises:
        UserError: If no layout could run.
    """
    if gpus < 1:
        raise UserError(f"gpus {gpus} must be at least 1")
    placed = placement_named_by(layout.schedule)
    smallest = replace(layout, tp=1, cp=1, dp=1, pp=1 if placed == "loop" else 2, virtual_pp=1)
    planner.check(smallest, replace(run, global_batch_size=run.micro_batch_size))
    least_memory = _weights_and_gradients(planner, run)
    counts = _layouts_to_try(planner.config, gpus, run.seq_length)
    before = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    for tp in (1 << n for n in range(LARGEST_TP.bit_length())):
        fastest, depth = math.inf, 0  # the time of the fastest, and its pp
        for pp in (pp for its_tp, pp in counts if its_tp == tp):
            if least_memory > gpus * memory:  # with ZeRO-3, all ranks share it
                continue
            done = before[tp, pp]
            least, cp = len(MODES), 1  # least: the recomputation that a smaller cp needs
            while least > 0 and gpus % (tp * pp * cp) == 0:
                if cp > 1 and run.seq_length < cp * SHORTEST_PART:
                    break
                sizes = {"tp": tp, "pp": pp, "cp": cp, "dp": gpus // (tp * pp * cp)}
                found = []
                for tried in _of_sizes(planner, layout, sizes, memory, run, gpu):
                    done += 1
                    progress(done)
                    found += [tried] if tried else []
                yield from (each for each in found if MODES.index(each.recompute) < least)
                least = min([least, *(MODES.index(each.recompute) for each in found)])
                fastest, depth = min([(fastest, depth), *((each.time, pp) for each in found)])
                cp *= 2
            if least == 0 and cp == 2 and pp >= 2 * depth:  # context parallelism is not needed
                break


def most_layouts(config: Any, gpus: int, seq_length: int) -> int:
    """Return the largest number of layouts that `find_layouts` tries."""
    return sum(_layouts_to_try(config, gpus, seq_length).values())


def _layouts_to_try(config: Any, gpus: int, seq_length: int) -> dict[tuple[int, int], int]:
    """Return the largest number of layouts to try for each pair of tp and pp, in the order of the
    search."""
    counts = {}
    for tp in (1 << n for n in range(LARGEST_TP.bit_length())):
        for pp in range(1, min(gpus, config.layers, LARGEST_PP) + 1):
            if gpus % (tp * pp):
                continue
            replicas = gpus // (tp * pp)
            sizes_of_cp = 1
            while not replicas % 2**sizes_of_cp and seq_length >= 2**sizes_of_cp * SHORTEST_PART:
                sizes_of_cp += 1
            of_virtual_pp = len(_sizes_of_virtual_pp(config.layers, pp))
            counts[tp, pp] = sizes_of_cp * of_virtual_pp * len(_sizes_of_ep(config, replicas))
    return counts


def _weights_and_gradients(planner: Planner, run: PlannedRun) -> int:
    """Return the minimum bytes that all ranks of a replica need together for weights and
    gradients."""
    all_is_trained = planner.attached is None and run.train_only is None
    gradient = torch.float32.itemsize if all_is_trained else 0
    itemsize = getattr(torch, run.dtype).itemsize
    return parameter_count(planner.config) * (itemsize + gradient)


def _of_sizes(
    planner: Planner,
    layout: Layout,
    sizes: dict[str, int],
    memory: int,
    run: PlannedRun,
    gpu: GPU,
) -> Iterator[FoundLayout | None]:
    """Yield a layout, or None if it does not fit, for each virtual-pp and ep. layout: with the
    other settings. sizes: tp, pp, cp and dp."""
    tp, pp, replicas = sizes["tp"], sizes["pp"], sizes["dp"] * sizes["cp"]
    chosen: dict[str, Any] = {**sizes, "sequence_parallel": tp > 1, "zero": int(replicas > 1)}
    stages: list[Literal[0, 1, 2, 3]] = [1, 2, 3] if replicas > 1 else [0]  # of ZeRO
    virtual = _sizes_of_virtual_pp(planner.config.layers, pp)
    for virtual_pp, ep in product(virtual, _sizes_of_ep(planner.config, replicas)):
        chosen |= {"virtual_pp": virtual_pp, "ep": ep}
        wanted = _supported(planner, layout, chosen, run)
        if wanted is None:
            yield None
            continue
        tried = (
            fitting_layout(
                planner, replace(wanted, zero=stage), replace(run, recompute=mode), memory, gpu
            )
            for stage, mode in product(stages, MODES)
        )
        yield next(filter(None, tried), None)


def _supported(
    planner: Planner, layout: Layout, chosen: dict[str, Any], run: PlannedRun
) -> Layout | None:
    """Return the layout with other sizes; None if it does not support the run."""
    try:
        wanted = replace(layout, **chosen)
        planner.check(wanted, run)
    except UserError:
        return None
    return wanted if wanted.virtual_pp == chosen["virtual_pp"] else None  # as the schedule needs


def _sizes_of_virtual_pp(layers: int, pp: int) -> list[int]:
    """Return the numbers of stages per rank to try."""
    several = range(2, LARGEST_VIRTUAL_PP + 1) if pp > 1 else ()
    return [1, *(virtual for virtual in several if layers % (pp * virtual) == 0)]


def _sizes_of_ep(config: Any, most: int) -> list[int]:
    """Return the powers of two that divide `most` and the number of experts of a model; 1 for a
    model without experts."""
    experts = getattr(config, "experts", 1)
    return [1 << n for n in range(most.bit_length()) if most % (1 << n) == experts % (1 << n) == 0]


def fitting_layout(
    planner: Planner,
    layout: Layout,
    run: PlannedRun,
    memory: float,
    gpu: GPU = GPUS["h100"],
) -> FoundLayout | None:
    """Return the layout if each rank fits into `memory` bytes, otherwise None. `Planner.check` must
    accept it."""
    tables = schedule_tables(layout, run)
    models: dict[tuple, Model] = {}  # by the key of equal stages
    ranks: list[RankPlan] = []
    statics: list[Static] = []
    actions: dict[tuple[str, int], Cost] = {}
    for pp_rank, table in enumerate(tables):
        ctx = place_in(layout, pp_rank)
        all_stages = planner.family.all_stages(planner.config, ctx)
        stages = [all_stages[number] for number in ctx.placement.stages_of(pp_rank)]
        alike = planner.alike(stages, ctx, run.train_only)
        if alike not in models:
            models[alike] = planner.build(ctx, run.train_only)
            if planner.static(models[alike], run).device_bytes > memory:
                return None
        costs = planner.costs(models[alike], run, table)
        rank = planner.rank_plan(models[alike], run, table, costs)
        if rank.total > memory:
            return None
        ranks.append(rank)
        statics.append(planner.static(models[alike], run))
        for stage, of_stage in zip(stages, costs, strict=True):
            actions |= {(kind, stage.index): cost for kind, cost in of_stage.items()}
    bubble, step_flops = bubble_and_time(tables, {key: c.flops for key, c in actions.items()})
    speed = Speed.of(gpu, run.dtype, layout.tp, layout.pp, layout.cp, layout.dp)
    sent = boundary_bytes(run, next(iter(models.values())))  # the same for all
    time = step_time(tables, actions, statics, sent, speed)
    return FoundLayout(
        layout=layout,
        recompute=run.recompute,
        microbatches=run.microbatches(layout.dp),
        total=max(rank.total for rank in ranks),
        bubble=bubble,
        sent_tp=max(rank.sent_tp for rank in ranks),
        sent_pp=max(rank.sent_pp for rank in ranks),
        sent_cp=max(rank.sent_cp for rank in ranks),
        sent_dp=max(rank.sent_dp for rank in ranks),
        step_flops=step_flops,
        exposed=time.exposed,
        time=time.total,
    )


def fastest_layouts(found: Iterable[FoundLayout]) -> list[FoundLayout]:
    """Return the fastest layout for each combination of tp, pp, cp and dp, over all virtual-pp and
    ep, sorted by time."""
    fastest: dict[tuple, FoundLayout] = {}
    for layout in sorted(found, key=lambda layout: layout.time):
        fastest.setdefault(layout.layout.sizes, layout)
    return list(fastest.values())
