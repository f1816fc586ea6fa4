"""What may stand in the files of a checkpoint, and the check that it does.

A manifest and a trainer.json may come from anywhere, and a checksum is easily made anew. So types
and ranges are checked when they are read, before any of their values names a file or a size.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from megazoo.checkpoint.format import (
    DTYPES,
    file_of_rank,
    writing_places,
)
from megazoo.errors import UserError
from megazoo.files import brief, convert
from megazoo.optim.base import STATES

MOST = 2**53  # the integers that every reader of JSON has exactly
Count = Annotated[int, Meta(ge=0, le=MOST)]
AtLeast1 = Annotated[int, Meta(ge=1, le=MOST)]
Ranks = Annotated[int, Meta(ge=1, le=2**20)]
AxisName = Annotated[str, Meta(pattern=r"^[a-z]{1,16}\Z")]
Crc32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Rank = Annotated[int, Meta(ge=1, le=2**20)]  # of an adapter
Alpha = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
TargetName = Annotated[str, Meta(min_length=1, max_length=1000)]
Scale = Annotated[float, Meta(ge=1, le=sys.float_info.max)]
Dtype = Literal["F32", "BF16", "F16"]  # those of DTYPES
RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
WandbId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.=~-]{1,128}\Z")]


@dataclass
class Layout:
    """The ranks of the run that wrote a checkpoint; folded: along axes that cut its tensors."""

    tp: Ranks
    pp: Ranks
    dp: Ranks
    folded: dict[AxisName, Ranks] = field(default_factory=dict)


@dataclass
class FileInfo:
    """What a file's bytes are."""

    size: Count
    crc32: Crc32


@dataclass
class ShardInfo:
    """How a tensor is cut: see `megazoo.parallel.shard.Shard`."""

    dim: Count
    parts: Annotated[list[AtLeast1], Meta(min_length=1, max_length=1024)]
    units: Annotated[list[AtLeast1], Meta(max_length=1024)]
    axis: AxisName = "tp"


@dataclass
class TensorInfo:
    """What a tensor is, and the name of its file, with {tp} where the tp rank's number stands, and
    likewise of other axes."""

    shape: Annotated[list[Count], Meta(max_length=64)]
    dtype: Dtype
    shard: ShardInfo | Annotated[list[ShardInfo], Meta(min_length=1, max_length=2)] | None
    file: str

    @property
    def cuts(self) -> list[ShardInfo]:
        """Its cuts, over an axis each."""
        return self.shard if isinstance(self.shard, list) else [self.shard] if self.shard else []


@dataclass
class AdapterInfo:
    """What the adapters of a model are: see `megazoo.lora.LoRASettings`."""

    rank: Rank
    alpha: Alpha
    dropout: Annotated[float, Meta(ge=0, lt=1)]
    targets: Annotated[list[TargetName], Meta(min_length=1, max_length=10_000)]
    rslora: bool
    rank_pattern: dict[TargetName, Rank]
    alpha_pattern: dict[TargetName, Alpha]


@dataclass
class BaseInfo:
    """Which weights adapters belong to: see base.py. dtype: in which they were summed up. path: the
    directory that they were read from; None if they were drawn from the seed."""

    checksum: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    dtype: Dtype
    path: Annotated[str, Meta(min_length=1, max_length=4096)] | None


@dataclass
class Manifest:
    """megazoo.json. Other keys are left for later versions of this format."""

    format: Literal[1, 2]  # FORMAT_VERSION or FOLDED_VERSION
    family: str
    config: dict[str, Any]
    layout: Layout
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]
    crc32: Crc32
    adapters: AdapterInfo | None = None
    base: BaseInfo | None = None


@dataclass
class LossScaleState:
    """See `megazoo.optim.loss_scale.LossScale`."""

    value: Scale
    good_steps: Count
    patience: Annotated[int, Meta(ge=-MOST, le=MOST)]


@dataclass
class OptimizerState:
    """What trainer.json has of an optimizer, beside its tensors."""

    optimizer_steps: Count
    loss_scale: LossScaleState | None = None


@dataclass
class StreamPosition:
    """Where a streamed source goes on: see `megazoo.data.streaming.Position`."""

    sample: Count
    epoch: Count
    document: Count
    tokens: Count
    state: dict[str, Any] | None
    version: Annotated[str, Meta(max_length=100)] = ""


@dataclass
class DataSource:
    """What a source of data was when it was trained on, and where it goes on, if it is streamed."""

    source: str
    bytes: Count
    documents: Count
    checksum: Count
    position: StreamPosition | None = None


@dataclass
class TrainingState:
    """What trainer.json has of a run of the training program. settings: see
    `megazoo.cli.run.settings_to_resume`."""

    step: Count
    consumed_samples: Count
    consumed_tokens: Count
    settings: dict[str, Any]
    wandb_run: WandbId | None = None
    trackio_run: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    run: RunId | None = None
    data: list[DataSource] | None = None


