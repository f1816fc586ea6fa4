"""Feed-forward blocks with the inner features sharded over the tensor-parallel ranks."""

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
    """Return the tanh approximation of GELU (Hendrycks and Gimpel 2016), "gelu_new" in GPT-2. Any
    shape."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # by the names of Hugging Face
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
    """Return the activation function for a name in a config.

    Args:
        name: a name from Hugging Face configs: gelu_new, gelu_fast, gelu_pytorch_tanh, gelu, relu,
            silu, swish or tanh.

    Raises:
        UserError: The name is not one of these.
    """
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported: use {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class MLP(Layer):
    """Compute down(activation(up(x))), with the inner features sharded over tp.

    Args:
        hidden_size: size of the last dimension of x.
        ffn_size: inner features over all tp ranks, at least tp; tp need not divide them (see
            `megazoo.parallel.shard.units_for`).
        activation: elementwise function.
        bias: whether both layers have biases.
        std: standard deviation of the initial weights of up.
        output_std: standard deviation of the initial weights of down.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., hidden] -> [..., hidden].
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
        self.recompute = False  # if True: save the input of the activation, not its output
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
    """Compute down(activation(gate(x)) * up(x)), with gate and up in one fused projection.

    With silu it is SwiGLU (Shazeer 2020). The fused weight is [gate; up] along its rows; every rank
    holds its shard of both.

    Args:
        hidden_size: size of the last dimension of x.
        ffn_size: inner features over all tp ranks, at least tp; tp need not divide them.
        activation: elementwise function.
        bias: whether both layers have biases.
        std: standard deviation of the initial weights of gate and up.
        output_std: standard deviation of the initial weights of down.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., hidden] -> [..., hidden].
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
        self.recompute = False  # if True: save the input of the activation, not its output
        self.down = RowParallelLinear(ffn_size, hidden_size, bias, std=output_std, ctx=ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.gate_up(x)
        if self.recompute:
            return self.down(inner, recompute=partial(gated, activation=self.activation))
        return self.down(gated(inner, self.activation))
