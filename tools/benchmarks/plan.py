"""What planning takes, per rank, of a large world and of a small one."""

from collections.abc import Iterator

from benchmarks.common import Result, Setup, alone, seconds_in_turn

PRESET, TP = "gpt3-175b", 8
LARGE, SMALL = (16, 32), (4, 2)  # pp, dp


def cases(setup: Setup) -> Iterator[Result]:
    large, small = (TP * pp * dp for pp, dp in (LARGE, SMALL))
    found = alone(milliseconds_a_rank, setup.pairs)
    yield Result(f"plan {PRESET}, a rank of {large:,}, against a rank of {small}", *found, (), "ms")


def milliseconds_a_rank(pairs: int) -> list[list[float]]:
    from megazoo.cli.options import ParallelOptions, TrainingOptions
    from megazoo.models.registry import find_config
    from megazoo.planning.plan import Planner

    def planning(pp: int, dp: int):
        training = TrainingOptions(
            micro_batch_size=1, global_batch_size=1536, seq_length=2048, dtype="bfloat16"
        )
        return lambda: Planner(find_config(PRESET)).plan(
            ParallelOptions(tp=TP, pp=pp), training, dp
        )

    seconds = seconds_in_turn([planning(*LARGE), planning(*SMALL)], pairs)
    worlds = (TP * pp * dp for pp, dp in (LARGE, SMALL))
    return [
        [1e3 * each / world for each in side] for side, world in zip(seconds, worlds, strict=True)
    ]
