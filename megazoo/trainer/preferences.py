"""The loss of a run, and its reference model."""

from dataclasses import fields
from typing import TYPE_CHECKING

from megazoo.errors import UserError
from megazoo.losses import Distillation, Loss, TopKDistillation
from megazoo.losses.options import LOSS_OPTIONS
from megazoo.losses.reference import Reference
from megazoo.losses.registry import loss_named
from megazoo.models.base import Model
from megazoo.models.pretrained import load_weights, open_source
from megazoo.settings import flag_of
from megazoo.trainer.options import Options, parts_of

if TYPE_CHECKING:
    from megazoo.trainer.run import Run


def loss_of(options: Options) -> Loss | None:
    """Return the loss of a run; None for the cross-entropy. UserError for an option of another
    loss. Without --reference, distillation reads a teacher's most likely tokens from the data.
    """
    chosen = options.loss
    own = fields(LOSS_OPTIONS[chosen.loss]) if chosen.loss in LOSS_OPTIONS else ()
    for name in parts_of("loss").keys() - {f"{chosen.loss}_{f.name}" for f in own}:
        if options.values[name] is not None:
            flag = flag_of(name)
            raise UserError(f"{flag} cannot be used with --loss {chosen.loss}: remove {flag}")
    loss = loss_named(chosen.loss, **chosen.given)
    if type(loss) is Distillation and not chosen.reference:
        return TopKDistillation(**loss.settings)
    return loss


def reference_of(run: "Run", model: Model) -> Reference:
    """Return the loss of a run with its reference: the model of --reference, or the trained model
    without its adapters."""

    def load() -> Model:
        source = open_source(str(run.options.loss.reference))
        other = source.model.empty(source.config, model.ctx, dtype=model.dtype)
        load_weights(source, other)
        return other

    return Reference(run.loss, model, load if run.options.loss.reference else None)
