"""Plain modules in a model, from torch or from the user: their parameters, buffers and tensor
attributes, which no layer of megazoo made.

Plain parameters are replicated on all tp ranks. Their initial values depend only on the seed and
their global names: the module's reset_parameters() draws them. Values from constructors (ones, a
table) are kept if they do not depend on torch's random generator.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import nn

from megazoo.errors import UserError
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.random import derive_seed


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the global name of each plain parameter, its module, and its name in that module. A
    parameter that several modules share is yielded once."""
    seen = set()
    for prefix, module in model.named_modules():
        if _is_cut(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}.{name}".lstrip("."), module, name


def _is_cut(module: nn.Module) -> TypeGuard[ShardedModule]:
    """Return whether a module defines how its own parameters are sharded. Layers that only contain
    other layers do not."""
    return isinstance(module, ShardedModule) and bool(module.specs)


def check_plain(model: nn.Module) -> None:
    """Raise UserError for a plain module or parameter that can't be the same in every layout, for a
    parameter of a ShardedModule without a sharding, and for a name that hides an attribute of
    Model."""
    for name in (*model._modules, *model._parameters, *model._buffers):
        if hasattr(type(model), name):
            raise UserError(
                f"{name} is an attribute of every Model: use another name for this module or "
                "parameter"
            )
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if _is_cut(module) and (unknown := own.keys() - module.specs.keys()):
            raise UserError(
                f"{prefix}.{min(unknown)} has no ParameterSpec: if a Layer creates one "
                "parameter with add_parameter(name, spec), it must create all of them that way"
            )
        kind = f"{prefix} is nn.{type(module).__name__}"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UserError(
                f"{kind}, whose masks depend on the parallel layout: use megazoo.layers.Dropout"
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"{kind}, whose statistics cover only the rows of one rank: use a LayerNorm"
            )
    for name, module, key in plain_parameters(model):
        parameter = getattr(module, key)
        if nn.parameter.is_lazy(parameter):
            raise UserError(
                f"{name} has no shape yet: lazy modules are not supported, so pass the sizes to "
                "the constructor"
            )
        if not parameter.dim():
            raise UserError(
                f"{name} is a scalar, which is not supported: use a parameter of shape [1]"
            )


def initialize_plain(model: nn.Module, again: Callable[[], nn.Module], seed: int) -> None:
    """Initialize plain parameters and buffers. again: builds the model once more, for a comparison.
    Raises UserError, with the name, for values that are drawn while the model is built."""
    given = _given(model)
    if given:
        others = _given(again())
        for name, tensor in given.items():
            if not torch.equal(_bits(tensor), _bits(others[name])):
                raise UserError(
                    f"{name} has random or uninitialized values when the model is built, so they "
                    "would depend on the parallel layout: initialize it in the reset_parameters() "
                    "of its module"
                )
    with torch.random.fork_rng(devices=[]):
        for name, module in reversed(list(model.named_modules())):  # children before their parents
            if not _is_cut(module) and (reset := _reset_of(module)):
                torch.manual_seed(derive_seed(seed, name))
                reset()


def place_plain(
    model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None
) -> None:
    """Move plain parameters, buffers and attributes to a device. dtype: of the floating-point
    parameters; everything else keeps its dtype, as a table of angles must."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        if not _is_cut(module):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in moved:
                    of = dtype if parameter.is_floating_point() else None
                    values = parameter.detach().to(device, of or parameter.dtype)
                    moved[parameter] = nn.Parameter(values, parameter.requires_grad)
                setattr(module, name, moved[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
        for name, value in _attributes(module):
            setattr(module, name, value.to(device))


def check_stages(model: Any, elsewhere: Callable[[int | None], Any]) -> None:
    """Raise UserError if several pipeline ranks have copies of a parameter that is not tied,
    because they build it under one name, or because modules of different stages share it.

    elsewhere: builds the model of a pipeline rank; for None, the whole model.
    """
    if model.ctx.pp_size == 1:
        return
    parameters, tied = [], set()
    for rank in range(model.ctx.pp_size):
        there = elsewhere(rank)
        tied |= there.tied.keys()
        parameters.append(dict(there.named_parameters(remove_duplicate=False)))
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in elsewhere(None).named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    built = dict.fromkeys(name for own in parameters for name in own)
    for names in [*([name] for name in built), *names_of.values()]:
        ranks = [rank for rank, own in enumerate(parameters) if own.keys() & names]
        if len(ranks) < 2 or _are_tied(names, [parameters[rank] for rank in ranks], tied):
            continue
        if len(names) == 1:
            raise UserError(
                f"{names[0]} is built on pp ranks {ranks[0]} and {ranks[1]}: build it only on "
                "the first or last stage (if self.has_first or self.has_last), or tie it"
            )
        raise UserError(
            f"{names[-1]} and {names[0]} are one parameter in one process, but separate "
            f"parameters on pp ranks {ranks[0]} and {ranks[-1]}: build the shared module "
            "under one name, outside of the layers, and tie it"
        )


def _are_tied(names: list[str], ranks: list[dict[str, nn.Parameter]], tied: set[str]) -> bool:
    """Return whether all these names are names of one tied parameter on each rank that has it.
    ranks: parameters of each rank, by name."""
    return any(
        all(own[name] is own.get(one) for own in ranks for name in own.keys() & names)
        for one in tied
    )


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    """Return the function that initializes a module's own parameters, or None."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _attributes(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that are plain attributes of a module."""
    found = [(name, value) for name, value in vars(module).items() if torch.is_tensor(value)]
    return [(name, value) for name, value in found if not isinstance(value, nn.Parameter)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, to compare NaN as equal."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _given(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors whose values only constructors set, by name."""
    given = {}
    for prefix, module in model.named_modules():
        tensors = [*module.named_buffers(recurse=False), *_attributes(module)]
        if not _is_cut(module) and not _reset_of(module):
            tensors += module.named_parameters(recurse=False)
        given |= {f"{prefix}.{name}".lstrip("."): tensor.detach() for name, tensor in tensors}
    return {name: tensor for name, tensor in given.items() if not tensor.is_meta}
