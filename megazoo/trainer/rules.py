"""Check the settings of a run before anything is built."""

from dataclasses import fields, replace
from pathlib import Path

from megazoo.checkpoint.locks import run_lock
from megazoo.checkpoint.places import is_step_name
from megazoo.data.sources import names_in, source_named
from megazoo.engine.auxiliary import check_joint_losses, declared_losses
from megazoo.errors import UserError, any_of
from megazoo.families.config import fields_of_training
from megazoo.families.names import check_names
from megazoo.families.registry import FAMILIES, family_of, tiny_preset
from megazoo.formats.hugging_face.export import hugging_face_config
from megazoo.models.counts import whole_model
from megazoo.models.pretrained import open_source, with_labels
from megazoo.models.registry import find_config
from megazoo.models.rules import check_batch, check_layout, check_offload, check_sequence
from megazoo.optim.learning_rate import LR_SCHEDULES, own_options
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.settings import check_value, described, flag_of
from megazoo.trainer.adapters import NO_WEIGHTS, Weights, check_trained
from megazoo.trainer.batch_sizes import BatchSizes
from megazoo.trainer.loss import loss_of
from megazoo.trainer.options import ModelOptions, Options, parts_of
from megazoo.trainer.outputs import OUTPUTS
from megazoo.trainer.outputs.base import check_output, check_writable

LABELS = ("num_labels", "problem_type", "pad_token_id")  # fields of a classifier's config


def settle_steps(
    options: Options,
    warmup: float,
    samples: int | None = None,
    first_step: int = 0,
    consumed: int = 0,
) -> None:
    """Fill in the settings that depend on the number of steps, and check them.

    Args:
        options: The settings; steps, lr_decay_steps and warmup_steps are filled in.
        warmup: Default number of warm-up steps, as a fraction of the steps.
        samples: Samples per epoch. If None and --epochs is set, nothing is filled in yet.
        first_step: Step at which the run resumes; 0 for a new run.
        consumed: Samples before first_step. Their batches may have had another size.

    Raises:
        UserError: The warm-up is longer than the schedule.
    """
    training, optimizer = options.training, options.optimizer
    if training.epochs:
        if samples is None:
            return
        sizes = BatchSizes(training.global_batch_size, training.rampup_batch_size)
        training.steps = first_step + sizes.steps_to(consumed, training.epochs * samples)
    if optimizer.lr_decay_steps is None:
        optimizer.lr_decay_steps = training.steps
    if optimizer.warmup_steps is None:
        # A warm-up of one step starts at the peak, so a run of a few steps also reaches it.
        steps = max(1, int(optimizer.lr_decay_steps * warmup))
        optimizer.warmup_steps = min(steps, 2000, optimizer.lr_decay_steps)
    if optimizer.warmup_steps > optimizer.lr_decay_steps:
        raise UserError(
            f"--warmup-steps {optimizer.warmup_steps} exceeds the "
            f"{optimizer.lr_decay_steps} steps of the learning-rate schedule: use fewer "
            "warm-up steps, or a larger --lr-decay-steps"
        )


