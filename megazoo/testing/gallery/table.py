"""Plant the bugs of the gallery one by one, and print the result of the check for each."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazoo.errors import UserError
from megazoo.families.registry import family_of
from megazoo.models.registry import from_config
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.testing.check import Verdict, check_parallel
from megazoo.testing.compare import compare_layouts
from megazoo.testing.gallery.planting import Bug
from megazoo.testing.reference import run_reference
from megazoo.testing.resume import ResumeVerdict, check_resume, pairs_of


@dataclass(frozen=True)
class Outcome:
    """The result of the check for a planted bug.

    Attributes:
        bug: The bug.
        cause: The reported cause; None if the check passed.
        usual: The usual cause that was reported.
        seconds: Duration of the check.
    """

    bug: Bug
    cause: str | None
    usual: str
    seconds: float

    @property
    def found(self) -> bool:
        """Whether the check failed and reported the cause that was planted."""
        return self.cause is not None and re.match(self.bug.told, self.cause) is not None


def self_test(bugs: Sequence[Bug]) -> Iterator[Outcome]:
    """Plant each bug in a small model, check the model, and yield the outcome.

    Raises:
        UserError: A bug needs transformers, which is not installed. Raised before the first check.
    """
    if any(bug.layout == "transformers" for bug in bugs):
        _require_transformers()
    for bug in bugs:
        start = time.perf_counter()
        if bug.layout == "transformers":
            cause, usual = _beside_transformers(bug), ""
        else:
            verdict = verdict_on(bug, bug.plant)
            cause, usual = verdict.cause, verdict.usual
        yield Outcome(bug, cause, usual, time.perf_counter() - start)


def verdict_on(
    bug: Bug, within: Callable[[], AbstractContextManager] = nullcontext
) -> Verdict | ResumeVerdict:
    """Check the model and the layout of a bug. within: as in `check_parallel`."""
    how: dict[str, Any] = {"lora_rank": bug.lora_rank, "optimizer": bug.optimizer}
    how["within"] = within
    if ":" in bug.layout:
        how |= {"dtype": bug.dtype, "offload": bug.offload}
        return next(check_resume(bug.config, pairs_of([bug.layout]), **how))
    return next(check_parallel(bug.config, [bug.layout], loss=bug.loss, **how))


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the self-test compares with transformers, which can't be imported: {error} (pip "
            "install transformers)"
        ) from None


def _beside_transformers(bug: Bug) -> str | None:
    """Compare a model that has the bug with the same weights in transformers. Return the cause."""
    from transformers import AutoModelForCausalLM

    model = from_config(bug.config, ParallelContext(), seed=3)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, bug.config.vocab_size, (2, 16), generator=generator)
    with tempfile.TemporaryDirectory(prefix="megazoo-check-") as directory:
        path = Path(directory)
        for parameter in model.parameters():  # large weights, so that positions matter
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        model.save_parallelized(path, merge_checkpoints=True)
        theirs = AutoModelForCausalLM.from_pretrained(path).eval()
        reference = run_reference(theirs, type(model), bug.config, ids)
        (agreement,) = compare_layouts(path, reference, [Layout()], within=bug.plant)
    return agreement.cause


def header() -> str:
    """Return the first two lines of the table."""
    names = ["", "Mistake", "Published", "Planted in", "Found", "First cause named", "s"]
    return f"{_row(names)}\n{_row(['---'] * len(names))}"


def line_of(outcome: Outcome) -> str:
    """Return an outcome as a line of a Markdown table."""
    bug = outcome.bug
    adapted = f", LoRA of rank {bug.lora_rank}" if bug.lora_rank else ""
    stepped = ", Muon" if bug.optimizer == "muon" else ""
    lost = "" if bug.loss == "lm" else f", {bug.loss}"
    precise = "" if bug.dtype == "float32" else f", {bug.dtype}"
    offloaded = ", offloaded" if bug.offload else ""
    where = f"{family_of(bug.config)}{adapted}{stepped}{lost}{precise}{offloaded}, {bug.layout}"
    found = "yes" if outcome.found else "NO"
    told = (outcome.cause or "it passed").replace("|", "\\|")
    if outcome.usual:
        told = f"{told}. Usually: {outcome.usual}"
    source = f"[{bug.source}]({bug.link})" if bug.link else ""
    return _row([bug.number, bug.title, source, where, found, told, f"{outcome.seconds:.1f}"])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
