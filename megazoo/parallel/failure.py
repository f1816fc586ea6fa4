"""A call that fails on one rank fails on all: the others raise an error with its message instead of
waiting.

A rank that fails reports it in the job's store. If all ranks fail in the same call within PATIENCE
seconds, as with an invalid batch, the program can continue. Otherwise some ranks are waiting for
it: it closes its connections, so that their waits end immediately. They close their connections
too, and raise the message of the first rank.

This covers gloo and shared memory. A wait for NCCL ends when the launcher stops all ranks after one
has died, or after the timeout, through NCCL's watchdog. A training program has then already named
the absent rank (megazoo/launching/heartbeat.py).
"""

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps

import torch
import torch.distributed as dist

from megazoo.errors import UserError
from megazoo.parallel.agreement import OWN, Terms, agree, is_compared
from megazoo.parallel.context import AXES, ParallelContext
from megazoo.parallel.cpu import shared_memory
from megazoo.torch_internals import default_store

PATIENCE = 2.0  # seconds in which all ranks must fail to count as the same failure
OUT_OF_REACH = 5.0  # seconds to wait for the job's store
UNUSED_TAG = 911  # tag of messages that are never sent

_thread = threading.local()  # its `inside` is set within a call
_running: dict[str, tuple[str, int]] = {}  # per context: the call, and its thread
_made: dict[str, int] = {}  # number of times this process has started each collective call
_latest = {"call": (0, "none")}  # see calls_made; one value, so that threads read it whole


@contextmanager
def propagate_errors(ctx: ParallelContext, in_replica: bool = False) -> Iterator["_Call | None"]:
    """Within this block, which all ranks enter together, an exception on one rank is raised on all.

    The rank that fails raises its own exception, the others a UserError with its text and exit code
    1. in_replica: only the ranks of a replica enter together. Yields the call, with which the ranks
    can compare values (`agree`); None within another call, and with one rank.
    """
    ranks = ctx.world_size // ctx.dp_size if in_replica else ctx.world_size
    if (
        ctx.mesh is None
        or ranks == 1
        or getattr(_thread, "inside", False)
        or not dist.is_initialized()
    ):
        yield None
        return
    call = _Call(ctx, ranks, in_replica)
    _thread.inside = True
    try:
        yield call
    except Exception as error:
        call.fail(error)
        raise
    finally:
        _thread.inside = False


def on_all_ranks(function: Callable) -> Callable:
    """Decorate a function that all ranks call together: see `propagate_errors`. Its first argument
    has a `ctx`, like a model. First the ranks compare the call, its arguments and the `terms()` of
    that argument: see agreement.py."""
    return _together(function, in_replica=False)


def on_replica_ranks(function: Callable) -> Callable:
    """Decorate, like `on_all_ranks`, a function that the ranks of a replica call together."""
    return _together(function, in_replica=True)


def _together(function: Callable, in_replica: bool) -> Callable:
    name, signature = function.__name__, inspect.signature(function)
    every = signature.parameters.values()
    keywords = {each.name for each in every if each.kind is each.VAR_KEYWORD} - {*OWN}

    @wraps(function)
    def call(model, *args, **kwargs):
        if not in_replica:
            _note(name)
        # With zero 3, all replicas call it together.
        alone = in_replica and getattr(model, "_storage", None) is None
        with propagate_errors(model.ctx, alone) as together, _one_thread(model.ctx, name):
            if together:
                bound = signature.bind(model, *args, **kwargs)
                bound.apply_defaults()
                for more in keywords:  # the arguments of **settings
                    bound.arguments |= bound.arguments.pop(more, {})
                together.agree(name, model, dict(bound.arguments))
            return function(model, *args, **kwargs)

    return call


@contextmanager
def _one_thread(ctx: ParallelContext, name: str) -> Iterator[None]:
    """Raise UserError if another thread of this process is within a call of the same context: the
    collectives of the two would be mixed up on other ranks."""
    if ctx.mesh is None or ctx.world_size == 1:
        yield
        return
    mine = name, threading.get_ident()
    held = _running.setdefault(ctx.name, mine)  # one step, so that only one thread has it
    running, owner = held
    if owner != mine[1]:
        raise UserError(
            f"{name} was called while {running} runs in another thread: the threads of a rank "
            "must call the models of a context one after the other"
        )
    try:
        yield
    finally:
        if held is mine:  # otherwise this call is within another one
            del _running[ctx.name]


def calls_made() -> tuple[int, str]:
    """Return how many collective calls this process has started, and the last one: (35,
    "train_batch 17"), the 17th of that name. Any thread may call it."""
    return _latest["call"]


def _note(name: str) -> None:
    """Count a call with this name."""
    _made[name] = _made.get(name, 0) + 1
    _latest["call"] = _latest["call"][0] + 1, f"{name} {_made[name]}"


