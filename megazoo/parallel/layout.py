"""A parallel layout: the sizes of its axes and its switches, and its name, such as tp2pp2+sp."""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from megazoo.errors import UserError
from megazoo.parallel.placement import PLACEMENTS, Placement
from megazoo.parallel.schedule import SCHEDULES, placement_named_by
from megazoo.parallel.sizes import check_folded

# The axes of the mesh, slowest to fastest: tp ranks are neighbours, so that they are on one node.
AXES = ("pp", "dp", "cp", "tp")
# How attention communicates between cp ranks: see megazoo/layers/context_parallel.py.
CP_METHODS = ("allgather", "ulysses")
# Context-parallel methods that a name must contain: all except the default.
OTHER_METHODS = CP_METHODS[1:]
# Sizes in a layout's name, and their attributes.
SIZES = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "ep": "ep", "v": "virtual_pp"}


@dataclass(frozen=True)
class Layout:
    """How the work of a run is divided among ranks: sizes and switches.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dp: Data-parallel size.
        virtual_pp: Stages per rank. If the schedule needs two, 1 becomes 2.
        sequence_parallel: Use sequence parallelism. None: on CUDA only.
        zero: 1 for ZeRO-1.
        schedule: Pipeline schedule, which also determines the placement of the stages.
        cp: Context-parallel size.
        cp_method: One of CP_METHODS.
        ep: Expert-parallel size, folded into dp x cp.
        stage_layers: How layers are divided into stages: "balanced" by cost, "uniform" by number,
            or the number of layers of each stage, also as text: 5,6,6,5.
        folded: Names and sizes of further axes that are folded into dp x cp.

    Raises:
        UserError: The sizes do not fit together, or a name is unknown.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_pp: int = 1
    sequence_parallel: bool | None = False
    zero: int = 0
    schedule: str = "1f1b"
    cp: int = 1
    cp_method: str = CP_METHODS[0]
    ep: int = 1
    stage_layers: str | tuple[int, ...] = "balanced"
    folded: tuple[tuple[str, int], ...] = ()

    def __post_init__(self):
        folded = dict(self.folded)
        if folded.get("ep", 1) > 1:
            self._set(ep=folded.pop("ep"))
        self._set(folded=tuple(folded.items()))
        cuts = self.stage_layers
        if isinstance(cuts, str) and re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", cuts):
            self._set(stage_layers=tuple(int(word) for word in cuts.split(",")))
        if self.cp_method not in CP_METHODS:
            known = " or ".join(CP_METHODS)
            raise UserError(f"unknown cp-method {self.cp_method!r}: use {known}")
        check_folded(dict(self.folded_sizes), self.dp, self.cp, (*AXES, "token_axis"))
        in_a_v = placement_named_by(self.schedule) == "v"
        if in_a_v and self.virtual_pp == 1:
            self._set(virtual_pp=2)
        if self.virtual_pp > 1 and self.pp == 1:
            what = f"schedule {self.schedule}" if in_a_v else f"virtual-pp {self.virtual_pp}"
            raise UserError(f"{what} needs a pipeline: use pp 2 or more")
        _ = self.placement  # raises for another number of stages per rank

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @classmethod
    def named(cls, name: str) -> Self:
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

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes along AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def folded_sizes(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of all axes that are folded into dp x cp."""
        return (("ep", self.ep), *self.folded) if self.ep > 1 else self.folded

    @cached_property
    def placement(self) -> Placement:
        """Which rank of the pipeline has which stage."""
        return Placement(placement_named_by(self.schedule), self.pp, self.virtual_pp)

    def with_replicas(self, dp: int, **sizes: int) -> Self:
        """Return this layout with other sizes, without the folded axes that do not fit then."""
        tokens = dp * sizes.get("cp", self.cp)
        fits = {name: size for name, size in self.folded_sizes if tokens % size == 0}
        return replace(self, dp=dp, ep=fits.pop("ep", 1), folded=tuple(fits.items()), **sizes)

    def without_stages(self) -> Self:
        """Return this layout without pipeline parallelism."""
        usual = {name: getattr(Layout, name) for name in ("pp", "virtual_pp", "schedule")}
        return replace(self, **usual, stage_layers=Layout.stage_layers)

    def settled(self, device_type: str) -> Self:
        """Return this layout with sequence parallelism on or off, for a kind of device."""
        is_on = device_type == "cuda" if self.sequence_parallel is None else self.sequence_parallel
        return replace(self, sequence_parallel=is_on and self.tp > 1)


ONE_RANK = Layout()


def schedule_placed(placement: str | None, schedule: str | None = None) -> str:
    """Return the schedule, or 1f1b, or the first one with this placement of stages. UserError if
    the two do not fit."""
    name = schedule or Layout.schedule
    found = placement_named_by(name)
    if placement in (None, found):
        return name
    if placement not in PLACEMENTS:
        known = " or ".join(PLACEMENTS)
        raise UserError(f"unknown placement {placement!r}: use {known}")
    if schedule:
        raise UserError(f"schedule {name} needs placement {found}, not {placement}")
    return next(name for name in SCHEDULES if placement_named_by(name) == placement)


def switches() -> str:
    """Return the options of layouts as a text: "+sp, +zero, ..."."""
    return ", ".join(f"+{name}" for name in ("sp", "zero", *OTHER_METHODS, *SCHEDULES))
