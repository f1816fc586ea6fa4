"""Recompute activations: keep a function's inputs, not what it saves, and run it again in backward.

Dropout draws the same masks again, because it is seeded by names (see random.py).
(torch.utils.checkpoint does as much, but its first call imports torch._dynamo: 70 MB.)
"""

from collections.abc import Callable

import torch

from megazoo.parallel.compile import untraced

MODES = ("none", "selective", "full")


def replay(function: Callable, generator: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Run function(*inputs) again, with a graph.

    generator: the state in which torch's random generator was, for a Dropout without a seed.
    """
    now = torch.get_rng_state()
    torch.set_rng_state(generator)
    with torch.enable_grad():
        output = function(*inputs)
    torch.set_rng_state(now)
    return output


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
