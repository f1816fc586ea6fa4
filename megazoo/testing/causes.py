"""Find where training in a layout differs from training in one process. Values are compared in the
order in which they are computed, because the first difference causes the others."""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megazoo.parallel.layout import Layout
from megazoo.testing import usual
from megazoo.testing.batches import KINDS, micro_batches_of
from megazoo.testing.distances import Clue, relative
from megazoo.testing.trial import Findings, Record


@dataclass(frozen=True)
class Finding:
    """A difference.

    Attributes:
        text: A sentence with the value, the ranks and the size of the difference.
        usual: The usual cause, or "".
    """

    text: str
    usual: str = ""


@dataclass(frozen=True)
class Comparison:
    """The results of a layout's ranks, compared with those of one process.

    Attributes:
        layout: The layout.
        ranks: The findings of each rank.
        expected: The record of one process.
        tolerance: Relative differences above this count.
    """

    layout: Layout
    ranks: list[Findings]
    expected: Record
    tolerance: float

    def findings(self) -> Iterator[Finding]:
        """Yield all differences in the order of the computation."""
        yield from self._parameters()
        yield from self._generators()
        for step in range(len(self.expected.losses)):
            yield from self._activations(step)
            if step == 0:
                yield from self._logits()
                yield from self._dropout()
                yield from self._labels()
            yield from self._loss(step)
            yield from self._auxiliary(step)
            yield from self._gradients(step)
            yield from self._norm(step)
            yield from self._weights(step)
        yield from self._optimizer()
        yield from self._overflow()

    def worst_loss(self, first: int = 0, end: int | None = None) -> float:
        """Return the largest relative difference of the loss on any rank, in the steps from first
        to end (exclusive)."""
        ours = (rank.losses[first:end] for rank in self.ranks)
        return _worst(ours, self.expected.losses[first:end])

    def worst_norm(self, first: int = 0, end: int | None = None) -> float:
        """Return the largest relative difference of the gradient norm on any rank, in the steps
        from first to end (exclusive)."""
        ours = (rank.norms[first:end] for rank in self.ranks)
        return _worst(ours, self.expected.norms[first:end])

    def _parameters(self) -> Iterator[Finding]:
        """Compare the names of the parameters and their initial values."""
        expected = self.expected.initial
        names = set().union(*(rank.names for rank in self.ranks))
        for name in sorted(names ^ expected.keys()):
            missing = "on no rank" if name in expected else "not there in one process"
            yield Finding(f"parameter {name}: {missing}", usual.STAGES)
        for name in self.expected.wrongly_trained:
            text = f"parameter {name}: it is trained, though only adapters should be"
            yield Finding(text, usual.TRAINED)
        initial = [rank.initial for rank in self.ranks]
        for name in self._differing(initial, expected):
            where = self._where(initial, name)
            yield Finding(f"parameter {name}: another initial value {where}", usual.INITIAL)

    def _generators(self) -> Iterator[Finding]:
        """Report unseeded random generators that the first steps use."""
        for generator, module in self.expected.generators.items():
            where = f"module {module}" if module else "the model"
            yield Finding(f"{where}: it draws from {generator}", usual.GENERATOR)
        for number, rank in enumerate(self.ranks):
            for generator, module in rank.generators.items():
                where = f"module {module}" if module else "the model"
                text = f"{where}: it draws from {generator} {self._on([number])}"
                yield Finding(text, usual.GENERATOR)

    def _activations(self, step: int) -> Iterator[Finding]:
        """Compare the inputs and outputs of modules, in the steps for which they are stored."""
        if step >= len(self.expected.activations):
            return
        activations, when = [rank.activations[step] for rank in self.ranks], _later(step)
        for key in self._differing(activations, self.expected.activations[step]):
            kind, name = key
            where = self._where(activations, key)
            clue = self._clue([rank.activation_clues[step] for rank in self.ranks], key)
            yield Finding(
                f"module {name}: its {kind} differs{when} {where}{self._told(clue)}",
                usual.of_activations(kind, name, clue, step, self.layout),
            )

    def _logits(self) -> Iterator[Finding]:
        """Compare the logits of a forward pass of the full model."""
        wrong = [n for n, rank in enumerate(self.ranks) if rank.logits > self.tolerance]
        if wrong:
            yield Finding(f"logits: they differ {self._on(wrong)}", usual.LOGITS)

    def _dropout(self) -> Iterator[Finding]:
        """Compare the seeds of dropout masks between ranks and with one process."""
        alone = self.layout.dp == self.layout.cp == 1
        for number, rank in enumerate(self.ranks):
            for site in rank.draws:
                for before in range(number):
                    yield from self._dropout_of_two(site, before, number)
        for number, rank in enumerate(self.ranks):
            drawn = [seed for draws in rank.draws.values() for seed in draws.seeds]
            where = self._on([number])
            if len(set(drawn)) < len(drawn):
                text = f"dropout: two layers or micro-batches have the same masks {where}"
                yield Finding(text, usual.DROPOUT_SITES)
            for site, draws in rank.draws.items():
                same_as_alone = alone and (self.layout.tp == 1 or not draws.parallel)
                theirs = self.expected.draws.get(site)
                if same_as_alone and (theirs is None or draws.seeds != theirs.seeds):
                    text = f"dropout {site}: other masks than in one process {where}"
                    yield Finding(text, usual.DROPOUT_SITES)
                if draws.redrawn:
                    text = f"dropout {site}: other masks when it is recomputed {where}"
                    yield Finding(text, usual.DROPOUT_AGAIN)
                if draws.repeated:
                    text = f"dropout {site}: the same masks at two steps {where}"
                    yield Finding(text, usual.DROPOUT_STEPS)
                if draws.evaluated:
                    text = f"dropout {site}: active in eval_batch {where}"
                    yield Finding(text, usual.DROPOUT_EVALUATED)

    def _dropout_of_two(self, site: str, one: int, other: int) -> Iterator[Finding]:
        """Compare the seeds of a Dropout on two ranks.

        Ranks with the same tokens must have the same seeds, except tp ranks inside a
        tensor-parallel region. In any other case the seeds must differ. Under sequence parallelism
        tp ranks never have the same tokens outside of these regions.
        """
        draws, before = self.ranks[other].draws[site], self.ranks[one].draws.get(site)
        theirs = before.seeds if before else []
        a, b = self.ranks[one].coordinates, self.ranks[other].coordinates
        same_tokens = (a["dp"], a["cp"]) == (b["dp"], b["cp"])
        where = self._on([one, other])
        differs = draws.parallel or self.layout.sequence_parallel or not same_tokens
        if theirs and not differs and draws.seeds != theirs:
            text = f"dropout {site}: different masks {where}, of what they share"
            yield Finding(text, usual.DROPOUT_EQUAL)
        if differs and set(draws.seeds) & set(theirs):
            yield Finding(f"dropout {site}: the same masks {where}", usual.DROPOUT_DIFFERENT)

    def _labels(self) -> Iterator[Finding]:
        theirs = self.expected.labelled
        wrong = [n for n, rank in enumerate(self.ranks) if rank.labelled != theirs]
        if wrong:
            ours = self.ranks[wrong[0]].labelled
            text = f"labels: the mean is over {ours:,} labelled tokens, not {theirs:,}"
            yield Finding(f"{text}, {self._on(wrong)}", usual.of_labels(ours, theirs, self.layout))

    def _loss(self, step: int) -> Iterator[Finding]:
        if self.worst_loss(step, step + 1) > self.tolerance:
            theirs = self.expected.losses[step]
            ours, where = self._unlike([rank.losses[step] for rank in self.ranks], theirs)
            compared = step < len(self.expected.activations)
            more = ", though no module's output differs" if compared else ""
            mean = self._other_mean(ours) if step == 0 else ""
            text = f"loss: {ours:.7g} instead of {theirs:.7g}{_later(step)}{where}{more}{mean}"
            yield Finding(text, usual.MEANS if mean else usual.LOSS)

    def _auxiliary(self, step: int) -> Iterator[Finding]:
        """Compare the auxiliary losses of a step."""
        for name, expected in self.expected.auxiliary[step].items():
            every = [rank.auxiliary[step].get(name, math.nan) for rank in self.ranks]
            if not _worst([[found] for found in every], [expected]) <= self.tolerance:
                found, where = self._unlike(every, expected)
                text = f"auxiliary loss {name}: {found:.7g} instead of {expected:.7g}"
                yield Finding(f"{text}{_later(step)}{where}", usual.AUXILIARY)

    def _other_mean(self, loss: float) -> str:
        """Return a text if the first loss equals a mean over replicas or micro-batches; otherwise
        ""."""
        dp, rows = self.layout.dp, self.expected.rows
        assert rows is not None
        for what, parts in (("replicas", dp), ("micro-batches", dp * micro_batches_of(dp))):
            sums = rows.unflatten(0, (parts, -1)).sum(1)
            mean = float((sums[:, 0] / sums[:, 1]).mean())
            if parts > 1 and abs(loss - mean) < self.tolerance * abs(mean):
                return f": it is the mean of the {what}' means"
        return ""

    def _gradients(self, step: int) -> Iterator[Finding]:
        """Compare the gradients of a step, in the order of the backward pass."""
        gradients = [rank.gradients[step] for rank in self.ranks]
        wrong = self._differing(gradients, list(self.expected.initial)[::-1])
        if not wrong:
            return
        first, others = wrong[0], len(wrong) - 1
        factor = _common(factor for rank in self.ranks for factor in rank.factors.values())
        if step == 0 and abs(factor - 1) > 1e-3:
            yield Finding(
                f"loss scale: every gradient is {factor:.4g} x what it should be"
                f"{self._axes_of_size(factor)}",
                usual.of_loss_scale(factor, micro_batches_of(self.layout.dp)),
            )
        where = self._where(gradients, first)
        if set(wrong) <= set().union(*(rank.tied for rank in self.ranks)):
            factor = _common(r.factors[first] for r in self.ranks if first in r.factors)
            what = "differs" if math.isnan(factor) else f"is {factor:.3g} x what it should be"
            yield Finding(
                f"tie: the gradient of {first}, which stages share, {what} at {_named(step)} "
                f"{where}",
                usual.of_ties(factor),
            )
        more = f", and of {others} more" if others else ""
        clue = self._clue([rank.gradient_clues for rank in self.ranks], first) if not step else None
        yield Finding(
            f"gradient of {first}: differs at {_named(step)} {where}{more}{self._told(clue)}",
            usual.of_gradients(clue, self._place_of(first, gradients), self.layout),
        )

    def _place_of(self, first: str, gradients: Sequence[dict]) -> usual.Place:
        """Describe the position of the first gradient that differs."""
        compared = set().union(*gradients)
        made_first = next(name for name in reversed(self.expected.initial) if name in compared)
        wrong = set(self._ranks_where(gradients, first))
        right = {n for n, each in enumerate(gradients) if first in each} - wrong
        cut = [(rank.coordinates["tp"], rank.coordinates["pp"]) for rank in self.ranks]
        return usual.Place(
            made_first=first == made_first,
            copied=any(first in rank.copied for rank in self.ranks),
            on_some_replicas=bool({cut[n] for n in wrong} & {cut[n] for n in right}),
        )

    def _norm(self, step: int) -> Iterator[Finding]:
        if self.worst_norm(step, step + 1) > self.tolerance:
            theirs = self.expected.norms[step]
            ours, where = self._unlike([rank.norms[step] for rank in self.ranks], theirs)
            text = f"gradient norm: {ours:.7g} instead of {theirs:.7g} at {_named(step)}{where}"
            yield Finding(f"{text}, though no gradient differs", usual.NORM)

    def _weights(self, step: int) -> Iterator[Finding]:
        weights = [rank.weights[step] for rank in self.ranks]
        trained = self.expected.gradients[step].keys()
        most_differ = all(
            2 * sum(each[name] > self.tolerance for name in trained & each.keys())
            > len(trained & each.keys())
            for each in weights
            if trained & each.keys()
        )
        for name in self._differing(weights, self.expected.weights[step]):
            where = self._where(weights, name)
            when = f"after {_named(step)}"
            text = f"weights of {name}: differ {when} {where}, though no gradient does"
            tied = any(name in rank.tied for rank in self.ranks)
            yield Finding(text, usual.of_weights(tied, self.layout.zero, most_differ))

    def _optimizer(self) -> Iterator[Finding]:
        """Compare one process with reference implementations of AdamW and Muon."""
        trained = set(self.expected.gradients[0]) if self.expected.gradients else set()
        for name in self._differing([self.expected.plain], self.expected.plain):
            kind = "Muon" if name in self.expected.matrices else "AdamW"
            what = (
                f"optimizer: the weights of {name} are not those of {kind}, in one process either"
            )
            if name not in trained:
                yield Finding(f"{what}: they are frozen, and have changed", usual.DECAY)
            elif self.expected.decaying[name] <= self.tolerance:
                yield Finding(f"{what}: they decay, though of one dimension", usual.DECAY)
            else:
                yield Finding(what, usual.OPTIMIZER)

    def _overflow(self) -> Iterator[Finding]:
        """Report ranks that do not skip a step that overflows on the last rank."""
        stepped = [n for n, rank in enumerate(self.ranks) if rank.skipped is False]
        if stepped:
            last = len(self.ranks) - 1
            text = f"overflow: a step whose gradients overflow on rank {last} is not skipped"
            yield Finding(f"{text} {self._on(stepped)}", usual.OVERFLOW)

    def _unlike(self, values: list[float], expected: float) -> tuple[float, str]:
        """Return the first value that differs, and a text that names the ranks ("" if all ranks
        differ)."""
        wrong = [n for n, v in enumerate(values) if _worst([[v]], [expected]) > self.tolerance]
        where = f" {self._on(wrong)}" if len(wrong) < len(values) else ""
        return values[wrong[0]], where

    def _differing(self, distances: Sequence[dict], keys: Iterable[Hashable]) -> list:
        """Return the keys with a distance above the tolerance on any rank."""
        return [key for key in keys if self._ranks_where(distances, key)]

    def _where(self, distances: Sequence[dict], key: Hashable) -> str:
        """Name the ranks on which the distance of a key is above the tolerance."""
        return self._on(self._ranks_where(distances, key))

    def _ranks_where(self, distances: Sequence[dict], key: Hashable) -> list[int]:
        return [n for n, each in enumerate(distances) if each.get(key, 0.0) > self.tolerance]

    def _on(self, numbers: list[int]) -> str:
        """Name ranks: "on rank 1 (tp 1, pp 0, dp 0)". cp is included if its size is above 1. If
        only some cp ranks differ, they are added: "only where cp is 1"."""
        named = []
        for number in numbers[:2]:
            place = self.ranks[number].coordinates.items()
            place = [f"{axis} {n}" for axis, n in place if axis != "cp" or self.layout.cp > 1]
            named.append(f"{number} ({', '.join(place)})")
        more = f" and {len(numbers) - 2} more" if len(numbers) > 2 else ""
        with_it = sorted({self.ranks[number].coordinates["cp"] for number in numbers})
        only = f", only where cp is {listed(with_it)}" if len(with_it) < self.layout.cp else ""
        return f"on rank{'s' * (len(numbers) > 1)} {', '.join(named)}{more}{only}"

    def _clue(self, of_ranks: Sequence[dict], key: Hashable) -> Clue | None:
        """Return the clue that all ranks agree on, or None."""
        clues = [clues[key] for clues in of_ranks if key in clues]
        same = all(_alike(clue, clues[0]) for clue in clues)
        return clues[0] if clues and same else None

    def _told(self, clue: Clue | None) -> str:
        """Describe a clue."""
        if clue is None:
            return ""
        if clue.everywhere:
            return ": by the same features at every token"
        if not math.isnan(clue.factor):
            axes = self._axes_of_size(clue.factor)
            return f": it is {clue.factor:.4g} x what it should be{axes}"
        if clue.reordered:
            return ": the values are those expected, in another order"
        for axis, factor in clue.sums.items():
            times = "" if abs(factor - 1) < 1e-3 else f"{factor:.4g} x "
            return f": the {axis} ranks' add up to {times}what it should be"
        return ""

    def _axes_of_size(self, factor: float) -> str:
        """Name the axes whose size (or its square, or the inverse of either) equals a factor."""
        sizes = {name: getattr(self.layout, name) for name in ("tp", "cp", "pp", "dp")}
        for power, what in ((1, "is"), (2, "is its square,")):
            times = factor**power
            alike = [
                f"{name} {what} {size}"
                for name, size in sizes.items()
                if size > 1 and min(abs(times - size) / size, abs(times * size - 1)) < 1e-3
            ]
            if alike:
                return f", and {' and '.join(alike)}"
        return ""


