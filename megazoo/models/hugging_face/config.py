"""Read and write the fields of a Hugging Face config.json.

Each field is used, or known not to affect the computation; any other field raises an error that
names it.
"""

import math
from typing import Any

from megazoo.errors import UserError

# Fields that do not affect the computation: of all models, then of GPT-2, LLaMA, MPT and GPT-NeoX.
HARMLESS = set(
    """
    model_type architectures auto_map transformers_version dtype torch_dtype use_cache return_dict
    use_return_dict output_hidden_states output_attentions bos_token_id eos_token_id pad_token_id
    unk_token_id tokenizer_class initializer_range id2label label2id num_labels problem_type
    finetuning_task task_specific_params torchscript chunk_size_feed_forward gradient_checkpointing
    max_length attn_implementation

    n_ctx n_special predict_special_tokens summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout reorder_and_upcast_attn

    pretraining_tp max_sequence_length

    init_device init_config verbose attn_impl fc_type fused_qkv use_pad_tok_in_ffn
    flash_attn_padded name

    classifier_dropout is_decoder
    """.split()
)
CLASSIFIER = "ForSequenceClassification"


def head_to_hugging_face(config: Any, language_model: str) -> dict[str, Any]:
    """Return the fields that name the architecture: a language model, or a classifier with its
    labels."""
    if not config.num_labels:
        return {"architectures": [language_model]}
    labels = {str(label): f"LABEL_{label}" for label in range(config.num_labels)}
    backbone = language_model.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
    return {
        "architectures": [backbone + CLASSIFIER],
        "id2label": labels,
        "label2id": {name: int(label) for label, name in labels.items()},
        "problem_type": config.problem_type,
        "pad_token_id": config.pad_token_id,
    }


class ConfigReader:
    """Return the fields of a config.json one by one, and raise an error for fields that were not
    read.

    values: the parsed JSON; a null field counts as absent, and its name is in `nulls`. inside: the
    prefix of a nested config in error messages ("attn_config.").
    """

    def __init__(self, values: dict, inside: str = ""):
        self.values = {
            name: value for name, value in values.items() if value is not None and name[:1] != "_"
        }
        self.nulls = {name for name, value in values.items() if value is None}
        self.inside = inside

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or the default if it is absent. Raises UserError if its type
        is not the default's. An integer is accepted for a float; True is not a number."""
        value = self.values.pop(name, default)
        if default is None:
            return value
        kinds = (float, int) if isinstance(default, float) else type(default)
        is_misplaced_bool = isinstance(value, bool) and not isinstance(default, bool)
        if not isinstance(value, kinds) or is_misplaced_bool:
            raise UserError(
                f"{self.inside}{name} is {value!r}, not of the type {type(default).__name__}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{self.inside}{name} is {value}: it must be finite")
        return value

    def nested(self, name: str) -> "ConfigReader":
        """Return the reader of a nested config."""
        return ConfigReader(self.take(name, {}), f"{self.inside}{name}.")

    def only(self, name: str, *supported: Any) -> None:
        """Read a field that must have one of the supported values; the first one is the default."""
        value = self.values.pop(name, supported[0])
        if value not in supported:
            there = " or ".join(map(repr, supported))
            raise UserError(f"{self.inside}{name} {value!r} is not supported: it must be {there}")

    def renamed(self, names: dict[str, str], defaults: type) -> dict[str, Any]:
        """Return fields under megazoo's names, for fields with the same meaning in both.

        names: megazoo's name by Hugging Face's name. defaults: class of the megazoo config.
        """
        return {ours: self.take(theirs, getattr(defaults, ours)) for theirs, ours in names.items()}

    def head(self) -> dict[str, Any]:
        """Return the settings of the head: labels if the architecture is a sequence classifier, an
        empty dict for a language model."""
        architectures = self.values.get("architectures") or [""]
        if not isinstance(architectures, list) or not str(architectures[0]).endswith(CLASSIFIER):
            return {}
        num_labels = self.take("num_labels", 2)
        num_labels = len(self.take("id2label", {})) or num_labels
        return {
            "num_labels": num_labels,
            "problem_type": self.take("problem_type"),
            "pad_token_id": self.take("pad_token_id"),
        }

    def finish(self) -> None:
        """Raise UserError for a field that was not read, unless it is harmless."""
        self.only("is_encoder_decoder", False)
        left = self.values.keys() - HARMLESS
        if left:
            name = min(left)
            raise UserError(
                f"{self.inside}{name} {self.values[name]!r} is not supported: "
                "remove it if it has no effect"
            )
