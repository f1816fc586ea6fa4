"""Loading a run from a checkpoint of any layout: model, optimizer and the trainer's state."""

import torch

from megazoo.checkpoint.places import TRAINER
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.schema import OptimizerState, checked_state
from megazoo.errors import UserError
from megazoo.optim.adamw import MASTER, AdamW
from megazoo.parallel.failure import failing_together


def load(checkpoint: Checkpoint, model, optimizer: AdamW | None = None) -> dict:
    """Fill this rank's parameters and optimizer state from a checkpoint of any layout; returns the
    trainer's state."""
    if optimizer:
        with failing_together(model.ctx):
            _check_states(checkpoint, optimizer)
            checked_state(checkpoint.trainer, OptimizerState, checkpoint.path / TRAINER)
    for entry in model.entries():
        name = _best_weights(checkpoint, entry.name, entry.parameter.dtype)
        checkpoint.read_into(name, entry.parameter, entry.spec, model.ctx)
    if optimizer:
        _load_optimizer(checkpoint, model, optimizer)
    model.sidecar_files = checkpoint.sidecar_files if model.ctx.rank == 0 else {}
    model.generation = checkpoint.generation
    return checkpoint.trainer


def _best_weights(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> str:
    """Return the name under which a parameter's values are read: its fp32 master weights', if fp32
    is wanted and they are there."""
    master = f"{name}.{MASTER}"
    return master if dtype == torch.float32 and master in checkpoint.tensors else name


def _load_optimizer(checkpoint: Checkpoint, model, optimizer: AdamW) -> None:
    for entry in optimizer.entries:
        for state, tensor in optimizer.state[entry.name].items():
            if state == MASTER:
                name = _best_weights(checkpoint, entry.name, tensor.dtype)
            else:
                name = f"{entry.name}.{state}"
            checkpoint.read_range(name, tensor, optimizer.ranges[entry.name], entry, model.ctx)
    optimizer.steps.fill_(checkpoint.trainer["optimizer_steps"])
    if optimizer.loss_scale and "loss_scale" in checkpoint.trainer:
        optimizer.loss_scale.load(checkpoint.trainer["loss_scale"])


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
