"""Encode chunks of text according to a recipe, in worker processes or in this process.

Nothing here imports torch, so workers use little memory and start quickly.
"""

import multiprocessing
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megazoo.data.conversations import encode_conversation, encode_preference
from megazoo.data.formats import keys_of
from megazoo.data.labels import Labels, encode_texts
from megazoo.data.text_files import Chunk, object_of_line
from megazoo.errors import UserError
from megazoo.tokenizer import Tokenizer, open_tokenizer

BLANK_LINES = re.compile(rb"\r?\n(?:[^\S\n]*\n)+")  # one or more
CONVERSATION = ("tokens", "loss_mask")  # the keys of a recipe for conversations
PREFERENCE = (*CONVERSATION, "rejected", "rejected_mask")  # and for preferences


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the tokens of a corpus.

    Attributes:
        inputs: input files, in order.
        tokenizer: name or path of the tokenizer, for `open_tokenizer`.
        keys: keys of the JSON objects. The texts of each key are written to separate files. With
            CONVERSATION or PREFERENCE, the objects are fine-tuning data (see
            `encode_conversation`).
        append_eod: append the tokenizer's end-of-document token to each document.
        strict: raise an error for a line without text.
        chat_template: template of conversations, or None.
        labels: if set, the lines are rows of a classifier (see `encode_texts`) and keys is
            LABELLED. The float64 numbers of a label are written as tokens of the same total size in
            bytes.
        paragraphs: split files that are not JSONL into one document per paragraph, at blank lines.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    strict: bool = False
    chat_template: str | None = None
    labels: Labels | None = None
    paragraphs: bool = False


class Encoded(NamedTuple):
    """The documents of an encoded chunk.

    Attributes:
        documents: number of documents.
        tokens: by key, the concatenated tokens of the documents.
        lengths: by key, the number of tokens of each document.
        bad: number and error message of each line without text.
    """

    documents: int
    tokens: dict[str, np.ndarray]
    lengths: dict[str, list[int]]
    bad: list[tuple[int, str]]


class Encoder:
    """Encodes texts and JSONL lines according to a recipe, into tokens of a dtype."""

    def __init__(self, recipe: Recipe, dtype: np.dtype):
        self.recipe, self.dtype = recipe, dtype
        self.tokenizer: Tokenizer = open_tokenizer(recipe.tokenizer)
        self.end = np.array([self.tokenizer.eod] if recipe.append_eod else [], dtype)

    def encode(self, data: bytes, line: int, json_lines: bool) -> Encoded:
        """Encode a chunk: one document per JSONL line, one per paragraph, or a single document.

        Args:
            data: the bytes of the chunk.
            line: number of its first line in the file.
            json_lines: whether the chunk is JSONL.
        """
        keys = self.recipe.keys
        parts, lengths = {key: [] for key in keys}, {key: [] for key in keys}
        documents, bad = 0, []
        several = json_lines or self.recipe.paragraphs
        texts = data.split(b"\n") if json_lines else [data]
        if self.recipe.paragraphs and not json_lines:
            texts = BLANK_LINES.split(data.strip(b"\r\n"))
        for number, text in enumerate(texts, line):
            if several and not text.strip():
                continue
            try:
                encoded = self._encode_document(text, json_lines)
            except (ValueError, KeyError, RecursionError, UserError) as error:
                bad.append((number, str(error)))
                continue
            documents += 1
            for key, tokens in zip(keys, encoded, strict=True):
                if len(tokens) or self.recipe.labels:
                    parts[key] += [tokens.astype(self.dtype, copy=False), self.end]
                    lengths[key].append(len(tokens) + len(self.end))
        empty = np.empty(0, self.dtype)
        tokens = {key: np.concatenate([empty, *arrays]) for key, arrays in parts.items()}
        return Encoded(documents, tokens, lengths, bad)

    def _encode_document(self, text: bytes, json_line: bool) -> list[np.ndarray]:
        """Return the tokens of each key of the recipe. Errors of JSON and tokenizers propagate."""
        keys = self.recipe.keys
        if keys in (CONVERSATION, PREFERENCE):
            value, template = object_of_line(text), self.recipe.chat_template
            encode = encode_preference if keys == PREFERENCE else encode_conversation
            parts = encode(self.tokenizer, value, template)
            return [np.array(part, self.dtype) for part in parts]
        if self.recipe.labels:
            return self._encode_labelled(object_of_line(text), self.recipe.labels)
        texts = _texts(text, keys) if json_line else [text.decode()] * len(keys)
        # Names of special tokens in a document are encoded as ordinary text.
        return [self.tokenizer.encode_to_numpy(part, parse_special=False) for part in texts]

    def _encode_labelled(self, value: dict, labels: Labels) -> list[np.ndarray]:
        """Return the ids of an object's text and text_pair, and its label as tokens."""
        if "label" not in value:
            raise ValueError("it has no label")
        label = np.array(labels.numbers(value["label"]), "<f8").view(self.dtype)
        pair = encode_texts(self.tokenizer, value)
        return [*(np.array(part, self.dtype) for part in pair), label]


def _texts(line: bytes, keys: tuple[str, ...]) -> list[str]:
    """Return the texts of the keys in a JSONL line."""
    value = object_of_line(line)
    for key in keys:
        if not isinstance(value.get(key), str):
            raise ValueError(f"no text under {key!r}; {keys_of(value)}")
    return [value[key] for key in keys]


@contextmanager
def encoding_workers(recipe: Recipe, dtype: np.dtype, count: int) -> Iterator[Callable]:
    """Start worker processes and yield a function that encodes chunks.

    The function maps an iterator of Chunk to an iterator of (Chunk, Encoded), in the same order. At
    most about 2 * count chunks are in memory.

    Args:
        recipe: how to encode.
        dtype: dtype of the tokens.
        count: number of processes. 0: encode in this process.
    """
    if not count:
        yield _encode_here(Encoder(recipe, dtype))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, spawn, _start_worker, (recipe, dtype)) as pool:
        try:
            yield _encode_in(pool, most_waiting=2 * count)
        except BrokenProcessPool as error:  # from a result, or from submit
            raise UserError(
                "a worker process died (possibly out of memory): run the same command again to "
                "continue",
                exit_code=1,
            ) from error


def _encode_here(encoder: Encoder) -> Callable:
    def encode(chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        for chunk in chunks:
            yield chunk, encoder.encode(chunk.data, chunk.line, chunk.objects)

    return encode


def _encode_in(pool: ProcessPoolExecutor, most_waiting: int) -> Callable:
    def encode(chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        waiting: deque = deque()
        for chunk in chunks:
            future = pool.submit(_encode_in_worker, chunk.data, chunk.line, chunk.objects)
            waiting.append((chunk._replace(data=b""), future))
            if len(waiting) > most_waiting:
                chunk, future = waiting.popleft()
                yield chunk, future.result()
        for chunk, future in waiting:
            yield chunk, future.result()

    return encode


_encoder: Encoder | None = None  # set when a worker process starts


def _start_worker(recipe: Recipe, dtype: np.dtype) -> None:
    global _encoder
    _encoder = Encoder(recipe, dtype)


def _encode_in_worker(data: bytes, line: int, json_lines: bool) -> Encoded:
    assert _encoder
    return _encoder.encode(data, line, json_lines)
