"""Token embeddings and output heads, sharded by vocabulary over the tensor-parallel ranks, and
learned positions."""

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.errors import UserError
from megazoo.layers.cross_entropy import (
    linear_cross_entropy,
    linear_log_probabilities,
    piece_rows,
)
from megazoo.layers.layer import Layer
from megazoo.layers.loss_terms import PLAIN, LossTerms
from megazoo.layers.matmul import linear, product_of_head
from megazoo.layers.product import PACKED
from megazoo.layers.soft_cap import check_cap, soft_capped
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import (
    enter_tensor_parallel,
    gather_from_tensor_parallel,
    leave_tensor_parallel_in_place,
)
from megazoo.parallel.shard import ParameterSpec, Shard


class _VocabParallel(Layer):
    """A [vocabulary, hidden] matrix whose rows are sharded over tp.

    This rank holds the tokens from `start` to `start + rows`. tied_to: a module that has the
    matrix, if this one has none.

    tp need not divide the vocabulary: the first ranks hold one more token. The vocabulary is not
    padded, so no padding has to be masked in the loss, excluded from sampling, or removed from a
    checkpoint.
    """

    weight: nn.Parameter
    packed: torch.Tensor | None = None  # the weight in oneDNN's layout: see pack_weights

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        std: float,
        ctx: ParallelContext | None,
        tied_to: "_VocabParallel | None" = None,
    ):
        super().__init__(ctx)
        tp_size, tp_rank = self.ctx.tp_size, self.ctx.tp_rank
        if vocab_size < tp_size:
            raise UserError(f"a vocabulary of {vocab_size} tokens can't be split over tp {tp_size}")
        shard = Shard(0, (vocab_size,))
        self.hidden_size = hidden_size
        self._tied_to = (tied_to,)  # in a tuple: torch would register it, and its weight, again
        if tied_to is None:
            self.add_parameter("weight", ParameterSpec((vocab_size, hidden_size), shard, std=std))
        (cut,) = shard.cuts(tp_size, tp_rank)
        self.start, self.rows = cut.global_start, cut.length
        self.sizes = shard.sizes_of_ranks(tp_size)

    def extra_repr(self) -> str:
        return super().extra_repr() or f"tied to {self.owner.extra_repr()}"

    @property
    def owner(self) -> "_VocabParallel":
        """The module that has the parameter: this one, or the one that it is tied to."""
        (tied_to,) = self._tied_to
        return self if tied_to is None else tied_to

    @property
    def matrix(self) -> torch.Tensor:
        """This rank's rows: [rows, hidden]."""
        return self.owner.use("weight")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits, which start at token `start`: [..., hidden] -> [..., rows]."""
        packed = self.owner.packed
        if packed is not None and not (torch.is_grad_enabled() and x.requires_grad):
            return linear(x, packed, product=PACKED, entering=self.ctx)
        weight = self.matrix
        how = {"product": product_of_head(x, weight), "queue": self.weight_queue}
        return linear(x, weight, entering=self.ctx, **how)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest) -> None:
        if self.packed is not None:
            raise UserError(
                f"{prefix}weight has a copy in oneDNN's layout in the model: load the weights "
                "first, then call pack_weights"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the logits of all ranks: [..., rows] -> [..., vocab_size], the same on every
        rank."""
        return gather_from_tensor_parallel(logits, self.ctx, self.sizes)


class VocabParallelEmbedding(_VocabParallel):
    """Embed tokens, with the vocabulary sharded over tp.

    This rank holds the embeddings of the tokens from `start` to `start + rows`; its weight is
    [rows, hidden_size]. A tied head uses the same matrix: see VocabParallelHead.

    Args:
        vocab_size: size of the vocabulary, without padding; tp need not divide it.
        hidden_size: size of an embedding, the same on every rank.
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        int64 [..., sequence] -> [..., sequence, hidden_size]. Under sequence parallelism the output
        is this rank's part of the sequence, [..., sequence / tp, hidden_size].

    Raises:
        UserError: The vocabulary is smaller than tp.
        IndexError: In forward with tp 1: a token id is outside [0, vocab_size). With tp 2 or more,
            such ids give zeros.

    Example:
        embedding = VocabParallelEmbedding(50257, 768, ctx=ctx)
        head = VocabParallelHead(50257, 768, embedding=embedding, ctx=ctx)
        logits = head.gather_logits(head(embedding(ids)))  # [..., sequence, 50257]

    Source: Megatron-LM, Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(vocab_size, hidden_size, std, ctx)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of int64 token ids (shapes: see the class)."""
        if self.ctx.tp_size == 1:
            return F.embedding(token_ids, self.matrix)
        local = token_ids - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.matrix)
        found = found.masked_fill(elsewhere[..., None], 0)
        return leave_tensor_parallel_in_place(found, self.ctx)


