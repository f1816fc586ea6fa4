"""Functions that add adapters to a model, and save, load and merge them."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from megazoo.checkpoint.directories import output_directory
from megazoo.checkpoint.ownership import foreign_to_adapter
from megazoo.checkpoint.places import MANIFEST, TRAINER
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.saving import run_together, write_together
from megazoo.checkpoint.shards import Files, files_of_rank, write_manifest
from megazoo.checkpoint.verifying import verifying
from megazoo.errors import UserError, check_number, some_of
from megazoo.hub import name_alone
from megazoo.layers.linear import refuse_packed, refuse_rounded
from megazoo.lora.manifest import check_base
from megazoo.lora.matrices import AdapterSource, adaptable_matrices, adapted
from megazoo.lora.peft import write_adapters
from megazoo.lora.settings import LORA, LoRASettings, linear_layers, targets_of
from megazoo.lora.source import SavedAdapters, open_adapter
from megazoo.models.base import Model
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter, ShardedModule
from megazoo.parallel.storage import in_memory, storage_of


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
    """Add low-rank adapters (LoRA) to linear layers of a model, and freeze all other parameters.

    Every rank calls it, before the optimizer is created. The head of a classifier stays trainable.

    Args:
        model: a megazoo model, or a custom module with ColumnParallelLinear and RowParallelLinear
            layers.
        rank: rank of each adapter.
        alpha: the output of an adapter is multiplied by alpha / rank, or by alpha / sqrt(rank) with
            rslora.
        dropout: dropout probability of the adapters' inputs, from 0 to below 1.
        targets: names of the layers to adapt, also as one string "q,v". They are matched with the
            ends of megazoo's and Hugging Face's names: "q", "q_proj", "attention.output", "o_proj",
            "down". "all-linear" means every linear layer except the head, experts and routers. If
            the Hugging Face model has q, k and v in one matrix (GPT-2, MPT), each of these names
            means that matrix.
        rslora: scale by alpha / sqrt(rank), as in rank-stabilized LoRA (Kalajdzievski 2023).
        seed: seed of the adapters' initial values, the same on all ranks; by default the model's.

    Returns:
        The model.

    Raises:
        UserError: if a name matches no linear layer of the model, a value is out of range, or the
            model has adapters already.

    Example:
        megazoo.lora.add(model, rank=8, alpha=16, targets=("q", "v"))
        opt = megazoo.optim.AdamW(model, lr=3e-4)
    """
    if not isinstance(targets, Iterable):
        raise UserError(f"targets must be names such as ('q', 'v'), not {targets!r}")
    names = targets.split(",") if isinstance(targets, str) else map(str, targets)
    names = tuple(name.strip() for name in names)
    return add_by(model, LoRASettings(rank, alpha, dropout, names, rslora), seed)


def add_by(model: nn.Module, settings: LoRASettings, seed: int | None = None) -> nn.Module:
    """Add the adapters of the given settings to a model: see `add`."""
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
        if layer.lora is not None:  # a model in evaluation mode stays without dropout
            layer.lora.train(layer.training)
    if isinstance(model, Model):
        model.engine.parameters_changed()
    return model


def save(
    model: nn.Module, directory: str | Path, *, base_model_name_or_path: str | None = None
) -> None:
    """Save a model's adapters in the format of PEFT, from all ranks together.

    PeftModel.from_pretrained and `megazoo.lora.load` load the directory. The files,
    adapter_config.json and adapter_model.safetensors, are the same in every parallel layout. They
    include the head of a classifier. The tensors have the dtype of the parameters.

    Args:
        model: a model with adapters.
        directory: directory to write. An adapter that megazoo wrote there before is replaced.
        base_model_name_or_path: name of the base model in adapter_config.json; by default its name
            on the Hugging Face hub, if it was loaded from there.

    Raises:
        UserError: on every rank, if one of them fails, if the directory holds other files, if the
            model has no adapters, or if other weights of a megazoo model are trained, which would
            be lost.

    Example:
        megazoo.lora.save(model, "adapter")
        peft.PeftModel.from_pretrained(base, "adapter")
    """
    _refuse_off(model, "megazoo.lora.save")
    directory, ctx = Path(directory), _context_of(model)
    ctx.require_ranks()
    if not has_adapters(model):
        raise UserError("the model has no adapters to save: add some with megazoo.lora.add")
    if not isinstance(model, Model) and ctx.pp_size > 1:
        raise UserError(
            f"adapters of a custom module can be saved only with pp 1, not {ctx.pp_size}"
        )
    settings = settings_of(model)
    if isinstance(model, Model) and not base_model_name_or_path:
        base_model_name_or_path = name_alone(model.weights_path or "")

    def begin() -> AbstractContextManager[Path]:
        return output_directory(directory, lambda: _check_place(directory))

    def files() -> Files:
        return files_of_rank(_Saved(model), None)

    def complete(staging: Path, written: list[dict]) -> None:
        write_manifest(staging, LORA, settings, ctx, written, {}, {}, attached={})
        shards = Checkpoint(staging, verify=False)
        write_adapters(shards, without_memory(model), settings, staging, base_model_name_or_path)
        for name in (MANIFEST, TRAINER, *(name for part in written for name in part["files"])):
            (staging / name).unlink()

    run_together(lambda: _check_nothing_is_lost(model), directory, ctx)
    write_together(directory, ctx, begin=begin, files=files, complete=complete)


def load(model: nn.Module, directory: str | Path, *, verify: bool = True) -> nn.Module:
    """Load adapters into a model. Every rank calls it, before the optimizer is created.

    A model without adapters gets those of the directory, and all other parameters are frozen, as by
    `add`. A model that has the same adapters gets the new values. Other weights that were trained
    with the adapters, such as a classifier's head, are also loaded and stay trainable. Each rank
    reads only its shard, in the dtype of the model's weights.

    Args:
        model: a megazoo model, or a custom module with ColumnParallelLinear and RowParallelLinear
            layers.
        directory: a directory that PEFT or `megazoo.lora.save` wrote, a checkpoint of a run with
            adapters in any parallel layout, or org/name[@revision] on the Hugging Face hub.
        verify: compare the files with the checksums of a checkpoint.

    Returns:
        The model.

    Raises:
        UserError: if the adapters belong to another model or (for a checkpoint) to other base
            weights, if tensors are missing or unexpected, or if the adapters use an unsupported
            feature of PEFT (DoRA, biases, other trained modules).

    Example:
        model = megazoo.from_pretrained("EleutherAI/pythia-160m", ctx)
        megazoo.lora.load(model, "adapter")
    """
    with propagate_errors(_context_of(model)):
        load_from(model, open_adapter(directory, without_memory(model), verify=verify))
    return model


def load_from(model: nn.Module, source: AdapterSource) -> None:
    """Load the adapters of an open source into a model: see `load`."""
    ctx = _context_of(model)
    with propagate_errors(ctx):
        if isinstance(source, SavedAdapters):
            refuse_rounded(model, "adapted")
            check_base(source, model)
        if has_adapters(model):
            _check_same(model, source)
        else:
            add_by(model, source.settings)
        entries = [entry for entry in _entries(model) if entry.name in source.specs]
        files = source.files_of([(entry.name, entry.spec) for entry in entries], ctx)
        with verifying(source, files, ctx):
            for entry in in_memory(model, entries, write=True):
                source.read_into(entry.name, entry.parameter, entry.spec, ctx)
                entry.parameter.requires_grad_(True)
        source.close()
    if isinstance(model, Model):
        model.engine.weights_read(*model.read_from, source)
        model.engine.parameters_changed()


def _check_same(model: nn.Module, source: AdapterSource) -> None:
    """Raise UserError unless a model's adapters have the matrices, ranks and scales of a source."""

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
                f"{source.path} has other adapters than the model: for {name} the model has "
                f"{here}, the directory {there}; load it into a model without adapters"
            )


