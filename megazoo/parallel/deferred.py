"""Gradients of linear weights that are added outside of autograd: immediately, or, for schedules
that split the backward, later."""

from collections.abc import Callable

import torch

from megazoo.torch_internals import has_gradient_hooks, product_in_fp32

BLOCK = 1 << 20  # elements of a product that are converted at a time: see add_product
Add = Callable[[torch.Tensor | None], torch.Tensor]


class WeightQueue:
    """Keeps weight gradients until an idle moment of the pipeline (Qi et al. 2023).

    received: called once for each weight that a micro-batch has added to. weights: all that have
    ever waited.
    """

    def __init__(self, received: Callable[[torch.nn.Parameter], None]):
        self.received = received
        self.weights: set[torch.nn.Parameter] = set()
        self._waiting: list[tuple[torch.nn.Parameter, Add]] = []

    def serves(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether a layer that multiplies x by `weight` should use the queue. Not for a
        tensor that is computed from a parameter: autograd passes its gradient on."""
        return weight.is_leaf

    def put(self, weight: torch.nn.Parameter, add: Add) -> None:
        """Change the weight's gradient later to add(gradient). Returns what is left for autograd to
        add: nothing.

        add: takes the gradient so far, or None, and returns the new one. It may add in place.
        """
        self._waiting.append((weight, add))
        self.weights.add(weight)

    def take(self) -> Callable[[], None]:
        """Return a function that computes what has been put so far, in autograd's order."""
        waiting, self._waiting = self._waiting, []

        def compute() -> None:
            weights = dict.fromkeys(weight for weight, _ in waiting)
            while waiting:
                weight, add = waiting.pop(0)
                weight.grad = add(weight.grad)
                del add  # and the tensors that it multiplies
            for weight in weights:
                self.received(weight)

        return compute


class AtOnce:
    """Used instead of a WeightQueue if no gradient is delayed: for 16-bit weights on CUDA, it adds
    each product to the fp32 gradient in the kernel that multiplies.

    Autograd would round the product to 16 bits, convert it and add it, with two more kernels.
    """

    def serves(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether a layer that multiplies x by `weight` should use it.

        Not under torch.compile, and not if autograd must do more with each product than add it: for
        a tensor that is not a parameter, or has hooks on its gradient.
        """
        return (
            not torch.compiler.is_compiling()
            and multiplies_in_fp32(x)
            and x.dtype == weight.dtype
            and weight.is_leaf
            and weight.grad_dtype == torch.float32
            and not has_gradient_hooks(weight)
        )

    def put(self, weight: torch.nn.Parameter, add: Add) -> torch.Tensor:
        """Return add(the weight's gradient so far); autograd then stores it as the gradient.

        The weight has no gradient until then, so autograd copies nothing. It still adds the
        gradients of other uses of the weight in this backward, and notifies the buckets once, at
        the end.
        """
        total, weight.grad = weight.grad, None
        return add(total)


AT_ONCE = AtOnce()


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return total + a b, in fp32, in total's memory; without a total, a b."""
    if multiplies_in_fp32(a):
        return product_in_fp32(total, a, b)
    if total is None:
        return (a @ b).float()
    product = a @ b
    if product.dtype == total.dtype or not product.numel():
        return total.add_(product)
    rows = max(1, BLOCK // product.shape[-1])
    for block, added in zip(total.split(rows), product.split(rows), strict=True):
        block.add_(added)  # torch first converts the product to fp32, in new memory
    return total


def multiplies_in_fp32(factor: torch.Tensor) -> bool:
    """Say whether the device gives products of such factors, of 16 bits each, in fp32."""
    return factor.is_cuda and factor.dtype in (torch.float16, torch.bfloat16)
