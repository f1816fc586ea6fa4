"""The update of weights on a device with a state in CPU memory, in pieces."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megazoo.parallel.device import share_cores
from megazoo.torch_internals import copy_each

PIECE_ELEMENTS = 1 << 24  # 64 MB of fp32: large enough to hide the start of a copy
ALIGNMENT = 64  # elements: pieces start at vector boundaries of the kernels


class Row(NamedTuple):
    """This replica's part of a parameter, tensors of the same length [n]: weights and gradient on
    the device, and states on the CPU, the first of which are the fp32 weights."""

    weights: torch.Tensor
    gradient: torch.Tensor
    states: Sequence[torch.Tensor]

    def part(self, first: int, last: int) -> "Row":
        """Return its elements from first to last - 1."""
        states = [state[first:last] for state in self.states]
        return Row(self.weights[first:last], self.gradient[first:last], states)


class Staging:
    """Reusable pinned memory for gradients on their way to the CPU and weights on their way back.

    While the CPU updates a piece, the gradients of the next one arrive and the weights of the
    previous one are sent. All copies are in the current stream of the device, which is otherwise
    idle during a step. The host waits once per piece, for its gradients. Memory: 2 pieces of
    gradients and 2 of weights on the CPU, and one of each on the device during the copy.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, elements: int = PIECE_ELEMENTS):
        self.device, self.elements = device, elements
        pinned = device.type == "cuda"
        self.gradients, self.weights = (
            [torch.empty(elements, dtype=each, pin_memory=pinned) for _ in range(2)]
            for each in (torch.float32, dtype)
        )

    def update(
        self,
        rows: list[Row],
        scale: torch.Tensor | None,
        update: Callable[[list[torch.Tensor], list[Sequence[torch.Tensor]]], None],
    ) -> None:
        """Update the states of the rows on the CPU with their gradients, and send the weights to
        the device.

        scale: divisor of the gradients, on the device. update(gradients, states): changes the
        states of some rows in place; both lists have the same length.
        """
        pieces = cut(rows, self.elements)
        if not pieces:  # this replica has no elements
            return
        with all_cores():
            wait = self._fetch(pieces[0], scale, 0)
            for number, piece in enumerate(pieces):
                arrived, slot = wait, number % 2
                if number + 1 < len(pieces):
                    wait = self._fetch(pieces[number + 1], scale, 1 - slot)
                arrived()
                states = [row.states for row in piece]
                update(places(self.gradients[slot], piece), states)
                self._send(piece, slot)

    def _fetch(self, piece: list[Row], scale: torch.Tensor | None, slot: int) -> Callable[[], None]:
        """Start copying the gradients of a piece to the CPU; return a function that waits for
        them."""
        size = sum(map(room_of, piece))
        flat = torch.empty(size, dtype=torch.float32, device=self.device)
        copy_each(places(flat, piece), [row.gradient for row in piece])
        if scale is not None:
            flat /= scale
        self.gradients[slot][:size].copy_(flat, non_blocking=True)
        if self.device.type != "cuda":
            return lambda: None
        copied = torch.cuda.Event(blocking=True)
        copied.record()
        return copied.synchronize

    def _send(self, piece: list[Row], slot: int) -> None:
        """Start copying the weights of a piece to the device.

        The previous weights in this slot have already been copied: their copy was queued before
        this piece's gradients, which have arrived.
        """
        size, pinned = sum(map(room_of, piece)), self.weights[slot]
        copy_each(places(pinned, piece), [row.states[0] for row in piece])
        flat = torch.empty(size, dtype=pinned.dtype, device=self.device)
        flat.copy_(pinned[:size], non_blocking=True)
        copy_each([row.weights for row in piece], places(flat, piece))


def cut(rows: list[Row], limit: int) -> list[list[Row]]:
    """Split rows into pieces that need at most `limit` elements of a flat tensor, in order.

    limit: a multiple of ALIGNMENT, at which every row starts. A row may be split over several
    pieces.
    """
    pieces: list[list[Row]] = [[]]
    room = limit
    for row in rows:
        first, count = 0, row.weights.numel()
        while first < count:
            if not room:
                pieces.append([])
                room = limit
            last = min(count, first + room)
            pieces[-1].append(row.part(first, last))
            room -= room_of(pieces[-1][-1])
            first = last
    return [piece for piece in pieces if piece]


@contextmanager
def all_cores() -> Iterator[None]:
    """Within this block, use this rank's share of the machine's cores: torchrun sets one thread per
    rank, which assumes that the device does all work."""
    before = torch.get_num_threads()
    share_cores()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def room_of(row: Row) -> int:
    """Return the number of elements that a row needs in a flat tensor, so that the next one is
    aligned."""
    return -(-row.weights.numel() // ALIGNMENT) * ALIGNMENT


def places(flat: torch.Tensor, piece: list[Row]) -> list[torch.Tensor]:
    """Return views of the rows of a piece in a flat tensor, one after the other."""
    parts = flat[: sum(map(room_of, piece))].split([room_of(row) for row in piece])
    return [part[: row.weights.numel()] for part, row in zip(parts, piece, strict=True)]
