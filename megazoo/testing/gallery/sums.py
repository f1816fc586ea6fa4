"""Bugs in sums over ranks, stages and micro-batches, published in 2026."""

from contextlib import contextmanager
from functools import partial

import torch

from megazoo.engine import batch
from megazoo.engine.stage import StageRun
from megazoo.engine.transport import RankTransport
from megazoo.layers import ColumnParallelLinear, VocabParallelHead, cross_entropy, embedding
from megazoo.layers.cross_entropy import IGNORE_INDEX, vocab_parallel_cross_entropy
from megazoo.models.gpt2 import GPT2
from megazoo.models.llama import Llama
from megazoo.models.outputs import LanguageModelHead, LanguageModeling
from megazoo.optim.adamw import AdamW
from megazoo.parallel import regions
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.collectives import all_reduce, summed
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.regions import enter_tensor_parallel, reduce_from_tensor_parallel
from megazoo.parallel.sequence import SequenceCut
from megazoo.testing.gallery.planting import bug, replaced


@bug(
    "N1",
    "A sum of a transposed tensor's copy, and the tensor returned",
    r"gradient of layers\.\d\.mlp_norm\.weight: .*: the tp ranks' add up to what it should be",
    layout="tp2",
    model="llama",
    source="Megatron-LM #5338",
    link="https://github.com/NVIDIA/Megatron-LM/issues/5338",
)
@contextmanager
def sum_of_a_copy():
    """The all-reduce of a gradient works in place on `grad.contiguous()`, which is a copy if the
    layer computes with transposed activations."""

    def make_backward(_):
        def backward(ctx, grad):
            all_reduce(grad.contiguous(), ctx.group)
            return grad, None

        return staticmethod(backward)

    def make_forward(forward):
        def sequence_first(self, x):
            if self.ctx.tp_size == 1:
                return forward(self, x)
            x = enter_tensor_parallel(x, self.ctx).transpose(0, 1)
            return self.multiply(x, self.use("bias")).transpose(0, 1)

        return sequence_first

    layer = replaced(ColumnParallelLinear, "forward", make_forward)
    with layer, replaced(regions._CopyToTensorParallel, "backward", make_backward):
        yield


@bug(
    "N2",
    "The target's log-probability summed by a collective without a gradient",
    r"gradient of head\.weight: differs at step 1 on ranks 0",
    layout="tp2",
    model="llama",
    source="ms-swift #9947",
    link="https://github.com/modelscope/ms-swift/issues/9947",
)
def target_summed_without_gradient():
    """The rank that has the target computes its log-probability, and a collective that autograd
    does not know sends it to the others. Their logits get no gradient of this token."""

    def make(token_losses):
        def from_the_owner(logits, columns, here, ignored, ctx, terms):
            if ctx.tp_size == 1:
                return token_losses(logits, columns, here, ignored, ctx, terms)
            total = reduce_from_tensor_parallel(logits.exp().sum(dim=-1), ctx)
            own = logits.gather(-1, columns[:, None])[:, 0] - total.log()
            own = own.masked_fill(~here, 0)
            whole = own + (summed(own.detach(), ctx.tp_group) - own.detach())
            return -whole.masked_fill(ignored, 0)

        return from_the_owner

    return replaced(cross_entropy, "token_losses", make)


@bug(
    "N3",
    "The chunked head's input gradient not summed",
    r"gradient of norm\.weight: .*: the tp ranks' add up to what it should be",
    layout="tp2",
    model="llama",
    source="torchtitan #3412",
    link="https://github.com/pytorch/torchtitan/issues/3412",
)
@contextmanager
def gradient_of_chunks_not_summed():
    """The head computes the loss in chunks of tokens, and the sum of the gradients of its input
    over tp is missing."""
    with (
        _loss_in_chunks(),
        replaced(embedding, "enter_tensor_parallel", lambda _: lambda x, ctx: x),
    ):
        yield


@contextmanager
def _loss_in_chunks():
    """Within this block, heads compute the loss in chunks of tokens."""
    chunked = replaced(VocabParallelHead, "pieces_save_memory", lambda _: lambda *_: True)
    with chunked, replaced(VocabParallelHead, "tokens_at_once", lambda _: lambda _: 16):
        yield


