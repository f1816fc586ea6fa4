"""Cross-entropy over a vocabulary that is cut over the tensor-parallel ranks."""

import torch
import torch.distributed as dist

from megazoo.parallel import collectives
from megazoo.parallel.context import ParallelContext, current_context

# Elements of fp32 scratch: on a CPU 1 MB, which stays in a core's cache; elsewhere 64 MB, which is worth a launch.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24, "meta": 1 << 24}


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward: loss = log(sum(exp(logits))) - logits[target]. Backward: softmax(logits) - one_hot(target)."""

    @staticmethod
    def forward(ctx, logits, targets, start, group, ignore_index):
        rows = logits.shape[-1]
        peak = logits.amax(dim=-1)
        collectives.all_reduce(peak, group, op=dist.ReduceOp.MAX)  # before the exponential, on every rank alike
        sums = torch.zeros(2, len(targets), dtype=torch.float32, device=logits.device)
        local = targets - start
        here = (local >= 0) & (local < rows) & (targets != ignore_index)
        local = local.masked_fill(~here, 0)
        for part, scratch in _chunks(logits):
            sums[0, part] = torch.sub(logits[part], peak[part, None].float(), out=scratch).exp_().sum(dim=-1)
        sums[1] = (logits.gather(-1, local[:, None])[:, 0].float() - peak.float()).masked_fill(~here, 0)
        collectives.all_reduce(sums, group)
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, local, here, log_sum + peak.float(), targets == ignore_index)
        return (log_sum - sums[1]).masked_fill(targets == ignore_index, 0)

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
        targets: int64 [tokens], global token ids, the same on every tp rank; ignore_index carries no loss.
        vocab_start: the token id of this rank's first column.
        ctx: parallel context; the ambient one by default.

    Returns fp32 [tokens], the same on every rank, 0 where ignored. Computed in fp32, in chunks of tokens: a copy of all
    the logits in fp32 never exists. Two small all-reduces forward, none backward.
    Source: Megatron-LM, Shoeybi et al. 2019, section 3.
    """
    group = (ctx or current_context()).tp_group
    return _VocabParallelCrossEntropy.apply(logits, targets, vocab_start, group, ignore_index)


def _chunks(logits: torch.Tensor):
    """Parts of the tokens, and of each fp32 scratch in the shape of its logits."""
    tokens, step = len(logits), max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[-1])
    scratch = logits.new_empty(min(step, tokens), logits.shape[-1], dtype=torch.float32)
    for start in range(0, tokens, step):
        yield slice(start, start + step), scratch[: tokens - start]
