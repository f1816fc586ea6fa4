"""Files of texts, conversations or labelled texts, whose tokens are cached next to them."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megazoo.data.cache import cached_tokens
from megazoo.data.checksums import Fingerprint, fingerprint_of
from megazoo.data.indexed import IndexedTokens
from megazoo.data.preferences import PackedPreferences, Preferences
from megazoo.data.samples import Conversations, LabelledTexts, Vocabulary
from megazoo.data.sources import Encoding, Opening, Source
from megazoo.data.teacher import TopTokens, has_top_tokens
from megazoo.data.text_files import first_object, has_objects, is_text
from megazoo.data.token_files import packed_parts
from megazoo.errors import UserError


class Rows(Source):
    """Base class of a file whose rows are read by a Python function.

    A subclass defines `suffixes` and `rows`. The keys of the first row decide the format, as in
    JSONL: texts, conversations, or labelled texts of a classifier. The tokens are cached in
    FILE.tokens. They are created again if the file, or the Python file of the class, changes.

    Args:
        name: the source, as passed to --data: the path of a file.

    Attributes:
        suffixes: ends of the names of the files that the class reads, in lower case.
        path: path of the file.
    """

    suffixes: tuple[str, ...] = ()

    def __init__(self, name: str):
        super().__init__(name)
        self.path = Path(name)

    def rows(self) -> Iterable[dict[str, Any]]:
        """Yield the rows of the file in order, such as `{"text": "A document."}`.

        The values are those of JSON. Every call yields the same rows.
        """
        raise NotImplementedError

    @classmethod
    def accepts(cls, name: str) -> bool:
        path = Path(name)
        return path.suffix.lower() in cls.suffixes and path.is_file()

    def files(self) -> list[tuple[str, Path]]:
        return [(self.path.name, self.path)]

    def first_row(self) -> tuple[str, dict[str, Any]] | None:
        return first_object(self.path, self.rows)

    def tokens(self, encoding: Encoding) -> list[IndexedTokens]:
        """Return the cached tokens of the rows; create them at the first call."""
        return cached_tokens(self.path, *encoding, rows=self.rows)

    def prepare(self, encoding: Encoding) -> None:
        self.tokens(encoding)

    def parts(self, opening: Opening) -> list:
        tokens, *more = self.tokens(opening.encoding)
        length, labels = opening.seq_length, opening.encoding.labels
        vocabulary = Vocabulary(opening.vocab_size, opening.tokenizer)
        if labels:
            if not len(tokens):
                raise UserError(f"{self.name} has no rows")
            pair, label = more
            before = len(opening.tokenizer.before)
            return [
                LabelledTexts(
                    tokens, pair, label, *part, length, labels, before, vocabulary, self.name
                )
                for part in opening.ranges(len(tokens))
            ]
        if not len(tokens.tokens):
            raise UserError(f"{self.name} has no tokens")
        if not more:
            return packed_parts(tokens, opening)
        ranges = opening.ranges(len(tokens.documents) - 1)
        return [self._conversations([tokens, *more], part, opening, vocabulary) for part in ranges]

    def _conversations(
        self,
        tokens: list[IndexedTokens],
        part: tuple[int, int],
        opening: Opening,
        vocabulary: Vocabulary,
    ) -> Conversations | Preferences | PackedPreferences:
        """Return the conversations of a range of rows, or the pairs of answers."""
        length, packing = opening.seq_length, opening.packing
        ids, mask, *rejected = tokens
        packs = packing and not rejected
        longest = sys.maxsize if packing and rejected else length
        how = (*part, longest, packs, vocabulary, self.name)
        first = Conversations(ids, mask, *how)
        if not rejected:
            return first
        pairs = Preferences(first, Conversations(rejected[0], rejected[1], *how))
        return PackedPreferences(pairs, length) if packing else pairs

    def fingerprint(self, encoding: Encoding) -> Fingerprint:
        documents = len(self.tokens(encoding)[0].documents) - 1
        return fingerprint_of(self.name, [self.path], documents)


class TextFile(Rows):
    """A file of objects (JSONL, JSON or .parquet), or a .txt file of paragraphs."""

    @classmethod
    def accepts(cls, name: str) -> bool:
        return is_text(Path(name))

    def resolved(self) -> Source:
        return TopTokens(self.name) if has_top_tokens(self.path) else self

    def first_row(self) -> tuple[str, dict[str, Any]] | None:
        return first_object(self.path) if has_objects(self.path) else None

    def tokens(self, encoding: Encoding) -> list[IndexedTokens]:
        return cached_tokens(self.path, *encoding)

    def note(self, parts: list, encoding: Encoding) -> str:
        if has_objects(self.path):
            return ""
        count = len(self.tokens(encoding)[0].documents) - 1
        return f"{count:,} documents, a paragraph each" if count > 1 else "one document"
