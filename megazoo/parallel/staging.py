"""Copy between GPU tensors and this process's data through pinned memory, which a GPU accesses
directly."""

from collections.abc import Iterator

import torch

BUFFER_BYTES = 8 << 20  # size of each of the two buffers


def pinned(nbytes: int) -> torch.Tensor:
    """Allocate uint8 [nbytes] in pinned memory. It needs a CUDA device.

    torch rounds the size up to a power of two, and reuses freed buffers.
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Upload:
    """Fill tensors with values that this process computes or reads.

    Tensors on the CPU are filled in place. For tensors on a GPU there are two pinned buffers: one
    is filled while the device copies the other. Each copy is waited for only when its buffer is
    needed again. Work that is queued on the device later sees the values.
    """

    def __init__(self):
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._copies: list[torch.cuda.Event | None] = [None, None]  # the last copy from each buffer
        self._turn = 0

    def rows(
        self, destination: torch.Tensor, unit: int = 1, first: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start, rows) for all of `destination`, [n, ...]. `rows` is memory for its rows
        from `start` on, in its dtype. The caller must fill it before the next iteration.

        unit: `destination` is split only where first + start is a multiple of it. A buffer has
        BUFFER_BYTES, or the size of one unit if that is larger.
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
        """Return the next buffer, of at least `nbytes` bytes, after its last copy is complete."""
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
