"""Ranks that make a call together first compare what they must have alike in it.

Each rank hashes what concerns an axis of the mesh, and the ranks along it reduce one number. Where
the numbers differ, they exchange what they hashed, and all of them raise the same UserError.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from zlib_ng.zlib_ng import crc32

from megazoo.errors import UserError
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext

# On CUDA the first calls are compared, and then every so many: the comparison goes over the network
# while the device computes, but the host that launches its work waits for it. A prime number, so
# that of a loop with several calls each has its turn.
CUDA_FIRST, CUDA_EVERY = 16, 17
SHOWN = 3  # differences that a message names
# Which ranks may give otherwise: names of directories on several machines, and what is returned.
OWN = ("directory", "load_directory", "return_count")
OF_REPLICA = ("num_microbatches",)  # which replicas may give otherwise
PIECE_ELEMENTS = 1 << 22  # of a tensor on CUDA, of which a checksum is made at once


@dataclass
class Terms:
    """What ranks that make a call together have alike, each value by a name for messages.

    everywhere: on all of them, such as settings. in_replica: on the ranks of one replica. rows: on
    the ranks that work on the same rows, those along tp and cp. replicas: on the ranks that have
    the same parameters, along cp and dp. parts: each rank along cp was given its part of the rows,
    which are then not compared over cp.
    """

    everywhere: dict[str, Any] = field(default_factory=dict)
    in_replica: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    replicas: dict[str, Any] = field(default_factory=dict)
    parts: bool = False

    def along(self, axis: str) -> dict[str, Any]:
        """Return what the ranks along an axis have alike."""
        terms = dict(self.everywhere)
        if axis != "dp":
            terms |= self.in_replica
        if axis == "tp" or (axis == "cp" and not self.parts):
            terms |= self.rows
        if axis in ("cp", "dp"):
            terms |= self.replicas
        return terms

    def take(self, arguments: Mapping[str, Any]) -> None:
        """Add the arguments of a call: tensors, which are of rows, and settings. None, and what is
        of other types, such as functions, is not compared."""
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                self.rows[name] = fingerprint(value)
            elif value is not None and _is_plain(value) and name not in OWN:
                of_rows, of_replica = name == "sequence_length", name in OF_REPLICA
                terms = self.rows if of_rows else self.in_replica if of_replica else self.everywhere
                terms[name] = value
        self.parts = self.parts or arguments.get("sequence_length") is not None

    def take_config(self, config: Any) -> None:
        """Add the fields of a model's config."""
        self.take({f"the model's {f.name}": getattr(config, f.name) for f in fields(config)})


def is_compared(ctx: ParallelContext, number: int) -> bool:
    """Return whether ranks compare a call: all calls, on CUDA some. number: of the calls that these
    ranks have made together."""
    return ctx.device.type != "cuda" or number <= CUDA_FIRST or number % CUDA_EVERY == 0


def agree(ctx: ParallelContext, call: str, terms: Terms, axes: tuple[str, ...]) -> None:
    """Raise UserError, on every rank along an axis, unless the ranks along it make the same call on
    the same terms."""
    for name in axes:
        axis = ctx.axis(name)
        mine = {"call": call, **terms.along(name)}
        if axis.size > 1 and not _are_equal(mine, axis):
            raise UserError(_difference(mine, name, ctx))


def sharing_axis(ctx: ParallelContext, *rows: torch.Tensor | None) -> Axis:
    """Return the ranks that share the work on rows: those of all replicas, if all were given the
    same ones; else those along cp, and each replica works on its own. Every rank calls it; the
    stages of a pipeline with the same rows: otherwise UserError."""
    dp, pp = ctx.dp, ctx.pp
    if dp.size * pp.size == 1 or not dist.is_initialized():
        return ctx.token_axis
    mine = {f"rows {i}": fingerprint(each, bits=True) for i, each in enumerate(rows)}
    if pp.size > 1 and not _are_equal(mine, pp):
        raise UserError(
            "the stages of a pipeline were given different rows: give all ranks of a replica the "
            "same ones"
        )
    return ctx.token_axis if dp.size == 1 or _are_equal(mine, dp) else ctx.cp


