"""The fp32 weights of an optimizer's state, kept equal to the parameters that are rounded from
them."""

from collections.abc import Iterator
from typing import Any

import torch

from megazoo.errors import UserError, advise
from megazoo.optim.base import MASTER
from megazoo.parallel.module import NamedParameter

PIECE_ELEMENTS = 1 << 22  # 16 MB of fp32: what is compared or read at once


class MasterWeights:
    """Updates master weights whose parameters were written by something other than a step.

    A step updates a master weight and rounds it into its parameter. Any other write (a load, a copy
    in place) changes the parameter's version, which torch counts. Then each master that does not
    round to its parameter's value takes that value; the others keep what they have. A write through
    `parameter.data` does not change the version: it is not seen.

    `model.read_from` are the sources (megazoo/checkpoint/source.py) of the weights, until the first
    step. Where they hold more precision than the parameter, masters take their values, a piece at a
    time, if these round to the parameter's.
    """

    def __init__(self):
        self._versions: dict[str, int] = {}

    def note(self, entries: list[NamedParameter]) -> None:
        """Note that the masters of these parameters are up to date."""
        self._versions = versions_of(entries)

    @torch.no_grad()
    def refresh(self, optimizer: Any) -> None:
        """Update this replica's masters of the parameters that were written since `note`."""
        written = [
            entry
            for entry in optimizer.entries
            if MASTER in optimizer.state[entry.name]
            and self._versions.get(entry.name) != entry.parameter._version
        ]
        for entry in written:
            for master, weights, _ in _pieces(optimizer, entry):
                master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights))
        for source in optimizer.model.read_from if written else ():
            try:
                _take_from(source, optimizer, written)
            except UserError as error:
                advise(f"fp32 weights start from those of {optimizer.model.dtype}: {error}")
            finally:
                source.close()
        self.note(optimizer.entries)


def versions_of(entries: list[NamedParameter]) -> dict[str, int]:
    """Return how often each parameter was written, by its name."""
    return {entry.name: entry.parameter._version for entry in entries}


def _take_from(source, optimizer, entries: list[NamedParameter]) -> None:
    """Give masters the values of a source that holds more precision than the parameters."""
    for entry in entries:
        if not _is_more_precise(source, entry):
            continue
        name = source.most_precise(entry.name)
        for master, weights, place in _pieces(optimizer, entry):
            values = torch.empty_like(master)
            source.read_range(name, values, place, entry, optimizer.ctx)
            master.copy_(torch.where(values.to(weights.dtype) == weights, values, master))


def _pieces(
    optimizer, entry: NamedParameter
) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]]:
    """Yield this replica's master of a parameter a piece at a time: the master's elements, the
    parameter's on the same device, and which of the parameter's they are, first and last + 1."""
    master = optimizer.state[entry.name][MASTER]
    first, last = optimizer.ranges[entry.name]
    weights = entry.parameter.detach().view(-1)
    for start in range(first, last, PIECE_ELEMENTS):
        stop = min(start + PIECE_ELEMENTS, last)
        there = weights[start:stop].to(master.device)
        yield master[start - first : stop - first], there, (start, stop)


def _is_more_precise(source, entry: NamedParameter) -> bool:
    """Return whether a source holds a parameter's values in more precision than the parameter."""
    spec = source.specs.get(entry.name)
    if spec is None or spec.shape != entry.spec.shape:
        return False
    stored, ours = source.dtype_of(source.most_precise(entry.name)), entry.parameter.dtype
    return torch.promote_types(stored, ours) != ours
