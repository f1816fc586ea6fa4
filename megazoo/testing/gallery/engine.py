"""Bugs in the engine: batches and micro-batches, the pipeline, the mean over tokens, gradient sums
over replicas and between stages."""

from unittest import mock

import torch

from megazoo.engine import pipeline
from megazoo.engine.stage import StageRun
from megazoo.engine.transport import RankTransport
from megazoo.parallel import buckets
from megazoo.parallel.buckets import GradientBuckets
from megazoo.testing.gallery.planting import BUGS, EVERYWHERE, Bug, then, without_call


def own_labels(run: StageRun, batches) -> torch.Tensor:
    """Count the labels of this rank's micro-batches."""
    labels = sum(run.model.output_head.label_count(each) for each in batches)
    return torch.as_tensor(labels).clamp(min=1).float()


def mean_of_means(axis: str):
    """Return a wrapper of the constructor: the loss is the unweighted mean of the means of the
    ranks along an axis."""

    def change(run):
        if run.model.stages[-1].last:
            run.labelled = own_labels(run, run.batches) * run.ctx.axis(axis).size

    return then(change)


def last_backward_scaled(factor_of):
    """Return a wrapper: the loss is right, but its gradient is multiplied by factor_of(run)."""

    def wrapper(backward, self, action, factor=1.0):
        last = self.stages[action.stage].last
        backward(self, action, factor * factor_of(self) if last else factor)

    return wrapper


def mean_of_micro_batch_means(forward, self, action, train):
    """The loss is the unweighted mean of the micro-batches' means."""
    labelled = self.labelled
    if self.stages[action.stage].last:
        own = own_labels(self, [self.batches[action.microbatch]])
        labelled = own * len(self.batches) * self.ctx.dp_size
    with mock.patch.object(self, "labelled", labelled):
        forward(self, action, train)


def twice(before, *given):
    before(*given)
    before(*given)


def without_late(init, self, parameters, ctx, bucket_elements=None, late=(), **options):
    """The gradient of a tied embedding is reduced over the replicas before it is summed between the
    stages."""
    init(self, parameters, ctx, bucket_elements, **options)


def received_once(received, self, parameter):
    index, _ = self.place[parameter]
    if self.missing[index : index + 1] != [0]:  # an extra gradient raises an error
        received(self, parameter)


def launched_at_once(launch, self, stop):
    launch(self, stop)
    while self.leaving:  # a late sum would include later gradients
        self._arrive()


# The sum of a bucket completes before its last gradient.
EARLY_SUMS = [
    (GradientBuckets, "received", received_once),
    (GradientBuckets, "_launch", launched_at_once),
]


def lost_on_one_rank(all_reduce, tensor, group, **options):
    """One replica takes part in a bucket's all-reduce but discards the result."""
    kept = tensor.clone() if group is not None and group.rank() == 1 else tensor
    return all_reduce(kept, group, **options)


def backward_of_the_latest(backward, self, action, factor=1.0):
    """A received gradient is used for the micro-batch with the latest forward pass."""
    stage, own = action.stage, (action.stage, action.microbatch)
    if not self.stages[stage].last:
        latest = [key for key in self.graphs if key[0] == stage][-1]
        self.graphs[own], self.graphs[latest] = self.graphs[latest], self.graphs[own]
    backward(self, action, factor)


def one_receive_buffer(empty_input, self, microbatch):
    """All micro-batches are received into the same memory."""
    if not hasattr(self, "received_into"):
        self.received_into = empty_input(self, microbatch)
    return self.received_into.data  # .data hides writes from autograd


