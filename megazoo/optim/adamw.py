"""AdamW over this rank's part of a model, clipping by the global gradient norm, and learning-rate
schedules."""

import torch

from megazoo.errors import UserError
from megazoo.optim.clip import check_model, element_range, global_norm
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.collectives import all_reduce_over, gather_ranges
from megazoo.parallel.failure import together
from megazoo.parallel.module import Entry
from megazoo.torch_internals import fused_adamw

MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "master"


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), fused, on the device of the
    parameters.

    Every rank makes it, together with the others.

    Args:
        model: its parameters are trained, but for those that are frozen (`requires_grad_(False)`)
            by now.
        lr: step size; assign to `opt.lr` to change it. betas, eps: as in Adam.
        weight_decay: on parameters of two and more dimensions; biases and norms have none.
        clip_grad: largest global gradient norm; 0 turns clipping off.
        zero: 1 shares the state and the update among the replicas (ZeRO-1): each has 1 / dp of
            them. `train_batch` then leaves in .grad the sum over the replicas for this one's share
            only.
        offload: keep the state on the CPU, and make the update there.

    For a float16 model it makes a loss scale, which `train_batch` applies and takes out again; a
    step whose gradients overflowed on any rank is skipped on all: `skipped` says so, and step
    returns inf. loss_scale: one to use instead.

    The state of a parameter: `exp_avg` and `exp_avg_sq`, fp32, for the elements `ranges[name]` of
    this rank's part of it, flattened; for one of lower precision, or that is offloaded, also
    `master`, the fp32 weights that are updated and then rounded into it: most steps are smaller
    than its precision. A frozen parameter has none.

    To torch's learning-rate schedulers it is an optimizer with two `param_groups`, with decay and
    without; what a group says of lr, betas, eps and weight_decay holds.
    """

    # torch's own constructor is not called: it would import torch._dynamo (70 MB).
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
        check_model(model, "AdamW(model, lr=...)")
        if zero not in (0, 1):
            raise UserError(f"zero {zero} is neither 0 nor 1")
        self.model, self.ctx, self.clip_grad = model, model.ctx, clip_grad
        if model.dtype == torch.float16:
            model.loss_scale = loss_scale or LossScale()
        self.loss_scale, self.skipped = model.loss_scale, False
        self.device = torch.device("cpu") if offload else self.ctx.device
        model.agree_on_frozen()
        self.entries = model.trained_entries()
        self.sharded = bool(zero) and self.ctx.dp_size > 1
        self.buckets: GradientBuckets = model.fit_buckets()
        self.buckets.sharded = self.sharded
        self.ranges = {entry.name: self.range_of(entry, self.ctx.dp_rank) for entry in self.entries}
        self.defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.param_groups = []
        for decay in (weight_decay, 0.0):
            entries = [
                e for e in self.entries if (e.parameter.dim() > 1) == (not self.param_groups)
            ]
            group = {"params": [e.parameter for e in entries], "names": [e.name for e in entries]}
            self.param_groups.append({**group, **self.defaults, "weight_decay": decay})
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        for entry in self.entries:
            mine = self._mine(entry.parameter.detach(), entry)
            pinned = {"pin_memory": offload and self.ctx.device.type == "cuda"}
            state = {
                name: torch.zeros(mine.shape, dtype=torch.float32, device=self.device, **pinned)
                for name in MOMENTS
            }
            if offload or mine.dtype != torch.float32:
                state[MASTER] = torch.empty_like(state[MOMENTS[0]]).copy_(mine)
            self.state[entry.name] = state
        self.steps = torch.zeros((), dtype=torch.float32, device=self.device)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    @together
    @torch.no_grad()
    def step(self, closure: None = None) -> torch.Tensor:
        """Clip, then update every parameter from its .grad; returns the global norm before
        clipping, fp32.

        closure: None, as torch's callers give it. UserError if the gradients are not whole yet; or
        if, since this optimizer was made, parameters were frozen or unfrozen, or another one was
        made with another `zero`.
        """
        if closure is not None:
            raise UserError("AdamW takes no closure: run backward before the step")
        self.buckets = self.model.fit_buckets()
        if not self.buckets.are_of(entry.parameter for entry in self.entries):
            raise UserError(
                "parameters were frozen or unfrozen after AdamW was made: make a new one"
            )
        if self.buckets.sharded != self.sharded:
            raise UserError(
                "another AdamW was made for this model, with another zero: step that one"
            )
        self.buckets.check()
        if self.loss_scale:
            self.skipped = self._overflowed()
            self.loss_scale.update(self.skipped)
            if self.skipped:
                return torch.tensor(torch.inf)
        norm = global_norm(self.entries, self.buckets)
        self.steps += 1
        # The fused kernel divides gradients by grad_scale, so that clipping needs no pass of its
        # own.
        clips = self.clip_grad > 0 and norm > self.clip_grad
        scale = ((norm + 1e-6) / self.clip_grad).to(self.device) if clips else None
        by_name = {entry.name: entry for entry in self.entries}
        for group in self.param_groups:
            entries = [by_name[name] for name in group["names"]]
            entries = [entry for entry in entries if entry.parameter.grad is not None]
            if entries:
                self._update(entries, group, scale)
        if self.sharded:
            self.buckets.gather()
        return norm

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero every gradient in place; or, with set_to_none, which is torch's default, free it."""
        for entry in self.entries:
            if set_to_none:
                entry.parameter.grad = None
            elif entry.parameter.grad is not None:
                entry.parameter.grad.zero_()
        self.buckets.forget()

    def __reduce_ex__(self, protocol):
        raise UserError(
            "AdamW can't be copied or pickled: it belongs to its model; state_dict() gives its state"
        )

    def _no_hooks(self, *_, **__) -> None:
        """Refuse torch's hooks, which nothing here would call."""
        raise UserError("AdamW calls no hooks: do what is to be done before or after its step()")

    register_step_pre_hook = register_step_post_hook = _no_hooks
    register_state_dict_pre_hook = register_state_dict_post_hook = _no_hooks
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _no_hooks

    def add_param_group(self, param_group: dict) -> None:
        """Refuse: a model's parameters are all there."""
        raise UserError("AdamW has all of a model's parameters from the start: none can be added")

    def state_dict(self) -> dict:
        """Return this rank's state and settings, for a checkpoint of your own that is loaded in the
        same layout.

        {"state": {name: {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": names}], "steps":
        ...}; tensors are not copied, as in torch. `megazoo.checkpoint.save` writes what loads in
        any layout.
        """
        groups = [{**group, "params": group["names"]} for group in self.param_groups]
        state = {"state": self.state, "param_groups": groups, "steps": int(self.steps.item())}
        return {**state, "loss_scale": self.loss_scale.state()} if self.loss_scale else state

    def load_state_dict(self, state_dict: dict) -> None:
        """Take what `state_dict` gave, of an optimizer of the same model and layout; UserError if
        it is of another."""
        if not {"state", "param_groups", "steps"} <= state_dict.keys():
            raise UserError("it is no state of AdamW: give what state_dict() returned")
        state = state_dict["state"]
        of = {
            name: {key: tensor.shape for key, tensor in tensors.items()}
            for name, tensors in state.items()
        }
        ours = {
            name: {key: tensor.shape for key, tensor in tensors.items()}
            for name, tensors in self.state.items()
        }
        if of != ours:
            name = min(
                (of.keys() ^ ours.keys()) or (name for name in ours if of[name] != ours[name])
            )
            what = f"the optimizer's state is of another model or layout: {name} differs"
            raise UserError(f"{what}; a checkpoint of megazoo.checkpoint.save loads in any layout")
        for name, tensors in state.items():
            for key, tensor in tensors.items():
                self.state[name][key].copy_(tensor)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(
                {key: value for key, value in saved.items() if key not in ("params", "names")}
            )
        self.steps.fill_(state_dict["steps"])
        if self.loss_scale and "loss_scale" in state_dict:
            self.loss_scale.load(state_dict["loss_scale"])

    def range_of(self, entry: Entry, dp_rank: int) -> tuple[int, int]:
        """Return the elements of a parameter, flattened, first and last + 1, of which a replica has
        the state."""
        return element_range(entry, self.buckets, dp_rank)

    def whole_states(self, entry: Entry, writer: int) -> dict[str, torch.Tensor]:
        """Return a parameter's state in its shape, on the replica `writer`; under ZeRO-1 the others
        must call it, too.

        A frozen parameter has none: the dictionary is then empty.
        """
        states = {}
        for name, tensor in self.state.get(entry.name, {}).items():
            if name == MASTER and entry.parameter.dtype == torch.float32:
                continue  # the parameter itself, on the CPU
            if self.sharded:
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

    def _overflowed(self) -> bool:
        """Whether a gradient on any rank is infinite or not a number."""
        total = torch.zeros((), device=self.ctx.device)
        for entry in self.entries:
            if entry.parameter.grad is not None:
                total += entry.parameter.grad.sum()
        overflow = (~torch.isfinite(total)).float()
        all_reduce_over(overflow, self.ctx.axes)
        return bool(overflow)

    def _update(self, entries: list[Entry], group: dict, grad_scale: torch.Tensor | None) -> None:
        mine = [self._mine(e.parameter, e) for e in entries]
        fused_adamw(
            [self.state[e.name].get(MASTER, part) for e, part in zip(entries, mine, strict=True)],
            [self._mine(e.parameter.grad, e).to(self.device, torch.float32) for e in entries],
            *([self.state[e.name][moment] for e in entries] for moment in MOMENTS),
            [self.steps] * len(entries),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=grad_scale,
        )
        for e, part in zip(entries, mine, strict=True):
            if MASTER in self.state[e.name]:
                part.copy_(self.state[e.name][MASTER])
