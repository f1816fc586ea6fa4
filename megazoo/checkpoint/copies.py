"""Copies tensors of a checkpoint in memory, so that a thread can write them during training."""

import torch

from megazoo.checkpoint.writing import LazyTensor
from megazoo.parallel.staging import pinned

BLOCK_BYTES = 64 << 20  # a power of two: torch would round up other sizes
ALIGNMENT = 64  # bytes: alignment of the start of a copy, for any dtype


class Copies:
    """Copies tensors to this process's memory.

    Tensors of a GPU are copied into blocks of pinned memory, one after the other; a tensor may
    continue in the next block. So all copies are queued together, and there is one wait. The blocks
    are reused after `forget`. Tensors of the CPU are copied into new memory.
    """

    def __init__(self):
        self._blocks: list[torch.Tensor] = []
        self._used = 0  # bytes of all blocks together
        self._device: torch.device | None = None  # a device with pending copies

    def forget(self) -> None:
        """Free all copies, so that later ones can reuse their memory."""
        self._used = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor | LazyTensor:
        """Copy a tensor. The result may be read after `wait`."""
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
        """Wait until all copies are complete."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
            self._device = None

    def _rest_of_block(self) -> torch.Tensor:
        """Return the free memory of the current block, uint8."""
        block, begin = divmod(self._used, BLOCK_BYTES)
        if block == len(self._blocks):
            self._blocks.append(pinned(BLOCK_BYTES))
        return self._blocks[block][begin:]


def _in_parts(
    shape: torch.Size, dtype: torch.dtype, parts: list[tuple[int, torch.Tensor]]
) -> LazyTensor:
    """Return a tensor whose elements are in `parts`, each with the index of its first element."""

    def fill(rows: torch.Tensor, start: int) -> None:
        values = rows.view(-1)
        first = start * (len(values) // max(1, len(rows)))
        for begin, part in parts:
            low, high = max(first, begin), min(first + len(values), begin + len(part))
            if low < high:
                values[low - first : high - first] = part[low - begin : high - begin]

    return LazyTensor(tuple(shape), dtype, fill)
