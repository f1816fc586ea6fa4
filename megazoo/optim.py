"""AdamW over this rank's part of a model, clipping by the global gradient norm, and learning-rate schedules."""

import math

import torch

from megazoo.errors import UserError
from megazoo.parallel.collectives import all_reduce, gather_ranges
from megazoo.parallel.shard import Entry
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
        zero: 1 shares the state and the update among the replicas (ZeRO-1): each has 1 / dp of them. `train_batch` then
            leaves in .grad the sum over the replicas for this one's share only.
        offload: keep the state on the CPU, and make the update there.

    For a float16 model it makes a loss scale, which `train_batch` applies and takes out again; a step whose gradients
    overflowed on any rank is skipped on all: `skipped` says so, and step returns inf. loss_scale: one to use instead.

    The state of a parameter: `exp_avg` and `exp_avg_sq`, fp32, for the elements `ranges[name]` of this rank's part of
    it, flattened; for one of lower precision, or that is offloaded, also `master`, the fp32 weights that are updated
    and then rounded into it: most steps are smaller than its precision.
    """

    def __init__(
        self,
        model,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip_grad: float = 1.0,
        *,
        zero: int = 0,
        offload: bool = False,
        loss_scale: LossScale | None = None,
    ):
        if zero not in (0, 1):
            raise UserError(f"zero {zero} is neither 0 nor 1")
        self.lr, self.betas, self.eps, self.weight_decay, self.clip_grad = lr, betas, eps, weight_decay, clip_grad
        if model.dtype == torch.float16:
            model.loss_scale = loss_scale or LossScale()
        self.loss_scale, self.skipped = model.loss_scale, False
        self.ctx = model.ctx
        self.device = torch.device("cpu") if offload else self.ctx.device
        self.entries = list(model.entries())
        self._buckets = model.gradient_buckets if zero and self.ctx.dp_size > 1 else None
        if self._buckets:
            self._buckets.sharded = True
        self.ranges = {entry.name: self.range_of(entry, self.ctx.dp_rank) for entry in self.entries}
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        for entry in self.entries:
            mine = self._mine(entry.parameter.detach(), entry)
            pinned = {"pin_memory": offload and self.ctx.device.type == "cuda"}
            state = {
                name: torch.zeros(mine.shape, dtype=torch.float32, device=self.device, **pinned) for name in MOMENTS
            }
            if offload or mine.dtype != torch.float32:
                state[MASTER] = torch.empty_like(state[MOMENTS[0]]).copy_(mine)
            self.state[entry.name] = state
        self.steps = torch.zeros((), dtype=torch.float32, device=self.device)

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
        scale = ((norm + 1e-6) / self.clip_grad).to(self.device) if clips else None
        for decay in (True, False):
            group = [e for e in self.entries if (e.parameter.dim() > 1) == decay and e.parameter.grad is not None]
            if group:
                self._update(group, self.weight_decay if decay else 0.0, scale)
        if self._buckets:
            self._buckets.gather()
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
                total += self._square_sum(entry)
        for group in (self.ctx.tp_group, self.ctx.pp_group, self.ctx.dp_group if self._buckets else None):
            all_reduce(total, group)
        return total.sqrt().float()

    def range_of(self, entry: Entry, dp_rank: int) -> tuple[int, int]:
        """The elements of a parameter, flattened, that a replica has the state of."""
        return self._buckets.range_of(entry.parameter, dp_rank) if self._buckets else (0, entry.parameter.numel())

    def whole_states(self, entry: Entry, writer: int) -> dict[str, torch.Tensor]:
        """A parameter's state in its shape, on the replica `writer`; under ZeRO-1 the others must call this, too."""
        states = {}
        for name, tensor in self.state[entry.name].items():
            if name == MASTER and entry.parameter.dtype == torch.float32:
                continue  # the parameter itself, on the CPU
            if self._buckets:
                ranges = [self.range_of(entry, dp_rank) for dp_rank in range(self.ctx.dp_size)]
                whole = tensor.new_empty(entry.parameter.numel())
                whole[slice(*self.ranges[entry.name])] = tensor
                gather_ranges(whole, ranges, writer, self.ctx.dp_group)
                tensor = whole
            states[name] = tensor.view(entry.parameter.shape)
        return states

    def _mine(self, tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
        """The elements of a tensor of the parameter's shape that this replica updates."""
        return tensor.view(-1)[slice(*self.ranges[entry.name])]

    def _square_sum(self, entry: Entry) -> torch.Tensor | float:
        """Of the gradient's elements that this rank counts."""
        gradient, pieces = entry.parameter.grad, entry.counted_pieces(self.ctx)
        if not self._buckets:
            return sum(square_sum(gradient[piece.index()]) for piece in pieces)
        counted = torch.zeros(gradient.shape, dtype=torch.bool, device=gradient.device)
        for piece in pieces:
            counted[piece.index()] = True
        counted, gradient = self._mine(counted, entry), self._mine(gradient, entry)
        return square_sum(gradient if counted.all() else gradient[counted])

    def _overflowed(self) -> bool:
        """Whether a gradient on any rank is infinite or not a number."""
        sums = sum(entry.parameter.grad.sum() for entry in self.entries if entry.parameter.grad is not None)
        overflow = (~torch.isfinite(sums)).float()
        for group in (self.ctx.tp_group, self.ctx.pp_group, self.ctx.dp_group):
            all_reduce(overflow, group)
        return bool(overflow)

    def _update(self, group: list[Entry], weight_decay: float, grad_scale: torch.Tensor | None) -> None:
        mine = [self._mine(e.parameter, e) for e in group]
        # The kernel behind torch.optim.AdamW(fused=True), whose constructor would import torch._dynamo.
        torch._fused_adamw_(
            [self.state[e.name].get(MASTER, part) for e, part in zip(group, mine, strict=True)],
            [self._mine(e.parameter.grad, e).to(self.device, torch.float32) for e in group],
            *([self.state[e.name][moment] for e in group] for moment in MOMENTS),
            [],
            [self.steps] * len(group),
            lr=self.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=weight_decay, eps=self.eps,
            amsgrad=False, maximize=False, grad_scale=grad_scale,
        )  # fmt: skip
        for e, part in zip(group, mine, strict=True):
            if MASTER in self.state[e.name]:
                part.copy_(self.state[e.name][MASTER])


def square_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of squares in float64: fp32 sums over 10 million elements are off by 4e-4.

    On the CPU in pieces of which each is one thread's: a pool's barriers cost more than they gain, on busy cores much.
    """
    pieces = (tensor,) if tensor.is_cuda else tensor.reshape(-1).split(1 << 15)
    return torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]).square().sum()


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
