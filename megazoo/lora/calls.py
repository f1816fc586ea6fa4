"""What users call: adapters are added to a model, saved, loaded and merged."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from megazoo.checkpoint.base import check_base
from megazoo.checkpoint.directories import output_directory
from megazoo.checkpoint.ownership import foreign_to_adapter
from megazoo.checkpoint.places import MANIFEST, TRAINER
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.saving import run_together, write_together
from megazoo.checkpoint.shards import Files, files_of_rank, write_manifest
from megazoo.checkpoint.verifying import verifying
from megazoo.errors import UserError, check_number
from megazoo.hub import name_alone
from megazoo.layers.linear import refuse_rounded
from megazoo.lora.matrices import AdapterSource, adaptable_matrices, adapted
from megazoo.lora.peft import write_adapters
from megazoo.lora.settings import LORA, LoRASettings, linear_layers, targets_of
from megazoo.lora.source import SavedAdapters, open_adapter
from megazoo.models.base import Model
from megazoo.models.hugging_face.directory import some_of
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter, ShardedModule


def add(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    targets: str | Iterable[str] = ("q", "v"),
    rslora: bool = False,
    *,
    seed: int | None = None,
) -> nn.Module:
    """Give linear layers of a model low-rank adapters, and freeze all else; returns the model.

    model: a megazoo model, or a module of your own with ColumnParallelLinear and RowParallelLinear
    layers; every rank calls it, before the optimizer is made. The head of a classifier stays
    trained.
    rank: of the change of each matrix. alpha: the change is multiplied by alpha / rank, or, with
    rslora, by alpha / sqrt(rank). dropout: of the adapters' inputs.
    targets: names of what is adapted, or "q,v": our names or Hugging Face's, by their ends ("q",
    "q_proj", "attention.output", "o_proj", "down"); "all-linear" is every linear layer but the
    head. Where q, k and v are one matrix in Hugging Face's model (GPT-2, MPT), each of them means
    that one.
    seed: of the adapters' initial values, the same on all ranks; by default the model's seed.
    UserError for a name that is no linear layer of the model, and if it has adapters already.
    """
    if not isinstance(targets, Iterable):
        raise UserError(f"targets must be names such as ('q', 'v'), not {targets!r}")
    names = targets.split(",") if isinstance(targets, str) else map(str, targets)
    names = tuple(name.strip() for name in names)
    return add_by(model, LoRASettings(rank, alpha, dropout, names, rslora), seed)


def add_by(model: nn.Module, settings: LoRASettings, seed: int | None = None) -> nn.Module:
    """Give a model the adapters that the settings say: see `add`."""
    with propagate_errors(_context_of(model)) as call:
        if seed is not None:
            check_number("seed", seed, 0, whole=True)
        if call and isinstance(model, Model):
            call.agree("lora.add", model, {"seed": seed})
        if has_adapters(model):
            raise UserError("the model has adapters already: merge them first (megazoo.lora.merge)")
        refuse_rounded(model, "adapted")
        settings.check_for(without_memory(model))
    settings.attach(model, seed)
    for _, layer in linear_layers(model):
        if layer.lora is not None:  # what is evaluated goes on without dropout
            layer.lora.train(layer.training)
    if isinstance(model, Model):
        model.engine.parameters_changed()
    return model


def save(
    model: nn.Module, directory: str | Path, *, base_model_name_or_path: str | None = None
) -> None:
    """Write a model's adapters from all ranks together, as a directory of PEFT's: one that
    PeftModel.from_pretrained loads, and `load`. The files are the same in every layout.

    A classifier's head is written beside them. base_model_name_or_path: what PEFT is told of the
    model that they are for; by default its name on the Hugging Face hub, if it came from there. The
    tensors have the dtype of the parameters. An adapter that megazoo
    wrote there before is replaced; UserError, on every rank, for a directory that holds anything
    else, if there are no adapters, if other weights of a megazoo model are trained, which would be
    lost, and if one rank fails.
    """
    directory, ctx = Path(directory), _context_of(model)
    ctx.require_ranks()
    if not has_adapters(model):
        raise UserError("the model has no adapters to save: megazoo.lora.add gives it some")
    if not isinstance(model, Model) and ctx.pp_size > 1:
        raise UserError("adapters of a module of your own are saved with pp 1 only")
    settings = settings_of(model)
    if isinstance(model, Model) and not base_model_name_or_path:
        base_model_name_or_path = name_alone(model.weights_path or "")

    def begin() -> AbstractContextManager[Path]:
        return output_directory(directory, lambda: _check_place(directory))

    def files() -> Files:
        return files_of_rank(_Saved(model), lambda entry: entry.parameter, None)

    def complete(staging: Path, written: list[dict]) -> None:
        write_manifest(staging, LORA, settings, ctx, written, {}, {}, adapters={})
        shards = Checkpoint(staging, verify=False)
        write_adapters(shards, without_memory(model), settings, staging, base_model_name_or_path)
        for name in (MANIFEST, TRAINER, *(name for part in written for name in part["files"])):
            (staging / name).unlink()

    run_together(lambda: _check_nothing_is_lost(model), directory, ctx)
    write_together(directory, ctx, begin=begin, files=files, complete=complete)


def load(model: nn.Module, directory: str | Path, *, verify: bool = True) -> nn.Module:
    """Give a model the adapters of a directory that PEFT wrote, or `save`, of any layout, or of a
    checkpoint of a run with adapters; returns the model. Every rank calls it, before the optimizer
    is made, and reads only what it owns.

    A model without adapters gets what is there, and all else is frozen, as by `add`; one with the
    same adapters gets their values. What was trained beside them, such as a classifier's head, is
    read, too, and trained again.
    The adapters have the dtype of the model's weights. verify: compare what is read with a
    checkpoint's checksums. UserError, with the name of what is wrong,
    if they are of another model, tensors are missing or left over, or they change the mathematics
    in a way that is not supported (DoRA, biases, other trained modules), or the checkpoint says
    that they belong to another base.
    """
    with propagate_errors(_context_of(model)):
        load_from(model, open_adapter(directory, without_memory(model), verify=verify))
    return model


def load_from(model: nn.Module, source: AdapterSource) -> None:
    """Give a model the adapters of an open source: see `load`."""
    ctx = _context_of(model)
    with propagate_errors(ctx):
        if isinstance(source, SavedAdapters):
            check_base(source, model)
        if has_adapters(model):
            _check_same(model, source)
        else:
            add_by(model, source.settings)
        entries = [entry for entry in _entries(model) if entry.name in source.specs]
        files = source.files_of([(entry.name, entry.spec) for entry in entries], ctx)
        with verifying(source, files, ctx):
            for entry in entries:
                source.read_into(entry.name, entry.parameter, entry.spec, ctx)
                entry.parameter.requires_grad_(True)
        source.close()
    if isinstance(model, Model):
        model.read_from = (*model.read_from, source)
        model.engine.parameters_changed()


def _check_same(model: nn.Module, source: AdapterSource) -> None:
    """Raise UserError unless a model's adapters are of the matrices, ranks and scales of a
    source's."""

    def adapters(matrices, settings: LoRASettings) -> dict[str, tuple[int, float]]:
        targets = [matrix.target for matrix in matrices]
        return {t.theirs: (settings.rank_of(t), settings.scale_of(t)) for t in targets}

    settings = settings_of(model)
    ours = adapters(adapted(adaptable_matrices(without_memory(model)), settings), settings)
    theirs = adapters(source.matrices, source.settings)
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            here, there = (
                "rank {}, scale {:g}".format(*each[name]) if name in each else "none"
                for each in (ours, theirs)
            )
            raise UserError(
                f"{source.path} has other adapters than the model: of {name} the model has {here}, "
                f"the directory {there}; load it into a model without adapters"
            )


