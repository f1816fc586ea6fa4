"""Data of a run: weighted sources, each split into training, validation and test."""

import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megazoo.data.cache import cached_tokens
from megazoo.data.conversations import template_of
from megazoo.data.corpus import standard_library
from megazoo.data.indexed import IndexedTokens
from megazoo.data.labels import Labels
from megazoo.data.order import Blend, shares_of
from megazoo.data.samples import (
    Conversations,
    LabelledTexts,
    MockDataset,
    PackedDataset,
    Vocabulary,
)
from megazoo.data.streaming import (
    Position,
    StreamedTexts,
    TextStream,
    check_stream,
)
from megazoo.data.text_files import has_objects, is_streamed, is_text
from megazoo.errors import UserError
from megazoo.tokenizer import Tokenizer

SPLIT_SEED = 1234  # which documents are held out never depends on the run
PARTS = ("training", "validation", "test")


class Parts(NamedTuple):
    """The blends of a run. validation and test are None if the split has no share for them."""

    training: Blend
    validation: Blend | None
    test: Blend | None


class Sources(NamedTuple):
    """Parsed --data and --split. shares: of training, validation and test; they add up to 1."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    shares: tuple[float, float, float]


def open_datasets(
    sources: Sources,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    vocab_size: int,
    seed: int,
    separate_documents: bool = False,
    chat_template: str | None = None,
    packing: bool = False,
    labels: Labels | None = None,
    positions: Sequence[dict | None] | None = None,
    evaluates: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> Parts:
    """Open the sources and return the blends of a run.

    A source is "stdlib"; "mock", random tokens; the prefix of token files; a JSONL or JSON file of
    texts or conversations, a .parquet file of conversations, or a .txt file of paragraphs, whose
    tokens are cached next to it; or streamed files: see `StreamedTexts`. The first documents are
    for training, the last for the test. Those of stdlib are assigned at random, the same in every
    run; those of a stream alternate. Only training data is shuffled.
    vocab_size: the model's. labels: of a classifier's data, which is JSONL with them, or "mock".
    positions: where training goes on in each streamed source, as `Blend.positions` says.
    evaluates: whether validation and test data are used: only then they must not be empty.
    report: is told what is cut, and of text how many documents it is. The other arguments are as
    the settings of those names say. Raises UserError for what can't be opened, or leaves nothing to
    train on.
    """
    chat_template = template_of(chat_template, tokenizer)
    eod = tokenizer.eod if separate_documents else None
    datasets = [
        _open_labelled(name, tokenizer, sources.shares, seq_length, vocab_size, labels)
        if labels
        else _open_streamed(
            name, tokenizer, sources.shares, seq_length, vocab_size, seed, eod, position
        )
        if is_streamed(name)
        else _open(
            name, tokenizer, sources.shares, seq_length, vocab_size, eod, chat_template, packing
        )
        for name, position in zip(
            sources.names, positions or [None] * len(sources.names), strict=True
        )
    ]
    kinds = PARTS if evaluates else PARTS[:1]
    for name, parts in zip(sources.names, datasets, strict=True):
        _tell_cuts(name, parts, seq_length, report)
        if not labels and is_text(Path(name)) and not has_objects(Path(name)):
            (tokens,) = cached_tokens(Path(name), tokenizer.source, chat_template)
            count = len(tokens.documents) - 1
            what = f"{count:,} documents, a paragraph each" if count > 1 else "one document"
            report(f"{name}: {what}")
        if isinstance(parts[0], StreamedTexts):
            report(f"{name}: streamed, shuffled within blocks of {parts[0].block:,} samples")
        _check_parts(name, kinds, parts, sources.shares, seq_length)
    training, *held_out = (
        Blend(parts, sources.weights, seed if kind == "training" else None)
        if share and kind in kinds
        else None
        for kind, parts, share in zip(
            PARTS, zip(*datasets, strict=True), sources.shares, strict=True
        )
    )
    assert training  # whose share is not 0
    validation, test = held_out
    return Parts(training, validation, test)


def _tell_cuts(name: str, parts: list, seq_length: int, report: Callable[[str], None]) -> None:
    """Report how many conversations, or rows of a classifier, of a source are truncated."""
    cut = sum(getattr(part, "cut", 0) for part in parts)
    if not cut:
        return
    kind = "rows" if isinstance(parts[0], LabelledTexts) else "conversations"
    line = f"{name}: {cut:,} {kind} are longer than --seq-length {seq_length} and are truncated"
    complete = [length for part in parts for length in getattr(part, "complete", ())]
    needed = [length for part in parts for length in getattr(part, "needed", ())]
    if complete:
        line += f": {_enough(complete, ' complete')}"
    if needed:
        line += (
            f"; {len(needed):,} of them are skipped, because no tokens with a loss remain: "
            f"{_enough(needed)}"
        )
    report(line)


def _enough(lengths: list[int], how: str = "") -> str:
    """Return the shortest --seq-length that keeps one conversation, and the one that keeps all.

    lengths: the length that each needs. how: how they are kept.
    """
    least, most = min(lengths), max(lengths)
    if least < most:
        return f"--seq-length {least} keeps one of them{how}, {most} all"
    kept = "all of them" if len(lengths) > 1 else "it"
    return f"--seq-length {most} keeps {kept}{how}"


def _check_parts(
    name: str, kinds: Sequence[str], parts: list, shares: tuple[float, ...], seq_length: int
) -> None:
    """Raise UserError if the split leaves a part of a source, of these kinds, without a sample."""
    for kind, part, share in zip(PARTS, parts, shares, strict=True):
        if kind in kinds and share and not len(part):
            if needed := getattr(part, "needed", None):
                of_kind = "" if kind == "training" else f"{kind} "
                raise UserError(
                    f"{name}: all {len(needed):,} {of_kind}conversations are longer than "
                    f"--seq-length {seq_length} before their first answer. The shortest length "
                    f"that keeps one is {needed[0]}: use --seq-length {needed[0]} or more"
                )
            split = ",".join(f"{share:.4g}" for share in shares)
            hint = ": use more documents"
            if kind != "training":
                hint += ", or --split without that part, such as 100,0"
            raise UserError(
                f"{name}: --split {split} leaves no {kind} sample of {seq_length} tokens{hint}"
            )


def prepare_datasets(
    sources: Sources,
    tokenizer: Tokenizer,
    chat_template: str | None,
    labels: Labels | None = None,
) -> None:
    """Tokenize text files and cache the tokens next to them, and open streamed sources once to find
    errors early. Tokenizing may take long the first time."""
    for name in files_of_text(sources):
        cached_tokens(Path(name), tokenizer.source, chat_template, labels)
    for name in filter(is_streamed, sources.names):
        TextStream(name)


def needs_preparation(sources: Sources) -> bool:
    """Return whether the sources need `prepare_datasets`."""
    return bool(files_of_text(sources)) or any(map(is_streamed, sources.names))


def files_of_text(sources: Sources) -> list[str]:
    """Return the sources whose tokens are cached: files of objects and plain text."""
    return [name for name in sources.names if is_text(Path(name))]


def check_data(data: Sequence[str], split: str) -> Sources:
    """Parse --data and --split without opening a file.

    Args:
        data: One source, or alternating weights and sources.
        split: Two or three shares, such as 95,5 or 98,1,1.

    Raises:
        UserError: A source does not exist, or the split is invalid.
    """
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if (
        len(shares) not in (2, 3)
        or not all(0 <= share < math.inf for share in shares)
        or not shares[0]
    ):
        raise UserError(
            f"--split {split!r} is not valid: use two or three proportions (training, "
            "validation, test), such as 95,5 or 98,1,1"
        )
    if len(data) == 1:
        names, weights = tuple(data), (1.0,)
    else:
        names = tuple(data[1::2])
        try:
            weights = tuple(float(weight) for weight in data[::2])
        except ValueError:
            weights = ()
        if not names or len(names) != len(weights):
            raise UserError(
                f"--data {' '.join(data)!r} is not valid: use one source, or alternating "
                "weights and sources, such as 0.7 a 0.3 b"
            )
        shares_of(weights)
    for name in names:
        if is_streamed(name):
            check_stream(name)
            continue
        built_in = name in ("stdlib", "mock")
        if not built_in and not os.path.isfile(f"{name}.idx") and not is_text(Path(name)):
            raise UserError(
                f"--data {name!r} is not found, or not supported: use stdlib, the prefix of "
                "token files (PREFIX.bin and PREFIX.idx), a .jsonl, .json or .txt file, a .parquet "
                "file, or stream:FILES. `megazoo preprocess` tokenizes other text"
            )
    training, validation, test = (share / sum(shares) for share in (*shares, 0.0)[:3])
    return Sources(names, weights, (training, validation, test))


def _open(
    name: str,
    tokenizer: Tokenizer,
    shares: tuple[float, ...],
    seq_length: int,
    vocab_size: int,
    eod: int | None,
    chat_template: str | None,
    packing: bool,
) -> list[PackedDataset | Conversations | MockDataset]:
    """Open a source and return its training, validation and test part."""
    if name == "mock":
        return [MockDataset(vocab_size, seq_length, seed) for seed in range(len(shares))]
    if name == "stdlib":
        documents = standard_library()
        order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
        parts = (
            sorted(order[first:last]) for first, last in pairwise(_cuts(len(documents), shares))
        )
        streams = (_stream([documents[i] for i in part], tokenizer) for part in parts)
        return [
            PackedDataset(stream, seq_length, eod, vocab_size, name, tokenizer=tokenizer)
            for stream in streams
        ]
    if is_text(Path(name)):
        tokens, *loss_mask = cached_tokens(Path(name), tokenizer.source, chat_template)
    else:
        tokens, loss_mask = IndexedTokens(name), []
        _check_ends(tokens, eod)
    if not len(tokens.tokens):
        raise UserError(f"{name} has no tokens")
    cuts = list(pairwise(_cuts(len(tokens.documents) - 1, shares)))
    if loss_mask:
        return [
            Conversations(
                tokens,
                loss_mask[0],
                first,
                last,
                seq_length,
                packing,
                Vocabulary(vocab_size, tokenizer),
                name,
            )
            for first, last in cuts
        ]
    return [
        PackedDataset(stream, seq_length, eod, vocab_size, str(tokens.bin), stream.start, tokenizer)
        for stream in (tokens.stream(*cut) for cut in cuts)
    ]


def _open_streamed(
    name: str,
    tokenizer: Tokenizer,
    shares: tuple[float, ...],
    seq_length: int,
    vocab_size: int,
    seed: int,
    eod: int | None,
    position: dict | None,
) -> list[StreamedTexts | None]:
    """Open a streamed source and return its training, validation and test parts; None for a part
    without a share."""
    dealt = [share for share in shares if share]
    parts = iter(range(len(dealt)))
    return [
        StreamedTexts(
            name,
            tokenizer,
            dealt,
            next(parts),
            seq_length,
            seed=None if number else seed,
            eod=eod,
            position=Position.of(position) if position and not number else None,
            vocab_size=vocab_size,
        )
        if share
        else None
        for number, share in enumerate(shares)
    ]


def _open_labelled(
    name: str,
    tokenizer: Tokenizer,
    shares: tuple[float, ...],
    seq_length: int,
    vocab_size: int,
    labels: Labels,
) -> list[LabelledTexts | MockDataset]:
    """Open a source of a classifier's data, and return its training, validation and test part."""
    if name == "mock":
        return [MockDataset(vocab_size, seq_length, seed, labels) for seed in range(len(shares))]
    tokens, pair, label = cached_tokens(Path(name), tokenizer.source, "", labels)
    if not len(tokens):
        raise UserError(f"{name} has no rows")
    before, vocabulary = len(tokenizer.before), Vocabulary(vocab_size, tokenizer)
    return [
        LabelledTexts(
            tokens, pair, label, first, last, seq_length, labels, before, vocabulary, name
        )
        for first, last in pairwise(_cuts(len(tokens), shares))
    ]


def _check_ends(tokens: IndexedTokens, eod: int | None) -> None:
    """Raise UserError for token files whose first document does not end with `eod`, if documents
    are separated by it."""
    first = tokens.stream(0, min(1, len(tokens.documents) - 1))
    if eod is not None and len(first) and first[-1:].item() != eod:
        raise UserError(
            f"{tokens.bin}: its first document doesn't end with the tokenizer's {eod}, "
            "which separate-documents needs: preprocess the data with --append-eod"
        )


def _cuts(documents: int, shares: tuple[float, ...]) -> list[int]:
    """Return the first document of each part, and the end of the last part."""
    return [0, *(round(documents * sum(shares[:number])) for number in (1, 2)), documents]


def _stream(documents: list[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """Return the concatenated tokens of documents, each followed by the end-of-document token."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = np.array([tokenizer.eod], dtype)
    # The name of a special token in a document is ordinary text.
    texts = (
        tokenizer.encode_to_numpy(text, parse_special=False).astype(dtype, copy=False)
        for text in documents
    )
    return np.concatenate([part for text in texts for part in (text, end)] or [end])
