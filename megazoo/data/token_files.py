"""`--data PREFIX`: token files of megazoo preprocess or Megatron-LM."""

import os
from pathlib import Path

from megazoo.data.checksums import BLOCKS, Fingerprint, fingerprint_of
from megazoo.data.indexed import IndexedTokens
from megazoo.data.samples import PackedDataset
from megazoo.data.sources import Encoding, Opening, Source
from megazoo.errors import UserError


class TokenFiles(Source):
    """The concatenated documents of PREFIX.bin and PREFIX.idx."""

    @classmethod
    def accepts(cls, name: str) -> bool:
        return os.path.isfile(f"{name}.idx")

    def files(self) -> list[tuple[str, Path]]:
        ends = (".bin", ".idx")
        return [(f"{Path(self.name).name}{end}", Path(f"{self.name}{end}")) for end in ends]

    def parts(self, opening: Opening) -> list[PackedDataset]:
        tokens = IndexedTokens(self.name)
        self._check_ends(tokens, opening.eod)
        if not len(tokens.tokens):
            raise UserError(f"{self.name} has no tokens")
        return packed_parts(tokens, opening)

    def fingerprint(self, encoding: Encoding) -> Fingerprint:
        tokens = IndexedTokens(self.name)
        documents = len(tokens.documents) - 1
        return fingerprint_of(self.name, [tokens.index, tokens.bin], documents, blocks=BLOCKS)

    @staticmethod
    def _check_ends(tokens: IndexedTokens, eod: int | None) -> None:
        """Raise UserError if documents are separated by `eod`, and the first does not end with
        it."""
        first = tokens.stream(0, min(1, len(tokens.documents) - 1))
        if eod is not None and len(first) and first[-1:].item() != eod:
            raise UserError(
                f"{tokens.bin}: its first document doesn't end with the tokenizer's {eod}, "
                "which separate-documents needs: preprocess the data with --append-eod"
            )


def packed_parts(tokens: IndexedTokens, opening: Opening) -> list[PackedDataset]:
    """Return the concatenated documents of each part."""
    streams = [tokens.stream(*part) for part in opening.ranges(len(tokens.documents) - 1)]
    return [
        PackedDataset(
            stream,
            opening.seq_length,
            opening.eod,
            opening.vocab_size,
            str(tokens.bin),
            stream.start,
            opening.tokenizer,
        )
        for stream in streams
    ]
