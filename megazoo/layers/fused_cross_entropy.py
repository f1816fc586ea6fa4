"""Memory-saving fused versions of the cross-entropies: see fused.py and cross_entropy.py."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megazoo.layers.aligned import empty_aligned
from megazoo.layers.loss_terms import PLAIN, LossTerms
from megazoo.layers.matmul import product_of_head
from megazoo.layers.soft_cap import soft_capped
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.cpu.products import product_dtype
from megazoo.parallel.deferred import add_product

# Elements of fp32 scratch: 1 MB on a CPU, which fits in the cache of a core; 64 MB elsewhere, which
# is worth a kernel launch.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24, "meta": 1 << 24}


def token_losses(
    logits: torch.Tensor,
    columns: torch.Tensor,
    here: torch.Tensor,
    ignored: torch.Tensor,
    ctx: ParallelContext,
    terms: LossTerms = PLAIN,
) -> torch.Tensor:
    """Compute the loss of every token in chunks of tokens, without an fp32 copy of all logits.

    Same as: cross_entropy.token_losses.
    """
    return _TokenLosses.apply(logits, columns, here, ignored, ctx.tp_group, terms)


class _TokenLosses(torch.autograd.Function):
    """Forward: loss = log(sum(exp(logits))) - logits[target]. Backward: softmax(logits) -
    one_hot(target). Label smoothing s and z-loss z change both: see `_gradient`."""

    @staticmethod
    def forward(ctx, logits, columns, here, ignored, group, terms):
        def sum_exponentials(peak: torch.Tensor) -> torch.Tensor:
            sums = torch.empty_like(peak)
            for part, scratch in _chunks(logits):
                shifted = torch.sub(logits[part], peak[part, None], out=scratch)
                sums[part] = shifted.exp_().sum(dim=-1)
            return sums

        losses, peak, total = _losses(logits, columns, here, group, sum_exponentials, terms)
        ctx.save_for_backward(logits, columns, here, total.log() + peak, ignored)
        ctx.terms = terms
        return losses.masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx, grad_output):
        logits, columns, here, log_normaliser, ignored = ctx.saved_tensors
        grad_output = grad_output.float().masked_fill(ignored, 0)
        grad = empty_aligned(logits.shape, logits)
        for part, scratch in _chunks(logits):
            normaliser = log_normaliser[part]
            probabilities = torch.sub(logits[part], normaliser[:, None], out=scratch).exp_()
            weights = torch.ones_like(normaliser)
            _to_gradient(probabilities, weights, columns[part], here[part], normaliser, ctx.terms)
            torch.mul(probabilities, grad_output[part, None], out=grad[part])
        return grad, None, None, None, None, None


def _to_gradient(
    weighted: torch.Tensor,
    weights: torch.Tensor,
    columns: torch.Tensor,
    here: torch.Tensor,
    log_normaliser: torch.Tensor,
    terms: LossTerms,
) -> None:
    """Convert weights x softmax(logits) to weights x the gradient of the losses, in place.

    The gradient is softmax (1 + 2 z log(sum(exp(logits)))) - (1 - s) one_hot(target) - s /
    vocabulary, for label smoothing s and z-loss z. weights: fp32 [tokens].
    """
    if terms.z_loss:
        weighted.mul_((1 + 2 * terms.z_loss * log_normaliser)[:, None])
    if terms.label_smoothing:
        weighted.sub_((weights * (terms.label_smoothing / terms.vocab_size))[:, None])
        weights = weights * (1 - terms.label_smoothing)
    weighted.scatter_add_(-1, columns[:, None], -(weights * here)[:, None])


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
    """Sum the losses of x W^T, with the logits of `rows` tokens at a time.

    Same as: cross_entropy.summed_losses.

    The logits of each piece are overwritten by their gradient. Neither they nor x are saved, only
    the gradients of x and of the weight.
    """
    return _SummedLosses.apply(
        x, weight, columns, here, ignored, ctx.tp_group, rows, factor, soft_cap, terms
    )


class _Pieces:
    """The logits of x W^T for a few tokens at a time, and the gradients of x and W from those of
    the logits.

    wanted: whether x and the weight need a gradient. x_grad, weight_grad: the gradients, or None.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        soft_cap: float | None,
        wanted: Sequence[bool] = (False, False),
    ):
        self.x, self.soft_cap, self.wanted = x, soft_cap, wanted
        self.dtype, self.product = product_dtype(x), product_of_head(x, weight)
        self.wide = weight.to(self.dtype)
        self.x_grad = torch.empty_like(x) if wanted[0] else None
        self.weight_grad: torch.Tensor | None = None

    def run(self, rows: int, compute: Callable[[slice], None]) -> None:
        """Call compute(tokens) for `rows` tokens at a time. Logits are freed when it returns."""
        for first in range(0, len(self.x), rows):
            compute(slice(first, first + rows))

    def logits(self, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of these tokens, fp32, in new memory, and the derivative of the soft
        cap: None without a cap or a gradient."""
        inputs, slope = self.x[part].to(self.dtype), None
        logits = self.product.output(inputs, self.wide).to(self.x.dtype)
        if self.soft_cap is not None:
            logits = soft_capped(logits, self.soft_cap)
            if any(self.wanted):
                slope = 1 - (logits / self.soft_cap).square()
        return logits.float(), slope

    def rounded(self, gradient: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the logits before the cap, as the products use it. It overwrites
        `gradient`, that of the capped logits."""
        if slope is not None:
            gradient.mul_(slope)
        return self.product.gradient(gradient.to(self.x.dtype)).to(self.dtype)

    def add(self, part: slice, gradient: torch.Tensor) -> None:
        """Add to the gradients of x and the weight. gradient: from `rounded`."""
        if self.x_grad is not None:
            self.x_grad[part] = self.product.input_gradient(gradient, self.wide)
        if self.wanted[1]:
            inputs = self.x[part].to(self.dtype)
            self.weight_grad = _add_product(self.weight_grad, gradient.t(), inputs)


class _SummedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, columns, here, ignored, group, rows, factor, soft_cap, terms):
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        wanted = [factor is not None and needs for needs in ctx.needs_input_grad[:2]]
        pieces = _Pieces(x, weight, soft_cap, wanted)

        def compute(part: slice) -> None:
            logits, slope = pieces.logits(part)
            losses[part], peak, total = _losses(
                logits, columns[part], here[part], group, partial(_exponentials, logits), terms
            )
            if not any(wanted):
                return
            weights = factor * ~ignored[part]
            logits.mul_((weights / total)[:, None])
            log_normaliser = total.log() + peak
            _to_gradient(logits, weights, columns[part], here[part], log_normaliser, terms)
            logits = pieces.rounded(logits, slope)  # their gradient from here
            pieces.add(part, logits)

        pieces.run(rows, compute)
        ctx.factor, ctx.gradients = factor, (pieces.x_grad, pieces.weight_grad)
        return losses.masked_fill_(ignored, 0).sum()

    @staticmethod
    def backward(ctx, grad_output):
        gradients, ctx.gradients = ctx.gradients, None  # autograd can then reuse them
        ratio = grad_output / ctx.factor
        scaled = (None if gradient is None else gradient.mul_(ratio) for gradient in gradients)
        return *scaled, *[None] * 8


