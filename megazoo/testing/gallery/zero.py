"""Bugs in gradients and parameters that are sharded over the replicas: ZeRO-2 and ZeRO-3."""

from megazoo.engine.stage import StageRun
from megazoo.models.gpt2 import GPT2
from megazoo.optim import clip, muon
from megazoo.optim.whole_matrices import WholeMatrices
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.storage import Flat, ShardedParameters, storage_of
from megazoo.testing.gallery.engine import EARLY_SUMS
from megazoo.testing.gallery.planting import BUGS, Bug, then, without_call
from megazoo.testing.gallery.sums import bucket_per_parameter, share_an_mlp

SMALL = 1024  # elements


def walked_unaligned(flat):
    """The tensor has room for aligned parameters, and they are taken from it one right after the
    other. The ranges that the optimizer updates are then those of other parameters."""
    start = 0
    for parameter, _ in flat.members:
        end = start + parameter.numel()
        parameter.data = flat._whole[start:end].view(parameter.shape)
        start = end


def small_ones_not_waited_for(use, self, module, name):
    """The forward uses small parameters before the ranges of other replicas have arrived."""
    parameter = getattr(module, name)
    unit, *_ = self.place.get(parameter, (None,))
    is_new = unit is not None and not self._there.get(unit)
    use(self, module, name)
    for flat in self.flats[unit] if is_new else ():
        if flat.size < SMALL:
            flat._whole.zero_()
            flat._mine().copy_(flat.own)
    return parameter


def no_matrices_at_rest(names_of, model):
    """A parameter that rests as a range counts as a vector, so AdamW trains it."""
    return set() if storage_of(model) else names_of(model)


def momentum_of_each_micro_batch(apply, self, function, give, take):
    """The momentum of a matrix is updated for each of two micro-batches instead of once per
    step."""

    def twice(matrix):
        if self.replicas.size > 1:
            give(matrix)
        return give(matrix)

    apply(self, function, twice, take)


def shard_of_the_last_backward(arrive, self):
    """Each backward of a step is taken for the first one, whose shard replaces that of the step
    before."""
    self.shards.pop(self.leaving[0][0], None)
    arrive(self)


def overwritten(backward, self, action, factor=1.0):
    """Each backward of a schedule writes into the gradients instead of adding to them, as if they
    had left after the previous one."""
    buckets = self.model.engine.gradients.buckets
    for parameter in buckets.place if buckets.zero > 1 else ():
        parameter.grad = None
    backward(self, action, factor)


def experts_times_ep(buckets):
    """Gradients of experts are averaged over their own replicas only, though tokens of all ep ranks
    are in them."""
    whole = buckets.ctx.token_axis
    for parameter in buckets.place:
        axis = buckets.axis_of(parameter)
        if axis is not whole and buckets.has(parameter):
            buckets.own(parameter).mul_(whole.size // axis.size)


def range_of_the_next(store, self):
    """A replica stores the range of the next one."""
    store(self)
    self.own.copy_(self._whole.chunk(self.axis.size)[(self.axis.rank + 1) % self.axis.size])


BUGS += [
    # The tensor is made for aligned parameters, but its parameters follow each other.
    Bug("Z1", "A tensor of aligned parameters that is read without the alignment",
        r"weights of .*: differ after step 1 on ranks 0 .*, though no gradient does",
        Flat, "finish", then(walked_unaligned), layout="dp2+zero3",
        source="DeepSpeed #8158", link="https://github.com/deepspeedai/DeepSpeed/pull/8158"),
    Bug("Z2", "Muon that finds no matrices among sharded parameters",
        r"weights of .*: differ after step 1 on ranks 0 .*, though no gradient does",
        muon, "linear_names", no_matrices_at_rest, layout="dp2+zero3", optimizer="muon",
        source="DeepSpeed #8438", link="https://github.com/deepspeedai/DeepSpeed/pull/8438"),
    Bug("Z3", "Muon's momentum updated in each micro-batch",
        r"weights of .*: differ after step \d .*, though no gradient does",
        WholeMatrices, "apply", momentum_of_each_micro_batch,
        layout="dp2+zero3", optimizer="muon",
        source="DeepSpeed #8443", link="https://github.com/deepspeedai/DeepSpeed/issues/8443"),
    Bug("Z4", "Gradients of the last micro-batch only, with ZeRO-2",
        r"gradient of norm\.bias: differs at step 1 on rank",
        GradientBuckets, "_arrive", shard_of_the_last_backward, layout="dp2+zero2",
        source="open-instruct #1498", link="https://github.com/allenai/open-instruct/pull/1498"),
    Bug("Z5", "A layer that is used twice, whose gradient leaves after its first use",
        r"gradient of layers\.1\.mlp\.\S+: differs at step 1 on rank",
        GPT2, "__init__", then(share_an_mlp), layout="dp2+zero2",
        also=[(GradientBuckets, "__init__", bucket_per_parameter), *EARLY_SUMS],
        source="DeepSpeed #8224", link="https://github.com/deepspeedai/DeepSpeed/issues/8224"),
    Bug("Z6", "Forward with the weights from before the step",
        r"weights of .*: differ after step 1 on ranks 0 .*, though no gradient does",
        ShardedParameters, "release", without_call, layout="dp2+zero3+per-step",
        source="Megatron-LM #6336", link="https://github.com/NVIDIA/Megatron-LM/pull/6336"),
    Bug("Z7", "Gradients overwritten by the next backward of a schedule",
        r"gradient of norm\.bias: differs at step 1 on rank",
        StageRun, "backward", overwritten, layout="pp2dp2+zero2+per-step",
        source="Megatron-LM #6357", link="https://github.com/NVIDIA/Megatron-LM/pull/6357"),
    Bug("Z8", "Gradients of experts times ep, with sharded parameters",
        r"gradient of layers\.\d\.moe\.\S+: differs at step 1 on rank",
        GradientBuckets, "wait_for_sums", then(experts_times_ep),
        layout="dp4ep2+zero3", model="mixtral", settings={"layers": 2},
        source="Megatron-LM #5956", link="https://github.com/NVIDIA/Megatron-LM/pull/5956"),
    Bug("", "Small parameters used before they have arrived",
        r"module norm: its output differs on ranks 0 ",
        ShardedParameters, "use", small_ones_not_waited_for, layout="cp2+zero3"),
    Bug("", "The range of another replica stored",
        r"parameter .*: another initial value on ranks 0 ",
        Flat, "store", range_of_the_next, layout="tp2dp2+zero3"),
    Bug("", "Gradient norm of this replica's shards",
        r"gradient norm: .* instead of .* at step 1, though no gradient differs",
        clip, "all_reduce_over", lambda sum_, total, axes: sum_(total, axes[:2]),
        layout="dp2+zero2"),
]  # fmt: skip
