"""Fingerprints of the sources of data, kept in checkpoints, so that a resumed run can tell which
have changed.

A fingerprint takes milliseconds whatever a file's size: of a long file only blocks at even
distances are read. Nothing here imports torch.
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

BLOCKS, BLOCK = 64, 4096  # of a file that are read, and the bytes of each


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of a source.

    source: as --data names it. bytes: of its files. documents: how many it has. checksum: crc32 of
    blocks of its files.
    """

    source: str
    bytes: int = 0
    documents: int = 0
    checksum: int = 0


def fingerprints(
    names: Iterable[str], tokenizer: str, chat_template: str, labels: Labels | None = None
) -> list[dict]:
    """Return the fingerprint of each source, as a dictionary for JSON; of mock data there is
    nothing to tell. tokenizer, chat_template, labels: as for `cached_tokens`."""
    return [asdict(_fingerprint(name, tokenizer, chat_template, labels)) for name in names]


def _fingerprint(
    name: str, tokenizer: str, chat_template: str, labels: Labels | None
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
    """Go on with a crc32 over blocks of a file at even distances, its first and its last among
    them; a short file is read whole."""
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

    One that is in one list alone has not changed.
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
    """Return where each source goes on that is streamed, as a checkpoint says; None for others."""
    positions: list[dict | None] = [None] * len(names)
    for number, (old, name) in enumerate(zip(then, names, strict=False)):
        if old.get("position") and is_streamed(name) and _same_source(old, name):
            positions[number] = old["position"]
    return positions


def _same_source(then: dict, name: str) -> bool:
    """Return whether a source at the same place in the blend is the one that it was: directories
    may have been moved, so that only the last part of its path counts, but not of a URL."""
    if "://" in name:
        return then["source"] == name
    return Path(then["source"]).name == Path(name).name
