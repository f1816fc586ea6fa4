"""The tokenizer of LLaMA-1 and LLaMA-2: a sentencepiece model with byte fallback, run by the
sentencepiece library."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import sentencepiece

from megazoo.errors import UserError
from megazoo.tokenizer.added import AddedToken, Splitter
from megazoo.tokenizer.base import Tokenizer
from megazoo.tokenizer.settings import Prefix, TokenizerSettings

CLASSES = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
SPACE = "\u2581"  # a space in a piece; in a text, this character becomes a space


# Fields of a sentencepiece model that replace those before them: normalizer_spec with an empty
# precompiled_charsmap, add_dummy_prefix 0 and remove_extra_whitespaces 0.
NO_PREFIX, NO_CHANGES = b"\x1a\x02\x18\x00", b"\x1a\x06\x12\x00\x18\x00\x20\x00"


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model with added tokens. Each text between added tokens is encoded
    separately.

    Args:
        model: The model.
        added: Added tokens.
        prefix: Texts that begin with an added space, as in transformers: "always" each text between
            added tokens, "first" only the one at the start, "never" none. A text that begins with a
            space gets no other one. "model": the model adds a space before each text, and decoding
            removes it, as in LLaMA's own code.
    """

    def __init__(
        self,
        model: sentencepiece.SentencePieceProcessor,
        added: list[AddedToken],
        prefix: Prefix = "model",
    ):
        self._model, size = model, model.vocab_size()
        self._bytes = {token: _bytes_of(model, token) for token in range(size)}
        self._bytes |= {token.id: token.content.encode() for token in added}
        self._alone = {token.id for token in added} if prefix == "model" else set()
        self._special = {token.id for token in added if token.special}
        self._split = Splitter(added)
        self._prefix = prefix
        self.adds_space = (
            prefix != "never" if prefix != "model" else _first_piece(model).startswith(SPACE)
        )
        self.vocab_size = max(self._bytes) + 1

    def _encode(self, text: str, parse_special: bool) -> np.ndarray:
        ids: list[int] = []
        for place, part in enumerate(self._split(text, parse_special)):
            if isinstance(part, int):
                ids.append(part)
                continue
            begins = self._prefix == "always" or (self._prefix == "first" and place == 0)
            space = " " if begins and part[0] not in (" ", SPACE) else ""
            ids += self._model.encode(space + part)
        return np.array(ids, np.uint32)

    def _reader(self, skip_special_tokens: bool) -> Callable[[int], bytes]:
        starts = self.adds_space

        def read(token: int) -> bytes:
            nonlocal starts
            data = self._bytes.get(token, b"")
            if token in self._special and skip_special_tokens:
                data = b""
            elif token not in self._alone:
                data, starts = data.removeprefix(b" ") if starts else data, starts and not data
            if token in self._alone:
                starts = self.adds_space
            return data

        return read


def from_sentencepiece(
    path: Path, data: bytes, settings: TokenizerSettings
) -> SentencePieceTokenizer:
    """Create the tokenizer of a sentencepiece model with the bytes `data`. bos, if the model has
    it, is added before a text."""
    settings.refuse("tokenizer_class", *CLASSES)
    prefix = settings.prefix
    try:
        if not data:
            raise RuntimeError("empty")
        change = {"model": b"", "never": NO_PREFIX}.get(prefix, NO_CHANGES)
        model = sentencepiece.SentencePieceProcessor(model_proto=data + change)
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
    tokenizer = SentencePieceTokenizer(model, added, prefix)
    return settings.apply(tokenizer, ids.get, own, add_bos=True)


def _first_piece(model: sentencepiece.SentencePieceProcessor) -> str:
    return model.encode("a", out_type=str)[0]


def _bytes_of(model: sentencepiece.SentencePieceProcessor, token: int) -> bytes:
    piece = model.id_to_piece(token)
    return (
        bytes([int(piece[3:5], 16)]) if model.is_byte(token) else piece.replace(SPACE, " ").encode()
    )
