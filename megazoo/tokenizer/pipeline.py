"""Runs a tokenizer.json of any kind with the `tokenizers` library."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megazoo.errors import UserError
from megazoo.tokenizer.base import Stream, Tokenizer
from megazoo.tokenizer.settings import TokenizerSettings

if TYPE_CHECKING:
    import tokenizers

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a byte in ByteFallback's spelling


class PipelineTokenizer(Tokenizer):
    """The pipeline of a tokenizer.json. Ids and texts equal those of the fast tokenizers of
    transformers."""

    def __init__(self, pipeline: "tokenizers.Tokenizer"):
        self._pipeline = pipeline
        self.vocab_size = max(pipeline.get_vocab().values(), default=-1) + 1
        added = pipeline.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}

    def _encode(self, text: str, parse_special: bool) -> np.ndarray:
        self._pipeline.encode_special_tokens = not parse_special
        with _refused(f"a text of {len(text):,} characters can't be tokenized"):
            ids = self._pipeline.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.uint32)

    def decode(self, ids: Iterable[Any], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Broken UTF-8 becomes U+FFFD; unknown ids are skipped."""
        shown = [token for token in map(int, ids) if 0 <= token < self.vocab_size]
        return self._pipeline.decode(shown, skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = False) -> "PipelineStream":
        """Decode one token at a time. To decode the text after a prompt, put the prompt's ids
        first."""
        return PipelineStream(self, skip_special_tokens)

    def spelling(self, token: int, skip_special_tokens: bool) -> str | None:
        """Return a token's string in the vocabulary, or None if decoding skips the token."""
        if not 0 <= token < self.vocab_size or (skip_special_tokens and token in self._special):
            return None
        return self._pipeline.id_to_token(token)


class PipelineStream(Stream):
    """Decodes one token at a time, together with previous tokens, because a decoder may treat the
    first token of a text differently."""

    def __init__(self, tokenizer: PipelineTokenizer, skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._told = 0  # number of leading _ids whose text was returned
        self._text = ""  # their text

    def put(self, token: int) -> str:
        """Add a token and return the text that is complete. Incomplete characters and byte tokens
        are kept until later tokens, because one broken character affects all adjacent bytes."""
        spelling = self._tokenizer.spelling(int(token), self._skip)
        if spelling is None:
            return ""
        self._ids.append(int(token))
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") or BYTE.fullmatch(spelling):
            return ""
        new = text[len(self._text) :]
        del self._ids[: self._told]  # keeps at least one token before the next one
        self._told, self._text = len(self._ids), self._tokenizer.decode(self._ids)
        return new

    def end(self) -> str:
        """Return the rest of the text after the last token."""
        return self._tokenizer.decode(self._ids)[len(self._text) :]


def from_pipeline(
    path: Path, data: bytes, entries: dict, settings: TokenizerSettings
) -> PipelineTokenizer:
    """Create the tokenizer of a tokenizer.json.

    Args:
        path: The file.
        data: Its bytes.
        entries: Its JSON object.
        settings: Settings in the files next to it.

    Raises:
        UserError: The library cannot read the file.
    """
    import tokenizers  # here: only a tokenizer.json needs it

    model = entries.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise UserError(
            f"{path}: model.dropout {model['dropout']!r} would draw other ids for the same text: "
            "make it null"
        )
    with _refused(f"{path} can't be read"):
        pipeline = tokenizers.Tokenizer.from_buffer(data)
    pipeline.no_truncation()
    pipeline.no_padding()
    prefix = settings.config.get("add_prefix_space")
    if isinstance(pipeline.pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel) and prefix in (
        True,
        False,
    ):
        pipeline.pre_tokenizer.add_prefix_space = prefix
    _add_tokens(path, pipeline, settings)
    with _refused(f"{path} can't be used"):
        around = _around(pipeline)
    return settings.apply(PipelineTokenizer(pipeline), pipeline.token_to_id, template=around)


@contextmanager
def _refused(told: str) -> Iterator[None]:
    """Convert exceptions of the library to a UserError that begins with `told`."""
    try:
        yield
    except BaseException as error:  # panics of the library are not subclasses of Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{told}: {' '.join(str(error).split())}") from error


def _add_tokens(path: Path, pipeline: "tokenizers.Tokenizer", settings: TokenizerSettings) -> None:
    """Add tokens of the settings files that the pipeline does not have. Raises UserError if the id
    of one differs."""
    import tokenizers

    known = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    added = settings.all_added([], pipeline.token_to_id)
    for token in sorted(added, key=lambda token: token.id):
        if token.content in known:
            continue
        flags = token._asdict()
        content, token_id = flags.pop("content"), flags.pop("id")
        pipeline.add_tokens([tokenizers.AddedToken(content, **flags)])
        if (found := pipeline.token_to_id(content)) != token_id:
            raise UserError(
                f"{path}: the added token {content!r} has the id {token_id} in the files beside "
                f"it, but the vocabulary gives it {found}"
            )


def _around(pipeline: "tokenizers.Tokenizer") -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor adds before and after a text."""
    for text in ("a", *pipeline.get_vocab()):  # until one is encoded to any ids
        encoded = pipeline.encode(text)
        inside = [place for place, mark in enumerate(encoded.special_tokens_mask) if not mark]
        if inside:
            return encoded.ids[: inside[0]], encoded.ids[inside[-1] + 1 :]
    return [], []