def model_config(options: ModelOptions, source=None):
    """Return the config that the options describe, or the config of the source.

    Args:
        options: Settings of the model. With a source they must agree with its config, except for
            the dropout and the balance of experts. A classifier may be built on a language model.
        source: Result of `open_source`, or None.

    Raises:
        UserError: The options contradict the source, or the family has no such setting.
    """
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    given.pop("import_")
    name, preset, dropout = given.pop("model"), given.pop("preset"), given.pop("dropout")
    sizes = {key: value for key, value in given.items() if value is not None}
    labels = given.pop("num_labels")
    saved, path = source and with_labels(source, labels), source and source.path
    base = saved if saved and not preset else find_config(preset or tiny_preset(name or "gpt2"))
    if name and type(find_config(tiny_preset(name))) is not type(base):
        origin = f"preset {preset}" if preset else f"the checkpoint {path}"
        raise UserError(f"{origin} is not a model of the family {name}")
    if "heads" in sizes and getattr(base, "kv_heads", None) == base.heads:
        sizes.setdefault("kv_heads", sizes["heads"])
    if "hidden_size" in sizes and getattr(base, "ffn_size", None) == 4 * base.hidden_size:
        sizes.setdefault("ffn_size", 4 * sizes["hidden_size"])
    if saved and preset and saved.num_labels:  # presets have no labels
        sizes |= {name: getattr(saved, name) for name in LABELS}
    elif labels and not saved:
        sizes["num_labels"] = labels
    unknown = sizes.keys() - {f.name for f in fields(base)}
    if unknown:
        raise UserError(
            f"{flag_of(min(unknown))} cannot be used with this model: "
            f"{type(base).__name__} has no such setting"
        )
    rates = [f.name for f in fields(base) if f.name.endswith("dropout")]
    if dropout is not None:
        sizes |= dict.fromkeys(rates, dropout)
    of_training = fields_of_training(base)
    if saved and "bias" in {sizes.get("router_balance"), getattr(saved, "router_balance", None)}:
        of_training.remove("router_balance")  # only a model with that balance has the bias
    config = replace(base, **sizes)
    for f in fields(config) if saved else ():
        if f.name not in of_training and getattr(config, f.name) != getattr(saved, f.name):
            wanted, found = getattr(config, f.name), getattr(saved, f.name)
            raise UserError(
                f"{flag_of(f.name)} is {wanted}, but {f.name} is {found} in the checkpoint "
                f"{path}: remove the flag or preset that changes it"
            )
    return config


def check_run(
    options: Options, model, config, tokenizer, dp: int, weights: Weights = NO_WEIGHTS
) -> None:
    """Raise UserError if the settings of a run are invalid, and name valid ones.

    Args:
        options: All settings.
        model: Class of the model family.
        config: Config of the model.
        tokenizer: Tokenizer of the data.
        dp: Data-parallel size.
        weights: Initial weights and adapters.
    """
    parallel, training = options.parallel, options.training
    check_offload(options.optimizer.optimizer, parallel.offload_optimizer)
    check_expert_parallel(config, parallel.ep, dp, parallel.cp)
    is_muon, muon_lr = options.optimizer.optimizer == "muon", options.optimizer.muon_lr
    if is_muon and muon_lr is None:
        raise UserError(
            "fine-tuning with Muon needs --muon-lr: the default for random weights, "
            "2e-2, would destroy the loaded weights"
        )
    if is_muon and not muon_lr:
        raise UserError("--muon-lr must be above 0: the learning rate of AdamW is scaled with it")
    layout = parallel.layout(dp)
    check_layout(model, config, layout)
    check_trained(options, config, weights)
    check_batch(training.global_batch_size, training.micro_batch_size, dp)
    sizes = BatchSizes(training.global_batch_size, training.rampup_batch_size)
    sizes.check(training.micro_batch_size * dp)
    count = training.global_batch_size // dp // training.micro_batch_size
    check_joint_losses(declared_losses(whole_model(config)), layout, count)
    for name in ("packing", "separate_documents") if config.num_labels else ():
        if getattr(options.data, name):
            raise UserError(
                f"{flag_of(name)} cannot be used with a classifier (each row is one "
                "text): remove it"
            )
    sources = map(source_named, names_in(options.data.data))
    streamed = next((source for source in sources if source.streamed), None)
    if training.epochs and streamed:
        raise UserError(
            "--epochs cannot be used with streamed data: the number of samples of "
            f"{streamed.name} is unknown. Use --steps instead"
        )
    check_sequence(model, config, training.seq_length)
    # Published tokenizers can have more tokens than the model has rows. Data that contains such a
    # token is an error when a batch is built.
    is_new = weights.described is None
    too_small = is_new and config.vocab_size < tokenizer.vocab_size
    if too_small and options.data.data != ("mock",):
        raise UserError(
            f"--vocab-size {config.vocab_size} is smaller than the vocabulary of the "
            f"tokenizer {tokenizer.source}, {tokenizer.vocab_size} tokens: use --vocab-size "
            f"{tokenizer.vocab_size}"
        )
    _check_loss(options, config, weights)
    if options.optimizer.ema and (weights.settings or options.lora.lora_load):
        raise UserError(f"--ema {options.optimizer.ema} cannot be used with adapters: remove --ema")
    if options.evaluation.eval_tasks:
        _check_tasks(options, config)
    if options.checkpoint.save_format == "dcp":
        _check_dcp(options, model, config, weights)
    _check_outputs(options)
    _check_weights_stay(options, weights)


