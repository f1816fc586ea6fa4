"""Convert any source of named tensors to a Hugging Face directory, one tensor at a time."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megazoo.checkpoint.directories import new_directory
from megazoo.checkpoint.places import CONFIG, INDEX
from megazoo.checkpoint.source import TensorSource
from megazoo.checkpoint.verifying import verifying
from megazoo.checkpoint.writing import (
    BytesWritten,
    LazyTensor,
    write_atomically,
    write_json,
    write_safetensors,
)
from megazoo.errors import UserError
from megazoo.families.names import Run, check_names, hf_names
from megazoo.families.registry import FAMILIES, families_by_model_type, family_of
from megazoo.files import in_threads
from megazoo.formats.hugging_face.config import CLASSES, class_name
from megazoo.formats.hugging_face.directory import TOKEN_IDS
from megazoo.formats.source import ModelSource
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, Piece


def write_hugging_face(
    source: ModelSource,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: BytesWritten = lambda _: None,
) -> None:
    """Write a complete Hugging Face model directory.

    dtype: of the weights; by default as stored. max_shard_size: maximum size of a file, in bytes or
    as "5GB". Raises UserError, with the name of the field, if the transformers model can't
    represent the config.
    """
    parse_size(max_shard_size), hugging_face_config(source.config)  # raise before writing
    with new_directory(directory, overwrite, source.path) as staging:
        write_model(source, staging, dtype=dtype, max_shard_size=max_shard_size, progress=progress)


def write_model(
    source: ModelSource,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    progress: BytesWritten = lambda _: None,
) -> None:
    """Write the files of a Hugging Face model into an existing directory: see
    `write_hugging_face`."""
    limit = parse_size(max_shard_size)
    tensors = hugging_face_tensors(source, dtype, progress)
    dtype = next(iter(tensors.values())).dtype
    write_small_files(directory, source.config, dtype, source.generation, source.sidecar_files)
    with verifying(source, source.all_files(states=False), ParallelContext()):
        _write_weights(directory, _cut_into_files(tensors, limit))


def write_small_files(
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    generation: dict,
    sidecar_files: dict[str, bytes],
) -> None:
    """Write config.json and the sidecar files. dtype: of the weights. generation: the values of
    generation_config.json."""
    # Without these, transformers assumes the default ids of its models.
    values = {name: generation.get(name) for name in TOKEN_IDS} | hugging_face_config(config)
    values["dtype"] = str(dtype).removeprefix("torch.")
    write_json(directory / CONFIG, values)
    for name, data in sidecar_files.items():
        write_atomically(directory / name, data)


def hugging_face_config(config: Any) -> dict:
    """Return the values of config.json for a megazoo config. Raises UserError if the transformers
    model can't represent it."""
    if not hasattr(config, "to_hugging_face"):
        raise UserError(
            f"{type(config).__name__} has no table of Hugging Face names: it can't be "
            "written as a Hugging Face directory"
        )
    values, family = config.to_hugging_face(), family_of(config)
    other = families_by_model_type().get(values["model_type"])
    if other is not FAMILIES[family]:
        raise UserError(
            f"{type(config).__name__} of {family} writes model_type {values['model_type']!r}, "
            f"which transformers would load as {values['architectures'][0]}: let to_hugging_face "
            "write the model_type of HUGGING_FACE, as in docs/new_model.md, or use shards"
        )
    return values | _own_class(values, config)


def _own_class(values: dict, config: Any) -> dict:
    """Return `architectures` with the class of a custom family, if the family declares its name, or
    if its config inherited the class of another family: a reader that selects by class would build
    that one."""
    architecture = (values.get("architectures") or [""])[0]
    head = re.search(f"{CLASSES}$", architecture)
    model = FAMILIES[family_of(config)]
    declared = model.HUGGING_FACE.class_name
    parents = [each for each in FAMILIES.loaded.values() if each in model.__mro__[1:]]
    inherited = declared in [parent.HUGGING_FACE.class_name for parent in parents]
    if declared and head and not inherited:
        return {"architectures": [declared + head[0]]}
    for base in type(config).__mro__[1:]:
        other = next((model for model in FAMILIES.loaded.values() if model.Config is base), None)
        if other is None or head is None or not hasattr(base, "to_hugging_face"):
            continue
        inherited = other.presets[f"{other.family}-tiny"].to_hugging_face()["architectures"][0]
        if re.sub(f"{CLASSES}$", "", inherited) == architecture.removesuffix(head[0]):
            return {"architectures": [f"{class_name(values['model_type'])}{head[0]}"]}
    return {}


