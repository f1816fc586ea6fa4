"""The fields that every model config has, and checks of its sizes in a parallel layout."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from megazoo.errors import UserError, any_of
from megazoo.families.registry import family_of
from megazoo.files import brief
from megazoo.layers.classification import PROBLEMS
from megazoo.parallel.shard import nearly_even


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Hold the fields that every model has.

    A family's Config inherits from it. It may redeclare a field to give it a default, and add
    fields.

    Args:
        vocab_size: number of tokens.
        max_positions: length of the longest sequence, in tokens: see `Model.longest_sequence`.
        hidden_size: features of a token.
        layers: number of layers.
        heads: number of attention heads of a layer.
        num_labels: 0: a language model; above 0: a sequence classifier, as in transformers.
        problem_type: the kind of labels, as in transformers.
        pad_token_id: the token that pads the rows of a classifier, as in transformers.

    Example:
        config = megazoo.models.find_config("gpt2-tiny")
        config.hidden_size  # 128
    """

    vocab_size: int
    max_positions: int
    hidden_size: int
    layers: int
    heads: int
    # A family that uses these declares them as fields, in any order. kv_heads 0 means as many as
    # heads, head_size 0 means hidden_size / heads, and ffn_size 0 means the default of the family.
    kv_heads = 0
    head_size = 0
    ffn_size = 0
    tie_embeddings = False
    num_labels: int = 0
    problem_type: str | None = None
    pad_token_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary, with the family's name as "model".

        `from_config` and config files accept it. UserError if no registered family has this Config.
        """
        return {"model": family_of(self)} | asdict(self)


def fields_of_training(config: Any) -> list[str]:
    """Return the names of the fields of a config that affect only training: dropout probabilities
    and settings of routers."""
    names = (field.name for field in fields(config))
    return [name for name in names if name.endswith("dropout") or name.startswith("router_")]


# The largest allowed sizes. They keep the number of bytes of a tensor within torch's limits, and
# stop a malicious config before a model is built.
LARGEST = {
    "vocab_size": 2**40,
    "max_positions": 2**40,
    "hidden_size": 2**20,
    "layers": 10_000,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_size": 2**16,
    "ffn_size": 2**24,
    "num_labels": 2**20,
}
OPTIONAL = (
    *("kv_heads", "head_size", "tie_embeddings"),
    *("num_labels", "problem_type", "pad_token_id"),
    "to_dict",
)


def add_missing_fields(config_class: type) -> None:
    """Add to_dict, and the optional fields as class attributes, to a Config that does not inherit
    from ModelConfig."""
    for name in OPTIONAL:
        if not hasattr(config_class, name):
            setattr(config_class, name, getattr(ModelConfig, name))


def check_sizes(config: Any, tp: int, pp: int, virtual: int = 1) -> None:
    """Raise UserError if a model of this config can't be sharded over tp x pp ranks with `virtual`
    stages per rank; the error lists allowed sizes."""
    _check_one_by_one(config)
    _check_tensor_parallel(config, tp, pp)
    if config.layers < pp:
        raise UserError(
            f"layers {config.layers} are too few for pp {pp} stages: use pp of at most "
            f"{config.layers}"
        )
    if config.layers < pp * virtual:
        raise UserError(
            f"layers {config.layers} are too few for pp {pp} x virtual-pp {virtual} = "
            f"{pp * virtual} stages: use virtual-pp of at most {config.layers // pp}"
        )


def _check_one_by_one(config: Any) -> None:
    """Raise UserError for sizes that are invalid in every layout."""
    for name in ("vocab_size", "max_positions", "hidden_size", "layers", "heads", "ffn_size"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} {getattr(config, name)} must be at least 1")
    for name in ("kv_heads", "head_size", "num_labels"):
        if getattr(config, name) < 0:
            raise UserError(f"{name} {getattr(config, name)} must be 0 or more")
    for name, largest in LARGEST.items():
        if getattr(config, name) > largest:
            raise UserError(f"{name} {brief(getattr(config, name))} must be at most {largest}")
    if abs(config.pad_token_id or 0) > LARGEST["vocab_size"]:
        raise UserError(f"pad_token_id {brief(config.pad_token_id)} is not a valid token id")
    _check_rates(config)
    if not config.head_size and config.hidden_size % config.heads:
        most = min(config.hidden_size, LARGEST["heads"])
        fits = [n for n in range(1, most + 1) if config.hidden_size % n == 0]
        raise UserError(
            f"hidden-size {config.hidden_size} is not divisible by heads {config.heads}: "
            f"use heads {any_of(fits)}"
        )
    if config.problem_type not in (None, *PROBLEMS):
        raise UserError(
            f"problem_type {config.problem_type!r} is not supported; "
            f"supported: {', '.join(PROBLEMS)}"
        )
    if config.heads % (config.kv_heads or config.heads):
        raise UserError(f"heads {config.heads} is not divisible by kv-heads {config.kv_heads}")


def _check_rates(config: Any) -> None:
    """Raise UserError for a dropout probability or a norm's epsilon that is out of range."""
    for name, value in vars(config).items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if name.endswith("dropout") and not 0 <= value < 1:
            raise UserError(f"{name} {value} must be 0 or more, and below 1")
        if name.endswith("epsilon") and not 0 <= value < math.inf:
            raise UserError(f"{name} {value} must be 0 or more")


def _check_tensor_parallel(config: Any, tp: int, pp: int) -> None:
    """Raise UserError if the heads, or the inner features of the MLPs, can't be sharded over tp."""
    heads, kv_heads = config.heads, config.kv_heads or config.heads
    fits = [n for n in range(1, min(heads, config.ffn_size) + 1) if _heads_fit(heads, kv_heads, n)]
    if tp in fits:
        return
    if config.ffn_size < tp:
        reason = f"ffn-size {config.ffn_size}"
    elif kv_heads < heads:
        reason = f"heads {heads} with kv-heads {kv_heads}"
    else:
        reason = f"heads {heads}"
    pipeline = f", or use --pp {tp}" if pp == 1 and config.layers >= tp else ""
    raise UserError(f"{reason} can't be sharded over tp {tp}: use tp {any_of(fits)}{pipeline}")


def _heads_fit(heads: int, kv_heads: int, tp: int) -> bool:
    """Return whether heads can be sharded over tp: KV heads with their queries nearly evenly, or
    replicated evenly if tp exceeds the number of KV heads."""
    return nearly_even(kv_heads, tp) if tp <= kv_heads else tp % kv_heads == 0 and heads % tp == 0
