"""Recompute activations: store only the inputs of a function, and run it again in the backward
pass.

Dropout draws the same masks again, because it is seeded by names (see random.py).
torch.utils.checkpoint does the same, but its first call imports torch._dynamo, which needs 70 MB.
"""

from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import NamedTuple

import torch

from megazoo.parallel.compile import untraced

MODES = ("none", "selective", "full")
_replaying: ContextVar[bool] = ContextVar("a function runs again for its backward", default=False)


def is_replaying() -> bool:
    """Return whether a forward is running again, for the backward pass."""
    return _replaying.get()


class Moment(NamedTuple):
    """The state of the first run of a function: torch's random generator, for a Dropout without a
    seed, and the context variables."""

    generator: torch.Tensor
    context: Context

    @classmethod
    def now(cls) -> "Moment":
        return cls(torch.get_rng_state(), copy_context())


def replay(function: Callable, first: Moment, *inputs: torch.Tensor) -> torch.Tensor:
    """Run function(*inputs) again, with a graph, in the state of its first run."""
    return first.context.copy().run(_replay, function, first.generator, *inputs)


def _replay(function: Callable, generator: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    now = torch.get_rng_state()
    _replaying.set(True)  # in this copy of the context
    torch.set_rng_state(generator)
    try:
        with torch.enable_grad():
            return function(*inputs)
    finally:
        torch.set_rng_state(now)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function, ctx.first = function, Moment.now()
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        output = replay(ctx.function, ctx.first, *inputs)
        # parameters inside the function get their gradients here
        torch.autograd.backward(output, grad)
        return None, *(x.grad for x in inputs)


@untraced
def recomputed(function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
    """Run function(*inputs), and store only the inputs for the backward pass.

    At least one input must require a gradient.
    """
    return _Recompute.apply(function, *inputs)
