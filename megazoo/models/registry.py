"""The families of models by name, and the configs that names and files stand for."""

import dataclasses
import tomllib
from pathlib import Path

import torch

from megazoo.errors import UserError, nearest
from megazoo.files import json_object, read_bytes
from megazoo.models.config import add_missing_fields
from megazoo.models.hugging_face.config import ConfigReader
from megazoo.parallel.context import ParallelContext, current_context

GIVE_A_DIRECTORY = (
    "a model object can't be cut: save it with its save_pretrained(DIRECTORY), then give that directory to "
    "megazoo.from_pretrained or megazoo.initialize"
)
FAMILIES: dict[str, type] = {}  # those of the zoo enter themselves, as others may: see `register`


def register(name: str):
    """Class decorator: make a model of your own known as `name`, to --model, presets and
    checkpoints.

    The class is a `Model` with a frozen dataclass Config and `presets`, of which one is called
    `name-tiny`.
    Raises UserError if the name, a preset's name or the Config is another family's, or a preset is
    of another Config: a config alone says which model is built of it.
    """

    def add(model: type) -> type:
        taken = {
            preset
            for family, other in FAMILIES.items()
            if family != name
            for preset in (family, *other.presets)
        }
        clash = taken & {name, *model.presets}
        if clash:
            raise UserError(
                f"{min(clash)!r} is taken: choose another name for the model or its preset"
            )
        if f"{name}-tiny" not in model.presets:
            raise UserError(f"the model {name} needs a preset {name}-tiny")
        others = [
            family
            for family, other in FAMILIES.items()
            if family != name and other.Config is model.Config
        ]
        if others:
            what = f"{model.Config.__name__} is the Config of {others[0]}"
            raise UserError(
                f"{what}: give {name} a Config of its own, a frozen dataclass that may inherit from it"
            )
        for preset, config in model.presets.items():
            if type(config) is not model.Config:
                what = f"the preset {preset} is a {type(config).__name__}"
                raise UserError(f"{what}: make it a {model.Config.__name__}, the Config of {name}")
        add_missing_fields(model.Config)
        FAMILIES[name] = model
        model.family = name
        return model

    return add


def family_of(config) -> str:
    """The name of the family that a config object belongs to."""
    return next(name for name, model in FAMILIES.items() if type(config) is model.Config)


def presets() -> dict:
    """The config of every preset, by its name, and of every family's tiny preset, by the family's."""
    named = {
        preset: config for model in FAMILIES.values() for preset, config in model.presets.items()
    }
    return named | {family: model.presets[f"{family}-tiny"] for family, model in FAMILIES.items()}


def find_config(what):
    """The config that a name, a file or an object says: see `from_config`. UserError names the
    nearest name."""
    if isinstance(what, torch.nn.Module):
        raise UserError(GIVE_A_DIRECTORY)
    if isinstance(what, str | Path):
        name, known = str(what), presets()
        if name.endswith((".json", ".toml")):
            return config_from_file(Path(name))
        if name not in known:
            raise UserError(
                f"unknown model or preset {name!r}{nearest(name, known)}; there are {', '.join(known)}"
            )
        return known[name]
    # of transformers
    if hasattr(what, "model_type") and hasattr(what, "to_dict") and not isinstance(what, type):
        return config_from_hugging_face(what.to_dict())
    if not any(type(what) is model.Config for model in FAMILIES.values()):
        raise UserError(
            f"{type(what).__name__} is no config: give a preset's name, a config object, or a config file"
        )
    return what


def config_from_dict(family: str, values: dict):
    """A family's config from the dictionary that `dataclasses.asdict` made of it."""
    if family not in FAMILIES:
        raise UserError(
            f"unknown model family {family!r}{nearest(family, FAMILIES)}; there are {', '.join(FAMILIES)}"
        )
    cls = FAMILIES[family].Config
    unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
    if unknown:
        raise UserError(f"unknown {family} setting {min(unknown)!r}")
    return cls(**values)


def config_from_file(path: Path):
    """A config from Hugging Face's config.json, or from JSON or TOML with our names: model =
    "llama", layers = 2 ..."""
    data = read_bytes(path)
    try:
        values = tomllib.loads(data.decode()) if path.suffix == ".toml" else json_object(path, data)
    except ValueError as error:
        raise UserError(
            str(error) if isinstance(error, UserError) else f"{path} can't be read: {error}"
        ) from error
    if not {"model", "model_type"} & values.keys():
        raise UserError(f"{path} says neither model_type (Hugging Face's name) nor model (ours)")
    try:
        return (
            config_from_hugging_face(values)
            if "model_type" in values
            else config_from_dict(values.pop("model"), values)
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def config_from_hugging_face(values: dict):
    """A family's config from the dictionary that Hugging Face's config.json holds.

    UserError names a field that changes the mathematics and is not supported, with its value.
    """
    family = values["model_type"]
    known = {name for name, model in FAMILIES.items() if hasattr(model.Config, "from_hugging_face")}
    if family not in known:
        raise UserError(
            f"model_type {family!r} is not supported: there are {', '.join(sorted(known))}"
        )
    fields = ConfigReader(values)
    config = FAMILIES[family].Config.from_hugging_face(fields)
    fields.finish()
    one_layer = dataclasses.replace(config, layers=min(config.layers, 1))
    FAMILIES[family].on_meta(one_layer, ParallelContext())  # refuses what the layers don't know
    return config


def from_config(
    config, ctx: ParallelContext | None = None, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> "Model":  # noqa: F821
    """Build this rank's part of a model with initial weights that depend on the seed alone, not on
    the layout.

    config: a preset's name, a family's name (its tiny preset), a family's config object, one of
        transformers, or the path of a config file: Hugging Face's config.json, or JSON or TOML with
        our names.
    ctx: the parallel context; the ambient one by default. Returns an nn.Module on ctx.device.
    Errors: UserError for an unknown name, or a model that the layout can't cut.
    """
    config = find_config(config)
    return FAMILIES[family_of(config)].build(
        config, ctx or current_context(), dtype=dtype, seed=seed
    )
