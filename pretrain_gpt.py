"""Pretrain a language model with tensor, pipeline, context and data parallelism.

$ python pretrain_gpt.py                                      one process, a small GPT-2
$ torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 4   eight ranks: 2-way tensor, 4 stages
$ torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 2   the same with 2 replicas
$ python pretrain_gpt.py --load runs/a --tp 4 --steps 2000    go on, in another layout
"""

import sys
from contextlib import closing
from datetime import timedelta
from typing import NamedTuple

from megazoo.cli.launch import (
    after_rank_zero,
    data_parallel_size,
    help_at_once,
    run_program,
    start_missing_ranks,
)
from megazoo.cli.options import Options

if __name__ == "__main__":
    help_at_once(Options, __doc__)  # what is imported below takes seconds

import torch
import torch.distributed as dist

import megazoo
from megazoo.checkpoint import load
from megazoo.checkpoint.places import TRAINER, has_checkpoint
from megazoo.cli.adapters import add_adapters, flag_to_go_on, note_on_trained, open_weights
from megazoo.cli.classifier import measures_of, settle_labels
from megazoo.cli.deaths import naming_dead_ranks
from megazoo.cli.elastic import is_restart
from megazoo.cli.parsing import gives, parse_options, run_file
from megazoo.cli.recorder import Recorder
from megazoo.cli.rules import (
    check_run,
    model_config,
    parse_stage_layers,
    refuse_default_rate,
)
from megazoo.cli.run import Run, notes_on_changes, resumed_state
from megazoo.cli.run_record import checksums, inputs_of
from megazoo.cli.summary import summary
from megazoo.cli.tokenizer import find_tokenizer
from megazoo.data import (
    Batches,
    changes,
    check_data,
    check_template,
    fingerprints,
    json_files,
    open_datasets,
    prepare_datasets,
)
from megazoo.data.labels import count_of
from megazoo.environment import is_rank_zero, world_size
from megazoo.evaluation import Tally, evaluate_rows
from megazoo.models.base import Model
from megazoo.models.counts import parameter_count
from megazoo.models.pretrained import load_weights
from megazoo.models.registry import FAMILIES, family_of
from megazoo.optim.adamw import AdamW
from megazoo.optim.loss_scale import LossScale
from megazoo.optim.muon import Muon
from megazoo.parallel.collectives import all_gather_objects, broadcast_from_stage
from megazoo.parallel.compile import check_compiler
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.device import choose_device, set_fp32_precision
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.sizes import product_of
from megazoo.parallel.timing import Stopwatch, spent
from megazoo.planning.plan import note_on_mfu
from megazoo.terminal import print_rank_0
from megazoo.tokenizer import TOKENIZER_FILES, TOKENIZER_SIDECARS, open_tokenizer, tokenizer_files


class Data(NamedTuple):
    """The global batches of a run, by what they are for."""

    training: Batches
    validation: Batches
    test: Batches


def main(arguments: list[str]) -> None:
    run = prepare(arguments)
    if run.finished:
        return
    ctx = start_ranks(run)
    with naming_dead_ranks(ctx):
        model, optimizer = build(run, ctx)
        data = open_data(run, model)
        if not run.finished:
            with Recorder(run, model, optimizer) as recorder:
                train(run, model, optimizer, data, recorder)
            print_rank_0(summary(run, recorder))
    if dist.is_initialized():
        dist.destroy_process_group()


def prepare(arguments: list[str]) -> Run:
    """Read and check all that can be before there are ranks, and before anything is built."""
    options = parse_options(arguments, __doc__)
    save = options.checkpoint.save
    if is_restart() and save and has_checkpoint(save):
        arguments = [*arguments, flag_to_go_on(options), str(save), "--no-load-weights-only"]
        options = parse_options(arguments, __doc__)
    if options.model.import_:
        run_file(options.model.import_)
    weights = open_weights(options)
    source, resumed = weights.described, weights.resumed(options)
    state = resumed_state(resumed)
    if resumed:
        origin = str(resumed.path / TRAINER)
        options = parse_options(arguments, __doc__, resumed=state["settings"], origin=origin)
    config = model_config(options.model, source)
    named = options.data.tokenizer or (source and source.tokenizer) or "byte"
    tokenizer = open_tokenizer(find_tokenizer(named))
    sources = check_data(options.data.data, options.data.split)
    config, labels = settle_labels(config, source, tokenizer, sources)
    check_template(options.data.chat_template)
    parallel = options.parallel
    dp = data_parallel_size(parallel.tp, parallel.pp, parallel.cp)
    check_run(options, FAMILIES[family_of(config)], config, tokenizer, dp, weights)
    if not gives(arguments, "lr"):
        refuse_default_rate(weights)
    run = Run(
        arguments,
        options,
        config,
        tokenizer,
        sources,
        weights.base,
        resumed is not None,
        state,
        labels=labels,
        weights=weights,
    )
    if not options.training.epochs:  # their steps are known when the data is open
        run.check_remaining()
    return run


