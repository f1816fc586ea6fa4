"""Pretrain a language model with tensor, pipeline and data parallelism.

$ python pretrain_gpt.py                                             one process, a small GPT-2 on embedded text
$ torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 4          eight ranks: 2-way tensor, 4 stages
$ torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 2          the same with 2 data-parallel replicas
$ python pretrain_gpt.py --load runs/a --tp 4 --steps 2000           go on from a checkpoint, in another layout
"""

import math
import resource
import sys
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

import megazoo
from megazoo.checkpoint import Checkpoint, Saver, load
from megazoo.checkpoint.places import LATEST
from megazoo.cli import callbacks
from megazoo.cli.elastic import StopSignal, is_restart, naming_absent_ranks
from megazoo.cli.launch import (
    after_rank_zero,
    data_parallel_size,
    python_line,
    run_program,
    start_missing_ranks,
    torchrun_line,
)
from megazoo.cli.metrics import Metrics, Progress, peak_flops, traced_steps
from megazoo.cli.options import DataOptions, OptimizerOptions, Options, settings_to_resume
from megazoo.cli.parsing import each_once, parse_options, run_file
from megazoo.cli.rules import check_run, check_steps, model_config, parse_stage_layers, settle_steps
from megazoo.data import (
    Batches,
    check_data,
    check_template,
    json_files,
    open_datasets,
    prepare_datasets,
)
from megazoo.environment import is_rank_zero, world_size
from megazoo.models.counts import flops_per_token, parameter_count
from megazoo.models.pretrained import load_weights, open_source
from megazoo.models.registry import FAMILIES, family_of
from megazoo.optim.adamw import AdamW
from megazoo.optim.learning_rate import learning_rate
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.collectives import all_gather_objects, broadcast_from_stage
from megazoo.parallel.compile import check_compiler
from megazoo.parallel.device import choose_device
from megazoo.parallel.failure import failing_together
from megazoo.parallel.timing import Stopwatch, spent
from megazoo.planning.plan import note_on_mfu
from megazoo.tokenizer import TOKENIZER_FILES, TOKENIZER_SIDECARS, open_tokenizer, tokenizer_files


