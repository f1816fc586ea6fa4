"""Recompute activations: keep a function's inputs, not what it saves, and run it again in backward.

Dropout draws the same masks again, because it is seeded by names (see random.py).
(torch.utils.checkpoint does as much, but its first call imports torch._dynamo: 70 MB.)
"""

from collections.abc import Callable
from contextvars import ContextVar

import torch

from megazoo.parallel.compile import untraced

MODES = ("none", "selective", "full")
_replaying: ContextVar[bool] = ContextVar("a function runs again for its backward", default=False)


def is_replaying() -> bool:
    """Return whether what runs now has run before, and runs again for backward."""
    return _replaying.get()


def replay(function: Callable, generator: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Run function(*inputs) again, with a graph.

    generator: the state in which torch's random generator was, for a Dropout without a seed.
    """
    now, token = torch.get_rng_state(), _replaying.set(True)
    torch.set_rng_state(generator)
    try:
        with torch.enable_grad():
            return function(*inputs)
    finally:
        torch.set_rng_state(now)
        _replaying.reset(token)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function, ctx.generator = function, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        output = replay(ctx.function, ctx.generator, *inputs)
        # parameters inside the function get their gradients here
        torch.autograd.backward(output, grad)
        return None, *(x.grad for x in inputs)


@untraced
def recomputed(function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
    """Run function(*inputs), keeping only the inputs for backward.

    At least one input must require a gradient.
    """
    return _Recompute.apply(function, *inputs)
