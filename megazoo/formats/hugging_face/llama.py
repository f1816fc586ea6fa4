"""LLaMA, and the families built on it, in Hugging Face directories: fields of config.json."""

import dataclasses
from typing import Any

from megazoo.errors import UserError
from megazoo.formats.hugging_face.config import ConfigReader, class_name, head_to_hugging_face
from megazoo.formats.hugging_face.windows import FULL, WINDOW
from megazoo.layers.rotary import options_of

FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "intermediate_size": "ffn_size",
    "hidden_act": "activation",
    "rms_norm_eps": "norm_epsilon",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "attention_dropout": "attention_dropout",
    "tie_word_embeddings": "tie_embeddings",
}


def read_config(fields: ConfigReader, config_class: type) -> dict[str, Any]:
    """Return the values of a config of the LLaMA family. config_class: its class, with the defaults
    of transformers. Raises UserError for a field that is not supported."""
    own: dict[str, Any] = {}
    if _has(config_class, "rotary_fraction"):
        own["rotary_fraction"] = _take_rotary_fraction(fields, config_class.rotary_fraction)
    fields.only("partial_rotary_factor", 1.0)
    theta, scaling = _read_rotary(fields, config_class.rope_theta)
    values = fields.renamed(_names_of(config_class), config_class) | own
    if "num_key_value_heads" in fields.nulls:
        values["kv_heads"] = 0
    whole = values["head_size"] * values["heads"] == values["hidden_size"]
    if whole and not config_class.head_size:
        values["head_size"] = 0
    return {**values, **fields.head(), "rope_theta": theta, "rope_scaling": scaling}


def _take_rotary_fraction(fields: ConfigReader, default: float) -> float:
    """Return the fraction of a head's features that are rotated, and remove it from the fields.
    rope_scaling replaces rope_parameters."""
    fraction = fields.take("partial_rotary_factor", default)
    if fields.values.get("rope_scaling"):
        fields.take("rope_parameters", {})
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := fields.values.get(name), dict):
            rope = ConfigReader(rope)
            fraction = rope.take("partial_rotary_factor", float(fraction))
            fields.values[name] = rope.values
    return fraction


def _read_rotary(fields: ConfigReader, default: float) -> tuple[float, dict | None]:
    """Return the base of the rotary embeddings, and their scaling or None."""
    theta, rope = fields.take("rope_theta", default), fields.nested("rope_parameters")
    older = fields.nested("rope_scaling")
    context = fields.take("original_max_position_embeddings")
    if older.values:  # it replaces the newer form
        rope = older
    theta, scaling = _theta_and_scaling(rope, theta)
    if scaling and context is not None and scaling["rope_type"] in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = context  # it replaces that of the scaling
    return theta, scaling


def _theta_and_scaling(rope: ConfigReader, theta: float) -> tuple[float, dict | None]:
    """Return the base of the rotary embeddings, and their scaling or None. rope: rope_parameters or
    rope_scaling. theta: the base if `rope` has none."""
    older = rope.take("type", "default")
    kind = rope.take("rope_type", older)
    theta = rope.take("rope_theta", float(theta))
    rope.only("partial_rotary_factor", 1.0)
    known = options_of(kind) if kind != "default" and isinstance(kind, str) else set()
    scaling = {name: value for name, value in rope.values.items() if name in known}
    rope.values = {name: value for name, value in rope.values.items() if name not in known}
    rope.ignore_rest()
    return theta, None if kind == "default" else {"rope_type": kind, **scaling}


def read_rotary_by_layer(fields: ConfigReader, theta: float, window_theta: float) -> dict[str, Any]:
    """Return rope_theta and rope_scaling of the layers that attend to all tokens, and window_theta,
    the base of the layers with a window, which have no scaling.

    theta, window_theta: the bases if the file has none. Raises UserError for a field that is not
    supported.
    """
    theta = fields.take("rope_theta", theta)
    window_theta = fields.take("rope_local_base_freq", window_theta)  # in older files
    older = fields.nested("rope_scaling")
    rope = fields.nested("rope_parameters")
    full, window = rope.nested(FULL), rope.nested(WINDOW)
    rope.refuse_rest()
    full.values |= older.values
    theta, scaling = _theta_and_scaling(full, theta)
    window_theta, window_scaling = _theta_and_scaling(window, window_theta)
    if window_scaling:
        raise UserError(
            f"{window.inside}rope_type {window_scaling['rope_type']!r} is not supported: it must "
            "be 'default'"
        )
    return {"rope_theta": theta, "rope_scaling": scaling, "window_theta": window_theta}


def write_rotary_by_layer(config: Any) -> dict[str, Any]:
    """Return the field from which `read_rotary_by_layer` reads a config."""
    scaling = config.rope_scaling or {}
    return {
        "rope_parameters": {
            FULL: {"rope_type": "default", **scaling, "rope_theta": config.rope_theta},
            WINDOW: {"rope_type": "default", "rope_theta": config.window_theta},
        }
    }


def _names_of(config_class: type) -> dict[str, str]:
    """Return the Hugging Face fields that a config class has, with their megazoo names.

    FILE_FIELDS of the class has the fields that differ from those of LLaMA.
    """
    own = getattr(config_class, "FILE_FIELDS", {})
    common = {theirs: ours for theirs, ours in FIELDS.items() if ours not in own.values()}
    return {theirs: ours for theirs, ours in (common | own).items() if _has(config_class, ours)}


def _has(config_class: type, name: str) -> bool:
    return name in {field.name for field in dataclasses.fields(config_class)}


def write_config(config: Any, model_type: str) -> dict[str, Any]:
    """Return the values of config.json for a config of the LLaMA family. model_type: its value in
    config.json."""
    names = _names_of(type(config))
    values = {theirs: getattr(config, ours) for theirs, ours in names.items()}
    values["head_dim"] = config.head_size or config.hidden_size // config.heads
    values |= {theirs: float(values[theirs]) for theirs in names if names[theirs] == "norm_epsilon"}
    scaling = config.rope_scaling or {}
    rope = {"rope_type": "default", **scaling, "rope_theta": config.rope_theta}
    if _has(type(config), "rotary_fraction"):
        rope["partial_rotary_factor"] = config.rotary_fraction
        values["partial_rotary_factor"] = config.rotary_fraction
    head = head_to_hugging_face(config, f"{class_name(model_type)}ForCausalLM")
    return {**head, "model_type": model_type, **values, "rope_parameters": rope}
