"""The loss of a run, and its reference model."""

from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from megazoo import lora
from megazoo.errors import UserError
from megazoo.losses import Loss, reference_logprobs, teacher_activations
from megazoo.losses.base import LOSSES
from megazoo.losses.options import LOSS_OPTIONS
from megazoo.models.base import Model
from megazoo.models.pretrained import load_weights, open_source
from megazoo.settings import flag_of
from megazoo.trainer.options import Options, parts_of

if TYPE_CHECKING:
    from megazoo.trainer.run import Run


def loss_of(options: Options) -> Loss | None:
    """Return the loss of a run; None for the cross-entropy. UserError for an option of another
    loss."""
    chosen = options.loss
    own = fields(LOSS_OPTIONS[chosen.loss]) if chosen.loss in LOSS_OPTIONS else ()
    for name in parts_of("loss").keys() - {f"{chosen.loss}_{f.name}" for f in own}:
        if options.values[name] is not None:
            flag = flag_of(name)
            raise UserError(f"{flag} cannot be used with --loss {chosen.loss}: remove {flag}")
    if chosen.loss == "lm":
        return None
    import_built_in()
    return LOSSES[chosen.loss](**chosen.given)


def import_built_in() -> None:
    """Register the losses of megazoo."""
    import megazoo.losses.distillation
    import megazoo.losses.preferences  # noqa: F401


class Reference:
    """The loss of a run, and what it needs of a reference, for each batch.

    The reference is the model without its adapters, or the model of --reference.

    Attributes:
        loss: The loss; None for the cross-entropy.
    """

    def __init__(self, run: "Run", model: Model):
        self.loss = run.loss
        needs: set[str] = set(self.loss.needs) if self.loss else set()
        self.model: Any = model
        self.off: Any = nullcontext
        self.compute = next((COMPUTED[name] for name in COMPUTED if name in needs), None)
        if self.compute and not run.options.loss.reference:
            self.off = lora.off
        elif self.compute and self.loss:
            source = open_source(str(run.options.loss.reference))
            self.model = source.model.empty(source.config, model.ctx, dtype=model.dtype)
            load_weights(source, self.model)
            self.model.eval().requires_grad_(False)
            if self.model.has_last:
                vars(self.loss)["reference_head"] = self.model.output_head

    def __call__(self, batch: dict[str, Any], microbatches: int) -> dict[str, torch.Tensor]:
        """Return the named tensors of a batch; {} if the loss needs none."""
        if not self.compute:
            return {}
        with self.off(self.model):
            return self.compute(self.model, num_microbatches=microbatches, **batch)


# Functions that compute what a loss needs of a reference, by the name of the tensor.
COMPUTED = {"reference": reference_logprobs, "teacher": teacher_activations}
