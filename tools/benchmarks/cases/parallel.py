"""Compare training on two ranks with one process that has the same number of threads and global
batch, and with other libraries on two ranks."""

import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from benchmarks.cases.train import ROWS, batch, make, ours, rates
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, Job, alone, jobs_in_turn

LAYOUTS = {"dp": (1, 1, 2), "tp": (2, 1, 1), "pp": (1, 2, 1)}
PEERS = {"dp": "transformers under DistributedDataParallel", "tp": 'transformers\' tp_plan="auto"'}


def cases(setup: Setup) -> Iterator[Result]:
    for axis, layout in LAYOUTS.items():
        rows, micro_batches = (2 * ROWS, 16) if axis == "pp" else (ROWS, 1)
        with tempfile.TemporaryDirectory() as directory:
            alone(make, "llama", directory)
            jobs = [Job(2, ours, (directory, "fp32", layout, rows, micro_batches))]
            jobs.append(Job(1, ours, (directory, "fp32", (1, 1, 1), rows, rows // ROWS)))
            if axis in PEERS:
                jobs.append(Job(2, peer, (axis, directory)))
            else:
                jobs.append(Job(2, ours, (directory, "fp32", layout, rows, micro_batches, "zb-h1")))
            found = jobs_in_turn(jobs, setup.pairs)
        name = f"train llama in fp32, {axis} 2" + (" with 16 micro-batches" if axis == "pp" else "")
        two_ranks, one_process, other = found
        alone_name = "against one process of as many threads"
        yield rates(f"{name}, {alone_name}", [two_ranks, one_process], rows)
        if axis in PEERS:
            yield rates(f"{name}, against {PEERS[axis]}", [two_ranks, other], rows)
        else:
            yield rates(f"{name} under zb-h1, {alone_name}", [other, one_process], rows)


def peer(axis: str, directory: str) -> Callable[[], object]:
    """Return a function that runs a training step of transformers in the same layout."""
    import transformers

    torch.set_num_threads(max(1, CORES // 2))
    load = transformers.AutoModelForCausalLM.from_pretrained
    if axis == "tp":
        model, ids = load(directory, dtype=torch.float32, tp_plan="auto"), batch()
    else:
        model = torch.nn.parallel.DistributedDataParallel(load(directory, dtype=torch.float32))
        ids = batch().chunk(2)[dist.get_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=axis == "dp")

    def step():
        model(ids, labels=ids).loss.backward()
        if axis == "dp":  # torch does not clip plain tensors and DTensors together
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
