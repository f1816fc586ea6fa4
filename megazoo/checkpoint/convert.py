"""From any source of named tensors to shards of any layout, or to a Hugging Face directory, one tensor at a time."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megazoo.checkpoint.format import (
    MANIFEST,
    Lazy,
    check_replaceable,
    find_checkpoint,
    replaced_directory,
    write_json,
    write_safetensors,
)
from megazoo.checkpoint.hugging_face import CONFIG, HuggingFaceDirectory, their_names
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.save import write_manifest, write_rank
from megazoo.errors import UserError
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, Piece

# Files that travel along with the weights, so that what is written runs as it is.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
Progress = Callable[[int], None]  # told of bytes written


def open_source(path: str | Path) -> Checkpoint | HuggingFaceDirectory:
    """A checkpoint of ours, or a Hugging Face directory (one with a config.json). UserError if it is neither."""
    path = Path(path)
    if (path / CONFIG).is_file() and not (path / MANIFEST).is_file():
        return HuggingFaceDirectory(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a directory")
    try:
        find_checkpoint(path)
    except UserError as error:
        raise UserError(f"{error}, nor {CONFIG}") from None
    return Checkpoint(path)


def write_shards(
    source: Checkpoint | HuggingFaceDirectory,
    directory: Path,
    tp: int,
    pp: int,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> None:
    """Write all that `source` holds, optimizer state too, as shards for tp x pp. dtype: of the weights; as stored."""
    config, family = source.model_config, source.model
    family.check(config, tp, pp)
    check_replaceable(directory, overwrite)

    def lazy(name: str, spec: ParameterSpec, ctx: ParallelContext, dtype: torch.dtype) -> Lazy:
        shape = spec.local_shape(ctx.tp_size, ctx.tp_rank)

        def load() -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype)
            source.read_into(name, tensor, spec, ctx)
            progress(tensor.nbytes)
            return tensor

        return Lazy(shape, dtype, load)

    with replaced_directory(directory) as staging:
        written = []
        for rank in range(tp * pp):
            ctx = ParallelContext.virtual(tp, pp, rank=rank)
            model = family.on_meta(config, ctx)

            def weight(entry, ctx=ctx) -> Lazy:
                return lazy(entry.name, entry.spec, ctx, dtype or source.dtype_of(entry.name))

            def states(entry, ctx=ctx) -> dict[str, Lazy]:
                names = {state: f"{entry.name}.{state}" for state in source.states_of(entry.name)}
                return {state: lazy(name, entry.spec, ctx, source.dtype_of(name)) for state, name in names.items()}

            written.append(write_rank(staging, model, weight, states if source.has_states else None))
        _copy_companions(source.path, staging)
        write_manifest(staging, config, ParallelContext.virtual(tp, pp), written, source.trainer)


def write_hugging_face(
    source: Checkpoint | HuggingFaceDirectory,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> None:
    """Write a complete Hugging Face model directory. dtype: as stored, by default. max_shard_size: bytes of a file.

    UserError if transformers' model can't represent the config, with the field that it lacks.
    """
    config, family = source.model_config, source.model
    if not hasattr(family.Config, "to_hugging_face"):
        raise UserError(f"{family.__name__} has no table of Hugging Face's names: it can't be written as such")
    values = config.to_hugging_face()
    check_replaceable(directory, overwrite)
    whole = ParallelContext()
    tensors: dict[str, Lazy] = {}
    for entry in family.on_meta(config, whole).entries():
        theirs, spec = their_names(family, entry.name), entry.spec
        kind = dtype or source.dtype_of(entry.name)
        parts = spec.shard.parts if len(theirs.names) > 1 else (spec.shape[0],)
        for index, (name, rows) in enumerate(zip(theirs.names, parts, strict=True)):
            first = sum(parts[:index])
            shape = (rows, *spec.shape[1:])

            def load(name=entry.name, spec=spec, first=first, rows=rows, kind=kind, turn=theirs.transposed):
                tensor = torch.empty(rows, *spec.shape[1:], dtype=kind)
                box = ((first, first + rows), *((0, size) for size in spec.shape[1:]))
                source.read_pieces(name, tensor, spec, [Piece(box, (0,) * len(box))])
                progress(tensor.nbytes)
                return tensor.T if turn else tensor

            tensors[name] = Lazy(shape[::-1] if theirs.transposed else shape, kind, load)
    files = _cut(tensors, max_shard_size)
    values["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with replaced_directory(directory) as staging:
        write_json(staging / CONFIG, values)
        _copy_companions(source.path, staging)
        where = {}
        for number, group in enumerate(files, 1):
            file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write_safetensors(staging / file, group)
            where |= dict.fromkeys(group, file)
        if len(files) > 1:
            totals = {
                "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
                "total_size": sum(tensor.bytes for tensor in tensors.values()),
            }
            write_json(
                staging / "model.safetensors.index.json",
                {"metadata": totals, "weight_map": dict(sorted(where.items()))},
            )


def weight_bytes(source: Checkpoint | HuggingFaceDirectory, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights, in dtype or as stored."""
    entries = source.model.on_meta(source.model_config, ParallelContext()).entries()
    return sum(math.prod(e.spec.shape) * (dtype or source.dtype_of(e.name)).itemsize for e in entries)


def total_bytes(source: Checkpoint | HuggingFaceDirectory, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights, and of the optimizer state if there is one."""
    names = [(e.name, e.spec) for e in source.model.on_meta(source.model_config, ParallelContext()).entries()]
    states = [(f"{name}.{state}", spec) for name, spec in names for state in source.states_of(name)]
    return weight_bytes(source, dtype) + sum(math.prod(s.shape) * source.dtype_of(n).itemsize for n, s in states)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "200MB", "1GiB" or a number."""
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
        if files[-1] and size + tensor.bytes > limit:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.bytes
    return files


def _copy_companions(source: Path, directory: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copy(source / name, directory / name)
