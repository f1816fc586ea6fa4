"""Muon over this rank's part of a model: orthogonalised momentum for the matrices of linear layers,
AdamW for all else."""

import math
from functools import partial

import torch
from torch import nn

from megazoo.errors import UserError, check_number
from megazoo.optim.adamw import AdamW
from megazoo.optim.base import MASTER, MOMENTUM
from megazoo.optim.clip import check_model, element_range
from megazoo.optim.newton_schulz import cost_of, orthogonalised
from megazoo.optim.whole_matrices import Matrix, WholeMatrices
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter, ShardedModule

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Muon(AdamW):
    """Muon (Jordan et al. 2024): the step of a matrix is its momentum, orthogonalised.

        m <- momentum m + (1 - momentum) g
        u  = momentum m + (1 - momentum) g        with nesterov, else m
        W <- (1 - lr weight_decay) W - lr sqrt(max(1, rows / columns)) NewtonSchulz(u)

    That is of each whole matrix of a linear layer: q, k and v of a fused projection are three, gate
    and up two, and the factors of adapters are matrices, too. Embeddings, heads, norms and biases
    are trained by AdamW. The result does not depend on the layout: each matrix is brought together
    on one rank of (dp x cp x tp), which orthogonalises it for all; the work is balanced by cost.

    Every rank makes it, together with the others.

    Args:
        model: its parameters are trained, but for those that are frozen by now.
        lr: step size of matrices; assign to `opt.lr` to change it, and AdamW's in proportion.
        momentum, nesterov, ns_steps: as above; ns_steps is how many iterations of Newton-Schulz.
        weight_decay: of matrices.
        adamw: settings of AdamW for the rest, by its names: lr (by default 3e-4), betas, eps,
            weight_decay.
        clip_grad, zero, loss_scale: as in AdamW; zero 1 shares the momentum, too.
        ns_dtype: in which Newton-Schulz is computed, "float32" or "bfloat16"; "auto" is float32 on
            CPUs, bfloat16 on CUDA.

    The state of a matrix: `momentum`, fp32, of the elements that this rank updates; and `master`,
    as in AdamW. The factor sqrt(max(1, rows / columns)) is Jordan's, as in torch.optim.Muon.
    """

    def __init__(
        self,
        model,
        lr: float = 2e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
        clip_grad: float = 1.0,
        *,
        adamw: dict | None = None,
        zero: int = 0,
        loss_scale=None,
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
        super().__init__(model, **adamw, clip_grad=clip_grad, zero=zero, loss_scale=loss_scale)
        if ns_dtype == "auto":
            ns_dtype = "bfloat16" if self.ctx.device.type == "cuda" else "float32"
        self.ns_dtype = DTYPES[ns_dtype]
        self.matrices = [entry for entry in self.entries if entry.name in self._linear]
        others = [entry for entry in self.entries if entry.name not in self._linear]
        decayed = [entry for entry in others if entry.parameter.dim() > 1]
        vectors = [entry for entry in others if entry.parameter.dim() <= 1]
        self.param_groups = [
            {**self._group(self.matrices, weight_decay), **self._muon},
            self._group(decayed, self.defaults["weight_decay"]),
            self._group(vectors, 0.0),
        ]
        # not self.range_of, by which optimizer and matrices would keep each other alive
        ranges = partial(_range_of, self.buckets) if self.sharded else None
        self.whole = WholeMatrices(self.matrices, self.ctx, cost_of, ranges)

    @AdamW.lr.setter
    def lr(self, lr: float) -> None:
        adamw = self.defaults["lr"] / self._muon["lr"] if self._muon["lr"] else 1.0
        for number, group in enumerate(self.param_groups):
            group["lr"] = lr * adamw if number else lr

    @property
    def step_flops(self) -> float:
        """The FLOPs with which this rank orthogonalises the matrices that it owns, in a step."""
        mine = (matrix for matrix in self.whole.matrices if matrix.owner == self.whole.me)
        cost = sum(cost_of(matrix.rows, matrix.columns) for matrix in mine)
        return 2.0 * self.param_groups[0]["ns_steps"] * cost

    def _new_state(self, entry: NamedParameter, offload: bool) -> dict[str, torch.Tensor]:
        if entry.name not in self._linear:
            return super()._new_state(entry, offload)
        mine = self._mine(entry.parameter.detach(), entry)
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
        stepped = {entry.name for entry in entries}  # what got a gradient

        def direction_of(which: Matrix) -> torch.Tensor:
            """Return this rank's elements of u, the momentum that the gradient has gone into."""
            entry, mine = which.entry, self.whole.mine(which)
            buffer = self.state[entry.name][MOMENTUM][mine]
            if entry.name not in stepped:
                return torch.zeros_like(buffer)
            gradient = self._mine(entry.gradient, entry)[mine].float()
            gradient = gradient if scale is None else gradient / scale
            buffer.lerp_(gradient, 1 - group["momentum"])
            return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

        def step_of(whole: torch.Tensor, which: Matrix) -> torch.Tensor:
            """Return by what a whole matrix changes, for a learning rate of 1."""
            factor = math.sqrt(max(1.0, which.rows / which.columns))
            return factor * orthogonalised(whole, group["ns_steps"], self.ns_dtype).float()

        def change(which: Matrix, step: torch.Tensor) -> None:
            entry, mine = which.entry, self.whole.mine(which)
            if entry.name not in stepped:
                return
            weights = self._mine(entry.parameter, entry)[mine]
            master = self.state[entry.name].get(MASTER)
            changed = weights if master is None else master[mine]
            changed.mul_(1 - group["lr"] * group["weight_decay"])
            changed.sub_(step, alpha=group["lr"])
            if master is not None:
                weights.copy_(changed)

        self.whole.apply(step_of, direction_of, change)


def _range_of(buckets: GradientBuckets, entry: NamedParameter, replica: int) -> tuple[int, int]:
    """Return which elements of a parameter, flattened, a replica has the state of."""
    return element_range(entry, buckets, replica)


def _check_settings(muon: dict, adamw: dict, ns_dtype: str) -> None:
    """Raise UserError for a setting of Muon that can't be, or one that AdamW has not."""
    unknown = adamw.keys() - {"lr", "betas", "eps", "weight_decay"}
    if unknown:
        raise UserError(f"adamw has no setting {min(unknown)}: it has lr, betas, eps, weight_decay")
    check_number("lr", muon["lr"], 0)
    check_number("momentum", muon["momentum"], 0, 1)
    check_number("ns_steps", muon["ns_steps"], 1, whole=True)
    check_number("weight_decay", muon["weight_decay"], 0)
    if ns_dtype not in ("auto", *DTYPES):
        raise UserError(f"ns_dtype {ns_dtype!r} is none of auto, {', '.join(DTYPES)}")


def _check_cuts(model, names: set[str]) -> None:
    """Raise UserError for a matrix that is cut over another axis than tp: it is never whole."""
    for entry in model.trained_entries():
        others = [shard.axis for shard in entry.spec.shards if shard.axis != "tp"]
        if entry.name in names and others:
            raise UserError(
                f"Muon can't train {entry.name}: it brings together matrices that are cut over tp, "
                f"and this one is cut over {others[0]}; leave it out of `multiplied`, or use AdamW"
            )


def linear_names(model: nn.Module) -> set[str]:
    """Return the names of the matrices by which tokens are multiplied: those of linear layers, of
    adapters, and of layers of one's own that name them in `multiplied`."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name in module.multiplied
        if getattr(module, name).dim() == 2
    }
