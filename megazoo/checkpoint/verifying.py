"""Verifies the checksums of a checkpoint's files while they are read.

Each file is checked once per job. The check is assigned to one of the ranks that read the file
anyway, so no file is transferred twice to check it on several hosts. Threads of that rank compute
the checksum while the rank reads.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import torch

from megazoo.checkpoint.source import TensorSource
from megazoo.checkpoint.tensor_files import crc32_of
from megazoo.errors import UserError
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import propagate_errors

MOST_THREADS = 4


@contextmanager
def verifying(source: TensorSource, files: set[str], ctx: ParallelContext) -> Iterator[None]:
    """Compare the checksums of files with the manifest's while this block reads them.

    Every rank enters it, with the files that it reads. At the end all ranks raise the same
    UserError if a file is corrupt, or if the block raised an exception on any rank. Without
    checksums, or with verify=False, it does nothing.
    """
    if not source.verifies:
        yield
        return
    with propagate_errors(ctx):
        sizes = source.file_sizes()
        read = _gathered(sorted(sizes.keys() & files), ctx)
        mine = dealt_out(sizes, read)[ctx.rank if len(read) > 1 else 0]
        failure, over = None, Event()

        def check(file: str) -> None:
            crc = crc32_of(source.path / file, interrupted=over.is_set)
            if not over.is_set():
                source.check_crc32(file, crc)

        threads = max(1, min(MOST_THREADS, torch.get_num_threads(), len(mine)))
        with ThreadPoolExecutor(threads) as pool:
            checks = [pool.submit(check, file) for file in mine]
            try:
                yield
                for done in checks:
                    done.result()
            except Exception as error:
                failure = error
            finally:
                over.set()
                pool.shutdown(cancel_futures=True)
        told = isinstance(failure, UserError)
        outcome = (str(failure), failure.exit_code) if told else failure and (repr(failure), 1)
        outcomes = _gathered(outcome, ctx)
        if failure and not told:
            raise failure
        for text, exit_code in filter(None, outcomes):
            raise UserError(text, exit_code) from failure


def dealt_out(sizes: dict[str, int], read: list[list[str]]) -> list[list[str]]:
    """Return the files that each rank checks. Each file is assigned once, the largest first, to the
    reader with the fewest bytes so far.

    sizes: bytes of the files. read: the files that each rank reads.
    """
    readers: dict[str, list[int]] = {}
    for rank, files in enumerate(read):
        for file in files:
            readers.setdefault(file, []).append(rank)
    shares, load = [[] for _ in read], [0] * len(read)
    for file in sorted(readers, key=lambda file: (-sizes[file], file)):
        rank = min(readers[file], key=load.__getitem__)
        shares[rank].append(file)
        load[rank] += sizes[file]
    return shares


def _gathered(value, ctx: ParallelContext) -> list:
    """Return the values of all ranks; only this rank's value without a process group."""
    return [value] if ctx.mesh is None else all_gather_objects(value, ctx)
