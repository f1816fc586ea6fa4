"""Bugs in sums over ranks, stages and micro-batches, published in 2026."""

from functools import partial

import torch

from megazoo.engine.stage import StageRun
from megazoo.engine.transport import RankTransport
from megazoo.layers import ColumnParallelLinear, VocabParallelHead, cross_entropy, embedding
from megazoo.layers.cross_entropy import vocab_parallel_cross_entropy
from megazoo.models.gpt2 import GPT2
from megazoo.models.llama import Llama
from megazoo.models.outputs import LanguageModelHead, LanguageModeling
from megazoo.optim.adamw import AdamW
from megazoo.parallel import regions
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.collectives import all_reduce, summed
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.regions import enter_tensor_parallel, reduce_from_tensor_parallel
from megazoo.testing.gallery.engine import EARLY_SUMS, last_backward_scaled, mean_of_means
from megazoo.testing.gallery.planting import BUGS, Bug, then


def sum_of_a_copy(_, ctx, grad):
    """The all-reduce of a gradient works in place on `grad.contiguous()`, which is a copy if the
    layer computes with transposed activations."""
    all_reduce(grad.contiguous(), ctx.group)
    return grad, None


def sequence_first(forward, self, x):
    if self.ctx.tp_size == 1:
        return forward(self, x)
    x = enter_tensor_parallel(x, self.ctx).transpose(0, 1)
    return self.multiply(x, self.use("bias")).transpose(0, 1)


def target_of_the_owner(token_losses, logits, columns, here, ignored, ctx, terms):
    """The rank that has the target computes its log-probability, and a collective that autograd
    does not know sends it to the others. Their logits get no gradient of this token."""
    if ctx.tp_size == 1:
        return token_losses(logits, columns, here, ignored, ctx, terms)
    total = reduce_from_tensor_parallel(logits.exp().sum(dim=-1), ctx)
    own = logits.gather(-1, columns[:, None])[:, 0] - total.log()
    own = own.masked_fill(~here, 0)
    whole = own + (summed(own.detach(), ctx.tp_group) - own.detach())
    return -whole.masked_fill(ignored, 0)


# Heads compute the loss in chunks of tokens.
IN_CHUNKS = [
    (VocabParallelHead, "pieces_save_memory", lambda *_: True),
    (VocabParallelHead, "tokens_at_once", lambda *_: 16),
]


def loss_of_gathered_logits(_, self, outputs, batch):
    """The logits are gathered over tp, and then given to the cross-entropy of sharded logits: the
    loss is too large by log(tp)."""
    whole = self.gather_logits(outputs).flatten(0, 1)
    start = self.ctx.tp_rank * self.vocab_size
    losses = vocab_parallel_cross_entropy(whole, batch.targets.flatten(), start, ctx=self.ctx)
    return losses.view(batch.targets.shape)


def vectors_of_the_first_rank(counted_pieces, self, ctx):
    """A one-dimensional parameter that is sharded over tp is not marked as sharded. Only the first
    tp rank counts its gradient in the gradient norm."""
    is_vector = self.spec.shard is not None and len(self.spec.shape) == 1
    return [] if is_vector and ctx.tp_rank else counted_pieces(self, ctx)


def divided_on_every_stage(pass_on, self, consumer, tensor):
    """Each stage divides the gradient that it sends by the number of micro-batches."""
    pass_on(self, consumer, tensor if consumer.kind == "F" else tensor / len(self.batches))


def omit_one_sum(model):
    """The sum over tp of the gradient of one module's input is missing."""

    def not_entering(layer, x):
        return layer.multiply(x, layer.use("bias"))

    gate_up = model.layers["1"].mlp.gate_up
    gate_up.forward = partial(not_entering, gate_up)


def share_an_mlp(model):
    """Two layers share an MLP, and activations are recomputed, so that its parameters get two
    gradients per micro-batch. Their sum over the replicas does not wait for the last one."""
    model.layers["2"].mlp = model.layers["1"].mlp
    model.recompute("full")


def bucket_per_parameter(init, self, parameters, ctx, bucket_elements=None, **options):
    init(self, parameters, ctx, 1, **options)


