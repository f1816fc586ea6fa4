"""The families of models by name, and the configs that names and files stand for."""

import dataclasses
import math
import tomllib
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from megazoo.errors import UserError, nearest
from megazoo.files import brief, convert, json_object, read_bytes
from megazoo.hub import hint_to_load
from megazoo.models.hugging_face.config import ConfigReader
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.dtypes import dtype_named

if TYPE_CHECKING:
    from megazoo.models.base import Model

Class = TypeVar("Class", bound="type[Model]")

# What to do with a model object, which can't be cut.
GIVE_A_DIRECTORY = (
    "a model object can't be cut: save it with its save_pretrained(DIRECTORY), then give that "
    "directory to megazoo.from_pretrained or megazoo.initialize"
)
# Those of the zoo enter themselves, as others may: see `register`.
FAMILIES: "dict[str, type[Model]]" = {}


def register(name: str) -> Callable[[Class], Class]:
    """Class decorator: make a model of your own known as `name`, to --model, presets and
    checkpoints.

    The class is a `Model` with a frozen dataclass Config and `presets`, of which one is called
    `name-tiny`. Raises UserError if the name, a preset's name or the Config is another family's, or
    a preset is of another Config: a config alone says which model is built of it.
    """

    def add(model: Class) -> Class:
        others = {family: other for family, other in FAMILIES.items() if family != name}
        _check_names(name, model, others)
        _check_config(name, model, others)
        FAMILIES[name] = model
        model.family = name
        return model

    return add


def _check_names(name: str, model: type, others: dict[str, type]) -> None:
    """Refuse names that another family has, and presets of which none is the tiny one."""
    taken = {known for family, other in others.items() for known in (family, *other.presets)}
    clash = taken & {name, *model.presets}
    if clash:
        raise UserError(f"{min(clash)!r} is taken: choose another name for the model or its preset")
    if f"{name}-tiny" not in model.presets:
        raise UserError(f"the model {name} needs a preset {name}-tiny")


def _check_config(name: str, model: type, others: dict[str, type]) -> None:
    """Refuse a Config that another family has, and presets of another Config."""
    for family, other in others.items():
        if other.Config is model.Config:
            raise UserError(
                f"{model.Config.__name__} is the Config of {family}: give {name} a Config of its "
                "own, a frozen dataclass that may inherit from it"
            )
    for preset, config in model.presets.items():
        if type(config) is not model.Config:
            raise UserError(
                f"the preset {preset} is a {type(config).__name__}: make it a "
                f"{model.Config.__name__}, the Config of {name}"
            )


def family_of(config: Any) -> str:
    """Return the name of the family that a config object belongs to."""
    for name, model in FAMILIES.items():
        if type(config) is model.Config:
            return name
    raise UserError(f"{type(config).__name__} is the Config of no registered family")


def presets() -> dict:
    """Return the config of every preset by its name."""
    return {name: each for model in FAMILIES.values() for name, each in model.presets.items()}


def tiny_preset(name: str) -> str:
    """Return what a name means on the command line: the tiny preset of a family, or the name
    itself."""
    return f"{name}-tiny" if name in FAMILIES else name


def find_config(what: Any) -> Any:
    """Return the config that a name, a file or an object says: see `from_config`. UserError names
    the nearest name."""
    if isinstance(what, torch.nn.Module):
        raise UserError(GIVE_A_DIRECTORY)
    if any(type(what) is model.Config for model in FAMILIES.values()):
        return what
    if isinstance(what, dict):
        return _config_from_values(dict(what), "the config")
    if isinstance(what, str | Path):
        name, known = str(what), presets()
        if name.endswith((".json", ".toml")):
            return config_from_file(Path(name))
        if name in FAMILIES and name not in known:
            raise UserError(
                f"{name} is a family: name a preset, {', '.join(FAMILIES[name].presets)}"
            )
        if name not in known:
            hint = hint_to_load(name) or nearest(name, {*known, *FAMILIES})
            raise UserError(
                f"unknown model or preset {name!r}{hint}; there are presets of "
                f"{', '.join(FAMILIES)}, which `megazoo models` lists"
            )
        return known[name]
    if hasattr(what, "model_type") and hasattr(what, "to_dict") and not isinstance(what, type):
        # a config object of transformers
        return config_from_hugging_face(what.to_dict())
    raise UserError(
        f"{type(what).__name__} is no config: give a preset's name, a config object, its "
        "to_dict(), or a config file"
    )


