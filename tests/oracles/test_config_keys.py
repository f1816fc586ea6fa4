"""Which fields of config.json are read, refused and ignored, with the source of the installed
transformers as the oracle: what its code reads, and what its configuration classes make of it."""

import ast
import copy
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megazoo.errors import Advice, UserError
from megazoo.families.registry import families_by_model_type
from megazoo.formats.configs import config_from_hugging_face
from megazoo.formats.hugging_face.config import HARMLESS, MATTERS, QUANTIZED, ConfigReader
from megazoo.layers import Rotary

SOURCE = Path(transformers.__file__).parent
# The code of transformers that the forward of every model runs.
SHARED = (
    "masking_utils.py",
    "modeling_rope_utils.py",
    "cache_utils.py",
    "integrations/sdpa_attention.py",
    "integrations/moe.py",
)
# What the code reads of a config that is not a field, or only for models of other kinds: methods,
# parts of MPT's attn_config, which its reader checks, and parts of multimodal and other heads.
NOT_FIELDS = {"get_text_config", "standardize_rope_params", "validate_rope"}
OTHERWISE = {"number_of_conv_states"}  # of convolutions, which layer_types would name
ROTARY = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
OF_FAMILY = {
    "mpt": {
        *("attn_pdrop", "clip_qkv", "softmax_scale", "hidden_dropout", "max_position_embeddings"),
        *ROTARY,
    },
    "gpt2": {"hidden_dropout", "summary_last_dropout", "head_dim", *ROTARY},
    "bloom": {"head_dim", "max_position_embeddings", *ROTARY},  # it lacks rotary positions
    # head_dim: a property of its class; the others: of scalings that are not supported
    "falcon": {"head_dim", *ROTARY} - {"rope_theta"},
    "gpt_neox": ROTARY,  # rotary_emb_base and rotary_pct replace them
    "olmoe": {"num_local_experts"},  # an alias, which is read if the file has it
    "qwen3_moe": {"num_experts"},  # an alias
    "gemma3_text": {
        *("image_size", "image_token_id", "layer_norm_eps", "mm_tokens_per_image", "patch_size"),
        *("text_config", "vision_config"),
    },
}
LLAMA = dict(model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
FAMILIES = sorted(families_by_model_type())


def read_by(file: Path) -> set[str]:
    """The names that a module reads of anything that is named config."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            of, name = node.value, node.attr
            if ast.unparse(of) == "self":
                continue
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            of, name = node.args[0], node.args[1].value
        else:
            continue
        # The configuration classes inherit from a mixin of modeling_rope_utils.
        if ast.unparse(of).endswith("config") or (
            ast.unparse(of) == "self" and file.name == "modeling_rope_utils.py"
        ):
            found.add(name)
    return {name for name in found if isinstance(name, str) and name[0] != "_"}


class Recorder(ConfigReader):
    """A reader that notes the names that are asked for."""

    asked: set[str]

    def take(self, name, default=None):
        self.asked.add(name)
        return super().take(name, default)

    def only(self, name, *supported):
        self.asked.add(name)
        super().only(name, *supported)

    def rename(self, aliases):
        self.asked |= aliases.keys()
        super().rename(aliases)


def asked_by_megazoo(model_type: str, values: dict) -> set[str]:
    """The names that megazoo's reader of a family asks for."""
    reader = Recorder(values)
    reader.asked = set()
    families_by_model_type()[model_type].Config.from_hugging_face(reader)
    return reader.asked


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_that_transformers_reads_is_read_or_refused(model_type):
    kind = transformers.CONFIG_MAPPING[model_type]
    name = model_type.removesuffix("_text")
    code = [SOURCE / part for part in SHARED]
    code += [
        SOURCE / "models" / name / f"{part}_{name}.py" for part in ("configuration", "modeling")
    ]
    theirs = set().union(*map(read_by, code), {field.name for field in fields(kind)})
    values = kind().to_dict()
    ours = asked_by_megazoo(model_type, dict(values))
    if "use_sliding_window" in ours and model_type != "qwen2_moe":
        switched = {**values, "use_sliding_window": True, "sliding_window": 4, "layer_types": None}
        ours |= asked_by_megazoo(model_type, switched)
    known = ours | HARMLESS | MATTERS.keys() | {*QUANTIZED} | NOT_FIELDS | OTHERWISE
    assert theirs - known == OF_FAMILY.get(model_type, set())


def test_the_list_of_fields_that_matter_is_what_shared_code_reads():
    shared = set().union(*(read_by(SOURCE / part) for part in SHARED))
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"}
    assert shared - NOT_FIELDS - OTHERWISE - sizes - {"head_dim"} - ROTARY <= MATTERS.keys()


IGNORED = [
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),
    ("qwen2", {"use_mrope": False}),
    ("gpt2", {"output_past": True, "pruned_heads": {}, "tf_legacy_loss": False}),
    ("gemma2", {"sliding_window_size": 4096}),
    ("llama", {"unsloth_fixed": True, "unsloth_version": "2024.9"}),
    ("falcon", {"n_head": 71, "n_layer": 32}),
    ("qwen3_moe", {"shared_expert_intermediate_size": 0, "qkv_bias": False, "use_qk_norm": True}),
    ("gpt_neox", {"rope_theta": 9.0, "partial_rotary_factor": 0.75, "hidden_dropout_prob": 0.5}),
]


