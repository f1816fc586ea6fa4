"""How a rank's stages are made: without memory, then on the device, then filled."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megazoo.engine.gradients import summed_last
from megazoo.errors import UserError, advise
from megazoo.layers.context_parallel import check_layers
from megazoo.layers.layer import declared
from megazoo.models.outputs import OutputHead
from megazoo.models.plain import check_plain, check_stages, initialize_plain, place_plain
from megazoo.parallel.buckets import accumulate_in_fp32
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule, initialize, without_memory
from megazoo.parallel.random import all_seeded, derive_seed
from megazoo.parallel.staging import Upload
from megazoo.parallel.storage import KEPT, ShardedParameters, in_memory


def fill(model: Any, seed: int) -> Any:
    """Draw the initial values of a model's parameters, except those of plain modules; return the
    model."""
    upload = Upload()
    for entry in in_memory(model, model.entries(), write=True):
        if not entry.spec.plain:
            seed_of_entry = derive_seed(seed, entry.name)
            initialize(entry.parameter, entry.spec, model.ctx, seed_of_entry, upload)
    return model


def make_empty(
    family: type, config: Any, ctx: ParallelContext, dtype: torch.dtype, seed: int
) -> Any:
    """Build a rank's stages on its device with uninitialized weights: see `Model.empty`."""
    model = _make(family, config, ctx, seed)
    if ctx.rank == 0 and ctx.device.type != "meta":
        _advise_of_empty_stages(family, config, ctx)
    # The stages of megazoo's own families are checked by its tests.
    if not family.__module__.startswith("megazoo.models."):
        check_stages(model, partial(_make_elsewhere, family, config, ctx))
    initialize_plain(model, partial(_make, family, config, ctx, seed, draw=1), seed)
    place_plain(model, ctx.device, dtype)
    rests = ctx.layout.zero == 3 and ctx.token_axis.size > 1
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                trained = parameter.requires_grad
                spec = module.specs.get(name) if isinstance(module, ShardedModule) else None
                own = torch.float32 if spec and spec.is_state else dtype
                empty = torch.empty(parameter.shape, dtype=own, device=ctx.device)
                if rests and spec and not spec.is_state and spec.replicas(ctx).size > 1:
                    empty.untyped_storage().resize_(0)  # it gets the memory of its unit
                setattr(module, name, nn.Parameter(empty, trained))
    for parameter in model.parameters():
        accumulate_in_fp32(parameter)
    if rests:
        shard_parameters(model)
    model.engine.parameters_changed()
    return model


def shard_parameters(model: Any) -> None:
    """Let the parameters of a model rest as ranges over the replicas: see ShardedParameters."""
    kept = KEPT if model.ctx.layout.zero_gather == "microbatch" else None
    storage = ShardedParameters(
        list(model.entries()), model.ctx, _unit_of, summed_last(model), kept
    )
    model._storage = storage
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.storage = storage
    tops = (child for name, child in model.named_children() if name != "layers")
    for module in (*model.layers.values(), *tops):
        storage.watch(module)
    model.register_state_dict_pre_hook(_refuse_state)
    model.register_load_state_dict_pre_hook(_refuse_state)


def _unit_of(name: str) -> str:
    """Return the unit that a parameter is gathered with: its layer, or its module outside of the
    layers."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "layers" else first


def _refuse_state(*_) -> None:
    raise UserError(
        "a state_dict is not supported with zero 3, because each rank has only its ranges: use "
        "model.save_parallelized(DIRECTORY) and megazoo.from_pretrained, or megazoo.checkpoint"
    )


def make_on_meta(family: type, config: Any, ctx: ParallelContext, seed: int = 0) -> Any:
    """Build a rank's stages on the meta device."""
    try:
        with torch.device("meta"):
            return _make(family, config, ctx, seed)
    except (RuntimeError, TypeError):  # a module reads values while it is built
        model = _make(family, config, ctx, seed)
        place_plain(model, "meta")
        return model


def _make(family: type, config: Any, ctx: ParallelContext, seed: int, draw: int = 0) -> Any:
    """Build a rank's stages; sharded parameters are on the meta device. draw: seed of the default
    generators; the model must not depend on it."""
    with ctx, without_memory(), all_seeded(draw):
        model = family(config, ctx, seed)
    if model.has_last and not isinstance(model.output_head, OutputHead):
        raise UserError(
            f"the head is {type(model.output_head).__name__}: it must be a LanguageModelHead or a "
            "subclass, added with add_head(MyHead)"
        )
    check_layers(model.layers, ctx)
    check_plain(model)
    for name, module in model.named_modules():
        if declared(module, "site") is not None:
            module.site = name
    return model


def _make_elsewhere(family: type, config: Any, ctx: ParallelContext, pp_rank: int | None) -> Any:
    """Build the stages of a pipeline rank on the meta device; with None, the complete model."""
    layout = ctx.layout.with_replicas(1)
    if pp_rank is None:
        return make_on_meta(family, config, ParallelContext(layout.without_stages()))
    first = ParallelContext(layout)
    return make_on_meta(family, config, replace(first, rank=first.rank_at(pp=pp_rank)))


def _advise_of_empty_stages(family: type, config: Any, ctx: ParallelContext) -> None:
    for stage in family.all_stages(config, ctx):
        if not stage.layers:
            layer, first, last = family.stage_costs(config)
            what, cost = ("embedding", first) if stage.first else ("head", last)
            advise(
                f"stage {stage.index + 1} of {stage.count} gets no layers: its {what} costs as "
                f"much compute as {cost / layer:.1f} layers; use stage_layers uniform "
                "(--stage-layers uniform), or a smaller pp"
            )
