"""Bugs in the optimizer: gradient norm, clipping, weight decay, overflow, and updates of shards."""

from dataclasses import replace
from operator import attrgetter

import torch

from megazoo.optim.adamw import AdamW
from megazoo.optim.clip import clip_scale
from megazoo.optim.whole_matrices import WholeMatrices
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.module import NamedParameter
from megazoo.testing.gallery.planting import BUGS, Bug, then


def scale_of_own_norm(_, self, norm):
    norms = [entry.parameter.grad.norm() for entry in self.entries]
    return clip_scale(torch.stack(norms).norm(), self.clip_grad)


def decay_frozen(optimizer):
    for parameter in optimizer.model.parameters():
        if not parameter.requires_grad:
            parameter.data.mul_(1 - optimizer.lr * optimizer.defaults["weight_decay"])


def decay_all(optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] = optimizer.defaults["weight_decay"]


def own_overflow(_, self, norm):
    """Each rank checks only its own gradients for an overflow and decides without the others to
    skip the step."""
    return not all(entry.parameter.grad.isfinite().all() for entry in self.entries)


def normalised_by_shard(row, self, entry):
    """The update of a matrix is normalised by the RMS of the rank's shard instead of that of the
    full matrix."""
    mine = row(self, entry)
    if entry.spec.shard is None or len(entry.spec.shape) != 2:
        return mine
    mean = mine.gradient.square().mean()
    whole = mean / self.ctx.tp_size
    all_reduce(whole, self.ctx.tp_group)
    return mine._replace(gradient=mine.gradient * (whole / mean).sqrt())


def shards_orthogonalised(_, self, function, give, take):
    for matrix in self.matrices:
        shard = give(matrix).view(self._shape(matrix, self.ctx.tp_rank))
        take(matrix, function(shard, matrix).reshape(-1))


def fused_orthogonalised(_, self, function, give, take):
    for name in {matrix.entry.name for matrix in self.matrices}:
        parts = sorted((m for m in self.matrices if m.entry.name == name), key=attrgetter("first"))
        rows, columns = parts[0].entry.spec.shape
        whole = torch.cat([give(matrix) for matrix in parts]).view(rows, columns)
        made = function(whole, replace(parts[0], rows=rows))
        for matrix, step in zip(parts, made.split([m.rows for m in parts]), strict=True):
            take(matrix, step.reshape(-1))


BUGS += [
    Bug("18", "Clipping by this rank's norm",
        r"weights of .*: differ after step 1 on ranks 0 .*, though no gradient does",
        AdamW, "_clip_scale", scale_of_own_norm, layout="tp2",
        source="AReaL #312", link="https://github.com/areal-project/AReaL/issues/312"),
    Bug("19", "Gradient norm that counts copies tp times",
        r"gradient norm: .* instead of .* at step 1, though no gradient differs",
        NamedParameter, "counted_pieces", lambda _, self, ctx: self.spec.pieces(ctx.place),
        layout="tp2",
        source="NeMo-RL #3788", link="https://github.com/NVIDIA-NeMo/RL/pull/3788"),
    Bug("20a", "Weight decay on frozen parameters",
        r"optimizer: the weights of .* are frozen, and have changed",
        AdamW, "step", then(decay_frozen), layout="tp2", lora_rank=2,
        source="diffusers #1009",
        link="https://github.com/huggingface/diffusers/issues/1009"),
    Bug("20b", "Weight decay on norms and biases",
        r"optimizer: the weights of .* they decay, though of one dimension",
        AdamW, "__init__", then(decay_all), layout="tp2",
        source="verl #5070", link="https://github.com/verl-project/verl/issues/5070"),
    Bug("21b", "Overflow seen by one rank alone",
        r"overflow: a step whose gradients overflow on rank 1 is not skipped on rank 0 ",
        AdamW, "_overflowed", own_overflow, layout="tp2",
        source="Megatron-Bridge #5591",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5591"),
    Bug("24a", "An update normalised over a shard as if it were the matrix",
        r"weights of .*: differ after step 1 on ranks 0 .*, though no gradient does",
        AdamW, "_row", normalised_by_shard, layout="tp2",
        source="DeepSpeed #8437", link="https://github.com/deepspeedai/DeepSpeed/issues/8437"),
    Bug("24b", "Muon's step of a shard, as if it were the matrix",
        r"weights of .*: differ after step 1 on ranks 0 .*, though no gradient does",
        WholeMatrices, "apply", shards_orthogonalised, layout="tp2", optimizer="muon",
        source="DeepSpeed #8437", link="https://github.com/deepspeedai/DeepSpeed/issues/8437"),
    Bug("", "Muon's step of q, k and v, or gate and up, as one matrix",
        r"optimizer: the weights of .*\.(qkv|gate_up)\.weight are not those of Muon, in one "
        r"process",
        WholeMatrices, "apply", fused_orthogonalised,
        layout="dp2", model="llama", optimizer="muon",
        source="rule: each is a matrix (Jordan et al. 2024)",
        link="https://kellerjordan.github.io/posts/muon/"),
]  # fmt: skip
