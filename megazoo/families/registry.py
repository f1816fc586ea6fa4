"""The registry of model families. A family of megazoo is imported when it is first used."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import MISSING
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megazoo.errors import UserError, nearest
from megazoo.families.table import CLASSES, PRESETS
from megazoo.files import brief, convert

Class = TypeVar("Class", bound=type[Any])
Family = type[Any]  # a subclass of megazoo.models.Model


class Families(MutableMapping[str, Any]):
    """Model classes by the name of their family.

    Those of megazoo are listed in table.py, and imported when they are looked up or listed; they
    can be replaced, not removed. `register` adds custom ones.
    """

    def __init__(self):
        self._registered: dict[str, Family] = {}

    def __getitem__(self, name: str) -> Family:
        if name in PRESETS and name not in self._registered:
            self._registered[name] = getattr(import_module(_module_of(name)), CLASSES[name])
        return self._registered[name]

    def __setitem__(self, name: str, model: Family) -> None:
        self._registered[name] = model

    def __delitem__(self, name: str) -> None:
        del self._registered[name]

    def __contains__(self, name: object) -> bool:
        return name in PRESETS or name in self._registered

    def __iter__(self) -> Iterator[str]:
        return iter({**PRESETS, **self._registered})

    def __len__(self) -> int:
        return len({*PRESETS, *self._registered})

    def clear(self) -> None:
        """Remove the custom families."""
        self._registered.clear()

    def copy(self) -> dict[str, Family]:
        """Return all families."""
        return dict(self)

    @property
    def loaded(self) -> dict[str, Family]:
        """The families that have been imported."""
        modules = {name: sys.modules.get(_module_of(name)) for name in PRESETS}
        found = {name: getattr(module, CLASSES[name], None) for name, module in modules.items()}
        return {name: model for name, model in found.items() if model} | self._registered


def _module_of(family: str) -> str:
    """Return the module of a family of megazoo."""
    return f"megazoo.models.{family}"


FAMILIES = Families()


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

    def add(model: Any) -> Any:
        # tests check the families of megazoo
        if (model.__module__, model.__name__) != (_module_of(name), CLASSES.get(name)):
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
    for name, model in FAMILIES.loaded.items():
        if type(config) is model.Config:
            return name
    raise UserError(
        f"{type(config).__name__} is not the Config of a registered family: register its model "
        "with megazoo.register"
    )


def presets() -> dict:
    """Return the config of every preset by its name."""
    return {name: each for model in FAMILIES.values() for name, each in model.presets.items()}


def family_with(preset: str) -> Family | None:
    """Return the family that has a preset, or None. Only this family is imported."""
    for family, names in PRESETS.items():
        if preset in names and preset in FAMILIES[family].presets:
            return FAMILIES[family]
    return next((each for each in FAMILIES.loaded.values() if preset in each.presets), None)


def tiny_preset(name: str) -> str:
    """Return the preset that a name selects on the command line: the tiny preset if it is a family,
    otherwise the name itself."""
    return f"{name}-tiny" if name in FAMILIES else name


def family_named(name: str) -> Family:
    """Return a family's class; UserError for an unknown name, with the most similar one."""
    if not isinstance(name, str) or name not in FAMILIES:
        hint = nearest(name, FAMILIES) if isinstance(name, str) else ""
        raise UserError(
            f"unknown model family {brief(name)}{hint}; supported: {', '.join(FAMILIES)}, "
            "and those that --import FILE registers"
        )
    return FAMILIES[name]


def families_by_model_type() -> dict[str, Family]:
    """Return the families that have a Hugging Face format, by their model_type. A family of megazoo
    comes before a custom one that inherits its model_type."""
    found: dict[str, Family] = {}
    for name, model in FAMILIES.items():
        if hasattr(model.Config, "from_hugging_face"):
            found.setdefault(model.HUGGING_FACE.model_type or name, model)
    return found


def config_from_dict(family: str, values: dict) -> Any:
    """Return a family's config from the dictionary of its fields (`dataclasses.asdict`)."""
    cls = family_named(family).Config
    unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
    if unknown:
        raise UserError(f"unknown {family} setting {min(unknown)!r}")
    return cls(**_typed_values(cls, values))


def check_types(config: Any) -> None:
    """Raise UserError for a value of a config with another type than its field's."""
    _typed_values(type(config), vars(config))


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
