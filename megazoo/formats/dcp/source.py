"""Read a checkpoint of torch.distributed.checkpoint (DCP) as the named global tensors of a megazoo
model, with the optimizer state of AdamW."""

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megazoo.checkpoint.foreign import what_is
from megazoo.checkpoint.places import CONFIG, DCP_METADATA, TRAINER
from megazoo.checkpoint.schema import MOST
from megazoo.checkpoint.tensor_files import Slices, TensorFiles
from megazoo.errors import UserError, advise, nearest
from megazoo.families.names import check_names, hf_names
from megazoo.families.registry import config_from_dict
from megazoo.files import convert, json_object, read_bytes
from megazoo.formats.dcp.metadata import Entry, read_metadata
from megazoo.formats.dcp.names import (
    EMBEDDING,
    HEAD,
    IGNORED,
    OPTIMIZER,
    STEP,
    Keys,
    sort_keys,
    torchtitan_names,
)
from megazoo.formats.dcp.tensors import Whole
from megazoo.formats.dcp.torch_files import read_box
from megazoo.formats.gguf.architecture import head_rows, rows_in_pairs
from megazoo.formats.hugging_face.directory import CopiedBoxes
from megazoo.optim.base import MOMENTS
from megazoo.parallel.shard import Box, ParameterSpec, Piece, overlap, volume
from megazoo.tokenizer import has_tokenizer

AMSGRAD = "max_exp_avg_sq"  # a state that only AdamW with amsgrad=True has
MODEL = "model"  # the key in trainer.json, of a RunModel


@dataclass
class RunModel:
    """The model of a run in trainer.json: its family, and the fields of its config."""

    family: str
    config: dict[str, Any]


def home_of(directory: Path) -> Path | None:
    """Return the directory with the config.json of a checkpoint: its own or its parent; None if
    neither has one."""
    return next((each for each in _around(directory) if (each / CONFIG).is_file()), None)


def _around(directory: Path) -> tuple[Path, Path]:
    return directory, directory.absolute().parent


