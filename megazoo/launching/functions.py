"""`megazoo.launch`: call a function on every rank of a layout on this machine."""

import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megazoo.environment import rank
from megazoo.errors import UserError
from megazoo.launching.local_ranks import LocalRanks, name_of
from megazoo.launching.orphans import end_with_launcher
from megazoo.parallel.context import DEFAULT_TIMEOUT, ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.sizes import check_sizes, data_parallel_size_for
from megazoo.parallel.startup import world_and_rank


def launch(
    function: Callable[[ParallelContext], Any],
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    device: str | torch.device = "auto",
    timeout: timedelta = DEFAULT_TIMEOUT,
    **settings: Any,
) -> Any:
    """Call function(ctx) on every rank of a layout, and return the result of rank 0.

    It forks tp x pp x cp x dp ranks of this process, in a script or a notebook. With one rank, or
    if a launcher such as torchrun started the ranks, it calls the function in this process and
    returns this rank's result.

    Args:
        function: called with the context of the rank. Its result on rank 0 must be picklable if
            ranks are forked; a tensor must be on the CPU.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        dp: number of replicas; default: 1, or the number for which a launcher started ranks.
        device: see `ParallelContext.from_torch`.
        timeout: see `ParallelContext.from_torch`.
        settings: further fields of `Layout`, such as ep=2 or schedule="zb-v".

    Raises:
        UserError: a size is invalid, this process has initialized CUDA, or a rank raised UserError.
        RuntimeError: a rank raised another error or died. The message names the rank, and a note
            has the traceback.

    Example:
        def loss(ctx):
            model = megazoo.from_config("gpt2-tiny", ctx)
            return model.train_batch(ids, labels=ids).item()

        megazoo.launch(loss, tp=2)
    """
    check_sizes(tp, pp, cp, 1, dp)
    world, _ = world_and_rank()
    if world > 1:
        dp = data_parallel_size_for(world, tp, pp, dp, cp)
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=dp or 1, **settings)
    if world > 1 or layout.ranks == 1:
        return function(ParallelContext.of_layout(layout, device, timeout))
    if torch.cuda.is_initialized():
        raise UserError(
            "megazoo.launch forks ranks, which can't use CUDA after this process has initialized "
            "it: call it before any use of CUDA, in a new process or a restarted notebook"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UserError("megazoo.launch must be called in the main thread: it handles signals")
    deaths: list[str] = []
    with tempfile.TemporaryDirectory(prefix="megazoo-launch-") as directory:

        def work() -> None:
            end_with_launcher()
            outcome = Path(directory) / str(rank())
            try:
                result = function(ParallelContext.of_layout(layout, device, timeout))
                outcome.write_bytes(pickle.dumps(result if rank() == 0 else None))
            except BaseException as error:
                of_user = isinstance(error, UserError)
                line = str(error) if of_user else f"{type(error).__name__}: {error}"
                found = of_user, " ".join(line.split()), traceback.format_exc()
                outcome.write_bytes(pickle.dumps(found))
                sys.exit(1)

        ranks = LocalRanks(layout, work, report=deaths.append)
        ranks.run()
        if ranks.received is not None:
            signal.raise_signal(ranks.received)  # to the handlers of this process
            raise RuntimeError(f"the ranks ended after {signal.Signals(ranks.received).name}")
        if deaths:
            raise RuntimeError(deaths[0])
        outcome = Path(directory) / str(ranks.failed or 0)
        if not outcome.is_file():
            where = name_of(ranks.failed or 0, ranks.ctx)
            raise RuntimeError(f"{where}: it ended without a result")
        found = pickle.loads(outcome.read_bytes())
    if ranks.failed is None:
        return found
    of_user, line, text = found
    where = name_of(ranks.failed, ranks.ctx)
    error = (UserError if of_user else RuntimeError)(f"{where}: {line}")
    error.add_note(text)
    raise error
