"""The files of a step: which tensors each rank writes, and the manifest of all that was written."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megazoo.checkpoint.directories import check_names, check_unchanged, stamp, sync_directory
from megazoo.checkpoint.format import (
    FOLDED_VERSION,
    FORMAT_VERSION,
    file_of_rank,
    manifest_checksum,
    spec_from_manifest,
    tensor_to_manifest,
)
from megazoo.checkpoint.places import MANIFEST, TRAINER
from megazoo.checkpoint.writing import (
    LazyTensor,
    write_atomically,
    write_json,
    write_safetensors,
)
from megazoo.parallel.axes import Axis
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.shard import ParameterSpec
from megazoo.parallel.storage import storage_of
from megazoo.sidecars import TEMPLATE_FILE, TEMPLATE_FOLDER

# A rank's tensors, by file and by global name.
Files = dict[str, dict[str, tuple[ParameterSpec, torch.Tensor | LazyTensor]]]
# states_of(entry, writer): the optimizer's states of a parameter on the replica that writes them.
# The other replicas also call it, because it may be collective; their result is not used.
StatesOf = Callable[[NamedParameter, int], Mapping[str, torch.Tensor | LazyTensor]]


def saved_entries(model: Any) -> list[NamedParameter]:
    """Return the parameters of this rank that a checkpoint holds: all; or, in a model with attached
    parameters, only these and the other trained ones."""
    return [
        entry
        for entry in model.entries()
        if not model.attached or entry.spec.added or entry.parameter.requires_grad
    ]


def files_of_rank(
    model: Any,
    states_of: StatesOf | None,
    weight_of: Callable[[NamedParameter], LazyTensor] | None = None,
) -> Files:
    """Return a rank's files and their tensors. A file's name has {tp} in place of the tp rank, and
    {ep} in place of the rank along a folded axis that shards its tensors.

    Each parameter is written once, by its first replica. If it is replicated over tp, tp rank 0
    writes it; if it is tied, the first of its stages. The replicas share the writing of the
    optimizer's states, and of parameters that rest as ranges. weight_of: returns the values of a
    parameter without memory.
    """
    ctx, files, storage = model.ctx, {}, storage_of(model)
    stored = storage.place if storage else {}
    owned = [entry for entry in saved_entries(model) if entry.pp_ranks[0] == ctx.pp_rank]
    for axis, replicas in _axes_of_replicas(owned, ctx).items():
        alike = [entry for entry in owned if entry.spec.replicas(ctx) is replicas]
        entries = [entry for entry in alike if entry.spec.shard or ctx.tp_rank == 0]
        place = f"tp_{{tp}}{axis and f'_{axis}_{{{axis}}}'}_pp_{ctx.pp_rank}"
        # computed from all parameters of the stage, so that tp ranks agree
        writer_of, weights = _writers(alike, replicas.size), {}
        for entry in entries:
            parameter = entry.parameter
            writer = writer_of[entry.name] if parameter in stored else 0
            if storage and parameter in stored:
                parameter = storage.whole(parameter, writer)
            if writer == replicas.rank:
                tensor = weight_of(entry) if weight_of else parameter
                weights[entry.name] = (entry.spec, tensor)
        if replicas.rank == 0 or stored:
            of_replica = f"_dp_{replicas.rank}" if stored else ""
            files[f"model_{place}{of_replica}.safetensors"] = weights
        if states_of:
            states = {}
            for entry in entries:
                tensors = states_of(entry, writer_of[entry.name])
                if writer_of[entry.name] == replicas.rank:
                    for state, tensor in tensors.items():
                        states[f"{entry.name}.{state}"] = (entry.spec, tensor)
            files[f"optimizer_{place}_dp_{replicas.rank}.safetensors"] = states
    return files


def _axes_of_replicas(entries: list[NamedParameter], ctx: ParallelContext) -> dict[str, Axis]:
    """Return the axes of the replicas of some parameters, by the folded axis that cuts those; the
    token axis, always there, by no name."""
    cuts = chain.from_iterable(entry.spec.shards_in(ctx) for entry in entries)
    names = dict.fromkeys(cut.axis for cut in cuts if cut.axis != "tp")
    return {"": ctx.token_axis} | {name: ctx.folded[name].replicas for name in names}


def _writers(entries: list[NamedParameter], replicas: int) -> dict[str, int]:
    """Choose the replica that writes each parameter's optimizer state: contiguous shares of about
    equal size."""
    sizes = {entry.name: torch.Size(entry.spec.shape).numel() for entry in entries}
    total, before, writers = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        writers[name] = (2 * before + size) * replicas // (2 * total)
        before += size
    return writers


def write_rank(directory: Path, files: Files, ctx: ParallelContext) -> dict:
    """Write one rank's files; return the manifest's entries for the files and their tensors, and
    the stamps for `check_rank`."""
    infos, stored, stamps = {}, {}, {}
    for pattern, tensors in files.items():
        name = file_of_rank(pattern, ctx.place)
        values = {tensor_name: tensor for tensor_name, (_, tensor) in tensors.items()}
        infos[name] = write_safetensors(directory / name, values)
        stamps[name] = stamp(directory / name)
        for tensor_name, (spec, tensor) in tensors.items():
            stored[tensor_name] = tensor_to_manifest(spec, tensor.dtype, pattern, ctx)
    return {"files": infos, "tensors": stored, "stamps": stamps}


def check_rank(directory: Path, written: dict) -> None:
    """Raise UserError if the files of a rank were changed. written: the result of `write_rank`."""
    for name, info in written["files"].items():
        check_unchanged(directory / name, written["stamps"][name], info)


def write_manifest(
    directory: Path,
    family: str,
    config: Any,
    ctx: ParallelContext,
    written: list[dict],
    trainer: dict,
    sidecar_files: dict[str, bytes],
    attached: dict,
) -> None:
    """Write trainer.json, the sidecar files and finally the manifest.

    written: the results of `write_rank` of all ranks. attached: the manifest's entries on what is
    attached to the model. UserError if there are other files in the directory.
    """
    files = {name: info for part in written for name, info in part["files"].items()}
    check_names(directory, set(files))
    tensors = {name: stored for part in written for name, stored in part["tensors"].items()}
    files[TRAINER] = write_json(directory / TRAINER, trainer)
    for name, data in sidecar_files.items():
        files[name] = write_atomically(directory / name, data)
    if any(map(TEMPLATE_FILE.fullmatch, sidecar_files)):
        sync_directory(directory / TEMPLATE_FOLDER)
    layout: dict[str, Any] = {"tp": ctx.tp_size, "pp": ctx.pp_size, "dp": ctx.token_axis.size}
    shards = chain.from_iterable(spec_from_manifest(stored).shards for stored in tensors.values())
    if used := {shard.axis for shard in shards} - {"tp"}:
        layout["folded"] = {axis: ctx.folded[axis].size for axis in sorted(used)}
    manifest = {
        "format": FOLDED_VERSION if used else FORMAT_VERSION,
        "family": family,
        "config": asdict(config),
        "layout": layout,
        "files": files,
        "tensors": tensors,
        **attached,
    }
    write_json(directory / MANIFEST, {**manifest, "crc32": manifest_checksum(manifest)})
