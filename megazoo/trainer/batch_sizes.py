"""The global batch size of each step, which may rise at the start of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from megazoo.errors import UserError


class Starts(Sequence[int]):
    """The number of samples before each of `steps` batches: those of `rising`, then from `start` on
    in equal distances."""

    def __init__(self, rising: list[int], start: int, distance: int, steps: int):
        self.rising, self.steps = rising[:steps], steps
        rest = steps - len(self.rising)
        self.rest = range(start, start + rest * distance, distance)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self.steps))]
        if not -self.steps <= index < self.steps:
            raise IndexError(index)
        index, of_ramp = index % self.steps, len(self.rising)
        return self.rising[index] if index < of_ramp else self.rest[index - of_ramp]


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

    def first(self, consumed: int, steps: int) -> Sequence[int]:
        """Return the number of samples before each of the next steps."""
        rising = self._rising(consumed)
        return Starts(rising[:-1], rising[-1], self.final, max(0, steps))

    def steps_to(self, consumed: int, end: int) -> int:
        """Return the number of steps from `consumed` samples until at least `end`."""
        *rising, start = self._rising(consumed)
        of_ramp = sum(each < end for each in rising)
        return of_ramp if rising and start >= end else of_ramp - (start - end) // self.final

    def _rising(self, consumed: int) -> list[int]:
        """Return the number of samples before each batch of the ramp, and at its end."""
        found = [consumed]
        while self.at(found[-1]) < self.final:
            found.append(found[-1] + self.at(found[-1]))
        return found

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
                "and an INCREMENT that divides the difference, or no numbers for no ramp"
            )
        if first % together or (first < self.final and increment % together):
            raise UserError(
                f"{words}: START and INCREMENT must be multiples of micro-batch-size x dp = "
                f"{together}"
            )
