"""The zoo: which families there are, and how one is built by name."""

import dataclasses

import torch

from megazoo.errors import UserError, nearest
from megazoo.models.base import Model
from megazoo.models.gpt2 import GPT2
from megazoo.models.llama import Llama
from megazoo.models.mpt import MPT
from megazoo.parallel.context import ParallelContext, current_context

FAMILIES: dict[str, type[Model]] = {"gpt2": GPT2, "llama": Llama, "mpt": MPT}


def register(name: str):
    """Class decorator: make a model of your own known as `name`, to --model, presets and checkpoints.

    The class is a `Model` with a frozen dataclass Config and `presets`, of which one is called `name-tiny`.
    Raises UserError if the name, a preset's name or the Config is another family's.
    """

    def add(model: type[Model]) -> type[Model]:
        taken = {preset for family, other in FAMILIES.items() if family != name for preset in (family, *other.presets)}
        clash = taken & {name, *model.presets}
        if clash:
            raise UserError(f"{min(clash)!r} is taken: choose another name for the model or its preset")
        if f"{name}-tiny" not in model.presets:
            raise UserError(f"the model {name} needs a preset {name}-tiny")
        FAMILIES[name] = model
        return model

    return add


def family_of(config) -> str:
    """The name of the family that a config object belongs to."""
    return next(name for name, model in FAMILIES.items() if type(config) is model.Config)


def find_config(name: str):
    """The config of a preset (gpt2-124m ...) or of a family's tiny preset (gpt2). UserError names the nearest."""
    presets = {preset: config for model in FAMILIES.values() for preset, config in model.presets.items()}
    presets |= {family: model.presets[f"{family}-tiny"] for family, model in FAMILIES.items()}
    if name not in presets:
        raise UserError(f"unknown model or preset {name!r}{nearest(name, presets)}; there are {', '.join(presets)}")
    return presets[name]


def config_from_dict(family: str, values: dict):
    """A family's config from the dictionary that `dataclasses.asdict` made of it."""
    if family not in FAMILIES:
        raise UserError(f"unknown model family {family!r}{nearest(family, FAMILIES)}; there are {', '.join(FAMILIES)}")
    cls = FAMILIES[family].Config
    unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
    if unknown:
        raise UserError(f"unknown {family} setting {min(unknown)!r}")
    return cls(**values)


def parameter_count(config) -> int:
    """The number of parameters of the whole model; a tied head counts once."""
    model = FAMILIES[family_of(config)].on_meta(config, ParallelContext())
    return sum(parameter.numel() for parameter in model.parameters())


def from_config(
    config, ctx: ParallelContext | None = None, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Model:
    """Build this rank's part of a model with initial weights that depend on the seed alone, not on the layout.

    config: a preset's name, a family's name (its tiny preset), or a family's config object.
    ctx: the parallel context; the ambient one by default. Returns an nn.Module on ctx.device.
    Errors: UserError for an unknown name, or a model that the layout can't cut.
    """
    config = find_config(config) if isinstance(config, str) else config
    return FAMILIES[family_of(config)].build(config, ctx or current_context(), dtype=dtype, seed=seed)
