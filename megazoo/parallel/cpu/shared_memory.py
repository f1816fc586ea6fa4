"""Traffic of CPU tensors between the ranks of one host, through shared memory instead of gloo's
sockets.

A rank copies what others are to have into a slot, then says so by a flag; who needs it waits for
the flag. Flags only grow, and each is written by one rank.
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
LOST = "connection closed by peer"  # begins what is raised where a rank can't be waited for
# two lines of the cache for each flag, so that those who wait don't slow down those who write
FLAG_BYTES = 128
OPERATIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
# dtypes that OPERATIONS combine as gloo does
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Shared:
    """Memory that the ranks of a group share: flags and slots, as many as `counts` says.

    memory: of `nbytes` bytes. pids: the processes that share it, in the order of the group's ranks.
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
        """Return how many flags and slots a group of `size` ranks has.

        They may be many: memory that no one has written to takes no room.
        """
        raise NotImplementedError

    @classmethod
    def nbytes(cls, size: int) -> int:
        """Count the bytes that a group of `size` ranks shares. One more flag tells that a rank has
        given up."""
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
            if looks > 1000:  # it is busy with something else: leave it the core
                time.sleep(1e-4)
                if looks % 100 == 0:
                    self._check(rank, time.monotonic() - began)
            elif looks > 100:
                os.sched_yield()

    def _check(self, rank: int, waited: float) -> None:
        """Raise RuntimeError, as gloo does, if the rank has died, one has given up, or it was
        waited for too long."""
        if self._flags[-1]:
            raise RuntimeError(f"{LOST}: a rank has given up")
        if not _lives(self.pids[rank]):
            raise RuntimeError(f"{LOST}: process {self.pids[rank]} has ended")
        if waited > self.timeout.total_seconds():
            raise RuntimeError(
                f"{LOST}: timed out after {waited:.0f} s waiting for process {self.pids[rank]}"
            )


