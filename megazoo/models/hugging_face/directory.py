"""A Hugging Face model directory, seen as the named global tensors of one of our models."""

import dataclasses
import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from megazoo.checkpoint.format import GENERATION, SIDECAR_FILES, json_bytes
from megazoo.checkpoint.source import pieces_of_file
from megazoo.errors import UserError
from megazoo.files import json_object
from megazoo.models.hugging_face.names import HFNames
from megazoo.models.registry import config_from_file
from megazoo.models.source import ModelSource
from megazoo.parallel.shard import Box, ParameterSpec, Piece, overlap

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
HEAD = "lm_head.weight"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class HuggingFaceDirectory(ModelSource):
    """Reads boxes of global tensors from safetensors or .bin files, with or without an index.

    path: the directory. config: our family's config; its head is tied only if the files' is.
    Nothing but tensors is unpickled. Raises UserError for a model that is not supported, and for
    missing and unexpected tensors, with their names.
    """

    def __init__(self, path: str | Path):
        super().__init__(Path(path))
        self.trainer = {}
        self.config = config_from_file(self.path / CONFIG)
        self._file_of = self._locate()
        self._sources = self._match()
        for name, spec in self.specs.items():
            theirs = self._sources[name]
            for part, rows in self._parts(name, spec):
                shape = (rows, *spec.shape[1:])
                self.files.check_shape(
                    self._file_of[part], part, shape[::-1] if theirs.transposed else shape
                )

    @cached_property
    def sidecar_files(self) -> dict[str, bytes]:
        found = {
            name: (self.path / name).read_bytes()
            for name in SIDECAR_FILES
            if (self.path / name).is_file()
        }
        return ({GENERATION: json_bytes(self.generation)} if self.generation else {}) | found

    @property
    def pad_token_id(self) -> int | None:
        theirs = json.loads((self.path / CONFIG).read_text()).get("pad_token_id")
        return super().pad_token_id if theirs is None else theirs

    @cached_property
    def generation(self) -> dict:
        file = self.path / GENERATION
        if file.is_file():
            return json_object(file, file.read_bytes())
        config = json.loads((self.path / CONFIG).read_text())  # its ids may stand there instead
        return {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}

    def dtype_of(self, name: str) -> torch.dtype:
        return self.files.dtype([(self._file_of[part], part) for part in self._sources[name].names])

    def file_sizes(self) -> dict[str, int]:
        """Bytes of each file of weights."""
        return {
            name: (self.path / name).stat().st_size for name in sorted(set(self._file_of.values()))
        }

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read every file; raise UserError naming the first that can't be. There are no checksums
        to compare."""
        for name in self.file_sizes():
            for piece in pieces_of_file(self.path / name):
                progress(len(piece))

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        transposed, first = self._sources[name].transposed, 0
        for theirs, rows in self._parts(name, spec):
            there: Box = ((first, first + rows), *((0, size) for size in spec.shape[1:]))
            shape = (rows, *spec.shape[1:])
            for piece in pieces:
                if shared := overlap(piece.box, there):
                    box = ((shared[0][0] - first, shared[0][1] - first), *shared[1:])
                    turned = (shape[::-1], box[::-1]) if transposed else (shape, box)
                    values = self.files.box(self._file_of[theirs], theirs, *turned)
                    destination[piece.index(shared)] = values.T if transposed else values
            first += rows

    def _parts(self, name: str, spec: ParameterSpec) -> list[tuple[str, int]]:
        """Their tensors that are one of ours, and how many of its rows each has."""
        names = self._sources[name].names
        return list(
            zip(names, spec.shard.parts if len(names) > 1 else (spec.shape[0],), strict=True)
        )

    def _locate(self) -> dict[str, str]:
        """The file of each tensor."""
        for file in WEIGHTS:
            index = self.path / f"{file}.index.json"
            if (self.path / file).is_file():
                return dict.fromkeys(self.files.names(file), file)
            if index.is_file():
                return self._of_index(index)
        raise UserError(
            f"{self.path} has no weights: there is none of {', '.join(WEIGHTS)}, nor an index of one"
        )

    def _of_index(self, index: Path) -> dict[str, str]:
        try:
            files = {
                str(name): str(file)
                for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{index} can't be read: {error!r}") from error
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise UserError(f"{index} names a file outside its directory: {file}")
            missing = {name for name, where in files.items() if where == file} - self.files.names(
                file
            )
            if missing:
                raise UserError(
                    f"{self.path / file} lacks {_some(missing)}, which the index places there"
                )
        return files

    def _match(self) -> dict[str, HFNames]:
        """Where each tensor of ours is; refuses what is missing or left over."""
        model, names = self.model, set(self._file_of)
        if self.config.layers > len(names):
            raise UserError(
                f"{self.path} has {len(names)} tensors, but its {CONFIG} says {self.config.layers} layers"
            )
        prefix = model.HUGGING_FACE_PREFIX
        bare = not any(name.startswith(prefix) for name in names)  # a backbone is saved without it

        def source(name: str) -> HFNames:
            theirs = their_names(model, name)
            names = (name.removeprefix(prefix) if bare else name for name in theirs.names)
            return HFNames(*names, transposed=theirs.transposed)

        tied = getattr(self.config, "tie_embeddings", False)
        if tied and HEAD in names:
            (embedding,) = source("embedding.weight").names
            if embedding in names and not self._equal(embedding, HEAD):
                self.config, tied = (
                    dataclasses.replace(self.config, tie_embeddings=False),
                    False,
                )  # as transformers does
        sources = {name: source(name) for name in self.specs}
        if tied and HEAD in names and sources["embedding.weight"].names[0] not in names:
            sources["embedding.weight"] = HFNames(HEAD)
        wanted = {name for theirs in sources.values() for name in theirs.names}
        known = wanted | ({HEAD} if tied else set())
        extra = {
            name for name in names - known if not re.fullmatch(model.HUGGING_FACE_LEGACY, name)
        }
        problems = [("lacks", wanted - names), ("has the unexpected", extra)]
        if any(tensors for _, tensors in problems):
            what = " and ".join(f"{verb} {_some(tensors)}" for verb, tensors in problems if tensors)
            raise UserError(f"{self.path} {what}: it is not a {model.__name__} of its config.json")
        return sources

    def _equal(self, *names: str) -> bool:
        places = [(self._file_of[name], name) for name in names]
        shapes = [self.files.shape(*place) for place in places]
        whole = [
            self.files.box(*place, shape, tuple((0, size) for size in shape))
            for place, shape in zip(places, shapes, strict=True)
        ]
        return torch.equal(*whole)


def their_names(model: type, name: str) -> HFNames:
    """Hugging Face's name, or names, of a global tensor of ours, by the table in the model's file."""
    layer = re.search(r"(?<=layers\.)\d+", name)
    module, _, kind = name.rpartition(".")
    pattern = module.replace(f"layers.{layer[0]}.", "layers.{}.") if layer else module
    theirs = model.HUGGING_FACE_NAMES[pattern]
    names = tuple(f"{part.format(layer and layer[0])}.{kind}" for part in theirs.names)
    return HFNames(*names, transposed=theirs.transposed and kind == "weight")


def _some(names: set[str], shown: int = 5) -> str:
    """A few of many names."""
    first = ", ".join(sorted(names)[:shown])
    return first if len(names) <= shown else f"{first} and {len(names) - shown} more"
