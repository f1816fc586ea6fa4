"""Bugs in the engine: batches and micro-batches, the pipeline, the mean over tokens, gradient sums
over replicas and between stages."""

import itertools
from contextlib import contextmanager

import torch

from megazoo.engine import pipeline
from megazoo.engine.stage import StageRun
from megazoo.engine.transport import RankTransport
from megazoo.parallel import buckets
from megazoo.parallel.buckets import GradientBuckets
from megazoo.testing.gallery.planting import bug, replaced, replaced_everywhere


def _own_labels(run: StageRun) -> torch.Tensor:
    """Count the labels of a replica's micro-batches."""
    labels = sum(run.model.output_head.label_count(each) for each in run.batches)
    return torch.as_tensor(labels).clamp(min=1).float()


@bug(
    "3",
    "Mean of the micro-batches' means",
    r"loss: .*: it is the mean of the micro-batches' means",
    layout="pp2",
    source="transformers #34191",
    link="https://github.com/huggingface/transformers/pull/34191",
)
def mean_of_micro_batch_means():
    """The loss is the unweighted mean of the micro-batches' means."""

    def make(forward):
        def of_its_own(self, action, train):
            before = self.labelled
            if self.stages[action.stage].last:
                batch, count = self.batches[action.microbatch], len(self.batches)
                own = torch.as_tensor(self.model.output_head.label_count(batch)).clamp(min=1)
                self.labelled = own.float() * count * self.ctx.dp_size
            try:
                forward(self, action, train)
            finally:
                self.labelled = before

        return of_its_own

    return replaced(StageRun, "forward", make)


@bug(
    "4",
    "Mean of the replicas' means",
    r"loss: .*: it is the mean of the replicas' means",
    layout="dp2",
    source="transformers #34242",
    link="https://github.com/huggingface/transformers/issues/34242",
)
def mean_of_replica_means():
    """The loss is the unweighted mean of the replicas' means."""

    def make(init):
        def initialised(self, *arguments, **options):
            init(self, *arguments, **options)
            if self.model.stages[-1].last:
                self.labelled = _own_labels(self) * self.ctx.dp_size

        return initialised

    return replaced(StageRun, "__init__", make)


@bug(
    "5a",
    "Labels counted on each replica alone",
    r"labels: the mean is over \d+ labelled tokens, not \d+",
    layout="dp2",
    source="prime-rl #2562",
    link="https://github.com/PrimeIntellect-ai/prime-rl/pull/2562",
)
def local_label_count():
    """Each replica divides its loss by its own label count, and the results are summed."""

    def make(count_labels):
        return lambda model, batches, group: count_labels(model, batches, None)

    return replaced(pipeline, "count_labels", make)


@bug(
    "5b",
    "Gradients divided by a replica's own labels",
    r"gradient of norm\.bias: differs at step 1 on rank",
    layout="dp2",
    source="torchtitan #2206",
    link="https://github.com/pytorch/torchtitan/pull/2206",
)
def gradients_by_local_labels():
    """The loss is right, but its gradient is divided by the replica's own label count."""

    def make(backward):
        def scaled(self, action, factor=1.0):
            if self.stages[action.stage].last:
                factor *= float(self.labelled / _own_labels(self)) / self.ctx.dp_size
            backward(self, action, factor)

        return scaled

    return replaced(StageRun, "backward", make)


@bug(
    "21a",
    "Loss scale applied twice",
    r"loss scale: every gradient is 1024 x what it should be",
    layout="dp2",
    source="slime #1842",
    link="https://github.com/THUDM/slime/pull/1842",
)
def loss_scale_twice():
    """The loss is multiplied by the loss scale twice, but gradients are divided by it once."""

    def make(init):
        def initialised(self, *arguments, loss_scale=1.0, **options):
            init(self, *arguments, loss_scale=loss_scale**2, **options)

        return initialised

    return replaced(StageRun, "__init__", make)


@bug(
    "2a",
    "Tied embedding's gradient counted twice",
    r"tie: the gradient of embedding\.weight, which stages share, is 2 x what it should be",
    layout="pp2",
    source="pytorch #180952",
    link="https://github.com/pytorch/pytorch/issues/180952",
)
def tied_gradient_twice():
    """The gradients of a tied embedding are summed between the stages twice."""

    def twice(between):
        def summed(tensor, *arguments):
            between(tensor, *arguments)
            between(tensor, *arguments)

        return summed

    return replaced_everywhere("sum_between_stages", twice)


