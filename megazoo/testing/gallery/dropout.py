"""Bugs in the seeds of dropout masks."""

from contextlib import contextmanager
from typing import Any

from megazoo.engine import batch
from megazoo.layers import Dropout
from megazoo.models.base import Model
from megazoo.parallel import recompute
from megazoo.testing.gallery.planting import bug, replaced


def _drawn(change):
    """Replace the draw of every Dropout with change(self, seed, draw, device)."""

    def make(draw):
        return lambda self, seed, device: change(self, seed, draw, device)

    return replaced(Dropout, "draw", make)


def _as_if(parallel: bool, of_those: bool):
    """Draw masks of parallel Dropouts as if they were not parallel, or the reverse."""

    def change(self, seed, draw, device):
        before = self.parallel
        self.parallel = parallel if before is of_those else before
        try:
            return draw(self, seed, device)
        finally:
            self.parallel = before

    return _drawn(change)


@bug(
    "16a",
    "The same dropout on tp ranks where it must differ",
    r"dropout layers\.\d\.attention\.dropout: the same masks on ranks 0 .*, 1",
    layout="tp2",
    source="PaddleFleetX #1005",
    link="https://github.com/PaddlePaddle/PaddleFleetX/pull/1005",
)
def heads_with_equal_masks():
    """All tp ranks use the same mask for their different heads."""
    return _as_if(parallel=False, of_those=True)


@bug(
    "16b",
    "Different dropout on tp ranks where it must be equal",
    r"dropout embedding_dropout: different masks on ranks 0 .*, of what they share",
    layout="tp2",
    source="rule: slapo #21",
    link="https://github.com/awslabs/slapo/issues/21",
)
def shared_with_different_masks():
    """The tp ranks use different masks for replicated activations."""
    return _as_if(parallel=True, of_those=False)


@bug(
    "17",
    "Dropout that recomputation draws anew",
    r"dropout layers\.\d.*: other masks when it is recomputed",
    layout="pp2",
    source="OLMo-core #828",
    link="https://github.com/allenai/OLMo-core/pull/828",
)
@contextmanager
def recomputation_draws_anew():
    """A layer that is recomputed in the backward pass uses another mask."""
    again = []

    def make(replay):
        def replayed(*arguments):
            again.append(1)
            try:
                return replay(*arguments)
            finally:
                again.pop()

        return replayed

    def change(self, seed, draw, device):
        return draw(self, seed if seed is None else seed + len(again), device)

    with replaced(recompute, "replay", make), _drawn(change):
        yield


@bug(
    "25c",
    "Dropout by the layer's number within the stage",
    r"dropout layers\.\d.*: other masks than in one process on rank 1 ",
    layout="pp2",
    source="rule: epfLLM Megatron-LLM #21",
    link="https://github.com/epfLLM/Megatron-LLM/pull/21",
)
@contextmanager
def sites_by_local_layer():
    """The dropout seed depends on the layer's number within the stage."""

    def make(empty):
        def numbered(cls, config, ctx, **options):
            model = empty(cls, config, ctx, **options)
            first = min((int(index) for index in model.layers), default=0)
            for name, module in model.named_modules():
                if isinstance(module, Dropout) and name.startswith("layers."):
                    _, index, *rest = name.split(".")
                    layer: Any = module
                    layer.drawn_by = ".".join(["layers", str(int(index) - first), *rest])
            return model

        return classmethod(numbered)

    def change(self, seed, draw, device):
        site, self.site = self.site, getattr(self, "drawn_by", self.site)
        try:
            return draw(self, seed, device)
        finally:
            self.site = site

    with replaced(Model, "empty", lambda method: make(method.__func__)), _drawn(change):
        yield


@bug(
    "",
    "The same dropout at every step",
    r"dropout embedding_dropout: the same masks at two steps on rank 0 ",
    layout="dp2",
)
def dropout_without_the_step():
    """The seed of a micro-batch is that of the first step in every step."""
    return replaced(
        batch,
        "derive_seed",
        lambda derive: lambda seed, what, _, *others: derive(seed, what, 0, *others),
    )


@bug(
    "",
    "Dropout in evaluation",
    r"dropout embedding_dropout: active in eval_batch on rank 0 ",
    layout="tp2",
)
def dropout_in_evaluation():
    """Dropout is active in evaluation mode."""
    return replaced(Dropout, "active", lambda _: lambda self: self.probability > 0)


@bug(
    "",
    "The same dropout on all replicas",
    r"dropout embedding_dropout: the same masks on ranks 0 .*, 1",
    layout="dp2",
)
@bug(
    "",
    "The same dropout on all parts of a sequence",
    r"dropout embedding_dropout: the same masks on ranks 0 .*cp 0.*, 1 .*cp 1",
    layout="cp2",
)
def dropout_in_step_across_replicas():
    """Replicas, or parts of a sequence, use the same mask for different tokens."""
    return replaced(batch, "derive_seed", lambda derive: lambda *what: derive(*what[:-1]))


@bug(
    "",
    "The same dropout on all parts of a sequence under sequence parallelism",
    r"dropout .*: the same masks on ranks 0 ",
    layout="tp2+sp",
)
def same_masks_of_sequence_parts():
    """Dropout outside of the tensor-parallel region draws the same mask on all tp ranks."""

    def make(init):
        def initialised(self, probability, *, parallel=False, ctx=None):
            init(self, probability, parallel=parallel, ctx=ctx)
            self.parallel = parallel

        return initialised

    return replaced(Dropout, "__init__", make)
