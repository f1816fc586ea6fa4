"""OSLO's way to build a model: one call with a configuration."""

from pathlib import Path
from typing import Any

import torch

from megazoo.errors import UserError, nearest
from megazoo.files import json_object, read_bytes
from megazoo.models.base import Model
from megazoo.models.pretrained import from_pretrained
from megazoo.models.registry import GIVE_A_DIRECTORY, from_config
from megazoo.parallel.context import ParallelContext

SETTINGS = ("enable", "tensor_parallel_size", "pipeline_parallel_size")


def initialize(model: Any, config: dict | str | Path | None = None, **options: Any) -> Model:
    """Build this rank's part of a model, cut as `config` says.

    model: a directory (a checkpoint of any layout, or Hugging Face's), whose weights are read; or,
    for random weights, a config object (a family's, or of transformers) or the path of a config
    file (.json or .toml). The name of a preset alone is refused: where transformers would download
    weights of that name, this would draw random ones.
    config: a dictionary, or a JSON file, such as {"model_parallelism": {"enable": True,
    "tensor_parallel_size": 2, "pipeline_parallel_size": 2}}; without, or not enabled, each rank has
    the whole model. options: as in `from_pretrained` or `from_config`. Replicas are what remains of
    the world, in `model.ctx`. UserError for what is not known.
    """
    if isinstance(config, str | Path):
        config = json_object(Path(config), read_bytes(Path(config)))
    if isinstance(model, torch.nn.Module):
        raise UserError(GIVE_A_DIRECTORY)
    config = _known(config or {}, ("model_parallelism",), "the configuration")
    cut = _known(config.get("model_parallelism", {}), SETTINGS, "model_parallelism")
    enabled = cut.get("enable", True)
    if not isinstance(enabled, bool):
        raise UserError(f"enable in model_parallelism must be true or false, not {enabled!r}")
    tp, pp = (cut.get(name, 1) if enabled else 1 for name in SETTINGS[1:])
    ctx = ParallelContext.from_torch(tp, pp)
    is_directory = isinstance(model, str | Path) and Path(model).suffix not in (".json", ".toml")
    return (from_pretrained if is_directory else from_config)(model, ctx, **options)


def _known(settings, names: tuple[str, ...], where: str) -> dict:
    """Return the settings, a dictionary of known names; UserError for others."""
    if not isinstance(settings, dict):
        raise UserError(f"{where} must be a dictionary, not {settings!r}")
    for name in settings:
        if name not in names:
            raise UserError(
                f"{where} has no {name!r}{nearest(name, names)}; there are {', '.join(names)}"
            )
    return settings
