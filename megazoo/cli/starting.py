"""Start the missing ranks of a program."""

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from megazoo.cli.program import run_program
from megazoo.commands import entry, torchrun_line
from megazoo.environment import check_meeting_point, world_size
from megazoo.errors import UserError
from megazoo.user_files import user_files


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


def start_missing_ranks(
    work: Callable[[], None],
    tp: int,
    pp: int,
    cp: int = 1,
    dp: int = 1,
    *,
    report: Callable[[str], None] = print,
    keep_on_interrupt: bool = False,
) -> None:
    """Call work() on tp x pp x cp x dp ranks: in this process if it is a rank or only one is
    needed, otherwise on local ranks, whose end it waits for. If they fail, this process exits.

    Args:
        work: the rest of the program. It runs in forked ranks. Other ranks run the program from its
            start.
        tp, pp, cp, dp: sizes of the layout.
        report: prints a line about the launch.
        keep_on_interrupt: pass each Ctrl-C on to the ranks, which may continue. Otherwise a second
            Ctrl-C ends them.
    """
    ranks = tp * pp * cp * dp
    if world_size() > 1 or ranks == 1:
        work()
        return
    report(f"starting {ranks} ranks here, as {torchrun_line(ranks)} would")
    # These import torch, which --help does not need.
    from megazoo.launching.local_ranks import LocalRanks
    from megazoo.parallel.layout import Layout

    if can_fork():
        start = partial(run_program, lambda _: work())
    else:
        start = partial(start_again, [*entry(), *sys.argv[1:]])
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=dp)
    code = LocalRanks(layout, start, keep_on_interrupt=keep_on_interrupt).run()
    if code:
        sys.exit(code)


def start_again(words: list[str]) -> NoReturn:
    """Replace this rank by a Python process with these arguments."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its share of the cores
    os.execv(sys.executable, [sys.executable, "-u", *words])


def can_fork() -> bool:
    """Return whether forked ranks of this process can compute.

    A forked child has none of its threads, and cannot use CUDA after this process has initialized
    it. A user's --import file may have started threads or CUDA. Only Python's threads are detected.
    """
    import torch

    return (
        sys.platform == "linux"
        and threading.active_count() == 1
        and not torch.cuda.is_available()
        and not user_files
    )
