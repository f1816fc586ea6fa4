"""A checksum of weights that is the same in every parallel layout.

It is a sum mod 2**64 over the elements. Each summand is the element's bits, times an odd number
for each of its indices in the global tensor. The odd numbers also depend on the tensor's name and
shape. So each rank sums its elements in any order, and the result is the same in every parallel
layout. If one element differs, the checksum differs. If elements have changed places, it differs
except with a probability of at most 2**-32. The checksum detects accidental changes, not forgery.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from megazoo.checkpoint.source import TensorSource
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.shard import Box, ParameterSpec, Piece, in_parts
from megazoo.parallel.storage import in_memory

BITS = {2: torch.int16, 4: torch.int32}  # the integer type of an element's bits, by its bytes
AT_ONCE = 1 << 18  # elements per chunk: their products stay in the cache of a core
READ_AT_ONCE = 1 << 21  # elements of a file per chunk
# from splitmix64 (Steele, Lea and Flood 2014): the step of the counter, and the two multipliers
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class _Sums(NamedTuple):
    """This rank's sum for a model, and the parameter versions that it belongs to."""

    of: tuple
    total: int


# computed once per model: frozen weights don't change
_known: WeakKeyDictionary = WeakKeyDictionary()


def checksum_of(entries: Iterable[NamedParameter], model: Any, dtype: torch.dtype) -> str:
    """Return the checksum of weights in a dtype, as 16 hexadecimal digits.

    It is the same on every rank and in every layout. Every rank of a replica calls it; with folded
    axes, every rank of all replicas. entries: the parameters of this rank.
    """
    entries = list(entries)
    values = (dtype, *((e.name, id(e.parameter), _version_of(e.parameter)) for e in entries))
    if model not in _known or _known[model].of != values:
        total = sum(
            _sum_of_entry(entry, model.ctx, dtype)
            for entry in in_memory(model, entries)
            if not model.ctx.folded or entry.is_first_replica(model.ctx)
        )
        _known[model] = _Sums(values, _signed(total))
    total = torch.tensor(_known[model].total)  # on the CPU
    shared_out = [model.ctx.token_axis] if model.ctx.folded else []
    all_reduce_over(total, [model.ctx.tp, model.ctx.pp, *shared_out])
    return f"{total.item() % 2**64:016x}"


def checksum_on_disk(
    entries: Iterable[NamedParameter], weights: TensorSource, dtype: torch.dtype
) -> str:
    """Return the checksum of weights on disk, which are read a few megabytes at a time.

    entries: the parameters of the complete model that are counted.
    """
    total = 0
    for entry in entries:
        bounds = tuple((0, size) for size in entry.spec.shape)
        for box in in_parts(bounds, READ_AT_ONCE):
            values = torch.empty([stop - start for start, stop in box], dtype=dtype)
            weights.read_pieces(entry.name, values, entry.spec, [Piece(box, (0,) * len(box))])
            total += _sum_of_box(entry.name, entry.spec, box, values)
    return f"{total % 2**64:016x}"


@torch.no_grad()
def _sum_of_entry(entry: NamedParameter, ctx: ParallelContext, dtype: torch.dtype) -> int:
    """Return the sum over the elements of a parameter that count on this rank."""
    return sum(
        _sum_of_box(entry.name, entry.spec, piece.box, entry.parameter[piece.index()], dtype)
        for piece in entry.counted_pieces(ctx)
    )


def _sum_of_box(
    name: str,
    spec: ParameterSpec,
    box: Box,
    values: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> int:
    """Return the sum over a box of a global tensor. dtype: convert the values to it first."""
    dtype = dtype or values.dtype
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    values = values.flatten(1) if values.dim() > 1 else values[:, None]
    rows, *others = (
        _factors(name, spec, dim, bounds).to(total.device) for dim, bounds in enumerate(box)
    )
    columns = rows.new_ones(1)
    for factors in others:
        columns = (columns[:, None] * factors).flatten()
    count = max(1, min(len(values), AT_ONCE // max(1, len(columns))))
    products = rows.new_empty(count, len(columns))  # reused: allocating each time is far slower
    for some, factors in zip(values.split(count), rows.split(count), strict=True):
        bits = some.to(dtype).view(BITS[dtype.itemsize])
        some_products = torch.mul(bits, columns, out=products[: len(bits)])
        total += (some_products.sum(1) * factors).sum()
    return int(total)


def _factors(name: str, spec: ParameterSpec, dim: int, bounds: tuple[int, int]) -> torch.Tensor:
    """Return the odd factors of the indices bounds[0] to bounds[1] - 1 of a dimension of a global
    tensor: int64 [indices]."""
    what = f"{name}/{spec.shape}/{dim}".encode()
    start = int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")
    mixed = torch.arange(*bounds) * _signed(STEP) + _signed(start)
    for shift, multiplier in ((30, FIRST), (27, SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(multiplier)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _version_of(parameter: torch.Tensor) -> int:
    """Return a number that changes when a parameter is changed in place."""
    return 0 if parameter.is_inference() else parameter._version


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 to the right without its sign (a logical shift)."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Return the int64 that is equal to a number mod 2**64."""
    return (number + 2**63) % 2**64 - 2**63
