"""Reads boxes of global tensors from a checkpoint of any layout."""

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open

from megazoo.checkpoint.format import DTYPES, FORMAT_VERSION, MANIFEST, TRAINER, find_checkpoint
from megazoo.errors import UserError
from megazoo.models import FAMILIES, config_from_dict, family_of
from megazoo.models.base import Model
from megazoo.optim import MASTER, MOMENTS
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, Piece, Shard, overlap


def describe(spec: ParameterSpec, dtype: torch.dtype, file: str) -> dict:
    """A tensor's line in the manifest. file: its file's name, with {tp} where the rank's number stands."""
    shard = asdict(spec.shard) if spec.shard else None
    return {"shape": list(spec.shape), "dtype": DTYPES[dtype], "shard": shard, "file": file}


class Checkpoint:
    """One step on disk, seen as named global tensors of which any box can be read.

    path: the step's directory, or the one above for the latest. Raises UserError if it is none, or not ours to read.
    """

    def __init__(self, path: str | Path):
        self.path = find_checkpoint(path)
        try:
            self.manifest = json.loads((self.path / MANIFEST).read_text())
            version, self.layout = self.manifest["format"], self.manifest["layout"]
            self.family, self.config, self.tensors = (self.manifest[key] for key in ("family", "config", "tensors"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path / MANIFEST} is not a manifest: {error!r}") from error
        if version != FORMAT_VERSION:
            raise UserError(f"{self.path} has format {version}; this megazoo reads {FORMAT_VERSION}: upgrade megazoo")
        self._open_files: dict[str, safe_open] = {}

    @cached_property
    def trainer(self) -> dict:
        """What the training program saved beside the tensors; empty if there is none."""
        file = self.path / TRAINER
        try:
            return json.loads(file.read_text()) if file.is_file() else {}
        except (OSError, ValueError) as error:
            raise UserError(f"{file} can't be read: {error}") from error

    @property
    def model(self) -> type[Model]:
        """The family's class."""
        return FAMILIES[family_of(self.model_config)]

    @cached_property
    def model_config(self):
        """The family's config; UserError for a family that is not registered."""
        return config_from_dict(self.family, self.config)

    @property
    def has_states(self) -> bool:
        """Whether there is optimizer state."""
        return any(name.endswith(f".{MOMENTS[0]}") for name in self.tensors)

    def states_of(self, name: str) -> list[str]:
        """The optimizer's states of a parameter."""
        return [state for state in (*MOMENTS, MASTER) if f"{name}.{state}" in self.tensors]

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}")
        return next(dtype for dtype, text in DTYPES.items() if text == self.tensors[name]["dtype"])

    def read_into(self, name: str, destination: torch.Tensor, spec: ParameterSpec, ctx: ParallelContext) -> None:
        """Fill a rank's part of the global tensor `name`; only the bytes that it owns are read."""
        self.read_pieces(name, destination, spec, spec.pieces(ctx.tp_size, ctx.tp_rank))

    def read_pieces(self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]) -> None:
        """Fill the given pieces of `destination` from the global tensor `name`."""
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}")
        stored = self.tensors[name]
        if tuple(stored["shape"]) != spec.shape:
            raise UserError(f"{self.path}: {name} has shape {stored['shape']}, the model's is {list(spec.shape)}")
        cut = stored["shard"]
        shard = cut and Shard(cut["dim"], tuple(cut["parts"]), tuple(cut["units"]))
        stored_spec = ParameterSpec(spec.shape, shard)
        writers = self.layout["tp"] if shard else 1
        for wanted in pieces:
            for tp in range(writers):
                for piece in stored_spec.pieces(writers, tp):
                    shared = piece.owned and overlap(wanted.box, piece.box)
                    if shared:
                        file = self._file(stored["file"].format(tp=tp))
                        destination[wanted.index(shared)] = file.get_slice(name)[piece.index(shared)].to(
                            destination.device, destination.dtype
                        )

    def file_sizes(self) -> dict[str, int]:
        """Bytes of each file, as the manifest has them."""
        return {name: info["size"] for name, info in self.manifest["files"].items()}

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read every file; raise UserError naming the first whose size or checksum is not the manifest's."""
        for name, info in self.manifest["files"].items():
            path, size, crc = self.path / name, 0, 0
            try:
                with open(path, "rb") as file:
                    while piece := file.read(1 << 24):
                        size, crc = size + len(piece), zlib.crc32(piece, crc)
                        progress(len(piece))
            except OSError as error:
                raise UserError(f"{path} can't be read: {error.strerror}", exit_code=1) from error
            if size != info["size"]:
                raise UserError(f"{path} has {size} bytes, the manifest says {info['size']}", exit_code=1)
            if crc != info["crc32"]:
                raise UserError(f"{path} has changed: its checksum is not the manifest's", exit_code=1)

    def _file(self, name: str):
        if name not in self._open_files:
            try:
                self._open_files[name] = safe_open(self.path / name, framework="pt")
            except Exception as error:  # safetensors raises its own type for a broken file, OSError for a missing one
                raise UserError(f"{self.path / name} can't be read: {error}", exit_code=1) from error
        return self._open_files[name]
