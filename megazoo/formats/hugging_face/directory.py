"""Read a Hugging Face model directory as the named global tensors of a megazoo model."""

import dataclasses
import re
from collections.abc import Callable
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megazoo.checkpoint.foreign import what_is
from megazoo.checkpoint.generation import TOKEN_IDS, generation_config, with_token_ids
from megazoo.checkpoint.places import CONFIG
from megazoo.checkpoint.tensor_files import TensorFiles, pieces_of_file
from megazoo.checkpoint.writing import json_bytes
from megazoo.errors import UserError, nearest, some_of
from megazoo.families.names import HFNames, Run, check_names, hf_names
from megazoo.files import brief, json_object, read_bytes, without_mark
from megazoo.formats.configs import config_from_file
from megazoo.formats.source import ModelSource
from megazoo.generate.settings import NOT_APPLIED, OF_FILES
from megazoo.parallel.shard import Box, ParameterSpec, Piece, in_parts, overlap
from megazoo.sidecars import GENERATION
from megazoo.tokenizer import sidecar_files_in

OF_CONFIG = (*TOKEN_IDS, *(name for name in (*OF_FILES, *NOT_APPLIED) if name not in TOKEN_IDS))
AT_ONCE = 1 << 20  # number of elements of a box that are copied or compared together
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class HuggingFaceDirectory(ModelSource):
    """Read boxes of global tensors from safetensors or .bin files, with or without an index.

    path: the directory. config: the config of the megazoo family; its head is tied only if it is
    tied in the files. Only tensors are unpickled. Raises UserError for a model that is not
    supported, and for missing or unexpected tensors, with their names.
    """

    def __init__(self, path: str | Path, files: TensorFiles | None = None):
        super().__init__(Path(path), files)
        self.config = self._read_config()
        self._file_of = self._find_tensors()
        if self.config.layers > len(self._file_of):
            raise UserError(
                f"{self.path} has {len(self._file_of)} tensors, but its config has "
                f"{self.config.layers} layers"
            )
        self._names = self._match_names()
        self._check_shapes()

    @cached_property
    def trainer(self) -> dict:
        return {}

    @property
    def home(self) -> Path:
        """The directory of config.json and generation_config.json."""
        return self.path

    @property
    def tokenizer_home(self) -> Path:
        """The directory of the tokenizer's files."""
        return self.path

    @cached_property
    def sidecar_files(self) -> dict[str, bytes]:
        found = sidecar_files_in(self.tokenizer_home)
        return ({GENERATION: json_bytes(self.generation)} if self.generation else {}) | found

    @property
    def pad_token_id(self) -> int | None:
        theirs = self._config_values().get("pad_token_id")
        return super().pad_token_id if theirs is None else theirs

    @cached_property
    def generation(self) -> dict:
        file = self.home / GENERATION
        if file.is_file():
            return generation_config(file, read_bytes(file))
        config = self._config_values()  # older files have the settings here
        return {name: config[name] for name in OF_CONFIG if config.get(name) is not None}

    def _read_config(self) -> Any:
        return config_from_file(self.home / CONFIG)

    def _config_values(self) -> dict:
        file = self.home / CONFIG
        return with_token_ids(file, json_object(file, read_bytes(file)))

    def dtype_of(self, name: str) -> torch.dtype:
        parts = self._names[name].parts(self.specs[name])
        return self.files.dtype([(self._file_of[part], part) for part, _ in parts])

    def file_sizes(self) -> dict[str, int]:
        """Return the size of each weight file, in bytes."""
        files = sorted(set(self._file_of.values()))
        return {name: (self.files.directory / name).stat().st_size for name in files}

    def verify(self, progress: Callable[[int], object] = lambda _: None) -> None:
        """Read every file. Raises UserError with the name of the first file that can't be read. The
        format has no checksums to compare.

        progress: called with the number of bytes read since the last call.
        """
        for name in self.file_sizes():
            for piece in pieces_of_file(self.files.directory / name):
                progress(len(piece))

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        theirs = self._names[name]
        for part, runs in theirs.parts(self.specs[name]):
            shape = _shape_of(runs, spec)
            for run, piece in product(runs, pieces):
                if shared := overlap(piece.box, run.box(spec.shape)):
                    (first, last), *columns = shared[len(run.index) :]
                    moved = run.theirs - run.ours
                    box: Box = ((first + moved, last + moved), *columns)
                    turned = (shape[::-1], box[::-1]) if theirs.transposed else (shape, box)
                    values = self.files.box(self._file_of[part], part, *turned)
                    place = destination[piece.index(shared)].flatten(0, len(run.index))
                    self.put(place, values.T if theirs.transposed else values)

    def _check_shapes(self) -> None:
        for name, spec in self.specs.items():
            transposed = self._names[name].transposed
            for part, runs in self._names[name].parts(spec):
                shape = _shape_of(runs, spec)
                self.files.check_shape(
                    self._file_of[part], part, shape[::-1] if transposed else shape
                )

    def _find_tensors(self) -> dict[str, str]:
        """Return the file of each tensor, by its Hugging Face name."""
        for file in WEIGHTS:
            index = self.path / f"{file}.index.json"
            if (self.path / file).is_file():
                return dict.fromkeys(self.files.names(file), file)
            if index.is_file():
                return self._read_index(index)
        if found := what_is(self.path):
            raise UserError(f"{self.path} {found}")
        raise UserError(
            f"{self.path} has no weights: it must contain one of {', '.join(WEIGHTS)}, or "
            "an index of such files"
        )

    def _read_index(self, index: Path) -> dict[str, str]:
        """Return the file of each tensor in the files that an index lists. Like transformers, this
        includes tensors that the index lacks."""
        try:
            weight_map = json_object(index, without_mark(read_bytes(index)))["weight_map"]
            file_of = {str(name): str(file) for name, file in weight_map.items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} can't be read: {error!r}") from error
        found: dict[str, str] = {}
        for file in sorted(set(file_of.values())):
            if Path(file).name != file or file in ("", ".", ".."):
                raise UserError(f"{index} names a file outside its directory: {brief(file)}")
            placed = {name for name, where in file_of.items() if where == file}
            missing = placed - self.files.names(file)
            if missing:
                raise UserError(
                    f"{self.path / file} lacks {some_of(missing)}, which the index places there"
                )
            names = {n for n in self.files.names(file) if file_of.get(n, file) == file}
            if twice := names & found.keys():
                raise UserError(
                    f"{self.path / file} has {some_of(twice)}, which {found[min(twice)]} has, too: "
                    "remove one of them"
                )
            found |= dict.fromkeys(names, file)
        return found

    def _match_names(self) -> dict[str, HFNames]:
        """Return the Hugging Face names of each megazoo tensor. Raises UserError for missing or
        unexpected tensors.

        The names in a backbone's files have no prefix. Experts may be stacked in one tensor, as in
        the model of transformers. The files may also contain a tied head, or
        the head instead of the embedding. If the head differs from the embedding, the config
        becomes untied, as in transformers.
        """
        names, prefix = set(self._file_of), self.model.HUGGING_FACE.prefix
        bare = not any(name.startswith(prefix) for name in names)

        def names_of(name: str) -> HFNames:
            theirs = hf_names(self.model, name)
            theirs = theirs.renamed(lambda name: name.removeprefix(prefix)) if bare else theirs
            return HFNames(theirs.parameter) if theirs.parameter in names else theirs

        table = self.model.HUGGING_FACE_NAMES
        head = f"{table['head'].names[0]}.weight" if "head" in table else ""
        embedding, has_tied_head = (
            "",
            getattr(self.config, "tie_embeddings", False) and head in names,
        )
        if has_tied_head:
            (embedding,) = names_of("embedding.weight").names
            if embedding in names and not self._equal(embedding, head):
                self.config = dataclasses.replace(self.config, tie_embeddings=False)
                has_tied_head = False
        check_names(self.model, self.specs)
        matched = {name: names_of(name) for name in self.specs}
        if has_tied_head and embedding not in names:
            matched["embedding.weight"] = HFNames(head)
        wanted = {
            part for name, theirs in matched.items() for part, _ in theirs.parts(self.specs[name])
        }
        self._check_complete(wanted, optional={head} if has_tied_head else set())
        return matched

    def _check_complete(self, wanted: set[str], optional: set[str]) -> None:
        """Raise UserError if a tensor is missing, or if one is neither wanted, nor optional, nor a
        buffer that older versions of transformers wrote."""
        names, legacy = set(self._file_of), self.model.HUGGING_FACE.legacy
        extra = {name for name in names - wanted - optional if not re.fullmatch(legacy, name)}
        missing, extra = self._stored_names(wanted - names), self._stored_names(extra)
        problems = []
        if missing:
            problems.append(f"lacks {some_of(missing)}")
        if extra:
            problems.append(f"has the unexpected {some_of(extra)}")
        if problems:
            hint = nearest(min(extra), missing) if extra else ""
            raise UserError(
                f"{self.path} {' and '.join(problems)}: its tensors do not match the "
                f"{self.model.__name__} of its config{hint}"
            )

    def _stored_names(self, names: set[str]) -> set[str]:
        """Return the names that tensors have in the files, from their Hugging Face names."""
        return names

    def _equal(self, *names: str) -> bool:
        """Return whether the given tensors have the same values."""
        shapes = {self.files.shape(self._file_of[name], name) for name in names}
        if len(shapes) > 1:
            return False
        (shape,) = shapes
        return all(
            torch.equal(*(self.files.box(self._file_of[name], name, shape, box) for name in names))
            for box in in_parts(tuple((0, size) for size in shape), AT_ONCE)
        )


class CopiedBoxes(HuggingFaceDirectory):
    """A model whose boxes can't be views of a file. Each one needs memory, so they are read a few
    megabytes at a time."""

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        for piece in pieces:
            for box in in_parts(piece.box, AT_ONCE):
                offset = tuple(place.start for place in piece.index(box))
                super().read_pieces(name, destination, spec, [Piece(box, offset)])


def _shape_of(runs: list[Run], spec: ParameterSpec) -> tuple[int, ...]:
    """Return the shape of the Hugging Face tensor that has only these rows of the megazoo
    tensor."""
    return (sum(run.count for run in runs), *spec.shape[len(runs[0].index) + 1 :])
