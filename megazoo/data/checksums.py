"""Fingerprints of files. They take milliseconds for files of any size: only evenly spaced blocks of
a long file are read. Nothing here imports torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zlib_ng.zlib_ng import crc32

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


def fingerprint_of(
    name: str,
    files: Sequence[Path],
    documents: int = 0,
    checksum: int = 0,
    blocks: int | None = None,
) -> Fingerprint:
    """Return the fingerprint of a source.

    Args:
        name: the source as passed to --data.
        files: its files, in order.
        documents: number of documents.
        checksum: crc32 to update.
        blocks: number of blocks per file. None: the blocks of all files together are about BLOCKS.
    """
    for file in files:
        checksum = sampled_checksum(file, checksum, blocks or max(2, BLOCKS // len(files)))
    return Fingerprint(name, sum(file.stat().st_size for file in files), documents, checksum)


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
