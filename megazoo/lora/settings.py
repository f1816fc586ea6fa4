"""The settings of adapters: which layers they adapt, their names, and how they are attached.

A target is one matrix of the Hugging Face model. In LLaMA, q, k and v are three targets of the qkv
layer; in GPT-2, the qkv layer is one target.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megazoo.checkpoint.reader import Checkpoint
from megazoo.errors import UserError, check_number, nearest
from megazoo.families.names import HFNames, hf_names
from megazoo.layers.experts import ColumnParallelExperts, RowParallelExperts
from megazoo.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazoo.layers.router import ReplicatedLinear, Router
from megazoo.lora.layers import Adapter, Adapters, ExpertAdapters
from megazoo.lora.manifest import check_same, entries_for_manifest
from megazoo.models.base import Model
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.parallel.buckets import accumulate_in_fp32
from megazoo.parallel.module import initialize
from megazoo.parallel.random import derive_seed
from megazoo.parallel.shard import Shard

Experts = ColumnParallelExperts | RowParallelExperts
LinearLayer = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear | Experts

ALL = "all-linear"  # PEFT's name for the targets in linear layers
LORA = "lora"  # the attribute of a layer with its adapters, and part of their parameters' names


@dataclass(frozen=True)
class LoRASettings:
    """Hold the settings of a model's adapters.

    Args:
        rank: rank of each adapter.
        alpha: the scale is alpha / rank, or alpha / sqrt(rank) with rslora.
        dropout: dropout probability of the adapters' inputs.
        targets: names of the layers to adapt, as in `megazoo.lora.add`.
        rslora: rank-stabilized LoRA (Kalajdzievski 2023).
        rank_pattern: ranks of single targets, by their names; otherwise `rank`.
        alpha_pattern: alphas of single targets, by their names; otherwise `alpha`.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("q", "v")
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise UserError for a value that is out of range."""
        for rank in (self.rank, *self.rank_pattern.values()):
            check_number("rank", rank, 1, whole=True)
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            check_number("alpha", alpha, 0)
            if alpha == 0:
                raise UserError("alpha 0 would disable the adapters: it must be above 0")
        check_number("dropout", self.dropout, 0, 1)
        if not self.targets:
            raise UserError("targets is empty: pass names of layers, such as q,v")

    def check_for(self, whole: nn.Module) -> None:
        """Raise UserError for a value that is out of range, and for a name that matches no target.

        whole: the model with all its layers, for example on the meta device.
        """
        self.check()
        called = (*self.targets, *self.rank_pattern, *self.alpha_pattern)
        targets = all_targets(whole)
        check_targets(targets, called)
        stacks = [t for t in targets if t.is_parameter and any(map(t.is_called, self.targets))]
        if stacks and self.dropout:
            raise UserError(
                f"dropout {self.dropout} is not supported for {stacks[0].module}, as in PEFT: use "
                "0, or leave experts and routers out of the targets"
            )

    def attach(self, model: nn.Module, seed: int | None = None) -> None:
        """Attach adapters to the layers that the targets name, and freeze all other parameters
        except a classifier's head.

        The initial values depend only on the seed and the parameters' names. seed: by default the
        model's seed, or 0 for a custom module.
        """
        if seed is None:
            seed = model.seed if isinstance(model, Model) else 0
        is_classifier = labels_of(model) > 0
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_classifier and name == CLASSIFIER_HEAD)
        ours = isinstance(model, Model)
        for name, layer in linear_layers(model):
            targets = targets_of(model, name, layer)
            if called := [t for t in targets if any(map(t.is_called, self.targets))]:
                _attach_to(layer, targets, called, self, seed)
        if ours:
            model.attached = self

    def entries_for_manifest(self, model: Any) -> dict:
        """Return the entries of a checkpoint's manifest: see `megazoo.lora.manifest`."""
        return entries_for_manifest(model)

    def check_same(self, checkpoint: Checkpoint, model: Any) -> None:
        """Raise UserError unless a checkpoint has the same adapters, base and trained parameters as
        the model."""
        check_same(checkpoint, model)

    def rank_of(self, target: "Target") -> int:
        """Return the rank of a target's adapter."""
        return next((r for t, r in self.rank_pattern.items() if target.is_called(t)), self.rank)

    def alpha_of(self, target: "Target") -> float:
        """Return the alpha of a target's adapter."""
        return next((a for t, a in self.alpha_pattern.items() if target.is_called(t)), self.alpha)

    def scale_of(self, target: "Target") -> float:
        """Return the scale of a target's adapter: the factor of its output."""
        rank = self.rank_of(target)
        return self.alpha_of(target) / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True)
class Target:
    """Hold the names of a matrix that can be adapted.

    module: global name of its layer. part: name of the part of the layer, such as "q"; the last
    part of the layer's name if the target is the complete layer. theirs: name in the Hugging Face
    model; megazoo's name if there is none. names: all its names; a user may write the end of one,
    "q" for "attention.q". grouped: the Hugging Face model orders the rows differently (see
    HFNames). is_parameter: PEFT adapts it by target_parameters, not by target_modules.
    """

    module: str
    part: str
    theirs: str
    names: tuple[str, ...]
    grouped: bool = False
    is_parameter: bool = False

    def is_called(self, name: str) -> bool:
        """Return whether a user's name matches this target."""
        if name == ALL:
            return not self.is_parameter
        return any(f".{own}".endswith(f".{name}") for own in self.names)

    def parameter(self, factor: str) -> str:
        """Return the global name of a factor, "A" or "B", of its adapter."""
        return f"{self.module}.{LORA}.{self.part}.{factor}"


