"""AdamW over this rank's part of a model, clipping by the global gradient norm, and learning-rate schedules."""

import math

import torch

from megazoo.errors import UserError
from megazoo.parallel.collectives import all_reduce
from megazoo.precision import LossScale

MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "master"
LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")


class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), fused, on the device of the parameters.

    Args:
        model: its `entries()` name the parameters and say which are copies.
        lr: step size; assign to `opt.lr` to change it. betas, eps: as in Adam.
        weight_decay: on parameters of two and more dimensions; biases and norms have none.
        clip_grad: largest global gradient norm; 0 turns clipping off.

    For a float16 model it makes a loss scale, which `train_batch` applies and takes out again; a step whose gradients
    overflowed on any rank is skipped on all: `skipped` says so, and step returns inf. loss_scale: one to use instead.

    The state of a parameter: `exp_avg` and `exp_avg_sq`, fp32, of its shape; for one of lower precision also `master`,
    the fp32 weights that are updated and then rounded into it: most steps are smaller than its precision.
    """

    def __init__(
        self,
        model,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip_grad: float = 1.0,
        loss_scale: LossScale | None = None,
    ):
        self.lr, self.betas, self.eps, self.weight_decay, self.clip_grad = lr, betas, eps, weight_decay, clip_grad
        if model.dtype == torch.float16:
            model.loss_scale = loss_scale or LossScale()
        self.loss_scale, self.skipped = model.loss_scale, False
        self.ctx = model.ctx
        self.entries = list(model.entries())
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        for entry in self.entries:
            state = {name: torch.zeros_like(entry.parameter, dtype=torch.float32) for name in MOMENTS}
            if entry.parameter.dtype != torch.float32:
                state[MASTER] = entry.parameter.detach().float()
            self.state[entry.name] = state
        self.steps = torch.zeros((), dtype=torch.float32, device=self.ctx.device)

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Clip, then update every parameter from its .grad; returns the global norm before clipping, fp32."""
        if self.loss_scale:
            self.skipped = self._overflowed()
            self.loss_scale.update(self.skipped)
            if self.skipped:
                return torch.tensor(torch.inf)
        norm = self.global_norm()
        self.steps += 1
        # The fused kernel divides gradients by grad_scale, so that clipping needs no pass of its own.
        clips = self.clip_grad > 0 and norm > self.clip_grad
        scale = (norm + 1e-6) / self.clip_grad if clips else None
        for decay in (True, False):
            group = [e for e in self.entries if (e.parameter.dim() > 1) == decay and e.parameter.grad is not None]
            if group:
                self._update(group, self.weight_decay if decay else 0.0, scale)
        return norm

    def zero_grad(self) -> None:
        """Zero every gradient in place."""
        for entry in self.entries:
            if entry.parameter.grad is not None:
                entry.parameter.grad.zero_()

    def global_norm(self) -> torch.Tensor:
        """The 2-norm of the whole model's gradient: copies over tp or between tied stages count once."""
        total = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        for entry in self.entries:
            if entry.parameter.grad is not None:
                for piece in entry.counted_pieces(self.ctx):
                    total += square_sum(entry.parameter.grad[piece.index()])
        all_reduce(total, self.ctx.tp_group)
        all_reduce(total, self.ctx.pp_group)
        return total.sqrt().float()

    def _overflowed(self) -> bool:
        """Whether a gradient on any rank is infinite or not a number."""
        sums = sum(entry.parameter.grad.sum() for entry in self.entries if entry.parameter.grad is not None)
        overflow = (~torch.isfinite(sums)).float()
        for group in (self.ctx.tp_group, self.ctx.pp_group, self.ctx.dp_group):
            all_reduce(overflow, group)
        return bool(overflow)

    def _update(self, group, weight_decay: float, grad_scale: torch.Tensor | None) -> None:
        # The kernel behind torch.optim.AdamW(fused=True), whose constructor would import torch._dynamo.
        torch._fused_adamw_(
            [self.state[e.name].get(MASTER, e.parameter) for e in group],
            [e.parameter.grad.float() for e in group],
            *([self.state[e.name][moment] for e in group] for moment in MOMENTS),
            [],
            [self.steps] * len(group),
            lr=self.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=weight_decay, eps=self.eps,
            amsgrad=False, maximize=False, grad_scale=grad_scale,
        )  # fmt: skip
        for e in group:
            if MASTER in self.state[e.name]:
                e.parameter.copy_(self.state[e.name][MASTER])


def square_sum(tensor: torch.Tensor, chunk: int = 1 << 16) -> torch.Tensor:
    """The sum of squares in float64. On the CPU in chunks: fp32 sums over 10 million elements are off by 4e-4."""
    if tensor.is_cuda:
        return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return sum(piece.double().square().sum() for piece in tensor.reshape(-1).split(chunk))


def learning_rate(
    step: int, *, schedule: str, lr: float, min_lr: float, warmup_steps: int, steps: int, decay_fraction: float = 0.2
) -> float:
    """The learning rate of step 1, 2, ...: a function of the step alone, so that a resumed run goes on.

    It rises linearly over warmup_steps, then follows `schedule`: "cosine" and "linear" fall to min_lr at step `steps`,
    and stay there; "constant" stays at lr; "wsd" (warm-up, stable, decay) falls linearly over the last decay_fraction.
    """
    if schedule not in LR_SCHEDULES:
        raise UserError(f"unknown lr-schedule {schedule!r}; there are {', '.join(LR_SCHEDULES)}")
    if step <= warmup_steps:
        return lr * step / warmup_steps
    start = max(warmup_steps, steps * (1 - decay_fraction)) if schedule == "wsd" else warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    if schedule == "constant":
        return lr
    remaining = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return min_lr + (lr - min_lr) * remaining