@bug(
    "N4",
    "Gathered logits in the loss of sharded ones",
    r"loss: .* instead of .*, though no module's output differs",
    layout="tp2",
    source="Megatron-LM #7452",
    link="https://github.com/NVIDIA/Megatron-LM/issues/7452",
)
def gathered_logits_in_the_loss():
    """The logits are gathered over tp, and then given to the cross-entropy of sharded logits: the
    loss is too large by log(tp)."""

    def make(token_losses):
        def gathered(self, outputs, batch):
            whole = self.gather_logits(outputs).flatten(0, 1)
            start = self.ctx.tp_rank * self.vocab_size
            targets = batch.targets.flatten()
            losses = vocab_parallel_cross_entropy(whole, targets, start, ctx=self.ctx)
            return losses.view(batch.targets.shape)

        return gathered

    return replaced(LanguageModelHead, "token_losses", make)


@bug(
    "N6",
    "Sharded vectors counted on one rank in the gradient norm",
    r"gradient norm: .* instead of .* at step 1, though no gradient differs",
    layout="tp2",
    settings={"hidden_size": 256, "ffn_size": 1024},
    source="Megatron-LM #7530",
    link="https://github.com/NVIDIA/Megatron-LM/pull/7530",
)
def sharded_vectors_counted_once():
    """A one-dimensional parameter that is sharded over tp is not marked as sharded. Only the first
    tp rank counts its gradient in the gradient norm."""

    def make(counted_pieces):
        def unmarked(self, ctx):
            is_vector = self.spec.shard is not None and len(self.spec.shape) == 1
            return [] if is_vector and ctx.tp_rank else counted_pieces(self, ctx)

        return unmarked

    return replaced(NamedParameter, "counted_pieces", make)


@bug(
    "N7",
    "Every stage divides by the number of micro-batches",
    r"gradient of layers\.\d\..*: differs at step 1 on rank 0 .*: it is 0\.25 x what it should be",
    layout="pp2",
    source="DeepSpeed #8152",
    link="https://github.com/deepspeedai/DeepSpeed/issues/8152",
)
def division_on_every_stage():
    """Each stage divides the gradient that it sends by the number of micro-batches."""

    def make(pass_on):
        def divided(self, consumer, tensor):
            return pass_on(
                self, consumer, tensor if consumer.kind == "F" else tensor / len(self.batches)
            )

        return divided

    return replaced(RankTransport, "pass_on", make)


@bug(
    "N8",
    "The loss divided after the pipeline's backward",
    r"loss scale: every gradient is \d+ x what it should be",
    layout="pp2",
    source="torchtitan #4194",
    link="https://github.com/pytorch/torchtitan/issues/4194",
)
def loss_divided_after_backward():
    """With pipeline parallelism, backward runs from the sum of the losses. Only the returned loss
    is divided by the number of labels."""

    def make(backward):
        def from_the_sum(self, action, factor=1.0):
            if self.ctx.pp_size > 1 and self.stages[action.stage].last:
                factor *= float(self.labelled)
            backward(self, action, factor)

        return from_the_sum

    return replaced(StageRun, "backward", make)


@bug(
    "N9",
    "The input gradient of one layer's MLP not summed",
    r"gradient of layers\.1\.mlp_norm\.weight: .*: the tp ranks' add up to what it should be",
    layout="tp2",
    model="llama",
    source="torchtitan #4054",
    link="https://github.com/pytorch/torchtitan/issues/4054",
)
def one_input_gradient_not_summed():
    """The sum over tp of the gradient of one module's input is missing."""

    def not_entering(layer, x):
        return layer.multiply(x, layer.use("bias"))

    def make(init):
        def initialised(self, *arguments, **options):
            init(self, *arguments, **options)
            gate_up = self.layers["1"].mlp.gate_up
            gate_up.forward = partial(not_entering, gate_up)

        return initialised

    return replaced(Llama, "__init__", make)


