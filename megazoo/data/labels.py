"""Data for classifiers: a row has a text, or two, and a label.

Nothing here imports torch, as in `encoding`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megazoo.data.text_files import first_object, is_loose_json, is_streamed
from megazoo.errors import UserError
from megazoo.tokenizer import Tokenizer

LABELLED = ("tokens", "pair", "label")  # the keys of a recipe for rows with labels
REGRESSION = "regression"
ONE_OF_SEVERAL = "single_label_classification"
ANY_OF_SEVERAL = "multi_label_classification"
LARGEST = float(np.finfo(np.float32).max)  # of a label's numbers


@dataclass(frozen=True)
class Labels:
    """What the label of a row is, by a config's num_labels and problem_type, which mean what they
    do in transformers."""

    num_labels: int
    problem: str

    @property
    def width(self) -> int:
        """Return how many numbers a label is."""
        return 1 if self.problem == ONE_OF_SEVERAL else self.num_labels

    def numbers(self, label: Any) -> list[float]:
        """Return the numbers of a label as JSON has it; ValueError if it is none of these labels.

        It is an index, a number for a regression of one, or a list with a number for each label: 0
        or 1, but any for a regression.
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
        """Return the label that a model takes: int64 [] of float64 [width] if it is an index, else
        float32 [width]."""
        if self.problem == ONE_OF_SEVERAL:
            return numbers[0].astype(np.int64)
        return numbers.astype(np.float32)


def labels_of(num_labels: int, problem: str | None, first_label: Any = None) -> Labels:
    """Return what labels are: of the problem, or else of what transformers takes it for, by their
    number and by the first of them, as JSON has it."""
    if problem is None and num_labels == 1:
        problem = REGRESSION
    elif problem is None:
        problem = ANY_OF_SEVERAL if isinstance(first_label, list) else ONE_OF_SEVERAL
    return Labels(num_labels, problem)


def labels_in(names: Sequence[str], num_labels: int, problem: str | None) -> Labels:
    """Return what the labels of the sources of a classifier's data are; UserError for a source that
    has none. Of JSONL files the first lines are read."""
    wanted = f"a classifier of {count_of(num_labels)} needs JSONL with text and label in each line"
    firsts = []
    for name in names:
        if name == "mock":
            continue
        if is_streamed(name) or not is_loose_json(Path(name)):
            raise UserError(f"data {name}: {wanted}")
        line, value = first_object(Path(name))
        if not {"text", "label"} <= value.keys():
            raise UserError(f"{name}, line {line}: {wanted}")
        firsts.append(value["label"])
    return labels_of(num_labels, problem, firsts[0] if firsts else None)


def count_of(num_labels: int) -> str:
    """Return a number of labels in words: 1 label, 2 labels."""
    return f"{num_labels} label{'' if num_labels == 1 else 's'}"


def encode_texts(tokenizer: Tokenizer, value: dict) -> tuple[list[int], list[int]]:
    """Return the ids of an object's `text`, and those that follow them for its `text_pair`; none
    where it has no such, or null.

    The tokenizer's bos goes before the first text if it has one, and the end of a document between
    the two. A special token's name in a text is text. ValueError for what is no text, and for a row
    without tokens.
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
    """Return how many of the ids that `encode_texts` returns are kept in a row of seq_length.

    first, second: how many there are of each, int64 [rows] or numbers. before: how many ids go
    before a text. Texts lose their ends: of two the longer one until they are of one length, the
    second first, as in transformers' "longest_first". No other id is lost unless it alone exceeds
    the row.
    """
    between = np.minimum(second, 1)
    room = np.maximum(seq_length - before - between, 0)
    texts = np.minimum(first - before, np.maximum(-(-room // 2), room - (second - between)))
    pairs = np.minimum(second - between, room - texts)
    kept = np.minimum(before + texts, seq_length)
    return kept, np.minimum(between + pairs, seq_length - kept)
