"""Randomness without state: each draw is seeded by what it is for, and nothing has to be saved."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*what: int | str) -> int:
    """Return a 63-bit seed for the thing named by `what`: equal names give equal seeds, on every
    rank and machine."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def all_seeded(seed: int) -> Iterator[None]:
    """Let the default generators of Python, NumPy and torch, on the CPU, draw from `seed` within
    this block; afterwards they are as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        with seeded(seed, torch.device("cpu")):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch's default generator of `device` draw from `seed` within this block; afterwards it
    is as it was."""
    generator = (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