class Reducer(_Shared):
    """All-reduces, all-gathers and reduce-scatters. Each rank fills a slot of its own, and reads
    all ranks' in their order: a sum is the same to the bit on all, in every run, and at two ranks
    that of gloo."""

    def __init__(self, *args):
        super().__init__(*args)
        self._number = 0  # of the last piece

    @staticmethod
    def counts(size: int) -> tuple[int, int]:
        return size, 2 * size  # two slots for each: one can be filled while others still read

    def all_reduce(
        self, tensor: torch.Tensor, out: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM
    ) -> None:
        """Reduce `tensor` over the ranks into `out`, which may be the same; both contiguous. Long
        ones in pieces."""
        length = SLOT_BYTES // tensor.element_size()
        for piece, result in zip(
            tensor.view(-1).split(length), out.view(-1).split(length), strict=True
        ):
            _combine(self._exchange(piece), result, op)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copy every rank's `tensor` to out[rank], on all ranks; both contiguous."""
        length = SLOT_BYTES // tensor.element_size()
        results = out.view(len(self.pids), -1).split(length, dim=1)
        for piece, result in zip(tensor.view(-1).split(length), results, strict=True):
            result.copy_(self._exchange(piece))

    def reduce_scatter(self, parts: torch.Tensor, out: torch.Tensor) -> None:
        """Put the sum of all ranks' parts[rank], for this rank, into its `out`; both contiguous."""
        length = SLOT_BYTES // parts.element_size() // len(self.pids)
        pieces = parts.view(len(self.pids), -1).split(length, dim=1)
        for piece, result in zip(pieces, out.view(-1).split(length), strict=True):
            _combine(self._exchange(piece)[:, self.rank], result, dist.ReduceOp.SUM)

    def _exchange(self, piece: torch.Tensor) -> torch.Tensor:
        """Every rank's piece, [ranks, *shape], to be read before the next call; it must fit into a
        slot."""
        self._number += 1
        slots = (
            self._slots[self._number % 2 :: 2, : piece.nbytes]
            .view(piece.dtype)
            .unflatten(1, piece.shape)
        )
        slots[self.rank].copy_(piece)
        self._flags[self.rank] = self._number
        # one that comes here again has read all slots of the time before
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
    """Messages of up to SLOT_BYTES from rank to rank, some under way from each to each."""

    def __init__(self, *args):
        super().__init__(*args)
        self._each = self.slots_each(len(self.pids))
        # how many messages so far, to and from each rank
        self._sent, self._expected = [0] * len(self.pids), [0] * len(self.pids)

    @staticmethod
    def slots_each(size: int) -> int:
        """Return how many slots a rank has for each other rank.

        A sender waits for an empty one; with too few, ranks would wait for each other. These are
        enough for the interleaved schedule where the micro-batches don't divide into groups of
        `size`, which needs the most.
        """
        return max(3, size // 2 + 1)

    @staticmethod
    def counts(size: int) -> tuple[int, int]:
        slots = size * size * Mailboxes.slots_each(size)
        # flags: the number of the message put there, then those of the one taken
        return 2 * slots, slots

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Copy the tensor into a slot for the target; wait for an empty one, which the target makes
        by taking what lies there."""
        self._sent[target] = number = self._sent[target] + 1
        slot = self._slot(self.rank, target, number)
        self._wait(len(self._slots) + slot, number - self._each, target)
        self._view(slot, tensor).copy_(tensor)
        self._flags[slot] = number

    def receive(self, buffer: torch.Tensor, source: int) -> "Message":
        """Return the source's next message, of the buffer's shape and dtype: after its `wait()` it
        is in the buffer."""
        self._expected[source] = number = self._expected[source] + 1
        return Message(self, buffer, source, number)

    def take(self, buffer: torch.Tensor, source: int, number: int) -> None:
        """Wait for the source's message of that number, and copy it."""
        slot = self._slot(source, self.rank, number)
        self._wait(slot, number, source)
        buffer.copy_(self._view(slot, buffer))
        self._flags[len(self._slots) + slot] = number

    def _slot(self, source: int, target: int, number: int) -> int:
        return (source * len(self.pids) + target) * self._each + number % self._each

    def _view(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        return self._slots[slot, : tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Message:
    """A message that will come; it is waited for as a work of torch.distributed is."""

    def __init__(self, boxes: Mailboxes, buffer: torch.Tensor, source: int, number: int):
        self.boxes, self.arguments = boxes, (buffer, source, number)

    def wait(self) -> None:
        self.boxes.take(*self.arguments)


Kind = TypeVar("Kind", bound=_Shared)
_opened: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict]" = weakref.WeakKeyDictionary()


def shared_by(group: dist.ProcessGroup, kind: type[Kind]) -> Kind | None:
    """Return a group's Reducer or Mailboxes; None if its ranks can't share memory.

    It is made when all ranks of the group ask for it for the first time.
    """
    kinds = _opened.setdefault(group, {})
    if kind not in kinds:
        kinds[kind] = _open(group, kind)
    return kinds[kind]


def give_up(group: dist.ProcessGroup) -> None:
    """End all waits for shared memory of a group's ranks."""
    for shared in _opened.get(group, {}).values():
        if shared:
            shared.give_up()


def _open(group: dist.ProcessGroup, kind: type[Kind]) -> Kind | None:
    """Open memory that all ranks of the group share; all of them call this, and get None if one
    can't. No file has a name, so none is left behind."""
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
        except OSError:  # of another user, or in a sandbox
            pass
    dist.all_gather_object(told, memory is not None, group=group)
    if file >= 0:
        os.close(file)
    if memory is None or not all(told):
        return None
    return kind(memory, list(pids), rank, timeout_of(group))


def _new_file(length: int) -> int:
    """Return the descriptor of an unnamed file in memory, or -1 where a sandbox allows none.

    It raises nothing: the other ranks wait to be told.
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
    """Say whether a process of this host is there, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _host() -> tuple | None:
    """Return what is equal for processes that can share memory.

    None where they can't: not on Linux, or where a core may see another's stores out of order.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    namespaces = (os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net"))
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read(), *namespaces
