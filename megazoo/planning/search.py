"""Find the layouts of a number of GPUs in which a run fits into their memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megazoo.cli.options import ParallelOptions, TrainingOptions
from megazoo.errors import UserError
from megazoo.models.base import Model
from megazoo.parallel.recompute import MODES
from megazoo.parallel.stages import stages_of
from megazoo.planning.plan import (
    Planner,
    RankPlan,
    bubble_and_time,
    microbatches_of,
    schedule_tables,
)

NODE = 8  # GPUs
LARGEST_TP = NODE
LARGEST_VIRTUAL_PP = 4
SHORTEST_PART = 1024  # tokens of a context-parallel rank
# FLOPs in the time of one byte sent, of an H100 at 500 TFLOP/s with 450 GB/s within a node and
# 50 GB/s outside. Ranks along cp may share a node.
FLOPS_A_BYTE = {"tp": 1_000, "pp": 10_000, "cp": 10_000, "dp": 10_000}


@dataclass(frozen=True)
class FoundLayout:
    """A layout that fits, with what a step takes of the rank that needs most.

    total: bytes of memory. sent_tp and so on: bytes sent over that axis. bubble, step_flops: as
    bubble_of_stages and step_flops of a Plan. time: step_flops, and as many more for each byte sent
    as FLOPS_A_BYTE says; layouts are ranked by it.
    """

    tp: int
    pp: int
    cp: int
    dp: int
    virtual_pp: int
    recompute: str
    sequence_parallel: bool
    zero: int
    microbatches: int
    total: int
    bubble: float
    sent_tp: float
    sent_pp: float
    sent_cp: float
    sent_dp: float
    step_flops: float
    time: float


def find_layouts(
    planner: Planner, gpus: int, memory: int, parallel: ParallelOptions, training: TrainingOptions
) -> Iterator[FoundLayout]:
    """Yield the layouts of `gpus` ranks of which each fits into `memory` bytes, in no order.

    Searched are tp (a power of two, at most LARGEST_TP), pp (no deeper than what fits without
    recomputation), dp, virtual-pp (at most LARGEST_VIRTUAL_PP, where it divides the layers), and
    recompute: the least that fits. Where a sequence is not so short that ranks would have less than
    SHORTEST_PART tokens, and fits with recomputation only or not at all, cp is searched, too:
    powers of two, until it fits without; those are told that fit with less recomputation. Sequence
    parallelism and ZeRO-1 send no more than what they replace, so they are on where there are ranks
    for them. The rest is as given. Of the tp ranks the first is looked at: if one has more, it
    does. Raises UserError for what no layout could run.
    """
    if gpus < 1:
        raise UserError(f"gpus {gpus} must be at least 1")
    one_step = replace(training, global_batch_size=training.micro_batch_size)
    one_rank = replace(parallel, tp=1, pp=1, virtual_pp=1, cp=1, stage_layers="balanced")
    planner.check(one_rank, one_step, 1)
    layers = planner.config.layers
    for tp in (1 << n for n in range(LARGEST_TP.bit_length())):
        for pp in range(1, min(gpus, layers) + 1):
            if gpus % (tp * pp):
                continue
            least, cp = len(MODES), 1  # least: the recomputation that a smaller cp needs
            while least > 0 and gpus % (tp * pp * cp) == 0:
                if cp > 1 and training.seq_length < cp * SHORTEST_PART:
                    break
                sizes = tp, pp, cp, gpus // (tp * pp * cp)
                found = list(_of_sizes(planner, sizes, memory, parallel, training))
                yield from (each for each in found if MODES.index(each.recompute) < least)
                least = min([least, *(MODES.index(each.recompute) for each in found)])
                cp *= 2
            if least == 0 and cp == 2:  # it does without context parallelism
                break


def _of_sizes(
    planner: Planner,
    sizes: tuple[int, int, int, int],
    memory: int,
    parallel: ParallelOptions,
    training: TrainingOptions,
) -> Iterator[FoundLayout]:
    """Yield the layouts that fit, one for each virtual-pp. sizes: tp, pp, cp and dp."""
    tp, pp, cp, dp = sizes
    layers = planner.config.layers
    virtual = [v for v in range(2, LARGEST_VIRTUAL_PP + 1) if pp > 1 and layers % (pp * v) == 0]
    for virtual_pp in (1, *virtual):
        layout = replace(
            parallel,
            tp=tp,
            pp=pp,
            virtual_pp=virtual_pp,
            cp=cp,
            sequence_parallel=tp > 1,
            zero=int(dp * cp > 1),
            stage_layers="balanced",
        )
        try:
            planner.check(layout, training, dp)
        except UserError:
            continue
        modes = (replace(training, recompute=mode) for mode in MODES)
        tried = (_fitting(planner, layout, mode, dp, memory) for mode in modes)
        least = next(filter(None, tried), None)
        if least:
            yield least


def _fitting(
    planner: Planner, parallel: ParallelOptions, training: TrainingOptions, dp: int, memory: int
) -> FoundLayout | None:
    """Return the layout if each rank fits into `memory` bytes, else None."""
    tables = schedule_tables(parallel, training, dp)
    models: dict[tuple, Model] = {}  # by what makes the stages of pipeline ranks alike
    ranks: list[RankPlan] = []
    flops: dict[tuple[str, int], float] = {}
    for pp_rank, table in enumerate(tables):
        ctx = planner.context(parallel, dp, pp_rank, 0)
        all_stages = planner.family.all_stages(planner.config, ctx)
        numbers = stages_of(pp_rank, parallel.pp, parallel.virtual_pp)
        stages = [all_stages[number] for number in numbers]
        alike = planner.alike(stages, ctx, training.train_only)
        if alike not in models:
            models[alike] = planner.build(parallel, dp, pp_rank, 0, training.train_only)
            if planner.static(models[alike], parallel, training).device_bytes > memory:
                return None
        costs = planner.costs(models[alike], parallel, training, table)
        rank = planner.rank_plan(models[alike], parallel, training, table, costs)
        if rank.total > memory:
            return None
        ranks.append(rank)
        for stage, of_stage in zip(stages, costs, strict=True):
            flops |= {(kind, stage.index): cost.flops for kind, cost in of_stage.items()}
    bubble, step_flops = bubble_and_time(tables, flops)
    sent = {axis: max(getattr(rank, f"sent_{axis}") for rank in ranks) for axis in FLOPS_A_BYTE}
    near = "tp" if parallel.tp * parallel.cp <= NODE else "cp"  # how ranks along cp are connected
    flops_a_byte = FLOPS_A_BYTE | {"cp": FLOPS_A_BYTE[near]}
    return FoundLayout(
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        dp=dp,
        virtual_pp=parallel.virtual_pp,
        recompute=training.recompute,
        sequence_parallel=bool(parallel.sequence_parallel),
        zero=parallel.zero,
        microbatches=microbatches_of(training, dp),
        total=max(rank.total for rank in ranks),
        bubble=bubble,
        sent_tp=sent["tp"],
        sent_pp=sent["pp"],
        sent_cp=sent["cp"],
        sent_dp=sent["dp"],
        step_flops=step_flops,
        time=step_flops + sum(sent[axis] * flops_a_byte[axis] for axis in sent),
    )
