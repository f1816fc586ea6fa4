"""Save the steps of a run as checkpoints of torch.distributed.checkpoint: each rank writes its
shards as chunks of the tensors of the transformers model."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from megazoo.checkpoint.directories import check_names
from megazoo.checkpoint.places import TRAINER
from megazoo.checkpoint.saving import Format, StepContents
from megazoo.checkpoint.writing import LazyTensor, write_json
from megazoo.families.registry import FAMILIES
from megazoo.formats.dcp.export import keys_of, optimizer_values, path_of
from megazoo.formats.dcp.names import parts_in_memory
from megazoo.formats.dcp.source import MODEL, RunModel
from megazoo.formats.dcp.writing import Block, Stored, write_chunks, write_metadata
from megazoo.formats.hugging_face.export import write_small_files
from megazoo.optim.base import MOMENTS, STATES
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, overlap
from megazoo.sidecars import GENERATION


def write_rank(directory: Path, contents: StepContents) -> dict:
    """Write the chunks of one rank. "decays" of the result has the names of trained parameters, and
    whether weight decay applies to them."""
    decays: dict[str, bool] = {}
    blocks = _blocks_of(contents, decays)
    written = write_chunks(directory / f"__{contents.ctx.rank}_0.distcp", blocks, [])
    return {**written, "decays": decays}


def complete(directory: Path, contents: StepContents, written: list[dict]) -> None:
    """Write the settings of the optimizer, the small files, and finally the metadata."""
    check_names(directory, {name for part in written for name in part["files"]})
    stored: list[Stored] = [each for part in written for each in part["tensors"]]
    trained = {name: decays for part in written for name, decays in part["decays"].items()}
    if trained:
        groups = [[name for name in trained if trained[name] == decays] for decays in (True, False)]
        values = optimizer_values(groups, contents.trainer["optimizer_steps"], contents.settings)
        stored += write_chunks(directory / "__0_1.distcp", [], values)["tensors"]
    generation = json.loads(contents.sidecar_files.get(GENERATION, b"{}"))
    dtype = next(each.dtype for each in stored if each.dtype)
    write_small_files(directory, contents.config, dtype, generation, contents.sidecar_files)
    model = RunModel(contents.family, asdict(contents.config))
    write_json(directory / TRAINER, {**contents.trainer, MODEL: asdict(model)})
    write_metadata(directory, stored, path_of)


DCP = Format(write_rank, complete)


def _blocks_of(contents: StepContents, decays: dict[str, bool]) -> Iterator[Block]:
    """Yield the blocks that a rank writes, and note in `decays` what it trains."""
    model, config = FAMILIES[contents.family], contents.config
    tensors = (each for file in contents.files.values() for each in file.items())
    for full_name, (spec, tensor) in tensors:
        base, _, last = full_name.rpartition(".")
        name, state = (base, last) if last in STATES else (full_name, "")
        if not state and name in contents.masters:
            continue  # the master weight is written in its place
        values = _filled(tensor) if isinstance(tensor, LazyTensor) else tensor.detach()
        for part, shape, start, box in _parts_of(model, name, spec, values, contents.ctx):
            if state in MOMENTS:
                decays[part] = bool(spec.decays)
            yield Block(keys_of(config, name, part, state), shape, start, box)


def _parts_of(
    model: type,
    name: str,
    spec: ParameterSpec,
    values: torch.Tensor,
    ctx: ParallelContext,
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Yield the parts of transformers' tensors that a rank's shard has: its name, the shape of
    the tensor, the start of the part, and its values."""
    pieces = [piece for piece in spec.pieces(ctx.place) if piece.owned]
    for part in parts_in_memory(model, name, spec):
        lead = len(part.matrix)
        rows = sum(run.count for run in part.runs)
        shape = spec.shape if lead else (rows, *spec.shape[1:])
        for run in part.runs:
            for piece in pieces:
                if not (shared := overlap(piece.box, run.box(spec.shape))):
                    continue
                (first, _), *columns = shared[lead:]
                start = (first + run.theirs - run.ours, *(begin for begin, _ in columns))
                box = values[piece.index(shared)].flatten(0, lead)
                turn = slice(None, None, -1 if part.transposed else 1)
                yield (
                    part.name,
                    shape[turn],
                    (*part.matrix, *start[turn]),
                    box.T if part.transposed else box,
                )


def _filled(tensor: LazyTensor) -> torch.Tensor:
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    tensor.fill(values, 0)
    return values
