"""Reads the config of a model from a config file."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from megazoo.errors import UserError, advise
from megazoo.families.registry import check_types, config_from_dict, families_by_model_type
from megazoo.files import brief, json_object, read_bytes
from megazoo.formats.hugging_face.config import ConfigReader
from megazoo.parallel.context import ParallelContext


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
    return config_from_values(values, str(path))


def config_from_values(values: dict, origin: str) -> Any:
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
    check_types(config)
    one_layer = dataclasses.replace(config, layers=min(config.layers, 1))
    model.on_meta(one_layer, ParallelContext())  # raises for values that the layers don't support
    return config
