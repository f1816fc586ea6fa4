"""Reads boxes of global tensors from a checkpoint of any parallel layout."""

import json
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch
from zlib_ng.zlib_ng import crc32

from megazoo.checkpoint.format import (
    ATTACHED,
    DTYPES,
    FOLDED_VERSION,
    FORMAT_VERSION,
    file_of_rank,
    manifest_checksum,
    spec_from_manifest,
    writing_places,
)
from megazoo.checkpoint.generation import generation_config
from megazoo.checkpoint.places import MANIFEST, TRAINER, find_checkpoint
from megazoo.checkpoint.schema import check_manifest, check_tensors
from megazoo.checkpoint.source import TensorSource
from megazoo.checkpoint.tensor_files import crc32_of, pieces_of_file
from megazoo.errors import UserError
from megazoo.files import brief, json_object
from megazoo.optim.base import MASTER, STATES
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import Box, ParameterSpec, Piece, overlap, volume
from megazoo.sidecars import GENERATION, is_sidecar

# Bytes of the largest manifest that is read. A tensor needs about 300 bytes, and the largest
# supported model has half a million tensors, including its optimizer states.
LARGEST_MANIFEST = 1 << 28


def read_manifest(file: Path) -> dict:
    """Read a manifest and verify its checksum; UserError names the file."""
    try:
        if file.stat().st_size > LARGEST_MANIFEST:
            raise UserError(
                f"{file} is not a manifest: it has more than {LARGEST_MANIFEST:,} bytes"
            )
        manifest = json.loads(file.read_bytes().decode(), object_pairs_hook=_without_repeats)
        version = manifest["format"]
        if version not in (FORMAT_VERSION, FOLDED_VERSION):
            raise UserError(
                f"the checkpoint {file.parent} has format {brief(version)}, and this megazoo reads "
                f"formats {FORMAT_VERSION} and {FOLDED_VERSION}: a newer megazoo may read it"
            )
        if manifest["crc32"] != manifest_checksum(manifest):
            raise UserError(f"{file} is corrupt: its checksum does not match its contents")
        json.dumps(manifest, ensure_ascii=False).encode()  # raises for lone surrogates
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is not a manifest: {type(error).__name__}: {error}") from error
    return manifest


def _without_repeats(pairs: list[tuple]) -> dict:
    """Return the dictionary of a JSON object; ValueError if a key occurs twice."""
    values = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {brief(key)} occurs twice")
        values[key] = value
    return values


