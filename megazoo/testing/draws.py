"""Record the seeds that the dropout of a small model uses, in a layout or in one process."""

from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch

from megazoo.engine import batch as batches
from megazoo.layers import Dropout
from megazoo.models.registry import from_config
from megazoo.parallel.context import ParallelContext
from megazoo.testing.batches import MICRO_BATCHES, make_batch
from megazoo.testing.shrink import shrink


@dataclass
class Draws:
    """The seeds of a Dropout in a step.

    Attributes:
        parallel: tp ranks must have different masks.
        seeds: A seed per micro-batch, in the order of use.
        redrawn: Recomputing a layer used another seed.
        repeated: The next step used a seed of this step.
        evaluated: Dropout was active in an evaluation.
    """

    parallel: bool
    seeds: list[int]
    redrawn: bool = False
    repeated: bool = False
    evaluated: bool = False


def dropout_draws(config: Any, schedule: str, ctx: ParallelContext) -> dict[str, Draws]:
    """Return the seeds of each Dropout of a small model with the same structure and number of
    layers.

    The model is trained for one step with the same tokens on all replicas. The step is repeated
    with all layers recomputed in the backward pass, and then as another step. Finally the model is
    evaluated.
    """
    rates = dict.fromkeys(_dropout_rates(config), 0.1)
    if not rates:
        return {}
    layers = {"layers": config.layers} if hasattr(config, "layers") else {}  # enough for the stages
    config = replace(shrink(config), **layers, **rates)
    model = from_config(config, ctx, seed=3)
    batch = make_batch(0, config.vocab_size, model.longest_sequence(config))
    drawn = []
    for mode, step in (("none", 0), ("full", 0), ("none", 1)):
        model.recompute(mode)
        with _recorded() as seeds:
            model.train_batch(**batch, num_microbatches=MICRO_BATCHES, schedule=schedule, step=step)
        drawn.append(seeds)
    with _recorded() as evaluated:
        model.eval_batch(**batch, num_microbatches=MICRO_BATCHES)
    plain, again, later = drawn
    for site, draws in plain.items():
        draws.redrawn = set(again[site].seeds) != set(draws.seeds)
        draws.repeated = bool(set(later[site].seeds) & set(draws.seeds))
        draws.evaluated = site in evaluated
    return plain


def _dropout_rates(config: Any) -> list[str]:
    """Return the names of a config's dropout rates."""
    return [f.name for f in fields(config) if f.name.endswith("dropout")]


@contextmanager
def _recorded():
    """Within this block, record the seeds of each Dropout in the yielded dictionary."""
    draw, drawn = Dropout.draw, {}

    @contextmanager
    def recorded(self, *arguments):
        with draw(self, *arguments):
            draws = drawn.setdefault(self.site, Draws(self.parallel, []))
            draws.seeds.append(torch.initial_seed())
            yield

    with mock.patch.object(Dropout, "draw", recorded):
        yield drawn


@contextmanager
def recorded_seeds():
    """Within this block, record the dropout seed of each micro-batch in the yielded list."""
    cut, seeds = batches._cut, []

    def recorded(*arguments, dropout_seeds, **options):
        seeds.extend(dropout_seeds)
        return cut(*arguments, dropout_seeds=dropout_seeds, **options)

    with mock.patch.object(batches, "_cut", recorded):
        yield seeds
