"""Reads boxes of global tensors from a checkpoint of any layout."""

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch

from megazoo.checkpoint.format import (
    DTYPES,
    FORMAT_VERSION,
    GENERATION,
    SIDECAR_FILES,
    manifest_checksum,
)
from megazoo.checkpoint.places import MANIFEST, TRAINER, find_checkpoint
from megazoo.checkpoint.source import Source, pieces_of_file
from megazoo.errors import UserError
from megazoo.files import json_object
from megazoo.optim.adamw import MASTER, MOMENTS
from megazoo.parallel.shard import ParameterSpec, Piece, Shard, overlap


def describe(spec: ParameterSpec, dtype: torch.dtype, file: str) -> dict:
    """A tensor's line in the manifest. file: its file's name, with {tp} where the rank's number
    stands."""
    shard = asdict(spec.shard) if spec.shard else None
    return {"shape": list(spec.shape), "dtype": DTYPES[dtype], "shard": shard, "file": file}


class Checkpoint(Source):
    """One step on disk, seen as named global tensors of which any box can be read.

    path: the step's directory, or the one above for the latest. family, values: of the model, and
    of its config, as the manifest has them. Raises UserError if it is none, or not ours to read.
    """

    def __init__(self, path: str | Path):
        super().__init__(find_checkpoint(path))
        file = self.path / MANIFEST
        try:
            self.manifest = json.loads(file.read_text())
            version = self.manifest["format"]
            if version != FORMAT_VERSION:
                what = f"{self.path} has format {version}; this megazoo reads {FORMAT_VERSION}"
                raise UserError(f"{what}: upgrade megazoo")
            if self.manifest["crc32"] != manifest_checksum(self.manifest):
                raise UserError(f"{file} has changed: its checksum is not its own")
            self.layout, self.tensors = self.manifest["layout"], self.manifest["tensors"]
            self._file_infos: dict[str, dict] = self.manifest["files"]
            self.family, self.values = self.manifest["family"], self.manifest["config"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{file} is not a manifest: {error!r}") from error
        self._check_files()

    @cached_property
    def trainer(self) -> dict:
        return json.loads(self._checked(TRAINER)) if TRAINER in self._file_infos else {}

    @cached_property
    def sidecar_files(self) -> dict[str, bytes]:
        return {name: self._checked(name) for name in SIDECAR_FILES if name in self._file_infos}

    @cached_property
    def generation(self) -> dict:
        there = GENERATION in self._file_infos
        return json_object(self.path / GENERATION, self._checked(GENERATION)) if there else {}

    def states_of(self, name: str) -> list[str]:
        """The optimizer's states of a parameter."""
        return [state for state in (*MOMENTS, MASTER) if f"{name}.{state}" in self.tensors]

    def dtype_of(self, name: str) -> torch.dtype:
        return next(dtype for dtype, text in DTYPES.items() if text == self._line(name)["dtype"])

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        stored = self._line(name)
        cut = stored["shard"]
        shard = cut and Shard(cut["dim"], tuple(cut["parts"]), tuple(cut["units"]))
        stored_spec = ParameterSpec(tuple(stored["shape"]), shard)
        if stored_spec.shape != spec.shape:
            raise UserError(
                f"{self.path}: {name} has shape {stored['shape']}, the model's is {list(spec.shape)}"
            )
        writers = self.layout["tp"] if shard else 1
        for tp in range(writers):
            file, shape = stored["file"].format(tp=tp), stored_spec.local_shape(writers, tp)
            for piece in stored_spec.pieces(writers, tp):
                for wanted in pieces:
                    shared = piece.owned and overlap(wanted.box, piece.box)
                    if shared:
                        box = tuple((s.start, s.stop) for s in piece.index(shared))
                        destination[wanted.index(shared)] = self.files.box(file, name, shape, box)

    def file_sizes(self) -> dict[str, int]:
        """Bytes of each file, as the manifest has them."""
        return {name: info["size"] for name, info in self._file_infos.items()}

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read every file; raise UserError naming the first whose checksum is not the manifest's."""
        for name in self._file_infos:
            crc = 0
            for piece in pieces_of_file(self.path / name):
                crc = zlib.crc32(piece, crc)
                progress(len(piece))
            self._check_sum(name, crc)

    def _line(self, name: str) -> dict:
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}")
        return self.tensors[name]

    def check_tensors(self) -> None:
        """Refuse a manifest that has other shapes than `specs`, or more bytes of tensors than there
        are in files."""
        for name, spec in self.specs.items():
            if tuple(self._line(name)["shape"]) != spec.shape:
                shapes = f"{self._line(name)['shape']}, the model's is {list(spec.shape)}"
                raise UserError(f"{self.path}: {name} has shape {shapes}")
        if self.total_bytes() > sum(info["size"] for info in self._file_infos.values()):
            raise UserError(f"{self.path} has too few bytes for the tensors of its manifest")

    def _check_files(self) -> None:
        """Refuse a manifest that names files that are not there, or not as it says."""
        for name, info in self._file_infos.items():
            path = self.path / name
            if Path(name).name != name:
                raise UserError(
                    f"{self.path / MANIFEST} names a file outside its directory: {name}"
                )
            if not path.is_file():
                raise UserError(f"{path} is missing", exit_code=1)
            if path.stat().st_size != info["size"]:
                raise UserError(
                    f"{path} has {path.stat().st_size} bytes, the manifest says {info['size']}",
                    exit_code=1,
                )

    def _checked(self, name: str) -> bytes:
        """A small file, whole, with the manifest's checksum."""
        data = b"".join(pieces_of_file(self.path / name))
        self._check_sum(name, zlib.crc32(data))
        return data

    def _check_sum(self, name: str, crc: int) -> None:
        if crc != self._file_infos[name]["crc32"]:
            raise UserError(
                f"{self.path / name} has changed: its checksum is not the manifest's", exit_code=1
            )
