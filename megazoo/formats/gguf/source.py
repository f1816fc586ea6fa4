"""Read a GGUF file as the named global tensors of a megazoo model."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megazoo.checkpoint.generation import generation_config
from megazoo.checkpoint.tensor_files import Slices, TensorFiles
from megazoo.checkpoint.writing import json_bytes
from megazoo.errors import UserError, advise
from megazoo.families.names import hf_names
from megazoo.formats.configs import config_from_hugging_face
from megazoo.formats.gguf.architecture import (
    ROPE_FACTORS,
    config_values,
    gguf_name_of,
    head_rows,
    rows_in_pairs,
    shape_of,
)
from megazoo.formats.hugging_face.directory import CopiedBoxes
from megazoo.gguf_file import library, read_gguf
from megazoo.sidecars import GENERATION
from megazoo.tokenizer.gguf import has_vocabulary, tokenizer_files_of

if TYPE_CHECKING:
    import gguf


class GGUFModel(CopiedBoxes):
    """Read boxes of global tensors from a GGUF file. Quantised blocks are dequantised to fp32 when
    they are read.

    path: the file, or any file of a split model. config: the config of the megazoo family. Raises
    UserError for a model that is not supported, and for missing or unexpected tensors, with their
    Hugging Face names.
    """

    def __init__(self, path: str | Path):
        self._contents = read_gguf(Path(path))
        super().__init__(path, TensorFiles(Path(path).parent, self._open))

    @property
    def tokenizer(self) -> str | None:
        return str(self.path) if has_vocabulary(self._contents.metadata) else None

    @cached_property
    def sidecar_files(self) -> dict[str, bytes]:
        files = {GENERATION: json_bytes(self.generation)} if self.generation else {}
        try:
            return files | tokenizer_files_of(self._contents.metadata)
        except UserError as error:
            advise(f"{self.path} without its tokenizer: {error}")
            return files

    @cached_property
    def generation(self) -> dict:
        ids = {
            key: self._contents.metadata.get(f"tokenizer.ggml.{key}_token_id")
            for key in ("bos", "eos", "eot", "padding")
        }
        ends = list(dict.fromkeys(ids[key] for key in ("eos", "eot") if ids[key] is not None))
        values = {
            "bos_token_id": ids["bos"],
            "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
            "pad_token_id": ids["padding"],
        }
        values = {name: value for name, value in values.items() if value is not None}
        return generation_config(self.path, json_bytes(values)) if values else {}

    def _config_values(self) -> dict:
        return self.generation

    def _read_config(self) -> Any:
        try:
            self._values = config_values(self._contents)
            return config_from_hugging_face(dict(self._values))
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    @cached_property
    def _tensors(self) -> "dict[str, gguf.ReaderTensor]":
        """The tensors by their Hugging Face names. Tensors that the model does not have keep their
        GGUF names."""
        architecture = self._contents.metadata["general.architecture"]
        name_of = gguf_name_of(architecture, self.config.layers)
        theirs = [part for name in self.specs for part in hf_names(self.model, name).names]
        renamed = {name_of(name): name for name in theirs}
        tensors = self._contents.tensors.items()
        return {renamed.get(name, name): each for name, each in tensors if name != ROPE_FACTORS}

    def _find_tensors(self) -> dict[str, str]:
        files = self._contents.files
        return {name: files[tensor.name] for name, tensor in self._tensors.items()}

    def _open(self, directory: Path, file: str) -> Slices:
        architecture, found = self._contents.metadata["general.architecture"], {}
        for name, tensor in self._tensors.items():
            if self._contents.files[tensor.name] == file:
                found[name] = _Slice(tensor, head_rows(architecture, self._values, name))
        try:
            for kind in {each.kind for each in found.values()}:
                _read(np.zeros((1, library().GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise UserError(f"{directory / file}: {error}") from error
        return Slices(found)


class _Slice:
    """One tensor of a GGUF file. size: features per head if its rows are in pairs, otherwise 0."""

    def __init__(self, tensor: "gguf.ReaderTensor", size: int):
        self.kind, self.size = tensor.tensor_type, size
        self.shape = shape_of({"": tensor}, "")
        self.data = tensor.data

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.shape[0])
        wanted = rows_in_pairs(start, stop, self.size) if self.size else slice(start, stop)
        if len(self.shape) == 1:
            return _read(self.data.reshape(1, -1), self.kind)[0][wanted]
        (first, last, _) = columns[0].indices(self.shape[1]) if columns else (0, self.shape[1], 1)
        block, size = library().GGML_QUANT_SIZES[self.kind]
        low, high = first // block, -(-last // block)
        data = self.data.view(np.uint8)[wanted, low * size : high * size]
        return _read(data, self.kind)[:, first - low * block : last - low * block]


def _read(data: np.ndarray, kind: "gguf.GGMLQuantizationType") -> torch.Tensor:
    """Return the values of rows of bytes: in the stored dtype, or fp32 if the rows are
    quantised."""
    kinds, data = library().GGMLQuantizationType, np.ascontiguousarray(data).view(np.uint8)
    stored = {kinds.F32: torch.float32, kinds.F16: torch.float16, kinds.BF16: torch.bfloat16}
    if not data.size:
        return torch.empty(0, 0, dtype=stored.get(kind, torch.float32))
    if kind in stored:
        return torch.from_numpy(data.copy()).view(stored[kind])
    return torch.from_numpy(library().dequantize(data, kind))
