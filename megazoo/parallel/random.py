"""Randomness without state: every draw is seeded by what it is for, so nothing has to be saved or
restored."""

import hashlib
from contextlib import contextmanager

import torch


def derive_seed(*what: int | str) -> int:
    """A 63-bit seed for the thing named by `what`: equal names give equal seeds on every rank and
    machine."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int, device: torch.device):
    """Within this block torch's default generator of `device` draws from `seed`; afterwards it is
    as it was."""
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
