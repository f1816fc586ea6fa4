"""AdamW over this rank's part of a model, with clipping by the global gradient norm."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megazoo.errors import UserError, check_number
from megazoo.optim.base import AVERAGE, MASTER, MOMENTS, ModelOptimizer
from megazoo.optim.clip import (
    check_max_norm,
    check_model,
    clip_scale,
    counts_here,
    element_range,
    global_norm,
)
from megazoo.optim.loss_scale import LossScale
from megazoo.optim.masters import MasterWeights, versions_of
from megazoo.optim.offload import Row, Staging
from megazoo.parallel.agreement import Terms, fingerprint
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.collectives import all_reduce_over, gather_ranges
from megazoo.parallel.failure import on_all_ranks, propagate_errors
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.storage import storage_of
from megazoo.torch_internals import copy_each, fused_adamw, norm_of_each


class AdamW(ModelOptimizer):
    """Optimize a model with AdamW (Loshchilov and Hutter 2019): decoupled weight decay, fused
    kernels.

    Every rank creates it, together with the others. It works on the device of the parameters, or on
    the CPU with offload. torch learning-rate schedulers accept it: it has two `param_groups`, with
    and without weight decay, whose lr, betas, eps and weight_decay are used.

    For a float16 model it creates a LossScale, which `train_batch` applies and removes again. If
    the gradients overflow on any rank, all ranks skip the step: `skipped` is then True, and step
    returns inf.

    Args:
        model: the model. Its parameters are trained, except those that are frozen
            (`requires_grad_(False)`) when the optimizer is created.
        lr: learning rate; assign to `opt.lr` to change it.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: for parameters that decay (`ParameterSpec.decays`): by default those with two
            or more dimensions, so not biases and norms.
        clip_grad: largest global gradient norm; 0: no clipping.
        zero: stage of ZeRO; default: that of the context. 1: shard the optimizer state and the
            update over the replicas: each has 1 / (dp x cp) of every bucket of parameters. After
            `train_batch`, .grad then holds the sum over the replicas only for this rank's shard. 2:
            also shard the gradients: .grad is then None after `train_batch`, and
            `model.engine.gradients.buckets.own(parameter)` is this rank's shard. 3: also shard the
            parameters, of a model that was built with zero 3. 0: no sharding.
        zero_gather: default: that of the context. "microbatch": reduce gradients with zero 2 and 3
            in the backward of each micro-batch, if the rank has one stage and whole backwards.
            "step": only in the last one.
        offload: whether to store the state on the CPU, and compute the update there.
        ema: decay of an exponential moving average of the weights, such as 0.999, which each step
            updates. It starts from the weights, and is stored in checkpoints; `megazoo convert
            --ema` exports it. 0: no average.
        loss_scale: a LossScale to use instead of the default one, for float16.

    Attributes:
        state: for each parameter `exp_avg` and `exp_avg_sq`, fp32, for the elements `ranges[name]`
            of this rank's flattened part. With `ema` also `ema`, the average. For a parameter of
            lower precision, or with offload, also `master`, the fp32 weights: they are updated, and
            then rounded to the parameter, because most steps are smaller than its precision.
            Masters start from the values in the files that the model was loaded from. Later writes
            to a parameter update its master, except through `parameter.data`, which torch does not
            track. Frozen parameters have no state.

    Raises:
        UserError: A setting is invalid, or `model` is not a megazoo model.

    Example:
        optimizer = AdamW(model, lr=3e-4, clip_grad=1.0)
        loss = model.train_batch(ids, labels=ids)
        norm = optimizer.step()
    """

    def __init__(
        self,
        model: Any,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip_grad: float = 1.0,
        *,
        zero: int | None = None,
        zero_gather: str | None = None,
        offload: bool = False,
        ema: float = 0.0,
        loss_scale: LossScale | None = None,
    ):
        check_model(model, f"{type(self).__name__}(model, lr=...)")
        self.model, self.ctx, self.clip_grad = model, model.ctx, clip_grad
        self.defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        layout = model.ctx.layout
        zero = layout.zero if zero is None else zero
        zero_gather = zero_gather or layout.zero_gather
        with propagate_errors(self.ctx):
            _check_settings(self.defaults, clip_grad, zero, zero_gather)
            if (zero == 3) != (layout.zero == 3):
                raise UserError(
                    f"the optimizer has zero {zero}, but the model was built with zero "
                    f"{layout.zero}: parameters are sharded when a model is built, so pass zero=3 "
                    "to from_torch, or use another zero for the optimizer"
                )
            check_number("ema", ema, 0, 1)
            model.engine.agree_on_frozen()
        if model.dtype == torch.float16:
            model.engine.loss_scale = loss_scale or LossScale()
        self.loss_scale, self.skipped = model.engine.loss_scale, False
        self.device = torch.device("cpu") if offload else self.ctx.device
        self.entries = model.trained_entries()
        self.storage, self.zero = storage_of(model), zero if self.ctx.token_axis.size > 1 else 0
        self.sharded = self.zero > 0
        self.buckets: GradientBuckets = model.engine.gradients.fit()
        self.buckets.zero = self.zero
        self.buckets.per_microbatch = zero_gather == "microbatch"
        self.ranges = {
            entry.name: self.range_of(entry, entry.spec.replicas(self.ctx).rank)
            for entry in self.entries
        }
        decayed = [entry for entry in self.entries if entry.spec.decays]
        others = [entry for entry in self.entries if not entry.spec.decays]
        self.param_groups = [self._group(decayed, weight_decay), self._group(others, 0.0)]
        self.state = {entry.name: self._new_state(entry, offload) for entry in self.entries}
        self._dtypes = {entry.name: entry.parameter.dtype for entry in self.entries}
        offloaded = self.device != self.ctx.device
        self.staging = Staging(self.ctx.device, model.dtype) if offloaded else None
        self.steps = torch.zeros((), dtype=torch.float32, device=self.device)
        self.masters = MasterWeights()
        self.masters.refresh(self, model.read_from)
        self.ema = ema
        for entry in self.entries if ema else ():
            self.state[entry.name][AVERAGE] = self._weights(entry).float().clone()
        model.engine.optimizers.add(self)
        self._versions: dict[str, int] = {}  # versions of the parameters after the last step
        self._written: set[str] = set()  # parameters that were written by anything except a step

    @on_all_ranks
    @torch.no_grad()
    def step(self, closure: None = None) -> torch.Tensor:
        """Clip the gradients, then update every parameter from its .grad.

        Args:
            closure: must be None.

        Returns:
            The global gradient norm before clipping, fp32, 0-dimensional; inf if the step was
            skipped.

        Raises:
            UserError: The gradients are incomplete; or parameters were frozen or unfrozen, or
                another optimizer with another `zero` was created, since this one was created.
        """
        if closure is not None:
            raise UserError(
                f"{type(self).__name__} does not support a closure: run backward before the step"
            )
        for group in self.param_groups:
            check_number("lr", float(group["lr"]), 0)
        self._check_gradients()
        self._check_dtypes()
        self._note_written()
        self.masters.refresh(self)
        norm = global_norm(self.entries, self.buckets)
        if self.loss_scale:
            self.skipped = self._overflowed(norm)
            self.loss_scale.update(self.skipped)
            if self.skipped:
                return torch.tensor(torch.inf)
        self.steps += 1
        scale = self._clip_scale(norm)
        by_name = {entry.name: entry for entry in self.entries}
        for group in self.param_groups:
            entries = [by_name[name] for name in group["names"]]
            entries = [entry for entry in entries if self.buckets.has(entry.parameter)]
            if entries:
                self._update(entries, group, scale)
        self._average()
        if self.sharded:
            self.buckets.gather()
        if self.storage:
            self.storage.release()
        self.masters.note(self.entries)
        self.model.read_from = ()
        self._versions = versions_of(self.entries)
        return norm

    def terms(self) -> Terms:
        """Return the values that must be equal on the ranks that take this step together: settings,
        and on replicas the parameters that were written by anything except a step since the last
        call."""
        everywhere = {"clip_grad": self.clip_grad, "the optimizer": type(self).__name__}
        everywhere["ema"] = self.ema
        for number, group in enumerate(self.param_groups):
            settings = {key: group[key] for key in group if key not in ("params", "names")}
            everywhere |= {f"{key} of group {number}": settings[key] for key in settings}
        self._note_written()
        names, self._written = self._written, set()
        written = {
            f"what was written into {entry.name}": fingerprint(entry.parameter, bits=True)
            for entry in self.entries
            if entry.name in names and entry.spec.replicas(self.ctx) is self.ctx.token_axis
            if self.ctx.token_axis.size > 1
            if not self.storage or entry.parameter not in self.storage.place
        }
        return Terms(everywhere, replicas=written)

    def _note_written(self) -> None:
        """Note the parameters that were written since the last step or the last call of this
        method."""
        versions = versions_of(self.entries)
        self._written |= {name for name in versions if self._versions.get(name) != versions[name]}
        self._versions = versions

    def range_of(self, entry: NamedParameter, replica: int) -> tuple[int, int]:
        """Return the range (first, last + 1) of the flattened parameter whose state a replica
        has."""
        return element_range(entry, self.buckets, replica)

    def whole_states(self, entry: NamedParameter, writer: int) -> dict[str, torch.Tensor]:
        """Return the full state of a parameter, in its shape, on the replica `writer`. Under ZeRO-1
        the other replicas must also call it.

        For a frozen parameter the dictionary is empty.
        """
        states = {}
        for name, tensor in self.state.get(entry.name, {}).items():
            if name == MASTER and entry.parameter.dtype == torch.float32:
                continue  # the parameter itself, on the CPU
            if self.sharded:
                replicas = entry.spec.replicas(self.ctx)
                ranges = [self.range_of(entry, rank) for rank in range(replicas.size)]
                assert replicas.group  # there are several ranks
                whole = tensor.new_empty(entry.parameter.numel())
                whole[slice(*self.ranges[entry.name])] = tensor
                gather_ranges(whole, ranges, writer, replicas.group)
                tensor = whole
            states[name] = tensor.view(entry.parameter.shape)
        return states

    def _group(self, entries: list[NamedParameter], weight_decay: float) -> dict:
        params, names = [e.parameter for e in entries], [e.name for e in entries]
        return {"params": params, "names": names, **self.defaults, "weight_decay": weight_decay}

    def _new_state(self, entry: NamedParameter, offload: bool) -> dict[str, torch.Tensor]:
        mine = self.values_of(entry)
        state = {
            name: torch.zeros(mine.shape, dtype=torch.float32, device=self.device)
            for name in MOMENTS
        }
        if offload or mine.dtype != torch.float32:
            state[MASTER] = torch.empty_like(state[MOMENTS[0]]).copy_(mine)
        return state

    def _check_gradients(self) -> None:
        """Raise UserError unless the gradients are complete, and belong to this optimizer."""
        self.buckets = self.model.engine.gradients.fit()
        if not self.buckets.are_of(entry.parameter for entry in self.entries):
            raise UserError(
                f"parameters were frozen or unfrozen after {type(self).__name__} was created: "
                "create a new one"
            )
        if self.buckets.zero != self.zero:
            raise UserError(
                f"another {type(self).__name__} was created for this model, with another zero: "
                "call its step() instead"
            )
        self.buckets.check()

    def _check_dtypes(self) -> None:
        """Raise UserError if the model was converted since this optimizer was created."""
        for entry in self.entries:
            if entry.parameter.dtype != self._dtypes[entry.name]:
                then, now = (
                    str(dtype).removeprefix("torch.")
                    for dtype in (self._dtypes[entry.name], entry.parameter.dtype)
                )
                raise UserError(
                    f"{entry.name} was {then} when {type(self).__name__} was created, and is "
                    f"{now}: convert the model before you create the optimizer, or create a new one"
                )

    def values_of(self, entry: NamedParameter) -> torch.Tensor:
        """Return this replica's elements of a parameter, flat. Writes change the parameter."""
        if self.storage and entry.parameter in self.storage.place:
            return self.storage.own(entry.parameter)
        return entry.parameter.detach().view(-1)[slice(*self.ranges[entry.name])]

    def _weights(self, entry: NamedParameter) -> torch.Tensor:
        return self.state[entry.name].get(MASTER, self.values_of(entry))

    def _overflowed(self, norm: torch.Tensor) -> bool:
        """Return whether a gradient on any rank is infinite or NaN.

        Then the norm is also infinite or NaN, or the norm of a copy that is not counted in it. On
        CUDA the host waits here, once per step of float16.
        """
        copies = [
            self.buckets.own(entry.parameter)
            for entry in self.entries
            if self.buckets.has(entry.parameter) and not counts_here(entry, self.buckets)
        ]
        finite = norm.isfinite()
        if copies:
            finite = finite & norm_of_each(copies).isfinite().all()
        overflow = (~finite).float()
        all_reduce_over(overflow, self.ctx.axes)
        return bool(overflow)

    def _clip_scale(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return the divisor of the gradients; None: 1.

        On CUDA it is always a tensor, because the host would wait for the value of the norm.
        """
        clips = 0 < self.clip_grad < math.inf
        if not clips or (norm.device.type != "cuda" and not norm > self.clip_grad):
            return None
        return clip_scale(norm, self.clip_grad)

    def _update(
        self, entries: list[NamedParameter], group: dict, scale: torch.Tensor | None
    ) -> None:
        """Update the elements of this replica with the settings of their group. scale: divisor of
        the gradients."""
        rows = [self._row(entry) for entry in entries]
        if self.staging:
            self.staging.update(rows, scale, partial(self._fused, group))
            return
        # The fused kernel divides the gradients, so clipping needs no separate pass.
        self._fused(group, [row.gradient for row in rows], [row.states for row in rows], scale)
        copied = [row for row in rows if row.states[0] is not row.weights]
        copy_each([row.weights for row in copied], [row.states[0] for row in copied])

    def _row(self, entry: NamedParameter) -> Row:
        """Return this replica's weights, gradient and state of a parameter."""
        weights, state = self.values_of(entry), self.state[entry.name]
        states = (state.get(MASTER, weights), *(state[moment] for moment in MOMENTS))
        return Row(weights, self.buckets.own(entry.parameter), states)

    def _fused(
        self,
        group: dict,
        gradients: list[torch.Tensor],
        states: list[Sequence[torch.Tensor]],
        scale: torch.Tensor | None = None,
    ) -> None:
        """Update states (weights and two moments each) with the fused kernel."""
        weights, first, second = map(list, zip(*states, strict=True))
        fused_adamw(
            weights,
            [gradient.float() for gradient in gradients],
            first,
            second,
            [self.steps] * len(weights),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=scale,
        )


def _check_settings(settings: dict, clip_grad: float, zero: int, zero_gather: str) -> None:
    """Raise UserError for an invalid setting."""
    for name in ("lr", "eps", "weight_decay"):
        check_number(name, settings[name], 0)
    betas = settings["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UserError(f"betas must be two numbers, got {betas!r}")
    for beta in betas:
        check_number("beta", beta, 0, 1)
    check_max_norm("clip_grad", clip_grad)
    if zero not in (0, 1, 2, 3):
        raise UserError(f"zero must be 0, 1, 2 or 3, got {zero}")
    if zero_gather not in ("microbatch", "step"):
        raise UserError(f"zero_gather must be microbatch or step, got {zero_gather!r}")
