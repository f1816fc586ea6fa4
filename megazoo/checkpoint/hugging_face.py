"""A Hugging Face model directory, seen as the named global tensors of one of our models."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from megazoo.errors import UserError
from megazoo.models import FAMILIES, config_from_file, family_of
from megazoo.models.hugging_face import Theirs
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import Box, ParameterSpec, Piece, overlap

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
HEAD = "lm_head.weight"


class HuggingFaceDirectory:
    """Reads boxes of global tensors from safetensors or .bin files, with or without an index.

    path: the directory. config: our family's config; its head is tied only if the files' is. Nothing but tensors is
    unpickled. Raises UserError for a model that is not supported, and for missing and unexpected tensors, with their
    names.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = config_from_file(self.path / CONFIG)
        self.model = FAMILIES[family_of(self.config)]
        self._open_files: dict[str, object] = {}
        self._file_of = self._locate()
        self._sources = self._match()
        self.trainer: dict = {}

    has_states = False  # there is no optimizer state in such a directory

    @property
    def model_config(self):
        return self.config

    def states_of(self, name: str) -> list[str]:
        return []

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a tensor of ours is stored."""
        theirs = self._sources[name].names[0]
        return self._file(self._file_of[theirs]).get_slice(theirs)[:0].dtype

    def file_sizes(self) -> dict[str, int]:
        """Bytes of each file of weights."""
        return {name: (self.path / name).stat().st_size for name in sorted(set(self._file_of.values()))}

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read every tensor; raise UserError naming the first that can't be read or has not config.json's shape."""
        for entry in self.model.on_meta(self.config, ParallelContext()).entries():
            tensor = torch.empty(entry.spec.shape, dtype=self.dtype_of(entry.name))
            self.read_into(entry.name, tensor, entry.spec, ParallelContext())
            progress(tensor.nbytes)

    def read_into(self, name: str, destination: torch.Tensor, spec: ParameterSpec, ctx: ParallelContext) -> None:
        """Fill a rank's part of the global tensor `name`; of a safetensors file only the bytes it owns are read."""
        self.read_pieces(name, destination, spec, spec.pieces(ctx.tp_size, ctx.tp_rank))

    def read_pieces(self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]) -> None:
        """Fill the given pieces of `destination` from the global tensor `name`."""
        source = self._sources[name]
        parts = spec.shard.parts if len(source.names) > 1 else (spec.shape[0],)
        first = 0
        for theirs, rows in zip(source.names, parts, strict=True):
            there: Box = ((first, first + rows), *((0, size) for size in spec.shape[1:]))
            shape = (rows, *spec.shape[1:])
            for piece in pieces:
                if shared := overlap(piece.box, there):
                    box = ((shared[0][0] - first, shared[0][1] - first), *shared[1:])
                    values = self._slice(theirs, shape, box, source.transposed)
                    destination[piece.index(shared)] = values.to(destination.device, destination.dtype)
            first += rows

    def _locate(self) -> dict[str, str]:
        """The file of each tensor."""
        for file in WEIGHTS:
            index = self.path / f"{file}.index.json"
            if (self.path / file).is_file():
                return dict.fromkeys(self._file(file).keys(), file)
            if index.is_file():
                return self._of_index(index)
        raise UserError(f"{self.path} has no weights: there is none of {', '.join(WEIGHTS)}, nor an index of one")

    def _of_index(self, index: Path) -> dict[str, str]:
        try:
            files = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} can't be read: {error!r}") from error
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise UserError(f"{index} names a file outside its directory: {file}")
            missing = {name for name, where in files.items() if where == file} - set(self._file(file).keys())
            if missing:
                raise UserError(f"{self.path / file} lacks {_some(missing)}, which the index places there")
        return files

    def _match(self) -> dict[str, Theirs]:
        """Where each tensor of ours is; refuses what is missing or left over."""
        model, names = self.model, set(self._file_of)
        prefix = model.HUGGING_FACE_PREFIX
        bare = not any(name.startswith(prefix) for name in names)  # a backbone is saved without it

        def source(name: str) -> Theirs:
            theirs = their_names(model, name)
            names = (name.removeprefix(prefix) if bare else name for name in theirs.names)
            return Theirs(*names, transposed=theirs.transposed)

        if self.config.tie_embeddings and HEAD in names:
            (embedding,) = source("embedding.weight").names
            if embedding in names and not torch.equal(self._whole(embedding), self._whole(HEAD)):
                self.config = dataclasses.replace(self.config, tie_embeddings=False)  # as transformers does
        entries = model.on_meta(self.config, ParallelContext()).entries()
        sources = {entry.name: source(entry.name) for entry in entries}
        if self.config.tie_embeddings and HEAD in names and sources["embedding.weight"].names[0] not in names:
            sources["embedding.weight"] = Theirs(HEAD)
        wanted = {name for theirs in sources.values() for name in theirs.names}
        known = wanted | ({HEAD} if self.config.tie_embeddings else set())
        extra = {name for name in names - known if not re.fullmatch(model.HUGGING_FACE_LEGACY, name)}
        problems = [("lacks", wanted - names), ("has the unexpected", extra)]
        if any(tensors for _, tensors in problems):
            what = " and ".join(f"{verb} {_some(tensors)}" for verb, tensors in problems if tensors)
            raise UserError(f"{self.path} {what}: it is not a {model.__name__} of its config.json")
        return sources

    def _file(self, name: str):
        """An open file, which has keys() and get_slice(name)."""
        if name not in self._open_files:
            path = self.path / name
            try:
                opened = safe_open(path, framework="pt") if path.suffix == ".safetensors" else _Pickled(path)
            except Exception as error:  # safetensors and pickle raise types of their own for a broken file
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise UserError(f"{path} can't be read: {reason}", exit_code=1) from error
            self._open_files[name] = opened
        return self._open_files[name]

    def _whole(self, name: str) -> torch.Tensor:
        return self._file(self._file_of[name]).get_slice(name)[:]

    def _slice(self, name: str, shape: tuple[int, ...], box: Box, transposed: bool) -> torch.Tensor:
        """The box of one of their tensors, whose shape, as ours, must be `shape`."""
        stored, expected = self._file(self._file_of[name]).get_slice(name), shape[::-1] if transposed else shape
        if tuple(stored.get_shape()) != tuple(expected):
            where = self.path / self._file_of[name]
            raise UserError(f"{where}: {name} has shape {list(stored.get_shape())}, config.json says {list(expected)}")
        values = stored[tuple(slice(*bounds) for bounds in (box[::-1] if transposed else box))]
        return values.T if transposed else values


