"""What models say of Hugging Face: the names of their tensors, and the fields of config.json.

A field is used, or refused by name, or known not to change the mathematics.
"""

from typing import Any

from megazoo.errors import UserError

# ConfigReader that say nothing of the mathematics: of all models, then of GPT-2, LLaMA and MPT.
HARMLESS = set(
    "model_type architectures auto_map transformers_version dtype torch_dtype use_cache return_dict use_return_dict "
    "output_hidden_states output_attentions bos_token_id eos_token_id pad_token_id unk_token_id tokenizer_class "
    "initializer_range id2label label2id num_labels problem_type finetuning_task task_specific_params torchscript "
    "chunk_size_feed_forward gradient_checkpointing max_length attn_implementation "
    "n_ctx n_special predict_special_tokens summary_type summary_use_proj summary_activation summary_proj_to_labels "
    "summary_first_dropout reorder_and_upcast_attn "
    "pretraining_tp max_sequence_length "
    "init_device init_config verbose attn_impl fc_type fused_qkv use_pad_tok_in_ffn flash_attn_padded name".split()
)


CLASSIFIER = "ForSequenceClassification"


def head_to_hugging_face(config, language_model: str) -> dict[str, Any]:
    """The fields that name the architecture: the language model's, or the classifier's with its
    labels."""
    if not config.num_labels:
        return {"architectures": [language_model]}
    labels = {str(label): f"LABEL_{label}" for label in range(config.num_labels)}
    return {
        "architectures": [
            language_model.removesuffix("LMHeadModel").removesuffix("ForCausalLM") + CLASSIFIER
        ],
        "id2label": labels,
        "label2id": {name: int(label) for label, name in labels.items()},
        "problem_type": config.problem_type,
        "pad_token_id": config.pad_token_id,
    }


class ConfigReader:
    """The fields of a config, to be taken one by one.

    values: what JSON gave; inside: how messages call a nested config ("attn_config."). A field that
    is null is absent.
    """

    def __init__(self, values: dict, inside: str = ""):
        self.values = {
            name: value for name, value in values.items() if value is not None and name[:1] != "_"
        }
        self.inside = inside

    def take(self, name: str, default: Any = None) -> Any:
        """The field's value, of the default's type; the default if it is absent."""
        value = self.values.pop(name, default)
        right = (
            isinstance(value, float | int)
            if isinstance(default, float)
            else isinstance(value, type(default))
        )
        if default is not None and (
            not right or (isinstance(value, bool) and not isinstance(default, bool))
        ):
            raise UserError(
                f"{self.inside}{name} is {value!r}, not of the type {type(default).__name__}"
            )
        return value

    def nested(self, name: str) -> "ConfigReader":
        """A config inside this one."""
        return ConfigReader(self.take(name, {}), f"{self.inside}{name}.")

    def only(self, name: str, *supported: Any) -> None:
        """Take a field of which only some values are supported; the first is the default."""
        value = self.values.pop(name, supported[0])
        if value not in supported:
            there = " or ".join(map(repr, supported))
            raise UserError(f"{self.inside}{name} {value!r} is not supported: it must be {there}")

    def renamed(self, names: dict[str, str], defaults: type) -> dict[str, Any]:
        """Our names and values of fields that mean the same. names: theirs to ours. defaults: the
        config's class."""
        return {ours: self.take(theirs, getattr(defaults, ours)) for theirs, ours in names.items()}

    def head(self) -> dict[str, Any]:
        """What a classifier of sequences, which the architecture names, has in the config besides."""
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
        """Refuse what nobody took."""
        self.only("is_encoder_decoder", False)
        left = self.values.keys() - HARMLESS
        if left:
            name = min(left)
            raise UserError(
                f"{self.inside}{name} {self.values[name]!r} is not supported: remove it if it has no effect"
            )
