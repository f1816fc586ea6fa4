"""Auxiliary losses: what a layer adds to the loss of training, such as the balance of a router."""

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

    names: those that layers of the model declare. labels, rows: the counts that means are over.
    scale: the gradient of the run's loss; `set_scale` is called before backward.
    """

    def __init__(self, names: Iterable[str], labels: torch.Tensor, rows: torch.Tensor):
        self.counts = {"labels": labels.clamp(min=1), "rows": rows.clamp(min=1)}
        self.scale: float | torch.Tensor = 1.0
        zero = torch.zeros((), dtype=torch.float64, device=labels.device)
        self.means = {name: zero.clone() for name in sorted(names)}

    def attach(self, x: torch.Tensor, name: str, total: torch.Tensor, over: str) -> torch.Tensor:
        """See `attach_loss`."""
        if name not in self.means:
            raise UserError(
                f"a layer attaches the auxiliary loss {name!r}: its class must declare it, "
                f"auxiliary_losses = ({name!r},)"
            )
        if over not in self.counts:
            raise UserError(f"an auxiliary loss is a mean over {over!r}: use labels or rows")
        if not is_replaying():
            self.means[name] += total.detach().double() / self.counts[over]
        return _Attached.apply(x, total, self, self.counts[over])

    def set_scale(self, scale: float | torch.Tensor) -> None:
        """Set the gradient of the run's loss, before backward reaches the layers."""
        self.scale = scale

    def reduced(self, axes: Iterable[Axis]) -> dict[str, torch.Tensor]:
        """Return the means over all micro-batches and over the ranks of some axes, by their names:
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
    """Within this block layers leave their auxiliary losses with `losses`."""
    token = _current.set(losses)
    try:
        yield
    finally:
        _current.reset(token)


@untraced
def attach_loss(
    x: torch.Tensor, name: str, total: torch.Tensor, *, over: str = "labels"
) -> torch.Tensor:
    """Return x, whose backward is also that of an auxiliary loss of a layer.

    Training then minimises the loss plus the mean of `total` over the global batch. `train_batch`
    returns the loss without it; `model.engine.auxiliary_losses` and the metrics have the mean by
    its name. Outside of training, x alone. Do not write into what is returned: it is a view of x.

    Args:
        x: an activation on the way to the loss, of any shape.
        name: which auxiliary loss; layers of a model that use the same name are added. The layer's
            class declares it: auxiliary_losses = (name,).
        total: 0-dimensional, fp32: its sum over what this rank has of the micro-batch, without
            padding (`MicroBatch.is_token`), which layouts may add. Ranks that have the same tokens
            (tp, without sequence parallelism) have the same total.
        over: "labels", the mean is over labelled tokens, as the loss is; or "rows".

    Errors: UserError for a name that is not declared, or another `over`.
    """
    losses = _current.get()
    return x if losses is None else losses.attach(x, name, total, over)