def merge(model: nn.Module) -> nn.Module:
    """Add the adapters' changes to the weights, and take the adapters away; returns the model,
    which computes what it did.

    Each sum is made in fp32 and rounded once to the weight's dtype. Nothing is communicated. All
    parameters are then trained again. UserError if there are no adapters.
    """
    if not has_adapters(model):
        raise UserError("the model has no adapters to merge: megazoo.lora.add gives it some")
    for _, layer in linear_layers(model):
        if layer.lora is not None:
            layer.lora.merge_into(layer.weight)
            layer.lora = None
    model.requires_grad_(True)
    if isinstance(model, Model):
        model.attached = None
        model.engine.parameters_changed()
    return model


def has_adapters(model: nn.Module) -> bool:
    """Say whether a model has adapters; a stage of one may have them on other ranks alone."""
    if isinstance(model, Model):
        return model.attached is not None
    return any(getattr(layer, LORA) is not None for _, layer in linear_layers(model))


def without_memory(model: nn.Module) -> nn.Module:
    """Return a model with all layers, without memory; of a module of one's own, itself."""
    ours = isinstance(model, Model)
    return model.on_meta(model.config, ParallelContext()) if ours else model


def settings_of(model: nn.Module) -> LoRASettings:
    """Return what a model's adapters are; of a module of one's own, as far as they tell it."""
    if isinstance(model, Model):
        assert isinstance(model.attached, LoRASettings)
        return model.attached
    adapters = {
        target.theirs: layer.lora[target.part]
        for name, layer in linear_layers(model)
        for target in targets_of(model, name, layer)
        if layer.lora is not None and target.part in layer.lora
    }
    first = next(iter(adapters.values()))
    return LoRASettings(
        rank=first.rank,
        alpha=first.scale * first.rank,
        dropout=first.dropout.probability,
        targets=tuple(adapters),
        rank_pattern={name: each.rank for name, each in adapters.items()},
        alpha_pattern={name: each.scale * each.rank for name, each in adapters.items()},
    )


