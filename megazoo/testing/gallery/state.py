"""Bugs in state: what is saved and loaded, master weights, groups of the optimizer, adapters, and
the order of samples after a run is resumed."""

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
from megazoo.testing.gallery.planting import BUGS, Bug, then, without_call
from megazoo.trainer import loop


def without_masters(states_to_read, checkpoint, optimizer):
    """The weights are loaded, but the fp32 master weights remain those of the new optimizer."""
    for name, entry, tensor, elements in states_to_read(checkpoint, optimizer):
        if tensor is not optimizer.state[entry.name].get(MASTER):
            yield name, entry, tensor, elements


def match_groups_by_rate(optimizer):
    """After loading, a group has the weight decay of the first group with its learning rate."""
    for group in optimizer.param_groups:
        same = next(each for each in optimizer.param_groups if each["lr"] == group["lr"])
        group["weight_decay"] = same["weight_decay"]


def draw_at_load(optimizer):
    optimizer.model.seed = derive_seed(optimizer.model.seed, "drawn at load")


def change_epsilon(optimizer):
    """The norms have another epsilon after loading."""
    for module in optimizer.model.modules():
        if hasattr(module, "eps"):
            module.eps = 1.0


def mark_as_loaded(optimizer):
    optimizer.just_loaded = True


def moments_begin_again(step, self, closure=None):
    if self.__dict__.pop("just_loaded", False):
        for state in self.state.values():
            state["exp_avg"].zero_()
    return step(self, closure)


def shifted_range(read_range, self, name, tensor, elements, entry, ctx):
    """The range of elements that a replica reads begins one element late."""
    read_range(self, name, tensor, elements, entry, ctx)
    if name.endswith("exp_avg") and tensor.numel() < entry.parameter.numel():
        tensor.copy_(tensor.roll(1))


def step_on_zeros(optimizer):
    """The optimizer creates its state with a step on zero gradients, which decays the weights."""
    optimizer.steps += 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.mul_(1 - group["lr"] * group["weight_decay"])


def seed_of_rank(derive, *parts):
    rank = dist.get_rank() if dist.is_initialized() else 0
    return derive(*parts, rank) if rank else derive(*parts)


