"""The learning rate of each step."""

import math

from megazoo.errors import UserError

LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")
WSD_DECAY = 0.2  # fraction of the steps


def learning_rate(
    step: int,
    *,
    schedule: str,
    lr: float,
    min_lr: float,
    warmup_steps: int,
    steps: int,
) -> float:
    """Return the learning rate of a step. It depends only on the step, so a resumed run continues
    it.

    Args:
        step: the step, from 1.
        schedule: after the warm-up, "cosine" and "linear" fall to min_lr at step `steps`, and stay
            there; "constant" stays at lr; "wsd" (warm-up, stable, decay) stays at lr and falls
            linearly over the last fifth of the steps.
        lr: learning rate after the warm-up.
        min_lr: final learning rate.
        warmup_steps: number of steps in which it rises linearly to lr.
        steps: number of steps of the run.

    Raises:
        UserError: The schedule is not one of these.
    """
    if schedule not in LR_SCHEDULES:
        raise UserError(f"unknown lr-schedule {schedule!r}: use {', '.join(LR_SCHEDULES)}")
    if step <= warmup_steps:
        return lr * step / warmup_steps
    start = max(warmup_steps, steps * (1 - WSD_DECAY)) if schedule == "wsd" else warmup_steps
    progress = min(1.0, max(0.0, (step - start) / (steps - start))) if steps > start else 1.0
    if schedule == "constant":
        return lr
    remaining = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return min_lr + (lr - min_lr) * remaining
