"""Feed-forward blocks whose inner features are cut over the tensor-parallel ranks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from megazoo.errors import UserError
from megazoo.layers import fused
from megazoo.layers.fused import replaced_by
from megazoo.layers.layer import Layer
from megazoo.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazoo.parallel.context import ParallelContext


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016): GPT-2's "gelu_new"."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # under Hugging Face's names
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation_named(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation that a config names; UserError if it is not in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported: there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class MLP(Layer):
    """down(activation(up(x))).

    Args:
        hidden_size: size of x's last dimension.
        ffn_size: inner features over all tp ranks, at least one for each; tp need not divide them
            (see `megazoo.parallel.shard.units_for`).
        activation: elementwise function.
        bias: biases on both layers.
        std, output_std: standard deviations of the initial weights of up and down.
        ctx: parallel context; the ambient one by default.

    Shapes: [..., hidden] -> [..., hidden].
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: Callable[[torch.Tensor], torch.Tensor] = gelu_tanh,
        *,
        bias: bool = True,
        std: float = 0.02,
        output_std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.up = ColumnParallelLinear(hidden_size, ffn_size, bias, std=std, ctx=ctx)
        self.activation = activation
        self.recompute = False  # if True: keep what goes into the activation, not what comes out
        self.down = RowParallelLinear(ffn_size, hidden_size, bias, std=output_std, ctx=ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        if self.recompute:
            return self.down(inner, recompute=self.activation)
        return self.down(self.activation(inner))


@replaced_by(fused.gated)
def gated(inner: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return activation(gate) * up: [..., features of gate and of up] -> [..., half as many]."""
    gate, up = inner.chunk(2, dim=-1)
    return activation(gate) * up


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)) with gate and up in one fused projection (Shazeer 2020;
    SwiGLU with silu).

    Args and shapes as in MLP. The fused weight is [gate; up] along its rows; every rank holds its
    share of both.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        *,
        bias: bool = False,
        std: float = 0.02,
        output_std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.gate_up = ColumnParallelLinear(
            hidden_size,
            (ffn_size, ffn_size),
            bias,
            part_names=("gate", "up"),
            std=std,
            ctx=ctx,
        )
        self.activation = activation
        self.recompute = False  # if True: keep what goes into the activation, not what comes out
        self.down = RowParallelLinear(ffn_size, hidden_size, bias, std=output_std, ctx=ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.gate_up(x)
        if self.recompute:
            return self.down(inner, recompute=partial(gated, activation=self.activation))
        return self.down(gated(inner, self.activation))
