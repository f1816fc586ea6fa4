"""Gradients in contiguous fp32 buckets, summed over the data-parallel replicas while backward still runs."""

import weakref
from collections.abc import Container

import torch

from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext

BUCKET_ELEMENTS = 1 << 23  # 32 MB of fp32


class GradientBuckets:
    """Gives every parameter a gradient that is a view of a bucket, and sums full buckets over the replicas.

    Buckets are filled in the reverse of the parameters' order, roughly the order of backward. With `start(n)` a bucket
    leaves as soon as each of its parameters has received the gradients of n backwards; `finish` waits for all.
    The sum needs no division: the loss is already a part of the global batch's mean.
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], ctx: ParallelContext, bucket_elements: int = BUCKET_ELEMENTS
    ):
        self.ctx = ctx
        self.buckets: list[torch.Tensor] = []
        self.views: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.bucket_of: dict[torch.nn.Parameter, int] = {}
        myself = weakref.ref(self)  # what a hook holds, no garbage collector sees: the model would live on

        def received(parameter: torch.nn.Parameter) -> None:
            buckets = myself()
            if buckets and parameter not in buckets.elsewhere:
                buckets.received(parameter)

        for members in _grouped(parameters[::-1], bucket_elements):
            bucket = torch.zeros(sum(p.numel() for p in members), dtype=torch.float32, device=ctx.device)
            for parameter, view in zip(members, bucket.split([p.numel() for p in members]), strict=True):
                if parameter.dtype != torch.float32:
                    parameter.grad_dtype = torch.float32  # autograd then adds up in the bucket's precision
                self.views[parameter] = view.view_as(parameter)
                self.bucket_of[parameter] = len(self.buckets)
                parameter.register_post_accumulate_grad_hook(received)
            self.buckets.append(bucket)
        self.missing: list[int] = []  # backwards that each bucket still waits for; empty when not counting
        self.elsewhere: Container[torch.nn.Parameter] = ()
        self.launched = 0
        self.works: list = []

    def zero(self) -> None:
        """Zero every gradient in place, and make sure that each parameter's .grad is its view."""
        for bucket in self.buckets:
            bucket.zero_()
        for parameter, view in self.views.items():
            parameter.grad = view

    def start(self, backwards: int, elsewhere: Container[torch.nn.Parameter] = ()) -> None:
        """Zero the gradients and expect `backwards` contributions to each before it is summed over the replicas.

        elsewhere: parameters of which not autograd but a call of `received` tells that they have had one.
        """
        self.zero()
        self.elsewhere = elsewhere
        self.missing = [0] * len(self.buckets)
        for index in self.bucket_of.values():
            self.missing[index] += backwards
        self.launched = 0

    def finish(self, loss_scale: float = 1.0) -> None:
        """Sum what has not left yet (parameters without a gradient hold their bucket back), wait for all sums, and
        divide by the loss scale."""
        self._launch(len(self.buckets))
        self.missing = []
        for work in self.works:
            work.wait()
        self.works = []
        if loss_scale != 1.0:
            for bucket in self.buckets:
                bucket /= loss_scale

    def received(self, parameter: torch.nn.Parameter) -> None:
        """A backward has added to the parameter's gradient."""
        if self.missing:
            self.missing[self.bucket_of[parameter]] -= 1
            full = next((i for i, missing in enumerate(self.missing) if missing), len(self.missing))
            self._launch(full)

    def _launch(self, stop: int) -> None:
        """Start the sums of the buckets before `stop`: always in order, so that all replicas agree on it."""
        for bucket in self.buckets[self.launched : stop]:
            work = all_reduce(bucket, self.ctx.dp_group, async_op=True)
            self.works += [work] if work else []
        self.launched = max(self.launched, stop)


def _grouped(parameters: list[torch.nn.Parameter], limit: int) -> list[list[torch.nn.Parameter]]:
    groups, room = [], 0
    for parameter in parameters:
        if not groups or parameter.numel() > room:
            groups.append([])
            room = limit
        groups[-1].append(parameter)
        room -= parameter.numel()
    return groups
