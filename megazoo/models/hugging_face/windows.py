"""Windows of attention in config.json: which layers look at the last tokens alone, and how many."""

from typing import Any

from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.models.hugging_face.config import ConfigReader

FULL, WINDOW = "full_attention", "sliding_attention"


def read_window(fields: ConfigReader, default: int) -> int:
    """Return the tokens of sliding_window, or 0, for all of them, where the file says null.
    UserError for a window that has no place for the token itself."""
    window = fields.take("sliding_window", default)
    if window < 1:
        raise UserError(
            f"sliding_window {window} is not supported: it must be at least 1, or null for none"
        )
    return 0 if "sliding_window" in fields.nulls else window


def read_layer_types(fields: ConfigReader, layers: int) -> dict[str, Any]:
    """Return `window` and `full_layers` of a config whose first layers see all and whose later ones
    have a window, as Qwen's have. UserError for layers in another order.

    Where layer_types does not say which, those from max_window_layers on have it.
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
            f"layer_types {brief(types)} is not supported: it must be, for {layers} layers, {FULL} "
            f"of the first ones and then {WINDOW}, with use_sliding_window"
        )
    has_window = full < layers
    return {"window": window if has_window else 0, "full_layers": full if has_window else 0}


def write_layer_types(config: Any) -> dict[str, Any]:
    """Return the fields of which `read_layer_types` makes a config's window."""
    full = max(0, min(config.full_layers, config.layers)) if config.window else config.layers
    return {
        "use_sliding_window": bool(config.window),
        "sliding_window": config.window or None,
        "max_window_layers": full,
        "layer_types": layer_types(full, config.layers),
    }


def layer_types(full: int, layers: int) -> list[str]:
    """Return the types of all layers, of which the first `full` ones see all tokens."""
    return [FULL] * full + [WINDOW] * (layers - full)
