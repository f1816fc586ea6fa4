"""The lines that the training program prints at the start (the model and its layout) and at the
end (the result and the next commands)."""

import json

from megazoo.cli.parsing import each_once, without
from megazoo.cli.plan_report import adapters_of, parameters_of, plan_lines, plan_of
from megazoo.commands import command_line, torchrun_line
from megazoo.data.labels import count_of
from megazoo.environment import is_rank_zero
from megazoo.families.registry import family_of
from megazoo.models.counts import parameter_count, whole_model
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.sizes import product_of
from megazoo.planning import Planner, note_on_mfu
from megazoo.settings import described, flag_of
from megazoo.terminal import note_rank_0, print_rank_0
from megazoo.trainer.adapters import flag_to_go_on
from megazoo.trainer.data import trains_conversations
from megazoo.trainer.recorder import Recorder
from megazoo.trainer.run import Run


def show(run: Run, dp: int) -> None:
    """Print the settings as TOML, with --dry-run after the plan."""
    options, device = run.options, run.options.parallel.device
    if not options.dry_run or device == "auto":
        device = run.device().type
    settings = toml_of(run)  # before the data type that depends on the device is set
    if options.dry_run:
        print_rank_0("\n".join([*_planned(run, dp, device), "\n# settings for --config"]))
    print_rank_0(settings, end="")


def _planned(run: Run, dp: int, device: str) -> list[str]:
    """Return the lines of the plan of a run, after its defaults and derived settings."""
    run.settle_dtype(device)
    lines = [*([defaults_line(run)] if run.filled else []), derived_line(run)]
    if run.config.num_labels:
        return [*lines, "no plan: classifiers are not supported"]
    planner = Planner(run.config, attached=adapters_of(run))
    return [*lines, f"on {device}:", *plan_lines(plan_of(planner, run.options, dp, device))]


def toml_of(run: Run) -> str:
    """Return the settings of a run as a TOML file for --config.

    Settings that are None, or derived from others (min-lr from lr), are omitted.
    """
    values = run.options.values
    if values["mock_data"]:
        values["data"] = None
    settings = described(type(run.options))
    for name in {name for name in run.unset if settings[name].follows} | run.of_rows:
        values[name] = None
    return "".join(
        f"{name} = {_toml(value)}\n" for name, value in values.items() if value is not None
    )


def _toml(value: object) -> str:
    """Return a value as TOML: JSON, but without surrogates and raw DEL characters."""
    return json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")


def defaults_line(run: Run) -> str:
    """Return a line with the flags whose defaults depend on the model."""
    return f"defaults: {', '.join(run.filled)}"


def derived_line(run: Run) -> str:
    """Return a line with the settings that follow from others, as flags."""
    training, optimizer = run.options.training, run.options.optimizer
    values: dict[str, object] = {name.replace("_", "-"): None for name in sorted(run.of_rows)}
    values |= {"steps": training.steps} if training.epochs else {}
    values |= {"warmup-steps": optimizer.warmup_steps, "lr-decay-steps": optimizer.lr_decay_steps}
    values["lr-schedule"] = optimizer.lr_schedule
    values |= {"min-lr": f"{optimizer.min_lr:g}", "dtype": training.dtype}
    if optimizer.optimizer == "muon":
        values["muon-lr"] = optimizer.muon_lr
    if adapters := adapters_of(run):
        values |= {"lora-rank": adapters.rank, "lora-alpha": f"{adapters.alpha:g}"}
        values["lora-targets"] = ",".join(adapters.targets)
    found = [f"--{name} {value}" for name, value in values.items() if value is not None]
    unknown = [f"--{name}" for name, value in values.items() if value is None]
    later = f"; from the size of the data: {', '.join(unknown)}" if unknown else ""
    if "global_batch_size" in run.of_rows:
        later += f" (the plan is for a batch of {training.global_batch_size})"
    return f"derived: {', '.join(found)}{later}"


