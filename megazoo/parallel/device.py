"""This rank's device, and its share of the machine's cores."""

import functools
import os
import warnings

import torch

from megazoo.environment import has_devices_of_its_own, is_rank_zero, local_rank, local_world_size
from megazoo.errors import UserError, advise


def choose_device(device: str | torch.device, local_world: int | None = None) -> torch.device:
    """Choose this rank's device: the one with its local rank as index, or the first one if the
    launcher shows each rank separate devices.

    "auto" is CUDA if each rank of this machine can have a device, otherwise the CPU; if there are
    too few devices, rank 0 warns. local_world: the number of ranks that this process will start;
    None: the number that the launcher reports. UserError if CUDA has too few devices.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = local_world or local_world_size()
    bound = local_world is None and available > 0 and has_devices_of_its_own()
    enough = bound or available >= ranks
    if device == "auto":
        device = "cuda" if enough else "cpu"
        if available and not enough and local_world is None and is_rank_zero():
            _tell_fallback(ranks, available)
    kind = torch.device(device).type
    if kind == "cuda" and not enough:
        raise UserError(
            f"cuda: {ranks} ranks here but {available} CUDA devices: use fewer, or --device cpu"
        )
    if kind != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", local_rank() if available >= ranks else 0)


@functools.cache  # called by the program, and again by the context
def _tell_fallback(ranks: int, available: int) -> None:
    advise(
        f"this machine has {ranks} ranks but {available} CUDA device{'s' * (available > 1)}: all "
        f"run on the CPU; start {available} here to use CUDA"
    )


def set_fp32_precision(precision: str) -> None:
    """Set the precision of fp32 matrix products on CUDA: "tf32" or "ieee" (torch's default). "tf32"
    uses tensor cores, which round the factors to a 10-bit mantissa; sums are fp32. CPUs are not
    affected.

    Other settings of torch are not suitable. set_float32_matmul_precision also changes products on
    CPUs. After `matmul.fp32_precision`, get_float32_matmul_precision raises an error, and
    torch.compile calls it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch advise matmul.fp32_precision
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def share_cores() -> None:
    """Give each of several local ranks its share of the machine's cores, so that together they
    don't oversubscribe."""
    if local_world_size() > 1:
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        torch.set_num_threads(max(1, cores // local_world_size()))
