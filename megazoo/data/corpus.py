"""`--data stdlib`, which exists on every machine: the source of the Python standard library (about
12 MB of text)."""

import os
import sysconfig
from pathlib import Path

import numpy as np
from zlib_ng.zlib_ng import crc32

from megazoo.data.checksums import BLOCKS, Fingerprint, sampled_checksum
from megazoo.data.samples import PackedDataset
from megazoo.data.sources import Encoding, Opening, Source
from megazoo.tokenizer import Tokenizer

SPLIT_SEED = 1234  # which documents are held out never depends on the run

LEFT_OUT = {"test", "tests", "site-packages", "dist-packages"}


class StandardLibrary(Source):
    """The source files of the Python standard library. Those of each part are chosen at random, the
    same in every run."""

    @classmethod
    def accepts(cls, name: str) -> bool:
        return name == "stdlib"

    def files(self) -> list[tuple[str, Path]]:
        files = standard_library_files()
        root = os.path.commonpath(files)
        return [(path.relative_to(root).as_posix(), path) for path in files]

    def parts(self, opening: Opening) -> list[PackedDataset]:
        documents = standard_library()
        order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
        chosen = (sorted(order[first:last]) for first, last in opening.ranges(len(documents)))
        tokenizer, length = opening.tokenizer, opening.seq_length
        streams = (_stream([documents[i] for i in part], tokenizer) for part in chosen)
        return [
            PackedDataset(
                stream, length, opening.eod, opening.vocab_size, self.name, tokenizer=tokenizer
            )
            for stream in streams
        ]

    def fingerprint(self, encoding: Encoding) -> Fingerprint:
        files = standard_library_files()
        sizes = [file.stat().st_size for file in files]
        named = [(file.name, size) for file, size in zip(files, sizes, strict=True)]
        checksum = crc32(repr(named).encode())
        for file in files[:: max(1, len(files) // BLOCKS)]:
            checksum = sampled_checksum(file, checksum, blocks=1)
        return Fingerprint(self.name, sum(sizes), len(files), checksum)


def standard_library() -> list[bytes]:
    """Return the standard library's source files, in UTF-8, sorted by path. Tests and installed
    packages are excluded."""
    return [path.read_bytes() for path in standard_library_files()]


def standard_library_files() -> list[Path]:
    """Return the paths of the files that `standard_library` reads."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for directory, folders, files in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in LEFT_OUT]
        found += [Path(directory, file) for file in files if file.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


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
