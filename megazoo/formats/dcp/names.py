"""The keys of a checkpoint of torch.distributed.checkpoint, and the Hugging Face names that they
stand for."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from megazoo.errors import UserError
from megazoo.families.names import Run, hf_names
from megazoo.parallel.shard import ParameterSpec

# Modules that wrap others: of DistributedDataParallel, torch.compile, and activation checkpoints.
WRAPPER = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
OPTIMIZER = re.compile(r"(?:.+\.)?optim(?:izers?)?\.(?:state|param_groups)\..+")
STATE = re.compile(r"(?:.+\.)?optim(?:izers?)?\.state\.(?P<name>.+)\.(?P<state>[^.]+)")
# Tensors of programs around the model, and buffers of rotary embeddings.
IGNORED = re.compile(
    r"(?:train_state|lr_schedulers?|dataloader|rng_state)\..+"
    r"|(?:.+\.)?(?:freqs_cis|rope\.cache|(?:original_)?inv_freq)"
)
HEAD = "lm_head.weight"  # in models of transformers
STEP = "step"  # the state with the number of optimizer steps
# The Hugging Face names of torchtitan's Llama, without .weight.
EMBEDDING = "tok_embeddings.weight"
TORCHTITAN = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


class Keys(NamedTuple):
    """The keys of a checkpoint, sorted.

    prefix: of the model's keys. weights: by the name without the prefix. states: the keys of the
    optimizer's states, by the name of the weight and the state.
    """

    prefix: str
    weights: dict[str, str]
    states: dict[tuple[str, str], str]


def sort_keys(keys: Iterable[str], embeddings: list[str]) -> Keys | None:
    """Sort the keys of tensors by what they hold. None without an embedding.

    embeddings: possible names of the embedding, without a prefix. The first one that is found sets
    the prefix. Raises UserError if there are several models.
    """
    optimizer, plain = [], {}
    for key in keys:
        if OPTIMIZER.fullmatch(key):
            optimizer.append(key)
            continue
        name = WRAPPER.sub("", key)
        if name in plain:
            raise UserError(f"it has {key} and {plain[name]}: remove one of them")
        plain[name] = key
    for embedding in embeddings:
        found = [name for name in plain if f".{name}".endswith(f".{embedding}")]
        if len(found) > 1:
            raise UserError(f"it has several models, with {found[0]} and {found[1]}: save only one")
        if found:
            prefix = found[0].removesuffix(embedding)
            break
    else:
        return None
    weights = {
        name.removeprefix(prefix): key
        for name, key in plain.items()
        if name.startswith(prefix) and not IGNORED.fullmatch(name)
    }
    return Keys(prefix, weights, _states(optimizer, prefix, weights))


def _states(keys: list[str], prefix: str, weights: dict[str, str]) -> dict[tuple[str, str], str]:
    """Return the keys of the optimizer's states of known weights. Their names have all of the
    prefix, or a part of it, or none."""
    parts, states = prefix.split("."), {}
    starts = [".".join(parts[first:]) for first in range(len(parts))]
    for key in keys:
        if found := STATE.fullmatch(key):
            full = WRAPPER.sub("", found["name"])
            names = (full.removeprefix(start) for start in reversed(starts))
            name = next((name for name in names if name in weights), None)
            if name is not None:
                state = name, found["state"]
                if state in states:
                    raise UserError(f"it has {key} and {states[state]}: save only one optimizer")
                states[state] = key
    return states


def torchtitan_names(layers: int) -> dict[str, str]:
    """Return torchtitan's names of the tensors of a Llama, by their Hugging Face names."""
    return {
        f"{hugging_face.format(layer)}.weight": f"{name.format(layer)}.weight"
        for name, hugging_face in TORCHTITAN.items()
        for layer in (range(layers) if "{}" in name else [0])
    }


class Part(NamedTuple):
    """A part of a tensor of a transformers model that one megazoo tensor has.

    name: of the parameter in memory. matrix: index of a matrix, if the tensor is a stack of them.
    runs: the rows. transposed: as in HFNames.
    """

    name: str
    matrix: tuple[int, ...]
    runs: list[Run]
    transposed: bool


def parts_in_memory(model: type, name: str, spec: ParameterSpec) -> list[Part]:
    """Return the parts of transformers' parameters that make up a megazoo tensor.

    In memory, experts are stacked, and the head has one name for all models. model: class of the
    family. name, spec: of the unsharded megazoo tensor.
    """
    theirs, (module, _, kind) = hf_names(model, name), name.rpartition(".")
    stacked = theirs.parameter if kind == "weight" else ""
    if stacked and "[]" in theirs.names[0]:
        experts, rows = spec.shape[:2]
        return [Part(stacked, (e,), [Run(0, 0, rows, (e,))], False) for e in range(experts)]
    other = f"lm_head.{kind}" if module == "head" else stacked
    return [Part(other or part, (), runs, theirs.transposed) for part, runs in theirs.parts(spec)]