def introduce(run: Run, ctx: ParallelContext) -> None:
    """Print the model, its parallel layout and its precision."""
    with propagate_errors(ctx):  # of a PEFT directory
        adapters = adapters_of(run)
    of_model, model = parameter_count(run.config), whole_model(run.config, None, adapters)
    total = sum(parameter.numel() for parameter in model.parameters())
    print_rank_0(
        f"{family_of(run.config)}, {_kind_of(run)}{parameters_of(total, total - of_model)}, "
        f"on {ctx.world_size} x {ctx.device.type}: "
        f"{product_of(ctx.tp_size, ctx.pp_size, ctx.dp_size, ctx.cp_size)}"
        + "".join(f", {axis} {size}" for axis, size in ctx.layout.folded_sizes)
        + (", cp-method ulysses" if ctx.cp_size > 1 and ctx.layout.cp_method == "ulysses" else "")
        + (", sequence parallel" if ctx.sequence_parallel else "")
        + run.note_on_precision(ctx.device.type)
    )
    if run.filled and not run.defaults.demo:
        print_rank_0(defaults_line(run))
    if adapters and run.weights.described is None:
        note_rank_0(
            "warning: the adapters change random weights, which are not trained: use --load DIR to "
            "start from a model"
        )
    if not run.options.checkpoint.save:
        print_rank_0("nothing will be saved: use --save DIR to save checkpoints")
    if run.options.model.import_ and is_rank_zero():
        note = note_on_mfu(run.config, run.options.training.seq_length)
        if note:
            print_rank_0(note)


def _kind_of(run: Run) -> str:
    """Return a phrase that describes a classifier, with a comma; "" for a language model."""
    if not run.labels:
        return ""
    is_new = run.source and not run.source.config.num_labels
    return f"classifier of {count_of(run.labels.num_labels)}{' (a new head)' if is_new else ''}, "


def summary(run: Run, recorder: Recorder) -> str:
    """Return the result of a run and the next commands, one per line."""
    ctx, saved, metrics = recorder.model.ctx, recorder.saver.saved, run.options.values["metrics"]
    stopped = f"stopped by {recorder.stopped_by}: " if recorder.stopped_by else ""
    steps = f"{run.first_step + 1} to {recorder.step}"
    losses = ", ".join(f"{name} loss {value:.4f}" for name, value in recorder.losses.items())
    lines = [
        f"\n{stopped}trained steps {steps} in {recorder.time()}",
        f"  {losses}" + ("" if run.labels or run.loss else " nats per token"),
    ]
    if saved:
        layout = product_of(ctx.tp_size, ctx.pp_size, cp=ctx.cp_size)
        lines += [
            f"  checkpoint    {saved}  ({layout}; loads in any layout)",
            f"  resume        {_command_to_go_on(run, recorder)}",
        ]
        if command := _command_to_use(run, recorder):
            lines.append(f"  {command}")
    else:
        lines.append("  no checkpoint was saved: use --save DIR to save one")
    if metrics:
        lines += [
            f"  metrics       {metrics}",
            f"  loss curve    {command_line([str(metrics)], 'plot metrics')}",
        ]
    lines += [f"  {flag} lost {why}" for flag, why in recorder.lost.items()]
    return "\n".join(lines)


def _command_to_go_on(run: Run, recorder: Recorder) -> str:
    """The command that resumes the run: to its end if a signal stopped it before, otherwise to
    twice its length."""
    training, keep = run.options.training, run.options.checkpoint
    words = list(run.arguments)
    if _is_named_by_checkpoint(run, recorder):
        settings = described(type(run.options)).items()
        stored = {name for name, setting in settings if setting.kept or setting.in_manifest}
        words = [*without(words, stored), "--load", str(keep.save)]
    else:
        words += ["--no-load-weights-only"] * keep.load_weights_only
        words += [flag_to_go_on(run.options), str(keep.save)]
    if not recorder.stopped_by or run.is_last(recorder.step):
        name, length = ("epochs", training.epochs) if training.epochs else ("steps", training.steps)
        words += [f"--{name}", str(2 * length)]
    words, ctx = each_once(words), recorder.model.ctx
    return command_line(words) if ctx.dp_size == 1 else torchrun_line(ctx.world_size, words)


def _is_named_by_checkpoint(run: Run, recorder: Recorder) -> bool:
    """Return whether the checkpoint of a run has adapters, names their base, and determines all
    settings that it stores. A file of --config would override its settings."""
    base = recorder.model.weights_path if recorder.model.attached else None
    return bool(base and base.isprintable() and "--config" not in map(flag_of, run.arguments))


def _command_to_use(run: Run, recorder: Recorder) -> str | None:
    """The command that generates text or classifies; None if the base of adapters is not on
    disk."""
    if recorder.model.attached and run.source is None:
        return None
    words = [str(run.options.checkpoint.save)]
    if run.options.model.import_:
        words += ["--import", str(run.options.model.import_)]
    if run.labels:
        line = command_line(words, "evaluate")
        return f"classify      {line} --labels FILE.jsonl"
    if trains_conversations(run):
        return f"chat          {command_line(words, 'chat')}"
    line = command_line(words, "generate")
    return f'generate      {line} --prompt "..."'
