"""The global batch size of each step, which may rise at the start of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from megazoo.errors import UserError


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of the global batches, which depend only on the samples consumed before.

    Attributes:
        final: Size after the ramp, in samples.
        ramp: The first size, the increment, and the samples over which the size rises in equal
            parts, as in Megatron-LM; (): no ramp.
    """

    final: int
    ramp: tuple[int, ...] = ()

    def at(self, consumed: int) -> int:
        """Return the size of the batch that follows the first `consumed` samples."""
        if not self.ramp:
            return self.final
        first, increment, samples = self.ramp
        increments = (self.final - first) // increment
        return first + increment * min(increments, consumed * increments // samples)

    def starts(self, consumed: int) -> Iterator[int]:
        """Yield the number of samples before each batch, endlessly, from `consumed` on."""
        while True:
            yield consumed
            consumed += self.at(consumed)

    def first(self, consumed: int, steps: int) -> list[int]:
        """Return the number of samples before each of the next steps."""
        return list(islice(self.starts(consumed), max(0, steps)))

    def steps_to(self, consumed: int, end: int) -> int:
        """Return the number of steps from `consumed` samples until at least `end`."""
        if not self.ramp:
            return -((consumed - end) // self.final)
        return next(number for number, start in enumerate(self.starts(consumed)) if start >= end)

    def check(self, together: int) -> None:
        """Raise UserError for an invalid ramp. together: samples that all replicas compute in one
        micro-batch each."""
        if not self.ramp:
            return
        words = "--rampup-batch-size " + " ".join(map(str, self.ramp))
        if len(self.ramp) != 3 or min(self.ramp) < 1:
            raise UserError(f"{words} must be three numbers of at least 1: START INCREMENT SAMPLES")
        first, increment, _ = self.ramp
        if first > self.final or (self.final - first) % increment:
            raise UserError(
                f"{words} does not reach --global-batch-size {self.final}: use a START below it, "
                "and an INCREMENT that divides the difference"
            )
        if first % together or (first < self.final and increment % together):
            raise UserError(
                f"{words}: START and INCREMENT must be multiples of micro-batch-size x dp = "
                f"{together}"
            )
