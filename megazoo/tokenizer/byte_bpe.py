"""Byte-level BPE of GPT-2, GPT-NeoX (MPT) and LLaMA-3, implemented with tiktoken."""

from collections.abc import Callable, Iterable

import numpy as np
import tiktoken

from megazoo.errors import UserError
from megazoo.tokenizer.added import AddedToken, Splitter
from megazoo.tokenizer.base import Tokenizer

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The regex engine stores every backtracking step and fails at a million. A run of white space is
# therefore matched in blocks of 256 first. The matches are the same.
RUN, RUN_BY_BLOCKS = r"\s+(?!\S)", r"(?:\s{256})*\s+(?!\S)"


class ByteLevelBPE(Tokenizer):
    """Splits a text with a regular expression and applies byte pair encoding to the bytes of each
    part.

    Args:
        tokens: The bytes of every id, except those of added tokens.
        ranked: Ids in merge order, including the single bytes.
        pattern: The regular expression.
        added: Added tokens.
        nfc: Normalize texts to NFC.
        unk: Id of a byte that is not in the vocabulary. Without it, such a byte raises UserError.
    """

    def __init__(
        self,
        tokens: dict[int, bytes],
        ranked: list[int],
        pattern: str,
        added: Iterable[AddedToken] = (),
        nfc: bool = False,
        unk: int | None = None,
    ):
        added = list(added)
        self._bytes = tokens | {token.id: token.content.encode() for token in added}
        self._special = {token.id for token in added if token.special}
        self.vocab_size = max(self._bytes) + 1
        self._split = Splitter(added, nfc)
        ranks = {tokens[token]: rank for rank, token in enumerate(ranked)}
        # tiktoken panics on an unknown byte.
        self._missing = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]
        ranks |= {byte: len(ranked) + i for i, byte in enumerate(self._missing)}
        self._id_of_rank = np.array(
            ranked + [self.vocab_size if unk is None else unk] * len(self._missing), np.uint32
        )
        self._lossless = unk is not None or not self._missing
        # tiktoken drops text that the pattern doesn't match
        between = f"(?:(?!{pattern})[\\s\\S])+"
        try:
            self._bpe = tiktoken.Encoding(
                "megazoo",
                pat_str=f"{pattern.replace(RUN, RUN_BY_BLOCKS)}|{between}",
                mergeable_ranks=ranks,
                # never parsed; without a special token, tiktoken stops at every character
                special_tokens={"\0": len(ranks)},
            )
        except ValueError as error:
            raise UserError(
                f"the pattern {pattern!r} is not one that tiktoken can use: {error}"
            ) from error

    def _encode(self, text: str, parse_special: bool) -> np.ndarray:
        parts = [
            self._encode_ordinary(part) if isinstance(part, str) else np.array([part], np.uint32)
            for part in self._split(text, parse_special)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint32), *parts])

    def _encode_ordinary(self, text: str) -> np.ndarray:
        try:
            # encode_ordinary panics in this case
            ranks = self._bpe.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            raise UserError(
                f"a text of {len(text):,} characters can't be tokenized: {error}"
            ) from error
        if not self._lossless and (ranks >= len(self._id_of_rank) - len(self._missing)).any():
            byte = self._missing[int(ranks.max()) - len(self._id_of_rank)]
            raise UserError(
                f"the vocabulary has no token for the byte 0x{byte.hex()}, which the text has"
            )
        return self._id_of_rank[ranks]

    def _reader(self, skip_special_tokens: bool) -> Callable[[int], bytes]:
        hidden = self._special if skip_special_tokens else ()
        return lambda token: b"" if token in hidden else self._bytes.get(token, b"")
