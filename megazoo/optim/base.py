"""The base class of optimizers of a whole model: the parts of the torch.optim interface that it
supports."""

from typing import Any

import torch

from megazoo.errors import UserError
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.module import NamedParameter
from megazoo.torch_internals import zero_each

# Names of the states of a parameter in checkpoints: the moments of AdamW, the momentum of Muon, the
# fp32 master weights, and the moving average of the weights.
MOMENTS, MOMENTUM, MASTER, AVERAGE = ("exp_avg", "exp_avg_sq"), "momentum", "master", "ema"
STATES = (*MOMENTS, MOMENTUM, MASTER, AVERAGE)


class ModelOptimizer(torch.optim.Optimizer):
    """An optimizer of this rank's part of a model, which learning-rate schedulers of torch accept.

    A subclass sets: entries, the parameters that it trains; buckets, of their gradients;
    param_groups, each with "names" in addition to "params"; state, by parameter name; steps, the
    number of steps; loss_scale, for a float16 model; masters, which keeps the fp32 master weights
    equal to parameters of lower precision. The constructor of torch is not called: it would import
    torch._dynamo (70 MB).
    """

    entries: list[NamedParameter]
    buckets: GradientBuckets
    state: dict[str, dict[str, torch.Tensor]]
    steps: torch.Tensor
    loss_scale: LossScale | None
    masters: Any  # MasterWeights
    model: Any
    ema: float

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero every gradient in place, or, with set_to_none (the default in torch), free it."""
        parameters = [entry.parameter for entry in self.entries]
        if set_to_none:
            for parameter in parameters:
                parameter.grad = None
        else:
            zero_each([p.grad for p in parameters if p.grad is not None])
        self.buckets.forget()

    def state_dict(self) -> dict:
        """Return this rank's state and settings, for a custom checkpoint that is loaded in the same
        layout.

        {"state": {name: {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": names}], "steps":
        ...}; tensors are not copied, as in torch. `megazoo.checkpoint.save` writes checkpoints that
        load in any layout.
        """
        self.masters.refresh(self)
        groups = [{**group, "params": group["names"]} for group in self.param_groups]
        state = {"state": self.state, "param_groups": groups, "steps": int(self.steps.item())}
        return {**state, "loss_scale": self.loss_scale.state()} if self.loss_scale else state

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state from `state_dict`.

        Args:
            state_dict: the state of an optimizer of the same model and layout.

        Raises:
            UserError: The state is of another model or layout.
        """
        if not {"state", "param_groups", "steps"} <= state_dict.keys():
            kind = type(self).__name__
            raise UserError(f"this is not a state of {kind}: pass the result of its state_dict()")
        state = state_dict["state"]
        given, own = _shapes(state), _shapes(self.state)
        if given != own:
            different = (name for name in own if given[name] != own[name])
            name = min((given.keys() ^ own.keys()) or different)
            raise UserError(
                f"the optimizer's state is of another model or layout: {name} differs; "
                "a checkpoint of megazoo.checkpoint.save loads in any layout"
            )
        for name, tensors in state.items():
            for key, tensor in tensors.items():
                self.state[name][key].copy_(tensor)
        self.model.read_from = ()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            settings = {key: saved[key] for key in saved if key not in ("params", "names")}
            group.update(settings)
        self.steps.fill_(state_dict["steps"])
        if self.loss_scale and "loss_scale" in state_dict:
            self.loss_scale.load(state_dict["loss_scale"])

    @torch.no_grad()
    def start_average(self, entries: list[NamedParameter]) -> None:
        """Start the moving average of these parameters from their weights."""
        for entry in entries:
            self.state[entry.name][AVERAGE].copy_(self._weights(entry))

    def _average(self) -> None:
        """Update the average of every weight: ema * average + (1 - ema) * weight."""
        if self.ema and self.entries:
            averages = [self.state[entry.name][AVERAGE] for entry in self.entries]
            weights = [self._weights(entry).float() for entry in self.entries]
            torch._foreach_lerp_(averages, weights, 1 - self.ema)

    def _weights(self, entry: NamedParameter) -> torch.Tensor:
        """Return the elements of a parameter that this rank updates, on the device of the state."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict) -> None:
        """Raise UserError: all parameters of the model are already in the optimizer."""
        raise UserError(
            f"{type(self).__name__} has all parameters of its model: a group can't be added"
        )

    def __reduce_ex__(self, protocol):
        raise UserError(
            f"{type(self).__name__} can't be copied or pickled, because it belongs to its model: "
            "use state_dict()"
        )

    def _refuse_hook(self, *_, **__) -> None:
        """Raise UserError for hooks of torch, which would never be called."""
        raise UserError(
            f"{type(self).__name__} does not support optimizer hooks: run your code before or "
            "after its step()"
        )

    register_step_pre_hook = register_step_post_hook = _refuse_hook
    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook


def _shapes(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Size]]:
    return {
        name: {key: tensor.shape for key, tensor in tensors.items()}
        for name, tensors in state.items()
    }
