"""Dropout whose mask is a function of what it is for, not of a generator's state."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.errors import UserError
from megazoo.layers.layer import Layer
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.random import derive_seed, seeded

_seed: ContextVar[int | None] = ContextVar("seed of the micro-batch", default=None)


@contextmanager
def dropout_seed(seed: int | None) -> Iterator[None]:
    """Within this block a Dropout that is given no seed takes this one: the micro-batch's, for
    layers deep inside a block, which nobody hands it to."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Within this block every module of a model is in evaluation mode; afterwards each is as it
    was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Dropout(Layer):
    """Dropout whose mask follows from the micro-batch's seed, the layer's name and, inside
    tensor-parallel regions, the tp rank.

    Nothing has to be saved to draw the same mask again, for a recomputation or after a resume.

    Args:
        probability: of zeroing an element, in [0, 1).
        parallel: x differs between tp ranks, so must the masks; else all tp ranks draw the same
            mask.
        ctx: parallel context; the ambient one by default.

    `site` names the layer and is set by the model when it is built: no two layers may share it.
    Shapes: x of any shape -> the same shape. seed: the micro-batch's; None takes that of
    `dropout_seed`, within which a model's layers run. Outside of it (a layer in a module of your
    own) one is taken from torch's default generator, the same on all tp ranks if they were seeded
    alike.
    """

    shown = ("probability",)
    site: str

    def __init__(
        self, probability: float, *, parallel: bool = False, ctx: ParallelContext | None = None
    ):
        super().__init__(ctx)
        self.probability = probability
        # either way each rank has an x of its own
        self.parallel = parallel or self.ctx.sequence_parallel
        self.site = ""

    @property
    def active(self) -> bool:
        return self.training and self.probability > 0

    def draw(self, seed: int | None, device: torch.device) -> AbstractContextManager[None]:
        """Return a block in which torch's default generator draws for this site. seed: as in
        forward."""
        if seed is None:
            seed = _seed.get()
        if seed is None:
            seed = int(torch.randint(1 << 62, ()))
        elif not self.site:
            raise UserError(
                "a Dropout that is given a seed needs a site, or all such layers would draw alike"
            )
        return seeded(
            derive_seed(seed, self.site, self.ctx.tp_rank if self.parallel else "all"), device
        )

    def forward(self, x: torch.Tensor, seed: int | None = None) -> torch.Tensor:
        return self._dropped(x, seed) if self.active else x

    @untraced
    def _dropped(self, x: torch.Tensor, seed: int | None) -> torch.Tensor:
        with self.draw(seed, x.device):
            return F.dropout(x, self.probability)
