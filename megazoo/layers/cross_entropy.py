"""Cross-entropy over a vocabulary that is cut over the tensor-parallel ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.cpu.products import product_dtype

IGNORE_INDEX = -100  # a target that carries no loss

# Elements of fp32 scratch: on a CPU 1 MB, which stays in a core's cache; elsewhere 64 MB, which is
# worth a launch.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24, "meta": 1 << 24}

# Logits that linear_cross_entropy makes at once: few enough to save memory, and so many that adding
# up the weight's gradient takes little beside the products.
PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27, "meta": 1 << 27}
PIECE_ROWS = 256  # at least


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward: loss = log(sum(exp(logits))) - logits[target]. Backward: softmax(logits) -
    one_hot(target)."""

    @staticmethod
    def forward(ctx, logits, targets, start, group, ignore_index):
        def sum_exponentials(peak: torch.Tensor) -> torch.Tensor:
            sums = torch.empty_like(peak)
            for part, scratch in _chunks(logits):
                sums[part] = (
                    torch.sub(logits[part], peak[part, None], out=scratch).exp_().sum(dim=-1)
                )
            return sums

        local, here = _targets_here(targets, start, logits.shape[-1], ignore_index)
        losses, peak, total = _losses(logits, local, here, group, sum_exponentials)
        ctx.save_for_backward(logits, local, here, total.log() + peak, targets == ignore_index)
        return losses.masked_fill(targets == ignore_index, 0)

    @staticmethod
    def backward(ctx, grad_output):
        logits, local, here, log_normaliser, ignored = ctx.saved_tensors
        grad_output = grad_output.float().masked_fill(ignored, 0)
        grad = torch.empty_like(logits)
        for part, scratch in _chunks(logits):
            probabilities = torch.sub(logits[part], log_normaliser[part, None], out=scratch).exp_()
            probabilities.scatter_add_(-1, local[part, None], -here[part, None].float())
            torch.mul(probabilities, grad_output[part, None], out=grad[part])
        return grad, None, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """The logits of each piece become their own gradient at once. Neither they nor x are kept: what
    is kept are the gradients of x and of the weight."""

    @staticmethod
    def forward(ctx, x, weight, targets, start, group, ignore_index, rows, factor):
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        wanted = [factor is not None and needs for needs in ctx.needs_input_grad[:2]]
        x_grad, weight_grad, dtype = (
            torch.empty_like(x) if wanted[0] else None,
            None,
            product_dtype(x),
        )
        wide = weight.to(dtype)

        def take(part: slice) -> None:  # and leave nothing of it
            nonlocal weight_grad
            inputs = x[part].to(dtype)
            logits = F.linear(inputs, wide).to(x.dtype).float()

            def sum_exponentials(peak: torch.Tensor) -> torch.Tensor:
                return logits.sub_(peak[:, None]).exp_().sum(dim=-1)

            local, here = _targets_here(targets[part], start, len(weight), ignore_index)
            losses[part], _, total = _losses(logits, local, here, group, sum_exponentials)
            if not any(wanted):
                return
            weights = factor * (targets[part] != ignore_index)
            logits.mul_((weights / total)[:, None]).scatter_add_(
                -1, local[:, None], -(weights * here)[:, None]
            )
            logits = logits.to(x.dtype).to(dtype)  # are their gradient now
            if wanted[0]:
                x_grad[part] = logits @ wide
            if wanted[1]:
                weight_grad = _add_product(weight_grad, logits.t(), inputs)

        for first in range(0, len(x), rows):
            take(slice(first, first + rows))
        ctx.factor, ctx.gradients = factor, (x_grad, weight_grad)
        return losses.masked_fill_(targets == ignore_index, 0).sum()

    @staticmethod
    def backward(ctx, grad_output):
        gradients, ctx.gradients = ctx.gradients, None  # so that autograd can take them as they are
        ratio = grad_output / ctx.factor
        return *(None if gradient is None else gradient.mul_(ratio) for gradient in gradients), *[
            None
        ] * 6


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_start: int = 0,
    *,
    ignore_index: int = -100,
    ctx: ParallelContext | None = None,
) -> torch.Tensor:
    """The loss of every token, in nats, without gathering the logits.

    Args:
        logits: [tokens, this rank's part of the vocabulary], any floating dtype.
        targets: int64 [tokens], global token ids, the same on every tp rank; ignore_index carries
            no loss.
        vocab_start: the token id of this rank's first column.
        ctx: parallel context; the ambient one by default.

    Returns fp32 [tokens], the same on every rank, 0 where ignored. Computed in fp32, in chunks of
    tokens: a copy of all the logits in fp32 never exists. Two small all-reduces forward, none
    backward.
    Source: Megatron-LM, Shoeybi et al. 2019, section 3.
    """
    group = (ctx or current_context()).tp_group
    return _VocabParallelCrossEntropy.apply(logits, targets, vocab_start, group, ignore_index)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_start: int = 0,
    *,
    rows: int,
    factor: torch.Tensor | None = None,
    ignore_index: int = -100,
    ctx: ParallelContext | None = None,
) -> torch.Tensor:
    """The sum of vocab_parallel_cross_entropy(x weight^T, targets), of logits that never exist
    together.

    Args:
        x: [tokens, hidden], the same on every tp rank; its gradient is this rank's part of a sum
            over them.
        weight: [this rank's part of the vocabulary, hidden].
        targets, vocab_start, ignore_index, ctx: as there.
        rows: the tokens whose logits are made at once, the same on every tp rank.
        factor: what the sum's gradient will be, 0-dimensional fp32: x's and the weight's are
            computed with it while the logits are there. (If it is another one, they are scaled; 0
            can't be.) None: no gradients.

    Returns fp32, 0-dimensional, the same on every rank. With a factor the gradients' memory is
    taken until backward, which may come once.
    Source: Hsu et al. 2024 (Liger Kernel), over tensor-parallel ranks.
    """
    group = (ctx or current_context()).tp_group
    return _LinearCrossEntropy.apply(
        x, weight, targets, vocab_start, group, ignore_index, rows, factor
    )


