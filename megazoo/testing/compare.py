"""Compare a model, in any parallel layout, with a reference: logits, loss and gradients. If they
differ, find the first module whose input or output differs.

Each rank compares its modules' inputs and outputs, and its weights, with its shards of the
reference's. The results of all ranks are then combined into one sentence.
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
from megazoo.parallel.layout import Layout
from megazoo.testing.causes import listed
from megazoo.testing.differences import Difference, Findings, find_differences, largest
from megazoo.testing.distances import relative
from megazoo.testing.layouts import context_of
from megazoo.testing.ranks import RankError, RankPool
from megazoo.testing.reference import Reference, Twin, run_reference
from megazoo.testing.trial import import_once

TIMEOUT = 3600.0  # seconds per layout
FEW = 6  # up to this many rows are listed


@dataclass
class Agreement:
    """The differences between a model and a reference.

    Attributes:
        logits: Largest difference of a logit, divided by the reference's largest absolute logit.
        loss: Relative difference of the loss.
        gradient: Largest distance of a parameter's gradient, divided by the reference's norm (at
            least a thousandth of the global norm); nan if gradients are not compared.
        cause: Where the first difference is; None if all differences are within the tolerance.
        compared: The inputs and outputs of modules that were compared.
    """

    logits: float
    loss: float
    gradient: float
    cause: str | None
    compared: set[tuple[str, str]] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether the model agrees with the reference."""
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
    """Run a model and a reference on the same batch and compare them.

    All ranks call this together and get the same result. With gradients=True, the gradients in the
    model's parameters are replaced.

    Args:
        model: A megazoo model in any layout.
        reference: A function of input_ids (and attention_mask, if given) that returns logits
            [batch, sequence, vocabulary], or an object with `logits`. For an nn.Module, modules and
            weights are compared too.
        input_ids: int64 [batch, sequence], the same on every rank.
        attention_mask: int64 [batch, sequence], the same on every rank; 0 for padding, which is not
            compared.
        names: The reference's modules by the names of megazoo's, such as
            {"layers.{}.attention.qkv": ("blocks.{}.q", "blocks.{}.k", "blocks.{}.v")}. By default
            those of Hugging Face.
        tolerance: Allowed difference, divided by the largest absolute value of the compared tensor
            (for gradients: by the norm).
        gradients: Compare the gradients of the loss too. The reference must be an nn.Module.

    Returns:
        The differences.

    Raises:
        UserError: The model is a classifier, or the reference is in training mode or does not
            return logits of this shape.
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
    """Load a model in each layout, on the CPU of this machine, and compare it with a stored
    reference.

    Args:
        path: A checkpoint or Hugging Face directory.
        reference: The result of `run_reference`.
        layouts: The layouts.
        import_: Python file that registers the model.
        dtype: Data type of weights and activations.
        tolerance: As in `compare`.
        within: As in `check_parallel`.

    Yields:
        The differences per layout.
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
    """Load this rank's shard of the model and compare it with the reference in a file."""
    import_once(import_)
    reference: Reference = torch.load(file, weights_only=False, mmap=True)
    with within():
        model = from_pretrained(path, context_of(layout), dtype=dtype)
        return compare(model, reference, reference.input_ids, tolerance=tolerance)


def _agreement(ranks: list[Findings], reference: Reference, tolerance: float) -> Agreement:
    """Combine the findings of all ranks."""
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
    """Differences of full tensors, combined from the shards of all ranks."""

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
        # in the order of the backward pass
        self.gradients = {
            name: max(rank.gradients.get(name, 0.0) for rank in ranks)
            for name in reversed(reference.gradients)
        }

    def cause_of_gradients(self, tolerance: float) -> str:
        """Name the first parameter whose gradient differs."""
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
        """Name the first place that differs, and the weights that differ."""
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
        """Name a module of the model, the part of it that differs, and the reference's module."""
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
        """Name the weights that differ, for a module whose input or output differs."""
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
    """Describe the size and place of a difference.

    Args:
        kind: "input" or "output".
        difference: The difference.
        whole: The reference's full tensor.
        twin: Twin of the module, which numbers the features of an output; None for logits.
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
    """Name rows of a weight by the reference's tensors that contain them."""
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
    """Return a noun with numbers: "rows 5 and 9"."""
    return f"{what}{'s' * (len(numbers) > 1)} {listed(numbers)}"
