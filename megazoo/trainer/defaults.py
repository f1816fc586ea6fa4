"""Defaults of the settings that depend on the model: lengths, batches, steps and learning rates."""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from megazoo.families.published import pretraining_defaults
from megazoo.families.registry import FAMILIES, family_of, presets, tiny_preset
from megazoo.models.counts import parameter_count
from megazoo.settings import flag_of
from megazoo.trainer.adapters import NO_WEIGHTS, Weights
from megazoo.trainer.options import Options

LONGEST = 4096  # tokens of a sequence, for models with more positions
DEMO_STEPS = 600
# Differences of rounding grow where the rate is near its peak after the first hundred steps. With
# this rate and a linear decay, layouts differ by 3e-6; with 6e-4 and a cosine decay, by up to 6e-5.
DEMO_LR = 1e-3
DEMO_PARAMETERS = 10_000_000  # larger models are not a demo, regardless of the preset
SIZES = ("layers", "hidden_size", "heads", "ffn_size")  # they determine the learning rate
FINE_TUNING_LR, LORA_LR = 1e-5, 2e-4
FINE_TUNING_BATCH = 32
FEW_STEPS = 10  # a run of fewer steps gets a smaller default batch, or a warning
ENOUGH_STEPS, MOST_EPOCHS = 100, 3  # of fine-tuning
MUON_LR = 2e-2


@dataclass(frozen=True)
class Defaults:
    """Settings of a run that neither the user nor a resumed run sets.

    steps, epochs: one of them is set. warmup: fraction of the steps, at most 2000 steps. schedule:
    decay of the learning rate. rate: origin of the learning rate, printed at the start. demo:
    whether these are the demo's defaults.
    fine_tuning: whether the batch and the epochs follow from the rows: see `fit_to_rows`.
    """

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    lr: float
    rate: str
    warmup: float = 0.03
    schedule: str = "cosine"
    steps: int | None = None
    epochs: int | None = None
    demo: bool = False
    fine_tuning: bool = False


def defaults_for(options: Options, config, weights: Weights = NO_WEIGHTS) -> Defaults:
    """Return the defaults of a run: of the demo, where a tiny preset starts from random weights; of
    fine-tuning, where weights are loaded; otherwise of the preset's pretraining.

    options: as given. config: the model's. weights: what the run starts from.
    """
    name = options.model.preset or tiny_preset(options.model.model or "gpt2")
    longest = min(FAMILIES[family_of(config)].longest_sequence(config), LONGEST)
    length = options.training.seq_length or longest
    is_mock = options.data.data == ("mock",)
    duration: dict[str, Any] = {"steps": DEMO_STEPS} if is_mock else {"epochs": 1}
    if weights.described:
        is_lora = weights.settings or options.lora.lora_load
        lr, kind = (LORA_LR, "LoRA") if is_lora else (FINE_TUNING_LR, "all weights")
        return Defaults(
            longest,
            1,
            FINE_TUNING_BATCH,
            lr,
            f"for fine-tuning, {kind}",
            fine_tuning=True,
            **duration,
        )
    parameters, preset = parameter_count(config), presets().get(name)
    if name.endswith("-tiny") and parameters < DEMO_PARAMETERS:
        demo: dict[str, Any] = {"warmup": 0.1, "schedule": "linear", "steps": DEMO_STEPS}
        demo["demo"] = True
        return Defaults(min(128, longest), 16, 32, DEMO_LR, "for the demo", **demo)
    same = preset and all(getattr(preset, size) == getattr(config, size) for size in SIZES)
    usual = pretraining_defaults(parameters, name if same else None, length)
    return Defaults(longest, 1, usual.global_batch_size, usual.lr, usual.source, **duration)


def of_rows(options: Options, defaults: Defaults) -> set[str]:
    """Return the names of the settings that `fit_to_rows` will set, before `fill_in` sets them for
    plans. They depend on the number of rows, which is known when the data is open."""
    training = options.training
    if not defaults.fine_tuning or not (training.epochs or defaults.epochs) or training.steps:
        return set()
    names = ["epochs"] if training.rampup_batch_size else ["global_batch_size", "epochs"]
    return {name for name in names if getattr(training, name) is None}


def fit_to_rows(options: Options, names: set[str], rows: int) -> None:
    """Set the global batch and the epochs of fine-tuning from the number of rows.

    The run has one epoch, or up to MOST_EPOCHS if the data gives fewer than ENOUGH_STEPS steps. The
    batch is the largest power of two up to FINE_TUNING_BATCH with at least FEW_STEPS steps, rounded
    up to a multiple of the rows that all replicas compute together.

    Args:
        options: The settings.
        names: Names of the settings to set: the result of `of_rows`.
        rows: Number of rows of the training data.
    """
    training = options.training
    is_free = "global_batch_size" in names
    if "epochs" in names:
        batch = FINE_TUNING_BATCH if is_free else training.global_batch_size
        training.epochs = min(MOST_EPOCHS, math.ceil(ENOUGH_STEPS * batch / rows))
    if is_free:
        together = options.replicas * training.micro_batch_size
        powers = (2**n for n in range(FINE_TUNING_BATCH.bit_length()))
        sizes = [math.ceil(size / together) * together for size in powers]
        most = math.ceil((training.epochs or 1) * rows / (FEW_STEPS - 1)) - 1  # rows for FEW_STEPS
        fitting = [size for size in sizes if size <= most]
        training.global_batch_size = max(fitting, default=sizes[0])


def fill_in(
    options: Options,
    defaults: Defaults,
    weights: Weights = NO_WEIGHTS,
    later: Container[str] = (),
) -> list[str]:
    """Set the settings that neither the user nor a resumed run has set; return the important ones
    as flags, except those in `later`, the result of `of_rows`.

    The global batch is a multiple of the replicas, and the micro-batch divides the batch of a
    replica. So the same defaults train the same run on any number of ranks that divides the batch.
    """
    training, optimizer = options.training, options.optimizer
    filled = []

    def fill(group, name: str, value) -> None:
        if getattr(group, name) is None and value is not None:
            setattr(group, name, value)
            if name not in later:
                filled.append(f"{flag_of(name)} {value}")

    fill(training, "seq_length", defaults.seq_length)
    together = options.replicas * (training.micro_batch_size or 1)
    rows = math.ceil(defaults.global_batch_size / together) * together
    fill(training, "global_batch_size", rows)
    share = max(1, training.global_batch_size // options.replicas)
    sizes = range(1, defaults.micro_batch_size + 1)
    fill(training, "micro_batch_size", max(size for size in sizes if share % size == 0))
    if training.steps is None:
        fill(training, "epochs", defaults.epochs)
    if not training.epochs:
        fill(training, "steps", defaults.steps)
    fill(optimizer, "lr", defaults.lr)
    if filled and filled[-1].startswith("--lr "):
        filled[-1] += f" ({defaults.rate})"
    if optimizer.muon_lr is None and not weights.described:
        optimizer.muon_lr = MUON_LR
    if optimizer.lr_schedule is None:
        optimizer.lr_schedule = defaults.schedule
    if optimizer.min_lr is None:
        optimizer.min_lr = optimizer.lr / 10
    return filled