def check_expert_parallel(config, ep: int, dp: int, cp: int) -> None:
    """Raise UserError if the experts of a model can't be sharded over ep, or if it has none."""
    if ep == 1:
        return
    if dp * cp % ep:
        fits = [size for size in range(1, dp * cp + 1) if dp * cp % size == 0]
        raise UserError(f"--ep {ep} does not divide dp x cp = {dp * cp}: use --ep {any_of(fits)}")
    ctx = ParallelContext(Layout(dp=ep, ep=ep))
    model = FAMILIES[family_of(config)].on_meta(config, ctx)
    if not any(entry.spec.shard_over("ep") for entry in model.entries()):
        raise UserError(
            f"--ep {ep} cannot be used with {family_of(config)}, which has no experts: use --ep 1"
        )


def _check_weights_stay(options: Options, weights: Weights) -> None:
    """Raise UserError if adapters or a classifier would overwrite the weights that they start from.

    A run may resume in its own directory, but adapters always need their base.
    """
    save, resumed = options.checkpoint.save, weights.resumed(options)
    has_adapters = weights.settings or options.lora.lora_load
    if not save or not (has_adapters or weights.has_new_head(options.model.num_labels)):
        return
    for source in (weights.base, weights.adapters):
        if source and source is not resumed:
            path = source.path.resolve()
            if save.resolve() in (path, path.parent if is_step_name(path.name) else path):
                raise UserError(
                    f"--save {save} contains the weights that this run starts from: choose another "
                    "directory"
                )


def _check_dcp(options: Options, model, config, weights: Weights) -> None:
    """Raise UserError if a checkpoint of torch.distributed.checkpoint can't hold the run."""
    parts = {
        "adapters": weights.settings or options.lora.lora_load,
        "the momentum of Muon": options.optimizer.optimizer == "muon",
        "the averages of --ema": options.optimizer.ema,
    }
    for part, there in parts.items():
        if there:
            raise UserError(f"--save-format dcp can't hold {part}: use --save-format shards")
    try:
        hugging_face_config(config)
        check_names(model, (entry.name for entry in whole_model(config).entries()))
    except UserError as error:
        raise UserError(f"--save-format dcp: {error}") from None


def _check_loss(options: Options, config, weights: Weights) -> None:
    """Raise UserError if the loss does not fit the model or the adapters."""
    loss, name = loss_of(options), options.loss.loss
    needs = set(loss.needs) & {"reference", "teacher"} if loss else set()
    if options.loss.reference and not needs:
        raise UserError(f"--reference cannot be used with --loss {name}: remove --reference")
    if options.loss.precompute_reference and not (
        loss and "reference" in needs and loss.rows_together == 2
    ):
        raise UserError(
            f"--precompute-reference cannot be used with --loss {name}: remove "
            "--precompute-reference"
        )
    if not loss:
        return
    if config.num_labels:
        raise UserError(f"--loss {name} needs a language model, and this is a classifier")
    has_adapters = weights.settings or options.lora.lora_load
    if options.loss.reference:
        _check_reference(options, config, options.loss.reference)
        return
    if "teacher" in needs:
        raise UserError(f"--loss {name} needs a teacher: pass it with --reference")
    if needs and has_adapters and options.training.train_only:
        raise UserError(
            f"--loss {name} with --train-only needs a reference: pass the model to compare with, "
            "such as that of --load, with --reference"
        )
    if needs and not has_adapters:
        raise UserError(
            f"--loss {name} needs a reference: train adapters (--lora-rank), or pass the model to "
            "compare with, such as that of --load, with --reference"
        )


