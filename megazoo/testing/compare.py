"""Compare a model, in any layout, with a reference: logits, loss, gradients, and where they part,
the first module whose input or output differs.

Each rank compares what its modules are given and return with its part of what the reference's were,
and its weights with its part of theirs; what all ranks found then makes one sentence.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from megazoo.errors import UserError, check_number
from megazoo.models.pretrained import from_pretrained
from megazoo.parallel.collectives import all_gather_objects
from megazoo.testing.causes import listed
from megazoo.testing.differences import Difference, Findings, find_differences, largest
from megazoo.testing.distances import relative
from megazoo.testing.layouts import Layout
from megazoo.testing.ranks import RankError, RankPool
from megazoo.testing.reference import Reference, Twin, run_reference
from megazoo.testing.trial import import_once

TIMEOUT = 3600.0  # seconds, of a layout
FEW = 6  # rows that are named one by one


@dataclass
class Agreement:
    """How far a model is from a reference.

    logits: the largest difference of a logit, over the reference's largest. loss: the relative
    difference. gradient: the largest distance of a parameter's gradient, over the reference's norm,
    or over a thousandth of that of all together if that is more; nan if none is compared. cause:
    None if all are within the tolerance, else where the two part. compared: the inputs and outputs
    of modules that were compared.
    """

    logits: float
    loss: float
    gradient: float
    cause: str | None
    compared: set[tuple[str, str]] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether the model does what the reference does."""
        return self.cause is None


def compare(
    model: Any,
    reference: Callable | Reference,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    names: dict | None = None,
    tolerance: float = 1e-5,
    gradients: bool = False,
) -> Agreement:
    """Run a model and a reference on the same ids, and say how far they are from each other, and
    where they part.

    model: of this library, in any layout; all ranks call this together and get the same answer.
    reference: a function of input_ids (and attention_mask, if given) that returns logits [batch,
    sequence, vocabulary], or an output with `logits`. Of an nn.Module, the modules and weights are
    compared, too. input_ids, attention_mask: int64 [batch, sequence], the same on every rank; 0 is
    padding, which is not compared. names: our modules to those of the reference, such as
    {"layers.{}.attention.qkv": ("blocks.{}.q", "blocks.{}.k", "blocks.{}.v")}; by default Hugging
    Face's. tolerance: of a difference, over the largest value of what is compared. gradients:
    compare the gradients of the loss with an nn.Module's, too, over their norms; they replace those
    in the model's parameters. UserError if
    the reference returns something else.
    """
    check_number("tolerance", tolerance, 0)
    if model.config.num_labels:
        raise UserError("the model is a classifier: only language models are compared")
    if not isinstance(reference, Reference):
        reference = run_reference(
            reference, type(model), model.config, input_ids, attention_mask, names, gradients
        )
    ranks = all_gather_objects(find_differences(model, reference, tolerance), model.ctx)
    return _agreement(ranks, reference, tolerance)


def compare_layouts(
    path: Path,
    reference: Reference,
    layouts: Sequence[Layout],
    *,
    import_: Path | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
    within: Callable[[], AbstractContextManager] = nullcontext,
) -> Iterator[Agreement]:
    """Load a model in each layout, on the CPU of this machine, and yield how far it is from what a
    reference has made of a batch.

    path: a checkpoint or Hugging Face directory. import_: the Python file that registers the model,
    if one does. dtype: of its weights and activations. within: as in `check_parallel`.
    """
    with tempfile.TemporaryDirectory(prefix="megazoo-compare-") as directory:
        file, pool = Path(directory) / "reference.pt", RankPool()
        torch.save(reference, file)
        about = (path, file, import_ and Path(import_).resolve(), dtype, tolerance, within)
        try:
            for layout in layouts:
                try:
                    yield pool.run(_on_a_rank, layout.ranks, layout, *about, timeout=TIMEOUT)[0]
                except RankError as error:
                    cause = f"it ends with {str(error).splitlines()[-1]}"
                    yield Agreement(math.nan, math.nan, math.nan, cause, set())
        finally:
            pool.close()


def _on_a_rank(
    layout: Layout,
    path: Path,
    file: Path,
    import_: Path | None,
    dtype: torch.dtype,
    tolerance: float,
    within: Callable[[], AbstractContextManager],
) -> Agreement:
    """Load this rank's part of the model, and compare it with the reference in a file."""
    import_once(import_)
    reference: Reference = torch.load(file, weights_only=False, mmap=True)
    with within():
        model = from_pretrained(path, layout.context(), dtype=dtype)
        return compare(model, reference, reference.input_ids, tolerance=tolerance)


def _agreement(ranks: list[Findings], reference: Reference, tolerance: float) -> Agreement:
    """Put together what all ranks found."""
    found = _Whole(ranks, reference)
    logits = relative(found.logits.distance, largest(reference.seen(reference.logits)))
    loss = relative(abs(found.loss - reference.loss), abs(reference.loss))
    gradient = max(found.gradients.values(), default=math.nan)
    passed = logits <= tolerance and loss <= tolerance
    if passed and gradient > tolerance:
        cause = found.cause_of_gradients(tolerance)
    else:
        cause = None if passed else found.cause()
    return Agreement(logits, loss, gradient, cause, set(found.activations))


