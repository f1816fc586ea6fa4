"""A run that saves and resumes, for the tests of checkpoints."""

import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.optim.loss_scale import LossScale
from tests.support.training import CLIP, context, make_batch, replica_rows


def run_steps(layout, config, steps, directory=None, resume=None, dtype=torch.float32):
    """Train steps first..last; save at the end into `directory`; start from the checkpoint in
    `resume`.

    Returns the (loss, norm) of every step and this rank's parameters.
    """
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, seed=3, dtype=dtype)
    growing = (
        LossScale(2.0**20, growth_interval=2, hysteresis=1) if dtype == torch.float16 else None
    )
    optimizer = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=CLIP, loss_scale=growing)
    first = load(Checkpoint(resume), model, optimizer)["step"] if resume else 0
    history = []
    for step in range(first + 1, first + steps + 1):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        loss = model.train_batch(ids, targets=targets, num_microbatches=len(ids) // 2, step=step)
        history.append((loss.item(), optimizer.step().item()))
    if directory:
        save(directory, first + steps, model, optimizer, {"consumed_samples": 8 * (first + steps)})
    return history, {entry.name: entry.parameter.detach().clone() for entry in model.entries()}
