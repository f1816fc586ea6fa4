"""Checks, beside the reading, that the files of a checkpoint are as they were written.

A file is checked once for the whole job, however many ranks read it: it is dealt out to them in
pieces, and threads sum up a rank's pieces while it reads. A piece is checked by a rank that reads
its file anyway, so that on several hosts nothing travels twice.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Event
from typing import NamedTuple

import torch

from megazoo.checkpoint.source import TensorSource
from megazoo.checkpoint.tensor_files import crc32_of
from megazoo.errors import UserError
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import failing_together

PIECE = 1 << 26  # bytes
MOST_THREADS = 4
POLYNOMIAL = 0xEDB88320  # of crc32, its bits reversed, as zlib has it


class Piece(NamedTuple):
    """Bytes of a file, from `start` until before `stop`."""

    file: str
    start: int
    stop: int


@contextmanager
def verifying(source: TensorSource, files: set[str], ctx: ParallelContext):
    """Compare the checksums of files with the manifest's while this block reads them.

    Every rank enters, with the files that it reads itself. At the end all raise the same UserError
    if one of them has changed, or if the block raised an exception on any rank. Where the source
    has no checksums, or is not to compare them, nothing happens.
    """
    if not source.verifies:
        yield
        return
    with failing_together(ctx):
        sizes = source.file_sizes()
        read = _gathered(sorted(sizes.keys() & files), ctx)
        pieces = dealt_out(sizes, read)[ctx.rank if len(read) > 1 else 0]
        sums, failure, over = {}, None, Event()
        threads = max(1, min(MOST_THREADS, torch.get_num_threads(), len(pieces)))
        with ThreadPoolExecutor(threads) as pool:
            checks = {
                piece: pool.submit(
                    crc32_of, source.path / file, start, stop, interrupted=over.is_set
                )
                for piece in pieces
                for file, start, stop in [piece]
            }
            try:
                yield
                sums = {piece: check.result() for piece, check in checks.items()}
            except Exception as error:
                failure = error
            finally:
                over.set()
                pool.shutdown(cancel_futures=True)
        told = isinstance(failure, UserError)
        outcome = (str(failure), failure.exit_code) if told else failure and (repr(failure), 1)
        outcomes = _gathered((sums, outcome), ctx)
        if failure and not told:
            raise failure
        for text, exit_code in (outcome for _, outcome in outcomes if outcome):
            raise UserError(text, exit_code) from failure
        sums = {piece: crc for part, _ in outcomes for piece, crc in part.items()}
        for file in sorted({piece.file for piece in sums}):
            parts = sorted(piece for piece in sums if piece.file == file)
            whole = 0
            for piece in parts:
                whole = combined(whole, sums[piece], piece.stop - piece.start)
            source.check_crc32(file, whole)


def dealt_out(sizes: dict[str, int], read: list[list[str]]) -> list[list[Piece]]:
    """Return each rank's pieces of all files that are read: about as many bytes for each rank, of
    files that it reads.

    sizes: bytes of the files. read: for each rank the files that it reads.
    """
    readers: dict[str, list[int]] = {}
    for rank, files in enumerate(read):
        for file in files:
            readers.setdefault(file, []).append(rank)
    shares, load = [[] for _ in read], [0] * len(read)
    for file in sorted(readers, key=lambda file: (len(readers[file]), file)):  # least choice first
        for start in range(0, sizes[file], PIECE):
            piece = Piece(file, start, min(start + PIECE, sizes[file]))
            rank = min(readers[file], key=load.__getitem__)
            shares[rank].append(piece)
            load[rank] += piece.stop - piece.start
    return shares


def combined(first: int, second: int, size: int) -> int:
    """Return the crc32 of two pieces end to end, from theirs. size: bytes of the second.

    Appending `size` bytes multiplies the first one's remainder by x to the power of 8 * size: zlib
    has crc32_combine for this, of which Python knows nothing.
    """
    return _product(_power(8 * size), first) ^ second


@cache
def _power(exponent: int) -> int:
    """Return x to a power, modulo the polynomial; the highest bit is the coefficient of 1."""
    result, square = 1 << 31, 1 << 30  # 1, and x
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square, exponent = _product(square, square), exponent >> 1
    return result


def _product(a: int, b: int) -> int:
    """Multiply two polynomials modulo the polynomial of crc32."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
    return result


def _gathered(value, ctx: ParallelContext) -> list:
    """Return every rank's value; this one's alone where there are no others."""
    return [value] if ctx.mesh is None else all_gather_objects(value, ctx)
