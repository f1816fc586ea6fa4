"""Create the optimizer of a run."""

from typing import Any

from megazoo.models.base import Model
from megazoo.optim.adamw import AdamW
from megazoo.optim.loss_scale import LossScale
from megazoo.optim.muon import Muon
from megazoo.trainer.options import Options


def make_optimizer(options: Options, model: Model) -> AdamW:
    """Create the optimizer selected by the settings."""
    training, chosen, parallel = options.training, options.optimizer, options.parallel
    adamw = {"betas": (chosen.beta1, chosen.beta2), "weight_decay": chosen.weight_decay}
    loss_scale = LossScale(
        training.initial_loss_scale, training.loss_scale_window, training.hysteresis
    )
    common: dict[str, Any] = {"clip_grad": chosen.clip_grad, "loss_scale": loss_scale}
    common |= {"zero": parallel.zero, "zero_gather": parallel.zero_gather, "ema": chosen.ema}
    if chosen.optimizer == "adamw":
        return AdamW(
            model, chosen.lr, **adamw, **common, offload=options.parallel.offload_optimizer
        )
    return Muon(
        model,
        chosen.muon_lr,
        chosen.muon_momentum,
        ns_steps=chosen.ns_steps,
        ns_dtype=chosen.ns_dtype,
        weight_decay=chosen.weight_decay,
        adamw={"lr": chosen.lr, **adamw},
        **common,
    )
