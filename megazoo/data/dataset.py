"""Data of a run: weighted sources, each split into training, validation and test."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megazoo.data.conversations import template_of
from megazoo.data.labels import Labels
from megazoo.data.order import Blend, shares_of
from megazoo.data.samples import LabelledTexts
from megazoo.data.sources import Encoding, Opening, Source, names_in, source_named
from megazoo.errors import UserError
from megazoo.tokenizer import Tokenizer

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
    preferences: bool = False,
    positions: Sequence[dict | None] | None = None,
    evaluates: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> Parts:
    """Open the sources and return the blends of a run.

    The class that accepts the name of a source opens it: see `Source`. The first documents are for
    training, the last for the test. Those of stdlib are assigned at random, the same in every run;
    those of a stream alternate. Only training data is shuffled.
    vocab_size: the model's. labels: of a classifier's data, which is JSONL with them, or "mock".
    positions: where training goes on in each streamed source, as `Blend.positions` says.
    evaluates: whether validation and test data are used: only then they must not be empty.
    report: is told what is cut, and of text how many documents it is. The other arguments are as
    the settings of those names say. Raises UserError for what can't be opened, or leaves nothing to
    train on.
    """
    chat_template = template_of(chat_template, tokenizer)
    eod = tokenizer.eod if separate_documents else None
    encoding = Encoding(tokenizer.source, chat_template, labels, preferences)
    opening = Opening(
        tokenizer, encoding, sources.shares, seq_length, vocab_size, seed, eod, packing
    )
    opened = [source_named(name).resolved() for name in sources.names]
    datasets = [
        source.parts(replace(opening, position=position))
        for source, position in zip(opened, positions or [None] * len(opened), strict=True)
    ]
    kinds = PARTS if evaluates else PARTS[:1]
    for source, parts in zip(opened, datasets, strict=True):
        _tell_cuts(source.name, parts, seq_length, report)
        if note := source.note(parts, encoding):
            report(f"{source.name}: {note}")
        _check_parts(source.name, kinds, parts, sources.shares, seq_length)
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
    if long := [length for part in parts for length in getattr(part, "long", ())]:
        report(
            f"{name}: skipped pairs that are longer than --seq-length {seq_length}: {len(long):,}. "
            f"{_enough(long)}"
        )
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
            of_kind = "" if kind == "training" else f"{kind} "
            if long := getattr(part, "long", None):
                raise UserError(
                    f"{name}: every {of_kind}pair is longer than --seq-length {seq_length}: use "
                    f"--seq-length {long[0]} or more"
                )
            if needed := getattr(part, "needed", None):
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
    preferences: bool = False,
) -> None:
    """Tokenize text files and cache the tokens next to them, and open streamed sources to find
    errors early. Tokenizing may take long the first time."""
    encoding = Encoding(tokenizer.source, chat_template, labels, preferences)
    for name in sources.names:
        source_named(name).resolved().prepare(encoding)


def needs_preparation(sources: Sources) -> bool:
    """Return whether the sources need `prepare_datasets`."""
    classes = (type(source_named(name)) for name in sources.names)
    return any(each.prepare is not Source.prepare for each in classes)


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
    names, weights = names_in(data), (1.0,)
    if len(data) != 1:
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
        source_named(name).check()
    training, validation, test = (share / sum(shares) for share in (*shares, 0.0)[:3])
    return Sources(names, weights, (training, validation, test))