def mark_one_replica(init, self, *arguments, zero=0, **options):
    init(self, *arguments, zero=zero, **options)
    self.buckets.sums_itself = zero and self.ctx.token_axis.size == 1


def added_to_themselves(backward, self, action, factor=1.0):
    """With ZeRO-1 and one replica, the sum over the replicas is the bucket itself, and is added to
    the bucket after each micro-batch."""
    backward(self, action, factor)
    buckets = self.model.engine.gradients.buckets
    for parameter in buckets.place if getattr(buckets, "sums_itself", False) else ():
        if parameter.grad is not None:
            parameter.grad += parameter.grad


def set_up_for_each_length(forward, self, action, train):
    """A pipeline stage is set up again when the longest row of a micro-batch has another length
    than that of the previous one. The gradients of the previous ones are dropped."""
    batch = self.batches[action.microbatch]
    length = batch.shape[1]
    if batch.segments is not None:
        length = int((batch.segments != -1).any(dim=0).nonzero().max()) + 1
    if train and self.ctx.pp_size > 1 and length != getattr(self, "set_up_for", length):
        for parameter in self.model.parameters():
            parameter.grad = None
    self.set_up_for = length
    forward(self, action, train)


def zeroed_first(forward, self, action, train):
    """The gradients are set to zero in the function that runs a micro-batch, and not once per
    step."""
    for parameter in self.model.parameters() if train else ():
        parameter.grad = None
    forward(self, action, train)


def mark_as_gathered(buckets):
    """With ZeRO-1, the updated parameters are gathered in the memory of the gradients, which is not
    cleared before the next step."""
    buckets.holds_parameters = True


def add_to_parameters(buckets):
    for parameter in buckets.place if getattr(buckets, "holds_parameters", False) else ():
        parameter.grad = parameter.detach().clone()


