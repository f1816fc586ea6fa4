"""Small models of the same structure."""

from dataclasses import fields, replace
from typing import Any

LARGEST = {"layers": 5, "vocab_size": 61, "max_positions": 32, "window": 6}


def shrink(config: Any) -> Any:
    """Return a small config of the same structure: heads, KV groups, ties and kinds of layers stay.

    It has five layers at most, so that stages are uneven, and a vocabulary that no number of ranks
    divides.
    """
    names = {f.name for f in fields(config)}
    small = {
        name: min(getattr(config, name), largest)
        for name, largest in LARGEST.items()
        if name in names
    }
    if {"heads", "hidden_size"} <= names:
        turned = getattr(config, "rotary_fraction", 1.0)  # of which a pair must be left
        head = 8 if config.heads <= 16 or turned < 1 else 4
        small["hidden_size"] = head * config.heads
        small |= {"head_size": head} if getattr(config, "head_size", None) else {}
        if "ffn_size" in names:
            unit = 8 * head  # tp can cut it
            units = round(config.ffn_size / config.hidden_size * small["hidden_size"] / unit)
            small["ffn_size"] = max(1, units) * unit
    return replace(config, **small)
