"""Checkpoints that an earlier version of megazoo wrote, and the steps that it trained from them.

    python -m tests.support.old_checkpoints DIRECTORY

writes them anew. That is for a version whose checkpoints a later one has to load: those in
tests/files/old_checkpoints are of commit COMMIT and must stay as they are.
"""

import json
import shutil
import sys
from pathlib import Path

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.models.llama import LlamaConfig
from megazoo.testing import RankPool
from tests.support.training import context, make_batch, randomize, replica_rows

COMMIT = "55d8e40"
DIRECTORY = Path(__file__).parents[1] / "files" / "old_checkpoints"
CONFIG = LlamaConfig(
    vocab_size=61, max_positions=16, hidden_size=16, layers=2, heads=2, ffn_size=24
)
# Of each checkpoint: the layout that wrote it, and two others that load it.
LAYOUTS = {
    "adamw": (dict(tp=2, dp=2), dict(pp=2), dict(tp=2, cp=2)),
    "lora": (dict(tp=2, pp=2), dict(), dict(dp=2)),
    "muon": (dict(pp=2, dp=2), dict(tp=2), dict()),
}
SAVED_AT, STEPS = 2, 4


def steps(kind: str, layout: dict, start: Path | None = None, saved: Path | None = None) -> list:
    """Train up to STEPS, from the checkpoint `start` or from the beginning; return the loss and the
    norm of each step. saved: where to save after SAVED_AT of them."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(CONFIG, ctx, seed=3))
    if kind == "lora":
        megazoo.lora.add(model, rank=2, alpha=4, targets="all-linear")
    zero = int(ctx.dp_size > 1)
    if kind == "muon":
        optimizer = megazoo.optim.Muon(model, lr=1e-2, adamw={"lr": 1e-3}, zero=zero)
    else:
        optimizer = megazoo.optim.AdamW(model, lr=1e-2, eps=1e-3, clip_grad=0.2, zero=zero)
    first = load(Checkpoint(start), model, optimizer)["step"] if start else 0
    history = []
    for step in range(first, STEPS):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        loss = model.train_batch(
            ids, targets=targets, num_microbatches=len(ids) // 2, step=step
        ).item()
        history.append([loss, optimizer.step().item()])
        if saved and step + 1 == SAVED_AT:
            save(saved, SAVED_AT, model, optimizer)
    return history


def write(directory: Path) -> None:
    """Write each checkpoint, and the steps that were trained from it."""
    pool = RankPool()
    try:
        for kind, (layout, *_) in LAYOUTS.items():
            path = directory / kind
            shutil.rmtree(path, ignore_errors=True)
            ranks = pool.run(steps, 4, kind, layout, saved=path / "checkpoint", timeout=120)
            (path / "steps.json").write_text(json.dumps(ranks[0][SAVED_AT:]))
    finally:
        pool.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
