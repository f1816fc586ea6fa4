"""Cross-entropy over a vocabulary that is cut over the tensor-parallel ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megazoo.layers import fused_cross_entropy
from megazoo.layers.fused import replaced_by
from megazoo.layers.loss_terms import PLAIN, LossTerms
from megazoo.layers.soft_cap import soft_capped
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.regions import reduce_from_tensor_parallel

IGNORE_INDEX = -100  # a target that carries no loss

# Logits that linear_cross_entropy makes at once: few enough to save memory, and so many that adding
# up the weight's gradient takes little beside the products.
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

    Args:
        logits: [tokens, this rank's part of the vocabulary], any floating dtype.
        targets: int64 [tokens], global token ids, the same on every tp rank; IGNORE_INDEX carries
            no loss.
        vocab_start: the token id of this rank's first column.
        terms: label smoothing and z-loss, if any.
        ctx: parallel context; the ambient one by default.

    Returns fp32 [tokens], the same on every rank, 0 where ignored. Computed in fp32. Two small
    all-reduces forward, none backward.
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
    """Return -log(softmax(logits)[target]) of every token; columns, here and ignored as _columns_of
    returns them.

    That is log(sum(exp(logits - m))) - (logits[target] - m), where m is the greatest logit of all
    ranks, the sum goes over all of them, and one rank has the target. With label smoothing the mean
    of all logits stands for a share of the target's.
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
    """Return the sum of vocab_parallel_cross_entropy(soft_capped(x W^T), targets), of logits that
    never exist together.

    Args:
        x: [tokens, hidden], the same on every tp rank; its gradient is this rank's part of a sum
            over them.
        weight: [this rank's part of the vocabulary, hidden].
        targets, vocab_start, terms, ctx: as there. soft_cap: of the logits, if any.
        rows: the tokens whose logits are made at once, the same on every tp rank.
        factor: what the sum's gradient will be, 0-dimensional fp32: x's and the weight's are
            computed with it while the logits are there. (If it is another one, they are scaled; 0
            can't be.) None: no gradients.

    Returns fp32, 0-dimensional, the same on every rank. With a factor the gradients' memory is
    taken until backward, which may come once.
    Source: Hsu et al. 2024 (Liger Kernel), over tensor-parallel ranks.
    """
    columns, here, ignored = _columns_of(targets, vocab_start, len(weight))
    ctx = ctx or current_context()
    return summed_losses(x, weight, columns, here, ignored, ctx, rows, factor, soft_cap, terms)


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
    """Return the sum of token_losses(soft_capped(x W^T)). rows, factor: for the twin alone, see
    linear_cross_entropy."""
    logits = soft_capped(F.linear(x, weight), soft_cap)
    return token_losses(logits, columns, here, ignored, ctx, terms).sum()


def piece_rows(device: torch.device, vocab_rows: int) -> int:
    """Return the tokens whose logits, of so much of the vocabulary, linear_cross_entropy should
    make at once."""
    return max(PIECE_ROWS, PIECE_ELEMENTS[device.type] // vocab_rows)


def _columns_of(
    targets: torch.Tensor, start: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of each token the target's column in this rank's logits, 0 where it is not there;
    whether it is there; and whether the token is ignored: all [tokens]."""
    local, ignored = targets - start, targets == IGNORE_INDEX
    here = (local >= 0) & (local < columns) & ~ignored
    return local.masked_fill(~here, 0), here, ignored
