"""Dropout whose mask is a function of the seed, layer and rank, not of the state of a generator."""

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
    """Within this block, this is the seed of a Dropout that is called without one. It is the seed
    of the micro-batch, for layers inside a block that can't pass it on."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Within this block, all modules of a model are in evaluation mode; afterwards each returns to
    its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Dropout(Layer):
    """Drop elements with a mask that depends only on the micro-batch's seed, the layer's name and,
    inside tensor-parallel regions, the tp rank.

    So a recomputation or a resumed run draws the same mask without saved state.

    Args:
        probability: probability of zeroing an element, in [0, 1).
        parallel: whether x differs between tp ranks, so that the masks must also differ. Otherwise
            all tp ranks draw the same mask.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        Any shape -> the same shape.

    `site` is the name of the layer. The model sets it when it is built; two layers must not have
    the same one.
    """

    shown = ("probability",)
    site: str

    def __init__(
        self, probability: float, *, parallel: bool = False, ctx: ParallelContext | None = None
    ):
        super().__init__(ctx)
        self.probability = probability
        # in both cases x differs between ranks
        self.parallel = parallel or self.ctx.sequence_parallel
        self.site = ""

    @property
    def active(self) -> bool:
        return self.training and self.probability > 0

    def draw(self, seed: int | None, device: torch.device) -> AbstractContextManager[None]:
        """Return a block in which the default generator of torch draws for this site. seed: as in
        forward."""
        if seed is None:
            seed = _seed.get()
        if seed is None:
            seed = int(torch.randint(1 << 62, ()))
        elif not self.site:
            raise UserError(
                "a Dropout that is called with a seed needs a site, or all such layers would draw "
                "the same mask: set its attribute site to a unique name"
            )
        return seeded(
            derive_seed(seed, self.site, self.ctx.tp_rank if self.parallel else "all"), device
        )

    def forward(self, x: torch.Tensor, seed: int | None = None) -> torch.Tensor:
        """Return x with dropped elements in training mode, otherwise x.

        Args:
            x: any shape.
            seed: seed of the micro-batch. None: that of the enclosing `dropout_seed` block, in
                which the layers of a model run. Outside of such a block (a layer in a custom
                module), a seed is drawn from the default generator of torch: seed it equally on all
                tp ranks.
        """
        return self._dropped(x, seed) if self.active else x

    @untraced
    def _dropped(self, x: torch.Tensor, seed: int | None) -> torch.Tensor:
        with self.draw(seed, x.device):
            return F.dropout(x, self.probability)
