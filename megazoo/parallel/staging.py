"""Pinned memory, which a GPU reads and writes by itself, between the tensors of a GPU and what this
process makes, reads or writes."""

from collections.abc import Iterator

import torch

BUFFER_BYTES = 8 << 20  # of each of the two buffers through which tensors are filled


def pinned(nbytes: int) -> torch.Tensor:
    """Allocate uint8 [nbytes] in pinned memory; it needs a CUDA device.

    torch rounds the size up to a power of two, and keeps what is dropped for the next who asks.
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Upload:
    """Fills tensors with values that this process computes or reads.

    Tensors on the CPU are filled in place. For tensors on a GPU there are two pinned buffers: one
    is filled while the device copies the other, and a copy is waited for only when its buffer is
    needed again. Work that is queued on the device later sees the values.
    """

    def __init__(self):
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._copies: list[torch.cuda.Event | None] = [None, None]  # that read the buffers
        self._turn = 0

    def rows(
        self, destination: torch.Tensor, unit: int = 1, first: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start, rows) until all of `destination`, [n, ...], was given out: memory for its
        rows from `start` on, of its dtype, which is to be full when the next is asked for.

        unit: `destination` is cut only where first + start is a multiple of it. A buffer takes
        BUFFER_BYTES, or one such unit if that is larger.
        """
        if not destination.is_cuda:
            yield 0, destination
            return
        count = len(destination)
        row = destination.nbytes // max(1, count)
        step = max(1, BUFFER_BYTES // max(1, row) // unit) * unit
        start = 0
        while start < count:
            stop = min(count, (first + start) // step * step + step - first)
            part = destination[start:stop]
            buffer = self._free_buffer(min(step, count) * row)
            rows = buffer[: part.nbytes].view(part.dtype).view(part.shape)
            yield start, rows
            self._copies[self._turn] = start_copy(part, rows)
            self._turn = 1 - self._turn
            start = stop

    def _free_buffer(self, nbytes: int) -> torch.Tensor:
        """Return the buffer whose turn it is, of at least so many bytes, when its last copy is
        done."""
        copy, buffer = self._copies[self._turn], self._buffers[self._turn]
        if copy is not None:
            copy.synchronize()
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[self._turn] = pinned(max(nbytes, BUFFER_BYTES))
        return buffer


def start_copy(destination: torch.Tensor, values: torch.Tensor) -> torch.cuda.Event:
    """Queue a copy from pinned memory to a GPU; return the event that marks its completion."""
    destination.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(destination.device))
    return event
