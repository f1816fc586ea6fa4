"""Check that a model trains the same in a layout as in one process. If it does not, find where the
difference begins.

One process trains a few steps on whole batches: plain rows, packed documents and padded rows of an
odd length alternate (see batches.py). It stores the inputs and outputs of all modules, the
gradients, gradient norms and weights. Each rank of a layout does the same with its shards and
compares them with the stored values. The first difference in the order of the computation is
reported as the cause. The optimizer is also compared with reference implementations of AdamW and
Muon in one process, because an error that is the same in every layout cannot be found by comparing
layouts.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megazoo.errors import UserError, check_number
from megazoo.families.registry import family_of, tiny_preset
from megazoo.losses.registry import loss_named
from megazoo.models.registry import find_config
from megazoo.parallel.layout import Layout
from megazoo.testing import usual
from megazoo.testing.batches import ROWS
from megazoo.testing.causes import Comparison
from megazoo.testing.layouts import check_model
from megazoo.testing.optimizer_trial import OPTIMIZERS
from megazoo.testing.program import Numbers, differences, run_the_program, write_inputs
from megazoo.testing.ranks import RankError, RankPool
from megazoo.testing.trial import Subject, train_in_one_process, train_on_a_rank

TIMEOUT = 3600.0  # seconds per layout
# Prefix of the error on a rank that reports another rank's failure.
HEARD_OF = re.compile(r"^megazoo\.errors\.UserError: rank \d+ failed: ")


@dataclass
class Verdict:
    """The relative differences of a layout from one process. Values that were not compared are nan.

    Attributes:
        layout: The layout.
        loss: Largest difference of the loss in any step.
        norm: Largest difference of the gradient norm in any step.
        gradient: Largest distance of any parameter's gradient in any step, divided by its norm (at
            least a thousandth of the global norm).
        weight: Largest distance of any parameter after the last step, divided by its norm (at least
            a thousandth of the global norm).
        cause: The first difference, or None if the layout passed.
        usual: The usual cause of the difference, or "".
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
    loss: str = "lm",
    steps: int = 3,
    tolerance: float = 1e-5,
    within: Callable[[], AbstractContextManager] = nullcontext,
) -> Iterator[Verdict]:
    """Train a model in one process and in each layout, on the CPU of this machine.

    Args:
        model: A config object, or a name as in `from_config`. The name of a family selects its tiny
            preset.
        layouts: Layouts or their names.
        load: A checkpoint or Hugging Face directory with weights. Biases and norms are always
            random, because zeros could hide errors.
        import_: Python file that registers the model.
        lora_rank: Train adapters of this rank instead of the weights: on all linear layers, experts
            and routers.
        optimizer: adamw or muon.
        loss: Name of a loss. Its reference is a model with other random weights; that of
            preferences is the model without its adapters, with a lora_rank.
        steps: Number of steps.
        tolerance: Relative differences above this count.
        within: An importable function that returns a context manager. Every process trains inside
            it, so patches applied there are checked.

    Yields:
        A verdict per layout.

    Raises:
        UserError: A layout is invalid, the model is a classifier, or no loss has the name.
        RankError: Training in one process fails.
    """
    check_number("steps", steps, 1, whole=True)
    check_number("tolerance", tolerance, 0)
    subject = subject_of(model, load, import_, lora_rank, optimizer, within, loss=loss)
    chosen = [Layout.named(layout) if isinstance(layout, str) else layout for layout in layouts]
    check_layouts(chosen, subject.config)
    loss_named(loss)  # raises UserError
    with tempfile.TemporaryDirectory(prefix="megazoo-check-") as directory:
        record, pool = Path(directory) / "one_process.pt", RankPool()
        try:
            run_in_one_process(pool, train_in_one_process, subject, steps, record)
            program: list[Numbers] = []  # of one process, when a layout needs it
            for layout in chosen:
                verdict = _check_layout(pool, subject, layout, steps, record, tolerance)
                if verdict.passed:
                    _check_program(pool, subject, verdict, Path(directory), program, tolerance)
                yield verdict
        finally:
            pool.close()


def subject_of(
    model: Any,
    load: Path | None,
    import_: Path | None,
    lora_rank: int,
    optimizer: str,
    within: Callable[[], AbstractContextManager],
    dtype: str = "float32",
    offload: bool = False,
    loss: str = "lm",
) -> Subject:
    """Return the Subject of a check.

    Raises:
        UserError: A setting is invalid, or the model is a classifier.
    """
    check_number("lora-rank", lora_rank, 0, whole=True)
    if optimizer not in OPTIMIZERS:
        raise UserError(
            f"optimizer {optimizer!r} is not supported: use one of {', '.join(OPTIMIZERS)}"
        )
    if offload and optimizer != "adamw":
        raise UserError(f"the state of {optimizer} can't be offloaded: use optimizer adamw")
    config = find_config(tiny_preset(model)) if isinstance(model, str) else model
    if getattr(config, "num_labels", 0):
        raise UserError("the check trains language models, not classifiers: num_labels must be 0")
    return Subject(
        family_of(config),
        asdict(config),
        load and Path(load),
        import_ and Path(import_).resolve(),
        lora_rank,
        optimizer,
        within,
        dtype,
        offload,
        loss,
    )


def check_layouts(layouts: Iterable[Layout], config: Any) -> None:
    """Raise UserError if a check cannot train the model in one of the layouts."""
    for layout in layouts:
        check_model(layout, config)
        if ROWS % layout.dp:
            raise UserError(f"{layout}: dp {layout.dp} must divide the {ROWS} rows of the check")


def run_in_one_process(pool: RankPool, function: Callable, *arguments: Any) -> None:
    """Train in one process. A UserError in that process is raised as a UserError here."""
    try:
        pool.run(function, 1, *arguments, timeout=TIMEOUT)
    except RankError as error:
        kind, _, text = str(error).splitlines()[-1].partition(": ")
        if kind == f"{UserError.__module__}.{UserError.__qualname__}":
            raise UserError(text) from error
        raise


def last_line(error: RankError) -> str:
    """Return the last line of the error of a rank, as on the rank where it began."""
    return HEARD_OF.sub("", str(error).splitlines()[-1])


def _check_program(
    pool: RankPool,
    subject: Subject,
    verdict: Verdict,
    directory: Path,
    program: list[Numbers],
    tolerance: float,
) -> None:
    """Compare the numbers of the training program in a layout with those in one process. Set the
    cause of the verdict if they differ. program: the numbers of one process; added if missing."""
    layout = verdict.layout
    try:
        if not program:
            write_inputs(subject, directory)
            arguments = (subject, Layout(), directory)
            program += pool.run(run_the_program, 1, *arguments, timeout=TIMEOUT)
        ranks = pool.run(run_the_program, layout.ranks, subject, layout, directory, timeout=TIMEOUT)
    except RankError as error:
        verdict.cause = f"program: it ends with {last_line(error)}"
        return
    found = ranks[0]
    found.changed.update(*(rank.changed for rank in [*ranks, *program]))
    first = next(differences(found, program[0], tolerance), None)
    if first:
        reason = usual.EVALUATION if first.startswith("evaluation") else usual.PROGRAM
        verdict.cause, verdict.usual = f"program: {first}", reason


def _check_layout(
    pool: RankPool, subject: Subject, layout: Layout, steps: int, record: Path, tolerance: float
) -> Verdict:
    """Train in a layout and compare it with the record of one process."""
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
        last = last_line(error)
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