def _alike(one: Clue, other: Clue) -> bool:
    """Return whether two clues are the same."""
    same = (one.everywhere, one.reordered, one.sums.keys()) == (
        (other.everywhere, other.reordered, other.sums.keys())
    )
    factors = torch.tensor([one.factor, other.factor])
    return same and torch.allclose(factors[:1], factors[1:], rtol=1e-3, equal_nan=True)


def _common(factors: Iterable[float]) -> float:
    """Return the common value of all factors, or nan."""
    factors = list(factors)
    alike = all(math.isclose(factor, factors[0], rel_tol=1e-3) for factor in factors)
    return factors[0] if factors and alike else math.nan


def _named(step: int) -> str:
    """Name a step and its kind of batch, except plain rows: "step 2 (packed documents)"."""
    kind = KINDS[step % len(KINDS)]
    return f"step {step + 1}" + (f" ({kind})" if step % len(KINDS) else "")


def _later(step: int) -> str:
    """Name a step, except the first."""
    return f" at {_named(step)}" if step else ""


def listed(numbers: Iterable[object]) -> str:
    """Join values to a text: "0, 1 and 3"."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _worst(ranks: Iterable[list[float]], expected: list[float]) -> float:
    """Return the largest relative difference between any rank's values and the expected ones."""
    return max(
        relative(abs(ours - theirs), abs(theirs))
        for values in ranks
        for ours, theirs in zip(values, expected, strict=True)
    )
