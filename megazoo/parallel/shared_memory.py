"""All-reduces between the ranks of one host, of CPU tensors, through shared memory instead of gloo's sockets.

Each rank copies its part into a slot of its own, says so, waits for the others, and adds up all slots in the order of
the ranks: the result is the same to the bit on all, in every run, and at two ranks that of gloo.
"""

import mmap
import os
import platform
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

SLOT_BYTES = 1 << 22  # longer tensors go in pieces
FLAG_BYTES = 4096  # a page of its own for each rank's flag
OPERATIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_exchanges: "weakref.WeakKeyDictionary[dist.ProcessGroup, Exchange | None]" = weakref.WeakKeyDictionary()


def exchange_of(group: dist.ProcessGroup) -> "Exchange | None":
    """The shared memory of a group, made when all its ranks first ask for it; None if they can't share any."""
    if group not in _exchanges:
        _exchanges[group] = _open_exchange(group)
    return _exchanges[group]


class Exchange:
    """memory: of the group, two slots and a flag for each rank. pids: of its ranks."""

    def __init__(self, memory: mmap.mmap, pids: list[int], rank: int, timeout: timedelta):
        self.rank, self.pids, self.timeout = rank, pids, timeout
        count, ints = len(pids), FLAG_BYTES // 8
        self._flags, self._places = memoryview(memory).cast("q"), range(0, count * ints, ints)
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=count * FLAG_BYTES)
        self._slots = slots.view(2, count, SLOT_BYTES)  # two, so that one can be filled while others still read
        self._number = 0  # of the last piece

    def all_reduce(self, tensor: torch.Tensor, out: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` over the ranks into `out`, which may be the same; both are contiguous."""
        length = SLOT_BYTES // tensor.element_size()
        for piece, result in zip(tensor.view(-1).split(length), out.view(-1).split(length), strict=True):
            self._number += 1
            slots = self._slots[self._number % 2, :, : piece.nbytes].view(piece.dtype)
            slots[self.rank].copy_(piece)
            self._flags[self._places[self.rank]] = self._number
            self._wait()
            combine = OPERATIONS[op]
            combine(slots[0], slots[1], out=result)
            for slot in slots[2:]:
                combine(result, slot, out=result)

    def _wait(self) -> None:
        """Until every rank has filled its slot. A rank that comes here again has read all slots of the time before."""
        began, looks = time.monotonic(), 0
        for rank, place in enumerate(self._places):
            while self._flags[place] < self._number:
                looks += 1
                if looks > 1000:  # it is busy with something else: leave it the core
                    time.sleep(1e-4)
                    self._check(rank, time.monotonic() - began)
                elif looks > 100:
                    os.sched_yield()

    def _check(self, rank: int, waited: float) -> None:
        """Raise RuntimeError, as gloo does, if the rank has died, or has been waited for too long."""
        if not _lives(self.pids[rank]):
            raise RuntimeError(f"connection closed by peer: process {self.pids[rank]} has ended")
        if waited > self.timeout.total_seconds():
            raise RuntimeError(f"timed out after {waited:.0f} s waiting for process {self.pids[rank]} in an all-reduce")


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _open_exchange(group: dist.ProcessGroup) -> Exchange | None:
    """All ranks of the group call this. No file has a name, so none is left behind."""
    rank, size = group.rank(), group.size()
    length = size * (FLAG_BYTES + 2 * SLOT_BYTES)
    file = _new_file(length) if rank == 0 and _host() else -1
    told: list = [None] * size
    dist.all_gather_object(told, (_host(), os.getpid(), file), group=group)
    hosts, pids, files = zip(*told, strict=True)
    memory = None
    if hosts[0] and len(set(hosts)) == 1:
        try:
            opened = os.open(f"/proc/{pids[0]}/fd/{files[0]}", os.O_RDWR)
            memory = mmap.mmap(opened, length)
            os.close(opened)
        except OSError:  # of another user, or in a sandbox
            pass
    dist.all_gather_object(told, memory is not None, group=group)
    if file >= 0:
        os.close(file)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return Exchange(memory, list(pids), rank, timeout) if all(told) else None


def _new_file(length: int) -> int:
    """The descriptor of an unnamed file in memory; -1 where a sandbox allows none: the other ranks wait to be told."""
    try:
        file = os.memfd_create("megazoo")
        os.truncate(file, length)
        return file
    except OSError:
        return -1


def _host() -> tuple | None:
    """Equal for processes that can share memory. None where one core may see another's stores out of order."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    namespaces = (os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net"))
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read(), *namespaces
