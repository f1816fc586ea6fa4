"""Gather matrices that are sharded over tp ranks and replicas, for work on full matrices, each on
one rank.

A matrix here is a part of a linear weight: q, k and v of a fused projection are three. In a stack
of weights, such as those of experts, each is separate. Each has an owner among the ranks of a
pipeline stage that have the weight, chosen by cost. Owners work in parallel, in rounds of at
most one matrix each, so that full matrices need little memory.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch

from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import exchange_parts
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.shard import Piece, Place, Shard


@dataclass(frozen=True)
class Matrix:
    """A matrix of [rows, columns], in its global shape.

    entry: the parameter that contains it. part: the index of the part. first: its first row in the
    global parameter, or in its weight of a stack. owner: the rank along the replicas and the rank
    along tp that work on it. number: that of its weight among those of a stack on this rank.
    """

    entry: NamedParameter
    part: int
    first: int
    rows: int
    columns: int
    owner: tuple[int, int] = (0, 0)
    number: int = 0

    def weight_shape(self, ctx: ParallelContext, tp_rank: int) -> tuple[int, int]:
        """Return the shape of a tp rank's part of the weight: [rows, columns]."""
        *_, rows, columns = self.entry.spec.local_shape(_place(ctx, tp_rank))
        return rows, columns

    def span(self, ctx: ParallelContext, tp_rank: int) -> tuple[int, int]:
        """Return which elements of a tp rank's flattened part of the parameter are the matrix's:
        first and last + 1."""
        rows, columns = self.weight_shape(ctx, tp_rank)
        start, shard = self.number * rows * columns, _row_shard(self.entry)
        if shard is None:
            return start, start + rows * columns
        ends = [0, *accumulate(shard.local_sizes(ctx.tp_size, tp_rank))]
        return start + ends[self.part] * columns, start + ends[self.part + 1] * columns

    def pieces(self, ctx: ParallelContext, tp_rank: int) -> list[Piece]:
        """Return the boxes of the weight that a tp rank has of this matrix, with their positions in
        the rows of all weights of the stack."""
        pieces, stop = [], self.first + self.rows
        above = self.number * self.weight_shape(ctx, tp_rank)[0]
        for piece in self.entry.spec.pieces(_place(ctx, tp_rank)):
            box, (row, column) = piece.box[-2:], piece.offset[-2:]
            if self.first <= box[0][0] < stop:
                pieces.append(Piece(box, (row + above, column), piece.owned))
        return pieces


def stepped_matrices(
    entries: list[NamedParameter], ctx: ParallelContext, cost: Callable, replicas: int
) -> list[Matrix]:
    """Return the matrices of linear weights, each with an owner; the same list on all ranks of a
    stage that have the weights.

    replicas: number of replicas of the weights. cost(rows, columns): of the work on one. The most
    costly first, each goes to the rank that has least to do by then.
    """
    matrices = []
    for entry in entries:
        *_, rows, columns = entry.spec.shape
        *stack, _, _ = entry.spec.local_shape(ctx.place)
        shard = _row_shard(entry)
        parts = shard.parts if shard else (rows,)
        firsts = [0, *accumulate(parts)]
        matrices += [
            Matrix(entry, part, firsts[part], size, columns, number=number)
            for number in range(math.prod(stack))
            for part, size in enumerate(parts)
        ]
    ranks = [(d, t) for d in range(replicas) for t in range(ctx.tp_size)]
    load = dict.fromkeys(ranks, 0)
    owned = []
    for matrix in sorted(matrices, key=lambda m: -cost(m.rows, m.columns)):
        owner = min(ranks, key=load.__getitem__)
        load[owner] += cost(matrix.rows, matrix.columns)
        owned.append(replace(matrix, owner=owner))
    return owned


