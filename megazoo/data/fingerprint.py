"""Fingerprints of data sources, which checkpoints store, so that a resumed run detects changed
data."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from megazoo.data.labels import Labels
from megazoo.data.sources import Encoding, find_source, source_named


def fingerprints(
    names: Iterable[str],
    tokenizer: str,
    chat_template: str | None,
    labels: Labels | None = None,
    preferences: bool = False,
) -> list[dict]:
    """Return the fingerprint of each source as a dictionary for JSON.

    Mock data has only a name.

    Args:
        names: the sources, as passed to --data.
        tokenizer, chat_template, labels, preferences: see `Encoding`.
    """
    encoding = Encoding(tokenizer, chat_template, labels, preferences)
    return [asdict(source_named(name).resolved().fingerprint(encoding)) for name in names]


def changes(then: list[dict], now: list[dict]) -> list[str]:
    """Return a line for each source that has changed since its fingerprint was taken.

    Sources that are in only one of the two lists are ignored.
    """
    lines = []
    for old, new in zip(then, now, strict=False):
        name = new["source"]
        same = all(old[key] == value for key, value in new.items() if key != "source")
        if not _same_source(old, name) or same:
            continue
        what = next((key for key in ("bytes", "documents") if old[key] != new[key]), None)
        difference = f"{old[what]:,} {what} then, {new[what]:,} now" if what else "other contents"
        lines.append(
            f"{name} has changed since the checkpoint: {difference}: samples will not be the same"
        )
    return lines


def positions_in(then: list[dict], names: Sequence[str]) -> list[dict | None]:
    """Return the checkpoint's position of each streamed source; None for other sources."""
    positions: list[dict | None] = [None] * len(names)
    for number, (old, name) in enumerate(zip(then, names, strict=False)):
        if old.get("position") and _same_source(old, name):
            source = find_source(name)
            positions[number] = old["position"] if source and source.streamed else None
    return positions


def _same_source(then: dict, name: str) -> bool:
    """Return whether a source is the same as in the checkpoint, at the same index of the blend.

    Only the file names of paths are compared, because directories may have moved. URLs must be
    equal.
    """
    if "://" in name:
        return then["source"] == name
    return Path(then["source"]).name == Path(name).name
