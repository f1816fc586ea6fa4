"""A tokenizer.json of any kind, run by the `tokenizers` library: whatever its normalizer,
pre-tokenizer, model, post-processor and decoder are."""

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

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how ByteFallback spells a byte


class PipelineTokenizer(Tokenizer):
    """The pipeline of a tokenizer.json. Ids and texts are those of transformers' fast
    tokenizers."""

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
        """Return the text of ids. Broken UTF-8 becomes U+FFFD; ids that no token has are left
        out."""
        shown = [token for token in map(int, ids) if 0 <= token < self.vocab_size]
        return self._pipeline.decode(shown, skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = False) -> "PipelineStream":
        """Decode one token at a time. For the text after a prompt, put the prompt's ids first."""
        return PipelineStream(self, skip_special_tokens)

    def spelling(self, token: int, skip_special_tokens: bool) -> str | None:
        """Return what the vocabulary calls a token, None for what decoding leaves out."""
        if not 0 <= token < self.vocab_size or (skip_special_tokens and token in self._special):
            return None
        return self._pipeline.id_to_token(token)


class PipelineStream(Stream):
    """Decodes one token at a time, together with the tokens before it: a decoder may treat the
    first token of a text in another way."""

    def __init__(self, tokenizer: PipelineTokenizer, skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._told = 0  # ids at the beginning of _ids whose text was returned
        self._text = ""  # their text

    def put(self, token: int) -> str:
        """Return the text that is certain now. An incomplete character waits for the next tokens;
        so do tokens of single bytes, of which one broken character spoils all."""
        spelling = self._tokenizer.spelling(int(token), self._skip)
        if spelling is None:
            return ""
        self._ids.append(int(token))
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") or BYTE.fullmatch(spelling):
            return ""
        new = text[len(self._text) :]
        del self._ids[: self._told]  # one token at least stays before what comes next
        self._told, self._text = len(self._ids), self._tokenizer.decode(self._ids)
        return new

    def end(self) -> str:
        """Return the rest of the text, after the last token."""
        return self._tokenizer.decode(self._ids)[len(self._text) :]


def from_pipeline(
    path: Path, data: bytes, entries: dict, settings: TokenizerSettings
) -> PipelineTokenizer:
    """Return the tokenizer of a tokenizer.json, whose bytes are `data`, and its object `entries`.
    Raises UserError if the library can't read it."""
    import tokenizers  # here, so that a process without a tokenizer.json does without it

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
    """Turn what the library raises into a UserError that begins with `told`."""
    try:
        yield
    except BaseException as error:  # the library's panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{told}: {' '.join(str(error).split())}") from error


def _add_tokens(path: Path, pipeline: "tokenizers.Tokenizer", settings: TokenizerSettings) -> None:
    """Add the tokens of the files beside it that a pipeline does not have yet. UserError if one
    would get another id."""
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
    """Return the ids that the post-processor puts before and after a text."""
    for text in ("a", *pipeline.get_vocab()):  # the first that has any ids
        encoded = pipeline.encode(text)
        inside = [place for place, mark in enumerate(encoded.special_tokens_mask) if not mark]
        if inside:
            return encoded.ids[: inside[0]], encoded.ids[inside[-1] + 1 :]
    return [], []
