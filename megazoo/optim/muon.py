"""Muon over this rank's part of a model: orthogonalised momentum for the matrices of linear layers,
AdamW for all other parameters."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from megazoo.errors import UserError, check_number
from megazoo.optim.adamw import AdamW
from megazoo.optim.base import MASTER, MOMENTUM
from megazoo.optim.clip import check_model, element_range
from megazoo.optim.loss_scale import LossScale
from megazoo.optim.newton_schulz import cost_of, orthogonalised
from megazoo.optim.whole_matrices import Matrix, WholeMatrices
from megazoo.parallel.axes import Axis
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter, ShardedModule

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Muon(AdamW):
    """Optimize a model with Muon (Jordan et al. 2024): the step of a matrix is its orthogonalised
    momentum.

        m <- momentum m + (1 - momentum) g
        u  = momentum m + (1 - momentum) g        with nesterov, otherwise m
        W <- (1 - lr weight_decay) W - lr sqrt(max(1, rows / columns)) NewtonSchulz(u)

    This is computed for each full matrix of a linear layer: q, k and v of a fused projection are
    three matrices, gate and up two, those of each expert are separate, and the factors of adapters
    are matrices too. Embeddings,
    heads, norms and biases are trained with AdamW. The result does not depend on the layout: each
    matrix is gathered on one rank of (dp x cp x tp), which orthogonalises it for all. The work is
    balanced by cost. The factor sqrt(max(1, rows / columns)) is that of Jordan, as in
    torch.optim.Muon.

    Every rank creates it, together with the others.

    Args:
        model: the model. Its parameters are trained, except those that are frozen when the
            optimizer is created.
        lr: learning rate of matrices; assign to `opt.lr` to change it, and that of AdamW in
            proportion.
        momentum: see above.
        nesterov: see above.
        ns_steps: number of Newton-Schulz iterations.
        weight_decay: for matrices.
        clip_grad: largest global gradient norm; 0: no clipping.
        adamw: settings of AdamW for the other parameters: lr (default: 3e-4), betas, eps,
            weight_decay.
        zero: stage of ZeRO; see AdamW. From 1, the momentum is sharded, too.
        zero_gather: see AdamW.
        ema: as in AdamW.
        loss_scale: as in AdamW.
        ns_dtype: data type of the Newton-Schulz iterations: "float32", "bfloat16", or "auto":
            float32 on CPUs, bfloat16 on CUDA.

    Attributes:
        state: for each matrix `momentum`, fp32, for the elements that this rank updates, and
            `master` as in AdamW.

    Raises:
        UserError: A setting is invalid, or a matrix is sharded over another axis than tp.

    Example:
        optimizer = Muon(model, lr=0.02, adamw={"lr": 3e-4})
        model.train_batch(ids, labels=ids)
        optimizer.step()
    """

    def __init__(
        self,
        model: Any,
        lr: float = 2e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
        clip_grad: float = 1.0,
        *,
        adamw: dict | None = None,
        zero: int | None = None,
        zero_gather: str | None = None,
        ema: float = 0.0,
        loss_scale: LossScale | None = None,
        ns_dtype: str = "auto",
    ):
        check_model(model, f"{type(self).__name__}(model, lr=...)")
        adamw = {"lr": 3e-4, **(adamw or {})}
        self._muon = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "weight_decay": weight_decay,
        }
        with propagate_errors(model.ctx):
            _check_settings(self._muon, adamw, ns_dtype)
            self._linear = linear_names(model)
            _check_cuts(model, self._linear)
        common: dict[str, Any] = {"clip_grad": clip_grad, "ema": ema, "loss_scale": loss_scale}
        common |= {"zero": zero, "zero_gather": zero_gather}
        super().__init__(model, **adamw, **common)
        if ns_dtype == "auto":
            ns_dtype = "bfloat16" if self.ctx.device.type == "cuda" else "float32"
        self.ns_dtype = DTYPES[ns_dtype]
        self.matrices = [entry for entry in self.entries if entry.name in self._linear]
        others = [entry for entry in self.entries if entry.name not in self._linear]
        decayed = [entry for entry in others if entry.spec.decays]
        plain = [entry for entry in others if not entry.spec.decays]
        self.param_groups = [
            {**self._group(self.matrices, weight_decay), **self._muon},
            self._group(decayed, self.defaults["weight_decay"]),
            self._group(plain, 0.0),
        ]
        # not self.range_of, which would create a reference cycle
        ranges = partial(_range_of, self.buckets) if self.sharded else None
        of_axes: dict[Axis, list[NamedParameter]] = {}
        for entry in self.matrices:
            of_axes.setdefault(entry.spec.replicas(self.ctx), []).append(entry)
        self.wholes = [
            WholeMatrices(entries, self.ctx, axis, cost_of, ranges)
            for axis, entries in of_axes.items()
        ]

    @AdamW.lr.setter
    def lr(self, lr: float) -> None:
        adamw = self.defaults["lr"] / self._muon["lr"] if self._muon["lr"] else 1.0
        for number, group in enumerate(self.param_groups):
            group["lr"] = lr * adamw if number else lr

    @property
    def step_flops(self) -> float:
        """The FLOPs per step with which this rank orthogonalises the matrices that it owns."""
        mine = (m for whole in self.wholes for m in whole.matrices if m.owner == whole.me)
        cost = sum(cost_of(matrix.rows, matrix.columns) for matrix in mine)
        return 2.0 * self.param_groups[0]["ns_steps"] * cost

    def _new_state(self, entry: NamedParameter, offload: bool) -> dict[str, torch.Tensor]:
        if entry.name not in self._linear:
            return super()._new_state(entry, offload)
        mine = self.values_of(entry)
        state = {MOMENTUM: torch.zeros(mine.shape, dtype=torch.float32, device=self.device)}
        if mine.dtype != torch.float32:
            state[MASTER] = mine.float()
        return state

    def _update(
        self, entries: list[NamedParameter], group: dict, scale: torch.Tensor | None
    ) -> None:
        if "momentum" not in group:
            super()._update(entries, group, scale)
            return
        for whole in self.wholes:
            self._step(whole, {entry.name for entry in entries}, group, scale)

    def _step(
        self, whole: WholeMatrices, stepped: set[str], group: dict, scale: torch.Tensor | None
    ) -> None:
        """Update matrices. stepped: names of the parameters with a gradient."""

        def direction_of(which: Matrix) -> torch.Tensor:
            """Update the momentum, and return this rank's elements of u."""
            entry, mine = which.entry, whole.mine(which)
            buffer = self.state[entry.name][MOMENTUM][mine]
            if entry.name not in stepped:
                return torch.zeros_like(buffer)
            gradient = self.buckets.own(entry.parameter)[mine].float()
            gradient = gradient if scale is None else gradient / scale
            buffer.lerp_(gradient, 1 - group["momentum"])
            return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

        def step_of(matrix: torch.Tensor, which: Matrix) -> torch.Tensor:
            """Return the step of a full matrix for a learning rate of 1."""
            factor = math.sqrt(max(1.0, which.rows / which.columns))
            return factor * orthogonalised(matrix, group["ns_steps"], self.ns_dtype).float()

        def change(which: Matrix, step: torch.Tensor) -> None:
            entry, mine = which.entry, whole.mine(which)
            if entry.name not in stepped:
                return
            weights = self.values_of(entry)[mine]
            master = self.state[entry.name].get(MASTER)
            changed = weights if master is None else master[mine]
            changed.mul_(1 - group["lr"] * group["weight_decay"])
            changed.sub_(step, alpha=group["lr"])
            if master is not None:
                weights.copy_(changed)

        whole.apply(step_of, direction_of, change)