def is_adapter(name: str) -> bool:
    """Return whether a global name is that of an adapter's parameter."""
    return f".{LORA}." in name


def labels_of(model: nn.Module) -> int:
    """Return the number of labels of a megazoo classifier; 0 for other models."""
    return getattr(getattr(model, "config", None), "num_labels", 0)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, LinearLayer]]:
    """Yield the layers that can be adapted, with their names in the model. A model that is itself a
    linear layer yields nothing."""
    for name, module in model.named_modules():
        if name and isinstance(module, LinearLayer):
            yield name, module


def targets_of(model: nn.Module, name: str, layer: LinearLayer) -> list[Target]:
    """Return the targets of the layer `name`, in the order of its outputs."""
    parent, _, last = name.rpartition(".")
    above = f"{parent}." if parent else ""
    parts = getattr(layer, "part_names", ())
    try:
        table = hf_names(type(model), f"{name}.weight")
    except (AttributeError, KeyError):  # a custom model has no table, or not this layer
        is_stack, is_router = isinstance(layer, Experts), isinstance(layer, Router)
        parameter = name if is_stack else f"{name}.weight" if is_router else ""
        table = HFNames(f"{name}.weight", parameter=parameter)
    if table.parameter:
        return [Target(name, last, table.parameter, (name, table.parameter), is_parameter=True)]
    theirs = [each.removesuffix(".weight") for each in table.names]
    if len(theirs) > 1 and len(theirs) == len(parts):
        return [
            Target(name, part, each, (name, f"{above}{part}", each))
            for part, each in zip(parts, theirs, strict=True)
        ]
    names = [name, *(f"{above}{part}" for part in parts), theirs[0]]
    names += [f"{above}o"] if last == "output" else []
    return [Target(name, last, theirs[0], tuple(names), table.grouped)]


def all_targets(model: nn.Module) -> list[Target]:
    """Return the targets of all layers of a model on this rank."""
    return [
        target for name, layer in linear_layers(model) for target in targets_of(model, name, layer)
    ]


def every_target(model: nn.Module) -> tuple[str, ...]:
    """Return names that together are all targets of a model on this rank: all linear layers, and
    the experts and routers, if any."""
    parameters = (target.module for target in all_targets(model) if target.is_parameter)
    return ALL, *dict.fromkeys(".".join(name.split(".")[-2:]) for name in parameters)


def check_targets(targets: list[Target], wanted: Iterable[str]) -> None:
    """Raise UserError for a name that matches none of the targets."""
    if not targets:
        raise UserError(
            "the model has no layers to adapt: pass a module that contains ColumnParallelLinear or "
            "RowParallelLinear layers"
        )
    for name in wanted:
        if not any(target.is_called(name) for target in targets):
            known = dict.fromkeys(
                last for target in targets for last in (target.part, _last_of(target.theirs))
            )
            raise UserError(
                f"the target {name!r} is not a linear layer of the model{nearest(name, known)}; "
                f"supported: {', '.join(known)}, and {ALL}"
            )


def _last_of(name: str) -> str:
    """Return the last part of a name, and the part before it if the last one is "weight"."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1] == "weight" else parts[-1:])


def _attach_to(
    layer: LinearLayer,
    targets: list[Target],
    called: list[Target],
    settings: LoRASettings,
    seed: int,
) -> None:
    """Attach adapters to a layer. targets: all targets of the layer; called: those to adapt."""
    spec, adapters = layer.specs["weight"], {}
    *stack, rows, columns = spec.shape
    cut, experts = spec.shard, spec.shard_over("ep")
    inputs_cut = cut if cut and cut.dim == len(stack) + 1 else None
    for target in called:
        outputs, outputs_cut = rows, None if inputs_cut else cut
        if cut and len(targets) > 1:
            number = targets.index(target)
            outputs = cut.parts[number]
            outputs_cut = Shard(0, (outputs,), cut.units[number : number + 1])
        with torch.device("meta"):
            adapter = Adapter(
                outputs,
                columns,
                outputs_cut,
                inputs_cut,
                experts,
                rank=settings.rank_of(target),
                scale=settings.scale_of(target),
                dropout=settings.dropout,
                ctx=layer.ctx,
            )
        adapter.token_share = layer.token_share
        adapter.dropout.site = f"{target.module}.{LORA}.{target.part}"
        _fill(adapter, target, layer.weight, seed)
        adapters[target.part] = adapter
    if cut and len(targets) > 1:
        lengths = cut.local_sizes(layer.ctx.tp_size, layer.ctx.tp_rank)
    else:
        lengths = [layer.weight.shape[0]]
    sizes = dict(zip((target.part for target in targets), lengths, strict=True))
    layer.lora = (ExpertAdapters if experts else Adapters)(adapters, sizes)


def _fill(adapter: Adapter, target: Target, weight: torch.Tensor, seed: int) -> None:
    """Allocate an adapter's parameters with the device and dtype of its layer's weight, and
    initialize them unless they are on the meta device."""
    for factor, spec in adapter.specs.items():
        shape = getattr(adapter, factor).shape
        parameter = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
        accumulate_in_fp32(parameter)
        setattr(adapter, factor, parameter)
        if not parameter.is_meta:
            initialize(parameter, spec, adapter.ctx, derive_seed(seed, target.parameter(factor)))
