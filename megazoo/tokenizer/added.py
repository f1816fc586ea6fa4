"""Added tokens: strings that are split off a text before normalization and tokenization, as in the
`tokenizers` library."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megazoo.errors import UserError

# Unicode's white space. str.strip and Python's \s also match \x1c to \x1f.
SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


class AddedToken(NamedTuple):
    """A string that is always one token.

    Attributes:
        special: Decoding can skip the token.
        normalized: The token is searched for in normalized text, not in the original text.
        lstrip: The token includes the spaces to its left.
        rstrip: The token includes the spaces to its right.
        single_word: The token is not matched inside a word.
    """

    content: str
    id: int
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @classmethod
    def from_json(cls, entry: dict, token_id: int) -> "AddedToken":
        """Create a token from its entry in tokenizer.json or tokenizer_config.json.

        Raises UserError, KeyError, TypeError or ValueError if the entry is malformed.
        """
        for name in ("single_word", "special", "normalized", "lstrip", "rstrip"):
            if not isinstance(entry.get(name), bool | None):
                raise UserError(
                    f"added token {entry['content']!r}: {name} is {entry[name]!r}, "
                    "not true or false"
                )
        check_id(token_id, entry["content"])
        entry["content"].encode()  # raises ValueError for lone surrogates
        special = bool(entry.get("special", False))
        return cls(
            entry["content"],
            token_id,
            special,
            normalized=bool(entry.get("normalized", not special)),
            lstrip=bool(entry.get("lstrip", False)),
            rstrip=bool(entry.get("rstrip", False)),
            single_word=bool(entry.get("single_word", False)),
        )


def check_id(token: int, content: str) -> None:
    """Raise UserError unless `content` is a string and `token` is a valid id."""
    if type(token) is not int or not 0 <= token < 1 << 31 or not isinstance(content, str):
        raise UserError(f"token {content!r} has the id {token!r}")


class Splitter:
    """Splits text at added tokens: first at those in the original text, then at those in the
    normalized text."""

    def __init__(self, tokens: Iterable[AddedToken], nfc: bool = False):
        self._normalize = (
            (lambda text: unicodedata.normalize("NFC", text)) if nfc else lambda text: text
        )
        tokens = [token for token in tokens if token.content]
        for token in tokens:
            if token.single_word:
                raise UserError(
                    f"added token {token.content!r}: single_word is not supported "
                    "without a tokenizer.json"
                )
        self._raw = {token.content: token for token in tokens if not token.normalized}
        self._normalized = {
            self._normalize(token.content): token for token in tokens if token.normalized
        }
        self._patterns = [_longest_first(self._raw), _longest_first(self._normalized)]

    def __call__(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Yield the normalized text between added tokens, and the ids of the added tokens."""
        for part in _split(text, self._patterns[0], self._raw, parse_special):
            if isinstance(part, int):
                yield part
            else:
                yield from _split(
                    self._normalize(part), self._patterns[1], self._normalized, parse_special
                )


def _longest_first(tokens: dict[str, AddedToken]) -> re.Pattern | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if tokens else None


def _split(
    text: str, pattern: re.Pattern | None, tokens: dict[str, AddedToken], parse_special: bool
):
    done = 0
    for match in pattern.finditer(text) if pattern else ():
        token, (start, end) = tokens[match[0]], match.span()
        if token.special and not parse_special:
            continue
        if token.lstrip:
            start = done + len(text[done:start].rstrip(SPACES))
        if token.rstrip:
            end = len(text) - len(text[end:].lstrip(SPACES))
        if start >= end:  # the previous token has its spaces
            continue
        if start > done:
            yield text[done:start]
        yield token.id
        done = end
    if done < len(text):
        yield text[done:]