class Checkpoint(TensorSource):
    """Open one checkpoint on disk: named global tensors of which any box can be read.

    Args:
        path: the directory of a step, or that of the run for its latest step.
        verify: compare the files that are read with the checksums of the manifest.

    Attributes:
        family, values: the model's family, and the fields of its config.
        layout: the parallel layout of the run that wrote it, such as {"tp": 2, "pp": 1, "dp": 2}.
        tensors: the description of each tensor in the manifest, by name.
        trainer: the contents of trainer.json.

    Raises:
        UserError: if there is no checkpoint, or not in a format that this version reads.

    Example:
        checkpoint = megazoo.checkpoint.Checkpoint("runs/a")
        print(checkpoint.family, checkpoint.layout, checkpoint.trainer["step"])
    """

    def __init__(self, path: str | Path, *, verify: bool = True):
        super().__init__(find_checkpoint(path))
        if not (self.path / MANIFEST).is_file():
            raise UserError(
                f"{self.path} is a checkpoint of torch.distributed.checkpoint: open it with "
                "megazoo.models.pretrained.open_source"
            )
        self.verifies = verify
        file = self.path / MANIFEST
        self.manifest = read_manifest(file)
        manifest = check_manifest(self.manifest, file)
        self.layout, self.tensors = self.manifest["layout"], self.manifest["tensors"]
        self._file_infos: dict[str, dict] = self.manifest["files"]
        self.family, self.values = self.manifest["family"], self.manifest["config"]
        self._check_files()
        check_tensors(manifest, file)

    @cached_property
    def trainer(self) -> dict:
        there = TRAINER in self._file_infos
        return json_object(self.path / TRAINER, self._read_checked(TRAINER)) if there else {}

    @cached_property
    def sidecar_files(self) -> dict[str, bytes]:
        return {name: self._read_checked(name) for name in self._file_infos if is_sidecar(name)}

    @cached_property
    def generation(self) -> dict:
        if GENERATION not in self._file_infos:
            return {}
        return generation_config(self.path / GENERATION, self._read_checked(GENERATION))

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        """The shape and shards of every tensor by name, including the optimizer states."""
        return {name: spec_from_manifest(stored) for name, stored in self.tensors.items()}

    @property
    def has_states(self) -> bool:
        return any(self.states_of(name) for name in self.tensors)

    @property
    def attached(self) -> dict:
        return {key: self.manifest[key] for key in ATTACHED if self.manifest.get(key) is not None}

    def states_of(self, name: str) -> list[str]:
        return [state for state in STATES if f"{name}.{state}" in self.tensors]

    def most_precise(self, name: str) -> str:
        master = f"{name}.{MASTER}"
        return master if master in self.tensors else name

    def dtype_of(self, name: str) -> torch.dtype:
        return next(dtype for dtype, text in DTYPES.items() if text == self._stored(name)["dtype"])

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        """Fill pieces of `destination` from the files of the ranks that wrote them."""
        for file, shape, box, place in self._boxes(name, spec, pieces):
            values = self.files.box(file, name, shape, box)
            if values.dtype != self.dtype_of(name):
                raise UserError(
                    f"{self.path / file}: {name} has dtype {values.dtype}, but {MANIFEST} has "
                    f"{self.dtype_of(name)}",
                    exit_code=1,
                )
            self.put(destination[place], values)

    def files_of(
        self, tensors: Iterable[tuple[str, ParameterSpec]], ctx: ParallelContext
    ) -> set[str]:
        return {
            file
            for name, spec in tensors
            for file, *_ in self._boxes(name, spec, spec.pieces(ctx.place))
        }

    def _boxes(
        self, name: str, spec: ParameterSpec, pieces: list[Piece]
    ) -> Iterator[tuple[str, tuple[int, ...], Box, tuple[slice, ...]]]:
        """Yield, for each file that overlaps some pieces of a tensor: the file, the shape of its
        shard, the box in that shard, and the slices of the destination. UserError if the files lack
        elements."""
        stored = self._stored(name)
        stored_spec = spec_from_manifest(stored)
        self.check_shape(name, spec)
        missing = wanted_elements = sum(volume(wanted.box) for wanted in pieces)
        ranks = {**self.layout.get("folded", {}), "tp": self.layout["tp"]}
        for place in writing_places({cut.axis: ranks[cut.axis] for cut in stored_spec.shards}):
            file = file_of_rank(stored["file"], place)
            shape = stored_spec.local_shape(place)
            for piece in stored_spec.pieces(place):
                for wanted in pieces:
                    shared = piece.owned and overlap(wanted.box, piece.box)
                    if shared:
                        box = tuple((s.start, s.stop) for s in piece.index(shared))
                        yield file, shape, box, wanted.index(shared)
                        missing -= volume(shared)
        if missing:
            stored_how = "not stored" if missing > 0 else "stored more than once"
            raise UserError(
                f"{self.path}: {abs(missing)} of {wanted_elements} elements of {name} are "
                f"{stored_how}: use another checkpoint",
                exit_code=1,
            )

    def check_shape(self, name: str, spec: ParameterSpec) -> None:
        """Raise UserError if a tensor is missing, or has another shape than in the model."""
        shape = self._stored(name)["shape"]
        if tuple(shape) != spec.shape:
            raise UserError(
                f"{self.path}: {name} has shape {shape}, but in the model it has shape "
                f"{list(spec.shape)}: use the settings of the checkpoint"
            )

    def file_sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, as stored in the manifest."""
        return {name: info["size"] for name, info in self._file_infos.items()}

    def verify(self, progress: Callable[[int], object] = lambda _: None) -> None:
        """Compare all files with their checksums.

        Args:
            progress: called with the number of bytes that were just read.

        Raises:
            UserError: for the first corrupt file.
        """
        for name in self._file_infos:
            self.check_crc32(name, crc32_of(self.path / name, progress))

    def check_crc32(self, name: str, crc: int) -> None:
        if crc != self._file_infos[name]["crc32"]:
            raise UserError(
                f"{self.path / name} is corrupt: its checksum does not match {MANIFEST}",
                exit_code=1,
            )

    def _stored(self, name: str) -> dict:
        """Return the description of a tensor in the manifest."""
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}")
        return self.tensors[name]

    def _check_files(self) -> None:
        """Raise UserError if a file of the manifest is missing, or has another size."""
        for name, info in self._file_infos.items():
            path = self.path / name
            try:
                status = path.stat()  # once: every rank asks for every file
            except OSError:
                status = None
            if not status or not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is missing", exit_code=1)
            if status.st_size != info["size"]:
                raise UserError(
                    f"{path} has {status.st_size} bytes, but {MANIFEST} has {info['size']}",
                    exit_code=1,
                )

    def _read_checked(self, name: str) -> bytes:
        """Read a small file; UserError if its checksum does not match the manifest."""
        data = b"".join(pieces_of_file(self.path / name))
        if self.verifies:
            self.check_crc32(name, crc32(data))
        return data
