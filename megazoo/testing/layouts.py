"""Layouts by name: tp2pp2, dp2+zero, tp2pp4v2+sp, pp2+zb-h1."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from megazoo.errors import UserError
from megazoo.models.registry import FAMILIES, family_of
from megazoo.parallel.schedule import SCHEDULES, check_schedule

SIZES = {"tp": "tp", "pp": "pp", "dp": "dp", "v": "virtual"}


@dataclass(frozen=True)
class Layout:
    """How a model is cut, and how it is run: sizes, then what is on."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    schedule: str = "1f1b"

    @classmethod
    def named(cls, name: str) -> "Layout":
        """The layout that a name says; UserError for one that says none."""
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
            self.schedule != "1f1b" and self.schedule,
        ]
        return "+".join([sizes or "tp1", *filter(None, on)])

    def check(self, config) -> None:
        """Raise UserError if a model can't be cut, or run, so."""
        if self.sequence_parallel and self.tp == 1:
            raise UserError(f"{self}: sequence parallelism needs tp above 1")
        try:
            check_schedule(self.schedule, self.pp, self.virtual)
            FAMILIES[family_of(config)].check(config, self.tp, self.pp, self.virtual)
        except UserError as error:
            raise UserError(f"{self}: {error}") from None

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


def all_layouts(config, ranks: int) -> list[Layout]:
    """The layouts of powers of two on at most so many ranks, with all that can be on, into which a
    model can be cut."""
    sizes, layouts = [1 << n for n in range(ranks.bit_length()) if 1 << n <= ranks], []
    for tp, pp, dp in product(sizes, repeat=3):
        if not 1 < tp * pp * dp <= ranks:
            continue
        others = [{"schedule": name} for name in SCHEDULES if name != Layout.schedule]
        ways = [{}, *others, {"virtual": 2}] if pp > 1 else [{}]
        for sp, zero, way in product((False, True)[: 1 + (tp > 1)], (0, 1)[: 1 + (dp > 1)], ways):
            layout = replace(Layout(tp, pp, dp, sequence_parallel=sp, zero=zero), **way)
            with suppress(UserError):
                layout.check(config)
                layouts.append(layout)
    return sorted(layouts, key=lambda layout: layout.ranks)
