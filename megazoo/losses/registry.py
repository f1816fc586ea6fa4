"""Losses by their names in --loss."""

from typing import Any

import megazoo.losses.distillation
import megazoo.losses.preferences  # noqa: F401
from megazoo.errors import UserError
from megazoo.losses.base import LOSSES, Loss


def loss_named(name: str, **settings: Any) -> Loss | None:
    """Return a loss by its name in --loss, with these values of its fields; None for lm.

    Raises:
        UserError: No loss has the name.
    """
    if name == "lm":
        return None
    if name not in LOSSES:
        raise UserError(f"--loss {name} is not registered: use lm, {', '.join(LOSSES)}")
    return LOSSES[name](**settings)
