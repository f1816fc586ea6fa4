"""Convert any source of named tensors to a GGUF file, one tensor at a time."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megazoo.checkpoint.verifying import verifying
from megazoo.checkpoint.writing import (
    BytesWritten,
    LazyTensor,
    check_finite,
    pieces_of_tensor,
    sync,
)
from megazoo.errors import UserError
from megazoo.families.registry import family_of
from megazoo.formats.gguf.architecture import (
    ARCHITECTURES,
    LLAMA3,
    NUMBERS,
    ROPE_FACTORS,
    gguf_name_of,
    head_rows,
    head_size,
    rope_factors,
    rows_in_pairs,
)
from megazoo.formats.hugging_face.export import hugging_face_config, hugging_face_tensors
from megazoo.formats.source import ModelSource
from megazoo.gguf_file import PART, is_gguf, library, names_of_parts
from megazoo.parallel.context import ParallelContext
from megazoo.tokenizer import open_tokenizer
from megazoo.tokenizer.gguf import metadata_of

if TYPE_CHECKING:
    import gguf


def write_gguf(
    source: ModelSource,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    q8_0: bool = False,
    overwrite: bool = False,
    progress: BytesWritten = lambda _: None,
) -> str:
    """Write a model of a LLaMA-like family, with its tokenizer, as a GGUF file. Return the reason
    if the tokenizer was omitted, otherwise an empty string.

    dtype: of matrices, by default as stored; vectors (norms, biases) are always fp32, because
    llama.cpp needs fp32. q8_0: quantise matrices to 8 bits in blocks of 32 with one scale per
    block; matrices whose row length is not a multiple of 32 become fp16. overwrite: replace an
    existing GGUF file. Raises UserError for a config that GGUF can't represent.
    """
    values = hugging_face_config(source.config)
    architecture = architecture_of(source.config, values)
    _check_output(path, overwrite, source.path)
    writer = library().GGUFWriter(None, architecture)
    _add_config(writer, values, source)
    left_out = _add_tokenizer(writer, source)
    tensors = _tensors(source, architecture, values, dtype, progress)
    kinds = library().GGMLQuantizationType
    stored = {torch.float32: kinds.F32, torch.float16: kinds.F16, torch.bfloat16: kinds.BF16}
    kind_of = {}
    for name, tensor in tensors.items():
        kind = stored[tensor.dtype]
        if q8_0 and len(tensor.shape) > 1:
            kind = kinds.F16 if tensor.shape[1] % 32 else kinds.Q8_0
        kind_of[name] = kind
        block, size = library().GGML_QUANT_SIZES[kind]
        count = math.prod(tensor.shape) // block * size
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), count, kind)
    matrix = next(kind_of[name] for name, tensor in tensors.items() if len(tensor.shape) > 1)
    writer.add_file_type(library().LlamaFileType[_FILE_TYPES[matrix.name]])
    writer.add_quantization_version(library().GGML_QUANT_VERSION)
    with (
        verifying(source, source.all_files(states=False), ParallelContext()),
        _replacing(path) as partial,
    ):
        _write(writer, partial, tensors, kind_of)
    return left_out


_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}


# Fields of a Hugging Face config.json that are stored in the file, follow from the tensors, or do
# not affect the computation. `architecture_of` checks the windows.
WITH_A_PLACE = {*NUMBERS.values(), "vocab_size", "head_dim", "rope_parameters"}
WITHOUT_ONE = set(
    "architectures attention_bias attention_dropout layer_types max_window_layers mlp_bias "
    "model_type sliding_window tie_word_embeddings use_sliding_window".split()
)
FIXED = {"hidden_act": "silu"}


def architecture_of(config: Any, values: dict[str, Any]) -> str:
    """Return the general.architecture of a config. Raises UserError for a config that can't be
    written as GGUF.

    values: of its Hugging Face config.json.
    """
    family = family_of(config)
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{family} can't be written as GGUF: only {known} are supported")
    if config.num_labels:
        raise UserError("a classifier can't be written as GGUF: only language models are supported")
    window, full_layers = getattr(config, "window", 0), getattr(config, "full_layers", 0)
    if 0 < window < config.max_positions and full_layers < config.layers:
        raise UserError(
            f"{family} with sliding_window {window} can't be written as GGUF, which does "
            "not store the window: set sliding_window to null in config.json to use full "
            "attention"
        )
    for key in sorted(values.keys() - WITH_A_PLACE - WITHOUT_ONE):
        if values[key] != FIXED.get(key):
            only = f": it must be {FIXED[key]!r}" if key in FIXED else ""
            raise UserError(f"{key} {values[key]!r} can't be written as GGUF{only}")
    rope = values["rope_parameters"]
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise UserError(
            f"rope_type {rope['rope_type']!r} can't be written as GGUF: use default, linear "
            "or llama3"
        )
    for key, usual in LLAMA3.items() if rope["rope_type"] == "llama3" else ():
        if rope[key] != usual:
            raise UserError(
                f"{key} {rope[key]} can't be written as GGUF: it must be {usual} with rope_type "
                "llama3"
            )
    return ARCHITECTURES[family]


def _check_output(path: Path, overwrite: bool, source: Path) -> None:
    """Raise UserError unless `path` may be written."""
    if path.suffix != ".gguf":
        raise UserError(
            f"--to gguf writes one file: use a name such as {path.name}.gguf for OUTPUT"
        )
    if path.is_symlink() or path.is_dir():
        raise UserError(f"{path} is a symbolic link or a directory: choose another name")
    if PART.fullmatch(path.name):
        raise UserError(
            f"{path} is named like one part of a model in several files: choose another name"
        )
    inputs = [source.with_name(name).resolve() for name in names_of_parts(source)]
    if path.resolve() in inputs:
        raise UserError(f"{path} is also the input: choose another name")
    if path.exists() and not overwrite:
        raise UserError(f"{path} already exists: choose another name, or use --overwrite")
    if path.exists() and not is_gguf(path):
        raise UserError(
            f"{path} is not a GGUF file, so --overwrite does not replace it: move it, or "
            "choose another name"
        )


def _add_config(writer: "gguf.GGUFWriter", values: dict[str, Any], source: ModelSource) -> None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    size, rope = head_size(values), values["rope_parameters"]
    writer.add_type("model")
    writer.add_name(source.path.stem)
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(values["num_key_value_heads"] or heads)
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(values["vocab_size"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(library().RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_tokenizer(writer: "gguf.GGUFWriter", source: ModelSource) -> str:
    """Add the tokenizer and the chat template. Return the reason if the tokenizer is omitted,
    otherwise an empty string."""
    files, reason = source.sidecar_files, ""
    with tempfile.TemporaryDirectory() as directory:
        for name, data in files.items():
            Path(directory, name).parent.mkdir(exist_ok=True)
            Path(directory, name).write_bytes(data)
        try:
            tokenizer = open_tokenizer(directory)
            metadata = metadata_of(tokenizer, files, source.config.vocab_size)
        except UserError as error:
            metadata = {"tokenizer.ggml.model": "no_vocab"}
            reason = str(error).replace(directory, str(source.path))
    metadata |= _generation_ids(source.generation, metadata)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    return reason


def _generation_ids(generation: dict, metadata: dict[str, Any]) -> dict[str, int]:
    """Return the token ids that end or pad generated text, by their GGUF keys."""
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    of_tokenizer = metadata.get("tokenizer.ggml.eos_token_id")
    ends.sort(key=lambda token: token != of_tokenizer)  # the tokenizer's id first
    ids = dict(zip(("eos", "eot"), ends, strict=False))
    ids |= {"bos": generation.get("bos_token_id"), "padding": generation.get("pad_token_id")}
    return {
        f"tokenizer.ggml.{key}_token_id": token for key, token in ids.items() if token is not None
    }


def _tensors(
    source: ModelSource,
    architecture: str,
    values: dict[str, Any],
    dtype: torch.dtype | None,
    progress: BytesWritten,
) -> dict[str, LazyTensor]:
    """Return the tensors, by their names in the file."""
    name_of, tensors = gguf_name_of(architecture, source.config.layers), {}
    rope = values["rope_parameters"]
    if rope["rope_type"] == "llama3":
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        positions = values["max_position_embeddings"]
        factors = rope_factors(head_size(values), rope["rope_theta"], positions, scaling)

        def fill(rows: torch.Tensor, start: int) -> None:
            rows.copy_(factors[start : start + len(rows)])

        tensors[ROPE_FACTORS] = LazyTensor(tuple(factors.shape), torch.float32, fill)
    for theirs, tensor in hugging_face_tensors(source, dtype, progress).items():
        if len(tensor.shape) == 1:
            tensor = tensor._replace(dtype=torch.float32)
        size = head_rows(architecture, values, theirs)
        tensors[name_of(theirs)] = _in_pairs(tensor, size) if size else tensor
    return tensors


def _in_pairs(tensor: LazyTensor, size: int) -> LazyTensor:
    """Return a tensor with the rows of each head in pairs: see `rows_in_pairs`."""

    def fill(rows: torch.Tensor, start: int) -> None:
        stop = start + len(rows)
        first, last = start // size * size, -(-stop // size) * size  # whole heads
        heads = torch.empty(last - first, *tensor.shape[1:], dtype=rows.dtype)
        tensor.fill(heads, first)
        theirs = np.argsort(rows_in_pairs(first, last, size))[start - first : stop - first]
        rows.copy_(heads[torch.from_numpy(theirs)])

    return LazyTensor(tensor.shape, tensor.dtype, fill)


def _write(
    writer: "gguf.GGUFWriter",
    path: Path,
    tensors: dict[str, LazyTensor],
    kind_of: dict[str, "gguf.GGMLQuantizationType"],
) -> None:
    """Write the metadata and the tensors to a new file at `path`."""
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for name, tensor in tensors.items():
        for piece in pieces_of_tensor(tensor):
            check_finite(name, piece)
            file.write(_bytes_of(name, piece, kind_of[name]))
        writer.write_padding(file, file.tell())
    file.flush()
    sync(file.fileno())
    writer.close()


def _bytes_of(name: str, piece: torch.Tensor, kind: "gguf.GGMLQuantizationType") -> memoryview:
    """Return rows of a tensor as bytes in the format `kind`. Raises UserError for a value that is
    too large for it."""
    most = {"Q8_0": 127, "F16": 1}.get(kind.name, math.inf) * torch.finfo(torch.float16).max
    if piece.numel() and (largest := piece.abs().max().item()) > most:
        raise UserError(
            f"{name} contains the value {largest:g}, which is too large for {kind.name}: "
            "use another data type"
        )
    if kind.name == "Q8_0":
        return library().quantize(piece.float().numpy(), kind).data
    if kind.name == "F16":
        piece = piece.to(torch.float16)
    return piece.contiguous().view(-1).view(torch.uint8).numpy().data


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` if the block raises no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        directory = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror}", exit_code=1) from error
    try:
        yield Path(directory, path.name)
        os.replace(Path(directory, path.name), path)
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror or error}", exit_code=1) from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
