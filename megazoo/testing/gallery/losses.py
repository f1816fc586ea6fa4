"""Bugs in losses of preferences and distillation: sums over the parts of a row and of the
vocabulary, and the number of pairs."""

import torch
import torch.nn.functional as F

from megazoo.layers import fused_cross_entropy
from megazoo.losses import base
from megazoo.losses.base import Loss
from megazoo.losses.distillation import Distillation
from megazoo.losses.preferences import DPO
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.regions import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megazoo.testing.gallery.planting import BUGS, Bug
from megazoo.testing.gallery.sums import target_of_the_owner


def log_probabilities_of_the_owner(found, x, weight, columns, here, ignored, ctx, *others):
    """The owner of a token computes its log-probability, as in `target_of_the_owner`."""
    if ctx.tp_size == 1:
        return found(x, weight, columns, here, ignored, ctx, *others)
    logits = F.linear(x, weight)
    losses = target_of_the_owner(None, logits, columns, here, ignored, ctx, None)
    none = logits.new_empty(len(x), 0)
    return -losses, none, none.long()


def gradient_of_one_part(counted_once, self, value):
    """A value that is the same on all cp ranks is counted by the first one, with its gradient."""
    return value if self.ctx.cp_rank == 0 else value * 0


def pairs_of_all_ranks(count, self, batch):
    pairs = torch.as_tensor(count(self, batch)).float().clone()
    all_reduce(pairs, self.ctx.cp_group)
    return pairs


def normaliser_of_the_shard(logits_of, self, head, x):
    """The softmax is over this rank's part of the vocabulary."""
    logits, _ = logits_of(self, head, x)
    return logits, logits.exp().sum(-1, keepdim=True).log()


def normaliser_without_gradient(logits_of, self, head, x):
    """A collective that autograd does not know sums the exponentials into another tensor."""
    logits, normaliser = logits_of(self, head, x)
    return logits, normaliser if self.ctx.tp_size == 1 else normaliser.detach()


def normaliser_in_each_shard(divergences, self, x, batch):
    """Each rank adds the normaliser for its part of the vocabulary. The loss is right, but the
    gradient of the normaliser is weighted by the teacher's share of that part."""
    if self.ctx.tp_size == 1:
        return divergences(self, x, batch)
    with torch.no_grad():
        logits, normaliser = self._logits(self.reference_head, batch.named["teacher"])
        wanted = logits - normaliser
    logits, normaliser = self._logits(self.head, x)
    of_shard = (wanted.exp() * (wanted - logits + normaliser)).sum(dim=-1)
    return self.temperature**2 * reduce_from_tensor_parallel(of_shard, self.ctx)


def summed_in_backward_too(divergences, self, *given):
    """The gradient of the sum over tp is a sum too, though each rank computes the same loss."""
    return copy_to_tensor_parallel(divergences(self, *given), self.ctx)


BUGS += [
    Bug("P1", "Log-probability of the owner of a token summed without a gradient",
        r"gradient of head\.weight: differs at step 1 on ranks 0",
        fused_cross_entropy, "log_probabilities", log_probabilities_of_the_owner,
        layout="tp2", model="llama", loss="dpo",
        source="ms-swift #9947", link="https://github.com/modelscope/ms-swift/pull/9947"),
    Bug("P2", "Log-probability of a part of each answer",
        r"loss: .* instead of .*, though no module's output differs",
        base, "reduce_from_context", lambda _, x, ctx: x, layout="cp2", loss="dpo",
        source="rule: RL-Kernel #49", link="https://github.com/RL-Align/RL-Kernel/issues/49"),
    Bug("P3", "A loss of whole answers counted by each rank of a sequence",
        r"loss: .* instead of .*, though no module's output differs",
        Loss, "counted_once", lambda _, self, value: value, layout="cp2", loss="dpo",
        source="transformers #48167",
        link="https://github.com/huggingface/transformers/pull/48167"),
    Bug("P4", "Gradient of one part of each answer",
        r"gradient of head\.weight: differs at step 1 on ranks 0",
        Loss, "counted_once", gradient_of_one_part, layout="cp2", model="llama", loss="dpo",
        source="rule: DeepSpeed #6841", link="https://github.com/deepspeedai/DeepSpeed/issues/6841"),
    Bug("", "Pairs counted by each rank of a sequence",
        r"loss: .* instead of .*, though no module's output differs",
        DPO, "count", pairs_of_all_ranks, layout="cp2", loss="dpo"),
    Bug("", "Pairs counted by the labels of a part of the sequence",
        r"loss: .* instead of .*, though no module's output differs",
        base, "all_reduce", lambda *_: None, layout="cp2", loss="dpo"),
    Bug("P5", "Gradients of distillation times tp",
        r"loss scale: every gradient is 2 x what it should be, and tp is 2",
        Distillation, "_divergences", summed_in_backward_too,
        layout="tp2", loss="distill",
        source="NeMo Automodel #3776",
        link="https://github.com/NVIDIA-NeMo/Automodel/issues/3776"),
    Bug("", "Distillation over a part of the vocabulary",
        r"loss: .* instead of .*, though no module's output differs",
        Distillation, "_logits", normaliser_of_the_shard, layout="tp2", loss="distill"),
    Bug("", "No gradient of the softmax's sum in distillation",
        r"gradient of head\.weight: differs at step 1 on ranks 0",
        Distillation, "_logits", normaliser_without_gradient,
        layout="tp2", model="llama", loss="distill"),
    Bug("", "The softmax's sum added by each part of the vocabulary",
        r"gradient of head\.weight: differs at step 1 on ranks 0",
        Distillation, "_divergences", normaliser_in_each_shard,
        layout="tp2", model="llama", loss="distill"),
]  # fmt: skip