def start_ranks(run: Run) -> ParallelContext:
    """Start the ranks that are missing, wait for the tokens of the data, and meet the others."""
    parallel = run.options.parallel
    local_ranks = parallel.replica if world_size() == 1 else None
    device = choose_device(parallel.device, local_ranks)
    if run.options.training.compile:
        check_compiler(device.type)
    start_missing_ranks(parallel.tp, parallel.pp, parallel.cp)
    for note in notes_on_changes(run):  # before a file that a checkpoint names is read
        print_rank_0(note)
    if run.weights.base_note:
        print_rank_0(run.weights.base_note)
    if json_files(run.sources) or run.options.logging.record:
        # before any rank waits in a collective, for --timeout at most
        _store = after_rank_zero(lambda: prepare_inputs(run))
    ctx = ParallelContext.from_torch(
        parallel.tp,
        parallel.pp,
        context_parallel_size=parallel.cp,
        context_parallel_method=parallel.cp_method,
        sequence_parallel=parallel.sequence_parallel,
        virtual_pipeline_size=parallel.virtual_pp,
        stage_layers=parse_stage_layers(parallel.stage_layers),
        device=parallel.device,
        timeout=timedelta(seconds=parallel.timeout),
    )
    with propagate_errors(ctx) as call:
        if call:
            call.agree("pretrain_gpt.py", run, {})
    run.settle_dtype(ctx.device.type)
    set_fp32_precision(run.options.training.fp32_precision)
    steps = set(all_gather_objects(run.first_step, ctx))
    if len(steps) > 1:  # torchrun has not told every node of a restart
        raise megazoo.UserError(
            f"ranks would start after different steps: {sorted(steps)}", exit_code=1
        )
    return ctx


def prepare_inputs(run: Run) -> None:
    """Make the tokens of texts that have none, and for --record the checksums of all files."""
    prepare_datasets(run.sources, run.tokenizer, run.options.data.chat_template, run.labels)
    if run.options.logging.record:
        run.files = checksums(inputs_of(run))


def build(run: Run, ctx: ParallelContext) -> tuple[Model, AdamW]:
    """Build this rank's part of the model and of the optimizer, with what --load has of them."""
    options, training = run.options, run.options.training
    introduce(run, ctx)
    dtype = getattr(torch, training.dtype)
    model = megazoo.from_config(run.config, ctx, dtype=dtype, seed=training.seed)
    adapters = run.weights.adapters
    if run.source and (adapters or not run.resuming):
        load_weights(run.source, model)
    add_adapters(model, options, run.weights.settings)
    if training.train_only:
        model.train_only(training.train_only)
    if note := note_on_trained(run.config, model.lora, training.train_only):
        print_rank_0(note)
    if adapters and not run.resuming:
        load(adapters, model)
    model.recompute(training.recompute, training.recompute_interval)
    if training.compile:
        model.compile()
    optimizer = make_optimizer(options, model)
    if run.resuming:
        load(adapters or run.source, model, optimizer)
    if is_rank_zero():
        take_along_tokenizer(run, model)
    return model, optimizer


def make_optimizer(options: Options, model: Model) -> AdamW:
    """Make the optimizer that the settings name."""
    training, chosen, zero = options.training, options.optimizer, options.parallel.zero
    adamw = {"betas": (chosen.beta1, chosen.beta2), "weight_decay": chosen.weight_decay}
    loss_scale = LossScale(
        training.initial_loss_scale, training.loss_scale_window, training.hysteresis
    )
    common = {"clip_grad": chosen.clip_grad, "zero": zero, "loss_scale": loss_scale}
    if chosen.optimizer == "adamw":
        return AdamW(model, **adamw, **common, offload=options.parallel.offload_optimizer)
    return Muon(
        model,
        chosen.muon_lr,
        chosen.muon_momentum,
        ns_steps=chosen.ns_steps,
        ns_dtype=chosen.ns_dtype,
        weight_decay=chosen.weight_decay,
        adamw={"lr": chosen.lr, **adamw},
        **common,
    )


