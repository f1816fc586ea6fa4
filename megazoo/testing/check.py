"""Does a model train in a layout as it does in one process? And if not, where does the difference
begin?

One process trains a few steps on whole batches, and keeps what each module was given and returned,
the gradients, norms and weights. The ranks of a layout do the same with their parts, and each
compares its own. The first thing in the order of the computation that differs is the cause that is
told.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from megazoo.errors import UserError
from megazoo.models.registry import family_of, find_config
from megazoo.testing.layouts import Layout
from megazoo.testing.ranks import RankError, RankPool
from megazoo.testing.trial import (
    ROWS,
    Findings,
    Record,
    Subject,
    relative,
    train_in_one_process,
    train_on_a_rank,
)


@dataclass
class Verdict:
    """Of one layout: the worst relative differences from one process, and the cause if they are
    above the tolerance.

    loss, norm: of any step. gradient, weight: of any parameter, at any step and after the last; a
    distance over the parameter's norm, of gradients at least a thousandth of the global one. cause:
    None if it passed.
    """

    layout: Layout
    loss: float = math.nan
    norm: float = math.nan
    gradient: float = math.nan
    weight: float = math.nan
    cause: str | None = None

    @property
    def passed(self) -> bool:
        return self.cause is None


def check_parallel(
    model,
    layouts: Sequence[Layout | str],
    *,
    load: Path | None = None,
    import_: Path | None = None,
    steps: int = 3,
    tolerance: float = 1e-5,
) -> Iterator[Verdict]:
    """Train a model in one process, then in each layout, on the CPU of this machine; yields a
    verdict for each.

    model: a config object, or a name as `from_config` takes it. load: a checkpoint or Hugging Face
    directory of it, for its weights; biases and norms are random in any case, so that zeros hide
    nothing. import_: the Python file that registers the model, if one does. UserError for a layout
    that can't be.
    """
    config = find_config(model) if isinstance(model, str) else model
    subject = Subject(
        family_of(config), asdict(config), load and Path(load), import_ and Path(import_).resolve()
    )
    layouts = [Layout.named(layout) if isinstance(layout, str) else layout for layout in layouts]
    for layout in layouts:
        layout.check(config)
        if ROWS % layout.dp:
            raise UserError(f"{layout}: dp {layout.dp} must divide the {ROWS} rows of the check")
    with tempfile.TemporaryDirectory(prefix="megazoo-check-") as directory:
        expected, pool = Path(directory) / "one_process.pt", RankPool()
        try:
            pool.run(train_in_one_process, 1, subject, steps, expected, timeout=3600)
            for layout in layouts:
                try:
                    found = pool.run(
                        train_on_a_rank,
                        layout.ranks,
                        subject,
                        layout,
                        steps,
                        expected,
                        timeout=3600,
                    )
                except RankError as error:
                    yield Verdict(layout, cause=f"it ends with {str(error).splitlines()[-1]}")
                else:
                    yield _verdict(
                        layout,
                        found,
                        torch.load(expected, weights_only=False, mmap=True),
                        tolerance,
                    )
        finally:
            pool.close()


def _verdict(layout: Layout, found: list[Findings], expected: Record, tolerance: float) -> Verdict:
    verdict = Verdict(
        layout,
        loss=max(_worst(rank.losses, expected.losses) for rank in found),
        norm=max(_worst(rank.norms, expected.norms) for rank in found),
        weight=max(max(rank.weights.values(), default=0.0) for rank in found),
    )
    if not layout.zero:
        verdict.gradient = max(
            max(step.values(), default=0.0) for rank in found for step in rank.gradients
        )
    causes = _causes(layout, found, expected, tolerance)
    return replace(verdict, cause=next(causes, None))


def _worst(ours: list[float], theirs: list[float]) -> float:
    return max(relative(abs(a - b), abs(b)) for a, b in zip(ours, theirs, strict=True))


def _causes(
    layout: Layout, found: list[Findings], expected: Record, tolerance: float
) -> Iterator[str]:
    """What differs, in the order in which it is computed."""

    def where(distances: list[dict], key) -> str:
        return _ranks(
            [n for n, each in enumerate(distances) if each.get(key, 0.0) > tolerance], found
        )

    def differing(distances: list[dict], keys) -> list:
        return [key for key in keys if any(each.get(key, 0.0) > tolerance for each in distances)]

    names = set().union(*(rank.names for rank in found))
    for name in sorted(names ^ expected.initial.keys()):
        yield f"parameter {name}: " + (
            "on no rank" if name in expected.initial else "not there in one process"
        )
    initial = [rank.initial for rank in found]
    for name in differing(initial, expected.initial):
        yield f"parameter {name}: another initial value {where(initial, name)}"
    passed = [rank.passed for rank in found]
    for kind, name in differing(passed, expected.passed):
        yield f"module {name}: its {kind} differs {where(passed, (kind, name))}"
    yield from _dropout_causes(layout, found, expected)
    if max(_worst(rank.losses[:1], expected.losses[:1]) for rank in found) > tolerance:
        yield f"loss: {found[0].losses[0]:.7g} instead of {expected.losses[0]:.7g}, though no module's output differs"
    for step in range(len(expected.losses)):
        gradients = [rank.gradients[step] for rank in found if rank.gradients]
        wrong = differing(gradients, list(expected.initial)[::-1])  # backward's order
        factors = sorted(factor for rank in found for factor in rank.factors.values())
        tied = set().union(*(rank.tied for rank in found))
        if (
            wrong
            and step == 0
            and factors
            and factors[-1] - factors[0] < 1e-3 < abs(factors[0] - 1)
        ):
            yield f"loss scale: every gradient is {factors[0]:.4g} x what it should be"
        if wrong and set(wrong) <= tied:
            factor = next(
                (rank.factors[wrong[0]] for rank in found if wrong[0] in rank.factors), math.nan
            )
            yield f"tie: the gradient of {wrong[0]}, which stages share, is {factor:.3g} x what it should be"
        if wrong:
            more = f", and of {len(wrong) - 1} more" if len(wrong) > 1 else ""
            yield f"gradient of {wrong[0]}: differs at step {step + 1} {where(gradients, wrong[0])}{more}"
        if (
            max(
                _worst(rank.norms[step : step + 1], expected.norms[step : step + 1])
                for rank in found
            )
            > tolerance
        ):
            told = f"{found[0].norms[step]:.7g} instead of {expected.norms[step]:.7g}"
            yield f"gradient norm: {told} at step {step + 1}" + (
                "" if layout.zero else ", though no gradient differs"
            )
    weights = [rank.weights for rank in found]
    for name in differing(weights, expected.weights):
        yield f"weights of {name}: differ after the steps {where(weights, name)}, though no gradient does"
    if max(_worst(rank.losses, expected.losses) for rank in found) > tolerance:
        yield "loss: differs after the first step, though no weight does"


def _dropout_causes(layout: Layout, found: list[Findings], expected: Record) -> Iterator[str]:
    for number, rank in enumerate(found):
        drawn = [seed for _, seeds in rank.seeds.values() for seed in seeds]
        if len(set(drawn)) < len(drawn):
            yield f"dropout: two layers or micro-batches have the same masks {_ranks([number], found)}"
        for site, (parallel, seeds) in rank.seeds.items():
            if (
                layout.dp == 1
                and (layout.tp == 1 or not parallel)
                and seeds != expected.seeds.get(site)
            ):
                yield f"dropout {site}: other masks than in one process {_ranks([number], found)}"
            for before, other in enumerate(found[:number]):
                _, theirs = other.seeds.get(site, (parallel, []))
                same_replica, pair = (
                    rank.coordinates[2] == other.coordinates[2],
                    _ranks([before, number], found),
                )
                if theirs and same_replica and not parallel and seeds != theirs:
                    yield f"dropout {site}: different masks {pair}, of what they share"
                if (parallel or not same_replica) and set(seeds) & set(theirs):
                    yield f"dropout {site}: the same masks {pair}"


def _ranks(numbers: list[int], found: list[Findings]) -> str:
    """on rank 1 (tp 1, pp 0, dp 0)."""
    told = ", ".join(
        "{} (tp {}, pp {}, dp {})".format(n, *found[n].coordinates) for n in numbers[:2]
    )
    return f"on rank{'s' * (len(numbers) > 1)} {told}" + (
        f" and {len(numbers) - 2} more" if len(numbers) > 2 else ""
    )
