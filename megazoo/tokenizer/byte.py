"""The tokenizer that needs no vocabulary: a token is a byte of UTF-8."""

import numpy as np


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a document."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """uint16 [bytes]."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids) -> str:
        """The text of the bytes among `ids`; broken UTF-8 is replaced, ends of documents are left out."""
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")
