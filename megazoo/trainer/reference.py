"""The reference of a run, and its log-probabilities that are computed once and stored next to the
data."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from megazoo.data.loading import Batches
from megazoo.data.order import Blend
from megazoo.data.preferences import PackedPreferences, Preferences
from megazoo.engine.auxiliary import counts_tokens
from megazoo.errors import UserError
from megazoo.files import locked, open_own
from megazoo.lora.checksum import checksum_of
from megazoo.lora.settings import is_adapter
from megazoo.losses.reference import Reference
from megazoo.models.base import Model
from megazoo.models.pretrained import load_weights, open_source
from megazoo.parallel.collectives import all_gather_objects, broadcast_from_stage
from megazoo.terminal import count_bar, note_rank_0, print_error, print_rank_0
from megazoo.trainer.data import Data
from megazoo.trainer.run import Run

Dataset = Preferences | PackedPreferences | None  # None: on stages without data


def reference_of(run: Run, model: Model, data: Data, stop: Callable[[], bool]) -> Reference:
    """Return the loss of a run with its reference: the model of --reference, the trained model
    without its adapters, or log-probabilities in the data.

    A warning is printed if the model of --reference is not that of earlier steps. stop: returns
    whether a signal ends the run.
    """

    def load() -> Model:
        source = open_source(str(run.options.loss.reference))
        other = source.model.empty(source.config, model.ctx, dtype=model.dtype)
        load_weights(source, other)
        return other

    given, precomputes = run.options.loss.reference, run.options.loss.precompute_reference
    reference = Reference(run.loss, model, load if given else None)
    if (other := reference.model) and (given or precomputes):
        base = [entry for entry in other.entries() if not is_adapter(entry.name)]
        checksum = checksum_of(base, other, torch.float32)
        if given:
            run.reference = checksum
            if run.state.get("reference", checksum) != checksum:
                note_rank_0(f"warning: --reference {given} has other weights than in earlier steps")
        if precomputes:
            precompute(run, data, reference, other, checksum, stop)
    return reference


def precompute(
    run: Run,
    data: Data,
    reference: Reference,
    model: Model,
    checksum: str,
    stop: Callable[[], bool],
) -> None:
    """Set the log-probabilities of the reference in the data, and drop the reference model.

    Those that are in a file next to the data are read; the others are computed and added to it. All
    ranks call it together.

    Args:
        run: the run.
        data: the data of the run, which is of pairs.
        reference: the reference. Afterwards it computes nothing.
        model: its model.
        checksum: of the weights of the model without adapters.
        stop: returns whether a signal ends the run: then nothing is stored.
    """
    config = json.dumps(vars(model.config), sort_keys=True, default=str)
    seq_length = run.options.training.seq_length
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{checksum} {model.dtype} {seq_length} {config}".encode())
    computed, found = 0, 0
    for dataset in _datasets(data, len(run.sources.names)):
        pairs = dataset.pairs if isinstance(dataset, PackedPreferences) else dataset
        file = _file_of(pairs, digest.hexdigest()) if pairs else None
        table = _read(file, pairs) if file and pairs else None
        known = table is None or not np.isnan(table[_used(dataset)]).any()
        if not all(all_gather_objects(known, model.ctx)):
            table = _computed(run, model, dataset, reference, stop)
            if stop():
                return
            if file and pairs and table is not None:
                _add(file, pairs, table)
            computed += len(_used(dataset))
        else:
            found += len(_used(dataset))
        if pairs:
            pairs.reference = table
    print_rank_0(
        f"log-probabilities of the reference: {computed:,} pairs computed, {found:,} read from the "
        "files next to the data"
    )
    reference.drop()


def _datasets(data: Data, sources: int) -> Iterator[Dataset]:
    """Yield the datasets of all sources for training, validation and test; None on stages without
    data."""
    for batches in data:
        datasets = batches.blend.datasets if batches.blend else [None] * sources
        yield from datasets


def _used(dataset: Dataset) -> np.ndarray:
    """Return the pairs that samples of a dataset contain."""
    if isinstance(dataset, PackedPreferences):
        return dataset.numbers
    return np.arange(len(dataset or ()))


def _computed(
    run: Run, model: Model, dataset: Dataset, reference: Reference, stop: Callable[[], bool]
) -> np.ndarray | None:
    """Return the log-probabilities of all pairs of a dataset: fp32 [pairs, 2]. None on stages
    without data."""
    ctx, size = model.ctx, torch.tensor(len(dataset or ()))
    count = int(broadcast_from_stage(size, ctx.placement.first_rank, ctx))
    rows, micro = run.options.training.global_batch_size, run.options.training.micro_batch_size
    batches = Batches(
        Blend([dataset]) if dataset else None,
        rows,
        ctx,
        mark_padding=counts_tokens(model),
        end=count,
        micro_batch=micro,
    )
    starts, places, values = batches.starts(math.ceil(count / rows)), [], []
    with (
        closing(batches.ahead(starts, run.options.data.data_workers)) as built,
        count_bar(len(starts), "reference", "batches") as bar,
    ):
        for start, batch in zip(starts, built, strict=True):
            if stop():
                break
            mine = batches.rows_after(start)
            found = reference(batch, mine // micro).get("reference")
            first = start + ctx.dp_rank * mine
            if found is not None and dataset:
                samples = range(first, max(first, min(first + mine, count)))
                for sample, logprobs in zip(samples, found.view(mine, -1, 2).cpu(), strict=False):
                    pairs = dataset.pairs_in(sample)
                    places.append(pairs)
                    values.append(logprobs[: len(pairs)].numpy())
            bar.update()
    own = (np.concatenate(places), np.concatenate(values)) if places else None
    gathered = all_gather_objects(own if ctx.tp_rank == ctx.cp_rank == 0 else None, ctx)
    if not dataset:
        return None
    pairs = dataset.pairs if isinstance(dataset, PackedPreferences) else dataset
    table = np.full((len(pairs), 2), np.nan, np.float32)
    for places, values in filter(None, gathered):
        table[places] = values
    return table


def _file_of(pairs: Preferences, digest: str) -> Path:
    """Return the file of the log-probabilities under a reference, next to the tokens of pairs."""
    tokens = pairs.chosen.tokens.index
    return tokens.with_name(f"{tokens.stem}_reference_{digest}.safetensors")


def _read(file: Path, pairs: Preferences) -> np.ndarray:
    """Return the log-probabilities of pairs that a file has, and NaN for the others: fp32 [pairs,
    2]."""
    table = np.full((len(pairs), 2), np.nan, np.float32)
    if file.is_file():
        rows, logprobs = _contents(file)
        _, here, there = np.intersect1d(pairs.rows, rows, return_indices=True)
        table[here] = logprobs[there]
    return table


def _contents(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of rows and their log-probabilities: int64 [rows] and fp32 [rows, 2]."""
    try:
        tensors = load_file(file)
        rows, logprobs = tensors["rows"], tensors["logprobs"]
        fits = rows.ndim == 1 and rows.dtype == np.int64 and logprobs.shape == (len(rows), 2)
        if not fits or not np.isfinite(logprobs).all():
            raise ValueError("its tensors have other shapes, types or values")
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{file} can't be read ({error}): delete it, and its values are computed again"
        ) from None
    return rows, logprobs


def _add(file: Path, pairs: Preferences, table: np.ndarray) -> None:
    """Add the log-probabilities of pairs to a file, unless another rank has added them."""
    known = ~np.isnan(table).any(axis=1)
    rows, logprobs = pairs.rows[known].astype(np.int64), table[known]
    staging = file.with_suffix(".staging")
    try:
        with locked(file.with_suffix(".lock")):
            if file.is_file():
                old_rows, old = _contents(file)
                others = ~np.isin(rows, old_rows)
                if not others.any():
                    return
                rows = np.append(old_rows, rows[others])
                logprobs = np.append(old, logprobs[others], axis=0)
            with open_own(staging, truncate=True) as output:
                output.write(save({"rows": rows, "logprobs": logprobs}))
            os.replace(staging, file)
    except OSError as error:
        print_error(f"warning: {file} can't be written: {error.strerror}")