def fingerprint(value: Any, bits: bool | None = None) -> Any:
    """Return what is compared of a value: of a tensor its shape, its dtype and a checksum of its
    bits; of anything else the value itself.

    bits: whether there is a checksum; by default on the CPU only: it would wait for a device.
    """
    if not isinstance(value, torch.Tensor):
        return value
    bits = value.device.type == "cpu" if bits is None else bits
    dtype = str(value.dtype).removeprefix("torch.")
    return tuple(value.shape), dtype, _checksum(value) if bits else None


def _is_plain(value) -> bool:
    """Return whether equal values have equal texts on all ranks: numbers, strings and collections
    of them."""
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def _checksum(tensor: torch.Tensor) -> int:
    """Return a number that changes with the bits of a tensor and with their order. On CUDA the
    device computes it."""
    flat = tensor.detach().reshape(-1)
    if tensor.device.type == "cpu":
        return crc32(flat.contiguous().view(torch.uint8).numpy())
    return _weighted_sum(flat)


def _weighted_sum(flat: torch.Tensor) -> int:
    """Return the sum, modulo 2 ** 64, of a tensor's bits as integers, each multiplied by an odd
    number of its own."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(integers[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, len(bits), PIECE_ELEMENTS):
        piece = bits[first : first + PIECE_ELEMENTS].long()
        places = torch.arange(first, first + len(piece), device=flat.device)
        total += (piece * (2 * places + 1)).sum()
    return int(total)


def _are_equal(mine: Mapping[str, Any], axis: Axis) -> bool:
    """Return whether all ranks along an axis have equal values, by their hashes."""
    number = float(crc32(_text(mine).encode()))
    extremes = torch.tensor([number, -number], dtype=torch.float64)
    all_reduce(extremes, axis.group, dist.ReduceOp.MAX)
    largest, least = extremes.tolist()
    return largest == -least


def _text(value) -> str:
    """Return a text that is the same for equal values: 1, 1.0 and True; a list and its tuple;
    dictionaries in whatever order."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_text(k)}: {_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, float) and not value.is_integer():  # infinite, or not a number, too
        return repr(float(value))
    return repr(int(value)) if isinstance(value, int | float) else repr(value)


def _difference(mine: dict[str, Any], axis: str, ctx: ParallelContext) -> str:
    """Return, on all ranks along an axis, what differs between them, and on which."""
    every: list = [mine] * ctx.axis(axis).size
    dist.all_gather_object(every, mine, group=ctx.axis(axis).group)
    ranks = [f"rank {ctx.rank_at(**{axis: i})} ({axis} {i})" for i in range(len(every))]
    names = list(dict.fromkeys(name for terms in every for name in terms))
    if len({terms["call"] for terms in every}) > 1:
        names = ["call"]
    differences = []
    for name in names:
        values = [terms.get(name) for terms in every]
        first = _text(values[0])
        other = next((i for i, value in enumerate(values) if _text(value) != first), None)
        if other is not None:
            here, there = _shown(values[0], values[other])
            differences.append(f"{name} is {here} on {ranks[0]}, {there} on {ranks[other]}")
    more = len(differences) - SHOWN
    told = "; ".join(differences[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
    if names == ["call"]:
        return (
            f"ranks make different calls: {told}; all ranks make the same calls in the same order"
        )
    return f"ranks disagree in {mine['call']}: {told}; {RULES[axis]}"


RULES = {
    "tp": "ranks along tp need the same rows and settings",
    "cp": "ranks along cp need the same whole rows, settings and weights",
    "dp": "replicas need the same settings and weights",
    "pp": "the stages of a pipeline need the same settings",
}


def _shown(here, there) -> tuple[str, str]:
    """Return two different values in a few characters: of tensors, what of them differs."""
    if isinstance(here, tuple) and isinstance(there, tuple):
        for what, a, b in zip(("of the shape", "of the dtype"), here, there, strict=False):
            if a != b:
                return f"{what} {a}", f"{what} {b}"
        return "one tensor", "another of the same shape"
    a, b = ("a tensor" if isinstance(v, tuple) else f"{v!r:.60}" for v in (here, there))
    return a, b
