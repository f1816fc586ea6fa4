"""Parallel layouts and their names: tp2pp2, dp2+zero, tp2pp4v2+sp, pp2+zb-h1, cp2+ulysses, ep2."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megazoo.errors import UserError
from megazoo.models.registry import FAMILIES, family_of
from megazoo.parallel.context import CP_METHODS, ParallelContext
from megazoo.parallel.schedule import SCHEDULES, check_schedule, placement_named_by
from megazoo.testing.ranks import GROUP_TIMEOUT

# Sizes in a layout's name, and their attributes.
SIZES = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "ep": "ep", "v": "virtual"}
# Context-parallel methods that a name must contain: all except the default.
OTHER_METHODS = CP_METHODS[1:]


@dataclass(frozen=True)
class Layout:
    """A parallel layout: sizes and options.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dp: Data-parallel size.
        virtual: Stages per rank.
        sequence_parallel: Use sequence parallelism.
        zero: 1 for ZeRO-1.
        schedule: Pipeline schedule.
        cp: Context-parallel size.
        cp_method: One of CP_METHODS.
        ep: Expert-parallel size, folded into dp x cp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    cp: int = 1
    cp_method: str = CP_METHODS[0]
    ep: int = 1

    @classmethod
    def named(cls, name: str) -> "Layout":
        """Parse the name of a layout. If it has ep but not dp, dp is the smallest that fits.

        Raises:
            UserError: The name is invalid.
        """
        sizes, *options = name.split("+")
        axis = "|".join(SIZES)
        found = re.fullmatch(rf"(({axis})[1-9]\d*)*", sizes)
        pairs = re.findall(rf"({axis})(\d+)", sizes)
        given: dict[str, Any] = {SIZES[name]: int(size) for name, size in pairs}
        if len(given) < len(pairs):  # a size is given twice: tp2tp4
            found = None
        for option in options:
            if option == "sp":
                given["sequence_parallel"] = True
            elif option == "zero":
                given["zero"] = 1
            elif option in OTHER_METHODS:
                given["cp_method"] = option
            elif option in SCHEDULES:
                given["schedule"] = option
            else:
                found = None
        if not found or not name:
            raise UserError(
                f"unknown layout {name!r}: write sizes, tp2cp2pp2dp2ep2v2, then what is on: "
                f"{switches()}"
            )
        if "ep" in given and "dp" not in given:
            given["dp"] = given["ep"] // math.gcd(given["ep"], given.get("cp", 1))
        return cls(**given)

    def __str__(self) -> str:
        sizes = "".join(
            f"{axis}{getattr(self, name)}"
            for axis, name in SIZES.items()
            if getattr(self, name) > 1
        )
        on: list[Any] = [
            self.sequence_parallel and "sp",
            self.zero and "zero",
            self.cp_method != Layout.cp_method and self.cp_method,
            self.schedule != Layout.schedule and self.schedule,
        ]
        return "+".join([sizes or "tp1", *filter(None, on)])

    def check(self, config: Any) -> None:
        """Raise UserError if the model cannot be sharded or run in this layout."""
        if self.sequence_parallel and self.tp == 1:
            raise UserError(f"{self}: sequence parallelism needs tp above 1")
        if self.cp_method in OTHER_METHODS and self.cp == 1:
            raise UserError(f"{self}: {self.cp_method} needs cp above 1")
        family = FAMILIES[family_of(config)]
        try:
            check_schedule(self.schedule, self.pp, self.virtual)
            family.check(config, self.tp, self.pp, self.virtual)
            # raises if a layer has too few heads, or if experts can't be split evenly
            if self.cp_method in OTHER_METHODS or self.ep > 1:
                family.on_meta(config, self.virtual_context())
        except UserError as error:
            raise UserError(f"{self}: {error}") from None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    def context(self) -> ParallelContext:
        """Create the parallel context of the layout on the CPU, in a process group of that many
        ranks."""
        return ParallelContext.from_torch(
            self.tp,
            self.pp,
            self.dp,
            sequence_parallel=self.sequence_parallel,
            context_parallel_size=self.cp,
            context_parallel_method=self.cp_method,
            virtual_pipeline_size=self.virtual,
            placement=placement_named_by(self.schedule),
            folded=self._folded,
            device="cpu",
            timeout=GROUP_TIMEOUT,
        )

    def virtual_context(self) -> ParallelContext:
        """Create the context of rank 0 of the layout, without processes."""
        return ParallelContext.virtual(
            self.tp,
            self.pp,
            self.dp,
            cp=self.cp,
            cp_method=self.cp_method,
            sequence_parallel=self.sequence_parallel,
            virtual=self.virtual,
            placement=placement_named_by(self.schedule),
            folded=self._folded,
        )

    @property
    def _folded(self) -> dict[str, int]:
        """The axes that are folded into dp x cp."""
        return {"ep": self.ep} if self.ep > 1 else {}


def switches() -> str:
    """Return the options of layouts as a text: "+sp, +zero, ..."."""
    return ", ".join(f"+{name}" for name in ("sp", "zero", *OTHER_METHODS, *SCHEDULES))


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
        sp, zero = [False, True] if tp > 1 else [False], [0, 1] if cp * dp > 1 else [0]
        plain = Layout(tp, pp, dp, cp=cp)
        ways = [replace(plain, cp_method=method) for method in OTHER_METHODS if cp > 1]
        ways += [
            replace(plain, zero=stage, schedule=schedule, virtual=virtual)
            for stage, (schedule, virtual) in product(zero, _ways_to_run(pp))
        ]
        experts = [size for size in sizes if dp * cp % size == 0 and hasattr(config, "experts")]
        for layout, sequence_parallel, ep in product(ways, sp, experts or [1]):
            layout = replace(layout, sequence_parallel=sequence_parallel, ep=ep)
            with suppress(UserError):
                layout.check(config)
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