def parse_size(text: str | int) -> int:
    """Return the number of bytes in "5GB", "200MB", "1GiB" or a number."""
    text = str(text)
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
    number = text.strip().rstrip("KMGTIBkmgtib ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise UserError(f"{text!r} is not a size such as 5GB or 200MB")
    return size


def hugging_face_tensors(
    source: ModelSource, dtype: torch.dtype | None, progress: BytesWritten
) -> dict[str, LazyTensor]:
    """Return the Hugging Face tensors, by name. They are read while they are written."""
    tensors = {}
    check_names(source.model, source.specs)
    for name, spec in source.specs.items():
        theirs, kind = hf_names(source.model, name), dtype or source.dtype_of(name)
        for part, runs in theirs.parts(spec):
            lazy = lazy_columns if theirs.transposed else lazy_rows
            tensors[part] = lazy(source, name, spec, runs, kind, progress)
    return tensors


def lazy_rows(
    source: TensorSource,
    name: str,
    spec: ParameterSpec,
    runs: Sequence[Run],
    dtype: torch.dtype,
    progress: BytesWritten = lambda _: None,
) -> LazyTensor:
    """Return rows of a megazoo tensor as a Hugging Face tensor."""
    outer = len(runs[0].index)  # dimensions of a stack before the rows
    shape = (sum(run.count for run in runs), *spec.shape[outer + 1 :])

    def fill(rows: torch.Tensor, start: int) -> None:
        pieces = []
        for run in runs:
            low = max(run.theirs, start)
            high = min(run.theirs + run.count, start + len(rows))
            if low < high:
                part = run._replace(ours=low + run.ours - run.theirs, count=high - low)
                offset = [0] * len(spec.shape)
                offset[outer] = low - start
                pieces.append(Piece(part.box(spec.shape), tuple(offset)))
        source.read_pieces(name, rows.view((1,) * outer + rows.shape), spec, pieces)
        progress(rows.nbytes)

    return LazyTensor(shape, dtype, fill)


def lazy_columns(
    source: TensorSource,
    name: str,
    spec: ParameterSpec,
    runs: Sequence[Run],
    dtype: torch.dtype,
    progress: BytesWritten,
) -> LazyTensor:
    """Return rows of a megazoo tensor, one run, as a Hugging Face tensor that is transposed."""
    (run,) = runs

    def fill(columns: torch.Tensor, start: int) -> None:
        box = ((run.ours, run.ours + run.count), (start, start + len(columns)))
        source.read_pieces(name, columns.T, spec, [Piece(box, (0, 0))])
        progress(columns.nbytes)

    return LazyTensor((spec.shape[1], run.count), dtype, fill)


def _cut_into_files(tensors: dict[str, LazyTensor], limit: int) -> list[dict[str, LazyTensor]]:
    """Distribute the tensors over files of at most `limit` bytes. A larger tensor gets a separate
    file."""
    files, size = [{}], 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > limit:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return files


def _write_weights(directory: Path, files: list[dict[str, LazyTensor]]) -> None:
    """Write the weights under the file names that transformers expects, with an index if there are
    several files."""
    if len(files) == 1:
        write_safetensors(directory / "model.safetensors", files[0])
        return
    count = len(files)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    in_threads(
        lambda index: write_safetensors(directory / names[index], files[index]), range(count)
    )
    tensors = [tensor for file in files for tensor in file.values()]
    totals = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    file_of = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
    index = {"metadata": totals, "weight_map": dict(sorted(file_of.items()))}
    write_json(directory / INDEX, index)
