"""Sharding of parameters as arithmetic: which boxes of a global tensor each rank holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from megazoo.errors import UserError
from megazoo.parallel.axes import Axis
from megazoo.parallel.context import ParallelContext

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension
# Where a rank lies along axes over which parameters are cut: (size, rank), by the axis's name. One
# that is not there has one rank. That of a context is `ctx.place`.
Place = Mapping[str, tuple[int, int]]
ALIGNED = 128  # features: matrix products of GPUs are faster where a rank has a multiple of them


class Cut(NamedTuple):
    """A rank's share of one part: where it starts in the global tensor and in the rank's, and how
    long it is.

    owned: this rank's copy is the one that counts; False for all but the first rank that holds a
    replicated unit.
    """

    global_start: int
    local_start: int
    length: int
    owned: bool = True


@dataclass(frozen=True)
class Shard:
    """A tensor whose dimension `dim` is `parts` fused one after the other, each cut over the
    ranks of an axis.

    A plain column or row cut has one part; a fused QKV has three (q, k, v), gate/up has two: every
    rank then holds its share of each. A part is cut between units of so many features (a head, say;
    1 by default). Where the ranks don't divide their number, the first ranks hold one unit more, so
    nothing is ever padded: the vocabulary is cut like anything else. Features that fill no unit go
    to the first rank that has not one unit more: of 1,283 features in units of 128, which are ten
    and 3, three ranks have 512, 387 and 384. The first rank always has the most. Where the ranks
    exceed the number of units (and are a multiple), each is replicated over ranks / number of them.

    axis: the name of the axis, tp or one that is folded into dp x cp (see context.py).
    """

    dim: int
    parts: tuple[int, ...]
    units: tuple[int, ...] = ()
    axis: str = "tp"

    @property
    def all_units(self) -> tuple[int, ...]:
        """Features of a unit, part by part."""
        return self.units or (1,) * len(self.parts)

    def cuts(self, size: int, rank: int) -> list[Cut]:
        """The rank's share of each part."""
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
        """Whether several ranks hold each unit, part by part."""
        return [part // unit < size for part, unit in zip(self.parts, self.all_units, strict=True)]

    def local_sizes(self, size: int, rank: int) -> list[int]:
        """The lengths of the rank's shares of the parts."""
        return [cut.length for cut in self.cuts(size, rank)]

    def sizes_of_ranks(self, size: int) -> list[int]:
        """What each rank has of the dimension, its shares of all parts together."""
        return [sum(self.local_sizes(size, rank)) for rank in range(size)]

    def check(self, size: int, what: str) -> None:
        """Raise UserError if a part has too few units for the ranks, and the ranks can't share out
        copies of them evenly. what: what is cut, in the plural, for the error: "outputs", say."""
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
    """Say whether so many things, none of them cut, can be shared so that no rank has over a
    quarter more than its share: 25 over 2 ranks can (13 and 12), 4 over 3 can't (2, 1 and 1)."""
    return count >= tp_size and -(-count // tp_size) * tp_size <= 1.25 * count


def units_for(parts: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
    """Choose the units in which features that belong to no head are cut. Those of a part depend on
    its size and on tp alone, so that layers of equal sizes are cut alike.

    Single features where tp divides the part, so that all ranks have as many. Else ALIGNED of them,
    if no rank then has over a quarter more than its share; else single features, and ranks differ
    by one.
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
    """A box of a global tensor, and where it starts in the tensor of the one who holds it. owned:
    as in Cut."""

    box: Box
    offset: tuple[int, ...]
    owned: bool = True

    def index(self, box: Box | None = None) -> tuple[slice, ...]:
        """The index, in the holder's tensor, of `box` (a part of this piece; the whole piece by
        default)."""
        pairs = zip(box or self.box, self.box, self.offset, strict=True)
        return tuple(
            slice(start - own + offset, stop - own + offset)
            for (start, stop), (own, _), offset in pairs
        )

    def in_rows(self, start: int, stop: int) -> "Piece | None":
        """What of it lies in rows start to stop of the holder's tensor, as a piece of those rows
        alone."""
        (begin, end), first = self.box[0], self.offset[0]
        low, high = max(start, first), min(stop, first + end - begin)
        rows = (begin + low - first, begin + high - first)
        return (
            Piece((rows, *self.box[1:]), (low - start, *self.offset[1:]), self.owned)
            if low < high
            else None
        )


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share, or None."""
    box = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def in_parts(box: Box, most: int) -> list[Box]:
    """Cut a box into some of at most so many elements."""
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
    """The number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


@dataclass(frozen=True, init=False)
class ParameterSpec:
    """What a parameter is, whatever the layout: its global shape, its cuts, and its initial
    distribution.

    shards: its cuts, each along another dimension and over another axis; one Shard may stand for
    itself, and None for none. It is the same on all ranks of an axis that is not named.
    Initial values are mean + std * N(0, 1); std 0 is the constant mean. bound: they are drawn
    evenly from -bound to bound instead. partial: of what every tp rank has, the backward of each
    gives only a part of the gradient, in whatever layout. plain: the parameter is of no
    ShardedModule; its own module draws its initial values. added: it was attached to a model beside
    the model's own.
    """

    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    mean: float
    std: float
    bound: float
    partial: bool
    plain: bool
    added: bool

    def __init__(
        self,
        shape: tuple[int, ...],
        shards: tuple[Shard, ...] | Shard | None = (),
        mean: float = 0.0,
        std: float = 0.0,
        bound: float = 0.0,
        partial: bool = False,
        plain: bool = False,
        added: bool = False,
    ):
        if not isinstance(shards, tuple):
            shards = (shards,) if shards else ()
        values = (shape, shards, mean, std, bound, partial, plain, added)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)  # of a frozen dataclass
        for what in ("dim", "axis"):
            if len({getattr(shard, what) for shard in shards}) < len(shards):
                raise UserError(f"a parameter is cut twice by one {what}: {shards}")

    @property
    def shard(self) -> Shard | None:
        """Its cut over tp."""
        return self.shard_over("tp")

    def shard_over(self, axis: str) -> Shard | None:
        """Its cut over an axis; None if it has none."""
        return next((shard for shard in self.shards if shard.axis == axis), None)

    def shards_in(self, ctx: ParallelContext) -> tuple[Shard, ...]:
        """Its cuts over tp, and over the axes of several ranks that are folded in a context."""
        sizes = {"tp": ctx.tp_size, **dict(ctx.folded_sizes)}
        return tuple(s for s in self.shards if s.axis == "tp" or sizes.get(s.axis, 1) > 1)

    def replicas(self, ctx: ParallelContext) -> Axis:
        """The ranks with the same of it and other tokens, over which its gradient is summed."""
        over = (ctx.folded[shard.axis] for shard in self.shards if shard.axis in ctx.folded)
        return next((axis.replicas for axis in over if axis.size > 1), ctx.token_axis)

    def local_shape(self, place: Place) -> tuple[int, ...]:
        """The shape of one rank's tensor."""
        shape = list(self.shape)
        for shard in self.shards:
            shape[shard.dim] = sum(shard.local_sizes(*place.get(shard.axis, (1, 0))))
        return tuple(shape)

    def shard_text(self, place: Place) -> str:
        """Describe one rank's shards: "shard 1 of 2 (dim 0)", the first rank's; "" of what it has
        whole."""
        texts = []
        for shard in self.shards:
            size, rank = place.get(shard.axis, (1, 0))
            if tuple(shard.local_sizes(size, rank)) != shard.parts:
                axis = "" if shard.axis == "tp" else f"{shard.axis} "
                texts.append(f"{axis}shard {rank + 1} of {size} (dim {shard.dim})")
        return ", ".join(texts)

    def has_partial_gradient(self, ctx: ParallelContext) -> bool:
        """Whether backward on one rank gives only a part of the gradient: of units that several tp
        ranks hold for different heads; of what all ranks hold, if it is `partial`, and under
        sequence parallelism, where they have different parts of the sequence."""
        if self.shard is not None:
            return any(self.shard.replicated(ctx.tp_size))
        return ctx.sequence_parallel or (self.partial and ctx.tp_size > 1)

    def pieces(self, place: Place) -> list[Piece]:
        """The boxes of the global tensor that a rank holds, and where they lie in its own. Of what
        is not cut over tp, the first tp rank's copy is the one that counts."""
        counts = self.shard is not None or place.get("tp", (1, 0))[1] == 0
        whole = [Cut(0, 0, size) for size in self.shape]
        by_dim = {s.dim: s.cuts(*place.get(s.axis, (1, 0))) for s in self.shards}
        pieces = []
        for cuts in product(*(by_dim.get(dim, [cut]) for dim, cut in enumerate(whole))):
            box = tuple((cut.global_start, cut.global_start + cut.length) for cut in cuts)
            owned = counts and all(cut.owned for cut in cuts)
            pieces.append(Piece(box, tuple(cut.local_start for cut in cuts), owned))
        return pieces