def merge(model: nn.Module) -> nn.Module:
    """Add the adapters to the weights, and remove them from the model.

    The model computes the same as before, up to rounding: W + scale * B A is computed in fp32 and
    rounded once to the weight's dtype. Afterwards all parameters are trainable. There is no
    communication.

    Args:
        model: a model with adapters.

    Returns:
        The model.

    Raises:
        UserError: if the model has no adapters.

    Example:
        megazoo.lora.merge(model).save_pretrained("tuned")
    """
    _refuse_off(model, "megazoo.lora.merge")
    refuse_packed(model, "merged")
    if not has_adapters(model):
        raise UserError("the model has no adapters to merge: add some with megazoo.lora.add")
    if storage_of(model):
        raise UserError(
            "megazoo.lora.merge is not supported with zero 3: save the adapters, and merge them "
            "with `megazoo convert BASE OUT --to hf --adapter DIRECTORY`"
        )
    for _, layer in linear_layers(model):
        if layer.lora is not None:
            layer.lora.merge_into(layer.weight)
            layer.lora = None
    model.requires_grad_(True)
    for entry in _entries(model):
        entry.parameter.requires_grad_(not entry.spec.is_state)
    if isinstance(model, Model):
        model.attached = None
        model.engine.parameters_changed()
    return model


