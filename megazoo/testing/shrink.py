"""Small configs with the same structure."""

from dataclasses import fields, replace
from typing import Any

LARGEST = {"layers": 5, "vocab_size": 61, "max_positions": 32, "window": 6}

MOST_EXPERTS = 8


def shrink(config: Any) -> Any:
    """Return a small config of the same structure: heads, KV groups, tied weights and kinds of
    layers are kept.

    It has at most five layers, so that stages are uneven, and a vocabulary size that is a prime
    number.
    """
    names = {f.name for f in fields(config)}
    small = {
        name: min(getattr(config, name), largest)
        for name, largest in LARGEST.items()
        if name in names
    }
    if {"heads", "hidden_size"} <= names:
        turned = getattr(config, "rotary_fraction", 1.0)  # at least one pair of features is rotated
        head = 8 if config.heads <= 16 or turned < 1 else 4
        small["hidden_size"] = head * config.heads
        small |= {"head_size": head} if getattr(config, "head_size", None) else {}
        if "ffn_size" in names:
            unit = 8 * head  # so that tp can shard it
            units = round(config.ffn_size / config.hidden_size * small["hidden_size"] / unit)
            small["ffn_size"] = max(1, units) * unit
            for name in ("expert_size", "shared_size"):  # in proportion
                if size := getattr(config, name, 0):
                    units = round(size / config.ffn_size * small["ffn_size"] / unit)
                    small[name] = max(1, units) * unit
    if "experts" in names:
        small["experts"] = min(config.experts, MOST_EXPERTS)
        small["experts_per_token"] = min(config.experts_per_token, MOST_EXPERTS // 2)
    return replace(config, **small)
