"""How the ranks of a program start: those that are missing."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from megazoo.cli.commands import entry, torchrun_line
from megazoo.environment import (
    check_meeting_point,
    is_child_of_launcher,
    is_rank_zero,
    megazoos_launcher,
    world_size,
)
from megazoo.errors import UserError


def data_parallel_size(tp: int, pp: int, cp: int = 1, dp: int | None = None) -> int:
    """Return the dp that follows from the world; if the ranks are still to be started, the one that
    is asked for, or 1. UserError with the right command if the world does not fit."""
    # These load torch, which --help does not need.
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
        replica = f"{product_of(tp, pp, dp, cp=cp)} = {needed}"
        command = torchrun_line(needed if dp else ranks_that_fit(world, tp, pp, cp=cp))
        raise UserError(
            f"a world of {world} ranks does not fit {replica}: use {command}"
        ) from error


def after_rank_zero(work: Callable[[], None]):
    """Run `work` on rank 0 while all others wait, however long it takes; in a process group they
    would run into its timeout.

    What is returned, the ranks' store, must live until there is a process group, which may use it.
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
    """In a world of one, become the launcher of tp x pp x cp x dp local ranks of this program, if
    more than one is needed: start them, wait for their end, and exit. Ranks that are forked return
    from here; others run the program from its beginning.

    report: prints the line that says so. keep_on_interrupt: each Ctrl-C goes to the ranks, which
    may go on; otherwise the second one ends them.
    """
    ranks = tp * pp * cp * dp
    if world_size() > 1 or ranks == 1:
        return
    report(f"starting {ranks} ranks here, as {torchrun_line(ranks)} would")
    sys.stdout.flush()
    # This loads torch, which --help does not need.
    from megazoo.cli.launch.local_ranks import LocalRanks, can_fork

    command = None if can_fork() else [sys.executable, "-u", *entry(), *sys.argv[1:]]
    code = LocalRanks(tp, pp, command, cp, dp, keep_on_interrupt=keep_on_interrupt).run()
    if code is not None:
        sys.exit(code)
    end_with_launcher()


def end_with_launcher() -> None:
    """Have the kernel send this process SIGTERM when its launcher, if it has one, dies, be it of
    SIGKILL, so that no rank goes on alone. It does nothing where the kernel can't (Linux can)."""
    if not is_child_of_launcher() or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, ctypes.c_ulong(signal.SIGTERM))
    if _is_orphan():  # the launcher died before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)


def _is_orphan() -> bool:
    """Say whether this rank's launcher has died, as far as that can be known: torchrun does not
    tell its process number."""
    if launcher := megazoos_launcher():
        return not _lives(launcher)
    if os.getppid() != 1:
        return False
    # An orphan's parent is the first process of the machine; in a container that may be torchrun
    # itself, which is a Python.
    try:
        return "python" not in os.readlink("/proc/1/exe")
    except OSError as error:
        return isinstance(error, PermissionError)  # it is another user's


def _lives(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
