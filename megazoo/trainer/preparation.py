"""Complete and check the settings of a run, before its ranks start."""

from datetime import timedelta

from megazoo.data import needs_preparation
from megazoo.data.conversations import template_of
from megazoo.data.dataset import check_data
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES, family_of
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.device import set_fp32_precision
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.startup import after_rank_zero
from megazoo.tokenizer import open_tokenizer
from megazoo.tokenizer.templates import chat_templates_in
from megazoo.trainer.adapters import Weights
from megazoo.trainer.classifier import settle_labels
from megazoo.trainer.data import prepare_inputs
from megazoo.trainer.defaults import defaults_for, fill_in, of_rows
from megazoo.trainer.options import Options
from megazoo.trainer.rules import check_run, check_values, model_config, settle_steps
from megazoo.trainer.run import Run, Settings
from megazoo.trainer.tokenizer import find_tokenizer, with_vocabulary


def complete(
    arguments: list[str], options: Options, weights: Weights, state: dict, *, resuming: bool
) -> Settings:
    """Fill in the settings that depend on the model, and check the values.

    Args:
        arguments: The command line, for the record and the summary.
        options: Settings of the user and of the resumed run.
        weights: Initial weights.
        state: Result of `resumed_state`.
        resuming: Whether a checkpoint's run continues.

    Raises:
        UserError: As `model_config`, `check_values` and `settle_steps`.
    """
    config = model_config(options.model, weights.described)
    unset = {name for name, value in options.values.items() if value is None}
    defaults = defaults_for(options, config, weights)
    later = of_rows(options, defaults)
    filled = fill_in(options, defaults, weights, later)
    check_values(options)
    settle_steps(options, defaults.warmup)
    return Settings(
        arguments, options, weights, resuming, state, config, unset, defaults, filled, later
    )


def check(settings: Settings, dp: int) -> Run:
    """Check that settings, model, tokenizer and data fit together, and return the run.

    dp: the data-parallel size. Raises UserError as `open_tokenizer`, `check_data`, `settle_labels`
    and `check_run`.
    """
    options, weights = settings.options, settings.weights
    source = weights.described
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
    check_run(options, FAMILIES[family_of(config)], config, tokenizer, dp, weights)
    settings.config = config
    run = Run(**vars(settings), tokenizer=tokenizer, sources=sources, labels=labels)
    if not options.training.epochs:  # the number of steps is known when the data is open
        run.check_remaining()
    return run


def connect(run: Run) -> ParallelContext:
    """Wait until the data is tokenized, and connect to the other ranks, which have been started.

    Raises:
        UserError: The settings of the ranks differ, or would start after different steps.
    """
    if needs_preparation(run.sources) or run.options.logging.record or run.loss:
        # before any rank waits in a collective, which ends after --timeout
        _store = after_rank_zero(lambda: prepare_inputs(run))
    parallel = run.options.parallel
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
