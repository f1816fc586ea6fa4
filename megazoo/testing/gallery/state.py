"""Bugs in state: what is saved and loaded, master weights, groups of the optimizer, adapters, and
the order of samples after a run is resumed."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from megazoo.checkpoint import loading
from megazoo.checkpoint.source import TensorSource
from megazoo.data.loading import Batches
from megazoo.lora import settings
from megazoo.lora.settings import LoRASettings
from megazoo.optim.adamw import AdamW
from megazoo.optim.base import MASTER
from megazoo.optim.learning_rate import LRSchedule
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.random import derive_seed
from megazoo.testing.gallery.planting import bug, replaced
from megazoo.trainer import loop


def _at_load(change):
    """Call change(model, optimizer) when a checkpoint is loaded."""

    def make(check):
        def changed(checkpoint, optimizer):
            check(checkpoint, optimizer)
            change(optimizer.model, optimizer)

        return changed

    return replaced(loading, "_check_states", make)


@bug(
    "N27",
    "Master weights not loaded",
    r"resume: the master weights of .*: another value than was saved on ranks 0 ",
    layout="dp2:dp2",
    dtype="bfloat16",
    offload=True,
    source="Megatron-Bridge #4082",
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4082",
)
def masters_not_loaded():
    """The weights are loaded, but the fp32 master weights remain those of the new optimizer."""

    def make(states_to_read):
        def without_masters(checkpoint, optimizer):
            for name, entry, tensor, elements in states_to_read(checkpoint, optimizer):
                if tensor is not optimizer.state[entry.name].get(MASTER):
                    yield name, entry, tensor, elements

        return without_masters

    return replaced(loading, "_states_to_read", make)


@bug(
    "N28",
    "Groups of parameters matched by their learning rate only",
    r"resume: .*: learning rate .* and weight decay 0\.1 instead of .* and 0 at step 3 ",
    layout="tp2:tp2",
    source="Megatron-LM #4705",
    link="https://github.com/NVIDIA/Megatron-LM/issues/4705",
)
def groups_matched_by_rate():
    """After loading, a group has the weight decay of the first group with its learning rate."""

    def change(_, optimizer):
        groups = optimizer.param_groups
        for group in groups:
            same = next(each for each in groups if each["lr"] == group["lr"])
            group["weight_decay"] = same["weight_decay"]

    return _at_load(change)


@bug(
    "N29",
    "Moments shifted when they are sharded in another way",
    r"resume: the exp_avg of .*: another value than was saved on ranks 0 ",
    layout="tp2:dp2+zero",
    source="Megatron-LM #5077",
    link="https://github.com/NVIDIA/Megatron-LM/issues/5077",
)
def moments_shifted():
    """The range of elements that a replica reads begins one element late."""

    def make(read_range):
        def shifted(self, name, tensor, elements, entry, ctx):
            read_range(self, name, tensor, elements, entry, ctx)
            if name.endswith("exp_avg") and tensor.numel() < entry.parameter.numel():
                tensor.copy_(tensor.roll(1))

        return shifted

    return replaced(TensorSource, "read_range", make)


@bug(
    "N30",
    "Moments that are zero after resuming",
    r"resume: the exp_avg of .*: another value than was saved on ranks 0 ",
    layout="tp2:tp2",
    source="transformers #48569",
    link="https://github.com/huggingface/transformers/issues/48569",
)
def moments_not_loaded():
    """The moments of a new optimizer are kept, with the old number of steps."""
    return replaced(loading, "_states_to_read", lambda _: lambda *_: iter(()))


@bug(
    "N31",
    "A step that creates the state moves the weights",
    r"optimizer: the weights of .* are not those of AdamW, in one process either",
    layout="dp2",
    source="Megatron-LM #5976",
    link="https://github.com/NVIDIA/Megatron-LM/issues/5976",
)
def step_in_the_constructor():
    """The optimizer creates its state with a step on zero gradients, which decays the weights."""

    def make(init):
        def initialised(self, *arguments, **options):
            init(self, *arguments, **options)
            self.steps += 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(1 - group["lr"] * group["weight_decay"])

        return initialised

    return replaced(AdamW, "__init__", make)


@bug(
    "N33",
    "The frozen base is trained with the adapters",
    r"parameter .*: it is trained, though only adapters should be",
    layout="dp2",
    lora_rank=2,
    source="torchtitan #4267",
    link="https://github.com/pytorch/torchtitan/issues/4267",
)
def base_trained():
    """Parameters become trainable again after adapters are added."""

    def make(attach):
        def attached(self, model, seed=None):
            attach(self, model, seed)
            model.requires_grad_(True)

        return attached

    return replaced(LoRASettings, "attach", make)


@bug(
    "N34",
    "Adapters that each replica draws for itself",
    r"it ends with .*: ranks disagree in step: what was written into .*\.lora\..*\.A is one tensor",
    layout="dp2",
    model="llama",
    lora_rank=2,
    source="transformers #48792",
    link="https://github.com/huggingface/transformers/issues/48792",
)
def adapters_of_each_replica():
    """The seed of an adapter depends on the rank. The optimizer itself raises an error."""

    def make(_):
        def seed_of_rank(*parts):
            rank = dist.get_rank() if dist.is_initialized() else 0
            return derive_seed(*parts, rank) if rank else derive_seed(*parts)

        return seed_of_rank

    return replaced(settings, "derive_seed", make)


@bug(
    "N35",
    "Dropout drawn in another way after resuming",
    r"resume: the dropout of step 3 has other seeds on rank 0 ",
    layout="tp2:tp2",
    source="Megatron-Bridge #5255",
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5255",
)
def dropout_after_resuming():
    """Loading draws from the generator of the dropout."""

    def change(model, _):
        model.seed = derive_seed(model.seed, "drawn at load")

    return _at_load(change)


@bug(
    "N36",
    "Samples of a resumed epoch skipped again in the next",
    r"resume: step 4 has other samples on ranks 0 ",
    layout="dp2:dp2",
    source="Megatron-Bridge #4601",
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4601",
)
def offset_in_each_epoch():
    """The samples that the first epoch skips after resuming are also skipped in later epochs."""

    def make(ahead):
        def skipping(self, consumed, workers):
            size, first = len(self.blend), consumed[0]
            epochs = [start // size - first // size for start in consumed]
            moved = [s + n * (first % size) for s, n in zip(consumed, epochs, strict=True)]
            return ahead(self, moved, workers)

        return skipping

    return replaced(Batches, "ahead", make)


@bug(
    "N37",
    "Weights loaded into a copy of another dtype",
    r"resume: the weights of layers\.0\.attention\.qkv\.weight: another value than was saved on ",
    layout="tp2:pp2",
    dtype="bfloat16",
    source="NeMo Automodel #2682",
    link="https://github.com/NVIDIA-NeMo/Automodel/issues/2682",
)
def weights_into_a_copy():
    """A weight is read into a copy in fp32."""

    def make(read_into):
        def copied(self, name, destination, spec, ctx):
            if name.startswith("layers.0.attention.qkv.weight"):
                destination = destination.to(torch.float64)
            read_into(self, name, destination, spec, ctx)

        return copied

    return replaced(TensorSource, "read_into", make)


@bug(
    "N40",
    "Adapters of gate and up swapped when they are loaded",
    r"resume: the weights of .*\.lora\.(gate|up)\.B: another value than was saved on ",
    layout="tp2:dp2",
    model="llama",
    lora_rank=2,
    source="Megatron-Bridge #5376",
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5376",
)
def halves_of_adapters():
    """The factors B of gate and up have each other's names."""
    names = {".lora.gate.B": ".lora.up.B", ".lora.up.B": ".lora.gate.B"}

    def make(read_into):
        def swapped(self, name, destination, spec, ctx):
            ends = (end for end in names if name.endswith(end))
            end = next(ends, "")
            read_into(self, name.removesuffix(end) + names.get(end, ""), destination, spec, ctx)

        return swapped

    return replaced(TensorSource, "read_into", make)