class VocabParallelHead(_VocabParallel):
    """Compute logits, with the vocabulary sharded over tp; without a bias.

    Args:
        vocab_size: size of the vocabulary, without padding; tp need not divide it.
        hidden_size: size of the last dimension of x.
        embedding: the token embedding, if the head is tied to it. The head then uses its matrix and
            has no parameter.
        soft_cap: smooth bound of the logits, or None: see `soft_capped`.
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., hidden_size] -> [..., rows], the logits of this rank's tokens (`start` to `start +
        rows`). `gather_logits` returns those of all tokens.

    Raises:
        UserError: The vocabulary is smaller than tp, or soft_cap is not above 0.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        embedding: VocabParallelEmbedding | None = None,
        soft_cap: float | None = None,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(vocab_size, hidden_size, std, ctx, embedding)
        check_cap(soft_cap)
        self.vocab_size, self.soft_cap = vocab_size, soft_cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits, which start at token `start`: [..., hidden] -> [..., rows]."""
        return soft_capped(super().logits(x), self.soft_cap)

    def loss_in_pieces(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        factor: torch.Tensor | None,
        terms: LossTerms = PLAIN,
    ) -> torch.Tensor:
        """Return the sum of the losses of `logits(x)`, computed for a few tokens at a time: see
        linear_cross_entropy."""
        x = enter_tensor_parallel(x, self.ctx).flatten(0, -2)
        return linear_cross_entropy(
            x,
            self.matrix,
            targets.flatten(),
            self.start,
            rows=self.tokens_at_once,
            factor=factor,
            soft_cap=self.soft_cap,
            terms=terms,
            ctx=self.ctx,
        )

    def log_probabilities_in_pieces(
        self, x: torch.Tensor, targets: torch.Tensor, top_k: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the log-probability of each target under `logits(x)`, and the top_k largest
        log-probabilities of each position with their token ids, computed for a few tokens at a
        time: see linear_log_probabilities. They are the same on every tp rank."""
        shape = targets.shape
        found, values, ids = linear_log_probabilities(
            enter_tensor_parallel(x, self.ctx).flatten(0, -2),
            self.matrix,
            targets.flatten(),
            self.start,
            rows=self.tokens_at_once,
            top_k=min(top_k, self.rows),
            soft_cap=self.soft_cap,
            ctx=self.ctx,
        )
        if top_k:
            sizes = [min(top_k, size) for size in self.sizes]
            of_ranks = gather_from_tensor_parallel(values, self.ctx, sizes)
            values, order = of_ranks.topk(top_k)
            ids = gather_from_tensor_parallel(ids, self.ctx, sizes).gather(-1, order)
        return found.view(shape), values.view(*shape, top_k), ids.view(*shape, top_k)

    def pieces_save_memory(self, tokens: int, differentiated: bool) -> bool:
        """Return whether loss_in_pieces needs less memory than the logits of this number of tokens.

        differentiated: whether there is a backward. It would need the gradient of the logits;
        instead, loss_in_pieces stores the gradient of the weight in fp32.
        """
        return tokens >= 2 * (self.tokens_at_once + (self.hidden_size if differentiated else 0))

    @property
    def tokens_at_once(self) -> int:
        """The number of tokens per piece in loss_in_pieces, the same on every tp rank."""
        (parameter,) = self.owner.parameters()
        return piece_rows(parameter.device, self.sizes[0])


class PositionEmbedding(Layer):
    """Embed positions with learned vectors, replicated on every tp rank.

    Args:
        max_positions: number of positions.
        hidden_size: size of an embedding.
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        int64 positions [..., sequence] -> [..., sequence, hidden_size]. Under sequence parallelism
        the output is this rank's part of the sequence.
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
        return F.embedding(positions, self.use("weight"))