def _check_reference(options: Options, config, reference: Path) -> None:
    """Raise UserError if --reference is not a model that fits the run, or is in --save."""
    path, save = reference.resolve(), options.checkpoint.save
    if save and save.resolve() in (path, path.parent if is_step_name(path.name) else path):
        raise UserError(
            f"--reference {reference} is in the directory of --save, whose model changes: use "
            "another directory for --save"
        )
    try:
        other = open_source(str(reference)).config
    except UserError as error:
        raise UserError(f"--reference: {error}") from error
    for name in ("vocab_size", "num_labels"):
        if getattr(other, name) != getattr(config, name):
            raise UserError(
                f"--reference {reference} has {name} {getattr(other, name)}, but the model has "
                f"{getattr(config, name)}: use a model with the same tokens"
            )
    check_sequence(FAMILIES[family_of(other)], other, options.training.seq_length)


def _check_tasks(options: Options, config) -> None:
    """Raise UserError if the model can't be evaluated on --eval-tasks, or a task is unknown."""
    if config.num_labels:
        raise UserError("--eval-tasks needs a language model, and this is a classifier: remove it")
    if options.parallel.cp > 1:
        raise UserError(
            f"--eval-tasks cannot be used with --cp {options.parallel.cp}: use --cp 1, or `megazoo "
            "evaluate --tasks` with a checkpoint"
        )
    from megazoo.evaluation.tasks import find_tasks  # slow, and an optional package

    find_tasks(str(options.evaluation.eval_tasks), "--eval-tasks")


def _check_outputs(options: Options) -> None:
    """Check that the outputs of the run can be written, and that their packages are installed."""
    directories = {
        "--save": options.checkpoint.save,
        "--record": options.logging.record,
        "--profile": options.logging.profile,
    }
    for flag, directory in directories.items():
        if directory:
            check_writable(flag, directory)
    if options.checkpoint.save:
        run_lock(options.checkpoint.save).check()
    for name in OUTPUTS:
        if value := options.values.get(name):
            check_output(name, value)


def check_steps(options: Options, first_step: int) -> None:
    """Raise UserError if the checkpoint is already at the last step."""
    training = options.training
    if first_step >= training.steps:
        wanted = f"--steps {training.steps}"
        if training.epochs:
            wanted = f"--epochs {training.epochs} ({training.steps} steps)"
        begun = f"--load {options.checkpoint.load}"
        if options.lora.lora_load:
            begun = f"--lora-load {options.lora.lora_load}"
        raise UserError(
            f"{begun} is already at step {first_step}, so nothing is left to do for "
            f"{wanted}: use a larger value"
        )
    (first, last), left = options.logging.profile_steps, training.steps - first_step
    if options.logging.profile and not 1 <= first <= last <= left:
        raise UserError(
            f"--profile-steps {first} {last} must be the first and the last of the {left} "
            f"steps of this run, from 1 to {left}"
        )


def check_values(options: Options) -> None:
    """Raise UserError for a value that is out of its range."""
    settings = described(type(options))
    for name, value in options.values.items():
        check_value(settings[name], name, value)
    lr, min_lr = options.optimizer.lr, options.optimizer.min_lr
    name = options.optimizer.lr_schedule
    for option in parts_of("optimizer") if name else ():
        if options.values[option] is not None and option not in own_options(LR_SCHEDULES[name]):
            raise UserError(
                f"{flag_of(option)} cannot be used with --lr-schedule {name}: remove it"
            )
    if None not in (lr, min_lr) and min_lr > lr:
        raise UserError(f"--min-lr {min_lr} exceeds --lr {lr}: use a smaller --min-lr")
