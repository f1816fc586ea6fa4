"""Training under context parallelism for tests: batches of every kind, and runs in any layout."""

import torch
from helpers import CLIP, make_batch, randomize, worst_gradient

import megazoo
from megazoo.testing import GROUP_TIMEOUT

STEPS, ROWS, TOKENS = 3, 4, 13  # 13 tokens: not a multiple of 2 cp


def cp_context(tp=1, pp=1, dp=1, cp=1, *, method="allgather", sp=False, v=1):
    ctx = megazoo.ParallelContext.from_torch(
        tp, pp, dp, context_parallel_size=cp, context_parallel_method=method,
        sequence_parallel=sp, virtual_pipeline_size=v, device="cpu", timeout=GROUP_TIMEOUT,
    )  # fmt: skip
    torch.set_num_threads(1)
    return ctx


def ranks_of(layout: dict) -> int:
    tp, pp, dp, cp = (layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    return tp * pp * dp * cp


def cp_name(layout) -> str:
    if not isinstance(layout, dict):
        return str(layout)
    words = {"sp": "sp", "method": layout.get("method")}
    return "".join(words.get(axis) or f"{axis}{size}" for axis, size in layout.items())


def rows_of_replica(tensors: dict, ctx) -> dict:
    return {name: x.chunk(ctx.dp_size)[ctx.dp_rank] for name, x in tensors.items()}


def batch_of(step: int, kind: str = "plain") -> dict:
    """A global batch: uneven labels; packed documents, padding on both sides, or positions."""
    ids, targets = make_batch(step, ROWS, TOKENS)
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


def model_in(config, ctx, *, train: str | None = None, recompute=("none",), **how):
    """A model with random biases. train: a pattern of the names that are trained."""
    model = randomize(megazoo.from_config(config, ctx, seed=3, **how))
    return (model.train_only(train) if train else model).recompute(*recompute)


def trained(config, kind: str, layout: dict, *, count=2, schedule="1f1b", model=None, **opt):
    """Losses and norms of some steps, and the gradients of the first: {name: [(box, part)]}."""
    ctx = cp_context(**layout)
    model = model_in(config, ctx, **(model or {}))
    optimizer = megazoo.optim.AdamW(model, **{"lr": 1e-3, "clip_grad": CLIP, **opt})
    history, gradients = [], {}
    for step in range(STEPS):
        batch = rows_of_replica(batch_of(step, kind), ctx)
        micro_batches = count if ctx.dp_size == 1 else 1
        loss = model.train_batch(**batch, num_microbatches=micro_batches, schedule=schedule)
        if step == 0:
            gradients = pieces_of_gradients(model)
        history.append((loss.item(), optimizer.step().item()))
    return history, gradients


def pieces_of_gradients(model) -> dict:
    tp = model.ctx.tp_size, model.ctx.tp_rank
    return {
        entry.name: [
            (piece.box, entry.parameter.grad[piece.index()].clone())
            for piece in entry.spec.pieces(*tp)
        ]
        for entry in model.entries()
        if entry.parameter.grad is not None
    }


def assert_gradients_equal(results: list[dict], expected: dict) -> None:
    """Each rank's gradients are those of one process, none is missing and none too many."""
    assert set().union(*results) == set(expected)
    distance, name = worst_gradient(results, expected)
    assert distance < 1e-5, f"{name}: {distance}"
