"""Data for classifiers: a row has one or two texts and a label.

Nothing here imports torch, as in `encoding`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megazoo.data.sources import find_source
from megazoo.errors import UserError
from megazoo.tokenizer import Tokenizer

LABELLED = ("tokens", "pair", "label")  # the keys of a recipe for rows with labels
REGRESSION = "regression"
ONE_OF_SEVERAL = "single_label_classification"
ANY_OF_SEVERAL = "multi_label_classification"
LARGEST = float(np.finfo(np.float32).max)  # absolute value of a number in a label


@dataclass(frozen=True)
class Labels:
    """The format of a row's label, from a config's num_labels and problem_type, which have the same
    meaning as in transformers."""

    num_labels: int
    problem: str

    @property
    def width(self) -> int:
        """Return the count of numbers in a label."""
        return 1 if self.problem == ONE_OF_SEVERAL else self.num_labels

    def numbers(self, label: Any) -> list[float]:
        """Return the numbers of a label.

        Args:
            label: parsed from JSON. An index (single-label classification), a number (regression
                with one label), or a list with one number per label (0 or 1 for multi-label
                classification, any number for regression).

        Raises:
            ValueError: the label does not have this format.
        """
        several = isinstance(label, list)
        numbers = label if several else [label]
        are_numbers = all(
            type(number) in (int, float) and abs(number) <= LARGEST for number in numbers
        )
        if self.problem == ONE_OF_SEVERAL:
            fits = type(label) is int and 0 <= label < self.num_labels
            is_whole = isinstance(label, float) and label.is_integer()
            kind, hint = ("an integer", " (as 1, not 1.0)") if is_whole else ("a whole number", "")
            wanted = f"{kind} from 0 to {self.num_labels - 1}{hint}"
        elif self.problem == REGRESSION:
            fits = are_numbers and len(numbers) == self.num_labels
            fits = fits and several == (self.num_labels > 1)
            wanted = "a number" if self.num_labels == 1 else f"a list of {self.num_labels} numbers"
        else:
            fits = are_numbers and several and len(numbers) == self.num_labels
            fits = fits and all(number in (0, 1) for number in numbers)
            wanted = f"a list of {self.num_labels} numbers, each 0 or 1"
        if not fits:
            told = json.dumps(label)
            told = told if len(told) <= 60 else told[:57] + "..."
            raise ValueError(f"label {told} is not {wanted}")
        return [float(number) for number in numbers]

    def drawn(self, generator: np.random.Generator) -> np.ndarray:
        """Return a random label, as float64 [width]."""
        if self.problem == REGRESSION:
            return generator.standard_normal(self.width)
        most = self.num_labels if self.problem == ONE_OF_SEVERAL else 2
        return generator.integers(most, size=self.width).astype(np.float64)

    def typed(self, numbers: np.ndarray) -> np.ndarray:
        """Convert the numbers of a label, float64 [width], to the model's input.

        It is int64 [] if the label is an index, otherwise float32 [width].
        """
        if self.problem == ONE_OF_SEVERAL:
            return numbers[0].astype(np.int64)
        return numbers.astype(np.float32)


def labels_of(num_labels: int, problem: str | None, first_label: Any = None) -> Labels:
    """Return the format of labels.

    Args:
        num_labels: number of labels.
        problem: problem_type of the config. None: inferred as in transformers, from num_labels and
            first_label.
        first_label: label of the first row, parsed from JSON.
    """
    if problem is None and num_labels == 1:
        problem = REGRESSION
    elif problem is None:
        problem = ANY_OF_SEVERAL if isinstance(first_label, list) else ONE_OF_SEVERAL
    return Labels(num_labels, problem)


def labels_in(names: Sequence[str], num_labels: int, problem: str | None) -> Labels:
    """Return the format of the labels in a classifier's sources. Only the first line of each JSONL
    file is read.

    Raises:
        UserError: a source has no labels.
    """
    wanted = f"a classifier of {count_of(num_labels)} needs JSONL with text and label in each line"
    firsts = []
    for name in names:
        if name == "mock":
            continue
        source = find_source(name)
        row = source.first_row() if source else None
        if not row:
            raise UserError(f"data {name}: {wanted}")
        place, value = row
        if not {"text", "label"} <= value.keys():
            raise UserError(f"{name}, {place}: {wanted}")
        firsts.append(value["label"])
    return labels_of(num_labels, problem, firsts[0] if firsts else None)


def count_of(num_labels: int) -> str:
    """Return the number of labels as text: 1 label, 2 labels."""
    return f"{num_labels} label{'' if num_labels == 1 else 's'}"


def encode_texts(tokenizer: Tokenizer, value: dict) -> tuple[list[int], list[int]]:
    """Encode an object's `text` and `text_pair`.

    The tokenizer's bos token, if it has one, precedes the first text. The end-of-document token
    separates the two texts. Names of special tokens in a text are encoded as ordinary text.

    Returns:
        The ids of `text`, and the ids that follow them for `text_pair` (empty if the object has no
        `text_pair`, or null).

    Raises:
        ValueError: a text is not a string, or the row has no tokens.
    """
    keys = ["text"] if value.get("text_pair") is None else ["text", "text_pair"]
    for key in keys:
        if not isinstance(value.get(key), str):
            raise ValueError(f"no text under {key!r}")
    texts = [value[key] for key in keys]
    ids, *pair = (
        tokenizer.encode(text, add_special_tokens=False, parse_special=False) for text in texts
    )
    ids = [*tokenizer.before, *ids]
    pair = [tokenizer.eod, *pair[0]] if pair else []
    if not ids and not pair:
        raise ValueError("its text has no tokens")
    return ids, pair


def kept_tokens(
    first: np.ndarray | int, second: np.ndarray | int, before: int, seq_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many ids of each text remain when a row is truncated to seq_length.

    Texts are truncated at the end. The longer text is truncated until both have the same length,
    then both, the second first, as with `longest_first` in transformers. Ids that do not belong to
    a text are dropped only if they do not fit into the row by themselves.

    Args:
        first, second: number of ids of each text, as `encode_texts` returns them: int64 [rows] or
            numbers.
        before: number of ids that the tokenizer puts before a text.
        seq_length: maximum number of ids in a row.

    Returns:
        The numbers of ids to keep of the first and of the second text.
    """
    between = np.minimum(second, 1)
    room = np.maximum(seq_length - before - between, 0)
    texts = np.minimum(first - before, np.maximum(-(-room // 2), room - (second - between)))
    pairs = np.minimum(second - between, room - texts)
    kept = np.minimum(before + texts, seq_length)
    return kept, np.minimum(between + pairs, seq_length - kept)
