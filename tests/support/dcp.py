"""Checkpoints of torch.distributed.checkpoint: of a small Llama that FSDP2 trains, and of tensors
in chunks of any sizes."""

import pickle
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megazoo
from megazoo.models.pretrained import open_source
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import Box
from tests.support.chunks import InChunks
from tests.support.megatron import LLAMA
from tests.support.training import context, make_batch, randomized_, replica_rows

HOW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = (2, 2)  # before the checkpoint and after it


def small_llama(**fields):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 2, **fields})
    return randomized_(transformers.LlamaForCausalLM(config))


def train_with_fsdp2(directory: Path, flat: bool, **fields) -> list[float]:
    """Train on every rank with FSDP2; return the losses of the steps after the checkpoint.

    Writes the checkpoint to directory/before, and the final one to directory/after. flat: whether
    the optimizer's states are flattened, as in torchtitan.
    """
    model = sharded(small_llama(**fields).train())
    model.config.save_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), **HOW)
    train_steps(model, optimizer, 0, STEPS[0])
    save(model, optimizer, directory / "before", flat)
    losses = train_steps(model, optimizer, *STEPS)
    save(model, optimizer, directory / "after", flat)
    return losses


def go_on_with_fsdp2(source: Path, output: Path, flat: bool, groups: int) -> list[float]:
    """Load a checkpoint with torch into a Llama of FSDP2 with other weights and settings, on every
    rank. Train on, write the checkpoint `output`, and return the losses.

    flat: as in `train_with_fsdp2`. groups: 1, or 2 with norms in one of their own.
    """
    config = transformers.LlamaConfig.from_pretrained(source)
    model = sharded(transformers.LlamaForCausalLM(config).float().train())
    parameters = list(model.parameters())
    kinds = [[p for p in parameters if p.ndim == 1], [p for p in parameters if p.ndim > 1]]
    kinds = kinds if groups == 2 else [parameters]
    optimizer = torch.optim.AdamW([{"params": each} for each in kinds], lr=0.5, weight_decay=0.5)
    weights, states = state_of(model, optimizer, flat)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=source)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=states,
        options=StateDictOptions(flatten_optimizer_state_dict=flat),
    )  # fmt: skip
    losses = train_steps(model, optimizer, *STEPS)
    save(model, optimizer, output, flat)
    return losses


def sharded(model):
    """Shard a Llama over all ranks with FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_steps(model, optimizer, first: int, count: int) -> list[float]:
    """Train from a step on; return the losses."""
    ranks, rank, losses = dist.get_world_size(), dist.get_rank(), []
    for step in range(first, first + count):
        ids, targets = (tensor.chunk(ranks)[rank] for tensor in plain_batch(step))
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def state_of(model, optimizer, flat: bool) -> tuple[dict, dict]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_state_dict(model, optimizer, options=options)


def save(model, optimizer, directory: Path, flat: bool) -> None:
    weights, states = state_of(model, optimizer, flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=directory)


def go_on(directory: Path, output: Path, layout: dict, norms_decay: bool = True) -> list[float]:
    """Train on from a checkpoint with megazoo, in float32; return the losses. norms_decay: as torch
    does by default."""
    ctx = context(**layout)
    source = open_source(directory)
    model = megazoo.from_config(source.config, ctx, seed=3)
    optimizer = megazoo.optim.AdamW(model, **HOW, clip_grad=0)
    if norms_decay:
        optimizer.param_groups[1]["weight_decay"] = HOW["weight_decay"]
    first, losses = megazoo.checkpoint.load(source, model, optimizer)["step"], []
    for step in range(first, first + STEPS[1]):
        ids, targets = (replica_rows(tensor, ctx) for tensor in plain_batch(step))
        losses.append(model.train_batch(ids, targets=targets, num_microbatches=2).item())
        optimizer.step()
    megazoo.checkpoint.save(output, first + STEPS[1], model, optimizer)
    return losses


def tensors_of(source) -> dict[str, torch.Tensor]:
    """All of a source's tensors and states."""
    tensors = {}
    for name, spec in source.specs.items():
        if name.rpartition(".")[2] in ("exp_avg", "exp_avg_sq"):
            continue
        for tensor in (name, *(f"{name}.{state}" for state in source.states_of(name))):
            tensors[tensor] = torch.full(spec.shape, torch.nan)
            source.read_into(tensor, tensors[tensor], spec, ParallelContext())
    return tensors


def plain_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, all of which count, so that the mean of ranks is that of the batch."""
    ids, _ = make_batch(step, 4)
    return ids[:, :-1], ids[:, 1:]


class InPieces(InChunks):
    """Saves each tensor in so many pieces along each dimension."""

    def __init__(self, pieces: int):
        super().__init__()
        self.pieces = pieces

    def chunks_of(self, name: str, shape: torch.Size) -> list[Box]:
        cuts = []
        for length in shape:
            size = -(-length // self.pieces)
            starts = range(0, length, size)
            cuts.append([(start, min(start + size, length)) for start in starts])
        return list(product(*cuts))


def write(directory: Path, state: dict, config=None, pieces: int = 1) -> Path:
    """Write a checkpoint from one process. config: of transformers, written next to it."""
    planner = InPieces(pieces) if pieces > 1 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, planner=planner, no_dist=True)
    if config is not None:
        config.save_pretrained(directory)
    return directory


def forge(directory: Path, change: Callable) -> None:
    """Write what .metadata says after a change of it."""
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def torchtitan_tensors(hf) -> dict[str, torch.Tensor]:
    """Return a Llama's weights under torchtitan's names, with the rows of q and k by pairs."""
    names = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }  # fmt: skip
    tensors, size = {}, hf.config.hidden_size // hf.config.num_attention_heads
    for name, tensor in hf.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.unflatten(0, (-1, 2, size // 2))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for old, new in names.items():
            name = name.replace(f"{old}.weight", f"{new}.weight")
        tensors[name.removeprefix("model.")] = tensor
    return tensors
