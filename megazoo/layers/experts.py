"""Mixtures of experts: MLPs of which a router chooses a few for each token.

The weights of all experts are stacked. They are sharded over the axis "ep" by experts, and over tp
like those of an MLP. See docs/experts.md.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megazoo.errors import UserError, any_of
from megazoo.layers.dispatch import AXIS, Dispatch
from megazoo.layers.grouped import grouped_linear
from megazoo.layers.layer import Layer
from megazoo.layers.mlp import GatedMLP, gated
from megazoo.layers.product import PLAIN, Product
from megazoo.layers.router import ReplicatedLinear, Router
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.regions import (
    enter_tensor_parallel,
    gather_entering,
    leave_tensor_parallel,
)
from megazoo.parallel.shard import ParameterSpec, Shard, units_for


class StackedLinear(Layer):
    """Base class of the stacked linear layers of experts. share: the part of all tokens that the
    weights multiply. product, lora: as in the parallel linear layers."""

    multiplied = ("weight",)
    weight: torch.nn.Parameter
    lora: Any
    product: Product

    def __init__(
        self,
        shape: tuple[int, int, int],
        shard: Shard,
        std: float,
        share: float,
        ctx: ParallelContext | None,
    ):
        super().__init__(ctx)
        ranks = self.ctx.folded[AXIS].size if AXIS in self.ctx.folded else 1
        if shape[0] % ranks:
            fits = [size for size in range(1, shape[0] + 1) if shape[0] % size == 0]
            raise UserError(
                f"{shape[0]} experts can't be split evenly over ep {ranks}: use ep {any_of(fits)}"
            )
        self.token_share = share
        self.lora, self.product = None, PLAIN
        by_expert = Shard(0, shape[:1], axis=AXIS)
        self.add_parameter("weight", ParameterSpec(shape, (by_expert, shard), std=std))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the products of the rows of each expert, [rows, inputs] -> [rows, outputs].
        counts: rows of each expert of this rank."""
        how = {"product": self.product, "queue": self.weight_queue}
        return (self.lora or grouped_linear)(x, self.use("weight"), counts, **how)


class ColumnParallelExperts(StackedLinear):
    """Compute y = x W^T for the rows of each expert, with the output features sharded over tp.

    The weight is [experts of this rank, this rank's outputs, in_features].

    Args:
        experts: number of experts over all ranks; ep must divide it.
        in_features: size of the last dimension of x.
        out_features: total output features over all tp ranks; a tuple for fused projections, as in
            ColumnParallelLinear.
        std: standard deviation of the initial weights.
        token_share: the part of all tokens that an expert gets on average, for `flops_per_token`.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Raises:
        UserError: The experts or the outputs can't be split over the ranks.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        std: float = 0.02,
        token_share: float = 1.0,
        ctx: ParallelContext | None = None,
    ):
        ctx = ctx or current_context()
        parts = out_features if isinstance(out_features, tuple) else (out_features,)
        shard = Shard(1, parts, units_for(parts, ctx.tp_size))
        shard.check(ctx.tp_size, "outputs")
        super().__init__((experts, sum(parts), in_features), shard, std, token_share, ctx)


class RowParallelExperts(StackedLinear):
    """Compute y = x W^T for the rows of each expert, with the input features sharded over tp.

    y is partial on each tp rank: the caller sums it over tp, once for all experts of a token. The
    weight is [experts of this rank, out_features, this rank's inputs].

    Args:
        experts: number of experts over all ranks; ep must divide it.
        in_features: total input features over all tp ranks.
        out_features: size of the last dimension of y.
        std: standard deviation of the initial weights.
        token_share: as in ColumnParallelExperts.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Raises:
        UserError: The experts or the inputs can't be split over the ranks.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        std: float = 0.02,
        token_share: float = 1.0,
        ctx: ParallelContext | None = None,
    ):
        ctx = ctx or current_context()
        shard = Shard(2, (in_features,), units_for((in_features,), ctx.tp_size))
        shard.check(ctx.tp_size, "inputs")
        super().__init__((experts, out_features, in_features), shard, std, token_share, ctx)


class MixtureOfExperts(Layer):
    """Compute the weighted sum of a few experts for each token, each a gated MLP:

        weights, chosen = router(x)
        y = sum over the chosen experts e of weights[e] * down_e(activation(gate_e(x)) * up_e(x))

    No token is dropped: an expert may get all tokens, or none.

    Args:
        hidden_size: size of the last dimension of x.
        ffn_size: inner features of an expert over all tp ranks.
        router: the Router. It has the number of experts, and of those that a token chooses.
        activation: elementwise function.
        shared_size: inner features of an expert that every token uses; 0: none. Its result is
            multiplied by sigmoid(shared_gate(x)), as in Qwen2-MoE.
        std: standard deviation of the initial weights of gate and up.
        output_std: standard deviation of the initial weights of down.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [batch, sequence, hidden] -> the same shape. Under sequence parallelism both are this rank's
        part of the sequence.

    Raises:
        UserError: ep does not divide the number of experts.

    Example:
        ctx = ParallelContext.from_torch(folded={"ep": 2})
        with ctx:
            experts = MixtureOfExperts(64, 256, Router(64, experts=8, top_k=2))
        y = experts(x)
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        router: Router,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        *,
        shared_size: int = 0,
        std: float = 0.02,
        output_std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.router, self.activation = router, activation
        experts, share = router.experts, router.top_k / router.experts
        self.gate_up = ColumnParallelExperts(
            experts, hidden_size, (ffn_size, ffn_size), std=std, token_share=share, ctx=ctx
        )
        self.down = RowParallelExperts(
            experts, ffn_size, hidden_size, std=output_std, token_share=share, ctx=ctx
        )
        self.has_shared = shared_size > 0
        if self.has_shared:
            self.shared = GatedMLP(
                hidden_size, shared_size, activation, std=std, output_std=output_std, ctx=ctx
            )
            self.shared_gate = ReplicatedLinear(hidden_size, 1, std=std, ctx=ctx)

    def forward(self, x: torch.Tensor, is_token: torch.Tensor | None = None) -> torch.Tensor:
        """Return y for x.

        Args:
            x: activations (shapes: see the class).
            is_token: False for padding, which the router does not count, as
                `MicroBatch.is_token` returns it: bool [batch, sequence]. None: all are tokens.
        """
        y = self._routed(x, *self.router(x, is_token))
        if not self.has_shared:
            return y
        return y + self.shared_gate(x).sigmoid() * self.shared(x)

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts."""
        x = enter_tensor_parallel(x, self.ctx)
        weights = enter_tensor_parallel(weights, self.ctx)
        chosen = gather_entering(chosen, self.ctx)
        dispatch = Dispatch(chosen.flatten(0, -2), self.router.experts, self.ctx)
        rows = self.gate_up(dispatch.send(x.flatten(0, -2)), dispatch.counts)
        rows = self.down(gated(rows, self.activation), dispatch.counts)
        results = dispatch.take_back(rows).view(*chosen.shape, -1)
        y = (weights.unsqueeze(-1) * results).sum(-2)
        return leave_tensor_parallel(y, self.ctx)
