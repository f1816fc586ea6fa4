"""Ranks for tests: a pool of gloo processes on this machine, used again and again."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=60)
# What the server of ranks imports when the first pool starts it: what every rank needs, and what a
# program adds of its own. symbolic_shapes is what torch imports, with sympy, in the first backward.
PRELOADED = [
    "megazoo.models",
    "megazoo.optim",
    "megazoo.testing",
    "torch.fx.experimental.symbolic_shapes",
]


class RankError(RuntimeError):
    """A function failed on a rank, or did not return in time; the text has the rank's traceback."""


class RankPool:
    """Processes that stand for ranks. `run` gives each a function to call within a fresh process
    group.

    The processes are forked from a server that has imported torch, so that starting one costs
    little; each starts with one thread. After a failure the pool is replaced: a rank that is stuck
    in a collective can't be used again.
    """

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list = []

    def run(
        self, function: Callable, world_size: int, *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list:
        """Call function(*args, **kwargs) on `world_size` ranks; return what each returned, in the
        order of the ranks.

        function: importable by name. torch.distributed is initialised (gloo), RANK and WORLD_SIZE
        are set as torchrun sets them. timeout: seconds, for all. Raises RankError if a rank fails
        or the time is up.
        """
        while len(self._workers) < world_size:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        with tempfile.TemporaryDirectory(prefix="megazoo-ranks-") as directory:
            store = os.path.join(directory, "store")
            for rank, (_, pipe) in enumerate(self._workers[:world_size]):
                _send(pipe, (function, args, kwargs, rank, world_size, store))
            return self._answers(world_size, timeout)

    def _answers(self, world_size: int, timeout: float) -> list:
        """Wait for what each rank returns. If one fails or is late, end all processes and raise
        RankError."""
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world_size])}
        results, failures, deadline = {}, {}, time.monotonic() + timeout
        while pipes and not failures:
            ready: list[Any] = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures = dict.fromkeys(pipes.values(), f"no answer within {timeout} s")
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    value, failure = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    value, failure = None, "the process died"
                if failure:
                    failures[rank] = failure
                results[rank] = value
        if failures:
            self.close()
            raise RankError(
                "\n".join(f"rank {rank} of {world_size}: {text}" for rank, text in failures.items())
            )
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []


def _send(pipe, value) -> None:
    """Pickle the value whole: `pipe.send` would open a connection for each tensor in it."""
    pipe.send_bytes(pickle.dumps(value))


def _serve(pipe) -> None:
    """Call one function after the other, as a rank, until the pipe is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            function, args, kwargs, rank, world_size, store = pickle.loads(pipe.recv_bytes())
        except (EOFError, KeyboardInterrupt):
            return
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        try:
            store = dist.FileStore(store, world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
            )
            answer = function(*args, **kwargs), None
            if dist.is_initialized():  # a whole program may have ended it itself
                # else a rank that is early would break connections that others still make
                dist.barrier()
                dist.destroy_process_group()
            _send(pipe, answer)
        except BaseException:
            _send(pipe, (None, traceback.format_exc()))