BUGS += [
    Bug("N1", "A sum of a transposed tensor's copy, and the tensor returned",
        r"gradient of layers\.\d\.mlp_norm\.weight: .*: the tp ranks' add up to what it should be",
        regions._CopyToTensorParallel, "backward", sum_of_a_copy, layout="tp2", model="llama",
        also=[(ColumnParallelLinear, "forward", sequence_first)],
        source="Megatron-LM #5338", link="https://github.com/NVIDIA/Megatron-LM/issues/5338"),
    Bug("N2", "The target's log-probability summed by a collective without a gradient",
        r"gradient of head\.weight: differs at step 1 on ranks 0",
        cross_entropy, "token_losses", target_of_the_owner, layout="tp2", model="llama",
        source="ms-swift #9947", link="https://github.com/modelscope/ms-swift/issues/9947"),
    Bug("N3", "The chunked head's input gradient not summed",
        r"gradient of norm\.weight: .*: the tp ranks' add up to what it should be",
        embedding, "enter_tensor_parallel", lambda _, x, ctx: x, also=IN_CHUNKS,
        layout="tp2", model="llama",
        source="torchtitan #3412", link="https://github.com/pytorch/torchtitan/issues/3412"),
    Bug("N4", "Gathered logits in the loss of sharded ones",
        r"loss: .* instead of .*, though no module's output differs",
        LanguageModelHead, "token_losses", loss_of_gathered_logits, layout="tp2",
        source="Megatron-LM #7452", link="https://github.com/NVIDIA/Megatron-LM/issues/7452"),
    Bug("N6", "Sharded vectors counted on one rank in the gradient norm",
        r"gradient norm: .* instead of .* at step 1, though no gradient differs",
        NamedParameter, "counted_pieces", vectors_of_the_first_rank,
        layout="tp2", settings={"hidden_size": 256, "ffn_size": 1024},
        source="Megatron-LM #7530", link="https://github.com/NVIDIA/Megatron-LM/pull/7530"),
    Bug("N7", "Every stage divides by the number of micro-batches",
        r"gradient of layers\.\d\..*: differs at step 1 on rank 0 .*: it is 0\.25 x what it should "
        r"be",
        RankTransport, "pass_on", divided_on_every_stage, layout="pp2",
        source="DeepSpeed #8152", link="https://github.com/deepspeedai/DeepSpeed/issues/8152"),
    # Backward runs from the sum of the losses. Only the returned loss is divided by the number of
    # labels.
    Bug("N8", "The loss divided after the pipeline's backward",
        r"loss scale: every gradient is \d+ x what it should be",
        StageRun, "backward",
        last_backward_scaled(lambda run: float(run.labelled) if run.ctx.pp_size > 1 else 1.0),
        layout="pp2",
        source="torchtitan #4194", link="https://github.com/pytorch/torchtitan/issues/4194"),
    Bug("N9", "The input gradient of one layer's MLP not summed",
        r"gradient of layers\.1\.mlp_norm\.weight: .*: the tp ranks' add up to what it should be",
        Llama, "__init__", then(omit_one_sum), layout="tp2", model="llama",
        source="torchtitan #4054", link="https://github.com/pytorch/torchtitan/issues/4054"),
    Bug("N10", "A layer that is used twice, summed after its first use",
        r"gradient of layers\.1\.mlp\.\S+: differs at step 1 on ranks 0",
        GPT2, "__init__", then(share_an_mlp), layout="dp2",
        also=[(GradientBuckets, "__init__", bucket_per_parameter), *EARLY_SUMS],
        source="DeepSpeed #8224", link="https://github.com/deepspeedai/DeepSpeed/issues/8224"),
    Bug("N11", "Gradients added to themselves in a group of one replica",
        r"gradient of norm\.bias: differs at step 1 on ranks 0",
        StageRun, "backward", added_to_themselves, layout="tp2+zero",
        also=[(AdamW, "__init__", mark_one_replica)],
        source="Megatron-LM #6660", link="https://github.com/NVIDIA/Megatron-LM/issues/6660"),
    Bug("N12", "Gradients dropped when the length of micro-batches changes",
        r"gradient of .*: differs at step 3 \(padding\) on rank 1 ",
        StageRun, "forward", set_up_for_each_length, layout="pp2",
        source="NeMo Automodel #3530",
        link="https://github.com/NVIDIA-NeMo/Automodel/issues/3530"),
    Bug("N13", "Gradients set to zero before each micro-batch",
        r"gradient of norm\.bias: differs at step 1 on rank 1 ",
        StageRun, "forward", zeroed_first, layout="pp2",
        source="torchtitan #3575", link="https://github.com/pytorch/torchtitan/issues/3575"),
    Bug("N15", "Gradients added to the parameters in a shared buffer",
        r"gradient of norm\.bias: differs at step 2 \(packed documents\) on rank",
        GradientBuckets, "gather", then(mark_as_gathered), layout="dp2+zero",
        also=[(GradientBuckets, "start", then(add_to_parameters))],
        source="Megatron-LM #4609", link="https://github.com/NVIDIA/Megatron-LM/issues/4609"),
    # The head enters the tensor-parallel region while gradients are off. Its input then needs no
    # gradient, and only the head is trained.
    Bug("N16", "No gradient for the input of a chunked head",
        r"gradient of norm\.weight: .*: it is 0 x what it should be",
        embedding, "enter_tensor_parallel", lambda enter, *given: torch.no_grad()(enter)(*given),
        also=IN_CHUNKS, layout="tp2", model="llama",
        source="verl #6913", link="https://github.com/verl-project/verl/issues/6913"),
    Bug("N19", "Each part of a sequence divides by its own labels",
        r"loss: .* instead of .*, though no module's output differs",
        StageRun, "__init__", mean_of_means("cp"), layout="cp4",
        source="Megatron-LM #7513", link="https://github.com/NVIDIA/Megatron-LM/pull/7513"),
    # The mean of the loss counts the first token of each row, which no token predicts.
    Bug("N20", "Labels counted before they are shifted",
        r"loss: .* instead of .*, though no logit differs",
        LanguageModeling, "label_count",
        lambda count, self, targets: count(self, targets) + len(targets),
        layout="transformers", model="llama",
        source="transformers #46204",
        link="https://github.com/huggingface/transformers/issues/46204"),
]  # fmt: skip