class WholeMatrices:
    """Applies a function to full matrices of which this rank has parts.

    replicas: the axis of the replicas of all entries. cost: as in `stepped_matrices`. ranges: for a
    parameter and a rank along that axis, the range of the tp rank's flattened part that this rank
    has; None if every replica has all of it.
    """

    def __init__(
        self,
        entries: list[NamedParameter],
        ctx: ParallelContext,
        replicas: Axis,
        cost: Callable[[int, int], float],
        ranges: Callable[[NamedParameter, int], tuple[int, int]] | None,
    ):
        self.ctx, self.replicas, self.ranges = ctx, replicas, ranges
        self.matrices = stepped_matrices(entries, ctx, cost, replicas.size)
        self.rounds = _rounds(self.matrices)
        self.me = (self.replicas.rank, ctx.tp_rank)

    def apply(
        self,
        function: Callable[[torch.Tensor, Matrix], torch.Tensor],
        give: Callable[[Matrix], torch.Tensor],
        take: Callable[[Matrix, torch.Tensor], None],
    ) -> None:
        """Call give(matrix) for this rank's elements of each matrix, and take(matrix, elements)
        with the result of the function; the elements are those of `mine`, fp32, flat.

        function(full matrix [rows, columns], matrix): returns the same shape; called only on the
        owner. All ranks of a stage call this together. Each round is completed before the next one.
        """
        for matrices in self.rounds:
            given = {matrix: give(matrix) for matrix in matrices}
            wholes = self._to_owners(matrices, self._to_replicas(matrices, given))
            made = {matrix: function(whole, matrix) for matrix, whole in wholes.items()}
            del given, wholes
            parts = self._from_owners(matrices, made)
            for matrix, elements in self._from_replicas(matrices, parts):
                take(matrix, elements)

    def mine(self, matrix: Matrix) -> slice:
        """Return the slice of a matrix in this replica's flattened part of its parameter."""
        first, end = self._range(matrix, self.me[0])
        start = self.ranges(matrix.entry, self.me[0])[0] if self.ranges else 0
        return slice(first - start, end - start)

    def _range(self, matrix: Matrix, replica: int) -> tuple[int, int]:
        """Return which elements of its tp rank's part of a parameter a replica has of a matrix."""
        first, end = matrix.span(self.ctx, self.ctx.tp_rank)
        if self.ranges is None:
            return first, end
        low, high = self.ranges(matrix.entry, replica)
        low, high = max(first, low), min(end, high)
        return low, max(low, high)

    def _to_replicas(self, matrices: list[Matrix], given: dict) -> dict[Matrix, torch.Tensor]:
        """Bring the replicas' elements of each matrix to its owner's replica: this tp rank's part
        of those that are owned in this one."""
        here = [matrix for matrix in matrices if matrix.owner[0] == self.me[0]]
        if self.ranges is None:
            return {matrix: given[matrix] for matrix in here}
        leaving = [
            [given[m] for m in matrices if m.owner[0] == replica]
            for replica in range(self.replicas.size)
        ]
        lengths = [
            [_length(self._range(m, replica)) for m in here]
            for replica in range(self.replicas.size)
        ]
        arrived = _exchange(leaving, lengths, self.ctx, self.replicas.group)
        return {
            matrix: torch.cat([parts[number] for parts in arrived])
            for number, matrix in enumerate(here)
        }

    def _from_replicas(
        self, matrices: list[Matrix], parts: dict[Matrix, torch.Tensor]
    ) -> Iterator[tuple[Matrix, torch.Tensor]]:
        """Give each replica its elements of the matrices that were owned in this one; yield each
        matrix, and this rank's elements."""
        replicas = range(self.replicas.size)
        leaving = [
            [self._cut(matrix, part, replica) for matrix, part in parts.items()]
            for replica in replicas
        ]
        of_each = [[m for m in matrices if m.owner[0] == replica] for replica in replicas]
        lengths = [[_length(self._range(m, self.me[0])) for m in owned] for owned in of_each]
        arrived = _exchange(leaving, lengths, self.ctx, self.replicas.group)
        for owned, tensors in zip(of_each, arrived, strict=True):
            yield from zip(owned, tensors, strict=True)

    def _cut(self, matrix: Matrix, part: torch.Tensor, replica: int) -> torch.Tensor:
        """Return a replica's elements of this tp rank's part of a matrix."""
        start = matrix.span(self.ctx, self.ctx.tp_rank)[0]
        first, end = self._range(matrix, replica)
        return part[first - start : end - start]

    def _to_owners(
        self, matrices: list[Matrix], parts: dict[Matrix, torch.Tensor]
    ) -> dict[Matrix, torch.Tensor]:
        """Bring the tp ranks' parts of each matrix to its owner: those that this rank owns,
        whole."""
        ctx = self.ctx
        leaving, lengths = [], []
        for rank in range(ctx.tp_size):
            theirs = [m for m in parts if m.owner[1] == rank]
            leaving.append([self._pieces(m, parts[m], ctx.tp_rank, True) for m in theirs])
            mine = [m for m in parts if m.owner == self.me]
            lengths.append([self._count(m, rank, True) for m in mine])
        arrived = _exchange(leaving, lengths, ctx, ctx.tp_group)
        wholes = {}
        for number, matrix in enumerate(m for m in parts if m.owner == self.me):
            whole = arrived[0][number].new_empty(matrix.rows, matrix.columns)
            for rank, tensors in enumerate(arrived):
                self._place(matrix, whole, tensors[number], rank)
            wholes[matrix] = whole
        return wholes

    def _from_owners(
        self, matrices: list[Matrix], made: dict[Matrix, torch.Tensor]
    ) -> dict[Matrix, torch.Tensor]:
        """Give each tp rank its part of the matrices that this one owns: this rank's parts of those
        that are owned in its replica."""
        ctx = self.ctx
        here = [matrix for matrix in matrices if matrix.owner[0] == self.me[0]]
        leaving, lengths = [], []
        for rank in range(ctx.tp_size):
            leaving.append([self._boxes(matrix, whole, rank) for matrix, whole in made.items()])
            theirs = [m for m in here if m.owner[1] == rank]
            lengths.append([self._count(m, ctx.tp_rank, False) for m in theirs])
        arrived = _exchange(leaving, lengths, ctx, ctx.tp_group)
        parts = {}
        for rank, tensors in enumerate(arrived):
            theirs = [m for m in here if m.owner[1] == rank]
            for matrix, tensor in zip(theirs, tensors, strict=True):
                parts[matrix] = self._assembled(matrix, tensor)
        return {matrix: parts[matrix] for matrix in here}

    def _local(self, matrix: Matrix, tp_rank: int, piece: Piece) -> tuple[slice, ...]:
        """Return the index of a piece in a tp rank's part of a matrix."""
        columns = matrix.weight_shape(self.ctx, tp_rank)[1]
        start = matrix.span(self.ctx, tp_rank)[0] // columns
        rows, cols = piece.index()
        return slice(rows.start - start, rows.stop - start), cols

    def _shape(self, matrix: Matrix, tp_rank: int) -> tuple[int, int]:
        """Return the shape of a tp rank's part of a matrix."""
        columns = matrix.weight_shape(self.ctx, tp_rank)[1]
        return _length(matrix.span(self.ctx, tp_rank)) // columns, columns

    def _chosen(self, matrix: Matrix, tp_rank: int, once: bool) -> list[Piece]:
        """Return a tp rank's pieces of a matrix; once: without copies of what another has."""
        return [p for p in matrix.pieces(self.ctx, tp_rank) if p.owned or not once]

    def _count(self, matrix: Matrix, tp_rank: int, once: bool) -> int:
        """Count the elements of a tp rank's pieces."""
        return sum(
            (piece.box[0][1] - piece.box[0][0]) * (piece.box[1][1] - piece.box[1][0])
            for piece in self._chosen(matrix, tp_rank, once)
        )

    def _pieces(self, matrix: Matrix, part: torch.Tensor, tp_rank: int, once: bool) -> torch.Tensor:
        """Return a tp rank's pieces of a matrix, flat, one after the other."""
        local = part.view(self._shape(matrix, tp_rank))
        chosen = self._chosen(matrix, tp_rank, once)
        flat = [local[self._local(matrix, tp_rank, piece)].reshape(-1) for piece in chosen]
        return torch.cat(flat) if flat else part[:0]

    def _boxes(self, matrix: Matrix, whole: torch.Tensor, tp_rank: int) -> torch.Tensor:
        """Return what a tp rank has of a whole matrix, flat, one piece after the other."""
        flat = [
            whole[self._box(matrix, piece)].reshape(-1)
            for piece in self._chosen(matrix, tp_rank, False)
        ]
        return torch.cat(flat) if flat else whole.view(-1)[:0]

    def _place(self, matrix: Matrix, whole: torch.Tensor, flat: torch.Tensor, tp_rank: int) -> None:
        """Write a tp rank's pieces, as `_pieces` returns them, into the whole matrix."""
        start = 0
        for piece in self._chosen(matrix, tp_rank, True):
            box = whole[self._box(matrix, piece)]
            box.copy_(flat[start : start + box.numel()].view_as(box))
            start += box.numel()

    def _assembled(self, matrix: Matrix, flat: torch.Tensor) -> torch.Tensor:
        """Return this tp rank's part of a matrix, flat, of its pieces."""
        rank, start = self.ctx.tp_rank, 0
        part = flat.new_empty(self._shape(matrix, rank))
        for piece in self._chosen(matrix, rank, False):
            box = part[self._local(matrix, rank, piece)]
            box.copy_(flat[start : start + box.numel()].view_as(box))
            start += box.numel()
        return part.view(-1)

    def _box(self, matrix: Matrix, piece: Piece) -> tuple[slice, slice]:
        """Return the index of a piece in the full matrix."""
        (top, bottom), (left, right) = piece.box
        return slice(top - matrix.first, bottom - matrix.first), slice(left, right)