def introduce(run: Run, ctx: ParallelContext) -> None:
    """Print what is trained, and on what."""
    print_rank_0(
        f"{family_of(run.config)}, {kind_of(run)}{parameter_count(run.config):,} parameters, "
        f"on {ctx.world_size} x {ctx.device.type}: "
        f"{product_of(ctx.tp_size, ctx.pp_size, ctx.dp_size, ctx.cp_size)}"
        + (", cp-method ulysses" if ctx.cp_size > 1 and ctx.cp_method == "ulysses" else "")
        + (", sequence parallel" if ctx.sequence_parallel else "")
        + run.note_on_precision(ctx.device.type)
    )
    if run.options.model.import_ and is_rank_zero():
        note = note_on_mfu(run.config, run.options.training.seq_length)
        if note:
            print_rank_0(note)


def kind_of(run: Run) -> str:
    """Return what to say of a classifier, with a comma behind it; nothing of a language model."""
    if not run.labels:
        return ""
    is_new = run.source and not run.source.config.num_labels
    return f"classifier of {count_of(run.labels.num_labels)}{' (a new head)' if is_new else ''}, "


def take_along_tokenizer(run: Run, model: Model) -> None:
    """Have checkpoints carry the tokenizer's files, instead of those that came with the weights; a
    resumed run finds them there."""
    source = run.tokenizer.source
    run.options.data.tokenizer = "byte" if source == "byte" else None
    others = (*TOKENIZER_FILES, *TOKENIZER_SIDECARS)
    kept = {name: data for name, data in model.sidecar_files.items() if name not in others}
    model.sidecar_files = tokenizer_files(source) | kept


def open_data(run: Run, model: Model) -> Data:
    """Open the data, on the stages that use it: the first and the last."""
    options, ctx = run.options, model.ctx
    blends = (None, None, None)
    if model.stages[0].first or model.stages[-1].last:
        blends = open_datasets(
            run.sources,
            run.tokenizer,
            seq_length=options.training.seq_length,
            vocab_size=run.config.vocab_size,
            seed=options.training.seed,
            separate_documents=options.data.separate_documents,
            chat_template=options.data.chat_template,
            packing=options.data.packing,
            labels=run.labels,
            report=print_rank_0,
        )
    if is_rank_zero():
        take_fingerprints(run)
    if options.training.epochs:
        samples = torch.tensor(len(blends[0]) if blends[0] else 0)
        run.settle_epochs(broadcast_from_stage(samples, 0, ctx).item())
    rows, pad = options.training.global_batch_size, run.config.pad_token_id
    return Data(*(Batches(blend, rows, ctx, pad) for blend in blends))


def take_fingerprints(run: Run) -> None:
    """Note what the data is like, for checkpoints, and warn of what is not as it was in the one
    that the run goes on from."""
    template = run.options.data.chat_template
    names, tokenizer = run.sources.names, run.tokenizer.source
    run.fingerprints = fingerprints(names, tokenizer, template, run.labels)
    for change in changes(run.state.get("data", []), run.fingerprints):
        print(f"warning: {change}", file=sys.stderr, flush=True)


def train(run: Run, model: Model, optimizer: AdamW, data: Data, recorder: Recorder) -> None:
    """Train until the last step, or until a signal asks to stop."""
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
                    # A GPU is waited for here, once a step.
                    loss, norm = torch.stack([loss, norm.to(loss.device)]).tolist()
            recorder.log_step(step, loss, norm, tokens, watch)

            stopping = recorder.stop_requested()
            if run.validates_at(step):
                recorder.log_evaluation(step, "validation", *evaluate(run, model, data.validation))
            if run.tests_at(step):
                recorder.log_evaluation(step, "test", *evaluate(run, model, data.test))
            if stopping or run.saves_at(step):
                recorder.save(step)
            if stopping:
                return


def evaluate(run: Run, model: Model, batches: Batches) -> tuple[float, dict[str, float]]:
    """Return the mean loss, in nats a token, over the labelled tokens of --eval-steps batches; of a
    classifier over their rows, with what else is told of it."""
    rows = run.options.training.global_batch_size
    starts = range(0, run.options.evaluation.eval_steps * rows, rows)
    microbatches = run.microbatches(model.ctx)
    total, count, tally = 0.0, 0.0, Tally()
    for batch in batches.ahead(starts, run.options.data.data_workers):
        if run.labels:
            mean, labelled, found = evaluate_rows(model, **batch, num_microbatches=microbatches)
            tally += found
        else:
            mean, labelled = model.eval_batch(
                **batch, num_microbatches=microbatches, return_count=True
            )
        total, count = total + mean.item() * labelled.item(), count + labelled.item()
    return total / max(count, 1), measures_of(tally, run.labels) if run.labels else {}


if __name__ == "__main__":
    run_program(main)
