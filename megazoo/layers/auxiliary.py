"""Auxiliary losses that a layer adds to the training loss, such as the load balance of a router."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from megazoo.errors import UserError
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.compile import untraced
from megazoo.parallel.recompute import is_replaying


class AuxiliaryLosses:
    """The auxiliary losses of one run of micro-batches.

    names: those that layers of the model declare. counts: what the means are over, such as
    "labels", each 0-dimensional. scale: the gradient of the loss of the run; call `set_scale`
    before backward.
    """

    def __init__(self, names: Iterable[str], counts: dict[str, torch.Tensor]):
        self.counts = {what: count.clamp(min=1) for what, count in counts.items()}
        self.scale: float | torch.Tensor = 1.0
        zero = torch.zeros((), dtype=torch.float64, device=counts["labels"].device)
        self.means = {name: zero.clone() for name in sorted(names)}

    def attach(self, x: torch.Tensor, name: str, total: torch.Tensor, over: str) -> torch.Tensor:
        """See `attach_loss`."""
        if name not in self.means:
            raise UserError(
                f"the auxiliary loss {name!r} is not declared: add to the class of the layer "
                f"auxiliary_losses = ({name!r},)"
            )
        if over not in self.counts:
            raise UserError(
                f"an auxiliary loss can't be a mean over {over!r}: use labels, tokens or rows"
            )
        if not is_replaying():
            self.means[name] += total.detach().double() / self.counts[over]
        return _Attached.apply(x, total, self, self.counts[over])

    def set_scale(self, scale: float | torch.Tensor) -> None:
        """Set the gradient of the loss of the run, before backward reaches the layers."""
        self.scale = scale

    def reduced(self, axes: Iterable[Axis]) -> dict[str, torch.Tensor]:
        """Return the means over all micro-batches and over the ranks of some axes, as {name: mean}:
        fp32, 0-dimensional, the same on every rank."""
        means = torch.stack(list(self.means.values()))
        all_reduce_over(means, axes)
        return dict(zip(self.means, means.float(), strict=True))


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, total, losses: AuxiliaryLosses, count):
        ctx.losses, ctx.count, ctx.dtype = losses, count, total.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, (ctx.losses.scale / ctx.count).to(ctx.dtype), None, None


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
