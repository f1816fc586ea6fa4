"""Cross-entropy over a vocabulary that is sharded over the tensor-parallel ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megazoo.constants import IGNORE_INDEX
from megazoo.layers import fused_cross_entropy
from megazoo.layers.fused import replaced_by
from megazoo.layers.loss_terms import PLAIN, LossTerms
from megazoo.layers.soft_cap import soft_capped
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.regions import reduce_from_tensor_parallel

# Number of logits per piece in linear_cross_entropy: small enough to save memory, and large enough
# that accumulating the gradient of the weight is cheap compared with the products.
PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27, "meta": 1 << 27}
PIECE_ROWS = 256  # at least


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_start: int = 0,
    *,
    terms: LossTerms = PLAIN,
    ctx: ParallelContext | None = None,
) -> torch.Tensor:
    """Return the loss of every token, in nats, without gathering the logits.

    It is computed in fp32, with two small all-reduces in forward and none in backward.

    Args:
        logits: [tokens, this rank's part of the vocabulary], any floating dtype.
        targets: int64 [tokens], global token ids, the same on every tp rank. Targets of
            IGNORE_INDEX (-100) have no loss.
        vocab_start: the token id of this rank's first column.
        terms: label smoothing and z-loss, if any.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Returns:
        fp32 [tokens], the same on every rank, and 0 for ignored tokens.

    Example:
        losses = vocab_parallel_cross_entropy(head(x).flatten(0, -2), targets.flatten(), head.start)

    Source: Megatron-LM, Shoeybi et al. 2019, section 3.
    """
    columns, here, ignored = _columns_of(targets, vocab_start, logits.shape[-1])
    return token_losses(logits, columns, here, ignored, ctx or current_context(), terms)


@replaced_by(fused_cross_entropy.token_losses)
def token_losses(
    logits: torch.Tensor,
    columns: torch.Tensor,
    here: torch.Tensor,
    ignored: torch.Tensor,
    ctx: ParallelContext,
    terms: LossTerms = PLAIN,
) -> torch.Tensor:
    """Return -log(softmax(logits)[target]) of every token.

    It is log(sum(exp(logits - m))) - (logits[target] - m), where m is the largest logit of all
    ranks, the sum is over all ranks, and one rank has the target. With label smoothing, part of the
    target logit is replaced by the mean of all logits. columns, here, ignored: from _columns_of.
    """
    logits = logits.float()
    peak = logits.detach().amax(dim=-1)
    all_reduce(peak, ctx.tp_group, op=dist.ReduceOp.MAX)
    shifted = logits - peak[:, None]
    total = reduce_from_tensor_parallel(shifted.exp().sum(dim=-1), ctx)
    target = shifted.gather(-1, columns[:, None])[:, 0].masked_fill(~here, 0)
    if terms.label_smoothing:
        mean = shifted.sum(dim=-1) / terms.vocab_size
        target = torch.lerp(target, mean, terms.label_smoothing)
    losses = total.log() - reduce_from_tensor_parallel(target, ctx)
    if terms.z_loss:
        losses = losses + terms.z_loss * (total.log() + peak).square()
    return losses.masked_fill(ignored, 0)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_start: int = 0,
    *,
    rows: int,
    factor: torch.Tensor | None = None,
    soft_cap: float | None = None,
    terms: LossTerms = PLAIN,
    ctx: ParallelContext | None = None,
) -> torch.Tensor:
    """Return the sum of vocab_parallel_cross_entropy(soft_capped(x W^T), targets), without storing
    all logits at the same time.

    Args:
        x: [tokens, hidden], the same on every tp rank. Its gradient is a partial sum over tp.
        weight: [this rank's part of the vocabulary, hidden].
        targets: int64 [tokens], global token ids; IGNORE_INDEX (-100) has no loss.
        vocab_start: the token id of the first row of the weight.
        rows: number of tokens per piece, the same on every tp rank.
        factor: the expected gradient of the sum, 0-dimensional fp32, not 0. The gradients of x and
            of the weight are computed with it in forward, and scaled in backward if the gradient
            differs. None: no gradients.
        soft_cap: smooth bound of the logits, or None.
        terms: label smoothing and z-loss, if any.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Returns:
        fp32, 0-dimensional, the same on every rank. With a factor, the gradients stay in memory
        until backward, which may run once.

    Source: Hsu et al. 2024 (Liger Kernel), over tensor-parallel ranks.
    """
    columns, here, ignored = _columns_of(targets, vocab_start, len(weight))
    ctx = ctx or current_context()
    return summed_losses(x, weight, columns, here, ignored, ctx, rows, factor, soft_cap, terms)


def linear_log_probabilities(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_start: int = 0,
    *,
    rows: int,
    top_k: int = 0,
    soft_cap: float | None = None,
    ctx: ParallelContext | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log(softmax(soft_capped(x W^T))[target]) of every token, and the largest
    log-probabilities of this rank's tokens, without storing all logits at the same time.

    Args:
        x: [tokens, hidden], the same on every tp rank. Its gradient is a partial sum over tp.
        weight: [this rank's part of the vocabulary, hidden].
        targets: int64 [tokens], global token ids; IGNORE_INDEX (-100) has no log-probability.
        vocab_start: the token id of the first row of the weight.
        rows: number of tokens per piece, the same on every tp rank.
        top_k: number of the largest log-probabilities, at most the rows of the weight.
        soft_cap: smooth bound of the logits, or None.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Returns:
        The log-probabilities, fp32 [tokens], the same on every rank, 0 for ignored tokens. Backward
        computes the logits again. The largest ones of this rank's part of the vocabulary, fp32
        [tokens, top_k], and their token ids, int64 [tokens, top_k], have no gradient.
    """
    columns, here, ignored = _columns_of(targets, vocab_start, len(weight))
    found, values, places = fused_cross_entropy.log_probabilities(
        x, weight, columns, here, ignored, ctx or current_context(), rows, soft_cap, top_k
    )
    return found, values, places + vocab_start


@replaced_by(fused_cross_entropy.summed_losses)
def summed_losses(
    x: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    here: torch.Tensor,
    ignored: torch.Tensor,
    ctx: ParallelContext,
    rows: int,
    factor: torch.Tensor | None,
    soft_cap: float | None = None,
    terms: LossTerms = PLAIN,
) -> torch.Tensor:
    """Return the sum of token_losses(soft_capped(x W^T)). rows, factor: used only by the fused
    version, see linear_cross_entropy."""
    logits = soft_capped(F.linear(x, weight), soft_cap)
    return token_losses(logits, columns, here, ignored, ctx, terms).sum()


def piece_rows(device: torch.device, vocab_rows: int) -> int:
    """Return the number of tokens per piece in linear_cross_entropy, for this number of vocabulary
    rows."""
    return max(PIECE_ROWS, PIECE_ELEMENTS[device.type] // vocab_rows)


def _columns_of(
    targets: torch.Tensor, start: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three [tokens] tensors: the column of each target in this rank's logits (0 if it is on
    another rank), whether it is on this rank, and whether the token is ignored."""
    local, ignored = targets - start, targets == IGNORE_INDEX
    here = (local >= 0) & (local < columns) & ~ignored
    return local.masked_fill(~here, 0), here, ignored
