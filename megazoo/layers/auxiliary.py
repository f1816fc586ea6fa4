"""Auxiliary losses that a layer adds to the training loss, such as the load balance of a router."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from megazoo.errors import UserError, any_of
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.compile import untraced
from megazoo.parallel.recompute import is_replaying


class AuxiliaryLosses:
    """The auxiliary losses of one run of micro-batches, and the counts of its tokens.

    names: those that layers of the model declare, with the size of a joint loss, and 0 for other
    losses. counts: what the means are over, such as "labels", each 0-dimensional. axes: of the
    ranks over which joint losses are summed. scale: the gradient of the loss of the run; call
    `set_scale` before backward.
    """

    def __init__(
        self, names: Mapping[str, int], counts: dict[str, torch.Tensor], axes: Iterable[Axis] = ()
    ):
        self.counts = {what: count.clamp(min=1) for what, count in counts.items()}
        self.scale: float | torch.Tensor = 1.0
        zero = torch.zeros((), dtype=torch.float64, device=counts["labels"].device)
        self.means = {name: zero.clone() for name in sorted(names)}
        self.joint = {name: JointLoss(names[name], zero) for name in sorted(names) if names[name]}
        self.axes = list(axes)
        self.tokens: dict[Any, torch.Tensor] = {}  # counts of each layer

    def attach(self, x: torch.Tensor, name: str, total: torch.Tensor, over: str) -> torch.Tensor:
        """See `attach_loss`."""
        if name not in self.means:
            raise UserError(
                f"the auxiliary loss {name!r} is not declared: add to the class of the layer "
                f"auxiliary_losses = ({name!r},)"
            )
        if over not in self.counts:
            raise UserError(
                f"an auxiliary loss can't be a mean over {over!r}: use "
                f"{any_of(sorted(self.counts))}"
            )
        if not is_replaying():
            self.means[name] += total.detach().double() / self.counts[over]
        return _Attached.apply(x, total, self, self.counts[over])

    def attach_joint(
        self,
        x: torch.Tensor,
        name: str,
        counts: torch.Tensor,
        values: torch.Tensor,
        number: torch.Tensor,
        factor: float,
    ) -> torch.Tensor:
        """See `attach_joint_loss`."""
        loss = self.joint[name]
        if not is_replaying():
            loss.add(counts, values.detach(), number, factor)
        return _AttachedJoint.apply(x, values, self, loss)

    def start_backward(self) -> None:
        """Sum the counts of joint losses over the ranks, after all forwards of the run. Only the
        first call does it. Every rank calls it together."""
        for loss in self.joint.values():
            loss.sum_over(self.axes)

    def set_scale(self, scale: float | torch.Tensor) -> None:
        """Set the gradient of the loss of the run, before backward reaches the layers."""
        self.scale = scale

    def reduced(self, axes: Iterable[Axis]) -> dict[str, torch.Tensor]:
        """Return the means over all micro-batches and over the ranks of some axes, as {name: mean}:
        fp32, 0-dimensional, the same on every rank."""
        self.start_backward()
        for name, loss in self.joint.items():
            self.means[name] += loss.own_part()
        if not self.means:
            return {}
        means = torch.stack(list(self.means.values()))
        all_reduce_over(means, axes)
        return dict(zip(self.means, means.float(), strict=True))

    def pass_counts(self, axes: Iterable[Axis]) -> None:
        """Sum the counts of all layers over the ranks of some axes, and pass them to the layers."""
        if not self.tokens:
            return
        flat = torch.cat(list(self.tokens.values()))
        all_reduce_over(flat, axes)
        parts = flat.split([len(counts) for counts in self.tokens.values()])
        for layer, counts in zip(self.tokens, parts, strict=True):
            layer.batch_counted(counts)


class JointLoss:
    """A loss that is a product of means over all layers and tokens of a run: factor x size x sum of
    mean(counts) mean(values), over the elements of two vectors. Only `values` have a gradient."""

    def __init__(self, size: int, zero: torch.Tensor):
        self.size, self.factor, self.is_summed = size, 0.0, False
        self.counts, self.values = zero.repeat(size), zero.repeat(size)
        self.number = zero.clone()

    def add(
        self, counts: torch.Tensor, values: torch.Tensor, number: torch.Tensor, factor: float
    ) -> None:
        """Add the sums of a layer over some tokens. number: of these tokens."""
        self.counts += counts
        self.values += values
        self.number += number
        self.factor = factor

    def sum_over(self, axes: Iterable[Axis]) -> None:
        """Sum the counts and the number of tokens over the ranks, once.

        They are summed on the CPU: with NCCL, a transfer between stages that has started on a group
        would delay a collective on that group until it arrives, and so would never arrive.
        """
        if not self.is_summed:
            sums = torch.cat([self.counts, self.number[None]]).cpu()
            all_reduce_over(sums, axes)
            sums = sums.to(self.values.device)
            self.counts, self.number = sums[:-1], sums[-1].clamp(min=1)
            self.is_summed = True

    def gradient(self) -> torch.Tensor:
        """Return the gradient of `values`: fp64 [size]."""
        return self.factor * self.size * self.counts / self.number.square()

    def own_part(self) -> torch.Tensor:
        """Return this rank's part of the loss: that of its values."""
        return (self.gradient() * self.values).sum()


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, total, losses: AuxiliaryLosses, count):
        ctx.losses, ctx.count, ctx.dtype = losses, count, total.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, (ctx.losses.scale / ctx.count).to(ctx.dtype), None, None


