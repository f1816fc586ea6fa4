"""The loss scale of float16: gradients below 6e-8 would become 0, so the loss is multiplied before
backward."""

from dataclasses import dataclass

from megazoo.errors import check_number

STATE = ("value", "good_steps", "patience")


@dataclass
class LossScale:
    """A dynamic loss scale, as in Megatron-LM: it grows after many good steps, and backs off when
    overflows repeat.

    value: what the loss is multiplied by, a power of two, at least 1. growth_interval: good steps
    in a row after which it doubles. hysteresis: which overflow halves it, counted since it last
    grew; so does each further one. With 2, one overflow is tolerated. good_steps and patience
    (overflows until it is halved) are counters, and saved with a checkpoint.
    """

    value: float = 2.0**16
    growth_interval: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    patience: int = 0

    def __post_init__(self):
        check_number("the loss scale's value", self.value, 1)
        for name, least in (("growth_interval", 1), ("hysteresis", 1), ("good_steps", 0)):
            check_number(f"the loss scale's {name}", getattr(self, name), least, whole=True)
        self.patience = self.patience or self.hysteresis

    def update(self, overflow: bool) -> None:
        """Count a step, whose gradients overflowed or not, and adapt the scale."""
        if overflow:
            self.good_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.value = max(1.0, self.value / 2)
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.good_steps, self.patience = 0, self.hysteresis
            self.value *= 2

    def state(self) -> dict:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in STATE}

    def load(self, state: dict) -> None:
        """Go on from a checkpoint's state."""
        for name in STATE:
            setattr(self, name, state[name])
