"""Compare the planning time per rank of a large world with that of a small one."""

from collections.abc import Iterator

from benchmarks.results import Result, Setup
from benchmarks.turns import alone, seconds_in_turn

PRESET, TP = "gpt3-175b", 8
LARGE, SMALL = (16, 32), (4, 2)  # pp, dp


def cases(setup: Setup) -> Iterator[Result]:
    large, small = (TP * pp * dp for pp, dp in (LARGE, SMALL))
    ours, reference = alone(milliseconds_a_rank, setup.pairs)
    name = f"plan {PRESET}, a rank of {large:,}, against a rank of {small}"
    yield Result(name, ours, reference, unit="ms")


def milliseconds_a_rank(pairs: int) -> list[list[float]]:
    """Return the milliseconds per rank for each world and run."""
    from megazoo.models.registry import find_config
    from megazoo.parallel.layout import Layout
    from megazoo.planning import PlannedRun, Planner

    run = PlannedRun(micro_batch_size=1, global_batch_size=1536, seq_length=2048, dtype="bfloat16")

    def plan(pp: int, dp: int):
        return Planner(find_config(PRESET)).plan(Layout(tp=TP, pp=pp, dp=dp), run)

    seconds = seconds_in_turn([lambda: plan(*LARGE), lambda: plan(*SMALL)], pairs)
    worlds = [TP * pp * dp for pp, dp in (LARGE, SMALL)]
    return [
        [1e3 * each / world for each in side] for side, world in zip(seconds, worlds, strict=True)
    ]
