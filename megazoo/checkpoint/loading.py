"""Loads a run from a checkpoint of any parallel layout: model, optimizer and trainer state."""

from collections.abc import Iterator
from typing import Any

import torch

from megazoo.checkpoint.places import TRAINER
from megazoo.checkpoint.schema import OptimizerState, checked_state
from megazoo.checkpoint.shards import saved_entries
from megazoo.checkpoint.source import TensorSource
from megazoo.checkpoint.verifying import verifying
from megazoo.errors import UserError
from megazoo.optim.adamw import AdamW
from megazoo.optim.base import AVERAGE, MASTER
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.storage import in_memory
from megazoo.terminal import byte_bar


def load(checkpoint: TensorSource, model: Any, optimizer: AdamW | None = None) -> dict:
    """Load this rank's shard of a checkpoint into a model and optimizer. Every rank calls it.

    The checkpoint may have any parallel layout. A checkpoint of a run with an attachment, such as
    adapters, holds only the trained parameters; the model must have the same attachment, and the
    base weights.

    Args:
        checkpoint: the open checkpoint, or the result of `megazoo.models.pretrained.open_source`
            for a checkpoint of torch.distributed.checkpoint.
        model: the model to fill.
        optimizer: the optimizer whose state is loaded; by default only the weights are loaded.

    Returns:
        The trainer state: the contents of trainer.json.

    Raises:
        UserError: on every rank, if the checkpoint belongs to another model, optimizer, base or
            attachment, or if a file is corrupt (unless it was opened with verify=False).

    Example:
        checkpoint = megazoo.checkpoint.Checkpoint("runs/a")
        trainer = megazoo.checkpoint.load(checkpoint, model, opt)
    """
    ctx = model.ctx
    with propagate_errors(ctx):
        if model.attached:
            model.attached.check_same(checkpoint, model)
        elif checkpoint.attached:
            raise UserError(
                f"{checkpoint.path} holds only adapters, but the model has none: load them with "
                "megazoo.lora.load"
            )
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
            entries = in_memory(model, (entry for entry, _ in weights), write=True)
            for entry, (_, (name, spec)) in zip(entries, weights, strict=True):
                checkpoint.read_into(name, entry.parameter, spec, ctx)
                bar.update(entry.parameter.nbytes)
            for name, entry, tensor, elements in states:
                checkpoint.read_range(name, tensor, elements, entry, ctx)
                bar.update(tensor.nbytes)
            trainer = checkpoint.trainer
            read_before = model.read_from if model.attached else ()
            model.engine.weights_read(*(() if optimizer else (*read_before, checkpoint)))
            if optimizer:
                optimizer.masters.note(optimizer.entries)
                optimizer.start_average(_without_average(checkpoint, optimizer))
                optimizer.steps.fill_(trainer["optimizer_steps"])
            if optimizer and optimizer.loss_scale and "loss_scale" in trainer:
                optimizer.loss_scale.load(trainer["loss_scale"])
            model.sidecar_files = checkpoint.sidecar_files if ctx.rank == 0 else {}
            model.generation = checkpoint.generation
    return trainer


def _name_of_weights(checkpoint: TensorSource, entry: NamedParameter) -> str:
    """Return the name of the tensor that a parameter is read from: that of the fp32 master weights
    if the parameter is fp32 and the checkpoint has them."""
    is_fp32 = entry.parameter.dtype == torch.float32
    return checkpoint.most_precise(entry.name) if is_fp32 else entry.name


def _states_to_read(
    checkpoint: TensorSource, optimizer: AdamW
) -> Iterator[tuple[str, NamedParameter, torch.Tensor, tuple[int, int]]]:
    """Yield the tensors of an optimizer's state. Each comes with its name in the checkpoint, its
    parameter, and the range of elements in the flattened parameter."""
    starting = {entry.name for entry in _without_average(checkpoint, optimizer)}
    for entry in optimizer.entries:
        for state, tensor in optimizer.state[entry.name].items():
            if state == AVERAGE and entry.name in starting:
                continue
            is_master = state == MASTER
            name = checkpoint.most_precise(entry.name) if is_master else f"{entry.name}.{state}"
            yield name, entry, tensor, optimizer.ranges[entry.name]


def _without_average(checkpoint: TensorSource, optimizer: AdamW) -> list[NamedParameter]:
    """Return the parameters whose moving average the optimizer has, and the checkpoint lacks."""
    averaged = [e for e in optimizer.entries if AVERAGE in optimizer.state[e.name]]
    return [entry for entry in averaged if AVERAGE not in checkpoint.states_of(entry.name)]


def _check_states(checkpoint: TensorSource, optimizer: AdamW) -> None:
    """Raise UserError if the checkpoint lacks the state of a trained parameter."""
    missing = [entry.name for entry in optimizer.entries if not checkpoint.states_of(entry.name)]
    if missing and not checkpoint.has_states:
        raise UserError(f"{checkpoint.path} has no optimizer state: load only its weights")
    if missing:
        raise UserError(
            f"{checkpoint.path} has no optimizer state of {missing[0]}, which was frozen: freeze "
            "the same parameters, or start a new run with only the weights"
        )
    for entry in optimizer.entries:
        found = set(checkpoint.states_of(entry.name)) - {MASTER, AVERAGE}
        wanted = optimizer.state[entry.name].keys() - {MASTER, AVERAGE}
        if found != wanted:
            raise UserError(
                f"{checkpoint.path} has {' and '.join(sorted(found))} of {entry.name}, not the "
                f"{' and '.join(sorted(wanted))} of {type(optimizer).__name__}: it is the state of "
                "another optimizer; load only its weights"
            )
