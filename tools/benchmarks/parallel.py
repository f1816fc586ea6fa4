"""Two ranks of one thread against one process of two, on the same global batch; and against peers on such ranks."""

import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from benchmarks.common import Result, Setup, on_ranks
from benchmarks.train import ROWS, SEQUENCE, batch, in_turn, make

LAYOUTS = {"dp": (1, 1, 2), "tp": (2, 1, 1), "pp": (1, 2, 1)}
PEERS = {"dp": "transformers under DistributedDataParallel", "tp": 'transformers\' tp_plan="auto"'}


def cases(setup: Setup) -> Iterator[Result]:
    for axis in LAYOUTS:
        with tempfile.TemporaryDirectory() as directory:
            on_ranks(make, 1, "llama", directory)
            alone, cut, peer = on_ranks(rates, 2, axis, directory, setup.pairs)[0]
        what = f"train llama in fp32, {axis} 2" + (" with 16 micro-batches" if axis == "pp" else "")
        yield Result(f"{what}, against one process of two threads", cut, alone, (), "tokens/s")
        if peer:
            yield Result(f"{what}, against {PEERS[axis]}", cut, peer, (), "tokens/s")


def rates(axis: str, directory: str, pairs: int) -> list[list[float]]:
    """Tokens/s of each step: of one process, of the layout, and of its peer."""
    import megazoo

    rows = 2 * ROWS if axis == "pp" else ROWS
    ids = torch.cat([batch()] * (rows // ROWS))

    def training(ctx, rows: torch.Tensor, micro_batches: int) -> Callable[[], object]:
        model = megazoo.from_pretrained(directory, ctx, dtype=torch.float32)
        optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)

        def step():
            model.train_batch(rows, labels=rows, num_microbatches=micro_batches)
            optimizer.step()

        return step

    def one_process():
        if dist.get_rank() == 0:
            torch.set_num_threads(2)
            whole()
            torch.set_num_threads(1)
        dist.barrier()

    def together(step: Callable[[], object]) -> Callable[[], object]:
        def run():
            step()
            dist.barrier()

        return run

    ctx = megazoo.ParallelContext.from_torch(*LAYOUTS[axis], device="cpu")
    mine = ids.chunk(ctx.dp_size)[ctx.dp_rank]
    whole = training(megazoo.ParallelContext(), ids, rows // ROWS) if dist.get_rank() == 0 else None
    sides = [one_process, together(training(ctx, mine, 16 if axis == "pp" else 1))]
    if axis in PEERS:
        sides.append(together(peer(axis, directory, mine)))
    found = in_turn(sides, pairs, rows * SEQUENCE)
    return found if axis in PEERS else [*found, []]


def peer(axis: str, directory: str, ids: torch.Tensor) -> Callable[[], object]:
    """A step of transformers in the same layout."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    if axis == "tp":
        model = load(directory, dtype=torch.float32, tp_plan="auto")
    else:
        model = torch.nn.parallel.DistributedDataParallel(load(directory, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=axis == "dp")

    def step():
        model(ids, labels=ids).loss.backward()
        if axis == "dp":  # torch does not clip plain tensors and DTensors together
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
