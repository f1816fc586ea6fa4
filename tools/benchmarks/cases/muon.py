"""Compare Muon, with each data type of the orthogonalization, with AdamW: in steps of ROWS rows and
of 8 * ROWS rows."""

import tempfile
from collections.abc import Callable, Iterator

import torch
from benchmarks.cases.train import DTYPES, ROWS, batch, make, ours, rates, trained_dtypes
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, Job, alone, jobs_in_turn


def cases(setup: Setup) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as directory:
        alone(make, "gpt2", directory)
        ns_dtypes = [str(DTYPES[name]).removeprefix("torch.") for name in trained_dtypes()]
        for rows in (ROWS, 8 * ROWS):
            jobs = [Job(1, ours, (directory, "fp32", (1, 1, 1), rows, rows // ROWS))]
            jobs += [Job(1, ours_by_muon, (directory, rows, ns_dtype)) for ns_dtype in ns_dtypes]
            adamw, *found = jobs_in_turn(jobs, setup.pairs)
            for ns_dtype, muon in zip(ns_dtypes, found, strict=True):
                name = f"train gpt2 in fp32, {rows} rows, by Muon in {ns_dtype}, against AdamW"
                yield rates(name, [muon, adamw], rows)


def ours_by_muon(directory: str, rows: int, ns_dtype: str) -> Callable[[], object]:
    """Return a function that runs a training step with Muon in one process. ns_dtype: as in
    `Muon`."""
    import megazoo

    torch.set_num_threads(CORES)
    model, ids = megazoo.from_pretrained(directory).train(), batch(rows)
    optimizer = megazoo.optim.Muon(model, lr=1e-3, adamw={"lr": 1e-4}, ns_dtype=ns_dtype)

    def step():
        model.train_batch(ids, labels=ids, num_microbatches=rows // ROWS)
        optimizer.step()

    return step
