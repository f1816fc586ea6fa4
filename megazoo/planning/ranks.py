"""Build the ranks of a run on the meta device, with frozen parameters, and find those that are
equal."""

import re
from dataclasses import replace

import torch

from megazoo.families.registry import FAMILIES, family_of
from megazoo.models.attachment import Attachment
from megazoo.models.base import Model
from megazoo.models.counts import whole_model
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.shard import volume
from megazoo.parallel.stages import Stage
from megazoo.planning.meter import META

Trained = dict[int | None, frozenset[str]]  # by layer; None: outside of the layers


class Builder:
    """Build any rank's part of a model, in any layout, on the meta device.

    attached: additions to the model's weights, such as adapters, or None.
    """

    def __init__(self, config, attached: Attachment | None = None):
        self.config, self.family, self.attached = config, FAMILIES[family_of(config)], attached
        self._trained: dict[str | None, Trained] = {}  # by the pattern of train_only
        self._first_trained: dict[tuple, int] = {}  # by layout

    def build(
        self,
        ctx: ParallelContext,
        train_only: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Model:
        """Return the stages of a rank, on meta. ctx: from `place_in`. train_only: as in
        `Model.train_only`. dtype: of the parameters; their gradients are then fp32. None: only
        shapes matter."""
        if dtype is None:
            model = self.family.on_meta(self.config, ctx)
        else:
            model = self.family.empty(self.config, ctx, dtype=dtype)
        self._prepare(model, train_only)
        if self.attached or train_only:
            model.engine.first_trained_stage = self.first_trained_stage(ctx, train_only)
        return model

    def first_trained_stage(self, ctx: ParallelContext, train_only: str | None) -> int:
        """Return the index of the first pipeline stage with a trained parameter, as
        `TrainingEngine.agree_on_frozen` finds it on all ranks. ctx: of any rank."""
        key = (ctx.placement, ctx.layout.stage_layers, train_only)
        if key not in self._first_trained:
            first = ctx.stage_count
            for pp_rank in range(ctx.pp_size):
                if first < pp_rank:  # later ranks have only later stages
                    break
                there = ctx.layout.with_replicas(1, tp=1, cp=1)
                model = self.family.on_meta(self.config, place_in(there, pp_rank))
                self._prepare(model, train_only)
                first = min(first, model.engine.first_trained_here())
            self._first_trained[key] = first
        return self._first_trained[key]

    def trained(self, train_only: str | None) -> Trained:
        """Return the names of the trained parameters, by layer, without the prefixes of the layers.
        Raises UserError if the pattern or the attachment matches no parameter."""
        if train_only not in self._trained:
            names: dict[int | None, list[str]] = {}
            for entry in whole_model(self.config, train_only, self.attached).trained_entries():
                number, rest = layer_of(entry.name)
                names.setdefault(number, []).append(rest)
            self._trained[train_only] = {n: frozenset(rest) for n, rest in names.items()}
        return self._trained[train_only]

    def alike(self, stages: list[Stage], ctx: ParallelContext, train_only: str | None) -> tuple:
        """Return a key for the stages of a pipeline rank, before they are built. Stages with the
        same work and number of layers have equal keys."""
        keys = []
        trained = self.trained(train_only) if self.attached or train_only else {}
        first = self.first_trained_stage(ctx, train_only) if trained else 0
        for stage in stages:
            learns = tuple(trained.get(number) for number in stage.layers)
            keys.append((stage.first, stage.last, stage.index > first, learns))
        return tuple(keys)

    def _prepare(self, model: Model, train_only: str | None) -> None:
        """Attach the run's additions to the model's weights, and freeze the parameters that it does
        not train."""
        if self.attached:
            self.attached.attach(model)
        if self.attached or train_only:
            trained = self.trained(train_only)
            for entry in model.entries():
                number, rest = layer_of(entry.name)
                entry.parameter.requires_grad_(rest in trained.get(number, ()))


def place_in(layout: Layout, pp_rank: int, tp_rank: int = 0) -> ParallelContext:
    """Return the context, on meta, of a rank of the first replica."""
    first = ParallelContext(layout, device=META)
    return replace(first, rank=first.rank_at(pp=pp_rank, tp=tp_rank))


def layer_of(name: str) -> tuple[int | None, str]:
    """Return the number of a parameter's layer, None outside of the layers, and the rest of its
    name."""
    match = re.match(r"layers\.(\d+)\.(.*)", name)
    return (int(match[1]), match[2]) if match else (None, name)


def stage_keys(model: Model) -> list[tuple]:
    """Return a key for each stage. Stages with the same work have equal keys: the same number of
    layers, with the same shapes and the same trained parameters.

    Parameters outside of the layers belong to the first or the last stage. Stages after the first
    trained one send gradients back.
    """
    layers: dict[int | None, list] = {}
    for name, parameter in model.named_parameters():
        number, rest = layer_of(name)
        known = (rest, tuple(parameter.shape), parameter.requires_grad)
        layers.setdefault(number, []).append(known)
    keys = []
    for stage in model.stages:
        outside = tuple(layers.get(None, ())) if stage.first or stage.last else ()
        inside = tuple(tuple(layers[number]) for number in stage.layers)
        passes = stage.index > model.engine.first_trained_stage
        keys.append((stage.first, stage.last, passes, outside, inside))
    return keys


def counted_parameters(model: Model) -> tuple[int, int]:
    """Return the number of parameters of a rank, and of those the number that is trained. Copies
    that are counted on another rank are excluded. Shards along folded axes are included."""
    counted = trained = 0
    for entry in model.entries():
        pieces = entry.counted_pieces(model.ctx)
        parts = model.ctx.token_axis.size // entry.spec.replicas(model.ctx).size
        count = parts * sum(volume(piece.box) for piece in pieces)
        counted += count
        trained += count if entry.parameter.requires_grad else 0
    return counted, trained
