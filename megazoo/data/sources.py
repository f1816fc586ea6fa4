"""Sources of training data: the base class of each kind, and their registry.

A kind is imported when a name is looked up. Nothing here imports torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megazoo.data.checksums import Fingerprint, fingerprint_of
from megazoo.errors import UserError
from megazoo.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megazoo.data.labels import Labels

# The kinds of megazoo by their modules. The first that accepts a name reads it.
BUILT_IN = {
    "mock": "Mock",
    "corpus": "StandardLibrary",
    "streaming": "Streamed",
    "token_files": "TokenFiles",
    "texts": "TextFile",
}
CUSTOM: list[type["Source"]] = []  # tried before those of megazoo, the last registered first
Class = TypeVar("Class", bound=type["Source"])


class Encoding(NamedTuple):
    """How texts become tokens.

    Attributes:
        tokenizer: name or path of the tokenizer, for `open_tokenizer`.
        chat_template: template of conversations, or None.
        labels: format of the labels if the data is for a classifier, otherwise None.
        preferences: whether rows are read as preferences.
    """

    tokenizer: str
    chat_template: str | None = None
    labels: "Labels | None" = None
    preferences: bool = False


@dataclass(frozen=True)
class Opening:
    """The settings with which a run opens a source.

    Attributes:
        tokenizer: tokenizer of the run.
        encoding: how texts become tokens.
        shares: fractions of the documents for training, validation and test, with the sum 1.
        seq_length: number of input tokens per sample.
        vocab_size: number of rows of the model's embedding.
        seed: seed of the run.
        eod: token that ends a document, if tokens must not attend to other documents.
        packing: whether a sample contains several conversations.
        position: position at which a streamed source resumes, or None.
    """

    tokenizer: Tokenizer
    encoding: Encoding
    shares: tuple[float, ...]
    seq_length: int
    vocab_size: int
    seed: int
    eod: int | None = None
    packing: bool = False
    position: dict | None = None

    def ranges(self, documents: int) -> Iterator[tuple[int, int]]:
        """Return the range of documents of each part, in order; the ends are exclusive."""
        ends = (round(documents * sum(self.shares[:number])) for number in (1, 2))
        return pairwise([0, *ends, documents])


class Source:
    """Base class of the sources of training data.

    A subclass reads one kind of `--data`. It defines `accepts` and `parts`, and the other methods
    that its kind needs. `Rows` defines them for files whose rows are read by a Python function.

    Args:
        name: the source, as passed to --data.

    Attributes:
        streamed: whether the number of samples is unknown, and checkpoints store a position. The
            training dataset then has `position_before`: see `StreamedTexts`.
        tensors: names of the tensors of samples, see `Sample.named`. A loss must need them.
    """

    streamed = False
    tensors: tuple[str, ...] = ()

    def __init__(self, name: str):
        self.name = name

    @classmethod
    def accepts(cls, name: str) -> bool:
        """Return whether the class reads a source with this name."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UserError if the source cannot be used. Called before anything is opened."""

    def resolved(self) -> "Source":
        """Return the source that reads the contents, if they decide its kind. Only ranks that use
        the data call it."""
        return self

    def files(self) -> list[tuple[str, Path]]:
        """Return the path of each input file, with its name in records and fingerprints."""
        return []

    def first_row(self) -> tuple[str, dict[str, Any]] | None:
        """Return the first row and its place, such as "line 1"; None if the source has texts only.

        The keys of the row decide whether the source has conversations, or labels.
        """
        return None

    def prepare(self, encoding: Encoding) -> None:
        """Find errors early and tokenize, on rank 0, before the other ranks open the source."""

    def parts(self, opening: Opening) -> list:
        """Open the source.

        Args:
            opening: settings of the run.

        Returns:
            The datasets for training, validation and test. A dataset has `__len__`,
            `__getitem__`, which returns a `Sample`, and `tokens_of`, which returns the number of
            tokens of a sample. It may be None for a share of 0.
        """
        raise NotImplementedError

    def note(self, parts: list, encoding: Encoding) -> str:
        """Return what the run prints about the source after it is opened; "" for nothing."""
        return ""

    def fingerprint(self, encoding: Encoding) -> Fingerprint:
        """Return the fingerprint, from which a resumed run detects changed data."""
        return fingerprint_of(self.name, [path for _, path in self.files()])


def register_source(kind: Class) -> Class:
    """Register a kind of training data: a class decorator.

    `--data` of a run that imports the file with `--import` can then name sources of this kind. The
    class that is registered last is tried first, before the classes of megazoo.

    Args:
        kind: subclass of `Source`.

    Returns:
        The class.

    Example:
        @megazoo.data.register_source
        class CSV(megazoo.data.Rows):
            suffixes = (".csv",)

            def rows(self):
                with open(self.path, newline="") as file:
                    yield from csv.DictReader(file)
    """
    CUSTOM.append(kind)
    return kind


def find_source(name: str) -> Source | None:
    """Return the source with a name, or None if no class accepts the name."""
    for kind in reversed(CUSTOM):
        if kind.accepts(name):
            return kind(name)
    for module, attribute in BUILT_IN.items():
        kind = getattr(import_module(f"megazoo.data.{module}"), attribute)
        if kind.accepts(name):
            return kind(name)
    return None


def source_named(name: str) -> Source:
    """Return the source with a name; UserError if no class accepts the name."""
    if source := find_source(name):
        return source
    raise UserError(
        f"--data {name!r} is not found, or not supported: use stdlib, the prefix of "
        "token files (PREFIX.bin and PREFIX.idx), a .jsonl, .json or .txt file, a .parquet "
        "file, or stream:FILES. `megazoo preprocess` tokenizes other text"
    )


def names_in(data: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the sources in --data: one source, or alternating weights and sources."""
    return tuple(data if len(data) == 1 else data[1::2])
