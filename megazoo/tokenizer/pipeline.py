"""Runs a tokenizer.json of any kind with the `tokenizers` library."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megazoo.errors import UserError
from megazoo.tokenizer.added import AddedToken
from megazoo.tokenizer.base import Stream, Tokenizer
from megazoo.tokenizer.settings import TokenizerSettings

if TYPE_CHECKING:
    import tokenizers

SPACED = ("LlamaTokenizer", "CodeLlamaTokenizer")  # their keys decide about spaces
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
    if (changed := _with_flags(pipeline, entries, settings)) is not None:
        pipeline = tokenizers.Tokenizer.from_buffer(json.dumps(changed).encode())
    if settings.tokenizer_class in SPACED and isinstance(pipeline.model, tokenizers.models.BPE):
        _use_spaces_of_class(pipeline, settings)
    pipeline.no_truncation()
    pipeline.no_padding()
    _add_tokens(path, pipeline, settings)
    with _refused(f"{path} can't be used"):
        around = _around(pipeline)
    return settings.apply(PipelineTokenizer(pipeline), pipeline.token_to_id, template=around)


def _use_spaces_of_class(pipeline: "tokenizers.Tokenizer", settings: TokenizerSettings) -> None:
    """Replace the steps around the model by those of LlamaTokenizer, as in transformers."""
    from tokenizers import decoders, pre_tokenizers

    prefix = settings.prefix
    steps: list = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix != "never" or settings.tokenizer_class == SPACED[1]:
        steps.append(decoders.Strip(" ", 1, 0))
    pipeline.normalizer = None
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prefix, split=False)
    pipeline.decoder = decoders.Sequence(steps)


@contextmanager
def _refused(told: str) -> Iterator[None]:
    """Convert exceptions of the library to a UserError that begins with `told`."""
    try:
        yield
    except BaseException as error:  # panics of the library are not subclasses of Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{told}: {' '.join(str(error).split())}") from error


def _with_flags(
    pipeline: "tokenizers.Tokenizer", entries: dict, settings: TokenizerSettings
) -> dict | None:
    """Return a tokenizer.json with the flags of added tokens in the settings files, or None if they
    are the same."""
    wanted = {token.content: token for token in _added(pipeline, settings)}
    old = entries.get("added_tokens") or []
    new = [{**entry, **_flags(wanted[entry["content"]])} for entry in old]
    return None if new == old else {**entries, "added_tokens": new}


def _added(pipeline: "tokenizers.Tokenizer", settings: TokenizerSettings) -> list[AddedToken]:
    """Return the added tokens of a pipeline and of the settings files."""
    names = ("special", "normalized", "lstrip", "rstrip", "single_word")
    found = [
        AddedToken(token.content, token_id, **{name: getattr(token, name) for name in names})
        for token_id, token in pipeline.get_added_tokens_decoder().items()
    ]
    return settings.all_added(found, pipeline.token_to_id)


def _flags(token: AddedToken) -> dict[str, bool]:
    return {name: value for name, value in token._asdict().items() if name not in ("content", "id")}


def _add_tokens(path: Path, pipeline: "tokenizers.Tokenizer", settings: TokenizerSettings) -> None:
    """Add tokens of the settings files that the pipeline does not have. Raises UserError if the id
    of one differs."""
    import tokenizers

    known = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    for token in sorted(_added(pipeline, settings), key=lambda token: token.id):
        if token.content in known:
            continue
        pipeline.add_tokens([tokenizers.AddedToken(token.content, **_flags(token))])
        if (found := pipeline.token_to_id(token.content)) != token.id:
            raise UserError(
                f"{path}: the added token {token.content!r} has the id {token.id} in the files "
                f"beside it, but the vocabulary gives it {found}"
            )


def _around(pipeline: "tokenizers.Tokenizer") -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor adds before and after a text."""
    for text in ("a", *pipeline.get_vocab()):  # until one is encoded to any ids
        encoded = pipeline.encode(text)
        inside = [place for place, mark in enumerate(encoded.special_tokens_mask) if not mark]
        if inside:
            return encoded.ids[: inside[0]], encoded.ids[inside[-1] + 1 :]
    return [], []
