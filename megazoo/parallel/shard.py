"""Sharding of parameters as arithmetic: the boxes of a global tensor that each rank holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from megazoo.errors import UserError
from megazoo.parallel.axes import Axis
from megazoo.parallel.context import ParallelContext

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension
# The (size, rank) of a rank along each axis over which parameters are sharded, by axis name.
# An axis that is missing has one rank. For a context: `ctx.place`.
Place = Mapping[str, tuple[int, int]]
ALIGNED = 128  # features: GPUs multiply matrices faster if their sizes are multiples of this


class Cut(NamedTuple):
    """A rank's shard of one part: its start in the global tensor and in the rank's, and its length.

    owned: whether this rank's copy counts in sums and checkpoints. For a replicated unit only the
    first rank that holds it has True.
    """

    global_start: int
    local_start: int
    length: int
    owned: bool = True


@dataclass(frozen=True)
class Shard:
    """Describe how dimension `dim` of a parameter is split over the ranks of an axis.

    The dimension consists of `parts`, one after the other, and every rank holds its shard of each:
    one part for a plain column or row split, three for fused QKV (q, k, v), two for gate and up.
    Each part is split between units, e.g. heads. If the ranks do not divide the number of units,
    the first ranks hold one more, so nothing is padded. Features that fill no unit go to the first
    rank without an additional unit: 1,283 features in units of 128 are ten units and 3 features,
    and three ranks have 512, 387 and 384. The first rank always has the most. If there are fewer
    units than ranks (and they divide the ranks), each is replicated.

    Args:
        dim: the dimension.
        parts: sizes of the parts in the global tensor.
        units: features per unit, for each part; default: 1.
        axis: name of the axis: "tp", or one that is folded into dp x cp (see context.py).

    Example:
        Shard(0, (7,)).local_sizes(2, 0)  # [4]: rank 0 of 2
    """

    dim: int
    parts: tuple[int, ...]
    units: tuple[int, ...] = ()
    axis: str = "tp"

    @property
    def all_units(self) -> tuple[int, ...]:
        """Features per unit, for each part."""
        return self.units or (1,) * len(self.parts)

    def cuts(self, size: int, rank: int) -> list[Cut]:
        """Return the shard of each part that a rank holds. size: of the axis. rank: along it."""
        cuts, global_start, local_start = [], 0, 0
        for part, unit, shared in zip(
            self.parts, self.all_units, self.replicated(size), strict=True
        ):
            count = part // unit
            if shared:
                replicas = size // count
                start, length, owned = rank // replicas * unit, unit, rank % replicas == 0
            else:
                (each, more), rest = divmod(count, size), part - count * unit
                start = (rank * each + min(rank, more)) * unit + rest * (rank > more)
                length, owned = (each + (rank < more)) * unit + rest * (rank == more), True
            cuts.append(Cut(global_start + start, local_start, length, owned))
            global_start += part
            local_start += length
        return cuts

    def replicated(self, size: int) -> list[bool]:
        """Return, for each part, whether several ranks hold each unit."""
        return [part // unit < size for part, unit in zip(self.parts, self.all_units, strict=True)]

    def local_sizes(self, size: int, rank: int) -> list[int]:
        """Return the sizes of a rank's shards, one per part."""
        return [cut.length for cut in self.cuts(size, rank)]

    def sizes_of_ranks(self, size: int) -> list[int]:
        """Return the local size of the dimension on each rank, over all parts."""
        return [sum(self.local_sizes(size, rank)) for rank in range(size)]

    def check(self, size: int, what: str) -> None:
        """Raise UserError if a part has too few units for the ranks, and can't be replicated
        evenly. what: name of the units in the error, in the plural, e.g. "outputs"."""
        replicated = self.replicated(size)
        for part, unit, shared in zip(self.parts, self.all_units, replicated, strict=True):
            if shared and unit == 1:
                raise UserError(
                    f"{part} {what} can't be split over {self.axis} {size}: "
                    f"use {self.axis} of at most {part}"
                )
            if shared and (part % unit or not part or size % (part // unit)):
                raise UserError(
                    f"{part} {what} in units of {unit} can't be split over {self.axis} {size}, "
                    "nor replicated evenly"
                )


def nearly_even(count: int, tp_size: int) -> bool:
    """Return whether `count` items can be distributed so that no rank has more than 1.25 times the
    average: 25 over 2 ranks can (13 and 12), 4 over 3 can't (2, 1 and 1)."""
    return count >= tp_size and -(-count // tp_size) * tp_size <= 1.25 * count


def units_for(parts: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
    """Return the units in which features outside of heads are split.

    The units of a part depend only on its size and on tp, so layers of equal sizes are split in the
    same way. If tp divides the part, the units are single features, and all ranks have the same
    number. Otherwise they are groups of ALIGNED features, if no rank then has more than 1.25 times
    the average. Otherwise they are single features, and ranks differ by at most one.
    """

    def unit_for(part: int) -> int:
        if part % tp_size == 0 or part // ALIGNED < tp_size:
            return 1
        most = Shard(0, (part,), (ALIGNED,)).local_sizes(tp_size, 0)[0]
        return ALIGNED if most <= 1.25 * part / tp_size else 1

    units = tuple(map(unit_for, parts))
    return units if set(units) != {1} else ()


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, and its start in the local tensor. owned: as in Cut."""

    box: Box
    offset: tuple[int, ...]
    owned: bool = True

    def index(self, box: Box | None = None) -> tuple[slice, ...]:
        """Return the index of `box` in the local tensor. box: a part of this piece; default: the
        whole piece."""
        pairs = zip(box or self.box, self.box, self.offset, strict=True)
        return tuple(
            slice(start - own + offset, stop - own + offset)
            for (start, stop), (own, _), offset in pairs
        )

    def in_rows(self, start: int, stop: int) -> "Piece | None":
        """Return the part of this piece in rows start to stop of the local tensor, as a piece of
        only those rows, or None."""
        (begin, end), first = self.box[0], self.offset[0]
        low, high = max(start, first), min(stop, first + end - begin)
        rows = (begin + low - first, begin + high - first)
        return (
            Piece((rows, *self.box[1:]), (low - start, *self.offset[1:]), self.owned)
            if low < high
            else None
        )


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes of one tensor, or None."""
    box = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def in_parts(box: Box, most: int) -> list[Box]:
    """Split a box into boxes of at most `most` elements."""
    if len(box) > 2:
        (start, stop), *rest = box
        inner = in_parts(tuple(rest), most)
        return [((index, index + 1), *part) for index in range(start, stop) for part in inner]
    (top, bottom), *columns = box
    left, right = columns[0] if columns else (0, 1)
    width = min(right - left, most)
    height = max(1, most // max(1, width))
    return [
        ((row, min(row + height, bottom)), (column, min(column + width, right)))[: len(box)]
        for row in range(top, bottom, height)
        for column in range(left, right, width)
    ]


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


@dataclass(frozen=True)
class ParameterSpec:
    """Describe a parameter independently of the layout: global shape, shards and initial
    distribution.

    Initial values are mean + std * N(0, 1); std 0 is the constant mean.

    Args:
        shape: global shape.
        shards: its shards, over different dimensions and axes: a tuple, one Shard, or None. The
            parameter is replicated over all other axes.
        mean, std: of the initial values.
        bound: if not 0, initial values are uniform between -bound and bound instead.
        partial: whether the backward of each tp rank gives only a part of the gradient of a
            replicated parameter, in every layout.
        plain: whether the parameter is not in a ShardedModule; its module then draws its initial
            values.
        added: whether it was attached to a model in addition to the model's parameters.
        is_state: whether its layer updates it, without a gradient. It is never trained, and fp32 in
            every model.
        decays: whether optimizers apply weight decay to it; default: whether it has two or more
            dimensions.
    """

    shape: tuple[int, ...]
    shards: Any = ()  # a tuple of Shards after __init__
    mean: float = 0.0
    std: float = 0.0
    bound: float = 0.0
    partial: bool = False
    plain: bool = False
    added: bool = False
    is_state: bool = False
    decays: bool | None = None

    def __post_init__(self):
        shards = self.shards
        if not isinstance(shards, tuple):
            shards = (shards,) if shards else ()
        decays = len(self.shape) > 1 if self.decays is None else self.decays
        for name, value in (("shards", shards), ("decays", decays)):
            object.__setattr__(self, name, value)  # of a frozen dataclass
        for what in ("dim", "axis"):
            if len({getattr(shard, what) for shard in shards}) < len(shards):
                raise UserError(f"a parameter is sharded twice over the same {what}: {shards}")

    @property
    def shard(self) -> Shard | None:
        """Its shard over tp, or None."""
        return self.shard_over("tp")

    def shard_over(self, axis: str) -> Shard | None:
        """Return its shard over an axis, or None."""
        return next((shard for shard in self.shards if shard.axis == axis), None)

    def shards_in(self, ctx: ParallelContext) -> tuple[Shard, ...]:
        """Return its shards over tp, and over the folded axes of a context that have several
        ranks."""
        sizes = {"tp": ctx.tp_size, **dict(ctx.layout.folded_sizes)}
        return tuple(s for s in self.shards if s.axis == "tp" or sizes.get(s.axis, 1) > 1)

    def replicas(self, ctx: ParallelContext) -> Axis:
        """Return the ranks with the same shard and different tokens, over which its gradient is
        summed."""
        over = (ctx.folded[shard.axis] for shard in self.shards if shard.axis in ctx.folded)
        return next((axis.replicas for axis in over if axis.size > 1), ctx.token_axis)

    def local_shape(self, place: Place) -> tuple[int, ...]:
        """Return the shape of one rank's tensor."""
        shape = list(self.shape)
        for shard in self.shards:
            shape[shard.dim] = sum(shard.local_sizes(*place.get(shard.axis, (1, 0))))
        return tuple(shape)

    def shard_text(self, place: Place) -> str:
        """Describe one rank's shards: "shard 1 of 2 (dim 0)" for the first rank; "" for a full
        parameter."""
        texts = []
        for shard in self.shards:
            size, rank = place.get(shard.axis, (1, 0))
            if tuple(shard.local_sizes(size, rank)) != shard.parts:
                axis = "" if shard.axis == "tp" else f"{shard.axis} "
                texts.append(f"{axis}shard {rank + 1} of {size} (dim {shard.dim})")
        return ", ".join(texts)

    def has_partial_gradient(self, ctx: ParallelContext) -> bool:
        """Return whether backward on one rank gives only a part of the gradient.

        That is the case for units that several tp ranks hold for different heads. For replicated
        parameters, it is the case if they are `partial`, and under sequence parallelism, where
        ranks have different parts of the sequence.
        """
        if self.shard is not None:
            return any(self.shard.replicated(ctx.tp_size))
        return ctx.sequence_parallel or (self.partial and ctx.tp_size > 1)

    def pieces(self, place: Place) -> list[Piece]:
        """Return the boxes of the global tensor that a rank holds, with their positions in its
        tensor. Of a parameter that is not sharded over tp, only the copy of the first tp rank is
        owned."""
        counts = self.shard is not None or place.get("tp", (1, 0))[1] == 0
        whole = [Cut(0, 0, size) for size in self.shape]
        by_dim = {s.dim: s.cuts(*place.get(s.axis, (1, 0))) for s in self.shards}
        pieces = []
        for cuts in product(*(by_dim.get(dim, [cut]) for dim, cut in enumerate(whole))):
            box = tuple((cut.global_start, cut.global_start + cut.length) for cut in cuts)
            owned = counts and all(cut.owned for cut in cuts)
            pieces.append(Piece(box, tuple(cut.local_start for cut in cuts), owned))
        return pieces
