"""Writes checkpoints as Megatron-LM does, by its rules, from the weights of models of
transformers."""

import re
import sys
from argparse import Namespace
from contextlib import contextmanager
from enum import Enum
from itertools import product
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megazoo.parallel.shard import Box
from tests.support.chunks import InChunks
from tests.support.training import randomized_

PADDED = 64  # tokens, of which 61 are true
LAYERS = 4
SIZES = dict(vocab_size=61, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4)
LLAMA = dict(**SIZES, intermediate_size=48, max_position_embeddings=32, bos_token_id=0)
LLAMA |= dict(num_key_value_heads=2, rms_norm_eps=1e-5, eos_token_id=0, rope_theta=5e4)
GPT2 = dict(vocab_size=61, n_positions=24, n_embd=32, n_layer=LAYERS, n_head=4)
NEOX = dict(**SIZES, intermediate_size=80, max_position_embeddings=32)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192, rope_theta=5e4)

# transformers' class and config, and what Megatron's arguments say besides.
TWINS = {
    "gpt": ("GPT2", GPT2, {}),
    "gpt, untied, exact gelu": (
        "GPT2",
        {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 48},
        {"bias_gelu_fusion": False, "untie_embeddings_and_output_weights": True},
    ),
    "neox": (
        "GPTNeoX",
        {**NEOX, "use_parallel_residual": False, "rotary_pct": 0.5, "rotary_emb_base": 5000},
        {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_base": 5000}
        | {"bias_gelu_fusion": False, "untie_embeddings_and_output_weights": True},
    ),
    "llama": ("Llama", LLAMA, {"untie_embeddings_and_output_weights": True}),
    "llama, tied, wide heads": (
        "Llama", {**LLAMA, "tie_word_embeddings": True, "head_dim": 12}, {"kv_channels": 12},
    ),
    "llama, biases, scaled": (
        "Llama",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
        {"add_bias_linear": True, "use_rope_scaling": True, "rope_scaling_factor": 8.0}
        | {"untie_embeddings_and_output_weights": True},
    ),
    "qwen2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}, {"add_qkv_bias": True}),
    "qwen3": (
        "Qwen3",
        {**LLAMA, "head_dim": 12, "tie_word_embeddings": False},
        {"qk_layernorm": True, "kv_channels": 12, "untie_embeddings_and_output_weights": True},
    ),
    "mistral": (
        "Mistral",
        {**LLAMA, "sliding_window": 5},
        {"window_size": (4, 0), "untie_embeddings_and_output_weights": True},
    ),
}  # fmt: skip


def twin(name: str):
    """Make the model of transformers, with random weights, biases and norms."""
    torch.manual_seed(0)
    kind, config, _ = TWINS[name]
    config = getattr(transformers, f"{kind}Config")(**config)
    model = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    return randomized_(getattr(transformers, model)(config))


def grouped(q, k, v, groups: int):
    """Rows as linear_qkv has them: of each group its queries, its key, its value."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def megatron_tensors(hf, fused_norms: bool = True) -> dict[str, torch.Tensor]:
    """transformers' weights under Megatron's names, layer by layer, the vocabulary padded.
    fused_norms: the norms' names as with Transformer Engine."""
    of = {"gpt2": _gpt2, "gpt_neox": _neox}.get(hf.config.model_type, _llama)
    state = {name: tensor.detach() for name, tensor in hf.state_dict().items()}
    state["head"] = hf.get_output_embeddings().weight.detach()
    tensors = of(state, hf.config)
    if getattr(hf.config, "tie_word_embeddings", False):
        tensors.pop("output_layer.weight", None)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in tensors:
            rows = torch.randn(PADDED - 61, 32)
            tensors[name] = torch.cat([tensors[name], rows])
    if fused_norms:
        names = {
            r"input_layernorm\.": "self_attention.linear_qkv.layer_norm_",
            r"pre_mlp_layernorm\.": "mlp.linear_fc1.layer_norm_",
        }
        for theirs, fused in names.items():
            tensors = {re.sub(theirs, fused, name): value for name, value in tensors.items()}
    return tensors


def _layers(parts: dict[str, str], state: dict, prefix: str) -> dict:
    """Rename what is the same in both, for the kinds that are there."""
    return {
        f"decoder.layers.{layer}.{ours}.{kind}": state[f"{prefix}{layer}.{theirs}.{kind}"]
        for layer in range(LAYERS)
        for ours, theirs in parts.items()
        for kind in ("weight", "bias")
        if f"{prefix}{layer}.{theirs}.{kind}" in state
    }


def _gpt2(state, config):
    tensors = {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": state["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": state["transformer.ln_f.bias"],
        "output_layer.weight": state["head"],
    }
    parts = {
        "input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2", "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj", "self_attention.linear_proj": "attn.c_proj",
        "self_attention.linear_qkv": "attn.c_attn",
    }  # fmt: skip
    tensors |= _layers(parts, state, "transformer.h.")
    for name, tensor in tensors.items():
        if "linear" in name and name.endswith("weight"):
            tensors[name] = tensor.T.contiguous()
        if "linear_qkv" in name:
            tensors[name] = grouped(*tensors[name].chunk(3), config.n_head)
    return tensors


def _neox(state, _config):
    parts = {
        "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "self_attention.linear_proj": "attention.dense",
        "self_attention.linear_qkv": "attention.query_key_value",  # by heads in both
    }  # fmt: skip
    return {
        "embedding.word_embeddings.weight": state["gpt_neox.embed_in.weight"],
        "decoder.final_layernorm.weight": state["gpt_neox.final_layer_norm.weight"],
        "decoder.final_layernorm.bias": state["gpt_neox.final_layer_norm.bias"],
        "output_layer.weight": state["head"],
    } | _layers(parts, state, "gpt_neox.layers.")


def _llama(state, config):
    parts = {
        "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
    }  # fmt: skip
    tensors = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["head"],
    } | _layers(parts, state, "model.layers.")
    for layer, kind in product(range(LAYERS), ("weight", "bias")):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        if f"{theirs}.self_attn.q_proj.{kind}" in state:
            qkv = [state[f"{theirs}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            tensors[f"{ours}.self_attention.linear_qkv.{kind}"] = grouped(
                *qkv, config.num_key_value_heads
            )
        if f"{theirs}.mlp.gate_proj.{kind}" in state:
            both = [state[f"{theirs}.mlp.{part}_proj.{kind}"] for part in ("gate", "up")]
            tensors[f"{ours}.mlp.linear_fc1.{kind}"] = torch.cat(both)
    return tensors


@contextmanager
def of_megatron():
    """Make objects of Megatron's classes, which must not be imported again when they are read."""
    name = "megatron.core.transformer.enums"
    packages = [name.rsplit(".", count)[0] for count in range(4)]
    modules = {package: ModuleType(package) for package in packages}
    kind = modules[name].AttnBackend = Enum("AttnBackend", {"auto": 5}, module=name)
    sys.modules.update(modules)
    try:
        yield {"attention_backend": kind.auto, "params_dtype": torch.bfloat16}
    finally:
        for package in modules:
            del sys.modules[package]


def arguments_of(name: str, **more) -> dict:
    """What Megatron's parser makes of a run's flags."""
    kind, config, special = TWINS[name]
    common = {
        "num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24,
        "padded_vocab_size": PADDED, "vocab_size": None, "kv_channels": 8, "num_experts": None,
        "untie_embeddings_and_output_weights": False, "window_size": None, "swiglu": False,
        "norm_epsilon": 1e-5, "num_query_groups": 1, "group_query_attention": False,
        "add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False, "lr": 1e-3,
        "bias_gelu_fusion": True, "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm", "rotary_base": 10000, "rotary_percent": 1.0,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "max_position_embeddings": 32,
    }  # fmt: skip
    if kind == "GPT2":
        common |= {"max_position_embeddings": 24, "ffn_hidden_size": config.get("n_inner", 128)}
    else:
        common |= {"ffn_hidden_size": config["intermediate_size"]}
    if "rms_norm_eps" in config:
        common |= {"normalization": "RMSNorm", "swiglu": True, "group_query_attention": True}
        common |= {"num_query_groups": 2, "add_bias_linear": False, "rotary_base": 50000}
        common |= {"position_embedding_type": "rope"}
    return {**common, **special, **more}


class OfRanks(InChunks):
    """Saves each tensor as Megatron's ranks do: in two along its next to last dimension or its only
    one, and stacked ones layer by layer."""

    def chunks_of(self, name: str, shape: torch.Size) -> list[Box]:
        is_stacked = name in self.stacked
        dim, cuts = max(len(shape) - 2, int(is_stacked)), [[(0, length)] for length in shape]
        if is_stacked:
            cuts[0] = [(layer, layer + 1) for layer in range(shape[0])]
        half = shape[dim] // 2
        cuts[dim] = [(0, half), (half, shape[dim])]
        return list(product(*cuts))


def write_distributed(
    root: Path, tensors: dict, arguments: dict, stacked=True, prefix="", in_chunks=True
) -> Path:
    """Write the format torch_dist; return the iteration's directory. stacked: of homogeneous
    layers. in_chunks: as several ranks do; else a tensor is one chunk."""
    directory, names = root / "iter_0000100", set()
    if stacked:
        of_layers = {}
        for name in [name for name in tensors if "layers." in name]:
            of_layers.setdefault(re.sub(r"layers\.\d+", "layers", name), []).append(name)
        names = {prefix + name for name in of_layers}
        rest = {name: value for name, value in tensors.items() if "layers." not in name}
        tensors = rest | {
            name: torch.stack([tensors[layer] for layer in layers])
            for name, layers in of_layers.items()
        }
    state = {prefix + name: value for name, value in tensors.items()}
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(32)
    state[f"{prefix}decoder.layers.mlp.linear_fc1._extra_state"] = torch.zeros(8)
    planner = OfRanks() if in_chunks else DefaultSavePlanner()
    planner.stacked = names
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), planner=planner, no_dist=True)
    with of_megatron() as objects:
        common = {"args": Namespace(**arguments, **objects), "iteration": 100}
        torch.save(common, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return directory


def write_legacy(root: Path, tensors: dict, arguments: dict, tp=1, pp=1, virtual=1) -> Path:
    """Write the format torch: of each rank its parts, in `virtual` models of its own."""
    directory, each = root / "iter_0000100", LAYERS // (pp * virtual)
    tied = not arguments["untie_embeddings_and_output_weights"]
    if tied and pp > 1:
        tensors = {**tensors, "output_layer.weight": tensors["embedding.word_embeddings.weight"]}
    for rank, stage in product(range(tp), range(pp)):
        models = []
        for part in range(virtual):
            first = (part * pp + stage) * each
            wanted = {layer: layer - first for layer in range(first, first + each)}
            is_first, is_last = first == 0, first + each == LAYERS
            models.append(_part(tensors, wanted, is_first, is_last, rank, tp, arguments["swiglu"]))
        keys = ["model"] if virtual == 1 else [f"model{part}" for part in range(virtual)]
        place = directory / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
        place.mkdir(parents=True)
        with of_megatron() as objects:
            state = {"args": Namespace(**arguments, **objects), "checkpoint_version": 3.0}
            state |= {**dict(zip(keys, models, strict=True)), "iteration": 100}
            state["optimizer"] = {"param_groups": [{"lr": 1e-3, "params": [0]}]}
            state["rng_state"] = [{"torch_rng_state": torch.get_rng_state()}]
            torch.save(state, place / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return directory


def _part(tensors, wanted, is_first, is_last, rank, tp, gated) -> dict:
    """What one rank has of some layers, under numbers of its own."""
    part = {}
    for name, tensor in tensors.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer and int(layer[1]) not in wanted:
            continue
        if not layer and not (is_first if name.startswith("embedding") else is_last):
            continue
        if layer:
            name = name.replace(layer[0], f"layers.{wanted[int(layer[1])]}.")
        part[name] = _cut(name, tensor, rank, tp, gated).clone()
        part["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
    return part


def _cut(name, tensor, rank, tp, gated):
    if gated and re.search(r"linear_fc1\.(weight|bias)", name):
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    if re.search(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)", name):
        return tensor.chunk(tp)[rank]
    if re.search(r"(linear_proj|linear_fc2)\.weight", name):
        return tensor.chunk(tp, dim=1)[rank]
    return tensor
