"""What all tokenizers share: special tokens around a text, batches, and decoding one token at a
time."""

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from megazoo.errors import UserError

if TYPE_CHECKING:
    import torch

Side = Literal["left", "right"]


class EncodedBatch(NamedTuple):
    """input_ids: int64 [batch, longest]. attention_mask: likewise, 1 at tokens and 0 at padding."""

    input_ids: "torch.Tensor"
    attention_mask: "torch.Tensor"


class Stream:
    """Decodes one token at a time; what `put` and `end` return, joined, is what `decode` makes of
    all the ids."""

    def __init__(self, bytes_of: Callable[[int], bytes]):
        self._bytes_of, self._decoder = bytes_of, codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, token: int) -> str:
        """The text that is certain now: the bytes of a character that is not whole yet wait for the
        next tokens."""
        return self._decoder.decode(self._bytes_of(int(token)))

    def end(self) -> str:
        """The rest, after the last token."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """Text to token ids and back.

    source: what `open_tokenizer` opened. vocab_size: every id is below it. bos_token_id,
    eos_token_id, pad_token_id: None if the files name none. A subclass sets them and has `_encode`
    and `_reader`.
    """

    source: str = "byte"
    vocab_size: int
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    before: tuple[int, ...] = ()  # the special tokens that encode puts around a text
    after: tuple[int, ...] = ()

    @property
    def eod(self) -> int:
        """The id that ends a document: that of eos, or else of bos or of the padding; UserError if
        there is none."""
        for token in (self.eos_token_id, self.bos_token_id, self.pad_token_id):
            if token is not None:
                return token
        raise UserError(
            "the tokenizer has no token that could end a document: its files name no eos_token"
        )

    def encode(
        self, text: str | bytes, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The ids of a text (bytes: of UTF-8), with bos and eos around it where the files say so.

        parse_special: whether the text of a special token, such as <|endoftext|>, means that token.
        Raises UserError for what is no Unicode, such as lone surrogates.
        """
        ids = self.encode_to_numpy(text, parse_special=parse_special).tolist()
        return [*self.before, *ids, *self.after] if add_special_tokens else ids

    def encode_to_numpy(self, text: str | bytes, *, parse_special: bool = True) -> np.ndarray:
        """uint32 [tokens]: like `encode`, with no special tokens added."""
        return self._encode(as_text(text), parse_special)

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        padding_side: Side = "right",
        max_length: int | None = None,
        truncation_side: Side = "right",
        add_special_tokens: bool = True,
    ) -> EncodedBatch:
        """Encode texts and pad them to the longest, with eos if there is no padding token: the mask
        hides it.

        max_length: cuts the texts, on truncation_side, to so many tokens; the special tokens around
        them are kept.
        """
        import torch  # which a process that only tokenizes does without

        for name, side in (("padding_side", padding_side), ("truncation_side", truncation_side)):
            if side not in ("left", "right"):
                raise UserError(f"{name} {side!r} is neither left nor right")
        pad = self.eod if self.pad_token_id is None else self.pad_token_id
        before, after = (self.before, self.after) if add_special_tokens else ((), ())
        rows = [self.encode(text, add_special_tokens=False) for text in texts]
        if max_length is not None:
            room = max_length - len(before) - len(after)
            if room < 0:
                raise UserError(
                    f"max_length {max_length} has no room for the {len(before) + len(after)} special tokens"
                )
            rows = [
                row[:room] if truncation_side == "right" else row[max(0, len(row) - room) :]
                for row in rows
            ]
        rows = [torch.tensor([*before, *row, *after], dtype=torch.int64) for row in rows]
        ids = torch.full((len(rows), max(map(len, rows), default=0)), pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            where = (
                slice(len(tokens))
                if padding_side == "right"
                else slice(ids.shape[1] - len(tokens), None)
            )
            ids[row, where], mask[row, where] = tokens, 1
        return EncodedBatch(ids, mask)

    def decode(self, ids, *, skip_special_tokens: bool = False) -> str:
        """The text of ids. Broken UTF-8 is replaced (U+FFFD); ids that no token has are left out."""
        return b"".join(map(self._reader(skip_special_tokens), map(int, ids))).decode(
            errors="replace"
        )

    def stream(self, *, skip_special_tokens: bool = False) -> Stream:
        """Decode one token at a time. For the text after a prompt, put the prompt's ids first."""
        return Stream(self._reader(skip_special_tokens))

    def _encode(self, text: str, parse_special: bool) -> np.ndarray:
        """uint32 [tokens]."""
        raise NotImplementedError

    def _reader(self, skip_special_tokens: bool) -> Callable[[int], bytes]:
        """A function from a text's ids, one after the other, to their bytes."""
        raise NotImplementedError


def as_text(text: str | bytes) -> str:
    """`text`, if it is Unicode; else UserError."""
    try:
        if isinstance(text, bytes):
            return text.decode()
        text.encode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        ) from error
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise UserError(
            f"the text is not Unicode: lone surrogate U+{code:04X} at character {error.start}"
        ) from error
    return text