def main(arguments: list[str]) -> None:
    # Settings, checked before anything is built.
    options = parse_options(arguments, __doc__)
    if is_restart() and options.checkpoint.save and (options.checkpoint.save / LATEST).is_file():
        arguments = [*arguments, "--load", str(options.checkpoint.save), "--no-load-weights-only"]
        options = parse_options(arguments, __doc__)
    if options.model.import_:
        run_file(options.model.import_)
    source = open_source(options.checkpoint.load) if options.checkpoint.load else None
    goes_on = isinstance(source, Checkpoint) and not options.checkpoint.load_weights_only
    state = resumed_state(source if goes_on else None)
    if goes_on:
        options = parse_options(arguments, __doc__, resumed=state["settings"])
    training, parallel, log = options.training, options.parallel, options.logging
    config = model_config(options.model, source)
    tokenizer = open_tokenizer(options.data.tokenizer or (source and source.tokenizer) or "byte")
    sources = check_data(options.data.data, options.data.split)
    check_template(options.data.chat_template)
    first_step, consumed, consumed_tokens = (
        state["step"],
        state["consumed_samples"],
        state["consumed_tokens"],
    )
    dp = data_parallel_size(parallel.tp, parallel.pp)
    check_run(options, FAMILIES[family_of(config)], config, tokenizer, dp)
    if not training.epochs and is_done(options, first_step):
        return
    device = choose_device(
        parallel.device, parallel.tp * parallel.pp if world_size() == 1 else None
    )
    if training.compile:
        check_compiler(device.type)
    start_missing_ranks(parallel.tp, parallel.pp)
    if json_files(sources):  # before any rank waits in a collective, for --timeout at most
        _store = after_rank_zero(
            lambda: prepare_datasets(sources, tokenizer, options.data.chat_template)
        )

    # This rank's part of the model.
    ctx = megazoo.ParallelContext.from_torch(
        parallel.tp,
        parallel.pp,
        sequence_parallel=parallel.sequence_parallel,
        virtual_pipeline_size=parallel.virtual_pp,
        stage_layers=parse_stage_layers(parallel.stage_layers),
        device=parallel.device,
        timeout=timedelta(seconds=parallel.timeout),
    )
    # a node that torchrun has not told of a restart
    if len(steps := set(all_gather_objects(first_step, ctx))) > 1:
        raise megazoo.UserError(
            f"ranks would start after different steps: {sorted(steps)}", exit_code=1
        )
    say = print_flushed if is_rank_zero() else lambda *_: None
    say(
        f"{family_of(config)}, {parameter_count(config):,} parameters, on {ctx.world_size} x {ctx.device.type}: "
        f"tp {ctx.tp_size} x pp {ctx.pp_size} x dp {ctx.dp_size}"
        + (", sequence parallel" if ctx.sequence_parallel else "")
    )
    if (
        options.model.import_
        and is_rank_zero()
        and (note := note_on_mfu(config, training.seq_length))
    ):
        say(note)
    model = megazoo.from_config(
        config, ctx, dtype=getattr(torch, training.dtype), seed=training.seed
    )
    if source and not goes_on:
        load_weights(source, model)
    if training.train_only:
        model.train_only(training.train_only)
        say(
            f"training {parameter_count(config, training.train_only):,} of them: {training.train_only}"
        )
    model.recompute(training.recompute, training.recompute_interval)
    if training.compile:
        model.compile()
    optimizer = AdamW(
        model,
        betas=(options.optimizer.beta1, options.optimizer.beta2),
        weight_decay=options.optimizer.weight_decay,
        clip_grad=options.optimizer.clip_grad,
        zero=parallel.zero,
        offload=parallel.offload_optimizer,
        loss_scale=LossScale(
            training.initial_loss_scale, training.loss_scale_window, training.hysteresis
        ),
    )
    if goes_on:
        load(source, model, optimizer)
    if is_rank_zero():
        # its files travel along
        options.data.tokenizer = "byte" if tokenizer.source == "byte" else None
        model.sidecar_files = tokenizer_files(tokenizer.source) | without_tokenizer(
            model.sidecar_files
        )

    # Data, on the stages that use it.
    data = (None, None, None)
    if model.stages[0].first or model.stages[-1].last:
        how = {
            "seq_length": training.seq_length,
            "vocab_size": config.vocab_size,
            "seed": training.seed,
        }
        data = open_datasets(sources, tokenizer, **how, **data_settings(options.data), say=say)
    train, valid, test = (Batches(blend, training.global_batch_size, ctx) for blend in data)
    if training.epochs:
        samples = torch.tensor(len(data[0]) if data[0] else 0, device=ctx.device)
        settle_steps(options, broadcast_from_stage(samples, 0, ctx).item(), first_step, consumed)
        if is_done(options, first_step):
            return
    rows = training.global_batch_size
    microbatches = rows // ctx.dp_size // training.micro_batch_size
    has_valid, has_test = (log.eval_steps > 0 and share > 0 for share in sources.shares[1:])

    def evaluate(step: int, batches: Batches, name: str, key: str) -> float:
        total = count = 0.0
        for batch in batches.ahead(
            range(0, log.eval_steps * rows, rows), options.data.data_workers
        ):
            mean, labelled = model.eval_batch(
                **batch, num_microbatches=microbatches, return_count=True
            )
            total, count = total + mean.item() * labelled.item(), count + labelled.item()
        loss = total / max(count, 1)
        values = {f"{key}_loss": loss, f"{key}_perplexity": math.exp(min(loss, 700.0))}
        metrics.write(step, **values)
        say(f"step {step:>{len(str(training.steps))}}/{training.steps}  {name} loss {loss:.4f}")
        callbacks.after_evaluation(step, values, model)
        return loss

    # The training loop.
    rank_flops = flops_per_token(config, training.seq_length) / ctx.world_size  # of each token
    peak = log.peak_tflops * 1e12 if log.peak_tflops else peak_flops(ctx.device)
    progress = Progress(
        first_step, training.steps, log.log_interval, rank_flops / peak if peak else None
    )
    keep, eval_loss, test_loss = options.checkpoint, None, None
    how = {"background": keep.async_save, "keep_last": keep.keep_last, "report": say}
    saver = Saver(
        keep.save,
        model,
        optimizer,
        **how,
        after=lambda step, path: callbacks.after_save(step, path, model),
    )
    told = (log.metrics, log.tensorboard, log.wandb) if is_rank_zero() else ()
    about = {
        **asdict(config),
        **settings_to_resume(options),
        "tp": ctx.tp_size,
        "pp": ctx.pp_size,
        "dp": ctx.dp_size,
    }
    starts = range(consumed, consumed + (training.steps - first_step) * rows, rows)
    with (
        saver,
        StopSignal(ctx) as stop,  # a launcher that ends the job must not cut short who tells why
        naming_absent_ranks(ctx),
        failing_together(ctx),
        closing(
            Metrics(*told, step=first_step, run=state.get("wandb_run"), settings=about)
        ) as metrics,
        traced_steps(log.profile, log.profile_steps, ctx.rank) as step_done,
        closing(train.ahead(starts, options.data.data_workers)) as batches,
    ):
        for step in range(first_step + 1, training.steps + 1):
            with Stopwatch(ctx.device) as watch:
                with spent("data"):
                    batch, tokens = next(batches), train.tokens(consumed)
                loss = model.train_batch(
                    **batch, num_microbatches=microbatches, schedule=parallel.schedule, step=step
                )
                optimizer.lr = learning_rate(step, **rate_schedule(options.optimizer))
                scale = optimizer.loss_scale and optimizer.loss_scale.value
                with spent("optimizer"):
                    norm = optimizer.step().item()
            step_done()
            consumed, consumed_tokens, loss = consumed + rows, consumed_tokens + tokens, loss.item()
            speed = rank_flops * tokens / watch.seconds
            hopeless = not math.isfinite(norm) and not (optimizer.skipped and scale > 1)
            if hopeless or not math.isfinite(loss):
                what = f"the loss is {loss} and its gradient norm {norm} at step {step}: try a smaller --lr"
                raise megazoo.UserError(
                    f"{what}; checkpoints of earlier steps are whole", exit_code=1
                )

            values = {
                "loss": loss,
                "grad_norm": None if optimizer.skipped else norm,
                "lr": optimizer.lr,
                "tokens_per_second": tokens / watch.seconds,
                "tflops": speed / 1e12,
                **({"mfu": speed / peak} if peak else {}),
                "step_time": watch.seconds,
                **{f"{part}_time": seconds for part, seconds in watch.times().items()},
                "consumed_samples": consumed,
                "consumed_tokens": consumed_tokens,
                "peak_memory": peak_memory(ctx),
                **float16_metrics(optimizer),
            }
            metrics.write(step, **values)
            if optimizer.skipped:
                say(
                    f"step {step}: the gradients overflowed, step skipped; loss scale {optimizer.loss_scale.value:g}"
                )
            if line := progress.line(step, tokens, loss, norm, optimizer.lr):
                say(line)
            callbacks.after_step(step, values, model)
            signalled = stop.agreed()
            last = step == training.steps
            if has_valid and (last or (log.eval_interval and step % log.eval_interval == 0)):
                eval_loss = evaluate(step, valid, "validation", "eval")
            if has_test and last:
                test_loss = evaluate(step, test, "test", "test")
            if keep.save and (
                last or signalled or (keep.save_interval and step % keep.save_interval == 0)
            ):
                trainer = {"consumed_samples": consumed, "consumed_tokens": consumed_tokens}
                if run := metrics.run or state.get("wandb_run"):
                    trainer["wandb_run"] = run
                trainer["settings"] = settings_to_resume(options)
                saver.save(step, trainer, may_fail=keep.on_save_error == "continue" and not last)
            if signalled:
                break

    # What came of it, and what to do next.
    how = f"stopped by {signalled}: " if signalled else ""
    say(f"\n{how}trained steps {first_step + 1} to {step} in {progress.time()}")
    losses = {"training": loss, "validation": eval_loss, "test": test_loss}
    told = ", ".join(
        f"{name} loss {value:.4f}" for name, value in losses.items() if value is not None
    )
    say(f"  {told} nats a token")
    if saver.saved:
        say(
            f"  checkpoint    {saver.saved}  (tp {ctx.tp_size} x pp {ctx.pp_size}; loads in any layout)"
        )
        longer = (
            ["--epochs", 2 * training.epochs]
            if training.epochs
            else ["--steps", 2 * training.steps]
        )
        more = [] if signalled else map(str, longer)
        whole = ["--no-load-weights-only"] if keep.load_weights_only else []
        again = each_once([*arguments, *whole, "--load", str(options.checkpoint.save), *more])
        say(
            f"  go on         {python_line(again) if ctx.dp_size == 1 else torchrun_line(ctx.world_size, again)}"
        )
    else:
        say("  nothing was saved: --save DIR keeps a checkpoint")
    if log.metrics:
        say(f"  metrics       {log.metrics}")
        say(f"  loss curve    {python_line([str(log.metrics)], program='tools/plot_metrics.py')}")
    if dist.is_initialized():
        dist.destroy_process_group()


