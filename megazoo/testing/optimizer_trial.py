"""Check the optimizer by itself: its weights against AdamW as the paper has it, and whether all
ranks skip a step whose gradients overflow on one."""

import math

import torch

LOSS_SCALE = 2.0**10  # of the ranks of a layout, beside one process without: exact in fp32


def plain_adamw(
    initial: dict[str, torch.Tensor],
    gradients: list[dict[str, torch.Tensor]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: float,
    decay_all: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the weights after AdamW's steps, in double precision (Loshchilov and Hutter 2019).

    initial: weights by name; gradients: of each step, of those that are trained. Gradients are
    clipped to a global norm; parameters of two and more dimensions decay, or with decay_all every
    one that is trained.
    """
    weights = {name: weight.double() for name, weight in initial.items()}
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step, of_step in enumerate(gradients, start=1):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in of_step.values()))
        scale = min(1.0, clip / (norm + 1e-6))
        for name, gradient in of_step.items():
            g, w = scale * gradient.double(), weights[name]
            first[name] = betas[0] * first[name] + (1 - betas[0]) * g
            second[name] = betas[1] * second[name] + (1 - betas[1]) * g**2
            mean = first[name] / (1 - betas[0] ** step)
            root = (second[name] / (1 - betas[1] ** step)).sqrt()
            decay = weight_decay if w.dim() > 1 or decay_all else 0.0
            weights[name] = w - lr * (decay * w + mean / (root + eps))
    return weights


def skips_overflow(model, optimizer) -> bool:
    """Return whether this rank skips a step whose gradients overflow on the last rank alone."""
    ctx = model.ctx
    overflowing = ctx.rank == ctx.world_size - 1
    value = math.inf if overflowing else 0.0
    for entry in optimizer.entries:
        if entry.parameter.grad is not None:
            entry.parameter.grad.fill_(value)
    optimizer.step()
    return optimizer.skipped
