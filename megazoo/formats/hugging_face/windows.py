"""Sliding windows in config.json: which layers have one, and its size."""

from typing import Any

from megazoo.errors import UserError
from megazoo.families.config import LARGEST
from megazoo.files import brief
from megazoo.formats.hugging_face.config import FULL, ConfigReader

WINDOW = "sliding_attention"


def read_window(fields: ConfigReader, default: int) -> int:
    """Return sliding_window in tokens, or 0 (all tokens) if the file has null. Raises UserError for
    a window below 1."""
    window = fields.take("sliding_window", default)
    if window < 1:
        raise UserError(
            f"sliding_window {window} is not supported: it must be at least 1, or null for none"
        )
    return 0 if "sliding_window" in fields.nulls else window


def read_common_window(fields: ConfigReader) -> int:
    """Return the window of all layers in tokens, or 0 (all tokens), as in Qwen3-MoE."""
    fields.take("max_window_layers")  # has no effect
    if fields.take("use_sliding_window", False):
        return read_window(fields, 4096)
    fields.take("sliding_window")  # has no effect
    return 0


def read_layer_types(fields: ConfigReader, layers: int) -> dict[str, Any]:
    """Return `window` and `full_layers` of a config, as in Qwen: the first layers attend to all
    tokens, the later ones have a window. Raises UserError for another order of layers.

    Without layer_types, the layers from max_window_layers on have the window.
    """
    window = 0
    if fields.take("use_sliding_window", False):
        window = read_window(fields, 4096)
    else:
        fields.take("sliding_window", 4096)  # has no effect
    full = fields.take("max_window_layers", 28)
    full = max(0, min(full, layers)) if window else layers
    types = fields.take("layer_types", layer_types(full, layers))
    if WINDOW in types:
        full = types.index(WINDOW)
    if types != layer_types(full, layers) or (WINDOW in types and not window):
        raise UserError(
            f"layer_types {brief(types)} is not supported: of the {layers} layers, it must "
            f"give {FULL} for the first ones and {WINDOW} for all others, and "
            "use_sliding_window must be true"
        )
    has_window = full < layers
    return {"window": window if has_window else 0, "full_layers": full if has_window else 0}


def write_layer_types(config: Any) -> dict[str, Any]:
    """Return the fields from which `read_layer_types` reads the window of a config."""
    full = max(0, min(config.full_layers, config.layers)) if config.window else config.layers
    return {
        "use_sliding_window": bool(config.window),
        "sliding_window": config.window or None,
        "max_window_layers": full,
        "layer_types": layer_types(full, config.layers),
    }


def layer_types(full: int, layers: int) -> list[str]:
    """Return the types of all layers. The first `full` layers attend to all tokens."""
    _check_count(layers)
    return [FULL] * full + [WINDOW] * (layers - full)


def read_layer_pattern(
    fields: ConfigReader, layers: int, window: int, full_every: int
) -> dict[str, Any]:
    """Return `window` and `full_every` of a config: every full_every-th layer attends to all
    tokens, the others have the window. Raises UserError for another order of layers.

    window, full_every: the values if the file has none.
    """
    window = read_window(fields, window)
    every = fields.take("sliding_window_pattern", full_every)  # in older files
    types = fields.take("layer_types", pattern_types(every, layers))
    if FULL in types:
        every = types.index(FULL) + 1
    elif every <= layers:
        every = layers + 1
    if types != pattern_types(every, layers):
        raise UserError(
            f"layer_types {brief(types)} is not supported: of the {layers} layers, it must "
            f"give {FULL} for every n-th one, with any n, and {WINDOW} for all others"
        )
    if WINDOW in types and not window:
        raise UserError(f"sliding_window null is not supported: layer_types has {WINDOW}")
    return {"window": window, "full_every": every}


def write_layer_pattern(config: Any) -> dict[str, Any]:
    """Return the fields from which `read_layer_pattern` reads a config."""
    every = config.full_every if config.window else 1
    return {
        "sliding_window": config.window or None,
        "layer_types": pattern_types(every, config.layers),
    }


def pattern_types(full_every: int, layers: int) -> list[str]:
    """Return the types of all layers, of which every full_every-th attends to all tokens."""
    _check_count(layers)
    return [WINDOW if (index + 1) % full_every else FULL for index in range(layers)]


def _check_count(layers: int) -> None:
    """Raise UserError for more layers than a list of their types should have."""
    if layers > LARGEST["layers"]:
        raise UserError(f"layers {layers} must be at most {LARGEST['layers']}")
