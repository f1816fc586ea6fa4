"""The tokenizer of LLaMA-1 and LLaMA-2: a sentencepiece model with byte fallback, run by the
sentencepiece library."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import sentencepiece

from megazoo.errors import UserError
from megazoo.tokenizer.added import AddedToken, Splitter
from megazoo.tokenizer.base import Tokenizer
from megazoo.tokenizer.settings import TokenizerSettings

CLASSES = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
SPACE = "\u2581"  # a space in a piece; in a text, this character becomes a space


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model with added tokens.

    Each text between special tokens is encoded separately, as LLaMA's own code encodes the turns of
    a dialogue. The model adds a space before each such text, and decoding removes it.
    """

    def __init__(self, model: sentencepiece.SentencePieceProcessor, added: list[AddedToken]):
        self._model, size = model, model.vocab_size()
        self._bytes = {token: _bytes_of(model, token) for token in range(size)}
        self._bytes |= {token.id: token.content.encode() for token in added}
        self._alone = {token.id for token in added}
        self._special = {token.id for token in added if token.special}
        self._split = Splitter(added)
        self._dummy_prefix = model.encode("a", out_type=str)[0].startswith(SPACE)
        self.vocab_size = max(self._bytes) + 1

    def _encode(self, text: str, parse_special: bool) -> np.ndarray:
        parts = self._split(text, parse_special)
        ids = [
            token
            for part in parts
            for token in (self._model.encode(part) if isinstance(part, str) else [part])
        ]
        return np.array(ids, np.uint32)

    def _reader(self, skip_special_tokens: bool) -> Callable[[int], bytes]:
        starts = self._dummy_prefix

        def read(token: int) -> bytes:
            nonlocal starts
            data = self._bytes.get(token, b"")
            if token in self._alone:
                starts = self._dummy_prefix
                return b"" if skip_special_tokens and token in self._special else data
            data, starts = data.removeprefix(b" ") if starts else data, starts and not data
            return data

        return read


def from_sentencepiece(
    path: Path, data: bytes, settings: TokenizerSettings
) -> SentencePieceTokenizer:
    """Create the tokenizer of a sentencepiece model with the bytes `data`. bos, if the model has
    it, is added before a text."""
    settings.refuse("tokenizer_class", *CLASSES)
    settings.refuse("add_prefix_space", True)
    try:
        if not data:
            raise RuntimeError("empty")
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise UserError(
            f"{path} is neither a sentencepiece model nor lines of base64 and rank"
        ) from error
    ids = {model.id_to_piece(token): token for token in range(model.vocab_size())}
    special = [
        token for token in ids.values() if model.is_control(token) or model.is_unknown(token)
    ]
    added = settings.all_added(
        [AddedToken(model.id_to_piece(token), token) for token in special], ids.get
    )
    ids |= {token.content: token.id for token in added}
    own = {"bos": model.bos_id(), "eos": model.eos_id(), "pad": model.pad_id()}
    own = {role: token for role, token in own.items() if token >= 0}
    return settings.apply(SentencePieceTokenizer(model, added), ids.get, own, add_bos=True)


def _bytes_of(model: sentencepiece.SentencePieceProcessor, token: int) -> bytes:
    piece = model.id_to_piece(token)
    return (
        bytes([int(piece[3:5], 16)]) if model.is_byte(token) else piece.replace(SPACE, " ").encode()
    )
