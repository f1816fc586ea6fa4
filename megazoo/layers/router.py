"""The router of a mixture of experts: it chooses the experts of each token, and keeps their load
balanced."""

from typing import Any

import torch
import torch.distributed as dist

from megazoo.errors import UserError, any_of
from megazoo.layers.auxiliary import (
    attach_joint_loss,
    attach_loss,
    collects_losses,
    count_tokens,
)
from megazoo.layers.layer import Layer
from megazoo.layers.matmul import linear
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec

BALANCES = ("sequence", "batch", "bias", "none")


class ReplicatedLinear(Layer):
    """Compute y = x W^T with the whole weight on every rank.

    Args:
        in_features: size of the last dimension of x.
        out_features: size of the last dimension of y.
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., in_features] -> [..., out_features]. Under sequence parallelism both have this rank's
        part of the sequence.
    """

    multiplied = ("weight",)
    weight: torch.nn.Parameter
    lora: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.lora = None  # product of the weight with adapters, from megazoo.lora
        self.add_parameter("weight", ParameterSpec((out_features, in_features), std=std))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lora or linear)(x, self.use("weight"), None)


class Router(ReplicatedLinear):
    """Choose the experts of each token, and their weights (Shazeer et al. 2017):

        probabilities = softmax(x W^T), in fp32
        weights, chosen = the top_k largest of them

    Balance "sequence" adds an auxiliary loss per row of the batch (DeepSeek-AI 2024), the same in
    every layout:

        loss = experts / (top_k T^2) * sum over the experts e of count_e * sum of probability_e

    with the T tokens of the row, of which count_e chose expert e. The mean over the rows of the
    global batch, times `balance_coefficient`, is added to the training loss, for each layer. It is
    `balance_coefficient` if all experts have equal loads.

    Balance "batch" adds the auxiliary loss of transformers, once for all layers:

        loss = experts * sum over the experts e of mean count_e * mean probability_e

    with the means over all tokens of the global batch and all layers. All forwards must precede the
    first backward: see `attach_joint_loss`.

    Balance "bias" adds no loss. A bias is added to the probabilities when experts are chosen, but
    not to the weights. After each batch it grows by `bias_rate` for experts with less than the mean
    load, and falls for the others (Wang et al. 2024).

    Args:
        hidden_size: size of the last dimension of x.
        experts: number of experts.
        top_k: number of experts of each token.
        normalize: whether the weights of a token are divided by their sum.
        balance: "sequence", "batch", "bias" or "none".
        balance_coefficient: factor of the auxiliary loss.
        bias_rate: change of the bias per batch.
        z_coefficient: factor of the mean over all tokens of log(sum(exp(logits)))^2, which keeps
            the logits near 0 (Zoph et al. 2022); it is added to the training loss, for each layer.
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [batch, sequence, hidden] -> weights, in the dtype of x, and chosen, int64: both [batch,
        sequence, top_k]. Under sequence parallelism all have this rank's part of the sequence.

    Raises:
        UserError: top_k is not between 1 and the number of experts, or the balance is unknown.
    """

    counts_tokens = True
    bias: torch.nn.Parameter
    shown = ("top_k", "balance")

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        *,
        normalize: bool = False,
        balance: str = "sequence",
        balance_coefficient: float = 0.001,
        z_coefficient: float = 0.0,
        bias_rate: float = 0.001,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(hidden_size, experts, std=std, ctx=ctx)
        if not 1 <= top_k <= experts:
            raise UserError(f"top_k {top_k} must be from 1 to the number of experts, {experts}")
        if balance not in BALANCES:
            raise UserError(f"unknown router balance {balance!r}: use {any_of(BALANCES)}")
        self.experts, self.top_k, self.normalize = experts, top_k, normalize
        self.balance, self.balance_coefficient = balance, balance_coefficient
        self.z_coefficient, self.bias_rate = z_coefficient, bias_rate
        is_added = {
            "router_balance": balance == "sequence" and balance_coefficient > 0,
            "router_z": z_coefficient > 0,
        }
        self.auxiliary_losses = tuple(name for name, added in is_added.items() if added)
        if balance == "batch" and balance_coefficient:
            self.joint_losses = {"router_balance": experts}
        if balance == "bias":
            self.add_parameter("bias", ParameterSpec((experts,), is_state=True))
        # number of tokens of the last batch that chose each expert
        self.load: torch.Tensor | None = None

    def forward(
        self, x: torch.Tensor, is_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the chosen experts. is_token: as in `MixtureOfExperts`."""
        logits = super().forward(x).float()
        probabilities = logits.softmax(-1)
        if self.balance == "bias":
            chosen = (probabilities.detach() + self.use("bias")).topk(self.top_k).indices
            weights = probabilities.gather(-1, chosen)
        else:
            weights, chosen = probabilities.topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        if not collects_losses():
            return weights, chosen
        if is_token is None:
            is_token = torch.ones(chosen.shape[:-1], dtype=torch.bool, device=x.device)
        weights = self._with_losses(weights, logits, probabilities, chosen, is_token)
        return weights, chosen

    def _with_losses(
        self,
        weights: torch.Tensor,
        logits: torch.Tensor,
        probabilities: torch.Tensor,
        chosen: torch.Tensor,
        is_token: torch.Tensor,
    ) -> torch.Tensor:
        """Count the tokens of each expert, and return the weights with the auxiliary losses."""
        choices = is_token.unsqueeze(-1).expand_as(chosen)
        counts = chosen.new_zeros(len(chosen), self.experts)  # of each row
        counts.scatter_add_(1, chosen.flatten(1), choices.flatten(1).long())
        count_tokens(self, counts.sum(0))
        sums = probabilities.masked_fill(~is_token.unsqueeze(-1), 0).sum(1)
        factor = self.balance_coefficient
        if self.balance == "sequence" and factor:
            loss = factor * self._imbalance(counts.float(), sums, is_token.sum(1, keepdim=True))
            weights = attach_loss(weights, "router_balance", loss, over="rows")
        if self.balance == "batch" and factor:
            sums_of_rows = counts.sum(0), sums.sum(0), is_token.sum()
            weights = attach_joint_loss(weights, "router_balance", *sums_of_rows, factor)
        if self.z_coefficient:
            squares = torch.logsumexp(logits, -1).square().masked_fill(~is_token, 0)
            weights = attach_loss(
                weights, "router_z", self.z_coefficient * squares.sum(), over="tokens"
            )
        return weights

    def _imbalance(
        self, counts: torch.Tensor, sums: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's part of the loss per row, summed over the rows: 0-dimensional.

        The loss is linear in the probabilities, so only the counts are those of whole rows.

        counts: [batch, experts]. sums: of probabilities, [batch, experts]. tokens: [batch, 1].
        """
        numbers = torch.cat([counts, tokens], dim=1)
        parts = [self.ctx.cp, *([self.ctx.tp] if self.ctx.sequence_parallel else [])]
        all_reduce_over(numbers, parts)  # of the whole rows
        counts, tokens = numbers[:, :-1], numbers[:, -1:].clamp(min=1)
        return self.experts / self.top_k * (counts / tokens.square() * sums).sum()

    @torch.no_grad()
    def batch_counted(self, counts: torch.Tensor) -> None:
        """Store the load of the experts in a batch, and balance the bias. The engine calls it with
        the counts of all ranks."""
        self.load = counts
        if self.balance == "bias" and self.weight.requires_grad:  # a frozen router keeps its bias
            self.bias.add_((counts.double().mean() - counts).sign(), alpha=self.bias_rate)


def expert_loads(model: Any) -> dict[str, list[int]]:
    """Return how many tokens of the last batch chose each expert, by the name of the router. Every
    rank calls it, and gets the routers of all pipeline stages.

    Args:
        model: a megazoo model, after `train_batch`.

    Example:
        model.train_batch(ids, labels=ids)
        expert_loads(model)  # {"layers.0.moe.router": [130, 126, 140, 116], ...}
    """
    own = {
        name: module.load.tolist()
        for name, module in model.named_modules()
        if isinstance(module, Router) and module.load is not None
    }
    stages = [own] * model.ctx.pp_size
    if model.ctx.pp_size > 1:
        dist.all_gather_object(stages, own, group=model.ctx.pp_group)
    merged = {name: load for stage in stages for name, load in stage.items()}
    return dict(sorted(merged.items(), key=lambda item: _in_order(item[0])))


def _in_order(name: str) -> list:
    """Return a key that sorts names by their numbers: layers.2 before layers.10."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.split(".")]