class _Pickled:
    """A .bin file, mapped into memory, with the calls of an open safetensors file."""

    def __init__(self, path: Path):
        self.tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(self.tensors, dict) or not all(isinstance(t, torch.Tensor) for t in self.tensors.values()):
            raise ValueError("it does not hold named tensors")

    def keys(self):
        return self.tensors.keys()

    def get_slice(self, name: str) -> "_PickledSlice":
        return _PickledSlice(self.tensors[name])


class _PickledSlice:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index) -> torch.Tensor:
        return self.tensor[index]


def their_names(model: type, name: str) -> Theirs:
    """Hugging Face's name, or names, of a global tensor of ours, by the table in the model's file."""
    layer = re.search(r"(?<=layers\.)\d+", name)
    module, _, kind = name.rpartition(".")
    pattern = module.replace(f"layers.{layer[0]}.", "layers.{}.") if layer else module
    theirs = model.HUGGING_FACE_NAMES[pattern]
    names = tuple(f"{part.format(layer and layer[0])}.{kind}" for part in theirs.names)
    return Theirs(*names, transposed=theirs.transposed and kind == "weight")


def _some(names: set[str], shown: int = 5) -> str:
    """A few of many names."""
    first = ", ".join(sorted(names)[:shown])
    return first if len(names) <= shown else f"{first} and {len(names) - shown} more"
