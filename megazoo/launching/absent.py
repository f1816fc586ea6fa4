"""Name ranks that do not respond."""

import os
import time
from contextlib import contextmanager
from threading import Thread

from megazoo.launching.heartbeat import heartbeat
from megazoo.launching.local_ranks import name_of
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import is_of_communication
from megazoo.terminal import print_error
from megazoo.torch_internals import default_store

GRACE = 3.0  # seconds for all waiting ranks to report their failed wait in the store
OUT_OF_REACH = 5.0  # further seconds after which the job's store counts as unreachable


@contextmanager
def naming_absent_ranks(ctx: ParallelContext):
    """Name absent ranks on stderr, if a wait for them fails or exceeds the groups' timeout.

    Each rank whose wait failed reports this in the job's store. The ranks without a report are the
    absent ones. `heartbeat` names them before the timeout, and also if the wait ends the process,
    as with NCCL. All ranks enter the context together.
    """
    try:
        with heartbeat(ctx):
            yield
    except RuntimeError as error:
        if ctx.world_size > 1 and is_of_communication(error):
            teller = Thread(
                target=_tell_absent, args=(ctx, str(error).splitlines()[0]), daemon=True
            )
            teller.start()
            teller.join(GRACE + OUT_OF_REACH)
            if teller.is_alive():
                print_error(
                    f"rank {ctx.rank} on {os.uname().nodename} can't reach the other ranks or the "
                    "job's store: is a node or its network down?"
                )
        raise


def _tell_absent(ctx: ParallelContext, reason: str) -> None:
    """Report this rank's failed wait in the job's store. The lowest such rank names the absent."""
    try:
        store = default_store()
        store.set(f"waited in vain/{ctx.rank}", "")
        time.sleep(GRACE)
        there = [rank for rank in range(ctx.world_size) if store.check([f"waited in vain/{rank}"])]
    except RuntimeError as error:
        print_error(f"rank {ctx.rank} can't reach the job's store: {error}")
        return
    absent = [rank for rank in range(ctx.world_size) if rank not in there]
    # Without a timeout, a connection broke, and the launcher reports the rank.
    if ctx.rank == min(there) and "timed out" in reason.lower():
        who = ", ".join(name_of(rank, ctx) for rank in absent)
        print_error(
            f"no response from {who or 'any rank: all ranks waited for each other'}: it "
            f"hung for longer than the timeout, or died ({reason})"
        )
