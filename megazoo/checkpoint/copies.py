"""Copies in memory of what a step is to hold, for a thread to write while training goes on."""

import torch

from megazoo.checkpoint.writing import LazyTensor
from megazoo.parallel.staging import pinned

BLOCK_BYTES = 64 << 20  # a power of two: of other sizes torch pins the next power
ALIGNMENT = 64  # bytes: where a copy may begin, whatever its dtype


class Copies:
    """Copies tensors to this process's memory.

    Those of a GPU go into blocks of pinned memory, one behind the other and from the end of a block
    into the next, so that all copies are queued at once and waited for once. The blocks stay, and
    are used again after `forget`. Tensors of the CPU are copied into new memory.
    """

    def __init__(self):
        self._blocks: list[torch.Tensor] = []
        self._used = 0  # bytes of all blocks together
        self._device: torch.device | None = None  # whose copies are not waited for yet

    def forget(self) -> None:
        """Give the memory of all copies to those that follow."""
        self._used = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor | LazyTensor:
        """Copy a tensor; what is returned may be read after `wait`."""
        tensor = tensor.detach()
        if not tensor.is_cuda:
            return tensor.to("cpu", copy=True)
        self._device = tensor.device
        flat, parts, start = tensor.reshape(-1), [], 0
        while start < len(flat):
            space = self._rest_of_block().view(flat.dtype)
            part = space[: len(flat) - start]
            part.copy_(flat[start : start + len(part)], non_blocking=True)
            parts.append((start, part))
            start += len(part)
            self._used += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return _in_parts(tensor.shape, tensor.dtype, parts)

    def wait(self) -> None:
        """Wait until all copies are made."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
            self._device = None

    def _rest_of_block(self) -> torch.Tensor:
        """Return what is free of the block that is being filled, uint8."""
        block, begin = divmod(self._used, BLOCK_BYTES)
        if block == len(self._blocks):
            self._blocks.append(pinned(BLOCK_BYTES))
        return self._blocks[block][begin:]


def _in_parts(
    shape: torch.Size, dtype: torch.dtype, parts: list[tuple[int, torch.Tensor]]
) -> LazyTensor:
    """Return a tensor of which `parts` holds the elements, each with the number of its first."""

    def fill(rows: torch.Tensor, start: int) -> None:
        values = rows.view(-1)
        first = start * (len(values) // max(1, len(rows)))
        for begin, part in parts:
            low, high = max(first, begin), min(first + len(values), begin + len(part))
            if low < high:
                values[low - first : high - first] = part[low - begin : high - begin]

    return LazyTensor(tuple(shape), dtype, fill)