@bug(
    "N10",
    "A layer that is used twice, summed after its first use",
    r"gradient of layers\.1\.mlp\.\S+: differs at step 1 on ranks 0",
    layout="dp2",
    source="DeepSpeed #8224",
    link="https://github.com/deepspeedai/DeepSpeed/issues/8224",
)
@contextmanager
def sum_after_the_first_use():
    """Two layers share an MLP, and activations are recomputed, so that its parameters get two
    gradients per micro-batch. Their sum over the replicas does not wait for the last one."""

    def make_model(init):
        def initialised(self, *arguments, **options):
            init(self, *arguments, **options)
            self.layers["2"].mlp = self.layers["1"].mlp
            self.recompute("full")

        return initialised

    def make_buckets(init):
        def initialised(self, parameters, ctx, bucket_elements=None, **options):
            init(self, parameters, ctx, 1, **options)  # a bucket per parameter

        return initialised

    def make_received(received):
        def noted(self, parameter):
            index, _ = self.place[parameter]
            if self.missing[index : index + 1] != [0]:  # an extra gradient raises an error
                received(self, parameter)

        return noted

    def make_launch(launch):
        def launched(self, stop):
            launch(self, stop)
            while self.works:  # a late sum would include later gradients
                self.works.pop(0).wait()

        return launched

    with (
        replaced(GPT2, "__init__", make_model),
        replaced(GradientBuckets, "__init__", make_buckets),
        replaced(GradientBuckets, "received", make_received),
        replaced(GradientBuckets, "_launch", make_launch),
    ):
        yield


@bug(
    "N11",
    "Gradients added to themselves in a group of one replica",
    r"gradient of norm\.bias: differs at step 1 on ranks 0",
    layout="tp2+zero",
    source="Megatron-LM #6660",
    link="https://github.com/NVIDIA/Megatron-LM/issues/6660",
)
@contextmanager
def gradients_added_to_themselves():
    """With ZeRO-1 and one replica, the sum over the replicas is the bucket itself, and is added to
    the bucket after each micro-batch."""

    def make_init(init):
        def initialised(self, *arguments, zero=0, **options):
            init(self, *arguments, zero=zero, **options)
            self.buckets.sums_itself = zero and self.ctx.token_axis.size == 1

        return initialised

    def make_backward(backward):
        def doubled(self, action, factor=1.0):
            backward(self, action, factor)
            buckets = self.model.engine.gradients.buckets
            for parameter in buckets.place if getattr(buckets, "sums_itself", False) else ():
                if parameter.grad is not None:
                    parameter.grad += parameter.grad

        return doubled

    adamw = replaced(AdamW, "__init__", make_init)
    with adamw, replaced(StageRun, "backward", make_backward):
        yield


@bug(
    "N12",
    "Gradients dropped when the length of micro-batches changes",
    r"gradient of .*: differs at step 3 \(padding\) on rank 1 ",
    layout="pp2",
    source="NeMo Automodel #3530",
    link="https://github.com/NVIDIA-NeMo/Automodel/issues/3530",
)
def gradients_dropped_at_another_length():
    """A pipeline stage is set up again when the longest row of a micro-batch has another length
    than that of the previous one. The gradients of the previous ones are dropped."""

    def make(forward):
        def set_up(self, action, train):
            batch = self.batches[action.microbatch]
            length = batch.shape[1]
            if batch.segments is not None:
                length = int((batch.segments != -1).any(dim=0).nonzero().max()) + 1
            if train and self.ctx.pp_size > 1 and length != getattr(self, "set_up_for", length):
                for parameter in self.model.parameters():
                    parameter.grad = None
            self.set_up_for = length
            forward(self, action, train)

        return set_up

    return replaced(StageRun, "forward", make)


@bug(
    "N13",
    "Gradients set to zero before each micro-batch",
    r"gradient of norm\.bias: differs at step 1 on rank 1 ",
    layout="pp2",
    source="torchtitan #3575",
    link="https://github.com/pytorch/torchtitan/issues/3575",
)
def zeros_before_each_micro_batch():
    """The gradients are set to zero in the function that runs a micro-batch, and not once per
    step."""

    def make(forward):
        def zeroed(self, action, train):
            for parameter in self.model.parameters() if train else ():
                parameter.grad = None
            forward(self, action, train)

        return zeroed

    return replaced(StageRun, "forward", make)