def skipping_in_each_epoch(ahead, self, consumed, workers):
    size, first = len(self.blend), consumed[0]
    epochs = [start // size - first // size for start in consumed]
    moved = [s + n * (first % size) for s, n in zip(consumed, epochs, strict=True)]
    return ahead(self, moved, workers)


def read_into_a_copy(read_into, self, name, destination, spec, ctx):
    if name.startswith("layers.0.attention.qkv.weight"):
        destination = destination.to(torch.float64)
    read_into(self, name, destination, spec, ctx)


def gate_and_up_swapped(read_into, self, name, destination, spec, ctx):
    """The factors B of gate and up have each other's names."""
    names = {".lora.gate.B": ".lora.up.B", ".lora.up.B": ".lora.gate.B"}
    end = next((end for end in names if name.endswith(end)), "")
    read_into(self, name.removesuffix(end) + names.get(end, ""), destination, spec, ctx)


def without_updates(checked_state, values, *given):
    values["optimizer_steps"] = 0
    return checked_state(values, *given)


def without_steps(train, run, model, *arguments):
    """The program does not pass the number of the step to the model."""
    train_batch = model.train_batch
    model.train_batch = lambda *batch, step, **options: train_batch(*batch, **options)
    train(run, model, *arguments)


# loading._check_states(checkpoint, optimizer) is called when a checkpoint is loaded.
BUGS += [
    Bug("N27", "Master weights not loaded",
        r"resume: the master weights of .*: another value than was saved on ranks 0 ",
        loading, "_states_to_read", without_masters,
        layout="dp2:dp2", dtype="bfloat16", offload=True,
        source="Megatron-Bridge #4082",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4082"),
    Bug("N28", "Groups of parameters matched by their learning rate only",
        r"resume: .*: learning rate .* and weight decay 0\.1 instead of .* and 0 at step 3 ",
        loading, "_check_states", then(match_groups_by_rate, 1), layout="tp2:tp2",
        source="Megatron-LM #4705", link="https://github.com/NVIDIA/Megatron-LM/issues/4705"),
    Bug("N29", "Moments shifted when they are sharded in another way",
        r"resume: the exp_avg of .*: another value than was saved on ranks 0 ",
        TensorSource, "read_range", shifted_range, layout="tp2:dp2+zero",
        source="Megatron-LM #5077", link="https://github.com/NVIDIA/Megatron-LM/issues/5077"),
    # The moments of a new optimizer are kept, with the old number of steps.
    Bug("N30", "Moments that are zero after resuming",
        r"resume: the exp_avg of .*: another value than was saved on ranks 0 ",
        loading, "_states_to_read", lambda *_: iter(()), layout="tp2:tp2",
        source="transformers #48569",
        link="https://github.com/huggingface/transformers/issues/48569"),
    Bug("N31", "A step that creates the state moves the weights",
        r"optimizer: the weights of .* are not those of AdamW, in one process either",
        AdamW, "__init__", then(step_on_zeros), layout="dp2",
        source="Megatron-LM #5976", link="https://github.com/NVIDIA/Megatron-LM/issues/5976"),
    # Parameters become trainable again after adapters are added.
    Bug("N33", "The frozen base is trained with the adapters",
        r"parameter .*: it is trained, though only adapters should be",
        LoRASettings, "attach", then(lambda model: model.requires_grad_(True), 1),
        layout="dp2", lora_rank=2,
        source="torchtitan #4267", link="https://github.com/pytorch/torchtitan/issues/4267"),
    # The seed of an adapter depends on the rank. The optimizer itself raises an error.
    Bug("N34", "Adapters that each replica draws for itself",
        r"it ends with .*: ranks disagree in step: what was written into .*\.lora\..*\.A is one "
        r"tensor",
        settings, "derive_seed", seed_of_rank, layout="dp2", model="llama", lora_rank=2,
        source="transformers #48792",
        link="https://github.com/huggingface/transformers/issues/48792"),
    # Loading draws from the generator of the dropout.
    Bug("N35", "Dropout drawn in another way after resuming",
        r"resume: the dropout of step 3 has other seeds on rank 0 ",
        loading, "_check_states", then(draw_at_load, 1), layout="tp2:tp2",
        source="Megatron-Bridge #5255",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5255"),
    # The samples that the first epoch skips after resuming are also skipped in later epochs.
    Bug("N36", "Samples of a resumed epoch skipped again in the next",
        r"resume: step 4 has other samples on ranks 0 ",
        Batches, "ahead", skipping_in_each_epoch, layout="dp2:dp2",
        source="Megatron-Bridge #4601",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4601"),
    Bug("N37", "Weights loaded into a copy of another dtype",
        r"resume: the weights of layers\.0\.attention\.qkv\.weight: another value than was saved "
        r"on ",
        TensorSource, "read_into", read_into_a_copy, layout="tp2:pp2", dtype="bfloat16",
        source="NeMo Automodel #2682",
        link="https://github.com/NVIDIA-NeMo/Automodel/issues/2682"),
    Bug("N40", "Adapters of gate and up swapped when they are loaded",
        r"resume: the weights of .*\.lora\.(gate|up)\.B: another value than was saved on ",
        TensorSource, "read_into", gate_and_up_swapped,
        layout="tp2:dp2", model="llama", lora_rank=2,
        source="Megatron-Bridge #5376",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5376"),
    # The learning rate of a step is that of the step before.
    Bug("N45", "A warm-up that begins with the learning rate 0",
        r"resume: .*: learning rate 0\.00133333 and weight decay .* instead of 0\.002 and ",
        LRSchedule, "rate", lambda rate, self, step: rate(self, step - 1) if step > 1 else 0.0,
        layout="tp2:tp2",
        source="gpt-neox #1379", link="https://github.com/EleutherAI/gpt-neox/issues/1379"),
    # The bias corrections of AdamW begin again after loading.
    Bug("", "Number of updates that is not loaded",
        r"resume: the number of updates is 0 instead of 2 on ranks 0 ",
        loading, "checked_state", without_updates, layout="tp2:tp2"),
    # The loss scale and its counters begin again after loading.
    Bug("", "Loss scale that is not loaded",
        r"resume: the loss scale is .* instead of .* after step 3 on ranks 0 ",
        LossScale, "load", without_call, layout="tp2:tp2"),
    Bug("", "A value of the config that is lost when a run is resumed",
        r"resume: loss: .* instead of .* at step 3 on ranks 0 ",
        loading, "_check_states", then(change_epsilon, 1), layout="tp2:tp2"),
    Bug("", "Moments that begin again at the first step after resuming",
        r"resume: the (weights|exp_avg) of .*: differs after step 3 on ranks 0 ",
        AdamW, "step", moments_begin_again, layout="tp2:tp2",
        also=[(loading, "_check_states", then(mark_as_loaded, 1))]),
    Bug("", "Dropout of a resumed program that begins with the first step",
        r"program: the resumed run has other dropout seeds on rank 0",
        loop, "train_steps", without_steps, layout="tp2:tp2"),
]  # fmt: skip
