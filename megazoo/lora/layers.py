"""Low-rank adapters of linear layers (LoRA: Hu et al. 2021), sharded over tp like their layers.

The weight W [outputs, inputs] of a layer is frozen. A low-rank change of it is trained:

    y = x W^T + scale * dropout(x) A^T B^T        A [rank, inputs], B [outputs, rank]

An adapter's output is sharded like that of its layer, so it needs no communication:

    column-parallel    x is replicated, y is sharded by outputs: A is replicated, B sharded like W
    row-parallel       x is sharded by inputs, y is a partial sum: A sharded like W, B is replicated

The other factor is sharded, so each rank computes only a part of the gradient of the replicated
factor. These parts are summed over tp after the last backward. If W is replicated, A and B are also
replicated, and their gradients are complete.

The experts of a layer have stacked weights W [experts, outputs, inputs]. A and B are stacked too,
and sharded over ep by experts, like W.
"""

from collections.abc import Callable, ValuesView
from dataclasses import replace

import torch
from torch import nn

from megazoo.layers.dropout import Dropout
from megazoo.layers.grouped import grouped_linear
from megazoo.layers.layer import Layer
from megazoo.layers.matmul import Inputs, Recompute, linear, multiply
from megazoo.layers.product import PLAIN, Product
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import AtOnce, WeightQueue
from megazoo.parallel.regions import enter_tensor_parallel
from megazoo.parallel.shard import ParameterSpec, Shard


class Adapter(Layer):
    """Adapt one matrix with a change of low rank: x -> scale * dropout(x) A^T B^T.

    As in PEFT, the initial values of A are uniform in +-1 / sqrt(inputs), and B is zero, so the
    adapter does not change the model at first. Dropout draws the same mask in every layout, except
    if the inputs are sharded: then each tp rank draws a separate mask.

    Args:
        outputs, inputs: sizes of the matrix over all tp ranks.
        outputs_cut, inputs_cut: how it is sharded over tp; at most one of them is given.
        experts: how a stack of matrices is sharded over ep; None: a single matrix.
        rank, scale, dropout: rank of the adapter, factor of its output, dropout probability.
        ctx: parallel context; by default the ambient one.

    Shapes: [..., this rank's inputs] -> [..., this rank's outputs].
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
        experts: Shard | None = None,
        *,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.rank, self.scale = rank, scale
        self.dropout = Dropout(dropout, ctx=ctx)
        # also with sequence parallelism: x is gathered by then, the same on each tp rank
        self.dropout.parallel = inputs_cut is not None
        stack, matrices = ((experts,), experts.parts) if experts else ((), ())
        is_cut = outputs_cut or inputs_cut

        def add(name: str, rows: int, columns: int, cut: Shard | None, bound: float) -> None:
            shards = (*stack, cut) if cut else stack
            partial = bool(is_cut) and not cut  # the other factor is sharded
            spec = ParameterSpec((*matrices, rows, columns), shards, bound=bound, partial=partial)
            self.add_parameter(name, replace(spec, added=True))

        add("A", rank, inputs, inputs_cut, inputs**-0.5)
        add("B", outputs, rank, outputs_cut, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project_up(self.project_down(x))

    def project_down(self, x: torch.Tensor) -> torch.Tensor:
        """Return dropout(x) A^T: [..., rank]."""
        return linear(self.dropout(x), self.use("A"), queue=self.weight_queue)

    def project_up(self, inner: torch.Tensor) -> torch.Tensor:
        """Return scale * inner B^T, for inner [..., rank]."""
        return linear(inner * self.scale, self.use("B"), queue=self.weight_queue)

    @torch.no_grad()
    def change(self) -> torch.Tensor:
        """Return the change of this rank's shard of the weight: scale * B A, in fp32, with the
        shape of the shard."""
        return self.scale * (self.B.float() @ self.A.float())


class _Adapters(nn.ModuleDict):
    """Hold the adapters of a layer, by the names of the parts that they change.

    sizes: size of each part on this rank along the first dimension of the weight. A single part is
    the complete layer.
    """

    values: Callable[[], ValuesView[Adapter]]
    __getitem__: Callable[[str], Adapter]

    def __init__(self, adapters: dict[str, Adapter], sizes: dict[str, int]):
        super().__init__()
        self.sizes = sizes
        # not through ModuleDict's check, which does not allow a layer with the name "keys"
        self._modules.update(adapters)

    @torch.no_grad()
    def merge_into(self, weight: torch.Tensor) -> None:
        """Add the adapters to this rank's shard of the layer's weight, in place. The sum is
        computed in fp32 and rounded once."""
        rows = weight.split(list(self.sizes.values()), dim=0)
        for name, part in zip(self.sizes, rows, strict=True):
            if name in self:
                part.copy_(part.float() + self[name].change())


class Adapters(_Adapters):
    """Hold the adapters of a linear layer, by the names of the parts of its outputs that they
    change."""

    same_input = True

    def forward(
        self,
        x: Inputs,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        product: Product = PLAIN,
        entering: ParallelContext | None = None,
        recompute: Recompute | None = None,
        queue: WeightQueue | AtOnce | None = None,
    ) -> torch.Tensor:
        """Return the output of a layer with its adapters. The arguments are those of
        `megazoo.layers.matmul.linear`; the layer and its adapters share entering and recompute."""
        if any(adapter.dropout.active for adapter in self.values()):  # each has a different x
            inputs = x if isinstance(x, tuple) else (x,)
            x = recompute(*inputs) if recompute else inputs[0]
            x = enter_tensor_parallel(x, entering) if entering else x
            y = linear(x, weight, bias, product=product, queue=queue)
            inner = [adapter.project_down(x) for adapter in self.values()]
        else:
            first = [adapter.use("A") for adapter in self.values()]
            products = (product, *[PLAIN] * len(first))
            how = {"entering": entering, "recompute": recompute, "queue": queue}
            y, *inner = multiply(x, (weight, *first), bias, products=products, **how)
        return self._added(y, dict(zip(self, inner, strict=True)))

    def _added(self, y: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return y with each adapter's output added to the part of y that it changes. inner: the
        outputs of the adapters' `project_down`."""
        parts = y.split(list(self.sizes.values()), dim=-1)
        changed = [
            part + self[name].project_up(inner[name]) if name in self else part
            for name, part in zip(self.sizes, parts, strict=True)
        ]
        return changed[0] if len(changed) == 1 else torch.cat(changed, dim=-1)


class ExpertAdapters(_Adapters):
    """Hold the adapter of the stacked weights of a layer's experts."""

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        counts: torch.Tensor,
        *,
        product: Product = PLAIN,
        queue: WeightQueue | AtOnce | None = None,
    ) -> torch.Tensor:
        """Return the output of the layer with its adapter. The arguments are those of
        `megazoo.layers.grouped.grouped_linear`."""
        (adapter,) = self.values()
        inner = grouped_linear(x, adapter.use("A"), counts, queue=queue) * adapter.scale
        y = grouped_linear(x, weight, counts, product=product, queue=queue)
        return y + grouped_linear(inner, adapter.use("B"), counts, queue=queue)
