"""The schema of the files of a checkpoint, and checks against it.

A manifest and a trainer.json may come from an untrusted source, and anyone can compute a new
checksum. So types and ranges are checked when they are read, before a value is used as the name of
a file or as a size.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from megazoo.checkpoint.format import (
    ATTACHED,
    DTYPES,
    Dtype,
    file_of_rank,
    writing_places,
)
from megazoo.errors import UserError
from megazoo.files import brief, convert
from megazoo.optim.base import STATES
from megazoo.sidecars import TEMPLATE_FILE

MOST = 2**53  # every JSON reader represents integers up to this exactly
Count = Annotated[int, Meta(ge=0, le=MOST)]
AtLeast1 = Annotated[int, Meta(ge=1, le=MOST)]
Ranks = Annotated[int, Meta(ge=1, le=2**20)]
AxisName = Annotated[str, Meta(pattern=r"^[a-z]{1,16}\Z")]
Crc32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Scale = Annotated[float, Meta(ge=1, le=sys.float_info.max)]


@dataclass
class Layout:
    """The sizes of the parallel axes of the run that wrote a checkpoint. folded: sizes of the
    folded axes that shard its tensors."""

    tp: Ranks
    pp: Ranks
    dp: Ranks
    folded: dict[AxisName, Ranks] = field(default_factory=dict)


@dataclass
class FileInfo:
    """The size of a file in bytes, and its checksum."""

    size: Count
    crc32: Crc32


@dataclass
class ShardInfo:
    """How a tensor is sharded: see `megazoo.parallel.shard.Shard`."""

    dim: Count
    parts: Annotated[list[AtLeast1], Meta(min_length=1, max_length=1024)]
    units: Annotated[list[AtLeast1], Meta(max_length=1024)]
    axis: AxisName = "tp"


@dataclass
class TensorInfo:
    """The description of a tensor. file: the name of its file, with {tp} in place of the tp rank,
    and the same for other axes."""

    shape: Annotated[list[Count], Meta(max_length=64)]
    dtype: Dtype
    shard: ShardInfo | Annotated[list[ShardInfo], Meta(min_length=1, max_length=2)] | None
    file: str

    @property
    def cuts(self) -> list[ShardInfo]:
        """The shards of the tensor, one per axis."""
        return self.shard if isinstance(self.shard, list) else [self.shard] if self.shard else []


@dataclass
class Manifest:
    """The contents of megazoo.json. Unknown keys are ignored: later versions may add some.

    adapters, base: what is attached to the model. Their values are checked by megazoo.lora.
    """

    format: Literal[1, 2]  # FORMAT_VERSION or FOLDED_VERSION
    family: str
    config: dict[str, Any]
    layout: Layout
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]
    crc32: Crc32
    adapters: dict[str, Any] | None = None
    base: dict[str, Any] | None = None


@dataclass
class LossScaleState:
    """The state of `megazoo.optim.loss_scale.LossScale`."""

    value: Scale
    good_steps: Count
    patience: Annotated[int, Meta(ge=-MOST, le=MOST)]


@dataclass
class OptimizerState:
    """The optimizer state in trainer.json, in addition to the tensors."""

    optimizer_steps: Count
    loss_scale: LossScaleState | None = None


def check_manifest(values: dict, file: Path) -> Manifest:
    """Convert a manifest to its dataclass; UserError with `file` for a value of another type, out
    of range, or that is not a file name."""
    try:
        for part in ("files", "tensors"):
            convert(values.get(part), dict[str, Any], part)
        manifest = convert({**values, "files": {}, "tensors": {}}, Manifest, "")
        _check_attached(manifest)
        for name, info in values["files"].items():
            _check_file_name(name)
            manifest.files[name] = convert(info, FileInfo, f"files.{name}")
        for name, info in values["tensors"].items():
            if len(name) > 1000 or not name.isprintable():
                raise UserError(f"{brief(name)} can't be the name of a tensor")
            manifest.tensors[name] = convert(info, TensorInfo, f"tensors.{name}")
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return manifest


def check_tensors(manifest: Manifest, file: Path) -> None:
    """Raise UserError, which names `file`, unless the files of each tensor are large enough for it,
    and each of its elements belongs to exactly one of the ranks that wrote them."""
    try:
        _check_tensors(manifest)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _check_file_name(name: str) -> None:
    """Raise UserError unless a name is that of a file in the manifest's directory, or of a chat
    template in additional_chat_templates."""
    if TEMPLATE_FILE.fullmatch(name):
        return
    if "/" in name or name in ("", ".", ".."):
        raise UserError(f"it names a file outside its directory: {name}")
    if "\0" in name or len(name.encode()) > 255:
        raise UserError(f"{brief(name)} can't be the name of a file")


def _check_attached(manifest: Manifest) -> None:
    """Raise UserError for an attachment without its base, or a base without an attachment."""
    missing = [key for key in ATTACHED if getattr(manifest, key) is None]
    if len(missing) == 1:
        raise UserError(
            f"{missing[0]} is missing: a checkpoint must contain both {' and '.join(ATTACHED)}, or "
            "neither"
        )


def _check_tensors(manifest: Manifest) -> None:
    item_sizes = {text: dtype.itemsize for dtype, text in DTYPES.items()}
    sizes = {name: info.size for name, info in manifest.files.items()}
    ranks = {**manifest.layout.folded, "tp": manifest.layout.tp}
    left: dict[tuple, int] = {}  # bytes of files that belong to no tensor yet
    for name, tensor in manifest.tensors.items():
        base, _, state = name.rpartition(".")
        if state in STATES and base in manifest.tensors:
            _check_same_cut(name, tensor, base, manifest.tensors[base])
        elements = _elements_held(name, tensor, ranks)
        writers = {cut.axis: ranks[cut.axis] for cut in tensor.cuts}
        place = (tensor.file, *writers.items())
        if place not in left:
            left[place] = _bytes_of_files(name, tensor.file, writers, sizes)
        left[place] -= elements * item_sizes[tensor.dtype]
        if left[place] < 0:
            raise UserError(f"{name} has shape {tensor.shape}: {tensor.file} is too small for it")


def _check_same_cut(name: str, tensor: TensorInfo, base: str, parameter: TensorInfo) -> None:
    """Raise UserError for an optimizer state with another shape or shard than its parameter."""
    if tensor.shape != parameter.shape:
        raise UserError(f"{name} has shape {tensor.shape}, but {base} has shape {parameter.shape}")
    if tensor.shard != parameter.shard:
        raise UserError(f"{name} is not sharded like {base}")


def _bytes_of_files(name: str, pattern: str, writers: dict[str, int], files: dict[str, int]) -> int:
    """Return the total bytes of the files of a tensor's writers. writers: their number along each
    axis. The loop ends at the first missing file, so it is never longer than the list of files."""
    for axis, size in writers.items():
        if size > 1 and f"{{{axis}}}" not in pattern:
            raise UserError(
                f"{name} is sharded over {size} {axis} ranks, but its file name {pattern} is the "
                f"same for all of them: it must contain {{{axis}}}"
            )
    total = 0
    for place in writing_places(writers):
        file = file_of_rank(pattern, place)
        if file not in files:
            raise UserError(f"{name}: {file} is not in the list of files")
        total += files[file]
    return total


def _elements_held(name: str, tensor: TensorInfo, ranks: dict[str, int]) -> int:
    """Return the number of elements of a tensor on all its writers, including copies.

    ranks: number of ranks along each axis. UserError for a shard that would omit elements or give
    one to two owners. For all others `Shard.cuts` gives each element exactly one owner.
    """
    shape, cuts = list(tensor.shape), tensor.cuts
    for what, place in (("dim", "dimension"), ("axis", "the axis")):
        values = [getattr(cut, what) for cut in cuts]
        if repeated := [value for value in values if values.count(value) > 1]:
            raise UserError(
                f"{name} has {len(repeated)} shards along {place} {repeated[0]}, but one is "
                "allowed: the manifest is damaged"
            )
    for cut in cuts:
        if cut.axis not in ranks:
            raise UserError(f"{name} is sharded over {cut.axis}, which the layout does not have")
        shape[cut.dim] = _length_held(name, tensor, cut, ranks[cut.axis])
    return math.prod(shape)


def _length_held(name: str, tensor: TensorInfo, shard: ShardInfo, ranks: int) -> int:
    """Return the length of a sharded dimension summed over the ranks, including copies."""
    shape = tensor.shape
    if shard.dim >= len(shape) or sum(shard.parts) != shape[shard.dim]:
        raise UserError(
            f"{name} has shape {shape}, but the parts {shard.parts} of dimension {shard.dim} don't "
            "add up to it"
        )
    units = shard.units or [1] * len(shard.parts)
    if len(units) != len(shard.parts):
        raise UserError(f"{name} has parts {shard.parts}, but units {shard.units}")
    held = 0
    for part, unit in zip(shard.parts, units, strict=True):
        count = part // unit
        if count >= ranks:
            held += part
        elif count == 0 or part % unit or ranks % count:
            raise UserError(
                f"{name}: {part} in units of {unit} can't be sharded over {shard.axis} {ranks}"
            )
        else:
            held += unit * ranks
    return held


def checked_state(trainer: dict, kind: type, file: Path) -> Any:
    """Convert a trainer.json to `kind`, a dataclass such as OptimizerState. Other keys are ignored.
    UserError names `file`."""
    try:
        return convert(trainer, kind, "")
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
