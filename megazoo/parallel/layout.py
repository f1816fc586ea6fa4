"""A parallel layout: the sizes of its axes and its switches, and its name, such as tp2pp2+sp."""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Self

from megazoo.errors import UserError
from megazoo.parallel.placement import PLACEMENTS, Placement
from megazoo.parallel.schedule import SCHEDULES, placement_named_by, splits_backward
from megazoo.parallel.sizes import check_folded

# The axes of the mesh, slowest to fastest: tp ranks are neighbours, so that they are on one node.
AXES = ("pp", "dp", "cp", "tp")
# How attention communicates between cp ranks: see megazoo/layers/context_parallel.py.
CP_METHODS = ("allgather", "ulysses")
CPMethod = Literal["allgather", "ulysses"]


def size(letters: str, most: int = 2**20, **about: Any) -> Any:
    """Declare a field of a layout as a size.

    Args:
        letters: Letters before it in a layout's name.
        most: Largest value.
        about: Further attributes of `megazoo.settings.Setting`.
    """
    about = {"least": 1, "most": most, **about}
    return field(default=1, metadata={"letters": letters, "about": about})


def switch(default: Any, values: Callable[[], dict[str, Any]], **about: Any) -> Any:
    """Declare a field of a layout as a switch.

    Args:
        default: Its default.
        values: Returns its values by their words in a layout's name, such as {"sp": True}.
        about: Attributes of `megazoo.settings.Setting`.
    """
    return field(default=default, metadata={"values": values, "about": about})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the work of a run is divided among ranks: sizes and switches.

    Each field that is declared by `size` or `switch` appears in names, flags, records and plans,
    also one of a subclass that their functions get. The order of the fields is that of a name. The
    docstring under a field is the help of its flag.

    Raises:
        UserError: The sizes do not fit together, or a name is unknown.
    """

    tp: int = size(
        "tp",
        2**16,
        megatron="tensor-model-parallel-size",
        torchtitan="parallelism.tensor-parallel-degree",
    )
    """Tensor-parallel size: number of ranks that each layer is sharded over."""
    cp: int = size(
        "cp",
        2**16,
        megatron="context-parallel-size",
        torchtitan="parallelism.context-parallel-degree",
    )
    """Context-parallel size: number of ranks that each sequence is split over."""
    pp: int = size(
        "pp",
        1024,
        megatron="pipeline-model-parallel-size",
        torchtitan="parallelism.pipeline-parallel-degree",
    )
    """Pipeline-parallel size: number of ranks that the layers are partitioned over."""
    dp: int = size("dp")
    """Data-parallel size: number of replicas."""
    ep: int = size(
        "ep",
        2**16,
        megatron="expert-model-parallel-size",
        torchtitan="parallelism.expert-parallel-degree",
    )
    """Expert-parallel size: number of ranks that the experts of each layer are sharded over. These
    ranks are a part of dp x cp, which --ep must divide."""
    virtual_pp: int = size(
        "v",
        1024,
        megatron="num-virtual-stages-per-pipeline-rank; "
        "num-layers-per-virtual-pipeline-stage (stages per rank)",
    )
    """Number of stages per pipeline rank. Above 1, 1f1b becomes the interleaved schedule: a smaller
    bubble, but more communication. A schedule with two stages per rank sets 2."""
    sequence_parallel: bool | None = switch(False, lambda: {"sp": True})
    """Whether to use sequence parallelism. None: on CUDA only."""
    zero: Literal[0, 1, 2, 3] = switch(
        0,
        lambda: {"zero": 1, "zero2": 2, "zero3": 3},
        megatron="use-distributed-optimizer 1",
        torchtitan="parallelism.data-parallel-shard-degree 3",
    )
    """ZeRO stage. 1: shard the state and the update of the optimizer over the ranks of dp and cp;
    each rank has 1 / (dp x cp) of the state of its parameters. 2: also shard the sums of the
    gradients, and reduce them in the backward of each micro-batch. 3 (or --fsdp): also shard the
    parameters, and gather each layer when it is used. 0: each rank has all of these."""
    zero_gather: Literal["microbatch", "step"] = switch("microbatch", lambda: {"per-step": "step"})
    """How often --zero 2 and 3 reduce gradients, and --zero 3 gathers parameters. microbatch: in
    each micro-batch, which needs the least memory. Pipelines with several stages per rank or split
    backwards reduce gradients once per step. step: once per step, which sends the least."""
    cp_method: CPMethod = switch(
        "allgather", lambda: {name: name for name in CP_METHODS[1:]}, megatron="cp-comm-type"
    )
    """How attention works across context-parallel ranks. allgather: gather the keys and values of
    all ranks. ulysses: exchange heads (all-to-all), so that each rank attends over the full
    sequence with some of the heads."""
    schedule: str = switch("1f1b", lambda: {name: name for name in SCHEDULES})
    """Pipeline schedule, which also determines the placement of the stages."""
    stage_layers: str | tuple[int, ...] = "balanced"
    """How layers are divided into stages: "balanced" by cost, "uniform" by number, or the number of
    layers of each stage, also as text: 5,6,6,5."""
    folded: tuple[tuple[str, int], ...] = ()
    """Names and sizes of further axes that are folded into dp x cp."""

    def __post_init__(self):
        folded = dict(self.folded)
        if folded.get("ep", 1) != 1:
            self._set(ep=folded.pop("ep"))
        self._set(folded=tuple(folded.items()))
        cuts = self.stage_layers
        if isinstance(cuts, str) and re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", cuts):
            with suppress(ValueError):  # too many digits
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
        if self.zero < 2 and self.zero_gather != "microbatch":
            raise UserError(
                f"zero-gather {self.zero_gather} needs zero 2 or 3: use both, or neither"
            )
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
        letters, words = cls._letters(), cls._words()
        sizes, *options = name.split("+")
        found = re.findall(rf"({'|'.join(letters)})([1-9]\d*)", sizes)
        given: dict[str, Any] = {letters[letter]: int(size) for letter, size in found}
        is_name = name and "".join(map("".join, found)) == sizes and {*options} <= words.keys()
        if not is_name or len(given) < len(found):  # a size may be given twice: tp2tp4
            example = "".join(f"{letter}2" for letter in letters)
            raise UserError(
                f"unknown layout {name!r}: write sizes, {example}, then what is on: {switches(cls)}"
            )
        given |= dict(words[word] for word in options)
        if "ep" in given and "dp" not in given:
            given["dp"] = given["ep"] // math.gcd(given["ep"], given.get("cp", 1))
        try:
            return cls(**given)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self._letters().values()}
        sizes = [f"{k}{values[name]}" for k, name in self._letters().items() if values[name] > 1]
        on = [
            word
            for word, (name, value) in self._words().items()
            if getattr(self, name) == value != getattr(type(self), name)
        ]
        return "+".join(["".join(sizes) or "tp1", *on])

    @classmethod
    def _letters(cls) -> dict[str, str]:
        """Return the names of the sizes, by their letters."""
        found = {f.metadata.get("letters"): f.name for f in fields(cls)}
        return {letters: name for letters, name in found.items() if letters}

    @classmethod
    def _words(cls) -> dict[str, tuple[str, Any]]:
        """Return the names and values of the switches, by their words."""
        return {
            word: (f.name, value)
            for f in fields(cls)
            if "values" in f.metadata
            for word, value in f.metadata["values"]().items()
        }

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
        return (("ep", self.ep), *self.folded) if self.ep != 1 else self.folded

    @cached_property
    def placement(self) -> Placement:
        """Which rank of the pipeline has which stage."""
        return Placement(placement_named_by(self.schedule), self.pp, self.virtual_pp)

    @property
    def reduces_often(self) -> bool:
        """Whether ZeRO-2 reduces gradients in the backward of each micro-batch."""
        if self.zero < 2 or self.zero_gather == "step" or self.virtual_pp > 1:
            return False
        return not splits_backward(self.schedule, self.pp)

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


def switches(kind: type[Layout] = Layout) -> str:
    """Return the switches of layouts as a text: "+sp, +zero, ..."."""
    return ", ".join(f"+{word}" for word in kind._words())
