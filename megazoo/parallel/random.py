"""Randomness without state: each draw is seeded by its purpose, so no state has to be saved."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*what: int | str) -> int:
    """Return a 63-bit seed derived from the names `what`. Equal names give equal seeds on every
    rank and machine."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def all_seeded(seed: int) -> Iterator[None]:
    """Seed the default CPU generators of Python, NumPy and torch within this block. Their states
    are restored afterwards."""
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
    """Seed torch's default generator of `device` within this block. Its state is restored
    afterwards."""
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
