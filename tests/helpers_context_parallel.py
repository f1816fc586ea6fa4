"""What the tests of context parallelism share: models, batches of every kind, and a training run in
any layout."""

from dataclasses import replace
from functools import cache

import torch
from helpers import CLIP, NO_DROPOUT, context, randomize, worst_gradient, worst_relative

import megazoo
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.testing import GROUP_TIMEOUT, Layout

VOCABULARY = 61
# Four layers: one for each stage of pp 2 with two a rank.
SMALL = dict(vocab_size=VOCABULARY, max_positions=16, hidden_size=32, layers=4, heads=4)
LONG = {**SMALL, "max_positions": 32}
LLAMA = LlamaConfig(**SMALL, kv_heads=2, ffn_size=48)
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "gpt2": GPT2Config(**LONG, **NO_DROPOUT),
    "llama, dynamic": replace(LLAMA, rope_scaling=DYNAMIC),  # for more tokens than its 16
    "llama, llama3": replace(LLAMA, max_positions=32, rope_scaling=LLAMA3),
    "llama, yarn": replace(LLAMA, max_positions=32, rope_scaling=YARN),
    "mpt": MPTConfig(**{**LONG, "hidden_size": 48, "heads": 12}),
    "mpt, learned positions": MPTConfig(**LONG, alibi=False),
}
# Heads that cp doesn't divide; and six, of which two share one of keys: cp 2 cuts through a pair.
UNEVEN = {
    "gpt2, 5 heads": GPT2Config(**{**LONG, "hidden_size": 40, "heads": 5}, **NO_DROPOUT),
    "llama, 6 heads": replace(LLAMA, max_positions=32, hidden_size=48, heads=6, kv_heads=3),
    "mpt, 5 heads": MPTConfig(**{**LONG, "hidden_size": 40, "heads": 5}),
}
KINDS = ("plain", "packed", "padded", "odd")
ROWS, MICRO_BATCHES = 4, 2
DOCUMENTS = ((11, 7, 13), (1, 21, 9), (5, 5, 5, 5, 11), (31,))  # of each row of packed ones


def make_batch(kind: str, step: int = 0) -> dict[str, torch.Tensor]:
    """What train_batch takes: rows of 32 tokens, of 31 packed ones or with padding, or of 29.

    Of the first micro-batch with padding, cp rank 0 of any number has padding only.
    """
    generator = torch.Generator().manual_seed(100 + step)
    sequence = {"plain": 32, "packed": 31, "padded": 31, "odd": 29}[kind]
    tokens = torch.randint(0, VOCABULARY, (ROWS, sequence + 1), generator=generator)
    share = torch.arange(1, ROWS + 1)[:, None] / ROWS
    keep = torch.rand(ROWS, sequence, generator=generator) < share
    more = {}
    if kind == "packed":
        numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in DOCUMENTS]
        places = [torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS]
        more = {"document_ids": torch.stack(numbers), "position_ids": torch.stack(places)}
    if kind == "padded":
        mask = torch.ones(ROWS, sequence, dtype=torch.int64)
        mask[:2, :8] = mask[:2, 24:] = mask[2, :9] = mask[3, 22:] = 0
        keep, more = keep & mask.bool(), {"attention_mask": mask}
    targets = tokens[:, 1:].masked_fill(~keep, -100)
    return {"input_ids": tokens[:, :-1], "targets": targets, **more}


def context_of(layout: Layout) -> megazoo.ParallelContext:
    """This rank's context in a layout."""
    if layout.ranks == 1:
        return context()
    ctx = megazoo.ParallelContext.from_torch(
        layout.tp,
        layout.pp,
        layout.dp,
        context_parallel_size=layout.cp,
        context_parallel_method=layout.cp_method,
        sequence_parallel=layout.sequence_parallel,
        virtual_pipeline_size=layout.virtual,
        device="cpu",
        timeout=GROUP_TIMEOUT,
    )
    torch.set_num_threads(1)  # bits may depend on the number of threads
    return ctx


def trained(model: str, layout: Layout, kind: str, steps: int = 2):
    """Train one of the models; returns [(loss, norm)] of every step, and what is to be compared by
    parameter: every step's gradients, and last the weights, each as {name: [(box, this rank's
    part)]}. ZeRO-1 has no whole gradients."""
    config, ctx = (MODELS | UNEVEN)[model], context_of(layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3))
    optimizer = megazoo.optim.AdamW(model, lr=1e-3, eps=1e-3, clip_grad=CLIP, zero=layout.zero)
    history, kept = [], []
    for step in range(steps):
        loss = model.train_batch(
            **make_batch(kind, step),
            num_microbatches=MICRO_BATCHES,
            schedule=layout.schedule,
            step=step,
        )
        if not layout.zero:
            kept.append(_parts(model, lambda parameter: parameter.grad))
        history.append((loss.item(), optimizer.step().item()))
    kept.append(_parts(model, lambda parameter: parameter.detach()))
    return history, kept


def _parts(model, tensor_of) -> dict:
    tp = model.ctx.tp_size, model.ctx.tp_rank
    return {
        entry.name: [
            (piece.box, tensor_of(entry.parameter)[piece.index()].clone())
            for piece in entry.spec.pieces(*tp)
        ]
        for entry in model.entries()
    }


@cache
def one_process(model: str, kind: str, steps: int = 2):
    return trained(model, Layout(), kind, steps)


def worst_difference(results: list, expected) -> tuple[float, str]:
    """How far the ranks of a layout are from one process, relatively, and in what: the largest
    difference of a loss, a norm, a gradient or a weight; nan counts as infinite."""
    (history, kept), found = expected, []
    for theirs, _ in results:
        found.append((worst_relative(theirs, history), "losses and norms"))
    of_ranks = [parts for _, parts in results]
    skipped = len(kept) - len(of_ranks[0])  # the gradients, under ZeRO-1
    for number, whole in enumerate(kept[skipped:]):
        found.append(worst_gradient([parts[number] for parts in of_ranks], whole))
    found = [(float("inf") if value != value else value, what) for value, what in found]
    return max(found)