class _Whole:
    """How whole tensors differ, of which the ranks have parts."""

    def __init__(self, ranks: list[Findings], reference: Reference):
        self.reference = reference
        self.loss = max((rank.loss for rank in ranks), key=lambda x: abs(x - reference.loss))
        self.logits = _joined([rank.logits for rank in ranks if rank.logits])
        self.activations, self.weights = {}, {}
        for key in reference.activations:
            if parts := [rank.activations[key] for rank in ranks if key in rank.activations]:
                self.activations[key] = _joined(parts)
        for name in reference.weights:
            whole = _joined([rank.weights[name] for rank in ranks if name in rank.weights])
            if whole.rows:
                self.weights[name] = whole
        # in the order of the backward
        self.gradients = {
            name: max(rank.gradients.get(name, 0.0) for rank in ranks)
            for name in reversed(reference.gradients)
        }

    def cause_of_gradients(self, tolerance: float) -> str:
        """Say of which parameter the gradient differs first."""
        wrong = [name for name, distance in self.gradients.items() if distance > tolerance]
        first, more = wrong[0], len(wrong) - 1
        module, _, kind = first.rpartition(".")
        theirs = listed([f"{name}.{kind}" for name, _ in self.reference.twins[module].parts])
        others = f", and of {more} more" if more else ""
        return (
            f"gradient of {first} ({theirs}): differs by {self.gradients[first]:.2g} of its norm"
            f"{others}, though no logit does"
        )

    def cause(self) -> str:
        """Say where the two part first, and which weights differ."""
        reference = self.reference
        wrong = (key for key, difference in self.activations.items() if difference.rows)
        if key := next(wrong, None):
            whole = reference.seen(reference.activations[key])
            how = _how(key[0], self.activations[key], whole, reference.twins[key[1]])
            return f"{self._place(*key)}: its {how}{self._weights_at(*key)}"
        if not self.logits.rows:
            return f"loss: {self.loss:.7g} instead of {reference.loss:.7g}, though no logit differs"
        how = _how("output", self.logits, reference.seen(reference.logits), None)
        if not self.activations:
            return f"logits: the {how}"
        head = "head" if "head" in reference.twins else "embedding"
        before = ", though nothing before them does"
        return f"logits: the {how}{before}{self._weights_at('output', head)}"

    def _place(self, kind: str, name: str) -> str:
        """Name a module of ours, its part if that is all that differs, and the reference's."""
        twin, rows = self.reference.twins[name], self.activations[kind, name].rows
        theirs, labels = [part for part, _ in twin.parts], []
        if kind == "output":
            differing = {twin.theirs(row)[0] for row in rows}
            theirs = [part for part in theirs if part in differing]
            there = {twin.label(row) for row in rows}
            labels = [label for label, _ in twin.labels if label in there]
        whole = len(labels) == len(twin.labels)
        layer = re.match(r"layers\.(\d+)\.?", name)
        ours = (
            ", ".join(filter(None, [f"layer {layer[1]}", name[layer.end() :]])) if layer else name
        )
        part = "" if whole or not labels else f", {listed(labels)}"
        return f"{ours}{part} ({listed(theirs)})"

    def _weights_at(self, kind: str, name: str) -> str:
        """Say which weights differ of the module whose input or output does."""
        if not self.reference.weights:
            return ""
        if not self.weights:
            which = "all" if self.reference.has_all_weights else "the compared"
            return f"; {which} weights are equal{': the computation differs' * (which == 'all')}"
        own = [weight for weight in self.weights if weight.rpartition(".")[0] == name]
        others = [weight for weight in self.weights if weight not in own]
        if kind == "output" and own:
            twin = self.reference.twins[name]
            rows = [_rows(weight, self.weights[weight].rows, twin) for weight in own]
            more = f", and {len(others)} weights elsewhere" if others else ""
            return f"; other weights: {', '.join(rows)}{more}"
        more = f", {len(self.weights) - 1} more" if len(self.weights) > 1 else ""
        return f"; its weights are equal, others are not: {next(iter(self.weights))}{more}"


def _joined(parts: list[Difference]) -> Difference:
    return reduce(Difference.joined, parts, Difference())


def _how(kind: str, difference: Difference, whole: torch.Tensor, twin: Twin | None) -> str:
    """Say how far a tensor of ours is from the whole one of the reference, and where.

    twin: of its module, which then numbers the features of an output; None for logits.
    """
    rows, features = sorted(difference.rows), whole[0, 0].numel()
    if twin and kind == "output" and len({twin.theirs(row)[0] for row in rows}) == 1:
        rows = sorted(twin.theirs(row)[1] for row in rows)
    where = f"in {len(rows)} of {features} features"
    if len(rows) <= FEW:
        where = f"in {_numbered('feature', rows)}"
    token = f", from token {difference.token} on" if difference.token else ""
    value = f"their largest value is {largest(whole):.2g}"
    return f"{kind} differs by {difference.distance:.2g} ({value}) {where}{token}"


def _rows(weight: str, rows: set[int], twin: Twin) -> str:
    """Name rows of a weight of ours in the reference's tensors that have them."""
    kind, found = weight.rpartition(".")[2], {}
    for row in sorted(rows):
        name, theirs = twin.theirs(row)
        found.setdefault(name, []).append(theirs)
    row = "column" if twin.transposed and kind == "weight" else "row"
    return ", ".join(
        f"{_numbered(row, sorted(numbers)) if len(numbers) <= FEW else f'{len(numbers)} {row}s'} "
        f"of {name}.{kind}"
        for name, numbers in found.items()
    )


def _numbered(what: str, numbers: list[int]) -> str:
    """Name things by their numbers: rows 5 and 9."""
    return f"{what}{'s' * (len(numbers) > 1)} {listed(numbers)}"
