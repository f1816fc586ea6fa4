"""The loss of a run."""

from dataclasses import fields

from megazoo.errors import UserError
from megazoo.losses import Distillation, Loss, TopKDistillation
from megazoo.losses.options import LOSS_OPTIONS
from megazoo.losses.registry import loss_named
from megazoo.settings import flag_of
from megazoo.trainer.options import Options, parts_of


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
        try:
            return TopKDistillation(**loss.settings)
        except UserError as error:
            raise UserError(f"{error}, or pass the teacher with --reference") from error
    return loss