class DistributedCheckpoint(CopiedBoxes):
    """Read boxes of global tensors from a checkpoint of torch.distributed.checkpoint.

    The tensors have the names of Hugging Face or of torchtitan's Llama, with or without a prefix,
    and may be sharded in any way. Only the bytes of a box are read. The states of torch's AdamW are
    those of megazoo's.

    path: the directory of .metadata. config: the config of the megazoo family, from the config.json
    of Hugging Face there or in the parent. Pickles can't import or call anything. Raises UserError
    for a model that is not supported, and for missing or unexpected tensors, with their names.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        if home_of(path) is None:
            raise UserError(f"{path} {what_is(path)}")
        entries = read_metadata(path, lambda key: not IGNORED.fullmatch(key))
        # No weight is a single number. Entries that are not tensors belong to the program.
        self._entries: dict[str, Entry] = {key: e for key, e in entries.items() if e is not None}
        super().__init__(path, TensorFiles(path, self._open))
        for name in self.specs:
            self.dtype_of(name)  # raises for quantized tensors

    @property
    def home(self) -> Path:
        return home_of(self.path) or self.path

    @property
    def tokenizer_home(self) -> Path:
        return next(filter(has_tokenizer, _around(self.path)), self.home)

    @property
    def tokenizer(self) -> str | None:
        found = has_tokenizer(self.tokenizer_home)
        return str(self.tokenizer_home) if found else super().tokenizer

    @property
    def is_of_run(self) -> bool:
        return (self.path / TRAINER).is_file()

    @cached_property
    def _trainer_json(self) -> dict:
        file = self.path / TRAINER
        return json_object(file, read_bytes(file))

    def _read_config(self) -> Any:
        """Return the config of the run, which has values that config.json lacks."""
        if not self.is_of_run:
            return super()._read_config()
        file, model = self.path / TRAINER, self._trainer_json.get(MODEL)
        try:
            found = convert(model, RunModel, MODEL)
            return config_from_dict(found.family, found.config)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None

    @cached_property
    def trainer(self) -> dict:
        """The contents of trainer.json of a run of megazoo; otherwise the state of a run that
        continues after the optimizer's steps, with new data."""
        if self.is_of_run:
            return self._trainer_json
        if not self.has_states:
            return {}
        consumed = {"consumed_samples": 0, "consumed_tokens": 0}
        return {"optimizer_steps": self._step, "step": self._step, **consumed, "settings": {}}

    @cached_property
    def _step(self) -> int | None:
        """The number of optimizer steps. None, with a warning, if AdamW can't continue."""
        if any(state == AMSGRAD for _, state in self._keys.states):
            return advise(
                f"{self.path}: the optimizer state is not read: {AMSGRAD} of AdamW with "
                "amsgrad=True is not supported"
            )
        counts = [entry for name, entry in self._tensors.items() if name.endswith(f".{STEP}")]
        step, *others = sorted({self._number(entry) for entry in counts}) or [0.0]
        if others or not 0 <= step <= MOST or step != int(step):
            return advise(
                f"{self.path}: the optimizer state is not read: it has parameters after "
                f"{step:g} to {max([step, *others]):g} steps, but AdamW counts them together"
            )
        return int(step)

    @property
    def has_states(self) -> bool:
        return any(map(self.states_of, self.specs))

    def states_of(self, name: str) -> list[str]:
        wanted = [f"{part}.{{}}" for part, _ in self._names[name].parts(self.specs[name])]
        states = {state: [part.format(state) for part in wanted] for state in (*MOMENTS, STEP)}
        complete = all(each in self._tensors for names in states.values() for each in names)
        return list(MOMENTS) if complete and self._step is not None else []

    def dtype_of(self, name: str) -> torch.dtype:
        weight, _, state = name.rpartition(".")
        return self._moments[state].dtype_of(weight) if state in MOMENTS else super().dtype_of(name)

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        weight, _, state = name.rpartition(".")
        if state in MOMENTS:
            return self._moments[state].read_pieces(weight, destination, spec, pieces)
        stored = self.specs.get(name)
        if stored is None or stored.shape != spec.shape:
            shape = f"shape {list(stored.shape)}" if stored else "no such tensor"
            raise UserError(
                f"{self.path} has {shape} for {name}, which has shape {list(spec.shape)} in the "
                "model: use the settings of the checkpoint"
            )
        return super().read_pieces(name, destination, spec, pieces)

    def file_sizes(self) -> dict[str, int]:
        """Return the size of each file with tensors of the model or of its optimizer state."""
        files = {chunk.path for entry in self._tensors.values() for chunk in entry.chunks}
        return {file.name: file.stat().st_size for file in sorted(files)}

    @cached_property
    def _moments(self) -> dict[str, "DistributedCheckpoint"]:
        """For each state of the optimizer, a source with its values in place of the weights."""
        sources, files = {}, dict.fromkeys(self._tensors, DCP_METADATA)
        for state in MOMENTS:
            sources[state] = copy.copy(self)
            sources[state]._file_of = files
            sources[state]._names = {
                name: parts.renamed(lambda part, state=state: f"{part}.{state}")
                for name, parts in self._names.items()
            }
        return sources

    def _find_tensors(self) -> dict[str, str]:
        self._keys = self._sorted_keys()
        self._stored_as: dict[str, str] = {}  # other names, by Hugging Face names
        self._is_torchtitan = EMBEDDING in self._keys.weights
        if self._is_torchtitan:
            if self._config_values().get("model_type") != "llama":
                raise UserError(
                    f"{self.path} has the names of torchtitan's Llama, but its config describes a "
                    f"{self.model.__name__}: use Hugging Face's names for other models"
                )
            layers = min(self.config.layers, len(self._entries))
            self._stored_as = torchtitan_names(layers)
        elif HEAD in self._keys.weights:  # in files, it may have another name
            head = self.model.HUGGING_FACE_NAMES.get("head")
            self._stored_as = {f"{head.names[0]}.weight": HEAD} if head else {}
        names = {name: hugging_face for hugging_face, name in self._stored_as.items()}
        weights = {names.get(name, name): key for name, key in self._keys.weights.items()}
        states = {
            f"{names.get(name, name)}.{state}": key
            for (name, state), key in self._keys.states.items()
            if state in (*MOMENTS, STEP)
        }
        self._tensors = {name: self._whole(key) for name, key in (weights | states).items()}
        return dict.fromkeys(weights, DCP_METADATA)

    def _sorted_keys(self) -> Keys:
        """Return the keys of the model and of its optimizer. Raises UserError if the checkpoint has
        another model."""
        check_names(self.model, ["embedding.weight"])
        (embedding,) = hf_names(self.model, "embedding.weight").names
        embeddings = [embedding, embedding.removeprefix(self.model.HUGGING_FACE.prefix), EMBEDDING]
        keys = [key for key, e in self._entries.items() if e.shape or OPTIMIZER.fullmatch(key)]
        try:
            found = sort_keys(keys, embeddings)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        if found is None:
            raise UserError(
                f"{self.path} lacks {embedding} of {self.model.__name__}: its tensors must have "
                f"the names of Hugging Face, or of torchtitan's Llama{nearest(embedding, keys)}"
            )
        return found

    def _stored_names(self, names: set[str]) -> set[str]:
        return {self._keys.prefix + self._stored_as.get(name, name) for name in names}

    def _whole(self, key: str) -> Whole:
        """Return a tensor. Raises UserError if its chunks can't cover it exactly."""
        shape, chunks = self._entries[key]
        missing = math.prod(shape) - sum(volume(chunk.piece.box) for chunk in chunks)
        if missing:
            stored_how = "not stored" if missing > 0 else "stored more than once"
            raise UserError(
                f"{self.path}: {abs(missing)} of {math.prod(shape)} elements of {key} are "
                f"{stored_how}: use another checkpoint",
                exit_code=1,
            )
        return Whole(shape, chunks)

    def _number(self, entry: Whole) -> float:
        """Return the value of a tensor with one element."""
        chunk = entry.chunks[0]
        if math.prod(entry.shape) != 1:
            raise UserError(f"{self.path}: {STEP} of the optimizer has shape {list(entry.shape)}")
        stored = chunk.stored()._replace(shape=(1,))
        return float(read_box(chunk.path, stored, ((0, 1),)).item())

    def _open(self, _directory: Path, _file: str) -> Slices:
        values, found = self._config_values(), {}
        for name, entry in self._tensors.items():
            size = head_rows("llama", values, name) if self._is_torchtitan else 0
            found[name] = _Slice(entry, size)
        return Slices(found)


