"""Models of transformers with PEFT's adapters on disk, and what they compute: an oracle."""

import copy
import json
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.transformers_models import config_of

IDS = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(3))
# What a family's config has besides.
FIELDS = {
    "gpt2": {"bos_token_id": 1, "eos_token_id": 2},
    "llama": {"attention_bias": True},
    "mpt": {},
}
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
CASES = [(family, kind) for family in FIELDS for kind in KINDS]


def base_model(family: str, labels: int = 0):
    """A model whose every parameter is random, so that no mix-up is hidden."""
    torch.manual_seed(0)
    if labels:
        config = config_of(family, **FIELDS[family], num_labels=labels, pad_token_id=60)
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config_of(family, **FIELDS[family]))
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
