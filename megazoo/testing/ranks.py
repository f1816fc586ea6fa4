"""Ranks for tests: a reusable pool of gloo processes on this machine."""

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=60)
# Modules that the fork server imports when the first pool starts it; programs can add modules.
# torch imports symbolic_shapes (with sympy) in the first backward pass.
PRELOADED = [
    "megazoo.models",
    "megazoo.optim",
    "megazoo.testing",
    "torch.fx.experimental.symbolic_shapes",
    "tqdm",
]


PATIENCE = 5.0  # seconds until a process that should end is killed


class RankError(RuntimeError):
    """A function failed or timed out on a rank. The text contains the rank's traceback."""


class RankPool:
    """Processes that act as ranks. `run` calls a function on each of them, in a new process group.

    The processes are forked from a server that has imported torch, so that they start quickly. Each
    starts with one thread. After a failure all processes are replaced, because a rank that hangs in
    a collective cannot be used again.
    """

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list = []

    def run(
        self, function: Callable, world_size: int, *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list:
        """Call function(*args, **kwargs) on each rank.

        torch.distributed is initialised (gloo), and RANK and WORLD_SIZE are set as by torchrun.

        Args:
            function: An importable function.
            world_size: Number of ranks.
            *args: Arguments of the function.
            timeout: Seconds until all ranks must have returned.
            **kwargs: Keyword arguments of the function.

        Returns:
            The result of each rank, in the order of ranks.

        Raises:
            RankError: A rank failed or timed out.
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
        """Wait for the result of each rank. On a failure or timeout, end all processes and raise
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
            self.close(hung=True)
            raise RankError(
                "\n".join(f"rank {rank} of {world_size}: {text}" for rank, text in failures.items())
            )
        return [results[rank] for rank in range(world_size)]

    def close(self, hung: bool = False) -> None:
        """End all processes. hung: kill them; otherwise they may end by themselves first, which
        frees their semaphores."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(0 if hung else PATIENCE)
            process.kill()
            process.join()
        self._workers = []


def _send(pipe, value) -> None:
    """Pickle the full value. `pipe.send` would open a connection per tensor."""
    pipe.send_bytes(pickle.dumps(value))


def _serve(pipe) -> None:
    """Run functions as a rank until the pipe is closed."""
    torch.set_num_threads(1)
    from tqdm import tqdm

    # The default lock of tqdm has a name in the system, which a killed process would leave there.
    tqdm.set_lock(threading.RLock())
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
            if dist.is_initialized():  # a program may have destroyed it
                # a rank that leaves early breaks connections that others still open
                dist.barrier()
                dist.destroy_process_group()
            _send(pipe, answer)
        except BaseException:
            with contextlib.suppress(OSError):  # closed, because another rank has failed before
                _send(pipe, (None, traceback.format_exc()))
