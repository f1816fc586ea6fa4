"""Pretrain a language model with tensor, pipeline and data parallelism.

$ python pretrain_gpt.py                                             one process, a small GPT-2 on embedded text
$ torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 4          eight ranks: 2-way tensor, 4 stages
$ torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 2          the same with 2 data-parallel replicas
$ python pretrain_gpt.py --load runs/a --tp 4 --steps 2000           go on from a checkpoint, in another layout
"""

import math
import resource
import shlex
import sys
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.config import Options, check_run, model_config, parse_options
from megazoo.data import Batches, SampleOrder, check_data, open_datasets
from megazoo.launch import data_parallel_size, is_rank_zero, run_program, start_missing_ranks
from megazoo.metrics import Metrics, Progress, clock
from megazoo.models import FAMILIES, family_of, parameter_count
from megazoo.optim import AdamW, learning_rate
from megazoo.tokenizer import open_tokenizer


def main(arguments: list[str]) -> None:
    # Settings, checked before anything is built.
    options = parse_options(arguments, __doc__)
    training, parallel, log = options.training, options.parallel, options.logging
    checkpoint = Checkpoint(options.checkpoint.load) if options.checkpoint.load else None
    config = model_config(options.model, checkpoint)
    tokenizer = open_tokenizer(options.data.tokenizer)
    _, valid_share = check_data(options.data.data, options.data.split)
    evaluates = log.eval_steps > 0 and valid_share > 0
    first_step = checkpoint.trainer["step"] if checkpoint else 0
    dp = data_parallel_size(parallel.tp, parallel.pp)
    check_run(options, FAMILIES[family_of(config)], config, tokenizer, dp, first_step)
    start_missing_ranks(parallel.tp, parallel.pp)

    # This rank's part of the model.
    ctx = megazoo.ParallelContext.from_torch(parallel.tp, parallel.pp, device=parallel.device)
    say = print_flushed if is_rank_zero() else lambda *_: None
    say(
        f"{family_of(config)}, {parameter_count(config):,} parameters, on {ctx.world_size} x {ctx.device.type}: "
        f"tp {ctx.tp_size} x pp {ctx.pp_size} x dp {ctx.dp_size}"
    )
    model = megazoo.from_config(config, ctx, seed=training.seed)
    optimizer = AdamW(
        model,
        betas=(options.optimizer.beta1, options.optimizer.beta2),
        weight_decay=options.optimizer.weight_decay,
        clip_grad=options.optimizer.clip_grad,
    )
    consumed = load(checkpoint, model, optimizer)["consumed_samples"] if checkpoint else 0

    # Data, on the stages that use it.
    train = valid = None
    if model.stages[0].first or model.stages[-1].last:
        train, valid = open_datasets(options.data.data, tokenizer, options.data.split, training.seq_length)
    batch_of = (training.global_batch_size, training.seq_length, ctx)
    train_batches = Batches(train, train and SampleOrder(len(train), training.seed), *batch_of)
    valid_batches = Batches(valid, lambda i: i % len(valid), *batch_of)
    microbatches = training.global_batch_size // ctx.dp_size // training.micro_batch_size

    def evaluate(step: int) -> float:
        samples = range(0, log.eval_steps * training.global_batch_size, training.global_batch_size)
        losses = [model.eval_batch(**valid_batches(first), num_microbatches=microbatches).item() for first in samples]
        loss = math.fsum(losses) / len(losses)
        metrics.write(step=step, eval_loss=loss, eval_perplexity=math.exp(loss))
        say(f"step {step:>{len(str(training.steps))}}/{training.steps}  validation loss {loss:.4f}")
        return loss

    def save_checkpoint(step: int):
        trainer = {"consumed_samples": consumed, "seed": training.seed, "options": jsonable(options)}
        path = save(options.checkpoint.save, step, model, optimizer, trainer)
        say(f"saved {path}")
        return path

    # The training loop.
    tokens = training.global_batch_size * training.seq_length
    metrics = Metrics(log.metrics if is_rank_zero() else None)
    progress = Progress(first_step, training.steps, tokens, log.log_interval)
    saved = eval_loss = None
    for step in range(first_step + 1, training.steps + 1):
        began = time.perf_counter()
        batch = train_batches(consumed)
        loss = model.train_batch(**batch, num_microbatches=microbatches, schedule=parallel.schedule, step=step)
        optimizer.lr = learning_rate(step, steps=training.steps, **schedule_of(options))
        norm = optimizer.step().item()
        consumed += training.global_batch_size
        seconds, loss = time.perf_counter() - began, loss.item()

        metrics.write(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=optimizer.lr,
            tokens_per_second=tokens / seconds,
            step_time=seconds,
            consumed_samples=consumed,
            consumed_tokens=consumed * training.seq_length,
            peak_memory=peak_memory(ctx),
        )
        if line := progress.line(step, loss, norm, optimizer.lr):
            say(line)
        if not math.isfinite(loss):
            raise megazoo.UserError(f"the loss is {loss} at step {step}: try a smaller --lr", exit_code=1)
        last = step == training.steps
        if evaluates and (last or (log.eval_interval and step % log.eval_interval == 0)):
            eval_loss = evaluate(step)
        interval = options.checkpoint.save_interval
        if options.checkpoint.save and (last or (interval and step % interval == 0)):
            saved = save_checkpoint(step)

    # What came of it, and what to do next.
    say(f"\ntrained steps {first_step + 1} to {training.steps} in {clock(time.perf_counter() - progress.start)}")
    say(f"  training loss {loss:.4f}" + (f", validation loss {eval_loss:.4f} nats a token" if eval_loss else ""))
    if saved:
        say(f"  checkpoint    {saved}  (tp {ctx.tp_size} x pp {ctx.pp_size}; loads in any layout)")
        settings = shlex.join([*arguments, "--load", str(options.checkpoint.save), "--steps", str(2 * training.steps)])
        say(f"  go on         python pretrain_gpt.py {settings}")
    else:
        say("  nothing was saved: --save DIR keeps a checkpoint")
    if log.metrics:
        say(f"  metrics       {log.metrics}")
        say(f"  loss curve    python tools/plot_metrics.py {log.metrics} --output loss.png")
    if dist.is_initialized():
        dist.destroy_process_group()


def schedule_of(options: Options) -> dict:
    """The arguments of `learning_rate` that don't change from step to step."""
    names = {"lr_schedule": "schedule", "lr": "lr", "min_lr": "min_lr", "warmup_steps": "warmup_steps"}
    return {name: getattr(options.optimizer, option) for option, name in names.items()}


def peak_memory(ctx) -> int:
    """Bytes: the device's peak of allocated memory, or on the CPU the process's peak resident size."""
    if ctx.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def jsonable(options: Options) -> dict:
    """The options as plain JSON values."""
    flat = {key: value for group in asdict(options).values() if isinstance(group, dict) for key, value in group.items()}
    return {key: value if isinstance(value, int | float | None) else str(value) for key, value in flat.items()}


def print_flushed(*words) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    run_program(main)
