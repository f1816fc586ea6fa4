"""Learning-rate schedules. Nothing here imports torch, which --help does not need.

A file of --import registers a further schedule:

    @register_lr_schedule("inverse-sqrt")
    @dataclass(frozen=True, kw_only=True)
    class InverseSquareRoot(LRSchedule):
        def after_warmup(self, step: int) -> float:
            return self.lr * math.sqrt(max(1, self.warmup_steps) / step)
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Literal, TypeVar

from megazoo.errors import UserError
from megazoo.settings import about

LR_SCHEDULES: dict[str, type["LRSchedule"]] = {}
Class = TypeVar("Class", bound=type["LRSchedule"])


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """A learning rate that rises linearly to its peak, and then follows `after_warmup`.

    It depends only on the step, so a resumed run continues it. Each field that a subclass adds is a
    flag of the training program. It needs a default, and the docstring under it is its help.

    Attributes:
        lr: Learning rate after the warm-up.
        min_lr: Final learning rate.
        warmup_steps: Number of steps of the warm-up.
        steps: Step at which the decay ends.
    """

    lr: float
    min_lr: float
    warmup_steps: int
    steps: int

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 1."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        return self.after_warmup(step)

    def after_warmup(self, step: int) -> float:
        """Return the learning rate of a step after the warm-up."""
        raise NotImplementedError

    def is_over(self, step: int) -> bool:
        """Return whether all steps after this one have the learning rate min_lr."""
        return False


@dataclass(frozen=True, kw_only=True)
class Decay(LRSchedule):
    """A schedule that ends at min_lr."""

    def is_over(self, step: int) -> bool:
        return step >= self.steps > 0

    def decayed(self, step: int, start: float, shape: Callable[[float], float]) -> float:
        """Return the rate of a decay from lr at step `start` to min_lr at step `steps`.

        shape: The share of the decay that is left, from 1 to 0, by its progress from 0 to 1.
        """
        length = self.steps - start
        done = min(1.0, max(0.0, (step - start) / length)) if length > 0 else step >= self.steps
        return self.min_lr + (self.lr - self.min_lr) * shape(float(done))


def register_lr_schedule(name: str) -> Callable[[Class], Class]:
    """Return a class decorator that registers a learning-rate schedule.

    Args:
        name: Its name in --lr-schedule.

    Raises:
        UserError: An option of the schedule has no default.
    """

    def register(schedule: Class) -> Class:
        for option in own_options(schedule):
            if schedule.__dataclass_fields__[option].default is MISSING:
                raise UserError(f"the option {option} of lr-schedule {name} needs a default")
        LR_SCHEDULES[name] = schedule
        return schedule

    return register


def lr_schedule(name: str, **values: float | str) -> LRSchedule:
    """Return a learning-rate schedule.

    Args:
        name: A registered name, such as cosine.
        values: Fields of its class: lr, min_lr, warmup_steps, steps and its own options.

    Raises:
        UserError: The name is unknown.
    """
    if name not in LR_SCHEDULES:
        raise UserError(f"unknown lr-schedule {name!r}: use {', '.join(LR_SCHEDULES)}")
    return LR_SCHEDULES[name](**values)  # pyrefly: ignore


def own_options(schedule: type[LRSchedule]) -> list[str]:
    """Return the names of the options that only this schedule has."""
    return [f.name for f in fields(schedule) if f.name not in LRSchedule.__dataclass_fields__]


def linear(done: float) -> float:
    return 1 - done


def cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def sqrt(done: float) -> float:
    return 1 - math.sqrt(done)


@register_lr_schedule("cosine")
@dataclass(frozen=True, kw_only=True)
class Cosine(Decay):
    """A cosine decay after the warm-up."""

    def after_warmup(self, step: int) -> float:
        return self.decayed(step, self.warmup_steps, cosine)


@register_lr_schedule("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(Decay):
    """A linear decay after the warm-up."""

    def after_warmup(self, step: int) -> float:
        return self.decayed(step, self.warmup_steps, linear)


@register_lr_schedule("constant")
@dataclass(frozen=True, kw_only=True)
class Constant(LRSchedule):
    """No decay."""

    def after_warmup(self, step: int) -> float:
        return self.lr


@register_lr_schedule("wsd")
@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Decay):
    """Warmup-stable-decay: constant, then a decay over the last steps."""

    lr_decay_share: Annotated[
        float,
        about(most=1, megatron="lr-wsd-decay-iters (a share of the steps, not a number)"),
    ] = 0.2
    """Share of --lr-decay-steps over which the learning rate decays."""
    lr_decay_shape: Annotated[
        Literal["linear", "cosine", "sqrt"], about(megatron="lr-wsd-decay-style")
    ] = "linear"
    """Shape of the decay. sqrt: the decayed part grows with the square root of the steps."""

    def after_warmup(self, step: int) -> float:
        start = max(self.warmup_steps, self.steps * (1 - self.lr_decay_share))
        return self.decayed(step, start, SHAPES[self.lr_decay_shape])


SHAPES = {"linear": linear, "cosine": cosine, "sqrt": sqrt}
