"""Pretrain a language model with tensor, pipeline, context and data parallelism.

$ megazoo pretrain                                    one process, a small GPT-2
$ megazoo pretrain --tp 2 --pp 4                      eight ranks here: 2-way tensor, 4 stages
$ megazoo pretrain --load runs/a --tp 4 --steps 2000  resume in another layout
$ torchrun --nproc-per-node 8 -m megazoo.pretrain --tp 2 --pp 2   2 replicas

In a clone, pretrain_gpt.py is the same command.
"""

import sys
from contextlib import closing
from datetime import timedelta

import torch
import torch.distributed as dist

from megazoo.checkpoint import load
from megazoo.cli.adapters import add_adapters, note_on_trained
from megazoo.cli.classifier import measures_of, settle_labels
from megazoo.cli.commands import command_named, started_as
from megazoo.cli.data import Data, open_data, prepare_inputs, take_along_tokenizer
from megazoo.cli.launch.deaths import naming_dead_ranks
from megazoo.cli.launch.starting import after_rank_zero, data_parallel_size, start_missing_ranks
from megazoo.cli.optimizer import make_optimizer
from megazoo.cli.program import run_command
from megazoo.cli.recorder import Recorder
from megazoo.cli.rules import check_run
from megazoo.cli.run import Run, notes_on_changes
from megazoo.cli.settings import resolve
from megazoo.cli.summary import introduce, show, summary
from megazoo.cli.tokenizer import find_tokenizer, with_vocabulary
from megazoo.data import Batches, check_data, needs_preparation
from megazoo.data.conversations import template_of
from megazoo.environment import is_rank_zero
from megazoo.errors import UserError
from megazoo.evaluation import Tally, evaluate_rows
from megazoo.families.registry import FAMILIES, family_of
from megazoo.models.base import Model
from megazoo.models.pretrained import load_weights
from megazoo.models.registry import from_config
from megazoo.optim.adamw import AdamW
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.compile import check_compiler
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.device import set_fp32_precision
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.timing import Stopwatch, spent
from megazoo.terminal import count_bar, print_rank_0
from megazoo.tokenizer import open_tokenizer
from megazoo.tokenizer.templates import chat_templates_in


def main(arguments: list[str]) -> None:
    run = prepare(arguments)
    if run.finished:
        return
    ctx = start_ranks(run)
    with naming_dead_ranks(ctx):
        model, optimizer = build(run, ctx)
        data = open_data(run, model)
        if not run.finished:
            if note := run.note_on_decay():
                print_rank_0(note)
            with Recorder(run, model, optimizer) as recorder:
                train(run, model, optimizer, data, recorder)
            print_rank_0(summary(run, recorder))
    if dist.is_initialized():
        dist.destroy_process_group()


def prepare(arguments: list[str]) -> Run:
    """Read and check the settings, before ranks start and before anything is built."""
    settings = resolve(arguments, __doc__)
    options, weights = settings.options, settings.weights
    source, parallel = weights.described, options.parallel
    named = options.data.tokenizer or (source.tokenizer if source else None) or "byte"
    tokenizer = open_tokenizer(find_tokenizer(named))
    if source and not tokenizer.chat_templates:  # the template of byte is stored with the model
        tokenizer.chat_templates = chat_templates_in(source.path)
    sources = check_data(options.data.data, options.data.split)
    config = settings.config
    if not source and options.model.vocab_size is None and options.data.data != ("mock",):
        config = with_vocabulary(config, tokenizer)
    config, labels = settle_labels(config, source, tokenizer, sources)
    options.data.chat_template = template_of(options.data.chat_template, tokenizer)
    dp = data_parallel_size(parallel.tp, parallel.pp, parallel.cp, parallel.dp)
    check_run(options, FAMILIES[family_of(config)], config, tokenizer, dp, weights)
    settings.config = config
    run = Run(**vars(settings), tokenizer=tokenizer, sources=sources, labels=labels)
    if not options.training.epochs:  # the number of steps is known when the data is open
        run.check_remaining()
    if options.dry_run or options.print_config:
        show(run, dp)
        run.finished = True
    return run