BUGS += [
    Bug("3", "Mean of the micro-batches' means",
        r"loss: .*: it is the mean of the micro-batches' means",
        StageRun, "forward", mean_of_micro_batch_means, layout="pp2",
        source="transformers #34191",
        link="https://github.com/huggingface/transformers/pull/34191"),
    Bug("4", "Mean of the replicas' means",
        r"loss: .*: it is the mean of the replicas' means",
        StageRun, "__init__", mean_of_means("dp"), layout="dp2",
        source="transformers #34242",
        link="https://github.com/huggingface/transformers/issues/34242"),
    # Each replica divides its loss by its own label count, and the results are summed.
    Bug("5a", "Labels counted on each replica alone",
        r"labels: the mean is over \d+ labelled tokens, not \d+",
        pipeline, "count_labels",
        lambda count, model, batches, group, head: count(model, batches, None, head),
        layout="dp2",
        source="prime-rl #2562",
        link="https://github.com/PrimeIntellect-ai/prime-rl/pull/2562"),
    Bug("5b", "Gradients divided by a replica's own labels",
        r"gradient of norm\.bias: differs at step 1 on rank",
        StageRun, "backward",
        last_backward_scaled(
            lambda run: float(run.labelled / own_labels(run, run.batches)) / run.ctx.dp_size
        ),
        layout="dp2",
        source="torchtitan #2206", link="https://github.com/pytorch/torchtitan/pull/2206"),
    # The loss is multiplied by the loss scale twice, but gradients are divided by it once.
    Bug("21a", "Loss scale applied twice",
        r"loss scale: every gradient is 1024 x what it should be",
        StageRun, "__init__",
        lambda init, *given, loss_scale=1.0, **options: init(
            *given, loss_scale=loss_scale**2, **options
        ),
        layout="dp2",
        source="slime #1842", link="https://github.com/THUDM/slime/pull/1842"),
    # Its gradients are summed between the stages twice.
    Bug("2a", "Tied embedding's gradient counted twice",
        r"tie: the gradient of embedding\.weight, which stages share, is 2 x what it should be",
        EVERYWHERE, "sum_between_stages", twice, layout="pp2",
        source="pytorch #180952", link="https://github.com/pytorch/pytorch/issues/180952"),
    Bug("2b", "Tied embedding's gradient on one stage only",
        r"tie: the gradient of embedding\.weight, which stages share, differs at",
        EVERYWHERE, "sum_between_stages", without_call, layout="pp2",
        source="uw-syfi/piper #13", link="https://github.com/uw-syfi/piper/issues/13"),
    Bug("2c", "Part of a tied embedding's gradient, with a distributed optimizer",
        r"tie: the gradient of embedding\.weight, which stages share, differs at",
        GradientBuckets, "__init__", without_late, layout="pp2dp2+zero",
        source="Megatron-LM #844", link="https://github.com/NVIDIA/Megatron-LM/issues/844"),
    # The sum of a bucket starts and completes after the first micro-batch.
    Bug("22", "Sum over replicas before the last micro-batch's gradient",
        r"gradient of norm\.bias: differs at step 1 on ranks 0",
        GradientBuckets, "start", lambda start, self, _, *others: start(self, 1, *others),
        also=EARLY_SUMS, layout="dp2",
        source="DeepSpeed #7985", link="https://github.com/deepspeedai/DeepSpeed/pull/7985"),
    Bug("23", "A replica without the sum of one bucket",
        r"gradient of norm\.bias: differs at step 1 on rank 1 ",
        buckets, "all_reduce", lost_on_one_rank, layout="dp2",
        source="pytorch #69031", link="https://github.com/pytorch/pytorch/issues/69031"),
    Bug("26", "Backward in another order of micro-batches than the forward's",
        r"gradient of layers\.\d\..*: differs at step 1 on rank 0 ",
        StageRun, "backward", backward_of_the_latest, layout="pp2",
        source="pytorch #127796", link="https://github.com/pytorch/pytorch/pull/127796"),
    Bug("27", "A receive buffer used again before it was read",
        r"gradient of layers\..*: differs at step 1 on rank",
        RankTransport, "_empty_input", one_receive_buffer, layout="pp2+gpipe",
        source="DeepSpeed #2800", link="https://github.com/deepspeedai/DeepSpeed/issues/2800"),
    # Its gradient is right.
    Bug("", "A loss that is not summed over the replicas",
        r"loss: .* instead of .*, though no module's output differs",
        pipeline, "_result", lambda result, run, labelled, _: result(run, labelled, None),
        layout="dp2"),
]  # fmt: skip
