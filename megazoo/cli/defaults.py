"""Defaults of the settings that depend on the model: lengths, batches, steps and learning rates."""

from dataclasses import dataclass

from megazoo.cli.adapters import NO_WEIGHTS, Weights
from megazoo.cli.options import Options
from megazoo.errors import UserError
from megazoo.models.counts import parameter_count
from megazoo.models.published import pretraining_defaults
from megazoo.models.registry import FAMILIES, family_of, presets, tiny_preset

LONGEST = 4096  # tokens of a sequence, for models with more positions
DEMO_STEPS = 400
DEMO_PARAMETERS = 10_000_000  # above them the demo's learning rate is too high
FINE_TUNING_LR, LORA_LR = 1e-5, 2e-4
MUON_LR = 2e-2


@dataclass(frozen=True)
class Defaults:
    """Settings of a run where neither the user nor a resumed run sets them.

    steps, epochs: one of them. warmup: fraction of the steps, of which 2000 at most warm up.
    rate: where the learning rate comes from, for the first lines of a run.
    """

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    lr: float
    rate: str
    warmup: float = 0.03
    steps: int | None = None
    epochs: int | None = None


def defaults_for(options: Options, config, weights: Weights = NO_WEIGHTS) -> Defaults:
    """Return the defaults of a run: of the demo, where a tiny preset starts from random weights; of
    fine-tuning, where weights are loaded; otherwise those that the preset was pretrained with.

    options: as given. config: the model's. weights: what the run starts from.
    """
    name = tiny_preset(options.model.preset or options.model.model or "gpt2")
    longest = min(FAMILIES[family_of(config)].longest_sequence(config), LONGEST)
    length = options.training.seq_length or longest
    is_mock = options.data.data == ("mock",)
    duration = {"steps": DEMO_STEPS} if is_mock else {"epochs": 1}
    if weights.described:
        is_lora = weights.settings or options.lora.lora_load
        lr, kind = (LORA_LR, "LoRA") if is_lora else (FINE_TUNING_LR, "all weights")
        return Defaults(longest, 1, 32, lr, f"for fine-tuning, {kind}", **duration)
    known = name if presets().get(name) == config else None
    usual = pretraining_defaults(parameter_count(config), known, length)
    if name.endswith("-tiny"):
        demo = {"warmup": 0.25, "steps": DEMO_STEPS}
        lr, source = usual.lr, usual.source
        if parameter_count(config) < DEMO_PARAMETERS:
            lr, source = 5e-3, "for the demo"
        return Defaults(min(128, longest), 16, 32, lr, source, **demo)
    return Defaults(longest, 1, usual.global_batch_size, usual.lr, usual.source, **duration)


def fill_in(options: Options, defaults: Defaults, weights: Weights = NO_WEIGHTS) -> list[str]:
    """Set what neither the user nor a resumed run has set; return the flags of it that matter, as a
    command line has them. UserError for Muon on loaded weights without a rate."""
    training, optimizer = options.training, options.optimizer
    filled = []

    def fill(group, name: str, value) -> None:
        if getattr(group, name) is None and value is not None:
            setattr(group, name, value)
            filled.append(f"--{name.replace('_', '-')} {value}")

    fill(training, "seq_length", defaults.seq_length)
    fill(training, "micro_batch_size", defaults.micro_batch_size)
    fill(training, "global_batch_size", defaults.global_batch_size)
    if training.steps is None:
        fill(training, "epochs", defaults.epochs)
    if not training.epochs:
        fill(training, "steps", defaults.steps)
    fill(optimizer, "lr", defaults.lr)
    if filled and filled[-1].startswith("--lr "):
        filled[-1] += f" ({defaults.rate})"
    if optimizer.muon_lr is None and optimizer.optimizer == "muon" and weights.described:
        raise UserError(
            "fine-tuning with Muon needs --muon-lr: its default for random weights, "
            f"{MUON_LR}, would destroy the loaded ones"
        )
    if optimizer.muon_lr is None:
        optimizer.muon_lr = MUON_LR
    if optimizer.min_lr is None:
        optimizer.min_lr = optimizer.lr / 10
    return filled