class _Slice:
    """One tensor. size: features per head if its rows are in pairs, otherwise 0."""

    def __init__(self, whole: Whole, size: int):
        self.whole, self.size = whole, size

    def get_shape(self) -> list[int]:
        return list(self.whole.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        cuts = index if isinstance(index, tuple) else (index,)
        cuts = (*cuts, *(slice(None) for _ in self.whole.shape[len(cuts) :]))
        bounds = zip(cuts, self.whole.shape, strict=True)
        box = tuple(cut.indices(length)[:2] for cut, length in bounds)
        if not self.size or not volume(box):
            return self._values(box)
        (start, stop), *columns = box
        first, last = start // self.size * self.size, -(-stop // self.size) * self.size
        rows = rows_in_pairs(start, stop, self.size) - first
        return self._values(((first, last), *columns))[torch.from_numpy(rows)]

    def _values(self, box: Box) -> torch.Tensor:
        """Return a box: a view of the file if one chunk has all of it, otherwise a copy. Raises
        UserError if the chunks don't cover it."""
        for chunk in self.whole.chunks:
            if overlap(box, chunk.piece.box) == box:
                there = tuple((cut.start, cut.stop) for cut in chunk.piece.index(box))
                return read_box(chunk.path, chunk.stored(), there)
        values = torch.empty([stop - start for start, stop in box], dtype=self.whole.dtype)
        is_stored, place = torch.zeros(values.shape, dtype=torch.bool), Piece(box, (0,) * len(box))
        for part, found in self.whole.read(box) if volume(box) else ():
            index = place.index(part)
            values[index], is_stored[index] = found, True
        if not is_stored.all():
            path = self.whole.chunks[0].path
            raise UserError(f"{path}: chunks of a tensor overlap: use another checkpoint", 1)
        return values
