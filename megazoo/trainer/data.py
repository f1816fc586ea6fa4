"""The data of a run: its tokens, batches and fingerprints."""

import sys
from typing import NamedTuple

import torch

from megazoo.data import (
    Batches,
    changes,
    fingerprints,
    open_datasets,
    prepare_datasets,
)
from megazoo.data.conversations import as_jinja
from megazoo.data.fingerprint import positions_in
from megazoo.data.formats import is_conversation, is_preference
from megazoo.data.sources import source_named
from megazoo.data.teacher import TopTokens, cached_top_tokens
from megazoo.engine.auxiliary import counts_tokens
from megazoo.environment import is_rank_zero
from megazoo.errors import UserError
from megazoo.losses import TopKDistillation
from megazoo.losses.reference import COMPUTED
from megazoo.models.base import Model
from megazoo.parallel.collectives import broadcast_from_stage
from megazoo.sidecars import GENERATION, is_sidecar
from megazoo.terminal import note_rank_0, print_rank_0
from megazoo.tokenizer import tokenizer_files
from megazoo.tokenizer.templates import with_template
from megazoo.trainer.record import checksums, inputs_of
from megazoo.trainer.run import Run


class Data(NamedTuple):
    """The global batches of a run: training, validation and test."""

    training: Batches
    validation: Batches
    test: Batches


def prepare_inputs(run: Run) -> None:
    """Check that the data fits the loss, and tokenize texts without cached tokens. For --record,
    also compute the files' checksums."""
    _check_data_of_loss(run)
    template = run.options.data.chat_template
    prepare_datasets(run.sources, run.tokenizer, template, run.labels, run.has_pairs)
    if run.options.logging.record:
        run.files = checksums(inputs_of(run))


def _check_data_of_loss(run: Run) -> None:
    """Raise UserError if the loss needs preferences or tensors that a source does not have, or if a
    source has other tensors, or tensors of another size."""
    name, loss, reference = run.options.loss.loss, run.loss, run.options.loss.reference
    needs = set(loss.needs) - COMPUTED.keys() if loss else set()
    sources = [source_named(each).resolved() for each in run.sources.names]
    for source in sources:
        row = source.first_row() if run.has_pairs else None
        found = {*source.tensors}
        if found and reference:
            raise UserError(
                f"--reference cannot be used with {source.name}, which has a teacher's most likely "
                "tokens: remove --reference"
            )
        if not found <= needs:
            raise UserError(
                f"--loss {name} can't be computed from {source.name}, which has a teacher's most "
                "likely tokens: use --loss distill; with --distill-lm-weight 1, it trains on the "
                "tokens without the teacher"
            )
        if isinstance(loss, TopKDistillation) and not found:
            raise UserError(
                f"--loss {name} needs a teacher, and {source.name} has no most likely tokens of "
                "one: pass the teacher with --reference, or use only files with such tokens"
            )
        if run.has_pairs and (row is None or not is_preference(row[1])):
            streamed = " or streamed" if source.streamed else ""
            raise UserError(
                f"--loss {name} can't be computed from {source.name}, which has "
                f"no chosen and rejected answers{streamed}: use a file of rows with them"
            )
    tops = (source for source in sources if isinstance(source, TopTokens))
    counts = {source.name: cached_top_tokens(source.path).ids.shape[1] for source in tops}
    if len({*counts.values()}) > 1:
        found = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise UserError(
            "all files of a run need the same number of a teacher's most likely tokens, but they "
            f"differ ({found}): write them with the same --top-k"
        )


def open_data(run: Run, model: Model) -> Data:
    """Open the data on the stages that use it: the first and the last."""
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
            preferences=run.has_pairs,
            positions=positions_in(run.state.get("data") or [], run.sources.names),
            evaluates=options.evaluation.eval_steps > 0,
            report=print_rank_0,
        )
    if is_rank_zero():
        take_fingerprints(run)
    counts = torch.tensor([len(blend) if blend and not blend.streamed else 0 for blend in blends])
    samples, *ends = broadcast_from_stage(counts, ctx.placement.first_rank, ctx).tolist()
    if options.training.epochs:
        for note in run.settle_epochs(samples):
            (note_rank_0 if note.startswith("warning") else print_rank_0)(note)
    rows, pad = options.training.global_batch_size, run.config.pad_token_id
    training, *held_out = blends
    micro = options.training.micro_batch_size
    evaluated = (
        Batches(blend, rows, ctx, pad, end=end or None, micro_batch=micro)
        for blend, end in zip(held_out, ends, strict=True)
    )
    marks, size_at = counts_tokens(model), run.batch_sizes.at
    first = Batches(training, rows, ctx, pad, mark_padding=marks, size_at=size_at)
    return Data(first, *evaluated)


def take_fingerprints(run: Run) -> None:
    """Compute the fingerprints of the data for checkpoints. Warn about changes since the checkpoint
    from which the run resumes."""
    template = run.options.data.chat_template
    names, tokenizer = run.sources.names, run.tokenizer.source
    run.fingerprints = fingerprints(names, tokenizer, template, run.labels, run.has_pairs)
    for change in changes(run.state.get("data") or [], run.fingerprints):
        print(f"warning: {change}", file=sys.stderr, flush=True)


def take_along_tokenizer(run: Run, model: Model) -> None:
    """Store the tokenizer's files in checkpoints, in place of those that came with the weights. A
    resumed run loads them from there. A given chat template replaces all templates, because it
    formats all conversations."""
    source = run.tokenizer.source
    run.options.data.tokenizer = "byte" if source == "byte" else None
    kept = {
        name: data
        for name, data in model.sidecar_files.items()
        if name == GENERATION or not is_sidecar(name)  # of a user
    }
    own, trained = run.tokenizer.chat_template, run.options.data.chat_template
    talks = trained and trains_conversations(run)
    template = as_jinja(trained, run.tokenizer) if talks else own
    files = tokenizer_files(source, templates=True)
    if template:
        files = with_template(files, template, only=template != own)
    model.sidecar_files = files | kept


def trains_conversations(run: Run) -> bool:
    """Return whether a file of the data has conversations, which need a chat template."""
    rows = (source_named(name).first_row() for name in run.sources.names)
    if run.has_pairs:
        return any(row and isinstance(row[1].get("chosen"), list) for row in rows)
    return not run.labels and any(row and is_conversation(row[1]) for row in rows)