def start_ranks(run: Run) -> ParallelContext:
    """Start the missing ranks, wait until the data is tokenized, and connect to the other ranks."""
    parallel = run.options.parallel
    dp = parallel.dp or 1
    device = run.device()
    if run.options.training.compile:
        check_compiler(device.type)
    start_missing_ranks(parallel.tp, parallel.pp, parallel.cp, dp)
    for note in notes_on_changes(run):  # before a file that a checkpoint names is read
        print_rank_0(note)
    if run.weights.base_note:
        print_rank_0(run.weights.base_note)
    if needs_preparation(run.sources) or run.options.logging.record:
        # before any rank waits in a collective, which ends after --timeout
        _store = after_rank_zero(lambda: prepare_inputs(run))
    layout = parallel.layout(run.options.replicas)
    ctx = ParallelContext.of_layout(layout, parallel.device, timedelta(seconds=parallel.timeout))
    with propagate_errors(ctx) as call:
        if call:
            call.agree("megazoo pretrain", run, {})
    run.settle_dtype(ctx.device.type)
    set_fp32_precision(run.options.training.fp32_precision)
    steps = set(all_gather_objects(run.first_step, ctx))
    if len(steps) > 1:  # torchrun has not restarted every node
        raise UserError(f"ranks would start after different steps: {sorted(steps)}", exit_code=1)
    return ctx


def build(run: Run, ctx: ParallelContext) -> tuple[Model, AdamW]:
    """Build this rank's shard of the model and the optimizer, and load --load into them."""
    options, training = run.options, run.options.training
    introduce(run, ctx)
    dtype = getattr(torch, training.dtype)
    model = from_config(run.config, ctx, dtype=dtype, seed=training.seed)
    adapters = run.weights.adapters
    if run.source and (adapters or not run.resuming):
        load_weights(run.source, model)
    add_adapters(model, options, run.weights.settings)
    if training.train_only:
        model.train_only(training.train_only)
    if note := note_on_trained(run.config, model.attached, training.train_only):
        print_rank_0(note)
    if adapters and not run.resuming:
        load(adapters, model)
    model.recompute(training.recompute, training.recompute_interval)
    if training.compile:
        model.compile()
    optimizer = make_optimizer(options, model)
    if resumed := run.weights.resumed(options):
        load(resumed, model, optimizer)
    if is_rank_zero():
        take_along_tokenizer(run, model)
    return model, optimizer


def train(run: Run, model: Model, optimizer: AdamW, data: Data, recorder: Recorder) -> None:
    """Train until the last step, or until a signal stops the run."""
    workers, schedule = run.options.data.data_workers, run.options.parallel.schedule
    microbatches = run.microbatches(model.ctx)
    starts = run.batch_starts
    with closing(data.training.ahead(starts, workers)) as batches:
        for step, start in enumerate(starts, run.first_step + 1):
            with Stopwatch(model.ctx.device) as watch:
                with spent("data"):
                    batch, tokens = next(batches), data.training.tokens(start)
                loss = model.train_batch(
                    **batch, num_microbatches=microbatches, schedule=schedule, step=step
                )
                optimizer.lr = run.learning_rate(step)
                with spent("optimizer"):
                    norm = optimizer.step()
                    # The only synchronization with a GPU per step.
                    loss, norm = torch.stack([loss, norm.to(loss.device)]).tolist()
            recorder.log_step(step, loss, norm, tokens, watch)

            # Before the evaluations, which can last longer than a signal waits.
            if recorder.stop_requested() or run.saves_at(step):
                recorder.save(step, data.training)
            due = {"validation": run.validates_at(step), "test": run.tests_at(step)}
            for name in filter(due.get, due):
                if not recorder.stopped_by:
                    result = evaluate(run, model, getattr(data, name), name, recorder)
                    if result:
                        recorder.log_evaluation(step, name, *result)
                    else:
                        print_rank_0(f"the {name} after step {step} was stopped")
            if recorder.stopped_by:
                recorder.save(step, data.training)
                return


def evaluate(
    run: Run, model: Model, batches: Batches, name: str, recorder: Recorder
) -> tuple[float, dict[str, float]] | None:
    """Return the mean loss over at most --eval-steps batches, and the measures of a classifier.
    None if a signal stops the run.

    The loss is in nats per labelled token; for a classifier, it is the mean over the rows. name: of
    the data, for the progress lines.
    """
    starts = batches.starts(run.options.evaluation.eval_steps)
    total, count, tally = 0.0, 0.0, Tally()
    with (
        closing(batches.ahead(starts, run.options.data.data_workers)) as built,
        count_bar(len(starts), name, "batches") as bar,
    ):
        for start, batch in zip(starts, built, strict=True):
            if recorder.stop_requested():
                return None
            microbatches = batches.rows_after(start) // run.options.training.micro_batch_size
            if run.labels:
                mean, labelled, found = evaluate_rows(model, **batch, num_microbatches=microbatches)
                tally += found
            else:
                mean, labelled = model.eval_batch(
                    **batch, num_microbatches=microbatches, return_count=True
                )
            total, count = total + mean.item() * labelled.item(), count + labelled.item()
            bar.update()
    return total / max(count, 1), measures_of(tally, run.labels) if run.labels else {}


if __name__ == "__main__":
    started_as(command_named("pretrain"))
    run_command(command_named("pretrain"), sys.argv[1:])
