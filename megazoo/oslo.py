"""The way in that users of OSLO know: one call with a configuration."""

import json
from pathlib import Path

from megazoo.checkpoint import from_pretrained
from megazoo.errors import UserError, nearest
from megazoo.models import Model, from_config
from megazoo.parallel.context import ParallelContext

SETTINGS = ("enable", "tensor_parallel_size", "pipeline_parallel_size")


def initialize(model: str | Path, config: dict | str | Path | None = None, **options) -> Model:
    """This rank's part of a model, cut as `config` says.

    model: a directory (a checkpoint of any layout, or Hugging Face's), or the name of a preset or family. config: a
    dictionary, or a JSON file, such as {"model_parallelism": {"enable": True, "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2}}; without, or not enabled, each rank has the whole model. options: as in
    `from_pretrained` or `from_config`. Replicas are what remains of the world, in `model.ctx`. UserError for what is
    not known.
    """
    if isinstance(config, str | Path):
        try:
            config = json.loads(Path(config).read_text())
        except OSError as error:
            raise UserError(f"{config}: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{config} is not JSON: {error}") from error
    config = _known(config or {}, ("model_parallelism",), "the configuration")
    cut = _known(config.get("model_parallelism", {}), SETTINGS, "model_parallelism")
    on = cut.get("enable", True)
    sizes = [cut.get(name, 1) if on else 1 for name in SETTINGS[1:]]
    ctx = ParallelContext.from_torch(*sizes)
    build = from_pretrained if Path(model).exists() else from_config
    return build(str(model), ctx, **options)


def _known(settings, names: tuple[str, ...], where: str) -> dict:
    if not isinstance(settings, dict):
        raise UserError(f"{where} must be a dictionary, not {settings!r}")
    for name in settings:
        if name not in names:
            raise UserError(f"{where} has no {name!r}{nearest(name, names)}; there are {', '.join(names)}")
    return settings
