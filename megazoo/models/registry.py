"""The registry of model families, and how configs are found from a name, a file or an object."""

import dataclasses
import math
import tomllib
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from megazoo.errors import UserError, advise, nearest
from megazoo.files import brief, convert, json_object, read_bytes
from megazoo.hub import hint_to_load
from megazoo.models.hugging_face.config import ConfigReader
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.dtypes import dtype_named

if TYPE_CHECKING:
    from megazoo.models.base import Model

Class = TypeVar("Class", bound="type[Model]")

# The error for a model object that is passed in place of a directory or a config.
GIVE_A_DIRECTORY = (
    "a model object can't be sharded: save it with its save_pretrained(DIRECTORY), then pass that "
    "directory to megazoo.from_pretrained or megazoo.initialize"
)
# Model classes by family name. `register` fills it, for the models of megazoo and custom models.
FAMILIES: "dict[str, type[Model]]" = {}


def register(name: str) -> Callable[[Class], Class]:
    """Register a model class as a family: a class decorator.

    --model, the presets and the checkpoints can then name the family.

    Args:
        name: name of the family. The class is a `Model` with a frozen dataclass `Config` and a
            dictionary `presets`, which has the preset `name-tiny`.

    Returns:
        The decorator, which returns the class.

    Raises:
        UserError: if another family has the name, the name of a preset, or the Config; or if a
            preset is not an instance of the Config. The class of a config selects the model.

    Example:
        @megazoo.register("mine")
        class Mine(megazoo.models.Model):
            Config, presets = MyConfig, {"mine-tiny": MyConfig(...)}
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
    """Raise UserError if another family has one of the names, or the tiny preset is missing."""
    taken = {known for family, other in others.items() for known in (family, *other.presets)}
    clash = taken & {name, *model.presets}
    if clash:
        raise UserError(f"{min(clash)!r} is taken: choose another name for the model or its preset")
    if f"{name}-tiny" not in model.presets:
        raise UserError(f"the model {name} needs a preset {name}-tiny")


def _check_config(name: str, model: type, others: dict[str, type]) -> None:
    """Raise UserError if another family has the Config, or a preset has another Config."""
    for family, other in others.items():
        if other.Config is model.Config:
            raise UserError(
                f"{model.Config.__name__} is the Config of {family}: define another for {name}, a "
                "frozen dataclass that may inherit from it"
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
    raise UserError(
        f"{type(config).__name__} is not the Config of a registered family: register its model "
        "with megazoo.register"
    )


def presets() -> dict:
    """Return the config of every preset by its name."""
    return {name: each for model in FAMILIES.values() for name, each in model.presets.items()}


def tiny_preset(name: str) -> str:
    """Return the preset that a name selects on the command line: the tiny preset if it is a family,
    otherwise the name itself."""
    return f"{name}-tiny" if name in FAMILIES else name


def find_config(what: Any) -> Any:
    """Return the config of a preset's name, a file or an object, as described in `from_config`.

    Raises:
        UserError: for an unknown name, with the most similar known name; or for another object.
    """
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
                f"{name} is a model family: choose one of its presets, "
                f"{', '.join(FAMILIES[name].presets)}"
            )
        if name not in known:
            hint = hint_to_load(name) or nearest(name, {*known, *FAMILIES})
            raise UserError(
                f"unknown model or preset {name!r}{hint}; `megazoo models` lists the presets of "
                f"{', '.join(FAMILIES)}"
            )
        return known[name]
    if hasattr(what, "model_type") and hasattr(what, "to_dict") and not isinstance(what, type):
        # a config object of transformers
        return config_from_hugging_face(what.to_dict())
    raise UserError(
        f"{type(what).__name__} is not a config: pass a preset's name, a config object, its "
        "to_dict(), or the path of a config file"
    )


def family_named(name: str) -> "type[Model]":
    """Return a family's class; UserError for an unknown name, with the most similar one."""
    if not isinstance(name, str) or name not in FAMILIES:
        hint = nearest(name, FAMILIES) if isinstance(name, str) else ""
        raise UserError(
            f"unknown model family {brief(name)}{hint}; supported: {', '.join(FAMILIES)}, "
            "and those that --import FILE registers"
        )
    return FAMILIES[name]


def config_from_dict(family: str, values: dict) -> Any:
    """Return a family's config from the dictionary of its fields (`dataclasses.asdict`)."""
    cls = family_named(family).Config
    unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
    if unknown:
        raise UserError(f"unknown {family} setting {min(unknown)!r}")
    return cls(**_typed_values(cls, values))


