"""Start the missing ranks of a program."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from megazoo.commands import entry, torchrun_line
from megazoo.environment import (
    check_meeting_point,
    is_child_of_launcher,
    is_rank_zero,
    megazoos_launcher,
    world_size,
)
from megazoo.errors import UserError


def data_parallel_size(tp: int, pp: int, cp: int = 1, dp: int | None = None) -> int:
    """Return the data-parallel size, derived from the world size.

    If the ranks are not started yet, it is `dp`, or 1.

    Args:
        tp, pp, cp: other sizes of the layout.
        dp: requested data-parallel size, if any.

    Raises:
        UserError: the world size does not fit the layout. The message has the right command.
    """
    # These import torch, which --help does not need.
    import torch.distributed as dist

    from megazoo.parallel.sizes import data_parallel_size_for, product_of, ranks_that_fit

    world = world_size()
    if world == 1:
        return dp or 1
    if not dist.is_initialized():
        check_meeting_point()
    try:
        return data_parallel_size_for(world, tp, pp, dp, cp=cp)
    except UserError as error:
        needed = tp * pp * cp * (dp or 1)
        multiple = "" if dp else "a multiple of "
        command = torchrun_line(needed if dp else ranks_that_fit(world, tp, pp, cp=cp))
        raise UserError(
            f"the launcher started {world} ranks, but {product_of(tp, pp, dp, cp=cp)} needs "
            f"{multiple}{needed}: use {command}"
        ) from error


def after_rank_zero(work: Callable[[], None]):
    """Run `work` on rank 0 while all others wait without a timeout, unlike in a process group.

    Returns:
        The store of the ranks. Keep a reference until the process group exists, which may use it.
    """
    import torch.distributed as dist

    from megazoo.parallel.startup import rendezvous_errors

    if world_size() == 1 or dist.is_initialized():
        if is_rank_zero():
            work()
        return None
    with rendezvous_errors():
        store, rank, _ = next(dist.rendezvous("env://"))
    if rank == 0:
        work()
        store.set("megazoo/done", "")
    while not store.check(["megazoo/done"]):
        time.sleep(0.1)
    return store


def start_missing_ranks(
    tp: int,
    pp: int,
    cp: int = 1,
    dp: int = 1,
    *,
    report: Callable[[str], None] = print,
    keep_on_interrupt: bool = False,
) -> None:
    """Launch tp x pp x cp x dp local ranks of this program, wait for their end, and exit.

    It does nothing if there already are several ranks, or only one is needed. Forked ranks return
    from this function. Other ranks run the program from its start.

    Args:
        tp, pp, cp, dp: sizes of the layout.
        report: prints a line about the launch.
        keep_on_interrupt: pass each Ctrl-C on to the ranks, which may continue. Otherwise a second
            Ctrl-C ends them.
    """
    ranks = tp * pp * cp * dp
    if world_size() > 1 or ranks == 1:
        return
    report(f"starting {ranks} ranks here, as {torchrun_line(ranks)} would")
    sys.stdout.flush()
    # This imports torch, which --help does not need.
    from megazoo.launching.local_ranks import LocalRanks, can_fork

    command = None if can_fork() else [sys.executable, "-u", *entry(), *sys.argv[1:]]
    code = LocalRanks(tp, pp, command, cp, dp, keep_on_interrupt=keep_on_interrupt).run()
    if code is not None:
        sys.exit(code)
    end_with_launcher()


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this process when its launcher dies, even of SIGKILL.

    So no rank continues without a launcher. It does nothing without a launcher or on systems other
    than Linux.
    """
    if not is_child_of_launcher() or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, ctypes.c_ulong(signal.SIGTERM))
    if _is_orphan():  # the launcher died before the request to the kernel
        os.kill(os.getpid(), signal.SIGTERM)


def _is_orphan() -> bool:
    """Return whether this rank's launcher has died. For torchrun this is a guess, because its
    process id is not available."""
    if launcher := megazoos_launcher():
        return not _lives(launcher)
    if os.getppid() != 1:
        return False
    # The parent of an orphan is process 1. In a container, that may be torchrun (a Python program).
    try:
        return "python" not in os.readlink("/proc/1/exe")
    except OSError as error:
        return isinstance(error, PermissionError)  # the process of another user


def _lives(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
