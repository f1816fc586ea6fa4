"""Measure training on one long row (8,192 tokens, or packed documents), and with the row split
across two ranks."""

import tempfile
from collections.abc import Callable, Iterator

import torch
from benchmarks.cases.train import batch, make, rates
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, Job, alone, jobs_in_turn

LONG, PACKED, DOCUMENTS = 8192, 2048, 8
# Two layers: transformers' MPT stores the scores of a layer (2 GB) and their softmax.
LAYERS = 2


def cases(setup: Setup) -> Iterator[Result]:
    for model, kind in (("llama", "rotary"), ("mpt", "ALiBi")):
        with tempfile.TemporaryDirectory() as directory:
            alone(make, model, directory, LAYERS, LONG)
            jobs = [Job(1, ours, (directory, LONG)), Job(1, theirs, (directory, LONG))]
            jobs.append(Job(2, ours, (directory, LONG, 1, 2)))
            one, reference, two = jobs_in_turn(jobs, setup.pairs)
            name = f"train {model} ({kind}), one row of {LONG:,} tokens, 2 layers"
            yield rates(f"{name}, against transformers", [one, reference], 1, LONG)
            yield rates(f"{name}, cp 2, against one process", [two, one], 1, LONG)
    with tempfile.TemporaryDirectory() as directory:
        alone(make, "llama", directory, 8, PACKED)
        jobs = [Job(1, side, (directory, PACKED, DOCUMENTS)) for side in (ours, theirs)]
        name = f"train llama, {DOCUMENTS} documents packed in a row of {PACKED:,} tokens"
        found = jobs_in_turn(jobs, setup.pairs)
        yield rates(f"{name}, against transformers", found, 1, PACKED)


def documents(sequence: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document id and the position of each token of a row, both [1, sequence]."""
    place = torch.arange(sequence).unsqueeze(0)
    return place // (sequence // count), place % (sequence // count)


def ours(directory: str, sequence: int, count: int = 1, cp: int = 1) -> Callable[[], object]:
    """Return a function that runs a training step of one row, of `count` documents, split across cp
    ranks."""
    import megazoo

    ctx = megazoo.ParallelContext.from_torch(context_parallel_size=cp, device="cpu")
    torch.set_num_threads(max(1, CORES // cp))
    model, ids = megazoo.from_pretrained(directory, ctx).train(), batch(1, sequence)
    optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)
    number, place = documents(sequence, count)
    packed = {"document_ids": number, "position_ids": place} if count > 1 else {}

    def step():
        model.train_batch(ids, labels=ids, **packed)
        optimizer.step()

    return step


def theirs(directory: str, sequence: int, count: int = 1) -> Callable[[], object]:
    """Return a function that runs a training step of transformers, which separates documents by
    their positions."""
    import transformers

    torch.set_num_threads(CORES)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids, place = batch(1, sequence), documents(sequence, count)[1]
    packed = {"position_ids": place} if count > 1 else {}

    def step():
        model(ids, labels=ids, use_cache=False, **packed).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
