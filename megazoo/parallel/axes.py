"""The axes of the mesh from the view of a rank, and the axes that are derived from dp and cp."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megazoo.parallel.groups import VirtualGroup, group_along, solitary_group


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the mesh, for one rank: the ranks that differ from it only in this axis.

    size: number of ranks. rank: index of this rank. group: their process group; None in a world of
    one rank. If only the axis has size 1, the group has only this rank (see groups.py).
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True, eq=False)
class FoldedAxis(Axis):
    """An axis that is folded into the token axis: neighbouring ranks of the token axis.

    replicas: the ranks of the token axis with the same index on this axis, and so the same shards
    of parameters that are sharded over it.
    """

    replicas: Axis


class ShortNames:
    """The short names of the axes of a context: tp_size for tp.size, and so on."""

    tp: Axis
    pp: Axis
    cp: Axis
    dp: Axis

    @property
    def tp_size(self) -> int:
        return self.tp.size

    @property
    def tp_rank(self) -> int:
        return self.tp.rank

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return self.tp.group

    @property
    def pp_size(self) -> int:
        return self.pp.size

    @property
    def pp_rank(self) -> int:
        return self.pp.rank

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        return self.pp.group

    @property
    def cp_size(self) -> int:
        return self.cp.size

    @property
    def cp_rank(self) -> int:
        return self.cp.rank

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        return self.cp.group

    @property
    def dp_size(self) -> int:
        return self.dp.size

    @property
    def dp_rank(self) -> int:
        return self.dp.rank

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return self.dp.group


def joined(dp: Axis, cp: Axis, group: dist.ProcessGroup | None) -> Axis:
    """Return dp and cp as one axis, in mesh order, where cp is next to dp. group: of its ranks, if
    both have several; None in a virtual context."""
    if cp.size == 1 or dp.size == 1:
        return dp if cp.size == 1 else cp
    size, rank = dp.size * cp.size, dp.rank * cp.size + cp.rank
    return Axis(size, rank, group or VirtualGroup(size, rank))


def folded_into(
    token: Axis,
    sizes: Iterable[tuple[str, int]],
    groups: tuple[tuple[dist.ProcessGroup, ...], ...],
) -> dict[str, FoldedAxis]:
    """Return the axes that are folded into the token axis; they are its fastest ranks.

    sizes: their names and sizes. groups: for each, its group and that of its replicas; empty in a
    virtual context.
    """
    folded = {}
    for number, (name, size) in enumerate(sizes):
        count, (replica, rank) = token.size // size, divmod(token.rank, size)
        virtual = VirtualGroup(size, rank), VirtualGroup(count, replica)
        group, of_replicas = groups[number] if groups else virtual
        folded[name] = FoldedAxis(size, rank, group, Axis(count, replica, of_replicas))
    return folded


def groups_of_folded(
    ranks: torch.Tensor, size: int, device: torch.device, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create the groups along a folded axis and along its replicas; return this rank's. Every rank
    calls it. ranks: of the world, [pp, token axis, tp]."""
    pp, token, tp = ranks.shape
    ranks = ranks.view(pp, token // size, size, tp)
    alone = [solitary_group(timeout)] if 1 in ranks.shape[1:3] else []
    replicas, along = (
        alone[0] if ranks.shape[dim] == 1 else group_along(dim, ranks, device, timeout)
        for dim in (1, 2)
    )
    return along, replicas