def piece_rows(device: torch.device, vocab_rows: int) -> int:
    """Tokens whose logits, of so much of the vocabulary, linear_cross_entropy should make at once."""
    return max(PIECE_ROWS, PIECE_ELEMENTS[device.type] // vocab_rows)


def _targets_here(
    targets: torch.Tensor, start: int, rows: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets as columns of this rank's logits, 0 where they are not, and where they are: both
    [tokens]."""
    local = targets - start
    here = (local >= 0) & (local < rows) & (targets != ignore_index)
    return local.masked_fill(~here, 0), here


def _losses(
    logits: torch.Tensor,
    local: torch.Tensor,
    here: torch.Tensor,
    group,
    sum_exponentials: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, greatest logits, and sums of exp(logits - greatest) over all ranks: fp32 [tokens]
    each.

    sum_exponentials(greatest): this rank's sums, last of all that is done with the logits.
    """
    peak = logits.amax(dim=-1)
    all_reduce(peak, group, op=dist.ReduceOp.MAX)  # before the exponential, on every rank alike
    peak = peak.float()
    target = (logits.gather(-1, local[:, None])[:, 0].float() - peak).masked_fill(~here, 0)
    sums = torch.stack([sum_exponentials(peak), target])
    all_reduce(sums, group)
    return sums[0].log() - sums[1], peak, sums[0]


def _add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a b, in fp32, in total's memory."""
    if total is None:
        return (a @ b).float()
    if a.dtype != total.dtype:
        return total.add_(a @ b)
    return torch.addmm(total, a, b, out=total)


def _chunks(logits: torch.Tensor):
    """Parts of the tokens, and of each fp32 scratch in the shape of its logits."""
    tokens, step = len(logits), max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[-1])
    scratch = logits.new_empty(min(step, tokens), logits.shape[-1], dtype=torch.float32)
    for start in range(0, tokens, step):
        yield slice(start, start + step), scratch[: tokens - start]
