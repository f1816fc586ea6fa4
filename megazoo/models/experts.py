"""The parts that the families with mixtures of experts share: fields of their configs, and a block
in which experts replace the MLP.

    x = x + attention(attention_norm(x))                            each layer
    x = x + sum over the chosen experts e of weight_e * mlp_e(mlp_norm(x))

Experts are sharded over ep by experts, and over tp like an MLP. The router is replicated.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError, any_of, check_number
from megazoo.families.names import HFNames
from megazoo.layers import MixtureOfExperts, Router, activation_named
from megazoo.layers.fused import CosAndSin
from megazoo.layers.router import BALANCES
from megazoo.models import llama

# in the transformers model, which stacks the experts
ROUTER = "model.layers.{}.mlp.gate.weight"
GATE_UP = "model.layers.{}.mlp.experts.gate_up_proj"
DOWN = "model.layers.{}.mlp.experts.down_proj"

# of one expert in the files: its number replaces []
NAMES = {
    "layers.{}.moe.router": HFNames("model.layers.{}.mlp.gate", parameter=ROUTER),
    "layers.{}.moe.gate_up": HFNames(
        "model.layers.{}.mlp.experts.[].gate_proj",
        "model.layers.{}.mlp.experts.[].up_proj",
        parameter=GATE_UP,
    ),
    "layers.{}.moe.down": HFNames("model.layers.{}.mlp.experts.[].down_proj", parameter=DOWN),
}
SHARED_NAMES = {
    "layers.{}.moe.shared.gate_up": HFNames(
        "model.layers.{}.mlp.shared_expert.gate_proj", "model.layers.{}.mlp.shared_expert.up_proj"
    ),
    "layers.{}.moe.shared.down": HFNames("model.layers.{}.mlp.shared_expert.down_proj"),
    "layers.{}.moe.shared_gate": HFNames("model.layers.{}.mlp.shared_expert_gate"),
}
MIXTRAL_NAMES = {
    "layers.{}.moe.router": HFNames("model.layers.{}.block_sparse_moe.gate", parameter=ROUTER),
    "layers.{}.moe.gate_up": HFNames(
        "model.layers.{}.block_sparse_moe.experts.[].w1",
        "model.layers.{}.block_sparse_moe.experts.[].w3",
        parameter=GATE_UP,
    ),
    "layers.{}.moe.down": HFNames("model.layers.{}.block_sparse_moe.experts.[].w2", parameter=DOWN),
}
MOST_FEATURES = 2**24  # inner features of an expert, below
MOST_EXPERTS = 4096  # of a layer; it stops a malicious config before a model is built


@dataclass(frozen=True, kw_only=True)
class ExpertsFields:
    """Hold the fields of a family with experts, in addition to those of LlamaFamilyConfig.

    Args:
        experts: number of experts of a layer.
        experts_per_token: number of experts that the router chooses for each token.
        expert_size: inner features of an expert; 0: ffn_size.
        normalize_weights: whether the weights of a token's experts are divided by their sum.
        router_balance: how the load of the experts is balanced: see `Router`.
        router_aux_loss_coef: factor of the auxiliary loss that balances the load.
        router_z_loss_coef: factor of the auxiliary loss on the logits of the router.
        router_bias_rate: change of the bias per batch, with router_balance "bias".
        sparse_step: every such layer has experts, the others have an MLP of ffn_size.
        dense_layers: indices of further layers that have an MLP.
        shared_size: inner features of an expert that all tokens use; 0: none.
    """

    experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 0
    normalize_weights: bool = True
    router_balance: str = "sequence"
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0
    router_bias_rate: float = 0.001
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    shared_size: int = 0

    def __post_init__(self):
        parent: Any = super()
        parent.__post_init__()
        object.__setattr__(self, "dense_layers", tuple(_indices(self.dense_layers)))
        check_number("experts", self.experts, 1, MOST_EXPERTS + 1, whole=True)
        check_number("experts_per_token", self.experts_per_token, 1, self.experts + 1, whole=True)
        check_number("expert_size", self.expert_size, 0, MOST_FEATURES, whole=True)
        check_number("shared_size", self.shared_size, 0, MOST_FEATURES, whole=True)
        check_number("sparse_step", self.sparse_step, 1, whole=True)
        check_number("router_aux_loss_coef", self.router_aux_loss_coef, 0)
        check_number("router_z_loss_coef", self.router_z_loss_coef, 0)
        check_number("router_bias_rate", self.router_bias_rate, 0)
        if not isinstance(self.normalize_weights, bool):
            raise UserError(
                f"normalize_weights must be true or false, not {self.normalize_weights!r}"
            )
        if self.router_balance not in BALANCES:
            raise UserError(
                f"unknown router_balance {self.router_balance!r}: use {any_of(BALANCES)}"
            )

    def has_experts(self, index: int) -> bool:
        """Return whether a layer has experts instead of an MLP. index: of the layer."""
        return (index + 1) % self.sparse_step == 0 and index not in self.dense_layers


def _indices(layers: Any) -> Iterable[int]:
    """Return indices of layers; UserError for another value."""
    if not isinstance(layers, list | tuple) or not all(type(index) is int for index in layers):
        raise UserError(f"dense_layers must be a list of indices of layers, not {layers!r:.80}")
    return layers


class Block(llama.Block):
    """A layer of llama.py in which a MixtureOfExperts, `moe`, replaces the MLP, if the config says
    so."""

    kernel_masks = True

    def add_mlp(self, config: Any, index: int, residual_std: float) -> None:
        self.is_sparse = config.has_experts(index)
        if not self.is_sparse:
            super().add_mlp(config, index, residual_std)
            return
        router = Router(
            config.hidden_size,
            config.experts,
            config.experts_per_token,
            normalize=config.normalize_weights,
            balance=config.router_balance,
            balance_coefficient=config.router_aux_loss_coef,
            z_coefficient=config.router_z_loss_coef,
            bias_rate=config.router_bias_rate,
        )
        self.moe = MixtureOfExperts(
            config.hidden_size,
            config.expert_size or config.ffn_size,
            router,
            activation_named(config.activation),
            shared_size=config.shared_size,
            output_std=residual_std,
        )

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, rotary: CosAndSin, mask: torch.Tensor | None
    ) -> torch.Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, batch.dropout_seed, rotary, mask, batch.cache)
        normed = self.mlp_norm(x)
        if not self.is_sparse:
            return x + self.mlp(normed)
        return x + self.moe(normed, batch.is_token(self.ctx))
