"""Check the optimizer separately: compare its weights with reference implementations of AdamW and
Muon, and check that all ranks skip a step whose gradients overflow on one rank."""

import math
from collections.abc import Collection
from itertools import accumulate, pairwise
from typing import Any

import torch

from megazoo.optim.adamw import AdamW
from megazoo.optim.muon import Muon, linear_names
from megazoo.parallel.layout import Layout
from megazoo.testing.distances import parameter_distances

OPTIMIZERS = ("adamw", "muon")
# eps is large, because with a small eps gradients that are only rounding errors cause full steps.
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
OF_MATRICES = {"lr": 2e-3, "momentum": 0.95, "ns_steps": 5, "weight_decay": 0.1}
CLIP = 0.1  # small enough that gradients are clipped
LOSS_SCALE = 2.0**10  # only in layouts, not in one process; a power of two is exact in fp32


def make_optimizer(name: str, model: Any, layout: Layout, offload: bool = False) -> AdamW:
    """Create the optimizer of a check, one of OPTIMIZERS. offload: only for adamw."""
    how: dict[str, Any] = {"clip_grad": CLIP, "zero": layout.zero}
    how["zero_gather"] = layout.zero_gather
    if name == "adamw":
        return AdamW(model, **SETTINGS, **how, offload=offload)
    return Muon(model, **OF_MATRICES, adamw=SETTINGS, **how)


def matrix_rows_of(name: str, model: Any) -> dict[str, tuple[int, ...]]:
    """Return the weights that an optimizer treats as matrices, and the number of rows of each
    matrix. A fused weight contains several matrices, such as q, k and v."""
    if name == "adamw":
        return {}
    parts = {}
    for entry in model.entries():
        shard, shape = entry.spec.shard, entry.spec.shape
        by_rows = shard is not None and shard.dim == len(shape) - 2
        parts[entry.name] = shard.parts if by_rows else shape[-2:-1]
    return {name: rows for name, rows in parts.items() if name in linear_names(model)}


def beside_plain_steps(
    model: Any,
    initial: dict[str, torch.Tensor],
    gradients: list[dict[str, torch.Tensor]],
    weights: dict[str, torch.Tensor],
    matrices: dict[str, tuple[int, ...]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the distances of weights from those of a reference optimizer, and from those of an
    AdamW that applies weight decay to all trained parameters.

    For the arguments see `plain_steps`.
    """
    # only what the optimizer updates
    specs = {entry.name: entry.spec for entry in model.entries() if not entry.spec.is_state}
    initial = {name: weight for name, weight in initial.items() if name in specs}
    gradients = [{name: g for name, g in step.items() if name in specs} for step in gradients]
    plain, decaying = (
        parameter_distances(weights, plain_steps(initial, gradients, matrices, decayed), model)
        for decayed in ({name for name, spec in specs.items() if spec.decays}, {*specs})
    )
    return plain, decaying


def plain_steps(
    initial: dict[str, torch.Tensor],
    gradients: list[dict[str, torch.Tensor]],
    matrices: dict[str, tuple[int, ...]],
    decayed: Collection[str],
) -> dict[str, torch.Tensor]:
    """Return the weights after the steps of a reference optimizer, in double precision: Muon for
    matrices, AdamW for all other parameters.

    Args:
        initial: Weights, keyed by parameter name.
        gradients: Gradients of the trained parameters, per step.
        matrices: As returned by `matrix_rows_of`.
        decayed: Names of the parameters with weight decay.
    """
    of_muon = [{name: g for name, g in step.items() if name in matrices} for step in gradients]
    others = [{name: g for name, g in step.items() if name not in matrices} for step in gradients]
    scales = [clip_scale(step) for step in gradients]
    stepped = plain_adamw(initial, others, scales, decayed, **SETTINGS)
    return plain_muon(stepped, of_muon, scales, matrices, **OF_MATRICES)


def clip_scale(gradients: dict[str, torch.Tensor]) -> float:
    """Return the factor that limits the global norm of gradients to CLIP."""
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    return min(1.0, CLIP / (norm + 1e-6))


def plain_muon(
    initial: dict[str, torch.Tensor],
    gradients: list[dict[str, torch.Tensor]],
    scales: list[float],
    matrices: dict[str, tuple[int, ...]],
    *,
    lr: float,
    momentum: float,
    ns_steps: int,
    weight_decay: float,
) -> dict[str, torch.Tensor]:
    """Return the weights after steps of Muon with Nesterov momentum, in double precision (Jordan et
    al. 2024). For the arguments see `plain_adamw` and `plain_steps`."""
    weights = {name: weight.double() for name, weight in initial.items()}
    moments = {name: torch.zeros_like(weights[name]) for name in matrices}
    for of_step, scale in zip(gradients, scales, strict=True):
        for name, gradient in of_step.items():
            g, w = scale * gradient.double(), weights[name]
            moments[name] = momentum * moments[name] + (1 - momentum) * g
            update = momentum * moments[name] + (1 - momentum) * g
            ends = [0, *accumulate(matrices[name])]
            steps = [_plain_direction(update[..., i:j, :], ns_steps) for i, j in pairwise(ends)]
            weights[name] = (1 - lr * weight_decay) * w - lr * torch.cat(steps, dim=-2)
    return weights


def _plain_direction(matrix: torch.Tensor, ns_steps: int) -> torch.Tensor:
    """Return an orthogonalised momentum matrix, or a stack of them, multiplied by Jordan's
    factor."""
    x = matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ns_steps):
        x = 3.4445 * x - 4.7750 * (x @ x.mT) @ x + 2.0315 * (x @ x.mT) @ (x @ x.mT) @ x
    return math.sqrt(max(1.0, matrix.shape[-2] / matrix.shape[-1])) * x


def plain_adamw(
    initial: dict[str, torch.Tensor],
    gradients: list[dict[str, torch.Tensor]],
    scales: list[float],
    decayed: Collection[str],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> dict[str, torch.Tensor]:
    """Return the weights after steps of AdamW, in double precision (Loshchilov and Hutter 2019).

    Args:
        initial: Weights, keyed by parameter name.
        gradients: Gradients of the trained parameters, per step.
        scales: Factor of the gradients, per step.
        decayed: Names of the parameters with weight decay.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Epsilon.
        weight_decay: Weight decay.
    """
    weights = {name: weight.double() for name, weight in initial.items()}
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step, (of_step, scale) in enumerate(zip(gradients, scales, strict=True), start=1):
        for name, gradient in of_step.items():
            g, w = scale * gradient.double(), weights[name]
            first[name] = betas[0] * first[name] + (1 - betas[0]) * g
            second[name] = betas[1] * second[name] + (1 - betas[1]) * g**2
            mean = first[name] / (1 - betas[0] ** step)
            root = (second[name] / (1 - betas[1] ** step)).sqrt()
            decay = weight_decay if name in decayed else 0.0
            weights[name] = w - lr * (decay * w + mean / (root + eps))
    return weights


def skips_overflow(model: Any, optimizer: Any) -> bool:
    """Return whether this rank skips a step whose gradients overflow only on the last rank."""
    ctx = model.ctx
    overflowing = ctx.rank == ctx.world_size - 1
    value = math.inf if overflowing else 0.0
    for entry in optimizer.entries:
        if optimizer.buckets.has(entry.parameter):
            optimizer.buckets.own(entry.parameter).fill_(value)
    optimizer.step()
    return optimizer.skipped
