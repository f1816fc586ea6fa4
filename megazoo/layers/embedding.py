"""Embeddings and output heads with the vocabulary cut over the tensor-parallel ranks, and learned
positions."""

import torch
import torch.nn.functional as F

from megazoo.errors import UserError
from megazoo.layers.cross_entropy import linear_cross_entropy, piece_rows
from megazoo.layers.linear import column_parallel_linear
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.regions import (
    enter_tensor_parallel,
    gather_from_tensor_parallel,
    leave_tensor_parallel_in_place,
)
from megazoo.parallel.shard import ParameterSpec, Shard


class _VocabParallel(ShardedModule):
    """A [vocabulary, hidden] matrix whose rows are cut over tp: this rank holds the tokens from
    `start` to `start + rows`.

    tp need not divide the vocabulary: the first ranks hold one token more. There is no padding, so
    none has to be masked in the loss, kept out of sampling, or stripped from a checkpoint.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        tp_size, tp_rank = self.ctx.tp_size, self.ctx.tp_rank
        if vocab_size < tp_size:
            raise UserError(f"a vocabulary of {vocab_size} can't be cut over tp {tp_size}")
        shard = Shard(0, (vocab_size,))
        self.add_parameter("weight", ParameterSpec((vocab_size, hidden_size), shard, std=std))
        (cut,) = shard.cuts(tp_size, tp_rank)
        self.start, self.rows = cut.global_start, cut.length
        self.sizes = shard.sizes_of_ranks(tp_size)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits, of tokens from `start` on: [..., hidden] -> [..., rows]."""
        return column_parallel_linear(x, self.weight, None, self.ctx, self.weight_queue, align=True)

    def loss_sum(
        self, x: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of the losses of `logits(x)`, which are made a few tokens at a time: see
        linear_cross_entropy."""
        x = enter_tensor_parallel(x, self.ctx).flatten(0, -2)
        return linear_cross_entropy(
            x,
            self.weight,
            targets.flatten(),
            self.start,
            rows=self.tokens_at_once,
            factor=factor,
            ctx=self.ctx,
        )

    def loss_saves_memory(self, tokens: int, differentiated: bool) -> bool:
        """Return whether loss_sum takes less memory than all logits of so many tokens.

        differentiated: beside the logits there would be their gradient; in its place loss_sum keeps
        the weight's, in fp32.
        """
        return tokens >= 2 * (self.tokens_at_once + (self.weight.shape[1] if differentiated else 0))

    @property
    def tokens_at_once(self) -> int:
        """The tokens whose logits loss_sum makes at once, the same on every tp rank."""
        return piece_rows(self.weight.device, self.sizes[0])

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' logits: [..., rows] -> [..., vocab_size], the same on every rank."""
        return gather_from_tensor_parallel(logits, self.ctx, self.sizes)


class VocabParallelEmbedding(_VocabParallel):
    """Token embedding with the vocabulary cut over tp; `logits` uses the same matrix as a tied
    output head.

    Args:
        vocab_size: true size of the vocabulary; need not divide by tp.
        hidden_size: size of an embedding, the same on every rank.
        std: standard deviation of the initial weights.
        ctx: parallel context; the ambient one by default.

    Shapes: int64 [..., sequence] -> [..., sequence, hidden_size]; under sequence parallelism this
    rank's part of it.
    Errors: token ids outside [0, vocab_size) raise IndexError when tp is 1; with more ranks they
    embed to zero.
    Source: Megatron-LM, Shoeybi et al. 2019, section 3.
    """

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.ctx.tp_size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(
            elsewhere[..., None], 0
        )
        return leave_tensor_parallel_in_place(found, self.ctx)


class VocabParallelHead(_VocabParallel):
    """Untied output head, no bias: [..., hidden_size] -> this rank's logits (see `gather_logits`).

    Args and cut as in VocabParallelEmbedding.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x)


class PositionEmbedding(ShardedModule):
    """Learned absolute positions, the same on every tp rank.

    Shapes: int64 positions [..., sequence] -> [..., sequence, hidden]; under sequence parallelism
    this rank's part.
    """

    def __init__(
        self,
        max_positions: int,
        hidden_size: int,
        *,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.add_parameter("weight", ParameterSpec((max_positions, hidden_size), std=std))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        if self.ctx.sequence_parallel:
            positions = positions.chunk(self.ctx.tp_size, dim=-1)[self.ctx.tp_rank]
        return F.embedding(positions, self.synced_parameter("weight"))
