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

from megazoo.parallel.shard import Box
from tests.support.chunks import InChunks
from tests.support.megatron import LLAMA
from tests.support.training import make_batch, randomized_

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
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, mesh = small_llama(**fields).train(), init_device_mesh("cpu", (ranks,))
    model.config.save_pretrained(directory)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters(), **HOW), []

    def save(name: str) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, states = get_state_dict(model, optimizer, options=options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=directory / name)

    for step in range(sum(STEPS)):
        if step == STEPS[0]:
            save("before")
        ids, targets = (tensor.chunk(ranks)[rank] for tensor in plain_batch(step))
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    save("after")
    return losses[STEPS[0] :]


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
