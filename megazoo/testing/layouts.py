"""Name layouts: tp2pp2, dp2+zero, tp2pp4v2+sp, pp2+zb-h1."""

import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from megazoo.errors import UserError
from megazoo.models.registry import FAMILIES, family_of
from megazoo.parallel.schedule import SCHEDULES, check_schedule

# How a name writes each size, and the attribute of it.
SIZES = {"tp": "tp", "pp": "pp", "dp": "dp", "v": "virtual"}


@dataclass(frozen=True)
class Layout:
    """How a model is cut, by sizes, and how it is run.

    virtual: stages of a rank. zero: 1 for ZeRO-1.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    schedule: str = "1f1b"

    @classmethod
    def named(cls, name: str) -> "Layout":
        """Return the layout that a name stands for; UserError if it stands for none."""
        sizes, *options = name.split("+")
        found = re.fullmatch(r"((tp|pp|dp|v)[1-9]\d*)*", sizes)
        given = {SIZES[axis]: int(size) for axis, size in re.findall(r"(tp|pp|dp|v)(\d+)", sizes)}
        for option in options:
            if option == "sp":
                given["sequence_parallel"] = True
            elif option == "zero":
                given["zero"] = 1
            elif option in SCHEDULES:
                given["schedule"] = option
            else:
                found = None
        if not found or not name:
            on = ", ".join(f"+{option}" for option in ("sp", "zero", *SCHEDULES))
            raise UserError(
                f"unknown layout {name!r}: write sizes, tp2pp2dp2v2, then what is on: {on}"
            )
        return cls(**given)

    def __str__(self) -> str:
        sizes = "".join(
            f"{axis}{getattr(self, name)}"
            for axis, name in SIZES.items()
            if getattr(self, name) > 1
        )
        on = [
            self.sequence_parallel and "sp",
            self.zero and "zero",
            self.schedule != Layout.schedule and self.schedule,
        ]
        return "+".join([sizes or "tp1", *filter(None, on)])

    def check(self, config) -> None:
        """Raise UserError if a model can't be cut, or run, in this layout."""
        if self.sequence_parallel and self.tp == 1:
            raise UserError(f"{self}: sequence parallelism needs tp above 1")
        try:
            check_schedule(self.schedule, self.pp, self.virtual)
            FAMILIES[family_of(config)].check(config, self.tp, self.pp, self.virtual)
        except UserError as error:
            raise UserError(f"{self}: {error}") from None

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.tp * self.pp * self.dp


def all_layouts(config, ranks: int) -> list[Layout]:
    """Return the layouts, of powers of two, into which a model can be cut on at most so many ranks;
    each with all that can be on."""
    sizes, layouts = [1 << n for n in range(ranks.bit_length()) if 1 << n <= ranks], []
    for tp, pp, dp in product(sizes, repeat=3):
        if not 1 < tp * pp * dp <= ranks:
            continue
        sp, zero = [False, True] if tp > 1 else [False], [0, 1] if dp > 1 else [0]
        for on in product(sp, zero, _ways_to_run(pp)):
            sequence_parallel, zero_stage, (schedule, virtual) = on
            layout = Layout(tp, pp, dp, virtual, sequence_parallel, zero_stage, schedule)
            with suppress(UserError):
                layout.check(config)
                layouts.append(layout)
    return sorted(layouts, key=lambda layout: layout.ranks)


def _ways_to_run(pp: int) -> list[tuple[str, int]]:
    """Return the schedules of a pipeline, each with the stages of a rank."""
    plain = Layout.schedule
    if pp == 1:
        return [(plain, 1)]
    others = [name for name in SCHEDULES if name != plain]
    return [(name, 1) for name in (plain, *others)] + [(plain, 2)]
