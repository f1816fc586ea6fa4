"""How a program starts and ends: it starts the ranks that are missing, and tells a user's mistake
in one line."""

import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from megazoo.environment import (
    LAUNCHER_NAMES,
    LAUNCHER_PREFIXES,
    adopt_launcher,
    is_rank_zero,
    world_size,
)
from megazoo.errors import Advice, UserError

# seconds: rank 0 tells what all ranks found; another tells only what rank 0 did not
REPORT_DELAY = 10.0


def data_parallel_size(tp: int, pp: int) -> int:
    """The dp that follows from the world, 1 if the ranks are still to be started; UserError with
    the right command."""
    # with torch, which --help needs not
    from megazoo.parallel.context import data_parallel_size_for, ranks_that_fit

    world = world_size()
    if world == 1:
        return 1
    try:
        return data_parallel_size_for(world, tp, pp)
    except UserError as error:
        command = torchrun_line(ranks_that_fit(world, tp, pp))
        raise UserError(
            f"a world of {world} ranks does not fit tp {tp} x pp {pp} = {tp * pp}: use {command}"
        ) from error


def after_rank_zero(work: Callable[[], None]):
    """Run `work` on rank 0 while all others wait, however long it takes; no process group would.

    What is returned must live until there is a process group: in rank 0 it may be the store of
    both.
    """
    import torch.distributed as dist

    if world_size() == 1 or dist.is_initialized():
        if is_rank_zero():
            work()
        return None
    store, rank, _ = next(dist.rendezvous("env://"))
    if rank == 0:
        work()
        store.set("megazoo/done", "")
    while not store.check(["megazoo/done"]):
        time.sleep(0.1)
    return store


def start_missing_ranks(tp: int, pp: int) -> None:
    """In a world of one, become the launcher of tp x pp local ranks of this program, if more than
    one is needed."""
    ranks = tp * pp
    if world_size() > 1 or ranks == 1:
        return
    print(f"starting {ranks} ranks here, as {torchrun_line(ranks)} would", flush=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    environment.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its share of the cores itself
    # --standalone lets the launcher find a free port.
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    os.execve(sys.executable, [*launcher, *sys.argv], environment)


def run_program(main: Callable[[list[str]], None]) -> None:
    """Run main(arguments) and exit: 0, or a UserError's exit code after its one line on stderr.

    A mistake that all ranks find is told by rank 0; the others wait to be ended by the launcher.
    """
    sys.argv[1:] = adopt_launcher(sys.argv[1:], os.environ)
    usual = warnings.formatwarning

    def formatted(message, category, *where) -> str:
        return f"warning: {message}\n" if category is Advice else usual(message, category, *where)

    warnings.formatwarning = formatted
    try:
        main(sys.argv[1:])
    except UserError as error:
        if not is_rank_zero():
            time.sleep(REPORT_DELAY)
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except RuntimeError as error:
        # gloo's word for a peer that ended: its own report comes first
        if "Connection" in str(error):
            time.sleep(REPORT_DELAY)
        raise
    except KeyboardInterrupt:
        sys.exit(130)


def torchrun_line(ranks: int, arguments: list[str] | None = None) -> str:
    """The command that starts this program (with other arguments, if given) on so many ranks."""
    return f"torchrun --nproc-per-node {ranks} {shlex.join([sys.argv[0], *(arguments or sys.argv[1:])])}"


def python_line(arguments: list[str], program: str | None = None) -> str:
    """The command that starts this program (or another) with this Python."""
    here = os.path.relpath(sys.executable)
    python = (
        "python"
        if shutil.which("python") == sys.executable
        else sys.executable
        if ".." in here
        else here
    )
    return f"{python} {shlex.join([program or sys.argv[0], *arguments])}"