@pytest.mark.parametrize(("model_type", "extra"), IGNORED)
def test_published_fields_that_no_code_reads_change_nothing(model_type, extra):
    kind = transformers.CONFIG_MAPPING[model_type]
    values = kind().to_dict()
    with pytest.warns(Advice) as told:
        found = config_from_hugging_face({**values, **extra}, "config.json")
    assert found == config_from_hugging_face(dict(values))
    assert [str(each.message) for each in told] == [
        f"config.json: ignored {', '.join(sorted(extra))}, which {model_type} does not read"
    ]


ALIASES = {
    "gpt2": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6},
    "mpt": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6},
    "bloom": {"n_embed": 48, "num_hidden_layers": 3, "num_attention_heads": 6},
    "falcon": {"n_embed": 48, "num_hidden_layers": 3, "num_attention_heads": 6},
}


@pytest.mark.parametrize("beside", [True, False], ids=["beside the name", "alone"])
@pytest.mark.parametrize("model_type", ALIASES)
def test_aliases_are_read_as_transformers_reads_them(model_type, beside):
    kind = transformers.CONFIG_MAPPING[model_type]
    values = {**(kind().to_dict() if beside else {}), **ALIASES[model_type]}
    values |= {"vocab_size": 61, "model_type": model_type}
    values |= {"max_seq_len": 32} if model_type == "mpt" else {}
    if model_type == "gpt2":
        values["max_position_embeddings"] = 40
    theirs, ours = kind(**values), config_from_hugging_face(dict(values))
    assert (ours.hidden_size, ours.layers, ours.heads) == (48, 3, 6)
    assert (ours.hidden_size, ours.layers, ours.heads) == (
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
    )
    if model_type == "gpt2":
        assert ours.max_positions == theirs.max_position_embeddings == 40


def test_models_with_other_classes_are_refused():
    for name in ("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM", "MixtralForCausalLM"):
        config_from_hugging_face({**LLAMA, "architectures": [name]})
    others = ("LlamaForCausalLMEagle3", "DFlashDraftModel", "LlamaForTokenClassification", 7)
    for name in others:
        with pytest.raises(UserError, match=r"^architectures .* is not supported") as refused:
            config_from_hugging_face({**LLAMA, "architectures": [name]})
        assert len(str(refused.value)) < 250


FORMS = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "damp_percent": 0.1}, "gptq, 4 bits"),
    "bnb": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
    "long": ({"quant_method": "x" * 4000}, "x" * 60),
    "of no type": (["?"], "unknown method"),
}


@pytest.mark.parametrize("form", FORMS)
def test_quantized_files_are_refused_as_such(form):
    settings, told = FORMS[form]
    for key in QUANTIZED:
        with pytest.raises(UserError) as refused:
            config_from_hugging_face({**LLAMA, key: settings})
        assert str(refused.value) == (
            f"the weights are quantized ({told}): not supported; use the unquantized model, or a "
            "GGUF file"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config_from_hugging_face({**LLAMA, "quantization_config": None})


CONTEXTS = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "linear", "factor": 2.0},
]


@pytest.mark.parametrize("scaling", CONTEXTS)
def test_the_original_context_beside_a_scaling_replaces_its_own(scaling):
    values = {**LLAMA, "max_position_embeddings": 128, "original_max_position_embeddings": 16}
    values["rope_scaling"] = scaling
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(values)))
    config = config_from_hugging_face(values)
    rotary = Rotary(16, config.rope_theta, config.max_positions, config.rope_scaling)
    frequencies, _ = rotary.frequencies(torch.device("cpu"))
    assert torch.allclose(frequencies, theirs.inv_freq)


def test_ignored_names_are_short_and_plain():
    strange = {"a\x1b[2J\nERROR": 1, "b" * 5000: 2, **{f"key{i}": 0 for i in range(1000)}}
    with pytest.warns(Advice) as told:
        config_from_hugging_face({**LLAMA, **strange})
    (line,) = [str(each.message) for each in told]
    assert line.isprintable()
    assert "and 982 more, which llama does not read" in line
    assert len(line) < 700


SCALINGS = [
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attn_factor": 2.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True},
    {"rope_type": "linear", "factor": 2.0, "beta": 3, "finetuned": False},
    {"rope_type": "default", "factor": 8.0, "attn_factor": 2.0},
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_unread_keys_of_a_scaling_are_ignored(scaling):
    """The frequencies are those of transformers, which warns about the keys."""
    values = {**LLAMA, "max_position_embeddings": 64, "rope_scaling": scaling}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(values)))
    with pytest.warns(Advice, match="ignored rope_scaling"):
        config = config_from_hugging_face(values)
    rotary = Rotary(16, config.rope_theta, config.max_positions, config.rope_scaling)
    frequencies, factor = rotary.frequencies(torch.device("cpu"))
    assert torch.allclose(frequencies, theirs.inv_freq)
    assert factor == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen2", "qwen2_moe", "olmo3"])
def test_sizes_that_no_model_has_are_refused_at_once(model_type):
    for layers in (10**12, 10**400):
        with pytest.raises(UserError, match=r"layers .* must be "):
            config_from_hugging_face({"model_type": model_type, "num_hidden_layers": layers})