def family_named(name: str) -> "type[Model]":
    """Return a family's class; UserError names the nearest name."""
    if not isinstance(name, str) or name not in FAMILIES:
        hint = nearest(name, FAMILIES) if isinstance(name, str) else ""
        raise UserError(
            f"unknown model family {brief(name)}{hint}; there are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def config_from_dict(family: str, values: dict) -> Any:
    """Return a family's config from the dictionary that `dataclasses.asdict` made of it."""
    cls = family_named(family).Config
    unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
    if unknown:
        raise UserError(f"unknown {family} setting {min(unknown)!r}")
    return cls(**_typed_values(cls, values))


def _typed_values(cls: type, values: dict) -> dict:
    """Return the values of a config's fields, as a file has them, each of its field's type.

    UserError for one that is of another type or not finite, and for a field that is not there. Of a
    user's own types nothing is known, and what a field has by default it may have in a file.
    """
    try:
        kinds = get_type_hints(cls)
    except (NameError, TypeError):  # annotations that only a type checker can look up
        kinds = {}
    typed = dict(values)
    for field in dataclasses.fields(cls):
        required = field.init and MISSING is field.default is field.default_factory
        if required and field.name not in values:
            raise UserError(f"{field.name} is missing")
        value = values.get(field.name, field.default)
        is_default = type(value) is type(field.default) and value == field.default
        if field.name in values and not is_default and _is_plain(kinds.get(field.name)):
            typed[field.name] = value = convert(value, kinds[field.name], field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{field.name} is {value}: it must be finite")
    return typed


def _is_plain(kind: Any) -> bool:
    """Whether a type is made of those that JSON has."""
    if get_origin(kind) is Literal:
        return True
    if get_origin(kind) in (Union, UnionType, list, tuple, dict):
        return all(part is ... or _is_plain(part) for part in get_args(kind))
    return kind in (int, float, str, bool, NoneType, dict, list, tuple, Any)


def config_from_file(path: Path) -> Any:
    """Read a config from Hugging Face's config.json, or from JSON or TOML with our names: model =
    "llama", layers = 2 ..."""
    data = read_bytes(path)
    try:
        values = tomllib.loads(data.decode()) if path.suffix == ".toml" else json_object(path, data)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    return _config_from_values(values, str(path))


def _config_from_values(values: dict, origin: str) -> Any:
    """Return a family's config from what a config file or `to_dict` holds. origin: for errors."""
    if not {"model", "model_type"} & values.keys():
        raise UserError(f"{origin} says neither model_type (Hugging Face's name) nor model (ours)")
    try:
        if "model_type" in values:
            return config_from_hugging_face(values)
        return config_from_dict(values.pop("model"), values)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None


def config_from_hugging_face(values: dict) -> Any:
    """Return a family's config from the dictionary that Hugging Face's config.json holds.

    UserError names a field that changes the mathematics and is not supported, with its value.
    """
    family = values["model_type"]
    if not isinstance(family, str):
        raise UserError(f"model_type is {brief(family)}: it must be a string")
    known = {
        model.HUGGING_FACE.model_type or name: model
        for name, model in FAMILIES.items()
        if hasattr(model.Config, "from_hugging_face")
    }
    if family not in known:
        raise UserError(
            f"model_type {family!r} is not supported: there are {', '.join(sorted(known))}"
        )
    model, fields = known[family], ConfigReader(values)
    config = model.Config.from_hugging_face(fields)
    fields.finish()
    _typed_values(type(config), vars(config))
    one_layer = dataclasses.replace(config, layers=min(config.layers, 1))
    model.on_meta(one_layer, ParallelContext())  # refuses what the layers don't know
    return config


def from_config(
    config: Any,
    ctx: ParallelContext | None = None,
    *,
    dtype: torch.dtype | str | None = torch.float32,
    seed: int = 0,
) -> "Model":
    """Build this rank's part of a model with initial weights that depend on the seed alone, not on
    the layout.

    config: a preset's name, such as "gpt2", "llama-7b" or "llama-tiny"; a family's config object or
        its to_dict(); a config object of transformers; or the path of a config file: Hugging Face's
        config.json, or JSON or TOML with our names.
    ctx: the parallel context; the ambient one by default. Returns an nn.Module on ctx.device.
    dtype: of the weights: a torch.dtype, or its name such as "bfloat16" or "bf16"; "auto" is the
        dtype that a config object of transformers has, otherwise float32.
    Errors: UserError for an unknown name, or a model that the layout can't cut.
    """
    ours = find_config(config)
    dtype = dtype_named(dtype) or dtype_named(getattr(config, "dtype", None)) or torch.float32
    return FAMILIES[family_of(ours)].build(ours, ctx or current_context(), dtype=dtype, seed=seed)
