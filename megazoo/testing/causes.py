"""Tell where the training of a layout differs from that of one process, in the order in which it is
computed: the first difference is the cause of the others."""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megazoo.testing.batches import KINDS
from megazoo.testing.layouts import Layout
from megazoo.testing.trial import Findings, Record, relative


@dataclass(frozen=True)
class Comparison:
    """What the ranks of a layout found, beside what one process kept.

    tolerance: the relative difference above which something counts as different.
    """

    layout: Layout
    ranks: list[Findings]
    expected: Record
    tolerance: float

    def causes(self) -> Iterator[str]:
        """Yield a sentence for each thing that differs, in the order of the computation."""
        yield from self._parameters()
        for step in range(len(self.expected.losses)):
            yield from self._activations(step)
            if step == 0:
                yield from self._dropout()
            yield from self._loss(step)
            yield from self._gradients(step)
            yield from self._norm(step)
        yield from self._weights()

    def worst_loss(self, first: int = 0, end: int | None = None) -> float:
        """Return the worst relative difference of the loss, of any rank at steps first to end."""
        ours = (rank.losses[first:end] for rank in self.ranks)
        return _worst(ours, self.expected.losses[first:end])

    def worst_norm(self, first: int = 0, end: int | None = None) -> float:
        """Return the worst relative difference of the gradient norm, likewise."""
        ours = (rank.norms[first:end] for rank in self.ranks)
        return _worst(ours, self.expected.norms[first:end])

    def _parameters(self) -> Iterator[str]:
        """Compare which parameters there are, and their initial values."""
        expected = self.expected.initial
        names = set().union(*(rank.names for rank in self.ranks))
        for name in sorted(names ^ expected.keys()):
            missing = "on no rank" if name in expected else "not there in one process"
            yield f"parameter {name}: {missing}"
        initial = [rank.initial for rank in self.ranks]
        for name in self._differing(initial, expected):
            yield f"parameter {name}: another initial value {self._where(initial, name)}"

    def _activations(self, step: int) -> Iterator[str]:
        """Compare what modules were given and returned, in the steps of which that is kept."""
        if step >= len(self.expected.activations):
            return
        activations, when = [rank.activations[step] for rank in self.ranks], _later(step)
        for kind, name in self._differing(activations, self.expected.activations[step]):
            where = self._where(activations, (kind, name))
            yield f"module {name}: its {kind} differs{when} {where}"

    def _dropout(self) -> Iterator[str]:
        """Compare what dropout masks are drawn from, with one process and between ranks."""
        alone = self.layout.dp == self.layout.cp == 1
        for number, rank in enumerate(self.ranks):
            drawn = [seed for _, seeds in rank.seeds.values() for seed in seeds]
            where = self._on([number])
            if len(set(drawn)) < len(drawn):
                yield f"dropout: two layers or micro-batches have the same masks {where}"
            for site, (parallel, seeds) in rank.seeds.items():
                same_as_alone = alone and (self.layout.tp == 1 or not parallel)
                if same_as_alone and seeds != self.expected.seeds.get(site):
                    yield f"dropout {site}: other masks than in one process {where}"
                for before in range(number):
                    yield from self._dropout_of_two(site, before, number)

    def _dropout_of_two(self, site: str, one: int, other: int) -> Iterator[str]:
        """Compare the seeds of a Dropout on two ranks.

        They should be equal where the ranks have the same tokens, unless tp ranks should differ,
        and else have nothing in common.
        """
        parallel, seeds = self.ranks[other].seeds[site]
        _, theirs = self.ranks[one].seeds.get(site, (parallel, []))
        a, b = self.ranks[one].coordinates, self.ranks[other].coordinates
        same_tokens = (a["dp"], a["cp"]) == (b["dp"], b["cp"])
        where = self._on([one, other])
        if theirs and same_tokens and not parallel and seeds != theirs:
            yield f"dropout {site}: different masks {where}, of what they share"
        if (parallel or not same_tokens) and set(seeds) & set(theirs):
            yield f"dropout {site}: the same masks {where}"

    def _loss(self, step: int) -> Iterator[str]:
        if self.worst_loss(step, step + 1) > self.tolerance:
            ours, theirs = self.ranks[0].losses[step], self.expected.losses[step]
            compared = step < len(self.expected.activations)
            more = ", though no module's output differs" if compared else ""
            yield f"loss: {ours:.7g} instead of {theirs:.7g}{_later(step)}{more}"

    def _gradients(self, step: int) -> Iterator[str]:
        """Compare the gradients of a step, in the order in which backward makes them."""
        gradients = [rank.gradients[step] for rank in self.ranks if rank.gradients]
        wrong = self._differing(gradients, list(self.expected.initial)[::-1])
        if not wrong:
            return
        first, others = wrong[0], len(wrong) - 1
        factors = sorted(factor for rank in self.ranks for factor in rank.factors.values())
        if step == 0 and factors and factors[-1] - factors[0] < 1e-3 < abs(factors[0] - 1):
            yield (
                f"loss scale: every gradient is {factors[0]:.4g} x what it should be"
                f"{self._axes_of_size(factors[0])}"
            )
        if set(wrong) <= set().union(*(rank.tied for rank in self.ranks)):
            known = (rank.factors[first] for rank in self.ranks if first in rank.factors)
            yield (
                f"tie: the gradient of {first}, which stages share, "
                f"is {next(known, math.nan):.3g} x what it should be"
            )
        more = f", and of {others} more" if others else ""
        where = self._where(gradients, first)
        yield f"gradient of {first}: differs at {_named(step)} {where}{more}"

    def _norm(self, step: int) -> Iterator[str]:
        if self.worst_norm(step, step + 1) > self.tolerance:
            ours, theirs = self.ranks[0].norms[step], self.expected.norms[step]
            # under ZeRO no gradient is whole on a rank, so that none was compared
            more = "" if self.layout.zero else ", though no gradient differs"
            yield f"gradient norm: {ours:.7g} instead of {theirs:.7g} at {_named(step)}{more}"

    def _weights(self) -> Iterator[str]:
        weights = [rank.weights for rank in self.ranks]
        for name in self._differing(weights, self.expected.weights):
            where = self._where(weights, name)
            yield f"weights of {name}: differ after the steps {where}, though no gradient does"

    def _differing(self, distances: Sequence[dict], keys: Iterable[Hashable]) -> list:
        """Return the keys whose distance is above the tolerance on some rank."""
        return [key for key in keys if self._ranks_where(distances, key)]

    def _where(self, distances: Sequence[dict], key: Hashable) -> str:
        """Say on which ranks the distance of a key is above the tolerance."""
        return self._on(self._ranks_where(distances, key))

    def _ranks_where(self, distances: Sequence[dict], key: Hashable) -> list[int]:
        return [n for n, each in enumerate(distances) if each.get(key, 0.0) > self.tolerance]

    def _on(self, numbers: list[int]) -> str:
        """Name ranks: on rank 1 (tp 1, pp 0, dp 0). cp is named where there is one; and where ranks
        of it have no part in the difference, as what tells those that have."""
        named = []
        for number in numbers[:2]:
            place = self.ranks[number].coordinates.items()
            place = [f"{axis} {n}" for axis, n in place if axis != "cp" or self.layout.cp > 1]
            named.append(f"{number} ({', '.join(place)})")
        more = f" and {len(numbers) - 2} more" if len(numbers) > 2 else ""
        with_it = sorted({self.ranks[number].coordinates["cp"] for number in numbers})
        only = f", only where cp is {listed(with_it)}" if len(with_it) < self.layout.cp else ""
        return f"on rank{'s' * (len(numbers) > 1)} {', '.join(named)}{more}{only}"

    def _axes_of_size(self, factor: float) -> str:
        """Name the axes of as many ranks as a factor says, or its inverse."""
        sizes = {name: getattr(self.layout, name) for name in ("tp", "cp", "pp", "dp")}
        alike = [
            f"{name} is {size}"
            for name, size in sizes.items()
            if size > 1 and min(abs(factor - size) / size, abs(factor * size - 1)) < 1e-3
        ]
        return f", and {' and '.join(alike)}" if alike else ""


def _named(step: int) -> str:
    """Name a step, and what its batch was, if not plain rows: step 2 (packed documents)."""
    kind = KINDS[step % len(KINDS)]
    return f"step {step + 1}" + (f" ({kind})" if step % len(KINDS) else "")


def _later(step: int) -> str:
    """Name a step that is not the first."""
    return f" at {_named(step)}" if step else ""


def listed(numbers: list[int]) -> str:
    """Write numbers: 0, 1 and 3."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _worst(ranks: Iterable[list[float]], expected: list[float]) -> float:
    """Return the worst relative difference of any rank's value from the one that is expected."""
    return max(
        relative(abs(ours - theirs), abs(theirs))
        for values in ranks
        for ours, theirs in zip(values, expected, strict=True)
    )