def _typed_values(cls: type, values: dict) -> dict:
    """Convert the values of a config file to the types of the config's fields.

    A field's default is always accepted. Values of custom types are not converted. UserError for a
    value of another type, for a number that is not finite, and for a missing field.
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
    """Return whether a type consists only of JSON types."""
    if get_origin(kind) is Literal:
        return True
    if get_origin(kind) in (Union, UnionType, list, tuple, dict):
        return all(part is ... or _is_plain(part) for part in get_args(kind))
    return kind in (int, float, str, bool, NoneType, dict, list, tuple, Any)


def config_from_file(path: Path) -> Any:
    """Read a config from a file.

    path: a config.json of Hugging Face, or JSON or TOML with megazoo's names, such as
    model = "llama" and layers = 2.
    """
    data = read_bytes(path)
    try:
        values = tomllib.loads(data.decode()) if path.suffix == ".toml" else json_object(path, data)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    return _config_from_values(values, str(path))


def _config_from_values(values: dict, origin: str) -> Any:
    """Return a family's config from the values of a config file or of `to_dict`. origin: the name
    of the source in errors."""
    if not {"model", "model_type"} & values.keys():
        raise UserError(f"{origin} has neither model_type (Hugging Face) nor model (megazoo)")
    try:
        if "model_type" in values:
            return config_from_hugging_face(values, origin)
        return config_from_dict(values.pop("model"), values)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None


def families_by_model_type() -> dict[str, type["Model"]]:
    """Return the families that have a Hugging Face format, by their model_type."""
    return {
        model.HUGGING_FACE.model_type or name: model
        for name, model in FAMILIES.items()
        if hasattr(model.Config, "from_hugging_face")
    }


def config_from_hugging_face(values: dict, origin: str = "the config") -> Any:
    """Return a family's config from the values of a Hugging Face config.json.

    Fields that no model reads are ignored, with one warning that lists them. UserError for an
    unsupported field that changes the logits, with its value. origin: the name of the file.
    """
    family = values["model_type"]
    if not isinstance(family, str):
        raise UserError(f"model_type is {brief(family)}: it must be a string")
    known = families_by_model_type()
    if family not in known:
        raise UserError(
            f"model_type {family!r} is not supported; supported: {', '.join(sorted(known))}"
        )
    model, fields = known[family], ConfigReader(values)
    fields.check_form(known)
    config = model.Config.from_hugging_face(fields)
    fields.finish(config.layers)
    if fields.ignored:
        names, more = sorted(fields.ignored), len(fields.ignored) - 20
        listed = ", ".join(names[:20]) + (f" and {more} more" if more > 0 else "")
        advise(f"{origin}: ignored {listed}, which {family} does not read")
    _typed_values(type(config), vars(config))
    one_layer = dataclasses.replace(config, layers=min(config.layers, 1))
    model.on_meta(one_layer, ParallelContext())  # raises for values that the layers don't support
    return config


def from_config(
    config: Any,
    ctx: ParallelContext | None = None,
    *,
    dtype: torch.dtype | str | None = torch.float32,
    seed: int = 0,
) -> "Model":
    """Build this rank's shard of a model with random initial weights.

    Args:
        config: a preset's name, such as "gpt2", "llama-7b" or "llama-tiny" (`megazoo models` lists
            them); a family's config object or its to_dict(); a config object of transformers; or
            the path of a config file: a Hugging Face config.json, or JSON or TOML with megazoo's
            names.
        ctx: parallel context; by default the ambient one.
        dtype: data type of the weights: a torch.dtype or its name, such as "bfloat16" or "bf16".
            "auto" is the dtype of a transformers config object, otherwise float32.
        seed: seed of the initial weights and of dropout. The weights are the same in every parallel
            layout.

    Returns:
        The model, an nn.Module on ctx.device, in training mode.

    Raises:
        UserError: if the name is unknown, or the model can't be sharded in this layout.

    Example:
        ctx = megazoo.ParallelContext.from_torch(tensor_parallel_size=2)
        model = megazoo.from_config("llama-tiny", ctx, dtype="bf16")
    """
    found = find_config(config)
    dtype = dtype_named(dtype) or dtype_named(getattr(config, "dtype", None)) or torch.float32
    return FAMILIES[family_of(found)].build(found, ctx or current_context(), dtype=dtype, seed=seed)
