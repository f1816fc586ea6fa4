"""AdamW over this rank's part of a model, with clipping by the global gradient norm."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from megazoo.errors import UserError, check_number
from megazoo.optim.base import MASTER, MOMENTS, ModelOptimizer
from megazoo.optim.clip import (
    check_max_norm,
    check_model,
    clip_scale,
    counts_whole,
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
from megazoo.torch_internals import copy_each, fused_adamw, norm_of_each


class AdamW(ModelOptimizer):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), fused, on the device of the
    parameters, or on the CPU with offload.

    Every rank makes it, together with the others.

    Args:
        model: its parameters are trained, but for those that are frozen (`requires_grad_(False)`)
            by now.
        lr: step size; assign to `opt.lr` to change it. betas, eps: as in Adam.
        weight_decay: on parameters of two and more dimensions; biases and norms have none.
        clip_grad: largest global gradient norm; 0 turns clipping off.
        zero: 1 shares the state and the update among the replicas (ZeRO-1): each has 1 /
            (dp x cp) of every bucket of parameters. `train_batch` then leaves in .grad the sum over
            the replicas for this one's share only.
        offload: keep the state on the CPU, and make the update there.

    For a float16 model it makes a loss scale, which `train_batch` applies and takes out again; a
    step whose gradients overflowed on any rank is skipped on all: `skipped` says so, and step
    returns inf. loss_scale: one to use instead.

    The state of a parameter: `exp_avg` and `exp_avg_sq`, fp32, for the elements `ranges[name]` of
    this rank's part of it, flattened; for one of lower precision, or that is offloaded, also
    `master`, the fp32 weights that are updated and then rounded into it: most steps are smaller
    than its precision. Masters start from the values of the files that the model was read from.
    What is loaded or copied into a parameter later goes into its master, too, except through
    `parameter.data`, which torch does not count. A frozen parameter has no state.

    To torch's learning-rate schedulers it is an optimizer with two `param_groups`, with decay and
    without; what a group says of lr, betas, eps and weight_decay holds.
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
        check_model(model, f"{type(self).__name__}(model, lr=...)")
        self.model, self.ctx, self.clip_grad = model, model.ctx, clip_grad
        self.defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        with propagate_errors(self.ctx):
            _check_settings(self.defaults, clip_grad, zero)
            model.engine.agree_on_frozen()
        if model.dtype == torch.float16:
            model.engine.loss_scale = loss_scale or LossScale()
        self.loss_scale, self.skipped = model.engine.loss_scale, False
        self.device = torch.device("cpu") if offload else self.ctx.device
        self.entries = model.trained_entries()
        self.sharded = bool(zero) and self.ctx.token_axis.size > 1
        self.buckets: GradientBuckets = model.engine.fit_buckets()
        self.buckets.sharded = self.sharded
        self.ranges = {
            entry.name: self.range_of(entry, entry.spec.replicas(self.ctx).rank)
            for entry in self.entries
        }
        matrices = [entry for entry in self.entries if entry.parameter.dim() > 1]
        vectors = [entry for entry in self.entries if entry.parameter.dim() <= 1]
        self.param_groups = [self._group(matrices, weight_decay), self._group(vectors, 0.0)]
        self.state = {entry.name: self._new_state(entry, offload) for entry in self.entries}
        self._dtypes = {entry.name: entry.parameter.dtype for entry in self.entries}
        offloaded = self.device != self.ctx.device
        self.staging = Staging(self.ctx.device, model.dtype) if offloaded else None
        self.steps = torch.zeros((), dtype=torch.float32, device=self.device)
        self.masters = MasterWeights()
        self.masters.refresh(self)
        self._versions: dict[str, int] = {}  # of the parameters after the last step
        self._written: set[str] = set()  # parameters that something else than a step has written

    @on_all_ranks
    @torch.no_grad()
    def step(self, closure: None = None) -> torch.Tensor:
        """Clip, then update every parameter from its .grad; returns the global norm before
        clipping, fp32.

        closure: None, as torch's callers give it. UserError if the gradients are not whole yet; or
        if, since this optimizer was made, parameters were frozen or unfrozen, or another one was
        made with another `zero`.
        """
        if closure is not None:
            raise UserError(f"{type(self).__name__} takes no closure: run backward before the step")
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
            entries = [entry for entry in entries if entry.parameter.grad is not None]
            if entries:
                self._update(entries, group, scale)
        if self.sharded:
            self.buckets.gather()
        self.masters.note(self.entries)
        self.model.read_from = ()
        self._versions = versions_of(self.entries)
        return norm

    def terms(self) -> Terms:
        """Return what ranks that take this step together have alike: its settings, and on replicas
        the parameters that something else than a step has written since they were asked for."""
        everywhere = {"clip_grad": self.clip_grad, "the optimizer": type(self).__name__}
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
        }
        return Terms(everywhere, replicas=written)

    def _note_written(self) -> None:
        """Note the parameters that were written since the last step, or since this was called."""
        versions = versions_of(self.entries)
        self._written |= {name for name in versions if self._versions.get(name) != versions[name]}
        self._versions = versions

    def range_of(self, entry: NamedParameter, replica: int) -> tuple[int, int]:
        """Return which elements of a parameter, flattened, a replica has the state of: (first, last
        + 1)."""
        return element_range(entry, self.buckets, replica)

    def whole_states(self, entry: NamedParameter, writer: int) -> dict[str, torch.Tensor]:
        """Return a parameter's state in its shape, on the replica `writer`; under ZeRO-1 the others
        must call it, too.

        A frozen parameter has none: the dictionary is then empty.
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
        mine = self._mine(entry.parameter.detach(), entry)
        state = {
            name: torch.zeros(mine.shape, dtype=torch.float32, device=self.device)
            for name in MOMENTS
        }
        if offload or mine.dtype != torch.float32:
            state[MASTER] = torch.empty_like(state[MOMENTS[0]]).copy_(mine)
        return state

    def _check_gradients(self) -> None:
        """Raise UserError unless the gradients that are there are whole, and this optimizer's."""
        self.buckets = self.model.engine.fit_buckets()
        if not self.buckets.are_of(entry.parameter for entry in self.entries):
            raise UserError(
                f"parameters were frozen or unfrozen after {type(self).__name__} was made: make a "
                "new one"
            )
        if self.buckets.sharded != self.sharded:
            raise UserError(
                f"another {type(self).__name__} was made for this model, with another zero: step "
                "that one"
            )
        self.buckets.check()

    def _check_dtypes(self) -> None:
        """Raise UserError if the model was converted since this optimizer was made."""
        for entry in self.entries:
            if entry.parameter.dtype != self._dtypes[entry.name]:
                then, now = (
                    str(dtype).removeprefix("torch.")
                    for dtype in (self._dtypes[entry.name], entry.parameter.dtype)
                )
                raise UserError(
                    f"{entry.name} was {then} when {type(self).__name__} was made, and is {now}: "
                    "convert a model before its optimizer is made, or make a new one"
                )

    def _mine(self, tensor: torch.Tensor, entry: NamedParameter) -> torch.Tensor:
        """Return the elements of a tensor of the parameter's shape that this replica updates."""
        return tensor.view(-1)[slice(*self.ranges[entry.name])]

    def _overflowed(self, norm: torch.Tensor) -> bool:
        """Say whether a gradient on any rank is infinite or not a number.

        Then the norm is, too, or the norm of a copy that does not count in it. On CUDA the host
        waits here, once in a step of float16.
        """
        copies = [
            entry.parameter.grad
            for entry in self.entries
            if entry.parameter.grad is not None and not counts_whole(entry, self.ctx)
        ]
        finite = norm.isfinite()
        if copies:
            finite = finite & norm_of_each(copies).isfinite().all()
        overflow = (~finite).float()
        all_reduce_over(overflow, self.ctx.axes)
        return bool(overflow)

    def _clip_scale(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return what the gradients are to be divided by; None is 1.

        On CUDA it is a tensor even where nothing is clipped: to ask the norm, the host would wait
        for it.
        """
        clips = 0 < self.clip_grad < math.inf
        if not clips or (norm.device.type != "cuda" and not norm > self.clip_grad):
            return None
        return clip_scale(norm, self.clip_grad)

    def _update(
        self, entries: list[NamedParameter], group: dict, scale: torch.Tensor | None
    ) -> None:
        """Update the elements that this replica has, by the settings of their group. scale: the
        gradients are divided by it."""
        rows = [self._row(entry) for entry in entries]
        if self.staging:
            self.staging.update(rows, scale, partial(self._fused, group))
            return
        # The fused kernel divides the gradients: clipping needs no pass of its own.
        self._fused(group, [row.gradient for row in rows], [row.states for row in rows], scale)
        copied = [row for row in rows if row.states[0] is not row.weights]
        copy_each([row.weights for row in copied], [row.states[0] for row in copied])

    def _row(self, entry: NamedParameter) -> Row:
        """Return what this replica has of a parameter: its weights, gradient and state."""
        weights, state = self._mine(entry.parameter, entry), self.state[entry.name]
        states = (state.get(MASTER, weights), *(state[moment] for moment in MOMENTS))
        return Row(weights, self._mine(entry.gradient, entry), states)

    def _fused(
        self,
        group: dict,
        gradients: list[torch.Tensor],
        states: list[Sequence[torch.Tensor]],
        scale: torch.Tensor | None = None,
    ) -> None:
        """Update states, each of weights and two moments, by the fused kernel."""
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


def _check_settings(settings: dict, clip_grad: float, zero: int) -> None:
    """Raise UserError for a setting that would make no step, or a step to nowhere."""
    for name in ("lr", "eps", "weight_decay"):
        check_number(name, settings[name], 0)
    betas = settings["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UserError(f"betas must be two numbers, not {betas!r}")
    for beta in betas:
        check_number("beta", beta, 0, 1)
    check_max_norm("clip_grad", clip_grad)
    if zero not in (0, 1):
        raise UserError(f"zero {zero} is neither 0 nor 1")
