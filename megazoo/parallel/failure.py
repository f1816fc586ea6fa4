"""A call that fails on one rank ends on all: the others hear of it, with its message, instead of waiting in vain.

A rank that fails says so in the job's store. If within a moment all ranks have failed in the same call, as with a
batch that no rank can take, nothing is broken, and the program may go on. Else some wait for it: it closes its
connections, so that their waits end at once; they close theirs, and raise what the first one said.
"""

import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from threading import Thread
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megazoo.errors import UserError
from megazoo.parallel import shared_memory
from megazoo.parallel.context import ParallelContext

PATIENCE = 2.0  # seconds in which ranks that fail alike do so
OUT_OF_REACH = 5.0  # seconds after which the job's store is given up
CAUSE = "megazoo/cause"
UNUSED_TAG = 911  # of messages that nobody sends

_calls: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()  # that all ranks of a world have made so far
_inside = False  # one of them


@contextmanager
def failing_together(ctx: ParallelContext):
    """Within this block, which all ranks enter together, an exception on one rank is raised on all.

    On the one it is as it was; on the others a UserError with its text, exit code 1.
    """
    global _inside
    if ctx.mesh is None or ctx.world_size == 1 or _inside:
        yield
        return
    _calls[dist.group.WORLD] = _calls.get(dist.group.WORLD, 0) + 1
    _inside = True
    try:
        yield
    except Exception as error:
        _end(ctx, error)
        raise
    finally:
        _inside = False


def together(function: Callable) -> Callable:
    """Decorate a function that all ranks call together, its first argument being what has their `ctx`, as a model has:
    see `failing_together`."""

    @wraps(function)
    def call(model, *args, **kwargs):
        with failing_together(model.ctx):
            return function(model, *args, **kwargs)

    return call


def is_of_communication(error: Exception) -> bool:
    """Whether the error is that another rank is gone, or late."""
    words = ("timed out", "timeout", "connection", "gloo", "nccl", "socket")
    told = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return told or isinstance(error, dist.DistError)


def _end(ctx: ParallelContext, error: Exception) -> None:
    """Tell the others, or raise what they tell."""
    if is_of_communication(error):
        _close_connections(ctx)
        cause = _in_reach(_told)
        if cause:
            raise UserError(cause, exit_code=1) from error
        return
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if not _in_reach(lambda store: _all_fail(store, ctx, f"rank {ctx.rank} failed: {text}")):
        _close_connections(ctx)


def _all_fail(store: dist.Store, ctx: ParallelContext, text: str) -> bool:
    """Count this rank among those that fail in this call; if others don't, leave the text for them."""
    key, until = f"megazoo/failed in call {_calls[dist.group.WORLD]}", time.monotonic() + PATIENCE
    store.add(key, 1)
    while store.add(key, 0) < ctx.world_size:
        if time.monotonic() > until:
            store.compare_set(CAUSE, "", text)
            return False
        time.sleep(0.02)
    return True


def _told(store: dist.Store) -> str | None:
    """What the first that failed said; it may be about to."""
    until = time.monotonic() + PATIENCE / 2
    while not store.check([CAUSE]):
        if time.monotonic() > until:
            return None  # it died without a word
        time.sleep(0.02)
    return store.get(CAUSE).decode()


def _in_reach(ask: Callable):
    """ask(the job's store); None if it can't be reached."""
    answers = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask(dist.distributed_c10d._get_default_store()))

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(OUT_OF_REACH)
    return answers[0] if answers else None


def _close_connections(ctx: ParallelContext) -> None:
    """End all waits for this rank: gloo's connections close when a receive of one of the two runs into its timeout."""
    for group in (ctx.tp_group, ctx.pp_group, ctx.dp_group, dist.group.WORLD):
        shared_memory.give_up(group)
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        for rank in others[:1]:  # all of the group's connections close with the one
            with suppress(RuntimeError):  # which is the timeout, or an end that has come before
                dist.irecv(torch.empty(1), group=group, group_src=rank, tag=UNUSED_TAG).wait(timedelta(milliseconds=1))