def log_probabilities(
    x: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    here: torch.Tensor,
    ignored: torch.Tensor,
    ctx: ParallelContext,
    rows: int,
    soft_cap: float | None = None,
    top_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log(softmax(soft_capped(x W^T))[target]) of every token, and the largest ones.

    It has the logits of `rows` tokens at a time, in forward and again in backward. It saves x, the
    weight and numbers per token. columns, here, ignored: as in `summed_losses`.

    Returns:
        fp32 [tokens], the same on every rank, 0 for ignored tokens; and without a gradient the
        top_k largest log-probabilities in this rank's columns, fp32 [tokens, top_k], and their
        columns, int64 [tokens, top_k].
    """
    return _LogProbabilities.apply(
        x, weight, columns, here, ignored, ctx.tp_group, rows, soft_cap, top_k
    )


class _LogProbabilities(torch.autograd.Function):
    """Forward: logits[target] - log(sum(exp(logits))). Backward: one_hot(target) - softmax(logits),
    times the gradient of each token."""

    @staticmethod
    def forward(ctx, x, weight, columns, here, ignored, group, rows, soft_cap, top_k):
        pieces = _Pieces(x, weight, soft_cap)
        found = torch.empty(len(x), dtype=torch.float32, device=x.device)
        log_normaliser = torch.empty_like(found)
        values, places = found.new_empty(len(x), top_k), columns.new_empty(len(x), top_k)

        def compute(part: slice) -> None:
            logits, _ = pieces.logits(part)
            if top_k:
                values[part], places[part] = logits.topk(top_k)
            losses, peak, total = _losses(
                logits, columns[part], here[part], group, partial(_exponentials, logits), PLAIN
            )
            found[part], log_normaliser[part] = -losses, total.log() + peak

        pieces.run(rows, compute)
        ctx.rows, ctx.soft_cap = rows, soft_cap
        ctx.save_for_backward(x, weight, columns, here, ignored, log_normaliser)
        values.sub_(log_normaliser[:, None])
        ctx.mark_non_differentiable(values, places)
        return found.masked_fill_(ignored, 0), values, places

    @staticmethod
    def backward(ctx, grad_output, *_):
        x, weight, columns, here, ignored, log_normaliser = ctx.saved_tensors
        pieces = _Pieces(x, weight, ctx.soft_cap, ctx.needs_input_grad[:2])
        weights = -grad_output.masked_fill(ignored, 0)

        def compute(part: slice) -> None:
            logits, slope = pieces.logits(part)
            normaliser = log_normaliser[part]
            logits.sub_(normaliser[:, None]).exp_().mul_(weights[part, None])
            _to_gradient(logits, weights[part], columns[part], here[part], normaliser, PLAIN)
            logits = pieces.rounded(logits, slope)  # their gradient from here
            pieces.add(part, logits)

        pieces.run(ctx.rows, compute)
        return pieces.x_grad, pieces.weight_grad, *[None] * 7


def _exponentials(logits: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """Overwrite the logits with exp(logits - peak), and return their sums: fp32 [tokens]."""
    return logits.sub_(peak[:, None]).exp_().sum(dim=-1)


def _losses(
    logits: torch.Tensor,
    columns: torch.Tensor,
    here: torch.Tensor,
    group,
    sum_exponentials: Callable[[torch.Tensor], torch.Tensor],
    terms: LossTerms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the losses, the largest logits, and the sums of exp(logits - largest) over all ranks:
    fp32 [tokens] each.

    sum_exponentials(largest): the sums of this rank. It may overwrite the logits, so it runs last.
    """
    peak = logits.amax(dim=-1)
    all_reduce(peak, group, op=dist.ReduceOp.MAX)  # the same on every rank, before the exponential
    peak = peak.float()
    target = (logits.gather(-1, columns[:, None])[:, 0].float() - peak).masked_fill(~here, 0)
    if terms.label_smoothing:
        sum_of_logits = logits.sum(dim=-1, dtype=torch.float32) - logits.shape[-1] * peak
        target = torch.lerp(target, sum_of_logits / terms.vocab_size, terms.label_smoothing)
    sums = torch.stack([sum_exponentials(peak), target])
    all_reduce(sums, group)
    losses = sums[0].log() - sums[1]
    if terms.z_loss:
        losses = losses + terms.z_loss * (sums[0].log() + peak).square()
    return losses, peak, sums[0]


def _add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return total + a b in fp32, in the memory of total."""
    if total is None or a.dtype != total.dtype:
        return add_product(total, a, b)
    return torch.addmm(total, a, b, out=total)


def _chunks(logits: torch.Tensor):
    """Yield slices of the tokens, each with fp32 scratch in the shape of its logits."""
    tokens, step = len(logits), max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[-1])
    scratch = logits.new_empty(min(step, tokens), logits.shape[-1], dtype=torch.float32)
    for start in range(0, tokens, step):
        yield slice(start, start + step), scratch[: tokens - start]
