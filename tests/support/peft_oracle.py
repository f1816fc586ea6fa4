"""Models of transformers with PEFT's adapters on disk, and what they compute: an oracle."""

import copy
import json
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MptConfig,
)

IDS = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(3))
CONFIGS = {
    "gpt2": lambda **f: GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.0,
        attn_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2, **f,
    ),
    "llama": lambda **f: LlamaConfig(
        vocab_size=61, max_position_embeddings=32, hidden_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, attention_bias=True,
        **f,
    ),
    "mpt": lambda **f: MptConfig(
        vocab_size=61, max_seq_len=32, d_model=32, n_layers=3, n_heads=4, **f
    ),
}  # fmt: skip
Q_AND_V = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "mpt": ["Wqkv"]}
DOWN = {"gpt2": "mlp.c_proj", "llama": "down_proj", "mpt": "ffn.down_proj"}
LAST = {
    "gpt2": "transformer.h.2.attn.c_attn",
    "llama": "model.layers.2.self_attn.v_proj",
    "mpt": "transformer.blocks.2.attn.Wqkv",
}


def settings_for(family: str, kind: str) -> dict:
    """The arguments of a LoraConfig."""
    if kind == "q and v":
        return {"r": 4, "lora_alpha": 8, "target_modules": Q_AND_V[family]}
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    if kind == "rslora":
        return {**settings, "use_rslora": True}
    if kind == "patterns":
        ranks = {LAST[family]: 6, DOWN[family]: 2}
        return {**settings, "rank_pattern": ranks, "alpha_pattern": {DOWN[family]: 3}}
    return settings


KINDS = ("q and v", "all linear", "rslora", "patterns")
CASES = [(family, kind) for family in CONFIGS for kind in KINDS]


def base_model(family: str, labels: int = 0):
    """A model whose every parameter is random, so that no mix-up is hidden."""
    torch.manual_seed(0)
    if labels:
        config = CONFIGS[family](num_labels=labels, pad_token_id=60)
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return model.eval()


def with_adapters(hf, task: str = "CAUSAL_LM", **settings) -> PeftModel:
    """A copy of a model with PEFT's adapters, whose values are random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that GPT-2's are Conv1D
        model = get_peft_model(copy.deepcopy(hf), LoraConfig(task_type=task, **settings))
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.2, generator=generator)
    return model.eval()


def in_peft(hf, directory) -> PeftModel:
    """A copy of a model with the adapters of a directory, which PEFT must know all of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        model = PeftModel.from_pretrained(copy.deepcopy(hf), directory)
    result = model.load_adapter(directory, "again")
    assert result.unexpected_keys == []
    assert result.missing_keys == []
    return model.eval()


def edit_config(directory, **values) -> None:
    """Change some keys of an adapter_config.json."""
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
