"""What the tests of context parallelism share: models, batches of every kind, and a training run in
any layout."""

from dataclasses import replace
from functools import cache

import torch

import megazoo
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.testing import Layout
from tests.support import training
from tests.support.training import (
    CLIP,
    NO_DROPOUT,
    context,
    layout_name,
    randomize,
    worst_gradient,
    worst_relative,
)

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
TOKENS = 13  # of the rows of batch_of: not a multiple of 2 cp
DOCUMENTS = ((11, 7, 13), (1, 21, 9), (5, 5, 5, 5, 11), (31,))  # of each row of packed ones


def long_batch_of(step: int, kind: str = "plain") -> dict[str, torch.Tensor]:
    """A global batch: rows of 32 tokens, of 31 packed ones or with padding, or of 29.

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


def batch_of(step: int, kind: str = "plain") -> dict:
    """A global batch of 13 tokens a row with uneven labels. kind has any of these words: documents,
    restarting (their positions), padding (on both sides), positions."""
    ids, targets = training.make_batch(step, ROWS, TOKENS)
    batch = {"input_ids": ids, "targets": targets}
    place = torch.arange(TOKENS).expand(ROWS, TOKENS)
    if "documents" in kind:
        starts = torch.tensor([[3, 4, 11], [1, 7, 9], [6, 7, 12], [2, 5, 8]])
        batch["document_ids"] = (place[..., None] >= starts[:, None]).sum(-1)
    if "restarting" in kind:
        earlier = (place[..., None] >= starts[:, None]) * starts[:, None]
        batch["position_ids"] = place - earlier.amax(-1)
    if "padding" in kind:  # on the right, on the left, a whole half, none
        ends, begins = torch.tensor([[5], [13], [6], [13]]), torch.tensor([[0], [8], [0], [0]])
        mask = ((place < ends) & (place >= begins)).long()
        batch["attention_mask"] = mask
        batch["targets"] = targets.masked_fill(mask == 0, -100)
    if "positions" in kind:
        batch["position_ids"] = (place * torch.tensor([[1], [1], [0], [1]])).flip(1)
    return batch


def cp_name(part) -> str:
    """The name of a layout, or of another parameter of a test."""
    return layout_name(part) if isinstance(part, dict) else str(part)


def rows_of_replica(tensors: dict, ctx) -> dict:
    return {name: training.replica_rows(tensor, ctx) for name, tensor in tensors.items()}


def model_in(config, ctx, *, train: str | None = None, recompute=("none",), **how):
    """A model with random biases. train: a pattern of the names that are trained."""
    model = randomize(megazoo.from_config(config, ctx, seed=3, **how))
    return (model.train_only(train) if train else model).recompute(*recompute)


def sizes_of(layout: Layout) -> dict:
    """A layout as `training.context` takes it."""
    return {
        "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp,
        "sp": layout.sequence_parallel, "v": layout.virtual, "method": layout.cp_method,
    }  # fmt: skip


def trained(config, layout: dict, batches: list, *, count=MICRO_BATCHES, model=None,
            schedule="1f1b", **optimizer):  # fmt: skip
    """Train a step on each global batch; returns [(loss, norm)], and what is to be compared by
    parameter: every step's gradients, and last the weights, each as {name: [(box, this rank's
    part)]}. ZeRO-1 has no whole gradients. count: micro-batches, of all replicas together. model:
    more for `model_in`."""
    ctx = context(**layout)
    model = model_in(config, ctx, **(model or {}))
    # eps: so that a rounding of a small gradient is not a step of its own
    optimizer = {"lr": 1e-3, "eps": 1e-3, "clip_grad": CLIP, **optimizer}
    opt, history, kept = megazoo.optim.AdamW(model, **optimizer), [], []
    for step, batch in enumerate(batches):
        loss = model.train_batch(
            **rows_of_replica(batch, ctx),
            num_microbatches=count // ctx.dp_size,
            schedule=schedule,
            step=step,
        )
        if not optimizer.get("zero"):
            kept.append(parts_of_gradients(model))
        history.append((loss.item(), opt.step().item()))
    kept.append(_parts(model, lambda parameter: parameter.detach()))
    return history, kept


def parts_of_gradients(model) -> dict:
    """Of each parameter that has one: {name: [(box, this rank's part)]}."""
    return _parts(model, lambda parameter: parameter.grad)


def _parts(model, tensor_of) -> dict:
    tp = model.ctx.tp_size, model.ctx.tp_rank
    return {
        entry.name: [
            (piece.box, tensor_of(entry.parameter)[piece.index()].clone())
            for piece in entry.spec.pieces(*tp)
        ]
        for entry in model.entries()
        if tensor_of(entry.parameter) is not None
    }


def named_run(model: str, layout: Layout, kind: str, steps: int = 2):
    """Train one of the models on long batches."""
    batches = [long_batch_of(step, kind) for step in range(steps)]
    how = {"schedule": layout.schedule, "zero": layout.zero}
    return trained((MODELS | UNEVEN)[model], sizes_of(layout), batches, **how)


@cache
def one_process(model: str, kind: str, steps: int = 2):
    return named_run(model, Layout(), kind, steps)


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


def assert_gradients_equal(results: list[dict], expected: dict) -> None:
    """Each rank's gradients are those of one process, none is missing and none too many."""
    assert set().union(*results) == set(expected)
    distance, name = worst_gradient(results, expected)
    assert distance < 1e-5, f"{name}: {distance}"


# The probe: a row of three documents, of which a token of the first is another one.
LENGTHS = (11, 7, 13)


CHANGED = 4


def logits_of_both(layout: Layout) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each model, the logits of a packed row before and after the change."""
    ids = torch.randint(0, VOCABULARY, (1, 31), generator=torch.Generator().manual_seed(5))
    other = ids.clone()
    other[0, CHANGED] = (ids[0, CHANGED] + 1) % VOCABULARY
    given = {
        "document_ids": torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None],
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
    }
    logits, ctx = {}, context(**sizes_of(layout))
    for name, config in MODELS.items():
        model = randomize(megazoo.from_config(config, ctx, seed=3)).eval()
        with torch.no_grad():
            logits[name] = tuple(
                model(row, return_logits=True, **given).logits for row in (ids, other)
            )
    return logits


def positions_that_differ(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    return (before != after)[0].any(-1).nonzero()[:, 0].tolist()
