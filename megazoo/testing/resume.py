"""Check that a run resumes in any layout as if it had never stopped.

One process trains four steps. The ranks of a first layout train two steps and save a checkpoint.
The ranks of a second layout load it and train two more. Directly after loading, the state must
equal the saved one bit for bit. After the last steps it must be that of the one process.

The batches come from a dataset that is smaller than the run, with rows of different lengths, so
that a resumed run continues in the middle of an epoch.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazoo.errors import check_number
from megazoo.parallel.layout import Layout
from megazoo.testing import usual
from megazoo.testing.batches import ROWS
from megazoo.testing.causes import Finding
from megazoo.testing.check import check_layouts, last_line, run_in_one_process, subject_of
from megazoo.testing.program import (
    Numbers,
    differences_of_resumed,
    run_the_program,
    samples_are_continued,
    write_inputs,
)
from megazoo.testing.ranks import RankError, RankPool
from megazoo.testing.resume_trial import (
    LAST,
    STOP,
    WEIGHTS,
    Resumed,
    Run,
    resume_a_run,
    save_a_run,
    train_without_a_stop,
)
from megazoo.testing.trial import Subject

TIMEOUT = 600.0  # seconds per layout
OF_LOW_PRECISION = 1e-2  # relative difference of a loss in bfloat16 between layouts
# Fields of Resumed, and their names in findings.
PROGRESS = {"step": "steps", "samples": "consumed samples", "updates": "updates"}


@dataclass
class ResumeVerdict:
    """The result of the check for a pair of layouts.

    Attributes:
        saved: Layout that saved the checkpoint.
        resumed: Layout that loaded it.
        loss: Largest relative difference of the loss in any step after the checkpoint.
        weight: Largest distance of any parameter after the last step, as in `Verdict`.
        cause: The first difference, or None if the pair passed.
        usual: The usual cause of the difference, or "".
    """

    saved: Layout
    resumed: Layout
    loss: float = math.nan
    weight: float = math.nan
    cause: str | None = None
    usual: str = ""

    @property
    def passed(self) -> bool:
        """Whether the run resumes as if it had never stopped."""
        return self.cause is None

    def __str__(self) -> str:
        return f"{self.saved}:{self.resumed}"


def check_resume(
    model: Any,
    pairs: Sequence[tuple[Layout, Layout]],
    *,
    load: Path | None = None,
    import_: Path | None = None,
    lora_rank: int = 0,
    optimizer: str = "adamw",
    dtype: str = "float32",
    offload: bool = False,
    tolerance: float = 1e-5,
    within: Callable[[], AbstractContextManager] = nullcontext,
) -> Iterator[ResumeVerdict]:
    """Save a run in one layout and resume it in another, on the CPU of this machine.

    Args:
        model: A config object or a name, as in `check_parallel`.
        pairs: The layouts that save and resume; `pairs_of` returns them for names.
        load: A checkpoint or Hugging Face directory with weights, as in `check_parallel`.
        import_: Python file that registers the model.
        lora_rank: Train adapters of this rank instead of the weights: on all linear layers, experts
            and routers.
        optimizer: adamw or muon.
        dtype: float32 or bfloat16. In bfloat16 the last steps are compared by their losses and
            gradient norms only.
        offload: Store the state of the optimizer on the CPU, as with `offload=True`.
        tolerance: Relative differences above this count. Loaded states must be equal.
        within: An importable function that returns a context manager, as in `check_parallel`.

    Yields:
        A verdict per pair.

    Raises:
        UserError: A layout or a setting is invalid, or the model is a classifier.
        RankError: Training in one process fails.
    """
    check_number("tolerance", tolerance, 0)
    subject = subject_of(model, load, import_, lora_rank, optimizer, within, dtype, offload)
    check_layouts((layout for pair in pairs for layout in pair), subject.config)
    with tempfile.TemporaryDirectory(prefix="megazoo-check-") as directory:
        pool, root = RankPool(), Path(directory)
        one = root / "one_process.pt"
        runs: dict[Layout, list[Run] | str] = {}  # of all ranks, or an error
        try:
            run_in_one_process(pool, train_without_a_stop, subject, one)
            samples = None
            if subject.dtype == "float32" and not subject.lora_rank:
                samples = _check_batch_size(pool, subject, root / "batch_size")
            for saved, resumed in pairs:
                place = root / str(saved)
                if saved not in runs:
                    arguments = (subject, saved, place)
                    try:
                        runs[saved] = pool.run(save_a_run, saved.ranks, *arguments, timeout=TIMEOUT)
                    except RankError as error:
                        runs[saved] = last_line(error)
                saver = runs[saved]
                if isinstance(saver, str):
                    cause = f"the run that saves ends with {saver}"
                    yield ResumeVerdict(saved, resumed, cause=cause)
                else:
                    pair = (saved, resumed)
                    verdict = _check_pair(pool, subject, pair, place, one, saver, tolerance)
                    if verdict.passed and samples:
                        verdict.cause, verdict.usual = samples.text, samples.usual
                    yield verdict
        finally:
            pool.close()


def pairs_of(names: Sequence[str]) -> list[tuple[Layout, Layout]]:
    """Return the pairs of layouts that a list means: tp2:pp2 is one pair, and a single layout is
    resumed in itself and in the next single one.

    Raises:
        UserError: A name is invalid.
    """
    pairs = []
    single = [Layout.named(name) for name in names if ":" not in name]
    for number, layout in enumerate(single):
        following = single[(number + 1) % len(single)]
        pairs += [(layout, layout)] + ([(layout, following)] if following != layout else [])
    for name in names:
        if ":" in name:
            saved, _, resumed = name.partition(":")
            pairs.append((Layout.named(saved), Layout.named(resumed)))
    return list(dict.fromkeys(pairs))


def _check_pair(
    pool: RankPool,
    subject: Subject,
    pair: tuple[Layout, Layout],
    place: Path,
    one: Path,
    saver: list[Run],
    tolerance: float,
) -> ResumeVerdict:
    """Resume the run of a pair. saver: the records of the ranks that saved it."""
    saved, resumed = pair
    verdict = ResumeVerdict(saved, resumed)
    try:
        arguments = (subject, resumed, place, one)
        ranks = pool.run(resume_a_run, resumed.ranks, *arguments, timeout=TIMEOUT)
    except RankError as error:
        last = last_line(error)
        verdict.cause, verdict.usual = f"it ends with {last}", usual.of_error(last, resumed)
        return verdict
    expected: Run = torch.load(one, weights_only=False, mmap=True)
    same = saver if saved == resumed else None
    is_exact = subject.dtype == "float32"
    comparison = ResumeComparison(ranks, expected, same, tolerance, is_exact)
    first = next(comparison.findings(), None)
    steps = [(rank, step) for rank in ranks for step in rank.losses if step in expected.losses]
    losses = [abs(rank.losses[step] / expected.losses[step] - 1) for rank, step in steps]
    last = [rank.distances.get(LAST, {}).get(WEIGHTS, {}).values() for rank in ranks]
    verdict.loss = max(losses, default=math.nan)
    verdict.weight = max((max(each) for each in last if each), default=math.nan)
    if first:
        verdict.cause, verdict.usual = first.text, first.usual
    elif saved == resumed and is_exact and not subject.lora_rank:
        _check_program(pool, subject, verdict, Path(f"{place}_program"), tolerance)
    return verdict


def _check_program(
    pool: RankPool, subject: Subject, verdict: ResumeVerdict, directory: Path, tolerance: float
) -> None:
    """Run the training program, and resume it after the first step. Set the cause of the verdict if
    the second step differs."""
    runs = _run_and_resume(pool, subject, verdict.saved, directory)
    text = runs if isinstance(runs, str) else next(differences_of_resumed(*runs, tolerance), None)
    if text:
        verdict.cause, verdict.usual = f"program: {text}", usual.PROGRAM_RESUMED


def _check_batch_size(pool: RankPool, subject: Subject, directory: Path) -> Finding | None:
    """Resume the training program in one process with twice the batch size. Return a finding if it
    skips or repeats samples, or ends with an error."""
    runs = _run_and_resume(pool, subject, Layout(), directory, {"global_batch_size": 2 * ROWS})
    if isinstance(runs, str):
        return Finding(f"program: {runs}", "")
    (whole,), (larger,) = runs
    if samples_are_continued(whole, larger):
        return None
    text = "program: a run that resumes with another batch size reads other samples"
    return Finding(f"{text}, in one process", usual.RESUMED_ORDER)


def _run_and_resume(
    pool: RankPool,
    subject: Subject,
    layout: Layout,
    directory: Path,
    further: dict | None = None,
) -> tuple[list[Numbers], list[Numbers]] | str:
    """Run the training program in a layout, and resume it after the first step. Return the numbers
    of the ranks in both runs, or a sentence if one ends with an error. further: further
    settings of the resumed run."""
    directory.mkdir()
    write_inputs(subject, directory)
    save, name = directory / "run", "whole"
    try:

        def run(settings: dict) -> list[Numbers]:
            arguments = (subject, layout, directory, name, settings)
            return pool.run(run_the_program, layout.ranks, *arguments, timeout=TIMEOUT)

        whole = run({"save": save, "save_interval": 1})
        name = "resumed"
        return whole, run({"load": save / "step_00000001", **(further or {})})
    except RankError as error:
        return f"the {name} run ends with {last_line(error)}"


@dataclass(frozen=True)
class ResumeComparison:
    """The records of the ranks that resumed a run, compared with those of one process.

    Attributes:
        ranks: The records of the ranks.
        expected: The record of one process.
        same: The records of the ranks that saved the checkpoint, and continued; None if they have
            another layout.
        tolerance: Relative differences above this count.
        is_exact: Whether layouts have the same weights, up to rounding errors of fp32.
    """

    ranks: list[Resumed]
    expected: Run
    same: list[Run] | None
    tolerance: float
    is_exact: bool

    def findings(self) -> Iterator[Finding]:
        """Yield all differences in the order of the run."""
        yield from self._progress()
        yield from self._loaded()
        if any(rank.step != STOP for rank in self.ranks):
            return  # other steps were trained
        for step in range(STOP + 1, LAST + 1):
            yield from self._samples(step)
            yield from self._rates(step)
            yield from self._dropout(step)
            yield from self._losses(step)
            yield from self._scale(step)
            if self.is_exact:
                yield from self._states(step)

    def _progress(self) -> Iterator[Finding]:
        """Compare the numbers of steps and samples."""
        for what, expected in {"step": STOP, "samples": STOP * ROWS, "updates": STOP}.items():
            if where := self._on(lambda rank, w=what, e=expected: getattr(rank, w) != e):
                found = next(getattr(rank, what) for rank in self.ranks)
                text = f"resume: the number of {PROGRESS[what]} is {found:g} instead of {expected}"
                reason = usual.RESUMED_STATE if what == "updates" else usual.RESUMED_ORDER
                yield Finding(f"{text} {where}", reason)

    def _loaded(self) -> Iterator[Finding]:
        """Compare the loaded states with the saved ones."""
        for kind, name, where in self._unequal([rank.loaded for rank in self.ranks], 0.0):
            text = f"resume: the {kind} of {name}: another value than was saved {where}"
            yield Finding(text, usual.of_resumed(kind))

    def _samples(self, step: int) -> Iterator[Finding]:
        def differs(rank: Resumed) -> bool:
            pairs = zip(rank.batches[step], self.expected.batches[step], strict=True)
            return any(found not in (0, expected) for found, expected in pairs)

        if where := self._on(differs):
            yield Finding(f"resume: step {step} has other samples {where}", usual.RESUMED_ORDER)

    def _rates(self, step: int) -> Iterator[Finding]:
        """Compare the learning rate and the weight decay of each parameter with their
        definition."""
        for name, expected in self.expected.rates[step].items():

            def differs(rank: Resumed, name=name, expected=expected) -> bool:
                pairs = zip(rank.rates[step].get(name, expected), expected, strict=True)
                return not all(math.isclose(*pair, rel_tol=1e-9) for pair in pairs)

            if where := self._on(differs):
                lr, decay = next(r.rates[step][name] for r in self.ranks if differs(r))
                text = f"learning rate {lr:g} and weight decay {decay:g}"
                then = "{:g} and {:g}".format(*expected)
                text = f"resume: {name}: {text} instead of {then} at step {step} {where}"
                yield Finding(text, usual.RESUMED_RATES)

    def _dropout(self, step: int) -> Iterator[Finding]:
        """Compare the dropout seeds with those of the run that continued, in the same layout."""
        for rank, same in zip(self.ranks, self.same or [], strict=False):
            if rank.seeds[step] != same.seeds[step]:
                text = f"resume: the dropout of step {step} has other seeds on rank {rank.place}"
                yield Finding(text, usual.RESUMED_DROPOUT)

    def _losses(self, step: int) -> Iterator[Finding]:
        expected = self.expected
        loss = expected.losses[step]
        most = (self.tolerance if self.is_exact else OF_LOW_PRECISION) * abs(loss)
        # also true for nan
        if where := self._on(lambda rank: not abs(rank.losses[step] - loss) <= most):
            text = f"{self.ranks[0].losses[step]:.7g} instead of {loss:.7g}"
            yield Finding(f"resume: loss: {text} at step {step} {where}", usual.RESUMED_LOSS)
        norm = expected.norms[step]
        most = (10 * self.tolerance if self.is_exact else 10 * OF_LOW_PRECISION) * abs(norm)
        if where := self._on(lambda rank: not abs(rank.norms[step] - norm) <= most):
            text = f"{self.ranks[0].norms[step]:.7g} instead of {norm:.7g}"
            text = f"resume: gradient norm: {text} at step {step} {where}"
            yield Finding(text, usual.RESUMED_LOSS)

    def _scale(self, step: int) -> Iterator[Finding]:
        """Compare the loss scale and its counters."""
        expected = self.expected.scales[step]
        if where := self._on(lambda rank: rank.scales[step] != expected):
            text = f"{self.ranks[0].scales[step]} instead of {expected}"
            text = f"resume: the loss scale is {text} after step {step} {where}"
            yield Finding(text, usual.RESUMED_STATE)

    def _states(self, step: int) -> Iterator[Finding]:
        """Compare the weights and the states of the optimizer after a step."""
        distances = [rank.distances[step] for rank in self.ranks]
        for kind, name, where in self._unequal(distances, 10 * self.tolerance):
            text = f"resume: the {kind} of {name}: differs after step {step} {where}"
            yield Finding(text, usual.of_resumed(kind))

    def _on(self, is_wrong: Callable[[Resumed], object]) -> str:
        """Name the ranks that a function returns True for; "" for no rank."""
        places = [rank.place for rank in self.ranks if is_wrong(rank)]
        more = f" and {len(places) - 2} more" if len(places) > 2 else ""
        return f"on rank{'s' * (len(places) > 1)} {', '.join(places[:2])}{more}" if places else ""

    def _unequal(
        self, distances: list[dict[str, dict[str, float]]], most: float
    ) -> Iterator[tuple[str, str, str]]:
        """Yield the kind and the name of each state whose distance is above `most`, and the
        ranks."""
        by_rank = {id(rank): each for rank, each in zip(self.ranks, distances, strict=True)}
        for kind in dict.fromkeys(kind for each in distances for kind in each):
            for name in dict.fromkeys(name for each in distances for name in each.get(kind, {})):

                def differs(rank: Resumed, kind=kind, name=name) -> bool:
                    distance = by_rank[id(rank)].get(kind, {}).get(name, 0.0)
                    return not distance <= most

                if where := self._on(differs):
                    yield kind, name, where