@bug(
    "2b",
    "Tied embedding's gradient on one stage only",
    r"tie: the gradient of embedding\.weight, which stages share, differs at",
    layout="pp2",
    source="uw-syfi/piper #13",
    link="https://github.com/uw-syfi/piper/issues/13",
)
def tied_gradient_of_one_stage():
    """The gradients of a tied embedding are not summed between the stages."""
    return replaced_everywhere("sum_between_stages", lambda _: lambda *_: None)


@bug(
    "2c",
    "Part of a tied embedding's gradient, with a distributed optimizer",
    r"tie: the gradient of embedding\.weight, which stages share, differs at",
    layout="pp2dp2+zero",
    source="Megatron-LM #844",
    link="https://github.com/NVIDIA/Megatron-LM/issues/844",
)
def tied_gradient_after_sharing():
    """The gradient of a tied embedding is reduced over the replicas before it is summed between the
    stages."""

    def make(init):
        def initialised(self, parameters, ctx, bucket_elements=None, late=(), **options):
            init(self, parameters, ctx, bucket_elements, **options)

        return initialised

    return replaced(GradientBuckets, "__init__", make)


@bug(
    "22",
    "Sum over replicas before the last micro-batch's gradient",
    r"gradient of norm\.bias: differs at step 1 on ranks 0",
    layout="dp2",
    source="DeepSpeed #7985",
    link="https://github.com/deepspeedai/DeepSpeed/pull/7985",
)
@contextmanager
def sum_before_the_last_micro_batch():
    """The gradient sum of a bucket starts and completes after the first micro-batch."""

    def make_start(start):
        return lambda self, backwards, deferred=(): start(self, 1, deferred)

    def make_launch(launch):
        def launched(self, stop):
            launch(self, stop)
            while self.works:  # a late sum would include later gradients
                self.works.pop(0).wait()

        return launched

    def make_received(received):
        def noted(self, parameter):
            index, _ = self.place[parameter]
            if self.missing[index : index + 1] != [0]:  # an extra gradient raises an error
                received(self, parameter)

        return noted

    start = replaced(GradientBuckets, "start", make_start)
    noted = replaced(GradientBuckets, "received", make_received)
    with start, noted, replaced(GradientBuckets, "_launch", make_launch):
        yield


@bug(
    "23",
    "A replica without the sum of one bucket",
    r"gradient of norm\.bias: differs at step 1 on rank 1 ",
    layout="dp2",
    source="pytorch #69031",
    link="https://github.com/pytorch/pytorch/issues/69031",
)
def replica_without_a_sum():
    """One replica takes part in a bucket's all-reduce but discards the result."""

    def make(all_reduce):
        def lost(tensor, group, **options):
            kept = tensor.clone() if group is not None and group.rank() == 1 else tensor
            return all_reduce(kept, group, **options)

        return lost

    return replaced(buckets, "all_reduce", make)


@bug(
    "26",
    "Backward in another order of micro-batches than the forward's",
    r"gradient of layers\.\d\..*: differs at step 1 on rank 0 ",
    layout="pp2",
    source="pytorch #127796",
    link="https://github.com/pytorch/pytorch/pull/127796",
)
def backward_in_another_order():
    """A received gradient is used for the micro-batch with the latest forward pass."""

    def make(backward):
        def turned(self, action, factor=1.0):
            stage, own = action.stage, (action.stage, action.microbatch)
            if not self.stages[stage].last:
                latest = [key for key in self.graphs if key[0] == stage][-1]
                self.graphs[own], self.graphs[latest] = self.graphs[latest], self.graphs[own]
            backward(self, action, factor)

        return turned

    return replaced(StageRun, "backward", make)


@bug(
    "27",
    "A receive buffer used again before it was read",
    r"gradient of layers\..*: differs at step 1 on rank",
    layout="pp2+gpipe",
    source="DeepSpeed #2800",
    link="https://github.com/deepspeedai/DeepSpeed/issues/2800",
)
def one_receive_buffer():
    """All micro-batches are received into the same memory."""

    def make(empty_input):
        def same(self, microbatch):
            if not hasattr(self, "received_into"):
                self.received_into = empty_input(self, microbatch)
            return self.received_into.data  # .data hides writes from autograd

        return same

    return replaced(RankTransport, "_empty_input", make)


@bug(
    "",
    "A loss that is not summed over the replicas",
    r"loss: .* instead of .*, though no module's output differs",
    layout="dp2",
)
@contextmanager
def loss_of_the_last_rank():
    """The loss is not summed over the replicas; its gradient is right."""
    calls = itertools.count()

    def make(all_reduce):
        def forgetful(tensor, group, **options):
            if next(calls) % 2 == 0:  # even calls sum labels, odd calls the loss
                all_reduce(tensor, group, **options)

        return forgetful

    with replaced(pipeline, "all_reduce", make):
        yield
