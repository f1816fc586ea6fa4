"""Convert any source of named tensors to a checkpoint of torch.distributed.checkpoint (DCP), a few
megabytes at a time, with the optimizer state as that of torch's AdamW."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megazoo.checkpoint.directories import new_directory
from megazoo.checkpoint.places import TRAINER
from megazoo.checkpoint.schema import OptimizerState, checked_state
from megazoo.checkpoint.verifying import verifying
from megazoo.checkpoint.writing import BytesWritten
from megazoo.errors import UserError
from megazoo.families.names import check_names
from megazoo.formats.dcp.names import HEAD, STEP, parts_in_memory
from megazoo.formats.dcp.writing import Block, Value, write_chunks, write_metadata
from megazoo.formats.hugging_face.export import (
    hugging_face_config,
    lazy_columns,
    lazy_rows,
    write_small_files,
)
from megazoo.formats.source import ModelSource
from megazoo.optim.base import MOMENTS, MOMENTUM
from megazoo.parallel.context import ParallelContext

MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."


def write_dcp(
    source: ModelSource,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: BytesWritten = lambda _: None,
) -> None:
    """Write a checkpoint with a config.json, as `dcp.save({"model": ..., "optimizer": ...})` writes
    it for the model of transformers.

    dtype: of the weights; by default that of the most precise values. Raises UserError if the
    transformers model can't represent the config, or torch's AdamW the optimizer state.
    """
    hugging_face_config(source.config)  # raises before writing
    blocks = list(blocks_of(source, dtype, progress))
    with new_directory(directory, overwrite, source.path) as staging:
        with verifying(source, source.all_files(states=True), ParallelContext()):
            written = write_chunks(staging / "__0_0.distcp", blocks, values_of(source))
        kind, sidecars = blocks[0].values.dtype, source.sidecar_files
        write_small_files(staging, source.config, kind, source.generation, sidecars)
        write_metadata(staging, written["tensors"], path_of)


def blocks_of(
    source: ModelSource, dtype: torch.dtype | None, progress: BytesWritten = lambda _: None
) -> Iterator[Block]:
    """Yield the weights and the optimizer's moments. They are read while they are written."""
    check_names(source.model, source.specs)
    for name, spec in source.specs.items():
        weight = source.most_precise(name)
        tensors = {"": (weight, dtype or source.dtype_of(weight))}
        for state in _moments_of(source, name):
            tensors[state] = (f"{name}.{state}", source.dtype_of(f"{name}.{state}"))
        for part in parts_in_memory(source.model, name, spec):
            lazy = lazy_columns if part.transposed else lazy_rows
            for state, (stored, kind) in tensors.items():
                values = lazy(source, stored, spec, part.runs, kind, progress)
                keys = keys_of(source.config, name, part.name, state)
                shape = spec.shape if part.matrix else values.shape
                start = (*part.matrix, *(0 for _ in values.shape))
                yield Block(keys, shape, start, values)


def keys_of(config: Any, name: str, part: str, state: str = "") -> list[str]:
    """Return the keys of a part of a weight, or of one of its moments.

    An embedding that is also the head has two, but its moments have one, as in torch. name: of the
    megazoo tensor. part: see `parts_in_memory`.
    """
    if state in MOMENTS:
        return [f"{STATE}{part}.{state}"]
    tied = name == "embedding.weight" and getattr(config, "tie_embeddings", False)
    return [MODEL + each for each in ([part, HEAD] if tied and not config.num_labels else [part])]


def values_of(source: ModelSource) -> list[Value]:
    """Return the number of steps and the settings of torch's AdamW, for each trained parameter."""
    groups: tuple[dict, dict] = ({}, {})  # names with and without weight decay
    for name, spec in source.specs.items():
        if _moments_of(source, name):
            for part in parts_in_memory(source.model, name, spec):
                groups[not spec.decays][part.name] = None
    if not source.has_states:
        return []
    state = checked_state(source.trainer, OptimizerState, source.path / TRAINER)
    return optimizer_values(
        [list(group) for group in groups], state.optimizer_steps, _settings_of(source)
    )


def optimizer_values(groups: list[list[str]], steps: int, settings: dict[str, Any]) -> list[Value]:
    """Return the number of steps and the settings of torch's AdamW.

    A program may ask for the settings of each group, or of each parameter (flattened). A program
    with one group gets the settings of the first.

    groups: names of the parameters with and without weight decay. settings: known arguments of
    AdamW; the others have torch's defaults.
    """
    defaults = inspect.signature(torch.optim.AdamW).parameters.values()
    known = {each.name: each.default for each in defaults if each.name != "params"} | settings
    known["decoupled_weight_decay"] = True
    names = [name for group in groups for name in group]
    values = [Value([f"{STATE}{name}.{STEP}" for name in names], torch.tensor(float(steps)))]
    for number, group in enumerate(groups):
        values.append(Value([f"{GROUPS}{number}.params"], group))
        # A learning-rate schedule adds initial_lr to the group.
        values.append(Value([f"{GROUPS}{name}.initial_lr" for name in group], known["lr"]))
        for key, value in known.items():
            keys = [f"{GROUPS}{each}.{key}" for each in (number, *group)]
            values.append(Value(keys, 0.0 if number and key == "weight_decay" else value))
    return values


def path_of(key: str) -> tuple[str | int, ...]:
    """Return the place of a key in the nested dictionaries of the model and the optimizer."""
    if key.startswith(MODEL):
        return "model", key.removeprefix(MODEL)
    if key.startswith(STATE):
        return "optimizer", "state", *key.removeprefix(STATE).rsplit(".", 1)
    group, _, setting = key.removeprefix(GROUPS).rpartition(".")
    if group.isdigit():
        return "optimizer", "param_groups", int(group), setting
    return "optimizer", key.removeprefix("optimizer.")


def _moments_of(source: ModelSource, name: str) -> list[str]:
    """Return the names of AdamW's states of a parameter. Raises UserError if they are those of
    another optimizer."""
    states = source.states_of(name)
    if MOMENTUM in states:
        raise UserError(
            f"{source.path} has Muon's momentum of {name}, which AdamW of torch can't continue: "
            "write only the weights, with --to hf"
        )
    return [state for state in MOMENTS if state in states]


def _settings_of(source: ModelSource) -> dict[str, Any]:
    """Return the arguments of AdamW that the trainer of a checkpoint recorded."""
    found = source.trainer.get("settings")
    settings = found if isinstance(found, dict) else {}
    known = {key: settings[key] for key in ("lr", "weight_decay") if _is_number(settings.get(key))}
    betas = settings.get("beta1"), settings.get("beta2")
    return known | ({"betas": betas} if all(map(_is_number, betas)) else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
