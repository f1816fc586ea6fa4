"""Low-rank adapters of linear layers (LoRA: Hu et al. 2021), cut over tp as their layers are.

The weight W [outputs, inputs] of a layer stays as it is; what is trained is a change of low rank:

    y = x W^T + scale * dropout(x) A^T B^T        A [rank, inputs], B [outputs, rank]

An adapter's output is in the same state as its layer's, so that it costs no communication:

    column-parallel    x is whole, y is cut by its outputs: A is on every rank, B is cut as W
    row-parallel       x is cut by its inputs, y is a partial sum: A is cut as W, B is on every rank

The factor that every rank has gets only a part of its gradient on each, for the other factor is cut
there: like other such parts they are summed over tp after the last backward.
"""

from collections.abc import Callable, ValuesView
from dataclasses import replace

import torch
from torch import nn

from megazoo.layers.dropout import Dropout
from megazoo.layers.layer import Layer
from megazoo.layers.matmul import linear, multiply
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import AtOnce, WeightQueue
from megazoo.parallel.regions import enter_tensor_parallel
from megazoo.parallel.shard import ParameterSpec, Shard


class Adapter(Layer):
    """The change of one matrix, of rank `rank`: x -> scale * dropout(x) A^T B^T.

    Args:
        outputs, inputs: of the matrix, over all tp ranks.
        outputs_cut, inputs_cut: how it is cut over tp: of the two at most one is given.
        rank, scale, dropout: of the adapter.
        ctx: parallel context; the ambient one by default.

    A begins evenly drawn from +-1 / sqrt(inputs), as PEFT draws it; B with zeros: the model is at
    first what it was. Dropout draws the same mask in every layout, but where the inputs are cut:
    there each tp rank draws for its own. Shapes: [..., this rank's inputs] -> [..., this rank's
    outputs].
    """

    multiplied = ("A", "B")
    A: nn.Parameter
    B: nn.Parameter

    def __init__(
        self,
        outputs: int,
        inputs: int,
        outputs_cut: Shard | None,
        inputs_cut: Shard | None,
        *,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.rank, self.scale = rank, scale
        self.dropout = Dropout(dropout, ctx=ctx)
        # under sequence parallelism, too: x is gathered by then, the same on each tp rank
        self.dropout.parallel = inputs_cut is not None
        bound = inputs**-0.5
        a = ParameterSpec((rank, inputs), inputs_cut, bound=bound, partial=inputs_cut is None)
        b = ParameterSpec((outputs, rank), outputs_cut, partial=outputs_cut is None)
        self.add_parameter("A", replace(a, added=True))
        self.add_parameter("B", replace(b, added=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project_up(self.project_down(x))

    def project_down(self, x: torch.Tensor) -> torch.Tensor:
        """Return dropout(x) A^T: [..., rank]."""
        return linear(self.dropout(x), self.synced_parameter("A"), queue=self.weight_queue)

    def project_up(self, inner: torch.Tensor) -> torch.Tensor:
        """Return scale * inner B^T, for inner [..., rank]."""
        return linear(inner * self.scale, self.synced_parameter("B"), queue=self.weight_queue)

    @torch.no_grad()
    def change(self) -> torch.Tensor:
        """Return what the adapter adds to this rank's part of the weight: scale * B A, fp32 [this
        rank's outputs, this rank's inputs]."""
        return self.scale * (self.B.float() @ self.A.float())


class Adapters(nn.ModuleDict):
    """The adapters of a layer, by the names of the parts of its outputs that they change.

    sizes: the outputs of every part that this rank has. A single part is the whole layer.
    """

    same_input = True
    values: Callable[[], ValuesView[Adapter]]
    __getitem__: Callable[[str], Adapter]

    def __init__(self, adapters: dict[str, Adapter], sizes: dict[str, int]):
        super().__init__()
        self.sizes = sizes
        # past ModuleDict's own check, which refuses a layer that is called "keys"
        self._modules.update(adapters)

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        entering: ParallelContext | None = None,
        recompute: Callable[[torch.Tensor], torch.Tensor] | None = None,
        queue: WeightQueue | AtOnce | None = None,
    ) -> torch.Tensor:
        """Return what a layer makes of x, with what the adapters add to it; the layer's arguments
        are those of `megazoo.layers.matmul.linear`. x is entered once, or recomputed once."""
        if any(adapter.dropout.active for adapter in self.values()):  # each has another x
            x = enter_tensor_parallel(x, entering) if entering else x
            x = recompute(x) if recompute else x
            y = linear(x, weight, bias, queue=queue)
            inner = [adapter.project_down(x) for adapter in self.values()]
        else:
            first = [adapter.synced_parameter("A") for adapter in self.values()]
            how = {"entering": entering, "recompute": recompute, "queue": queue}
            y, *inner = multiply(x, (weight, *first), bias, **how)
        return self._added(y, dict(zip(self, inner, strict=True)))

    def _added(self, y: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return y with each adapter's change added to the part of y that it changes. inner: what
        the adapters' `project_down` have returned."""
        parts = y.split(list(self.sizes.values()), dim=-1)
        changed = [
            part + self[name].project_up(inner[name]) if name in self else part
            for name, part in zip(self.sizes, parts, strict=True)
        ]
        return changed[0] if len(changed) == 1 else torch.cat(changed, dim=-1)

    @torch.no_grad()
    def merge_into(self, weight: torch.Tensor) -> None:
        """Add what the adapters change to this rank's part of the layer's weight, in place; the sum
        is made in fp32 and rounded once."""
        rows = weight.split(list(self.sizes.values()), dim=0)
        for name, part in zip(self.sizes, rows, strict=True):
            if name in self:
                part.copy_(part.float() + self[name].change())
