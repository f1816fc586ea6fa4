"""This rank's device, and its share of the machine's cores."""

import os

import torch

from megazoo.environment import local_rank, local_world_size
from megazoo.errors import UserError


def choose_device(device: str | torch.device, local_world: int | None = None) -> torch.device:
    """Choose this rank's device. "auto" is CUDA if each rank of this machine can have a device.

    local_world: ranks on this machine; None takes the launcher's word. UserError if CUDA has too
    few devices.
    """
    local_world = local_world or local_world_size()
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if available >= local_world else "cpu"
    kind = torch.device(device).type
    if kind == "cuda" and available < local_world:
        raise UserError(
            f"cuda: {local_world} ranks here but {available} CUDA devices: use fewer, or "
            "--device cpu"
        )
    return torch.device("cuda", local_rank()) if kind == "cuda" else torch.device("cpu")


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
