"""Builds a model from a config: the name of a preset, a file or an object."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megazoo.errors import UserError, nearest
from megazoo.families.registry import FAMILIES, family_of, family_with, presets
from megazoo.formats.configs import config_from_file, config_from_hugging_face, config_from_values
from megazoo.hub import hint_to_load
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.dtypes import dtype_named

if TYPE_CHECKING:
    from megazoo.models.base import Model

# The error for a model object that is passed in place of a directory or a config.
GIVE_A_DIRECTORY = (
    "a model object can't be sharded: save it with its save_pretrained(DIRECTORY), then pass that "
    "directory to megazoo.from_pretrained or megazoo.initialize"
)


def find_config(what: Any) -> Any:
    """Return the config of a preset's name, a file or an object, as described in `from_config`.

    Raises:
        UserError: for an unknown name, with the most similar known name; or for another object.
    """
    if isinstance(what, torch.nn.Module):
        raise UserError(GIVE_A_DIRECTORY)
    if any(type(what) is model.Config for model in FAMILIES.loaded.values()):
        return what
    if isinstance(what, dict):
        return config_from_values(dict(what), "the config")
    if isinstance(what, str | Path):
        name = str(what)
        if name.endswith((".json", ".toml")):
            return config_from_file(Path(name))
        family = family_with(name)
        if family is None and name in FAMILIES:
            raise UserError(
                f"{name} is a model family: choose one of its presets, "
                f"{', '.join(FAMILIES[name].presets)}"
            )
        if family is None:
            hint = hint_to_load(name) or nearest(name, {*presets(), *FAMILIES})
            raise UserError(
                f"unknown model or preset {name!r}{hint}; `megazoo models` lists the presets of "
                f"{', '.join(FAMILIES)}"
            )
        return family.presets[name]
    if hasattr(what, "model_type") and hasattr(what, "to_dict") and not isinstance(what, type):
        # a config object of transformers
        return config_from_hugging_face(what.to_dict())
    raise UserError(
        f"{type(what).__name__} is not a config: pass a preset's name, a config object, its "
        "to_dict(), or the path of a config file"
    )


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
