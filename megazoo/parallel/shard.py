"""How a parameter is cut: boxes of global tensors, and values that depend on the global tensor alone."""

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.linear import WeightQueue
from megazoo.parallel.random import derive_seed

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension
TILE = 128  # rows and columns of the blocks in which initial values are drawn
ALIGNED = 128  # features: matrix products of GPUs are faster where a rank has a multiple of them


class Cut(NamedTuple):
    """A rank's share of one part: where it starts in the global tensor and in the rank's, and how long it is.

    owned: this rank's copy is the one that counts; False for all but the first rank that holds a replicated unit.
    """

    global_start: int
    local_start: int
    length: int
    owned: bool = True


@dataclass(frozen=True)
class Shard:
    """A tensor whose dimension `dim` is `parts` fused one after the other, each cut over the tp ranks.

    A plain column or row cut has one part; a fused QKV has three (q, k, v), gate/up has two: every rank then holds
    its share of each. A part is cut between units of so many features (a head, say; 1 by default). Where tp doesn't
    divide their number, the first ranks hold one unit more, so nothing is ever padded: the vocabulary is cut like
    anything else. Features that fill no unit go to the first rank that has not one unit more: of 1,283 features in
    units of 128, which are ten and 3, the ranks of tp 3 have 512, 387 and 384. The first rank always has the most.
    Where tp exceeds the number of units (and is a multiple), each is replicated over tp / number ranks.
    """

    dim: int
    parts: tuple[int, ...]
    units: tuple[int, ...] = ()

    @property
    def all_units(self) -> tuple[int, ...]:
        """Features of a unit, part by part."""
        return self.units or (1,) * len(self.parts)

    def cuts(self, tp_size: int, tp_rank: int) -> list[Cut]:
        """The rank's share of each part."""
        cuts, global_start, local_start = [], 0, 0
        for part, unit, shared in zip(self.parts, self.all_units, self.replicated(tp_size), strict=True):
            count = part // unit
            if shared:
                replicas = tp_size // count
                start, length, owned = tp_rank // replicas * unit, unit, tp_rank % replicas == 0
            else:
                (each, more), rest = divmod(count, tp_size), part - count * unit
                start = (tp_rank * each + min(tp_rank, more)) * unit + rest * (tp_rank > more)
                length, owned = (each + (tp_rank < more)) * unit + rest * (tp_rank == more), True
            cuts.append(Cut(global_start + start, local_start, length, owned))
            global_start += part
            local_start += length
        return cuts

    def replicated(self, tp_size: int) -> list[bool]:
        """Whether several ranks hold each unit, part by part."""
        return [part // unit < tp_size for part, unit in zip(self.parts, self.all_units, strict=True)]

    def local_sizes(self, tp_size: int, tp_rank: int) -> list[int]:
        """The lengths of the rank's shares of the parts."""
        return [cut.length for cut in self.cuts(tp_size, tp_rank)]


def nearly_even(count: int, tp_size: int) -> bool:
    """Say whether so many things, none of them cut, can be shared so that no rank has over a quarter more than its
    share: 25 over 2 ranks can (13 and 12), 4 over 3 can't (2, 1 and 1)."""
    return count >= tp_size and -(-count // tp_size) * tp_size <= 1.25 * count


def units_for(parts: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
    """Choose the units in which features that belong to no head are cut; a part's are its size's alone.

    Single features where tp divides the part, so that all ranks have as many. Else ALIGNED of them, if no rank then has
    over a quarter more than its share; else single features, and ranks differ by one.
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
    """A box of a global tensor, and where it starts in the tensor of the one who holds it. owned: as in Cut."""

    box: Box
    offset: tuple[int, ...]
    owned: bool = True

    def index(self, box: Box | None = None) -> tuple[slice, ...]:
        """The index, in the holder's tensor, of `box` (a part of this piece; the whole piece by default)."""
        pairs = zip(box or self.box, self.box, self.offset, strict=True)
        return tuple(slice(start - own + offset, stop - own + offset) for (start, stop), (own, _), offset in pairs)

    def in_rows(self, start: int, stop: int) -> "Piece | None":
        """What of it lies in rows start to stop of the holder's tensor, as a piece of those rows alone."""
        (begin, end), first = self.box[0], self.offset[0]
        low, high = max(start, first), min(stop, first + end - begin)
        rows = (begin + low - first, begin + high - first)
        return Piece((rows, *self.box[1:]), (low - start, *self.offset[1:]), self.owned) if low < high else None


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share, or None."""
    box = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


@dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is, whatever the layout: its global shape, its cut, and its initial distribution.

    Initial values are mean + std * N(0, 1); std 0 is the constant mean. shard None: the same on every tp rank.
    """

    shape: tuple[int, ...]
    shard: Shard | None = None
    mean: float = 0.0
    std: float = 0.0

    def local_shape(self, tp_size: int, tp_rank: int) -> tuple[int, ...]:
        """The shape of one rank's tensor."""
        shape = list(self.shape)
        if self.shard:
            shape[self.shard.dim] = sum(self.shard.local_sizes(tp_size, tp_rank))
        return tuple(shape)

    def has_partial_gradient(self, ctx: ParallelContext) -> bool:
        """Whether backward on one rank gives only a part of the gradient: of units that several tp ranks hold for
        different heads, and, under sequence parallelism, of what all ranks hold for different parts of the sequence."""
        return ctx.sequence_parallel if self.shard is None else any(self.shard.replicated(ctx.tp_size))

    def pieces(self, tp_size: int, tp_rank: int) -> list[Piece]:
        """The boxes of the global tensor that a rank holds, and where they lie in its own."""
        whole = tuple((0, n) for n in self.shape)
        if self.shard is None:
            return [Piece(whole, (0,) * len(self.shape), owned=tp_rank == 0)]
        pieces, dim = [], self.shard.dim
        for start, local, length, owned in self.shard.cuts(tp_size, tp_rank):
            box = (*whole[:dim], (start, start + length), *whole[dim + 1 :])
            pieces.append(Piece(box, tuple(local if d == dim else 0 for d in range(len(self.shape))), owned))
        return pieces


@dataclass(frozen=True)
class Entry:
    """A parameter of this rank under its global name. stages: the pipeline ranks that hold it, the first its owner."""

    name: str
    parameter: nn.Parameter
    spec: ParameterSpec
    stages: tuple[int, ...]

    def counted_pieces(self, ctx: ParallelContext) -> list[Piece]:
        """This rank's pieces that count in sums over the model: copies over tp or between stages count once."""
        if ctx.pp_rank != self.stages[0]:
            return []
        return [piece for piece in self.spec.pieces(ctx.tp_size, ctx.tp_rank) if piece.owned]


class ShardedModule(nn.Module):
    """A module whose parameters know how they are cut. `specs` names them; it survives deepcopy, to() and to_empty().

    ctx: the parallel context to live in; by default the ambient one (`with ctx:`). A forward takes a parameter that
    several tp ranks hold through `whole`, so that its gradient is the sum of what they contribute. sums_later: whoever
    runs backward makes those sums himself, once for many backwards (`sum_over_copies`). weight_queue: where gradients
    of linear weights wait, if they do. multiplied: names of the parameters that are matrices by which every token is
    multiplied, for `flops_per_token` to count.
    """

    multiplied: ClassVar[tuple[str, ...]] = ()
    sums_later = False
    weight_queue: WeightQueue | None = None

    def __init__(self, ctx: ParallelContext | None = None):
        super().__init__()
        self.ctx = ctx or current_context()
        self.specs: dict[str, ParameterSpec] = {}
        self._partial: set[str] = set()  # parameters of which backward on this rank gives only a part of the gradient

    def whole(self, name: str) -> torch.Tensor | None:
        """The parameter as the forward should use it: its gradient is summed over the tp ranks that hold copies."""
        parameter = getattr(self, name)
        if name not in self._partial or self.sums_later:
            return parameter
        return _summed_over_copies(parameter, self.specs[name], self.ctx)

    def add_parameter(self, name: str, spec: ParameterSpec) -> None:
        """Register this rank's part of a parameter, with initial values unless it is on the meta device.

        The values come from a seed drawn from torch's default generator: equal on all ranks that were seeded alike.
        A model built by `from_config` draws them anew, from the parameter's global name.
        """
        self.specs[name] = spec
        parameter = nn.Parameter(torch.empty(spec.local_shape(self.ctx.tp_size, self.ctx.tp_rank)))
        self.register_parameter(name, parameter)
        if spec.has_partial_gradient(self.ctx):
            self._partial.add(name)
        if not parameter.is_meta:
            initialize(parameter, spec, self.ctx, derive_seed(torch.randint(1 << 62, ()).item()))


class _SumOverCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, spec, parallel):
        ctx.spec, ctx.parallel = spec, parallel
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        sum_over_copies([(grad, ctx.spec)], ctx.parallel)
        return grad, None, None


@untraced
def _summed_over_copies(parameter: torch.Tensor, spec: ParameterSpec, ctx: ParallelContext) -> torch.Tensor:
    return _SumOverCopies.apply(parameter, spec, ctx)


def sum_over_copies(
    gradients: list[tuple[torch.Tensor, ParameterSpec]], ctx: ParallelContext, limit: int = 1 << 24
) -> None:
    """Complete, in place, gradients of which each tp rank has a part (`has_partial_gradient`).

    They leave together, at most `limit` elements at a time. A unit that only some ranks hold is summed within a tensor
    of its whole part, to which the other ranks add zeros.
    """
    shares = []  # (this rank's share, shape of the tensor to sum, the dimension and place of the share in it)
    for gradient, spec in gradients:
        if spec.shard is None:
            shares.append((gradient, gradient.shape, 0, 0))
            continue
        dim, first = spec.shard.dim, 0
        pieces = spec.pieces(ctx.tp_size, ctx.tp_rank)
        for piece, part, shared in zip(pieces, spec.shard.parts, spec.shard.replicated(ctx.tp_size), strict=True):
            if shared:
                shape = torch.Size([*spec.shape[:dim], part, *spec.shape[dim + 1 :]])
                shares.append((gradient[piece.index()], shape, dim, piece.box[dim][0] - first))
            first += part
    while shares:
        count = sum(total <= limit for total in accumulate(shape.numel() for _, shape, _, _ in shares))
        together, shares = shares[: max(1, count)], shares[max(1, count) :]
        flat = together[0][0].new_zeros(sum(shape.numel() for _, shape, _, _ in together))
        wholes = flat.split([shape.numel() for _, shape, _, _ in together])
        mine = [
            whole.view(shape).narrow(dim, start, share.shape[dim])
            for whole, (share, shape, dim, start) in zip(wholes, together, strict=True)
        ]
        for place, (share, *_) in zip(mine, together, strict=True):
            place.copy_(share)
        all_reduce(flat, ctx.tp_group)
        for place, (share, *_) in zip(mine, together, strict=True):
            share.copy_(place)


@torch.no_grad()
def initialize(parameter: torch.Tensor, spec: ParameterSpec, ctx: ParallelContext, seed: int) -> None:
    """Fill this rank's part of a parameter with its initial values: the same global tensor in every layout.

    The global tensor is drawn in tiles of TILE x TILE, each from a generator seeded by (seed, tile): a rank draws the
    tiles that its boxes touch, one tile of scratch at a time, on the CPU whatever the device.
    """
    generator = torch.Generator("cpu")
    for piece in spec.pieces(ctx.tp_size, ctx.tp_rank):
        view = parameter[piece.index()]
        if spec.std == 0:
            view.fill_(spec.mean)
            continue
        (y0, y1), (x0, x1) = piece.box if len(piece.box) == 2 else (piece.box[0], (0, 1))
        view = view.view(y1 - y0, x1 - x0) if view.dim() == 1 else view
        height, width = spec.shape if len(spec.shape) == 2 else (spec.shape[0], 1)
        for top in range(y0 // TILE * TILE, y1, TILE):
            for left in range(x0 // TILE * TILE, x1, TILE):
                tile = torch.empty(min(TILE, height - top), min(TILE, width - left), device="cpu")
                generator.manual_seed(derive_seed(seed, top, left))
                tile.normal_(spec.mean, spec.std, generator=generator)
                up, down, west, east = max(top, y0), min(top + TILE, y1), max(left, x0), min(left + TILE, x1)
                view[up - y0 : down - y0, west - x0 : east - x0] = tile[
                    up - top : down - top, west - left : east - left
                ]