def _row_shard(entry: NamedParameter) -> Shard | None:
    """Return the shard over tp of the rows of a weight, or None."""
    shard = entry.spec.shard
    return shard if shard is not None and shard.dim == len(entry.spec.shape) - 2 else None


def _place(ctx: ParallelContext, tp_rank: int) -> Place:
    """Return the place of the rank that differs from this one only along tp."""
    return ctx.place | {"tp": (ctx.tp_size, tp_rank)}


def _rounds(matrices: list[Matrix]) -> list[list[Matrix]]:
    """Deal matrices into rounds, in each of which every owner has one at most."""
    rounds, seen = [], {}
    for matrix in matrices:
        number = seen[matrix.owner] = seen.get(matrix.owner, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(matrix)
    return rounds


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _exchange(
    leaving: list[list[torch.Tensor]], lengths: list[list[int]], ctx: ParallelContext, group
) -> list[list[torch.Tensor]]:
    """Send leaving[r], flat and fp32, to each rank r of a group, and return what each sends, of
    lengths[r] elements."""
    if group is None or group.size() == 1:
        return leaving
    # who has nothing to send takes part on the same device as the others
    nothing = torch.empty(0, dtype=torch.float32, device=ctx.device)
    sends = [sum(map(len, tensors)) for tensors in leaving]
    receives = [sum(each) for each in lengths]
    arrived = exchange_parts(
        torch.cat([nothing, *chain.from_iterable(leaving)]), group, sends, receives
    )
    each = arrived.split(receives)
    return [list(x.split(sizes)) for x, sizes in zip(each, lengths, strict=True)]
