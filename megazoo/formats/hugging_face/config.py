"""Read and write the fields of a Hugging Face config.json.

A field that changes the arithmetic raises an error if its value is not supported. Fields that no
code of transformers reads are ignored, as transformers ignores them.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.generate.settings import NOT_APPLIED, OF_FILES

# Fields that do not affect the logits, and that most files have: ignored without a note. They are
# those of all models, then of GPT-2, LLaMA, MPT and GPT-NeoX.
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
# Settings of generation, which older files have here.
GENERATION_KEYS = {*OF_FILES, *NOT_APPLIED}
# Fields that code which all models of transformers share reads, or that name a feature of another
# family, with the values that change nothing. A family that supports one reads it itself.
# tests/oracles/test_config_keys.py compares the list with the installed transformers.
MATTERS: dict[str, tuple] = {
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "sliding_window": (),
    "attention_chunk_size": (),
    "layer_types": (),
    "per_layer_config": ({},),
    "kv_sharing_modes": ([],),
    "rope_scaling": ({},),
    "rope_parameters": ({},),
    "alibi": (False,),
    "is_encoder_decoder": (False,),
}
FULL = "full_attention"  # the type in layer_types of a layer without a window
LARGEST = 2**63
QUANTIZED = ("quantization_config", "compression_config")
# The endings of the names of classes whose tensors megazoo reads.
CLASSES = r"(ForCausalLM|LMHeadModel|ForSequenceClassification|Model)"
CLASSIFIER = "ForSequenceClassification"


def class_name(model_type: str) -> str:
    """Return the start of the names of the transformers classes for a model_type: Qwen3Moe for
    qwen3_moe."""
    return "".join(word.capitalize() for word in model_type.removesuffix("_text").split("_"))


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
    """Return the fields of a config.json one by one, and find the fields that were not read.

    values: the parsed JSON; a null field counts as absent, and its name is in `nulls`. inside: the
    prefix of a nested config in error messages ("attn_config."). ignored: names of fields that have
    no effect, also those of nested configs.
    """

    def __init__(self, values: dict, inside: str = "", ignored: list[str] | None = None):
        self.values = {
            name: value for name, value in values.items() if value is not None and name[:1] != "_"
        }
        self.nulls = {name for name, value in values.items() if value is None}
        self.inside = inside
        self.ignored: list[str] = [] if ignored is None else ignored

    def rename(self, aliases: dict[str, str]) -> None:
        """Move fields to the names that the family uses. An alias replaces a field of that name, as
        in transformers.

        aliases: the attribute_map of the configuration class in transformers.
        """
        for alias, name in aliases.items():
            if alias in self.values:
                self.values[name] = self.values.pop(alias)

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or the default if it is absent. Raises UserError if its type
        is not the default's. An integer is accepted for a float; True is not a number."""
        value = self.values.pop(name, default)
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise UserError(f"{self.inside}{name} is {brief(value)}: it must be below 2^63")
        if default is None:
            return value
        kinds = (float, int) if isinstance(default, float) else type(default)
        is_misplaced_bool = isinstance(value, bool) and not isinstance(default, bool)
        if not isinstance(value, kinds) or is_misplaced_bool:
            raise UserError(
                f"{self.inside}{name} is {brief(value)}, not of the type {type(default).__name__}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{self.inside}{name} is {value}: it must be finite")
        return value

    def nested(self, name: str) -> "ConfigReader":
        """Return the reader of a nested config."""
        return ConfigReader(self.take(name, {}), f"{self.inside}{name}.", self.ignored)

    def only(self, name: str, *supported: Any) -> None:
        """Read a field that must have one of the supported values; the first one is the default."""
        value = self.values.pop(name, supported[0])
        if value not in supported:
            there = " or ".join(map(repr, supported))
            raise UserError(
                f"{self.inside}{name} {_text_of(value)} is not supported: it must be {there}"
            )

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

    def check_form(self, model_types: Iterable[str]) -> None:
        """Raise UserError if the tensors are quantized, or are those of a class that no family has.

        model_types: those of all families. The class may be that of another family: transformers
        chooses by model_type, too.
        """
        for name in QUANTIZED:
            if name in self.values:
                raise UserError(
                    f"the weights are quantized ({_method(self.values[name])}): not supported; use "
                    "the unquantized model, or a GGUF file"
                )
        written = self.values.get("architectures") or []
        first = written[0] if isinstance(written, list) and written else written
        if not first:
            return
        known = [name.removesuffix("_text").replace("_", "") for name in model_types]
        stems = "|".join([*known, "gemma3text", "rw"])  # rw: Falcon in older files
        if not re.fullmatch(f"({stems}){CLASSES}", str(first), re.IGNORECASE):
            raise UserError(
                f"architectures {brief(first)} is not supported: it must be a language model "
                "(...ForCausalLM) or classifier (...ForSequenceClassification) of a supported "
                "family, without parts of another model"
            )

    def ignore_rest(self) -> None:
        """Ignore the fields that were not read."""
        unread = self.values.keys() - HARMLESS - GENERATION_KEYS
        self.ignored += [brief(self.inside + name)[1:-1] for name in sorted(unread)]
        self.values = {}

    def refuse_rest(self) -> None:
        """Raise UserError for a field that was not read."""
        if self.values:
            name = min(self.values)
            raise UserError(
                f"{self.inside}{name} {brief(self.values[name])} is not supported: remove it if "
                "it has no effect"
            )

    def finish(self, layers: int) -> None:
        """Ignore the fields that were not read. Raises UserError for one that changes the
        arithmetic. layers: of the model."""
        for name, neutral in MATTERS.items():
            value = self.values.pop(name, None)
            if name == "layer_types" and isinstance(value, list) and len(value) == layers:
                neutral = ([FULL] * layers,)
            if value is not None and value not in neutral:
                raise UserError(
                    f"{name} {brief(value)} is not supported for this family, and would change the "
                    "logits"
                )
        self.ignore_rest()


def _text_of(value: Any) -> str:
    """Return a value as text, which may be a small object."""
    text = repr(value)
    return text if len(text) <= 60 else brief(value)


def _method(quantization: Any) -> str:
    """Return the name of the method in a quantization_config, with its bits."""
    settings = quantization if isinstance(quantization, dict) else {}
    method = str(settings.get("quant_method") or settings.get("quant_type") or "unknown method")
    bits = settings.get("bits", settings.get("w_bit"))
    for number in (4, 8):
        bits = number if settings.get(f"load_in_{number}bit") is True else bits
    return f"{method[:60]}, {bits} bits" if bits in range(1, 17) else method[:60]