def is_done(options: Options, first_step: int) -> bool:
    """Whether torchrun started this again after the last step; UserError if a user asks for no more
    than there is."""
    if is_restart() and first_step >= options.training.steps:
        return True
    check_steps(options, first_step)
    return False


def rate_schedule(optimizer: OptimizerOptions) -> dict:
    """The arguments of `learning_rate` that don't change from step to step."""
    o = optimizer
    rates = {
        "lr": o.lr,
        "min_lr": o.min_lr,
        "warmup_steps": o.warmup_steps,
        "steps": o.lr_decay_steps,
    }
    return {"schedule": o.lr_schedule, **rates}


def resumed_state(checkpoint: Checkpoint | None) -> dict:
    """Where a run stands: step, consumed samples and tokens, and its settings; the start without a
    checkpoint."""
    if checkpoint is None:
        return {"step": 0, "consumed_samples": 0, "consumed_tokens": 0, "settings": {}}
    missing = {"step", "consumed_samples", "consumed_tokens", "settings"} - set(checkpoint.trainer)
    if missing:
        what = f"{checkpoint.path} is not of a training run: trainer.json has no {min(missing)}"
        raise megazoo.UserError(f"{what}; --load-weights-only starts a new run with its weights")
    return checkpoint.trainer


def without_tokenizer(sidecar_files: dict[str, bytes]) -> dict[str, bytes]:
    """What came with the weights, but for their tokenizer."""
    return {
        name: data
        for name, data in sidecar_files.items()
        if name not in (*TOKENIZER_FILES, *TOKENIZER_SIDECARS)
    }


def data_settings(data: DataOptions) -> dict:
    """The arguments of `open_datasets` that are settings of their own."""
    return {
        name: getattr(data, name) for name in ("separate_documents", "chat_template", "packing")
    }


def float16_metrics(optimizer: AdamW) -> dict:
    """What is told of a step of float16 besides."""
    return (
        {"skipped": optimizer.skipped, "loss_scale": optimizer.loss_scale.value}
        if optimizer.loss_scale
        else {}
    )


def peak_memory(ctx) -> int:
    """Bytes: the device's peak of allocated memory, or on the CPU the process's peak resident size."""
    if ctx.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def print_flushed(*words) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    run_program(main)
