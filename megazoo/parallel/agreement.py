"""Before ranks make a call together, they compare the values that must be equal in it.

Each rank hashes the values for an axis of the mesh, and the ranks along it reduce one number. If
the numbers differ, they exchange the values, and all of them raise the same UserError.
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

# On CUDA the first CUDA_FIRST calls are compared, and then every CUDA_EVERY-th: the host waits for
# the comparison. A prime number, so that in a loop with several calls each one is compared.
CUDA_FIRST, CUDA_EVERY = 16, 17
SHOWN = 3  # maximum number of differences in a message
# May differ between ranks: directories on several machines, the choice of what is returned, and the
# tensors of a loss, which only the last stage has.
OWN = ("directory", "load_directory", "return_count", "named")
OF_REPLICA = ("num_microbatches",)  # may differ between replicas
PIECE_ELEMENTS = 1 << 22  # chunk size for the checksum of a tensor on CUDA


@dataclass
class Terms:
    """The values that must be equal on the ranks that make a call together, by their names in
    messages.

    everywhere: on all ranks, such as settings. in_replica: on the ranks of one replica. rows: on
    the ranks that work on the same rows, those along tp and cp. replicas: on the ranks with the
    same parameters, along cp and dp. parts: whether each cp rank was given its part of the rows,
    which are then not compared over cp.
    """

    everywhere: dict[str, Any] = field(default_factory=dict)
    in_replica: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    replicas: dict[str, Any] = field(default_factory=dict)
    parts: bool = False

    def along(self, axis: str) -> dict[str, Any]:
        """Return the values that must be equal along an axis."""
        terms = dict(self.everywhere)
        if axis != "dp":
            terms |= self.in_replica
        if axis == "tp" or (axis == "cp" and not self.parts):
            terms |= self.rows
        if axis in ("cp", "dp"):
            terms |= self.replicas
        return terms

    def take(self, arguments: Mapping[str, Any]) -> None:
        """Add the arguments of a call: tensors, which are rows, and settings. None and other types,
        such as functions, are not compared, except by their attribute `compared`."""
        for name, value in arguments.items():
            value = getattr(value, "compared", value)
            if isinstance(value, torch.Tensor):
                self.rows[name] = fingerprint(value)
            elif value is not None and _is_plain(value) and name not in OWN:
                of_rows, of_replica = name == "sequence_length", name in OF_REPLICA
                terms = self.rows if of_rows else self.in_replica if of_replica else self.everywhere
                terms[name] = value
        self.parts = self.parts or arguments.get("sequence_length") is not None

    def take_config(self, config: Any) -> None:
        """Add the fields of the config of a model."""
        self.take({f"the model's {f.name}": getattr(config, f.name) for f in fields(config)})


def is_compared(ctx: ParallelContext, number: int) -> bool:
    """Return whether ranks compare a call: always, on CUDA sometimes. number: of the calls that
    these ranks have made together."""
    return ctx.device.type != "cuda" or number <= CUDA_FIRST or number % CUDA_EVERY == 0


def agree(ctx: ParallelContext, call: str, terms: Terms, axes: tuple[str, ...]) -> None:
    """Raise UserError, on every rank along an axis, unless the ranks along it make the same call
    with the same values."""
    for name in axes:
        axis = ctx.axis(name)
        mine = {"call": call, **terms.along(name)}
        if axis.size > 1 and not _are_equal(mine, axis):
            raise UserError(_difference(mine, name, ctx))


def sharing_axis(ctx: ParallelContext, *rows: torch.Tensor | None) -> Axis:
    """Return the ranks that divide the work on rows: those of all replicas if all have the same
    rows; otherwise those along cp. Every rank calls it. UserError if the stages of a pipeline have
    different rows."""
    dp, pp = ctx.dp, ctx.pp
    if dp.size * pp.size == 1 or not dist.is_initialized():
        return ctx.token_axis
    mine = {f"rows {i}": fingerprint(each, bits=True) for i, each in enumerate(rows)}
    if pp.size > 1 and not _are_equal(mine, pp):
        raise UserError(
            "the stages of a pipeline were given different rows: pass the same rows on all ranks "
            "of a replica"
        )
    return ctx.token_axis if dp.size == 1 or _are_equal(mine, dp) else ctx.cp


def fingerprint(value: Any, bits: bool | None = None) -> Any:
    """Return the compared value: for a tensor its shape, dtype and a checksum of its bits;
    otherwise the value.

    bits: whether to compute the checksum; default: on the CPU only, because it would wait for a
    device.
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
    """Return a number that depends on the bits of a tensor and their order. On CUDA it is computed
    on the device."""
    flat = tensor.detach().reshape(-1)
    if tensor.device.type == "cpu":
        return crc32(flat.contiguous().view(torch.uint8).numpy())
    return _weighted_sum(flat)


def _weighted_sum(flat: torch.Tensor) -> int:
    """Return the sum, modulo 2 ** 64, of a tensor's bits as integers, each multiplied by a
    different odd number."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(integers[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, len(bits), PIECE_ELEMENTS):
        piece = bits[first : first + PIECE_ELEMENTS].long()
        places = torch.arange(first, first + len(piece), device=flat.device)
        total += (piece * (2 * places + 1)).sum()
    return int(total)


def _are_equal(mine: Mapping[str, Any], axis: Axis) -> bool:
    """Return whether all ranks along an axis have equal values, from their hashes."""
    number = float(crc32(_text(mine).encode()))
    extremes = torch.tensor([number, -number], dtype=torch.float64)
    all_reduce(extremes, axis.group, dist.ReduceOp.MAX)
    largest, least = extremes.tolist()
    return largest == -least


def _text(value) -> str:
    """Return a text that is the same for equal values: 1, 1.0 and True; a list and a tuple;
    dictionaries in any order."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_text(k)}: {_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, float) and not value.is_integer():  # including infinity and NaN
        return repr(float(value))
    return repr(int(value)) if isinstance(value, int | float) else repr(value)


def _difference(mine: dict[str, Any], axis: str, ctx: ParallelContext) -> str:
    """Return, on all ranks along an axis, the message with the differences and their ranks."""
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
            f"ranks make different calls: {told}; all ranks must make the same calls in the "
            "same order"
        )
    return f"ranks disagree in {mine['call']}: {told}; {RULES[axis]}"


RULES = {
    "tp": "ranks along tp need the same rows and settings",
    "cp": "ranks along cp need the same whole rows, settings and weights",
    "dp": "replicas need the same settings and weights",
    "pp": "the stages of a pipeline need the same settings",
}


def _shown(here, there) -> tuple[str, str]:
    """Return two different values as short texts; for tensors, their difference."""
    if isinstance(here, tuple) and isinstance(there, tuple):
        for what, a, b in zip(("of the shape", "of the dtype"), here, there, strict=False):
            if a != b:
                return f"{what} {a}", f"{what} {b}"
        return "one tensor", "another of the same shape"
    a, b = ("a tensor" if isinstance(v, tuple) else f"{v!r:.60}" for v in (here, there))
    return a, b
