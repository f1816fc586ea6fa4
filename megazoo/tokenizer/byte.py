"""A tokenizer without a vocabulary: each UTF-8 byte is a token."""

from collections.abc import Callable, Mapping

import numpy as np

from megazoo.tokenizer.base import Tokenizer, as_text


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes; 256 ends a document. Any bytes can be encoded, also invalid UTF-8.
    Decoding skips 256."""

    vocab_size = 257
    eos_token_id = 256
    own_texts: Mapping[str, str] = {"eos_token": ""}

    def encode_to_numpy(
        self, text: str | bytes, *, parse_special: bool | None = None
    ) -> np.ndarray:
        """Encode a text as uint16 [bytes]."""
        data = text if isinstance(text, bytes) else as_text(text).encode()
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def _reader(self, skip_special_tokens: bool) -> Callable[[int], bytes]:
        return lambda token: bytes([token]) if 0 <= token < 256 else b""