@bug(
    "N15",
    "Gradients added to the parameters in a shared buffer",
    r"gradient of norm\.bias: differs at step 2 \(packed documents\) on rank",
    layout="dp2+zero",
    source="Megatron-LM #4609",
    link="https://github.com/NVIDIA/Megatron-LM/issues/4609",
)
@contextmanager
def buffer_of_parameters_not_cleared():
    """With ZeRO-1, the updated parameters are gathered in the memory of the gradients, which is not
    cleared before the next step."""

    def make_gather(gather):
        def gathered(self):
            gather(self)
            self.holds_parameters = True

        return gathered

    def make_start(start):
        def started(self, *arguments):
            start(self, *arguments)
            for parameter in self.place if getattr(self, "holds_parameters", False) else ():
                parameter.grad = parameter.detach().clone()

        return started

    gather = replaced(GradientBuckets, "gather", make_gather)
    with gather, replaced(GradientBuckets, "start", make_start):
        yield


@bug(
    "N16",
    "No gradient for the input of a chunked head",
    r"gradient of norm\.weight: .*: it is 0 x what it should be",
    layout="tp2",
    model="llama",
    source="verl #6913",
    link="https://github.com/verl-project/verl/issues/6913",
)
@contextmanager
def input_without_gradient():
    """The head computes the loss in chunks of tokens, and enters the tensor-parallel region while
    gradients are off. Its input then needs no gradient, and only the head is trained."""
    entered = replaced(embedding, "enter_tensor_parallel", lambda enter: torch.no_grad()(enter))
    with _loss_in_chunks(), entered:
        yield


@bug(
    "N19",
    "Each part of a sequence divides by its own labels",
    r"loss: .* instead of .*, though no module's output differs",
    layout="cp4",
    source="Megatron-LM #7513",
    link="https://github.com/NVIDIA/Megatron-LM/pull/7513",
)
def mean_of_the_parts_means():
    """The loss is the unweighted mean of the means of the sequences' parts."""

    def make(init):
        def initialised(self, *arguments, **options):
            init(self, *arguments, **options)
            if self.ctx.cp_size > 1 and self.model.stages[-1].last:
                own = sum(self.model.output_head.label_count(batch) for batch in self.batches)
                self.labelled = torch.as_tensor(own).clamp(min=1).float() * self.ctx.cp_size

        return initialised

    return replaced(StageRun, "__init__", make)


@bug(
    "N20",
    "Labels counted before they are shifted",
    r"loss: .* instead of .*, though no logit differs",
    layout="transformers",
    model="llama",
    source="transformers #46204",
    link="https://github.com/huggingface/transformers/issues/46204",
)
def labels_counted_before_the_shift():
    """The mean of the loss counts the first token of each row, which no token predicts."""

    def make(label_count):
        return lambda self, targets: label_count(self, targets) + len(targets)

    return replaced(LanguageModeling, "label_count", make)


@bug(
    "N23",
    "Labels rolled in each part of the sequence",
    r"loss: .* instead of .*, though no module's output differs",
    layout="cp2",
    source="verl #6268",
    link="https://github.com/verl-project/verl/issues/6268",
)
def labels_rolled_in_parts():
    """Each rank rolls the labels of its part of the sequence. The last token of a part predicts the
    first of the same part. The number of labels is right."""

    def make(cut_batch):
        def rolled(tensors, shape, of_tokens, ctx, **options):
            cut = SequenceCut.of(shape[1], ctx)
            if cut is not None and "targets" in tensors:
                labels = tensors["targets"].roll(1, dims=1)
                own = cut.own(labels).roll(-1, dims=1)
                whole = cut.place(own, torch.full_like(labels, IGNORE_INDEX))
                tensors = {**tensors, "targets": whole}
            return cut_batch(tensors, shape, of_tokens, ctx, **options)

        return rolled

    return replaced(batch, "_cut", make)
