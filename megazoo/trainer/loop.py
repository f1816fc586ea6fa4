"""Build the model and the optimizer of a run, and train."""

import math
from collections import Counter
from contextlib import closing

import torch

from megazoo.checkpoint import load
from megazoo.data.loading import Batches
from megazoo.environment import is_rank_zero
from megazoo.evaluation.classifying import Tally, evaluate_rows
from megazoo.layers import multiply_in_float8
from megazoo.losses.reference import Reference
from megazoo.models.base import Model
from megazoo.models.pretrained import load_weights
from megazoo.models.registry import from_config
from megazoo.optim.adamw import AdamW
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.timing import Stopwatch, spent
from megazoo.terminal import count_bar, print_rank_0
from megazoo.trainer.adapters import add_adapters, note_on_trained
from megazoo.trainer.classifier import measures_of
from megazoo.trainer.data import Data, open_data, take_along_tokenizer
from megazoo.trainer.optimizer import make_optimizer
from megazoo.trainer.recorder import Recorder
from megazoo.trainer.reference import reference_of
from megazoo.trainer.run import Run


def train(run: Run, ctx: ParallelContext) -> Recorder | None:
    """Build the model, open the data, and train until the last step or a signal.

    Return the recorder of the run; None if the run has already finished.
    """
    model, optimizer = build(run, ctx)
    data = open_data(run, model)
    if run.finished:
        return None
    if note := run.note_on_decay():
        print_rank_0(note)
    with Recorder(run, model, optimizer) as recorder:
        reference = reference_of(run, model, data, recorder.stop_requested)
        if not recorder.stopped_by:
            train_steps(run, model, optimizer, data, recorder, reference)
    return recorder


def build(run: Run, ctx: ParallelContext) -> tuple[Model, AdamW]:
    """Build this rank's shard of the model and the optimizer, and load --load into them."""
    options, training = run.options, run.options.training
    dtype = getattr(torch, training.dtype)
    model = from_config(run.config, ctx, dtype=dtype, seed=training.seed)
    adapters = run.weights.adapters
    if run.source and (adapters or not run.resuming):
        load_weights(run.source, model)
    if training.float8:
        multiply_in_float8(model, training.float8)
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


def train_steps(
    run: Run,
    model: Model,
    optimizer: AdamW,
    data: Data,
    recorder: Recorder,
    reference: Reference,
) -> None:
    """Train until the last step, or until a signal stops the run. reference: with the loss of the
    run."""
    workers, schedule = run.options.data.data_workers, run.options.parallel.schedule
    micro, lr_schedule = run.options.training.micro_batch_size, run.lr_schedule
    starts = run.batch_starts
    with closing(data.training.ahead(starts, workers)) as batches:
        for step, start in enumerate(starts, run.first_step + 1):
            with Stopwatch(model.ctx.device) as watch:
                with spent("data"):
                    batch, tokens = next(batches), data.training.tokens(start)
                microbatches = data.training.rows_after(start) // micro
                named = reference(batch, microbatches)
                how = {"num_microbatches": microbatches, "schedule": schedule, "step": step}
                mean = model.train_batch(**batch, **named, loss=reference.loss, **how)
                optimizer.lr = lr_schedule.rate(step)
                with spent("optimizer"):
                    norm = optimizer.step()
                    # The only synchronization with a GPU per step.
                    mean, norm = torch.stack([mean, norm.to(mean.device)]).tolist()
            recorder.log_step(step, mean, norm, tokens, watch)

            # Before the evaluations, which can last longer than a signal waits.
            if recorder.stop_requested() or run.saves_at(step):
                recorder.save(step, data.training)
            due = {"validation": run.validates_at(step), "test": run.tests_at(step)}
            for name in filter(due.get, due):
                if not recorder.stopped_by:
                    held_out = getattr(data, name)
                    result = evaluate(run, model, held_out, name, recorder, reference)
                    if result:
                        recorder.log_evaluation(step, name, *result)
                    else:
                        print_rank_0(f"the {name} after step {step} was stopped")
            if run.evaluates_at(step) and not recorder.stopped_by:
                recorder.evaluate(step)
            if recorder.stopped_by:
                recorder.save(step, data.training)
                return


def evaluate(
    run: Run,
    model: Model,
    batches: Batches,
    name: str,
    recorder: Recorder,
    reference: Reference,
) -> tuple[float, dict[str, float]] | None:
    """Return the mean loss over at most --eval-steps batches, and further measures. None if a
    signal stops the run.

    The loss is in nats per labelled token; for a classifier, it is the mean over the rows. The
    measures are those of a classifier, the metrics of the loss, or the perplexity. name: of the
    data, for the progress lines. reference: with the loss of the run.
    """
    starts, loss = batches.starts(run.options.evaluation.eval_steps), reference.loss
    total, count, tally, metrics = 0.0, 0.0, Tally(), Counter()
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
                named = reference(batch, microbatches)
                how = {"num_microbatches": microbatches, "return_count": True}
                mean, labelled = model.eval_batch(**batch, **named, loss=loss, **how)
                weight = labelled.item()
                metrics.update({k: v * weight for k, v in model.engine.loss_metrics.items()})
            total, count = total + mean.item() * labelled.item(), count + labelled.item()
            bar.update()
    mean, count = total / max(count, 1), max(count, 1)
    if run.labels:
        return mean, measures_of(tally, run.labels)
    if loss:
        return mean, {name: value / count for name, value in metrics.items()}
    return mean, {"perplexity": math.exp(min(mean, 700.0))}