def is_of_communication(error: Exception) -> bool:
    """Return whether the error, of torch or of shared memory, is about a rank that is gone or
    late."""
    words = ("gloo", "nccl", "pair closure", shared_memory.LOST)
    told = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return told or isinstance(error, dist.DistError)


def _is_timeout(error: Exception) -> bool:
    """Return whether the error is a timeout in a wait for another rank."""
    return is_of_communication(error) and "timed out" in str(error).lower()


class _Call:
    """One call that `ranks` ranks make together."""

    def __init__(self, ctx: ParallelContext, ranks: int, in_replica: bool):
        self.ctx, self.ranks = ctx, ranks
        self.axes = tuple(name for name in AXES[::-1] if not (in_replica and name == "dp"))
        groups = [ctx.axis(name).group for name in self.axes]
        groups += [] if in_replica else [dist.group.WORLD, ctx.token_axis.group]
        for folded in ctx.folded.values():  # over which layers communicate
            groups += [folded.group, folded.replicas.group]
        self.groups = [group for group in groups if group]
        # Keys of the store, which may be older than this context, and have seen others with as many
        # calls.
        scope = f"megazoo/{ctx.name}" + (f"/replica {ctx.dp_rank}" if in_replica else "")
        ctx.calls[scope] = ctx.calls.get(scope, 0) + 1
        self.number = ctx.calls[scope]
        self.count = f"{scope}/failed in call {self.number}"
        self.late = f"{scope}/waits in call {self.number}"
        self.cause = f"megazoo/{ctx.name}/cause"

    def agree(self, name: str, model, arguments: Mapping) -> None:
        """Raise UserError unless the ranks make the same call with compatible arguments and models,
        or if some ranks do not call.

        arguments: of the call, as {name: value}. model: an object that may have `terms()`, which is
        called only if the call is compared.
        """
        if not is_compared(self.ctx, self.number):
            return
        terms = model.terms() if hasattr(model, "terms") else Terms()
        terms.take(arguments)
        try:
            agree(self.ctx, name, terms, self.axes)
        except RuntimeError as error:
            if not _is_timeout(error):
                raise
            absent = _within_reach(self._absent)
            who = ", ".join(map(str, absent)) if absent else "some"
            raise UserError(
                f"rank {who} did not call {name}, for which the other ranks waited "
                f"{self.ctx.timeout.total_seconds():g} s: all ranks must make the same calls, in "
                "the same order",
                exit_code=1,
            ) from error

    def fail(self, error: Exception) -> None:
        """Report the failure to the other ranks, or raise the one that another rank has
        reported."""
        if is_of_communication(error):
            if _is_timeout(error):
                # No rank has reported a failure: all time out. The program names the absent one.
                return
            self._close_connections()
            if cause := _within_reach(self._first_cause):
                raise UserError(cause, exit_code=1) from error
            return
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not _within_reach(
            lambda store: self._all_fail(store, f"rank {self.ctx.rank} failed: {text}")
        ):
            self._close_connections()

    def _all_fail(self, store: dist.Store, text: str) -> bool:
        """Count this rank among those that fail in this call; if others don't, store the text for
        them."""
        until = time.monotonic() + PATIENCE
        store.add(self.count, 1)
        while store.add(self.count, 0) < self.ranks:
            if time.monotonic() > until:
                store.compare_set(self.cause, "", text)
                return False
            time.sleep(0.02)
        return True

    def _absent(self, store: dist.Store) -> list[int]:
        """Report that this rank waits in the call; return the ranks that don't."""
        store.set(f"{self.late}/{self.ctx.rank}", "")
        time.sleep(PATIENCE / 2)
        return [
            rank
            for rank in range(self.ctx.world_size)
            if self.ranks == self.ctx.world_size
            or self.ctx.place_of(rank)["dp"] == self.ctx.dp_rank
            if not store.check([f"{self.late}/{rank}"])
        ]

    def _first_cause(self, store: dist.Store) -> str | None:
        """Wait briefly for the message of the first rank that failed; None if it does not come."""
        until = time.monotonic() + PATIENCE / 2
        while not store.check([self.cause]):
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        return store.get(self.cause).decode()

    def _close_connections(self) -> None:
        """End all waits for this rank.

        gloo closes all connections of a group when one receive runs into its timeout.
        """
        for group in self.groups:
            shared_memory.give_up(group)
            if group.size() > 1:
                other = (group.rank() + 1) % group.size()
                with suppress(RuntimeError):  # the timeout, or an end that has come before
                    work = dist.irecv(torch.empty(1), group=group, group_src=other, tag=UNUSED_TAG)
                    if work:
                        work.wait(timedelta(milliseconds=1))


def _within_reach(ask: Callable):
    """Return ask(the job's store), or None if the store can't be reached."""
    answers = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask(default_store()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(OUT_OF_REACH)
    return answers[0] if answers else None
