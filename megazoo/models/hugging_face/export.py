"""From any source of named tensors to a Hugging Face directory, one tensor at a time."""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from megazoo.checkpoint.format import (
    Lazy,
    check_replaceable,
    new_directory,
    write_atomically,
    write_json,
    write_safetensors,
)
from megazoo.errors import UserError
from megazoo.files import in_threads
from megazoo.models.hugging_face.directory import CONFIG, TOKEN_IDS, their_names
from megazoo.models.source import ModelSource
from megazoo.parallel.shard import ParameterSpec, Piece

Progress = Callable[[int], None]  # told of bytes written


def write_hugging_face(
    source: ModelSource,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    save_config: bool = True,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> None:
    """Write a complete Hugging Face model directory.

    dtype: as stored, by default. max_shard_size: the largest file, in bytes or as "5GB".
    save_config: config.json, too.
    UserError if transformers' model can't represent the config, with the field that it lacks.
    """
    family, limit, values = (
        source.model,
        parse_size(max_shard_size),
        hugging_face_config(source.config),
    )
    check_replaceable(directory, overwrite)

    def part(name: str, spec: ParameterSpec, first: int, count: int, transposed: bool) -> Lazy:
        """Rows of one of our tensors, `count` from `first` on, as one of theirs."""
        kind = dtype or source.dtype_of(name)
        shape = (count, *spec.shape[1:])[:: -1 if transposed else 1]

        def fill(rows: torch.Tensor, start: int) -> None:
            ours = rows.T if transposed else rows
            begin = (first, start) if transposed else (first + start, *(0 for _ in shape[1:]))
            box = tuple((low, low + size) for low, size in zip(begin, ours.shape, strict=True))
            source.read_pieces(name, ours, spec, [Piece(box, (0,) * len(box))])
            progress(rows.nbytes)

        return Lazy(shape, kind, fill)

    tensors: dict[str, Lazy] = {}
    for name, spec in source.specs.items():
        theirs, first = their_names(family, name), 0
        for their_name, count in zip(
            theirs.names, spec.shard.parts if len(theirs.names) > 1 else spec.shape[:1], strict=True
        ):
            tensors[their_name] = part(name, spec, first, count, theirs.transposed)
            first += count
    files = _cut(tensors, limit)
    # Without these, transformers assumes the ids of its own models.
    values = {name: source.generation.get(name) for name in TOKEN_IDS} | values
    values["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with new_directory(directory) as staging:
        if save_config:
            write_json(staging / CONFIG, values)
        for name, data in source.sidecar_files.items():
            write_atomically(staging / name, data)
        count = len(files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        names = names if count > 1 else ["model.safetensors"]
        in_threads(
            lambda index: write_safetensors(staging / names[index], files[index]), range(count)
        )
        if len(files) > 1:
            totals = {
                "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
                "total_size": sum(tensor.nbytes for tensor in tensors.values()),
            }
            where = {name: file for file, group in zip(names, files, strict=True) for name in group}
            index = {"metadata": totals, "weight_map": dict(sorted(where.items()))}
            write_json(staging / "model.safetensors.index.json", index)


def hugging_face_config(config) -> dict:
    """What config.json says of a config of ours. UserError if transformers' model can't represent
    it."""
    if not hasattr(config, "to_hugging_face"):
        raise UserError(
            f"{type(config).__name__} has no table of Hugging Face's names: it can't be written as such"
        )
    return config.to_hugging_face()


def parse_size(text: str | int) -> int:
    """Bytes of "5GB", "200MB", "1GiB" or a number."""
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


def _cut(tensors: dict[str, Lazy], limit: int) -> list[dict[str, Lazy]]:
    """The tensors in files of at most `limit` bytes, or of one tensor."""
    files, size = [{}], 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > limit:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return files