class _AttachedJoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values, losses: AuxiliaryLosses, loss: JointLoss):
        ctx.losses, ctx.loss, ctx.dtype = losses, loss, values.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.losses.start_backward()
        return grad, (ctx.losses.scale * ctx.loss.gradient()).to(ctx.dtype), None, None


_current: ContextVar[AuxiliaryLosses | None] = ContextVar("auxiliary losses", default=None)


@contextmanager
def collecting(losses: AuxiliaryLosses | None) -> Iterator[None]:
    """Within this block, layers add their auxiliary losses to `losses`."""
    token = _current.set(losses)
    try:
        yield
    finally:
        _current.reset(token)


def collects_losses() -> bool:
    """Return whether auxiliary losses are collected: in training."""
    return _current.get() is not None


@untraced
def attach_loss(
    x: torch.Tensor, name: str, total: torch.Tensor, *, over: str = "labels"
) -> torch.Tensor:
    """Return x, and add an auxiliary loss of a layer to the backward of x.

    Training then minimises the loss plus the mean of `total` over the global batch. `train_batch`
    returns the loss without it. `model.engine.auxiliary_losses` and the metrics contain the mean
    under its name. Outside of training, x is returned. Otherwise the result is a view of x: do not
    modify it in place.

    Args:
        x: an activation on the path to the loss, of any shape.
        name: name of the auxiliary loss. The losses of layers with the same name are added. The
            class of the layer must declare it: auxiliary_losses = (name,).
        total: 0-dimensional, fp32: the sum over this rank's tokens of the micro-batch, without
            padding (`MicroBatch.is_token`). The sums of all ranks are added. Ranks with the same
            tokens (tp, without sequence parallelism) must have the same total.
        over: "labels": the mean is over labelled tokens, as for the loss; "tokens": over all tokens
            without padding; "rows": over the rows.

    Raises:
        UserError: The name is not declared, or `over` has another value.

    Example:
        class Router(Layer):
            auxiliary_losses = ("balance",)

            def forward(self, x):
                return attach_loss(x, "balance", self.imbalance(x))
    """
    losses = _current.get()
    return x if losses is None else losses.attach(x, name, total, over)


@untraced
def attach_joint_loss(
    x: torch.Tensor,
    name: str,
    counts: torch.Tensor,
    values: torch.Tensor,
    number: torch.Tensor,
    factor: float,
) -> torch.Tensor:
    """Return x, and add to its backward a loss that is a product of means over the global batch:

        factor x size x sum of mean(counts) x mean(values)

    The means are over all tokens and all layers that attach a loss with this name, so their
    backward needs the counts of all forwards: the batch must have one micro-batch, or the schedule
    must be gpipe. Outside of training, x is returned.

    Args:
        x: an activation on the path to the loss, of any shape.
        name: name of the loss. The layer must declare it with the size of the vectors:
            self.joint_losses = {name: size}.
        counts: [size], without a gradient: the sum over this rank's tokens of the micro-batch.
        values: [size], fp32: the sum of the values over the same tokens.
        number: the number of these tokens, 0-dimensional.
        factor: of the loss.
    """
    losses = _current.get()
    if losses is None:
        return x
    return losses.attach_joint(x, name, counts, values, number, factor)


def count_tokens(layer: nn.Module, counts: torch.Tensor) -> None:
    """Count tokens of a micro-batch in training. After the last micro-batch of the batch, the
    engine calls layer.batch_counted(counts) with the counts of the global batch.

    Args:
        layer: the layer that counts.
        counts: int64 [n], of this rank's tokens.
    """
    losses = _current.get()
    if losses is not None and not is_replaying():
        known = losses.tokens.get(layer)
        losses.tokens[layer] = counts if known is None else known + counts
