"""Start a rank: rendezvous, initialise torch.distributed, and select the device."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megazoo import environment
from megazoo.environment import is_rank_zero, world_size
from megazoo.errors import UserError
from megazoo.parallel.cpu import products
from megazoo.parallel.device import share_cores
from megazoo.parallel.groups import CUDA_BACKENDS


@contextmanager
def rendezvous_errors() -> Iterator[None]:
    """Raise UserError if the rendezvous within this block fails."""
    try:
        yield
    except dist.DistError as error:
        where = " ".join(
            f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT")
        )
        raise UserError(
            f"rank {environment.rank()} of {environment.world_size()} did not meet the others at "
            f"{where}: {str(error).splitlines()[0]}",
            exit_code=1,
        ) from error


def world_and_rank() -> tuple[int, int]:
    """Return the world size and this rank, from torch.distributed or the launcher."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return environment.world_size(), environment.rank()


def take(device: torch.device) -> None:
    """Select the device of this rank. On the CPU, limit the rank to its share of the cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        share_cores()


def initialize(device: torch.device, world: int, timeout: timedelta) -> None:
    """Initialise torch.distributed: gloo for CPU tensors, NCCL for GPU tensors.

    NCCL gets this rank's device. It connects the world immediately, while all ranks are here, and
    splits all other groups from it. A world of one rank needs no connections.
    """
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return
    bound = device if world > 1 else None
    dist.init_process_group(CUDA_BACKENDS, timeout=timeout, device_id=bound)


def agree_on_name(device: torch.device) -> str:
    """Return a name for a context, the same on all ranks. Also make all ranks use rank 0's methods
    of CPU matrix products: the machines of a job may differ."""
    products.follow(None)
    told = [(uuid.uuid4().hex, products.methods() if device.type == "cpu" else None)]
    dist.broadcast_object_list(told)
    ((name, methods),) = told
    products.follow(methods)
    return name


def after_rank_zero(work: Callable[[], None]):
    """Run `work` on rank 0 while all others wait without a timeout, unlike in a process group.

    Returns:
        The store of the ranks. Keep a reference until the process group exists, which may use it.
    """
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
