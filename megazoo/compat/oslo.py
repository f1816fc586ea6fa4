"""The function `initialize` of OSLO, which builds a model from a configuration."""

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
    """Build this rank's shard of a model, with OSLO's configuration of the parallel layout.

    Args:
        model: a directory that `megazoo.from_pretrained` accepts, to load its weights; or, for
            random weights, a config object (of a family or of transformers) or the path of a config
            file (.json or .toml). The name of a preset is not accepted, because transformers would
            download trained weights of that name; use `megazoo.from_config`.
        config: a dictionary or the path of a JSON file; see the example. By default, or with
            "enable" false, every rank has the complete model.
        options: other arguments of `megazoo.from_pretrained` or `megazoo.from_config`.

    Returns:
        The model. `model.ctx` is its parallel context; the data-parallel size is the number of
        ranks divided by the two sizes.

    Raises:
        UserError: for an unknown key of the configuration, and as in `megazoo.from_pretrained`.

    Example:
        sizes = {"enable": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
        model = megazoo.initialize("path/to/model", {"model_parallelism": sizes})
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
    """Return the settings; UserError unless they are a dictionary with only known names."""
    if not isinstance(settings, dict):
        raise UserError(f"{where} must be a dictionary, not {settings!r}")
    for name in settings:
        if name not in names:
            raise UserError(
                f"{where} has no {name!r}{nearest(name, names)}; supported: {', '.join(names)}"
            )
    return settings
