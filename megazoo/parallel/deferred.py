"""The queue of weight gradients, for schedules that split the backward."""

from collections.abc import Callable

import torch


class WeightQueue:
    """Keeps weight gradients until an idle moment of the pipeline (Qi et al. 2023).

    received: called once for each weight that a micro-batch has added to. weights: all that have
    ever waited.
    """

    def __init__(self, received: Callable[[torch.nn.Parameter], None]):
        self.received = received
        self.weights: set[torch.nn.Parameter] = set()
        self._waiting: list[tuple[torch.nn.Parameter, Callable[[], torch.Tensor]]] = []

    def put(self, weight: torch.nn.Parameter, gradient: Callable[[], torch.Tensor]) -> None:
        """Add gradient() to the weight's gradient later."""
        self._waiting.append((weight, gradient))
        self.weights.add(weight)

    def take(self) -> Callable[[], None]:
        """Return a function that computes what has been put so far, in autograd's order."""
        waiting, self._waiting = self._waiting, []

        def compute() -> None:
            weights = dict.fromkeys(weight for weight, _ in waiting)
            while waiting:
                weight, gradient = waiting.pop(0)
                if weight.grad is None:
                    weight.grad = gradient().float()
                else:
                    weight.grad += gradient()
            for weight in weights:
                self.received(weight)

        return compute