def _range_of(buckets: GradientBuckets, entry: NamedParameter, replica: int) -> tuple[int, int]:
    """Return the range of the flattened parameter whose state a replica has."""
    return element_range(entry, buckets, replica)


def _check_settings(muon: dict, adamw: dict, ns_dtype: str) -> None:
    """Raise UserError for an invalid setting of Muon, or an unknown one of AdamW."""
    unknown = adamw.keys() - {"lr", "betas", "eps", "weight_decay"}
    if unknown:
        raise UserError(f"adamw has no setting {min(unknown)}: use lr, betas, eps, weight_decay")
    check_number("lr", muon["lr"], 0)
    check_number("momentum", muon["momentum"], 0, 1)
    check_number("ns_steps", muon["ns_steps"], 1, whole=True)
    check_number("weight_decay", muon["weight_decay"], 0)
    if ns_dtype not in ("auto", *DTYPES):
        raise UserError(f"ns_dtype {ns_dtype!r} is not supported: use auto, {', '.join(DTYPES)}")


def _check_cuts(model, names: set[str]) -> None:
    """Raise UserError for a matrix that is sharded over another axis than tp, which is never
    gathered. In a stack of weights, other axes may shard the stack."""
    for entry in model.trained_entries():
        inner = len(entry.spec.shape) - 2
        shards = [shard for shard in entry.spec.shards if shard.axis != "tp"]
        others = [shard.axis for shard in shards if shard.dim >= inner]
        if entry.name in names and others:
            raise UserError(
                f"Muon can't train {entry.name}: it supports matrices that are sharded over tp, "
                f"this one over {others[0]}. Remove it from `multiplied`, or use AdamW"
            )


def linear_names(model: nn.Module) -> set[str]:
    """Return the names of the matrices that multiply tokens: those of linear layers, adapters, and
    custom layers that list them in `multiplied`."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name in module.multiplied
        if getattr(module, name).dim() >= 2
    }