@bug(
    "N45",
    "A warm-up that begins with the learning rate 0",
    r"resume: .*: learning rate 0\.00133333 and weight decay .* instead of 0\.002 and ",
    layout="tp2:tp2",
    source="gpt-neox #1379",
    link="https://github.com/EleutherAI/gpt-neox/issues/1379",
)
def warm_up_from_zero():
    """The learning rate of a step is that of the step before."""

    def make(rate):
        return lambda self, step: rate(self, step - 1) if step > 1 else 0.0

    return replaced(LRSchedule, "rate", make)


@bug(
    "",
    "Number of updates that is not loaded",
    r"resume: the number of updates is 0 instead of 2 on ranks 0 ",
    layout="tp2:tp2",
)
def updates_not_loaded():
    """The bias corrections of AdamW begin again after loading."""

    def make(checked):
        def forgetful(values, *arguments):
            values["optimizer_steps"] = 0
            return checked(values, *arguments)

        return forgetful

    return replaced(loading, "checked_state", make)


@bug(
    "",
    "Loss scale that is not loaded",
    r"resume: the loss scale is .* instead of .* after step 3 on ranks 0 ",
    layout="tp2:tp2",
)
def loss_scale_not_loaded():
    """The loss scale and its counters begin again after loading."""
    return replaced(LossScale, "load", lambda _: lambda self, state: None)


@bug(
    "",
    "A value of the config that is lost when a run is resumed",
    r"resume: loss: .* instead of .* at step 3 on ranks 0 ",
    layout="tp2:tp2",
)
def value_of_the_config_lost():
    """The norms have another epsilon after loading."""

    def change(model, _):
        for module in model.modules():
            if hasattr(module, "eps"):
                module.eps = 1.0

    return _at_load(change)


@bug(
    "",
    "Moments that begin again at the first step after resuming",
    r"resume: the (weights|exp_avg) of .*: differs after step 3 on ranks 0 ",
    layout="tp2:tp2",
)
def moments_begin_again():
    """The first step after loading sets the moments to zero."""
    fresh = set()

    def make(step):
        def forgetful(self, closure=None):
            if id(self) in fresh:
                fresh.discard(id(self))
                for state in self.state.values():
                    state["exp_avg"].zero_()
            return step(self, closure)

        return forgetful

    @contextmanager
    def planted():
        loads = _at_load(lambda _, optimizer: fresh.add(id(optimizer)))
        with loads, replaced(AdamW, "step", make):
            yield

    return planted()


@bug(
    "",
    "Dropout of a resumed program that begins with the first step",
    r"program: the resumed run has other dropout seeds on rank 0",
    layout="tp2:tp2",
)
def steps_counted_from_the_start():
    """The program does not pass the number of the step to the model."""

    def make(train):
        def without_steps(run, model, *arguments):
            train_batch = model.train_batch
            model.train_batch = lambda *batch, step, **options: train_batch(*batch, **options)
            train(run, model, *arguments)

        return without_steps

    return replaced(loop, "train_steps", make)