def _check_nothing_is_lost(model: nn.Module) -> None:
    """Raise UserError if a megazoo model trains what is not saved with its adapters. What else a
    module of one's own trains is the caller's to save."""
    if not isinstance(model, Model):
        return
    held = {entry.name for entry in _Saved(model).entries()}
    if lost := {entry.name for entry in model.trained_entries()} - held:
        raise UserError(
            f"{some_of(lost)}: trained beside the adapters, and not saved with them; save a "
            "checkpoint, or merge (megazoo.lora.merge), or freeze it"
        )


class _Saved:
    """Those parameters of a model that are saved with its adapters, as a model of them alone."""

    attached = None

    def __init__(self, model: nn.Module):
        self.model, self.ctx = model, _context_of(model)

    def entries(self) -> list[NamedParameter]:
        return [
            entry
            for entry in _entries(self.model)
            if entry.spec.added or entry.name == CLASSIFIER_HEAD
        ]


def _entries(model: nn.Module) -> Iterator[NamedParameter]:
    """Yield this rank's parameters that know how they are cut, by their global names."""
    if isinstance(model, Model):
        yield from model.entries()
        return
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for name, spec in module.specs.items():
                ranks = (module.ctx.pp_rank,)
                yield NamedParameter(f"{prefix}.{name}", getattr(module, name), spec, ranks)


def _context_of(model: nn.Module) -> ParallelContext:
    """Return the parallel context of a model, or of the layers of a module of one's own."""
    if isinstance(model, Model):
        return model.ctx
    contexts = (layer.ctx for _, layer in linear_layers(model))
    return next(contexts, None) or ParallelContext()


def _check_place(directory: Path) -> None:
    """Raise UserError if a directory holds anything but an adapter that megazoo wrote."""
    if name := foreign_to_adapter(directory):
        raise UserError(
            f"{directory} is not empty, and holds no adapter of megazoo's writing alone: choose "
            f"another; it holds {name}"
        )
