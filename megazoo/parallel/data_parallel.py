"""Gradients in contiguous fp32 buckets, summed over the data-parallel replicas while backward still runs."""

import weakref
from collections.abc import Container

import torch
from torch import nn

from megazoo.parallel.collectives import all_gather_shards, all_reduce, reduce_scatter_shards
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.timing import spent

BUCKET_ELEMENTS = 1 << 23  # 32 MB of fp32
ALIGNMENT = 64  # elements: shards begin where a kernel's vectors do, so that it computes them as it would the whole


class GradientBuckets:
    """Gives every parameter a gradient that is a view of a bucket, and sums full buckets over the replicas.

    Buckets are filled in the reverse of the parameters' order, roughly the order of backward. With `start(n)` a bucket
    leaves as soon as each of its parameters has received the gradients of n backwards; `finish` waits for all.
    The sum needs no division: the loss is already a part of the global batch's mean. late: parameters whose gradients
    are not whole after the last backward: their buckets leave in `finish`.

    With `sharded` each replica gets the sum of its own part of every bucket only (ZeRO-1, Rajbhandari et al. 2020):
    the elements `range_of(parameter)` of each parameter. It updates these, and `gather` gives them to all.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        ctx: ParallelContext,
        bucket_elements: int = BUCKET_ELEMENTS,
        late: Container[nn.Parameter] = (),
    ):
        self.ctx, self.sharded = ctx, False
        self.buckets: list[torch.Tensor] = []
        self.members: list[list[tuple[nn.Parameter, int]]] = []  # of each bucket, with where they begin in it
        self.views: dict[nn.Parameter, torch.Tensor] = {}
        self.place: dict[nn.Parameter, tuple[int, int]] = {}  # the bucket, and where in it
        myself = weakref.ref(self)  # what a hook holds, no garbage collector sees: the model would live on

        def received(parameter: nn.Parameter) -> None:
            buckets = myself()
            if buckets and parameter not in buckets.elsewhere:
                buckets.received(parameter)

        backwards = parameters[::-1]
        early = _grouped([p for p in backwards if p not in late], bucket_elements)
        for members in early + _grouped([p for p in backwards if p in late], bucket_elements):
            starts, end = [], 0
            for parameter in members:
                starts.append(end)
                end += _aligned(parameter.numel(), ALIGNMENT)
            bucket = torch.zeros(_aligned(end, ALIGNMENT * ctx.dp_size), dtype=torch.float32, device=ctx.device)
            for parameter, start in zip(members, starts, strict=True):
                if parameter.dtype != torch.float32:
                    parameter.grad_dtype = torch.float32  # autograd then adds up in the bucket's precision
                self.views[parameter] = bucket[start : start + parameter.numel()].view_as(parameter)
                self.place[parameter] = (len(self.buckets), start)
                parameter.register_post_accumulate_grad_hook(received)
            self.buckets.append(bucket)
            self.members.append(list(zip(members, starts, strict=True)))
        self.early = len(early)  # buckets that may leave before the end
        self.missing: list[int] = []  # backwards that each of them still waits for; empty when not counting
        self.elsewhere: Container[nn.Parameter] = ()
        self.launched = 0
        self.works: list = []

    def zero(self) -> None:
        """Zero every gradient in place, and make sure that each parameter's .grad is its view."""
        for bucket in self.buckets:
            bucket.zero_()
        for parameter, view in self.views.items():
            parameter.grad = view

    def start(self, backwards: int, elsewhere: Container[nn.Parameter] = ()) -> None:
        """Zero the gradients and expect `backwards` contributions to each before it is summed over the replicas.

        elsewhere: parameters of which not autograd but a call of `received` tells that they have had one.
        """
        self.zero()
        self.elsewhere = elsewhere
        self.missing = [len(members) * backwards for members in self.members[: self.early]]
        self.launched = 0

    def finish(self, loss_scale: float = 1.0) -> None:
        """Sum what has not left yet (parameters without a gradient hold their bucket back), wait for all sums, and
        divide by the loss scale."""
        self._launch(len(self.buckets))
        self.missing = []
        with spent("communication", "wait"):
            for work in self.works:
                work.wait()
        self.works = []
        if loss_scale != 1.0:
            for bucket in self.buckets:
                bucket /= loss_scale

    def received(self, parameter: nn.Parameter) -> None:
        """A backward has added to the parameter's gradient."""
        index, _ = self.place[parameter]
        if self.missing and index < self.early:
            self.missing[index] -= 1
            self._launch(next((i for i, missing in enumerate(self.missing) if missing), self.early))

    def range_of(self, parameter: nn.Parameter, dp_rank: int) -> tuple[int, int]:
        """The elements of a parameter, first and last + 1, that lie in a replica's part of its bucket."""
        index, start = self.place[parameter]
        shard = len(self.buckets[index]) // self.ctx.dp_size
        edges = shard * dp_rank - start, shard * (dp_rank + 1) - start
        first, last = (min(max(edge, 0), parameter.numel()) for edge in edges)
        return first, last

    @torch.no_grad()
    def gather(self) -> None:
        """Give every replica the parameters' elements that the others have updated."""
        for index, members in enumerate(self.members):
            flat = torch.empty(self.buckets[index].shape, dtype=members[0][0].dtype, device=self.ctx.device)
            for parameter, start in members:
                first, last = self.range_of(parameter, self.ctx.dp_rank)
                flat[start + first : start + last] = parameter.view(-1)[first:last]
            all_gather_shards(flat, self.ctx.dp_group)
            for parameter, start in members:
                parameter.view(-1).copy_(flat[start : start + parameter.numel()])

    def _launch(self, stop: int) -> None:
        """Start the sums of the buckets before `stop`: always in order, so that all replicas agree on it."""
        reduce = reduce_scatter_shards if self.sharded else all_reduce
        for bucket in self.buckets[self.launched : stop]:
            work = reduce(bucket, self.ctx.dp_group, async_op=True)
            self.works += [work] if work else []
        self.launched = max(self.launched, stop)


def _aligned(count: int, to: int) -> int:
    return -(-count // to) * to


def _grouped(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    groups, room = [], 0
    for parameter in parameters:
        if not groups or parameter.numel() > room:
            groups.append([])
            room = limit
        groups[-1].append(parameter)
        room -= parameter.numel()
    return groups
