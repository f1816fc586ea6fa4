"""Check whether a model trains in a layout as it does in one process, and if not, where the
difference begins.

One process trains a few steps on whole batches, which take turns: plain rows, packed documents, and
rows with padding, of an odd length (see batches.py). It keeps what each module was given and
returned, the gradients, norms and weights. The ranks of a layout do the same with their parts, and
each compares its own. The first thing in the order of the computation that differs is the cause
that is told. What no layout can show is checked in one process: the optimizer against AdamW and
Muon as their papers have them.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megazoo.errors import UserError, check_number
from megazoo.models.registry import family_of, find_config, tiny_preset
from megazoo.testing import usual
from megazoo.testing.batches import ROWS
from megazoo.testing.causes import Comparison
from megazoo.testing.layouts import Layout
from megazoo.testing.optimizer_trial import OPTIMIZERS
from megazoo.testing.ranks import RankError, RankPool
from megazoo.testing.trial import Subject, train_in_one_process, train_on_a_rank

TIMEOUT = 3600.0  # seconds, of a layout
# What a rank that hears of another's failure says before its text.
HEARD_OF = re.compile(r"^megazoo\.errors\.UserError: rank \d+ failed: ")


@dataclass
class Verdict:
    """How far one layout is from one process: the worst relative differences, and the cause if they
    are above the tolerance.

    loss, norm: of any step. gradient, weight: of any parameter, at any step and after the last; a
    distance over the parameter's norm, of gradients at least a thousandth of the global one. nan is
    what was not compared. cause: None if the layout passed. usual: what usually causes that, if
    there is something to say.
    """

    layout: Layout
    loss: float = math.nan
    norm: float = math.nan
    gradient: float = math.nan
    weight: float = math.nan
    cause: str | None = None
    usual: str = ""

    @property
    def passed(self) -> bool:
        """Whether the layout trains as one process does."""
        return self.cause is None


def check_parallel(
    model: Any,
    layouts: Sequence[Layout | str],
    *,
    load: Path | None = None,
    import_: Path | None = None,
    lora_rank: int = 0,
    optimizer: str = "adamw",
    steps: int = 3,
    tolerance: float = 1e-5,
    within: Callable[[], AbstractContextManager] = nullcontext,
) -> Iterator[Verdict]:
    """Train a model in one process, then in each layout, on the CPU of this machine; yield a
    verdict for each.

    model: a config object, or a name as `from_config` takes it, except that a family's means its
    tiny preset. load: a checkpoint or Hugging Face
    directory of it, for its weights; biases and norms are random in any case, so that zeros hide
    nothing. import_: the Python file that registers the model, if one does. lora_rank: train
    adapters of this rank, of all linear layers, instead of the weights. optimizer: adamw or muon.
    within: a function, that can be imported by name, which makes the context in which every process
    trains: what is patched there is checked, too. UserError for a layout that can't be, and for a
    classifier; RankError if the one process fails.
    """
    check_number("steps", steps, 1, whole=True)
    check_number("tolerance", tolerance, 0)
    check_number("lora-rank", lora_rank, 0, whole=True)
    if optimizer not in OPTIMIZERS:
        raise UserError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}")
    config = find_config(tiny_preset(model)) if isinstance(model, str) else model
    if getattr(config, "num_labels", 0):
        raise UserError("the check trains language models, and no classifier: num_labels must be 0")
    subject = Subject(
        family_of(config),
        asdict(config),
        load and Path(load),
        import_ and Path(import_).resolve(),
        lora_rank,
        optimizer,
        within,
    )
    chosen = [Layout.named(layout) if isinstance(layout, str) else layout for layout in layouts]
    for layout in chosen:
        layout.check(config)
        if ROWS % layout.dp:
            raise UserError(f"{layout}: dp {layout.dp} must divide the {ROWS} rows of the check")
    with tempfile.TemporaryDirectory(prefix="megazoo-check-") as directory:
        record, pool = Path(directory) / "one_process.pt", RankPool()
        try:
            _train_in_one_process(pool, subject, steps, record)
            for layout in chosen:
                yield _check_layout(pool, subject, layout, steps, record, tolerance)
        finally:
            pool.close()


def _train_in_one_process(pool: RankPool, subject: Subject, steps: int, record: Path) -> None:
    """Train in one process; a mistake of the user that it finds is told as one."""
    try:
        pool.run(train_in_one_process, 1, subject, steps, record, timeout=TIMEOUT)
    except RankError as error:
        kind, _, text = str(error).splitlines()[-1].partition(": ")
        if kind == f"{UserError.__module__}.{UserError.__qualname__}":
            raise UserError(text) from error
        raise


def _check_layout(
    pool: RankPool, subject: Subject, layout: Layout, steps: int, record: Path, tolerance: float
) -> Verdict:
    """Train in a layout, and compare it with the record of one process."""
    try:
        ranks = pool.run(
            train_on_a_rank,
            layout.ranks,
            subject,
            layout,
            steps,
            record,
            tolerance,
            timeout=TIMEOUT,
        )
    except RankError as error:
        last = HEARD_OF.sub("", str(error).splitlines()[-1])
        return Verdict(layout, cause=f"it ends with {last}", usual=usual.of_error(last, layout))
    expected = torch.load(record, weights_only=False, mmap=True)
    comparison = Comparison(layout, ranks, expected, tolerance)
    first = next(comparison.findings(), None)
    return Verdict(
        layout,
        loss=comparison.worst_loss(),
        norm=comparison.worst_norm(),
        gradient=max(max(step.values(), default=0.0) for rank in ranks for step in rank.gradients),
        weight=max(max(rank.weights[-1].values(), default=0.0) for rank in ranks),
        cause=first.text if first else None,
        usual=first.usual if first else "",
    )
