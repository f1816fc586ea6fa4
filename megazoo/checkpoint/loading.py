"""Loading a run from a checkpoint of any layout: model, optimizer and the trainer's state."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from megazoo.checkpoint.base import check_base
from megazoo.checkpoint.places import TRAINER
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.schema import OptimizerState, checked_state
from megazoo.checkpoint.shards import saved_entries
from megazoo.checkpoint.verifying import verifying
from megazoo.errors import UserError
from megazoo.optim.adamw import AdamW
from megazoo.optim.base import MASTER
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter
from megazoo.terminal import byte_bar


def load(checkpoint: Checkpoint, model: Any, optimizer: AdamW | None = None) -> dict:
    """Fill this rank's parameters and optimizer state from a checkpoint of any layout; returns the
    trainer's state.

    Every rank calls it. UserError on all of them if a file has changed since it was written, unless
    the checkpoint was opened with verify=False. A checkpoint of adapters fills these, and what else
    was trained; UserError if the model's are others, or its other weights are not their base.
    """
    ctx = model.ctx
    with propagate_errors(ctx):
        _check_adapters(checkpoint, model)
        if optimizer:
            _check_states(checkpoint, optimizer)
            checked_state(checkpoint.trainer, OptimizerState, checkpoint.path / TRAINER)
        tensors = [
            (_name_of_weights(checkpoint, entry), entry.spec) for entry in saved_entries(model)
        ]
        states = list(_states_to_read(checkpoint, optimizer)) if optimizer else []
        tensors += [(name, entry.spec) for name, entry, *_ in states]
        files = checkpoint.files_of(tensors, ctx)
        weights = list(zip(saved_entries(model), tensors, strict=False))
        size = sum(entry.parameter.nbytes for entry, _ in weights)
        size += sum(tensor.nbytes for _, _, tensor, _ in states)
        with verifying(checkpoint, files, ctx), byte_bar(size, "load") as bar:
            for entry, (name, spec) in weights:
                checkpoint.read_into(name, entry.parameter, spec, ctx)
                bar.update(entry.parameter.nbytes)
            for name, entry, tensor, elements in states:
                checkpoint.read_range(name, tensor, elements, entry, ctx)
                bar.update(tensor.nbytes)
            trainer = checkpoint.trainer
            read_before = model.read_from if checkpoint.about_adapters else ()
            model.read_from = () if optimizer else (*read_before, checkpoint)
            if optimizer:
                optimizer.masters.note(optimizer.entries)
                optimizer.steps.fill_(trainer["optimizer_steps"])
            if optimizer and optimizer.loss_scale and "loss_scale" in trainer:
                optimizer.loss_scale.load(trainer["loss_scale"])
            model.sidecar_files = checkpoint.sidecar_files if ctx.rank == 0 else {}
            model.generation = checkpoint.generation
    return trainer


def _check_adapters(checkpoint: Checkpoint, model) -> None:
    """Raise UserError unless a checkpoint and the model hold the same: all, or adapters alone that
    are alike, on the same base."""
    stored = checkpoint.about_adapters.get("adapters")
    if stored is None and not model.attached:
        return
    if stored is None or not model.attached:
        theirs = "has no adapters, the model has: load it before megazoo.lora.add"
        if stored:
            theirs = (
                "holds adapters alone, and the model has none: megazoo.lora.load gives it these"
            )
        raise UserError(f"{checkpoint.path} {theirs}")
    ours = json.loads(json.dumps(asdict(model.attached)))
    for key in sorted(stored.keys() | ours.keys()):
        if stored.get(key) != ours.get(key):
            raise UserError(
                f"{checkpoint.path} has adapters of {key} {stored.get(key)}, the model's have "
                f"{ours.get(key)}: add such as the checkpoint's"
            )
    held = {entry.name for entry in saved_entries(model)}
    for entry in model.entries():
        if entry.name not in held and entry.name in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.path} has {entry.name}, which is frozen here: train the same"
            )
        if entry.name in held and entry.name not in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.path} has no {entry.name}: it was frozen then; freeze the same"
            )
    check_base(checkpoint, model)


def _name_of_weights(checkpoint: Checkpoint, entry: NamedParameter) -> str:
    """Return the name of the tensor that a parameter is read from: the master weights', if fp32 is
    wanted and they are there."""
    is_fp32 = entry.parameter.dtype == torch.float32
    return checkpoint.most_precise(entry.name) if is_fp32 else entry.name


def _states_to_read(
    checkpoint: Checkpoint, optimizer: AdamW
) -> Iterator[tuple[str, NamedParameter, torch.Tensor, tuple[int, int]]]:
    """Yield the tensors of an optimizer's state, each with its name in the checkpoint, its
    parameter, and which elements of this, flattened, it is of."""
    for entry in optimizer.entries:
        for state, tensor in optimizer.state[entry.name].items():
            is_master = state == MASTER
            name = checkpoint.most_precise(entry.name) if is_master else f"{entry.name}.{state}"
            yield name, entry, tensor, optimizer.ranges[entry.name]


def _check_states(checkpoint: Checkpoint, optimizer: AdamW) -> None:
    """Raise UserError if the checkpoint lacks the state of a parameter that is trained."""
    missing = [entry.name for entry in optimizer.entries if not checkpoint.states_of(entry.name)]
    if missing and not checkpoint.has_states:
        raise UserError(f"{checkpoint.path} has no optimizer state: load its weights alone")
    if missing:
        raise UserError(
            f"{checkpoint.path} has no optimizer state of {missing[0]}: it was frozen then; "
            "freeze the same, or start a new run with the weights alone"
        )
    for entry in optimizer.entries:
        found = set(checkpoint.states_of(entry.name)) - {MASTER}
        wanted = optimizer.state[entry.name].keys() - {MASTER}
        if found != wanted:
            raise UserError(
                f"{checkpoint.path} has {' and '.join(sorted(found))} of {entry.name}, not the "
                f"{' and '.join(sorted(wanted))} of {type(optimizer).__name__}: it is another "
                "optimizer's state; load its weights alone"
            )
