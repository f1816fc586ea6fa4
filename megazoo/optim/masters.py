"""The fp32 master weights of an optimizer, kept equal to the parameters that are rounded from
them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megazoo.errors import UserError, advise
from megazoo.optim.base import MASTER
from megazoo.parallel.module import NamedParameter

PIECE_ELEMENTS = 1 << 22  # 16 MB of fp32: size of a chunk to compare or read


class MasterWeights:
    """Updates master weights whose parameters were written by anything except a step.

    A step updates a master weight and rounds it to its parameter. Any other write (a load, an
    in-place copy) changes the version of the parameter, which torch counts. Then each master
    element that does not round to its parameter's value is set to that value. A write through
    `parameter.data` does not change the version, so it is not detected.

    Masters start from the sources of the weights (megazoo/checkpoint/source.py), if these have
    higher precision than the parameter: from `model.read_from` when the optimizer is created, and
    from what a loader reads later. They take the values in chunks, where these round to the
    parameter's.
    """

    def __init__(self):
        self._versions: dict[str, int] = {}

    def note(self, entries: list[NamedParameter]) -> None:
        """Note that the masters of these parameters are up to date."""
        self._versions = versions_of(entries)

    @torch.no_grad()
    def refresh(self, optimizer: Any, sources: Sequence[Any] = ()) -> None:
        """Update this replica's masters of the parameters that were written since `note`. sources:
        those that were just read."""
        written = [
            entry
            for entry in optimizer.entries
            if MASTER in optimizer.state[entry.name]
            and self._versions.get(entry.name) != entry.parameter._version
        ]
        for entry in written:
            for master, weights, _ in _pieces(optimizer, entry):
                master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights))
        for source in sources if written else ():
            try:
                _take_from(source, optimizer, written)
            except UserError as error:
                advise(
                    f"the fp32 master weights start from the {optimizer.model.dtype} weights: "
                    f"{error}"
                )
            finally:
                source.close()
        self.note(optimizer.entries)


def versions_of(entries: list[NamedParameter]) -> dict[str, int]:
    """Return the number of writes to each parameter, as {name: number}."""
    return {entry.name: entry.parameter._version for entry in entries}


def _take_from(source, optimizer, entries: list[NamedParameter]) -> None:
    """Copy values from a source with higher precision than the parameters to the masters."""
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
    """Yield this replica's master of a parameter in chunks: the elements of the master, those of
    the parameter on the same device, and their range (first, last + 1) in the parameter."""
    master = optimizer.state[entry.name][MASTER]
    first, last = optimizer.ranges[entry.name]
    weights = optimizer.values_of(entry)
    for start in range(first, last, PIECE_ELEMENTS):
        stop = min(start + PIECE_ELEMENTS, last)
        there = weights[start - first : stop - first].to(master.device)
        yield master[start - first : stop - first], there, (start, stop)


def _is_more_precise(source, entry: NamedParameter) -> bool:
    """Return whether a source has a parameter in higher precision than the model."""
    spec = source.specs.get(entry.name)
    if spec is None or spec.shape != entry.spec.shape:
        return False
    stored, ours = source.dtype_of(source.most_precise(entry.name)), entry.parameter.dtype
    return torch.promote_types(stored, ours) != ours
