"""The entries on adapters in the manifest of a checkpoint that holds only these and the other
trained parameters.

    adapters    their settings: rank, alpha, targets ...
    base        the weights that they belong to: {"checksum", "dtype", "path"}
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import torch
from msgspec import Meta

from megazoo.checkpoint.format import ADAPTERS, BASE, DTYPES, Dtype
from megazoo.checkpoint.places import MANIFEST
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.shards import saved_entries
from megazoo.checkpoint.source import TensorSource
from megazoo.errors import UserError, advise
from megazoo.files import brief, convert
from megazoo.lora.checksum import checksum_of, checksum_on_disk
from megazoo.parallel.module import NamedParameter

Rank = Annotated[int, Meta(ge=1, le=2**20)]
Alpha = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
TargetName = Annotated[str, Meta(min_length=1, max_length=1000)]


@dataclass
class AdapterInfo:
    """The settings of a model's adapters: see `megazoo.lora.LoRASettings`."""

    rank: Rank
    alpha: Alpha
    dropout: Annotated[float, Meta(ge=0, lt=1)]
    targets: Annotated[list[TargetName], Meta(min_length=1, max_length=10_000)]
    rslora: bool
    rank_pattern: dict[TargetName, Rank]
    alpha_pattern: dict[TargetName, Alpha]


@dataclass
class BaseInfo:
    """The base weights of adapters.

    checksum: see checksum.py. dtype: the dtype of the checksum. path: the directory that the
    weights were read from; None if they were drawn from the seed.
    """

    checksum: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    dtype: Dtype
    path: Annotated[str, Meta(min_length=1, max_length=4096)] | None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the checksum."""
        return next(dtype for dtype, text in DTYPES.items() if text == self.dtype)


def entries_for_manifest(model: Any) -> dict:
    """Return the manifest's entries on a model's adapters and their base. Every rank of a replica
    calls it."""
    held = {entry.name for entry in saved_entries(model)}
    left_out = [entry for entry in model.entries() if entry.name not in held]
    path = model.weights_path or ""
    base = BaseInfo(
        checksum_of(left_out, model, model.dtype),
        DTYPES[model.dtype],
        path if path.isprintable() and path else None,
    )
    return {ADAPTERS: asdict(model.attached), BASE: asdict(base)}


def stored_in(checkpoint: Checkpoint) -> tuple[AdapterInfo, BaseInfo]:
    """Return the entries on adapters of a checkpoint that has some. UserError if they are
    invalid."""
    stored = checkpoint.attached
    try:
        adapters = convert(stored[ADAPTERS], AdapterInfo, ADAPTERS)
        base = convert(stored[BASE], BaseInfo, BASE)
        if unknown := stored[ADAPTERS].keys() - {f.name for f in fields(AdapterInfo)}:
            name = brief(min(unknown))
            raise UserError(f"adapters has the unknown key {name}: upgrade megazoo")
        for name in (*adapters.targets, *adapters.rank_pattern, *adapters.alpha_pattern):
            if not name.isprintable():
                raise UserError(f"adapters: {brief(name)} can't be the name of a target")
        if base.path and not base.path.isprintable():
            raise UserError(f"base.path is {brief(base.path)}: it must be printable")
    except UserError as error:
        raise UserError(f"{checkpoint.path / MANIFEST}: {error}") from None
    return adapters, base


def check_same(checkpoint: Checkpoint, model: Any) -> None:
    """Raise UserError unless a checkpoint has the settings and the base of a model's adapters, and
    the same trained parameters. Every rank of a replica calls it."""
    if not checkpoint.attached:
        raise UserError(
            f"{checkpoint.path} has no adapters, but the model has: load it before megazoo.lora.add"
        )
    stored_in(checkpoint)  # raises if they are invalid
    stored = checkpoint.attached[ADAPTERS]
    for key, value in json.loads(json.dumps(asdict(model.attached))).items():  # with lists
        if value != stored[key]:
            raise UserError(
                f"{checkpoint.path} has adapters with {key} {stored[key]}, but the model's "
                f"adapters have {value}: add the same adapters to the model"
            )
    held = {entry.name for entry in saved_entries(model)}
    for entry in model.entries():
        if entry.name not in held and entry.name in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.path} has {entry.name}, which is frozen in the model: train the same "
                "parameters as the saved run"
            )
        if entry.name in held and entry.name not in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.path} has no {entry.name}, which was frozen: freeze the same "
                "parameters as the saved run"
            )
    check_base(checkpoint, model)


def check_base(checkpoint: Checkpoint, model: Any) -> None:
    """Raise UserError if the adapters of a checkpoint belong to other weights than the model's.
    Every rank of a replica calls it.

    Weights of higher precision are rounded to the dtype in which the adapters were trained. Weights
    of lower precision can't be compared; then a warning is given.
    """
    _, base = stored_in(checkpoint)
    dtype = base.torch_dtype
    if model.dtype not in (dtype, torch.float32):
        if model.ctx.rank == 0:
            advise(
                f"the base of {checkpoint.path} can't be compared with the model's weights: they "
                f"are {_short(model.dtype)}, but the adapters were trained in {_short(dtype)}"
            )
        return
    left_out = [entry for entry in model.entries() if entry.name not in checkpoint.tensors]
    found = checksum_of(left_out, model, dtype)
    if found != base.checksum:
        raise _another_base(checkpoint, base, found, model.weights_path)


def check_base_on_disk(
    checkpoint: Checkpoint, entries: Iterable[NamedParameter], weights: TensorSource
) -> None:
    """Raise UserError if the adapters of a checkpoint belong to other weights than those on disk.

    entries: the parameters of the complete model.
    """
    _, base = stored_in(checkpoint)
    left_out = [entry for entry in entries if entry.name not in checkpoint.tensors]
    for entry in left_out:
        if entry.name not in weights.specs:
            raise UserError(
                f"{weights.path} has no {entry.name}: it is not the base of {checkpoint.path}"
            )
    found = checksum_on_disk(left_out, weights, base.torch_dtype)
    if found != base.checksum:
        raise _another_base(checkpoint, base, found, str(weights.path))


def _another_base(
    checkpoint: Checkpoint, base: BaseInfo, found: str, path: str | None
) -> UserError:
    expected, actual = base.path or "drawn from --seed", f" ({path})" if path else ""
    return UserError(
        f"the adapters of {checkpoint.path} belong to another base: its checksum is "
        f"{base.checksum} ({expected}), that of the model's weights is {found}{actual}"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
