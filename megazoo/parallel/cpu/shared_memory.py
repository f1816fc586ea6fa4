"""Exchange CPU tensors between the ranks of one host through shared memory instead of gloo's
sockets.

A rank copies data for others into a slot, then raises a flag. The receivers wait for the flag.
Flags only increase, and each flag is written by one rank.
"""

import mmap
import os
import platform
import time
import weakref
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megazoo.torch_internals import timeout_of

SLOT_BYTES = 1 << 22
LOST = "connection closed by peer"  # start of the error message if a rank is lost
# two cache lines per flag, so that waiting ranks don't slow down writing ranks
FLAG_BYTES = 128
OPERATIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
# dtypes for which OPERATIONS give the same results as gloo
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Shared:
    """Memory that the ranks of a group share: flags and slots. `counts` returns their numbers.

    memory: mapping of `nbytes` bytes. pids: the processes that share it, in the order of the
    group's ranks.
    """

    def __init__(self, memory: mmap.mmap, pids: list[int], rank: int, timeout: timedelta):
        self.rank, self.pids, self.timeout = rank, pids, timeout
        flags, slots = self.counts(len(pids))
        flags += 1
        self._flags = memoryview(memory)[: flags * FLAG_BYTES].cast("q")[:: FLAG_BYTES // 8]
        room = torch.frombuffer(
            memory, dtype=torch.uint8, offset=flags * FLAG_BYTES, count=slots * SLOT_BYTES
        )
        self._slots = room.view(slots, SLOT_BYTES)

    @staticmethod
    def counts(size: int) -> tuple[int, int]:
        """Return the numbers of flags and slots of a group of `size` ranks.

        They may be large, because memory that was never written is not allocated.
        """
        raise NotImplementedError

    @classmethod
    def nbytes(cls, size: int) -> int:
        """Return the number of bytes that a group of `size` ranks shares. It includes one more
        flag, which is raised if a rank has given up."""
        flags, slots = cls.counts(size)
        return (flags + 1) * FLAG_BYTES + slots * SLOT_BYTES

    def give_up(self) -> None:
        """End all waits of the ranks that share this memory, now and later."""
        self._flags[-1] = 1

    def _wait(self, flag: int, number: int, rank: int) -> None:
        """Wait until `rank` has raised the flag to the number."""
        began, looks = time.monotonic(), 0
        while self._flags[flag] < number:
            looks += 1
            if looks > 1000:  # the other rank is busy: give it the core
                time.sleep(1e-4)
                if looks % 100 == 0:
                    self._check(rank, time.monotonic() - began)
            elif looks > 100:
                os.sched_yield()

    def _check(self, rank: int, waited: float) -> None:
        """Raise RuntimeError, as gloo does, if the rank has died, if any rank has given up, or
        after the timeout."""
        if self._flags[-1]:
            raise RuntimeError(f"{LOST}: a rank has stopped")
        if not _lives(self.pids[rank]):
            raise RuntimeError(f"{LOST}: process {self.pids[rank]} has ended")
        if waited > self.timeout.total_seconds():
            raise RuntimeError(
                f"{LOST}: timed out after {waited:.0f} s waiting for process {self.pids[rank]}"
            )


class Reducer(_Shared):
    """All-reduces, all-gathers and reduce-scatters. Each rank fills its slot, and reads the slots
    of all ranks in rank order. Sums are therefore bitwise equal on all ranks and in every run. With
    two ranks they equal those of gloo."""

    def __init__(self, *args):
        super().__init__(*args)
        self._number = 0  # number of the last piece

    @staticmethod
    def counts(size: int) -> tuple[int, int]:
        return size, 2 * size  # two slots per rank: one can be filled while others read the other

    def all_reduce(
        self, tensor: torch.Tensor, out: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM
    ) -> None:
        """Reduce `tensor` over the ranks into `out`, which may be the same tensor. Both are
        contiguous. Long tensors are reduced in pieces."""
        length = SLOT_BYTES // tensor.element_size()
        for piece, result in zip(
            tensor.view(-1).split(length), out.view(-1).split(length), strict=True
        ):
            _combine(self._exchange(piece), result, op)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copy every rank's `tensor` to out[rank], on all ranks. Both are contiguous."""
        length = SLOT_BYTES // tensor.element_size()
        results = out.view(len(self.pids), -1).split(length, dim=1)
        for piece, result in zip(tensor.view(-1).split(length), results, strict=True):
            result.copy_(self._exchange(piece))

    def reduce_scatter(self, parts: torch.Tensor, out: torch.Tensor) -> None:
        """Sum parts[rank] of all ranks into `out`, for this rank. Both are contiguous."""
        length = SLOT_BYTES // parts.element_size() // len(self.pids)
        pieces = parts.view(len(self.pids), -1).split(length, dim=1)
        for piece, result in zip(pieces, out.view(-1).split(length), strict=True):
            _combine(self._exchange(piece)[:, self.rank], result, dist.ReduceOp.SUM)

    def _exchange(self, piece: torch.Tensor) -> torch.Tensor:
        """Return every rank's piece, [ranks, *shape], valid until the next call. A piece must fit
        into a slot."""
        self._number += 1
        slots = (
            self._slots[self._number % 2 :: 2, : piece.nbytes]
            .view(piece.dtype)
            .unflatten(1, piece.shape)
        )
        slots[self.rank].copy_(piece)
        self._flags[self.rank] = self._number
        # a rank that comes here again has read all slots of the previous call
        for rank in range(len(self.pids)):
            self._wait(rank, self._number, rank)
        return slots


def _combine(parts: torch.Tensor, out: torch.Tensor, op: dist.ReduceOp) -> None:
    """Reduce parts[0], parts[1], ... into `out`, in this order."""
    combine = OPERATIONS[op]
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


class Mailboxes(_Shared):
    """Point-to-point messages of up to SLOT_BYTES. Several can be in flight between each pair of
    ranks."""

    def __init__(self, *args):
        super().__init__(*args)
        self._each = self.slots_each(len(self.pids))
        # numbers of messages so far, to and from each rank
        self._sent, self._expected = [0] * len(self.pids), [0] * len(self.pids)

    @staticmethod
    def slots_each(size: int) -> int:
        """Return the number of slots that a rank has for each other rank.

        A sender waits for an empty slot. With too few slots, ranks would deadlock. The interleaved
        schedule needs the most, if the number of micro-batches is not a multiple of `size`; this
        number is enough for it.
        """
        return max(3, size // 2 + 1)

    @staticmethod
    def counts(size: int) -> tuple[int, int]:
        slots = size * size * Mailboxes.slots_each(size)
        # flags: per slot, the number of the last message written, then of the last one read
        return 2 * slots, slots

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Copy the tensor into a slot for the target. Wait until the target has emptied a slot."""
        self._sent[target] = number = self._sent[target] + 1
        slot = self._slot(self.rank, target, number)
        self._wait(len(self._slots) + slot, number - self._each, target)
        self._view(slot, tensor).copy_(tensor)
        self._flags[slot] = number

    def receive(self, buffer: torch.Tensor, source: int) -> "Message":
        """Return the next message from the source. It has the shape and dtype of the buffer, and is
        in the buffer after its `wait()`."""
        self._expected[source] = number = self._expected[source] + 1
        return Message(self, buffer, source, number)

    def take(self, buffer: torch.Tensor, source: int, number: int) -> None:
        """Wait for message `number` of the source, and copy it to the buffer."""
        slot = self._slot(source, self.rank, number)
        self._wait(slot, number, source)
        buffer.copy_(self._view(slot, buffer))
        self._flags[len(self._slots) + slot] = number

    def _slot(self, source: int, target: int, number: int) -> int:
        return (source * len(self.pids) + target) * self._each + number % self._each

    def _view(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        return self._slots[slot, : tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Message:
    """A message to be received, with a `wait()` as in torch.distributed's Work."""

    def __init__(self, boxes: Mailboxes, buffer: torch.Tensor, source: int, number: int):
        self.boxes, self.arguments = boxes, (buffer, source, number)

    def wait(self) -> None:
        self.boxes.take(*self.arguments)


Kind = TypeVar("Kind", bound=_Shared)
_opened: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict]" = weakref.WeakKeyDictionary()


def shared_by(group: dist.ProcessGroup, kind: type[Kind]) -> Kind | None:
    """Return the Reducer or Mailboxes of a group, or None if its ranks can't share memory.

    The first call creates it; all ranks of the group must make this call.
    """
    kinds = _opened.setdefault(group, {})
    if kind not in kinds:
        kinds[kind] = _open(group, kind)
    return kinds[kind]


def give_up(group: dist.ProcessGroup) -> None:
    """End all waits of a group's ranks for shared memory."""
    for shared in _opened.get(group, {}).values():
        if shared:
            shared.give_up()


def _open(group: dist.ProcessGroup, kind: type[Kind]) -> Kind | None:
    """Open memory that all ranks of the group share. All ranks must call it, and all get None if
    one fails. The files have no names, so none remain after the process."""
    rank, size = group.rank(), group.size()
    length = kind.nbytes(size)
    file = _new_file(length) if rank == 0 and _host() else -1
    told: list = [None] * size
    dist.all_gather_object(told, (_host(), os.getpid(), file), group=group)
    hosts, pids, files = zip(*told, strict=True)
    memory = None
    if hosts[0] and len(set(hosts)) == 1:
        try:
            with open(f"/proc/{pids[0]}/fd/{files[0]}", "r+b", buffering=0) as opened:
                memory = mmap.mmap(opened.fileno(), length)
        except OSError:  # a process of another user, or a sandbox
            pass
    dist.all_gather_object(told, memory is not None, group=group)
    if file >= 0:
        os.close(file)
    if memory is None or not all(told):
        return None
    return kind(memory, list(pids), rank, timeout_of(group))


def _new_file(length: int) -> int:
    """Return the descriptor of an unnamed file in memory, or -1 if a sandbox forbids it.

    It raises no error, because the other ranks wait for its result.
    """
    file = -1
    try:
        file = os.memfd_create("megazoo")
        os.truncate(file, length)
        return file
    except OSError:
        if file >= 0:
            os.close(file)
        return -1


def _lives(pid: int) -> bool:
    """Return whether a process of this host exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _host() -> tuple | None:
    """Return a key that is equal for processes that can share memory.

    None if they can't: on systems other than Linux, or if a core may see another core's stores out
    of order.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    namespaces = (os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net"))
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read(), *namespaces
