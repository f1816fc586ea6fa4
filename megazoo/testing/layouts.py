"""The parallel layouts of a model."""

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES, family_of
from megazoo.models.rules import check_layout
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import CP_METHODS, Layout
from megazoo.parallel.schedule import SCHEDULES, placement_named_by
from megazoo.testing.ranks import GROUP_TIMEOUT


def context_of(layout: Layout) -> ParallelContext:
    """Create the context of a layout on the CPU, in a process group of that many ranks."""
    return ParallelContext.of_layout(layout, "cpu", GROUP_TIMEOUT)


def check_model(layout: Layout, config: Any) -> None:
    """Raise UserError if a model cannot be sharded or run in a layout."""
    if layout.sequence_parallel and layout.tp == 1:
        raise UserError(f"{layout}: sequence parallelism needs tp above 1")
    if layout.cp_method in CP_METHODS[1:] and layout.cp == 1:
        raise UserError(f"{layout}: {layout.cp_method} needs cp above 1")
    try:
        check_layout(FAMILIES[family_of(config)], config, layout)
    except UserError as error:
        raise UserError(f"{layout}: {error}") from None


def all_layouts(config: Any, ranks: int) -> list[Layout]:
    """Return all layouts of a model on at most `ranks` ranks, with all combinations of options.
    Sizes are powers of two.

    Other context-parallel methods are listed only without ZeRO and with the default schedule,
    because a method changes the communication of a layer, but neither of these. Layouts with ep
    are listed for models with experts.
    """
    sizes, layouts = [1 << n for n in range(ranks.bit_length()) if 1 << n <= ranks], []
    for tp, cp, pp, dp in product(sizes, repeat=4):
        if not 1 < tp * cp * pp * dp <= ranks:
            continue
        sp = [False, True] if tp > 1 else [False]
        zero: list[Literal[0, 1, 2, 3]] = [0, 1, 2, 3] if cp * dp > 1 else [0]
        plain = Layout(tp=tp, pp=pp, dp=dp, cp=cp)
        ways = [replace(plain, cp_method=method) for method in CP_METHODS[1:] if cp > 1]
        ways += [
            replace(plain, zero=stage, schedule=schedule, virtual_pp=virtual)
            for stage, (schedule, virtual) in product(zero, _ways_to_run(pp))
        ]
        experts = [size for size in sizes if dp * cp % size == 0 and hasattr(config, "experts")]
        for layout, sequence_parallel, ep in product(ways, sp, experts or [1]):
            layout = replace(layout, sequence_parallel=sequence_parallel, ep=ep)
            with suppress(UserError):
                check_model(layout, config)
                layouts.append(layout)
    return sorted(layouts, key=lambda layout: layout.ranks)


def _ways_to_run(pp: int) -> list[tuple[str, int]]:
    """Return pairs of a pipeline schedule and the stages per rank."""
    plain = Layout.schedule
    if pp == 1:
        return [(plain, 1)]
    others = [name for name in SCHEDULES if name != plain]
    stages = {name: 2 if placement_named_by(name) == "v" else 1 for name in (plain, *others)}
    return [*stages.items(), (plain, 2)]
