"""Bugs in the seeds of dropout masks."""

from typing import Any
from unittest import mock

from megazoo.engine import batch
from megazoo.layers import Dropout
from megazoo.models.base import Model
from megazoo.parallel.recompute import is_replaying
from megazoo.testing.gallery.planting import BUGS, Bug


def drawn_with(**values):
    """Return a wrapper of a draw: the Dropout has other attributes during this call."""

    def wrapper(draw, self, *given):
        with mock.patch.multiple(self, **values):
            return draw(self, *given)

    return wrapper


def drawn_anew(draw, self, seed, device):
    return draw(self, seed if seed is None else seed + is_replaying(), device)


def number_within_the_stage(empty, cls, config, ctx, **options):
    model = empty(cls, config, ctx, **options)
    first = min((int(index) for index in model.layers), default=0)
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and name.startswith("layers."):
            _, index, *rest = name.split(".")
            layer: Any = module
            layer.drawn_by = ".".join(["layers", str(int(index) - first), *rest])
    return model


def drawn_by_number(draw, self, *given):
    return drawn_with(site=getattr(self, "drawn_by", self.site))(draw, self, *given)


def parallel_as_given(init, self, probability, *, parallel=False, ctx=None):
    """Dropout outside of the tensor-parallel region draws the same mask on all tp ranks."""
    init(self, probability, parallel=parallel, ctx=ctx)
    self.parallel = parallel


BUGS += [
    # All tp ranks use the same mask for their different heads.
    Bug("16a", "The same dropout on tp ranks where it must differ",
        r"dropout layers\.\d\.attention\.dropout: the same masks on ranks 0 .*, 1",
        Dropout, "draw", drawn_with(parallel=False), layout="tp2",
        source="PaddleFleetX #1005",
        link="https://github.com/PaddlePaddle/PaddleFleetX/pull/1005"),
    # The tp ranks use different masks for replicated activations.
    Bug("16b", "Different dropout on tp ranks where it must be equal",
        r"dropout embedding_dropout: different masks on ranks 0 .*, of what they share",
        Dropout, "draw", drawn_with(parallel=True), layout="tp2",
        source="rule: slapo #21", link="https://github.com/awslabs/slapo/issues/21"),
    Bug("17", "Dropout that recomputation draws anew",
        r"dropout layers\.\d.*: other masks when it is recomputed",
        Dropout, "draw", drawn_anew, layout="pp2",
        source="OLMo-core #828", link="https://github.com/allenai/OLMo-core/pull/828"),
    Bug("25c", "Dropout by the layer's number within the stage",
        r"dropout layers\.\d.*: other masks than in one process on rank 1 ",
        Dropout, "draw", drawn_by_number, layout="pp2",
        also=[(Model, "empty", number_within_the_stage)],
        source="rule: epfLLM Megatron-LLM #21",
        link="https://github.com/epfLLM/Megatron-LLM/pull/21"),
    Bug("", "The same dropout at every step",
        r"dropout embedding_dropout: the same masks at two steps on rank 0 ",
        batch, "derive_seed", lambda derive, seed, what, _, *others: derive(seed, what, 0, *others),
        layout="dp2"),
    Bug("", "Dropout in evaluation",
        r"dropout embedding_dropout: active in eval_batch on rank 0 ",
        Dropout, "active", lambda _, self: self.probability > 0, layout="tp2"),
    Bug("", "The same dropout on all parts of a sequence",
        r"dropout embedding_dropout: the same masks on ranks 0 .*cp 0.*, 1 .*cp 1",
        batch, "derive_seed", lambda derive, *what: derive(*what[:-1]), layout="cp2"),
    Bug("", "The same dropout on all replicas",
        r"dropout embedding_dropout: the same masks on ranks 0 .*, 1",
        batch, "derive_seed", lambda derive, *what: derive(*what[:-1]), layout="dp2"),
    Bug("", "The same dropout on all parts of a sequence under sequence parallelism",
        r"dropout .*: the same masks on ranks 0 ",
        Dropout, "__init__", parallel_as_given, layout="tp2+sp"),
]  # fmt: skip
