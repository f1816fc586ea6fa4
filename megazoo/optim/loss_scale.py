"""The loss scale of float16: the loss is multiplied before backward, because gradients below 6e-8
would become 0."""

from dataclasses import dataclass

from megazoo.errors import check_number

STATE = ("value", "good_steps", "patience")


@dataclass
class LossScale:
    """A dynamic loss scale, as in Megatron-LM: it grows after many good steps and shrinks after
    repeated overflows.

    Args:
        value: factor of the loss, a power of two, at least 1.
        growth_interval: number of consecutive good steps after which the value is doubled.
        hysteresis: number of overflows since the last growth after which the value is halved; each
            further overflow halves it again. With 2, one overflow is tolerated.
        good_steps: number of good steps since the last overflow or growth; saved in checkpoints.
        patience: number of overflows until the value is halved; saved in checkpoints. 0:
            hysteresis.

    Raises:
        UserError: A value is out of its range.
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
        """Count a step and adapt the value. overflow: whether its gradients overflowed."""
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
        """Return the values for a checkpoint: value, good_steps and patience."""
        return {name: getattr(self, name) for name in STATE}

    def load(self, state: dict) -> None:
        """Set the values from the state of a checkpoint."""
        for name in STATE:
            setattr(self, name, state[name])