# Models within a block of `off`.
_OFF: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _refuse_off(model: nn.Module, call: str) -> None:
    if model in _OFF:
        raise UserError(f"{call} can't be called within megazoo.lora.off: call it after the block")


@contextmanager
def off(model: nn.Module) -> Iterator[nn.Module]:
    """Within this block, the model computes without its adapters, as its base does. All ranks of a
    replica enter it together.

    Args:
        model: a model with adapters, or a part of one.

    Raises:
        UserError: The model has no adapters.

    Example:
        with torch.no_grad(), megazoo.lora.off(model):
            reference = model.token_logprobs(ids).sum(dim=1)
    """
    if not has_adapters(model):
        raise UserError("the model has no adapters to turn off: call megazoo.lora.add first")
    adapted: list[Any] = [m for m in model.modules() if getattr(m, "lora", None) is not None]
    adapters = [layer.lora for layer in adapted]
    try:
        for layer in adapted:
            layer.lora = None
        _OFF.add(model)
        yield model
    finally:
        _OFF.discard(model)
        for layer, kept in zip(adapted, adapters, strict=True):
            layer.lora = kept


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters on any of its ranks. Of a custom module only the layers
    of this rank count."""
    if isinstance(model, Model):
        return model.attached is not None
    return any(getattr(layer, LORA) is not None for _, layer in linear_layers(model))


def without_memory(model: nn.Module) -> nn.Module:
    """Return the model with all layers on the meta device; a custom module is returned as it is."""
    ours = isinstance(model, Model)
    return model.on_meta(model.config, ParallelContext()) if ours else model


def settings_of(model: nn.Module) -> LoRASettings:
    """Return the settings of a model's adapters; those of a custom module are inferred from its
    layers."""
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
    """Raise UserError if a megazoo model trains parameters that are not saved with its adapters.
    Other trained parameters of a custom module are not checked: the caller saves them."""
    if not isinstance(model, Model):
        return
    held = {entry.name for entry in _Saved(model).entries()}
    if lost := {entry.name for entry in model.trained_entries()} - held:
        raise UserError(
            f"{some_of(lost)}: trained in addition to the adapters, but not saved with them; save "
            "a checkpoint, or merge the adapters (megazoo.lora.merge), or freeze the parameters"
        )


class _Saved:
    """A view of a model that has only the parameters that are saved with its adapters."""

    attached = None

    def __init__(self, model: nn.Module):
        self.model, self.ctx, self._storage = model, _context_of(model), storage_of(model)

    def entries(self) -> list[NamedParameter]:
        return [
            entry
            for entry in _entries(self.model)
            if entry.spec.added or entry.name == CLASSIFIER_HEAD
        ]


def _entries(model: nn.Module) -> Iterator[NamedParameter]:
    """Yield this rank's sharded parameters, with their global names."""
    if isinstance(model, Model):
        yield from model.entries()
        return
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for name, spec in module.specs.items():
                ranks = (module.ctx.pp_rank,)
                yield NamedParameter(f"{prefix}.{name}", getattr(module, name), spec, ranks)


def _context_of(model: nn.Module) -> ParallelContext:
    """Return the parallel context of a model, or of the layers of a custom module."""
    if isinstance(model, Model):
        return model.ctx
    contexts = (layer.ctx for _, layer in linear_layers(model))
    return next(contexts, None) or ParallelContext()


def _check_place(directory: Path) -> None:
    """Raise UserError if a directory holds other files than an adapter that megazoo wrote."""
    if name := foreign_to_adapter(directory):
        raise UserError(
            f"{directory} holds {name}, which is not part of an adapter that megazoo wrote: choose "
            "another directory"
        )