def check_manifest(values: dict, file: Path) -> Manifest:
    """Return a manifest as its dataclass; UserError names `file` and what of it is not of its type,
    out of its range, or no name of a file."""
    try:
        for part in ("files", "tensors"):
            convert(values.get(part), dict[str, Any], part)
        manifest = convert({**values, "files": {}, "tensors": {}}, Manifest, "")
        _check_base(manifest)
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
    """Raise UserError, which names `file`, unless each tensor lies in files that are large enough
    for it, and each of its elements is owned by one of those that wrote them."""
    try:
        _check_tensors(manifest)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _check_file_name(name: str) -> None:
    """Refuse what is no plain name of a file in the manifest's own directory."""
    if "/" in name or name in ("", ".", ".."):
        raise UserError(f"it names a file outside its directory: {name}")
    if "\0" in name or len(name.encode()) > 255:
        raise UserError(f"{brief(name)} can't be the name of a file")


def _check_base(manifest: Manifest) -> None:
    """Refuse adapters without a base, a base without adapters, and text in them that no terminal
    and no file's name can have."""
    adapters, base = manifest.adapters, manifest.base
    if (adapters is None) != (base is None):
        missing = "adapters" if adapters is None else "base"
        raise UserError(f"{missing} is missing: a checkpoint has adapters and their base, or none")
    if adapters is None or base is None:
        return
    texts = [*adapters.targets, *adapters.rank_pattern, *adapters.alpha_pattern, base.path or "-"]
    for text in texts:
        if not text.isprintable():
            raise UserError(f"{brief(text)} can't be the name of a target, or of a directory")


def _check_tensors(manifest: Manifest) -> None:
    item_sizes = {text: dtype.itemsize for dtype, text in DTYPES.items()}
    sizes = {name: info.size for name, info in manifest.files.items()}
    ranks = {**manifest.layout.folded, "tp": manifest.layout.tp}
    left: dict[tuple, int] = {}  # bytes of files that no tensor has yet
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
    """Refuse an optimizer's state that has not the shape, or the cut, of its parameter."""
    if tensor.shape != parameter.shape:
        raise UserError(f"{name} has shape {tensor.shape}, but {base} has shape {parameter.shape}")
    if tensor.shard != parameter.shard:
        raise UserError(f"{name} is not cut as {base} is")


def _bytes_of_files(name: str, pattern: str, writers: dict[str, int], files: dict[str, int]) -> int:
    """The bytes of the files that a tensor's writers have, so many along each axis. It ends at the
    first that is missing, so that it is never longer than the list of files."""
    for axis, size in writers.items():
        if size > 1 and f"{{{axis}}}" not in pattern:
            raise UserError(f"{name} has one file, {pattern}, for {size} {axis} ranks")
    total = 0
    for place in writing_places(writers):
        file = file_of_rank(pattern, place)
        if file not in files:
            raise UserError(f"{name}: {file} can't be read: it is none of its files")
        total += files[file]
    return total


def _elements_held(name: str, tensor: TensorInfo, ranks: dict[str, int]) -> int:
    """The elements of a tensor that all its writers have, copies included. ranks: along each axis.

    Refuses a cut that would leave elements out or give one to two owners. What is not refused here
    `Shard.cuts` shares out so that each element has one owner.
    """
    shape, cuts = list(tensor.shape), tensor.cuts
    for what in ("dim", "axis"):
        if len({getattr(cut, what) for cut in cuts}) < len(cuts):
            raise UserError(f"{name} is cut twice by one {what}")
    for cut in cuts:
        if cut.axis not in ranks:
            raise UserError(f"{name} is cut over {cut.axis}, which the layout has not")
        shape[cut.dim] = _length_held(name, tensor, cut, ranks[cut.axis])
    return math.prod(shape)


def _length_held(name: str, tensor: TensorInfo, shard: ShardInfo, ranks: int) -> int:
    """What the ranks of a cut's axis have of its dimension together."""
    shape = tensor.shape
    if shard.dim >= len(shape) or sum(shard.parts) != shape[shard.dim]:
        raise UserError(
            f"{name} has shape {shape}, which parts {shard.parts} of dimension {shard.dim} "
            "don't make up"
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
                f"{name}: {part} in units of {unit} can't be shared by {shard.axis} {ranks}"
            )
        else:
            held += unit * ranks
    return held


def checked_state(trainer: dict, kind: type, file: Path) -> Any:
    """Return megazoo's own part of a trainer.json as `kind`, OptimizerState or TrainingState; what
    else a user keeps there is not looked at. UserError names `file`."""
    try:
        return convert(trainer, kind, "")
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
