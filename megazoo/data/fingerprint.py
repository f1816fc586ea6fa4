"""Fingerprints of data sources. Checkpoints store them, so that a resumed run detects changed data.

A fingerprint takes milliseconds for files of any size: only evenly spaced blocks of a long file are
read. Nothing here imports torch.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from megazoo.data.cache import cached_tokens
from megazoo.data.corpus import standard_library_files
from megazoo.data.indexed import IndexedTokens
from megazoo.data.labels import Labels
from megazoo.data.text_files import files_of_stream, is_streamed, is_text

BLOCKS, BLOCK = 64, 4096  # number of blocks read per file, and bytes per block


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a source.

    Attributes:
        source: the source as passed to --data.
        bytes: total size of its files.
        documents: number of documents.
        checksum: crc32 of blocks of its files.
    """

    source: str
    bytes: int = 0
    documents: int = 0
    checksum: int = 0


def fingerprints(
    names: Iterable[str],
    tokenizer: str,
    chat_template: str | None,
    labels: Labels | None = None,
) -> list[dict]:
    """Return the fingerprint of each source as a dictionary for JSON.

    Mock data has only a name.

    Args:
        names: the sources, as passed to --data.
        tokenizer, chat_template, labels: see `cached_tokens`.
    """
    return [asdict(_fingerprint(name, tokenizer, chat_template, labels)) for name in names]


def _fingerprint(
    name: str, tokenizer: str, chat_template: str | None, labels: Labels | None
) -> Fingerprint:
    if name == "mock":
        return Fingerprint(name)
    if name == "stdlib":
        files = standard_library_files()
        sizes = [file.stat().st_size for file in files]
        checksum = crc32(
            repr([(f.name, size) for f, size in zip(files, sizes, strict=True)]).encode()
        )
        every = max(1, len(files) // BLOCKS)
        for file in files[::every]:
            checksum = sampled_checksum(file, checksum, blocks=1)
        return Fingerprint(name, sum(sizes), len(files), checksum)
    if is_streamed(name):
        files = [Path(file) for file in files_of_stream(name) if os.path.isfile(file)]
        checksum = 0
        for file in files:
            checksum = sampled_checksum(file, checksum, max(2, BLOCKS // len(files)))
        return Fingerprint(name, sum(file.stat().st_size for file in files), 0, checksum)
    if is_text(Path(name)):
        tokens = cached_tokens(Path(name), tokenizer, chat_template, labels)[0]
        files = [Path(name)]
    else:
        tokens = IndexedTokens(name)
        files = [tokens.index, tokens.bin]
    checksum = 0
    for file in files:
        checksum = sampled_checksum(file, checksum)
    size = sum(file.stat().st_size for file in files)
    return Fingerprint(name, size, len(tokens.documents) - 1, checksum)


def sampled_checksum(file: Path, checksum: int = 0, blocks: int = BLOCKS) -> int:
    """Update a crc32 with evenly spaced blocks of a file, including the first and the last block.

    A short file is read completely.
    """
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= blocks * BLOCK:
            return crc32(opened.read(), checksum)
        for number in range(blocks):
            opened.seek((size - BLOCK) * number // max(1, blocks - 1))
            checksum = crc32(opened.read(BLOCK), checksum)
    return checksum


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
        if old.get("position") and is_streamed(name) and _same_source(old, name):
            positions[number] = old["position"]
    return positions


def _same_source(then: dict, name: str) -> bool:
    """Return whether a source is the same as in the checkpoint, at the same index of the blend.

    Only the file names of paths are compared, because directories may have moved. URLs must be
    equal.
    """
    if "://" in name:
        return then["source"] == name
    return Path(then["source"]).name == Path(name).name
