"""Features shared by all tokenizers: add special tokens to a text, pad batches, and decode one
token at a time."""

import codecs
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.tokenizer.chat import render, render_answers
from megazoo.tokenizer.templates import DEFAULT

if TYPE_CHECKING:
    import torch

Side = Literal["left", "right"]


class EncodedBatch(NamedTuple):
    """Padded rows of token ids.

    Attributes:
        input_ids: int64 [batch, longest].
        attention_mask: int64 [batch, longest]: 1 for tokens, 0 for padding.
    """

    input_ids: "torch.Tensor"
    attention_mask: "torch.Tensor"


class BatchEncoding(dict):
    """The result of calling a tokenizer: input_ids and attention_mask, as items and as
    attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: "str | torch.device") -> "BatchEncoding":
        """Return a copy on `device`. Requires tensors (return_tensors="pt")."""
        return BatchEncoding({name: tensor.to(device) for name, tensor in self.items()})


class Stream:
    """Decodes one token at a time. The joined results of `put` and `end` equal `decode` of all the
    ids."""

    def __init__(self, bytes_of: Callable[[int], bytes]):
        self._bytes_of, self._decoder = bytes_of, codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, token: int) -> str:
        """Add a token and return the text that is complete. Bytes of an incomplete character are
        kept until the next token."""
        return self._decoder.decode(self._bytes_of(int(token)))

    def end(self) -> str:
        """Return the rest of the text after the last token."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """Converts text to token ids and back.

    A subclass sets the attributes and implements `_encode` and `_reader`.

    Attributes:
        source: The argument of `open_tokenizer`.
        vocab_size: All ids are smaller than this.
        bos_token_id: Id of the token that begins a text; None if the files do not name one.
        eos_token_id: Id of the token that ends a text, or None.
        pad_token_id: Id of the padding token, or None.
        before: Ids of the special tokens that `encode` adds before a text.
        after: Ids of the special tokens that `encode` adds after a text.
        special_tokens_map: Contents of the named special tokens, such as image_token.
        own_texts: Contents of the bos, eos and pad tokens that the vocabulary itself defines.
        padding_side: Default side on which rows are padded.
        truncation_side: Default side on which rows are truncated.
        split_special_tokens: By default, encode the text of a special token as ordinary text.
        chat_templates: The Jinja templates in the files, by name: default, tool_use ...
    """

    source: str = "byte"
    vocab_size: int
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    before: tuple[int, ...] = ()  # special tokens that encode adds
    after: tuple[int, ...] = ()
    special_tokens_map: Mapping[str, str] = {}
    own_texts: Mapping[str, str] = {}
    padding_side: Side = "right"
    truncation_side: Side = "right"
    split_special_tokens: bool = False
    chat_templates: Mapping[str, str] = {}
    _special: Collection[int] = ()  # ids that decoding can skip

    @property
    def chat_template(self) -> str | None:
        """The template named default, or None. Assigning a template replaces all templates."""
        return self.chat_templates.get(DEFAULT)

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        self.chat_templates = {} if template is None else {DEFAULT: template}

    def find_chat_template(self, given: str | None = None, *, tools: list | None = None) -> str:
        """Return a chat template, chosen as in transformers.

        Args:
            given: A Jinja template, or the name of one of the tokenizer's.
            tools: If tools are given, the template named tool_use is preferred to default.

        Raises:
            UserError: The tokenizer has no template, or several without a default.
        """
        templates = self.chat_templates
        if given is not None:
            return templates.get(given, given)
        name = "tool_use" if tools is not None and "tool_use" in templates else DEFAULT
        if name in templates:
            return templates[name]
        if templates:
            raise UserError(
                f"the tokenizer {self.source} has no default chat template, but these: "
                f"{', '.join(sorted(templates))}; pass the name of one as chat_template, or a "
                "Jinja template"
            )
        raise UserError(
            f"the tokenizer {self.source} has no chat template: neither a chat_template.jinja "
            "nor a chat_template in tokenizer_config.json"
        )

    @property
    def eod(self) -> int:
        """The id that ends a document: eos, otherwise bos, otherwise padding. Otherwise it is the
        token that the files add after a text, or before it, or the only special token.

        Raises:
            UserError: The tokenizer has none of these tokens.
        """
        named = (self.eos_token_id, self.bos_token_id, self.pad_token_id)
        only = self._special if len(self._special) == 1 else ()
        for token in (*named, *self.after[-1:], *self.before[:1], *only):
            if token is not None:
                return token
        raise UserError(
            f"the tokenizer {self.source} has no token that could end a document: its files name "
            "no eos_token. Add it to tokenizer_config.json in the directory of the tokenizer, for "
            'example {"eos_token": "</s>"}, with the text of a token of the vocabulary'
        )

    def encode(
        self,
        text: str | bytes,
        *,
        add_special_tokens: bool = True,
        parse_special: bool | None = None,
    ) -> list[int]:
        """Encode a text.

        Args:
            text: A string, or UTF-8 bytes.
            add_special_tokens: Add bos and eos if the tokenizer's files request them.
            parse_special: Encode the text of a special token, such as <|endoftext|>, as that token.
                The default is the opposite of `split_special_tokens`.

        Returns:
            The token ids.

        Raises:
            UserError: The text is not valid Unicode, for example because of lone surrogates.
        """
        ids = self.encode_to_numpy(text, parse_special=parse_special).tolist()
        return [*self.before, *ids, *self.after] if add_special_tokens else ids

    def encode_to_numpy(
        self, text: str | bytes, *, parse_special: bool | None = None
    ) -> np.ndarray:
        """Encode a text without adding special tokens.

        Args:
            text: As in `encode`.
            parse_special: As in `encode`.

        Returns:
            uint32 [tokens].
        """
        parse = not self.split_special_tokens if parse_special is None else parse_special
        return self._encode(as_text(text), parse)

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        padding_side: Side | None = None,
        max_length: int | None = None,
        truncation_side: Side | None = None,
        add_special_tokens: bool = True,
        parse_special: bool | None = None,
    ) -> EncodedBatch:
        """Encode texts and pad them to the longest one.

        If there is no padding token, rows are padded with eos. The mask hides the padding.

        Args:
            texts: The texts of the batch.
            padding_side: Side on which rows are padded. The default is that of the tokenizer.
            max_length: Truncate rows to this many tokens. Added special tokens count and are kept.
            truncation_side: Side on which rows are truncated. The default is that of the tokenizer.
            add_special_tokens: As in `encode`.
            parse_special: As in `encode`.
        """
        import torch  # here: a process that only tokenizes needs no torch

        padding_side = self.padding_side if padding_side is None else padding_side
        truncation_side = self.truncation_side if truncation_side is None else truncation_side
        for name, side in (("padding_side", padding_side), ("truncation_side", truncation_side)):
            if side not in ("left", "right"):
                raise UserError(f"{name} {side!r} is neither left nor right")
        before, after = (self.before, self.after) if add_special_tokens else ((), ())
        rows = [self.encode_to_numpy(text, parse_special=parse_special).tolist() for text in texts]
        if max_length is not None:
            added = len(before) + len(after)
            if max_length < added:
                raise UserError(
                    f"max_length {max_length} has no room for the {added} special tokens"
                )
            rows = [_shortened(row, max_length - added, truncation_side) for row in rows]
        rows = [torch.tensor([*before, *row, *after], dtype=torch.int64) for row in rows]
        longest = max(map(len, rows), default=0)
        pad = self.pad_token_id
        if pad is None:
            pad = self.eod if any(len(row) < longest for row in rows) else 0
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            start = 0 if padding_side == "right" else longest - len(tokens)
            ids[row, start : start + len(tokens)] = tokens
            mask[row, start : start + len(tokens)] = 1
        return EncodedBatch(ids, mask)

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        padding_side: Side | None = None,
        truncation_side: Side | None = None,
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = None,
        return_tensors: str | None = None,
    ) -> BatchEncoding:
        """Encode one or more texts for `model(**batch)` and `model.generate(**batch)`.

        The call matches that of tokenizers in transformers.

        Args:
            text: A text, or a list of texts.
            padding: True or "longest" pads as `encode_batch` does.
            truncation: True truncates to max_length tokens.
            max_length: Required with truncation.
            padding_side: As in `encode_batch`.
            truncation_side: As in `encode_batch`.
            add_special_tokens: As in `encode`.
            split_special_tokens: Encode the text of a special token as ordinary text. The default
                is that of the tokenizer.
            return_tensors: "pt" returns int64 tensors [batch, longest]. By default lists are
                returned: one list per text, or a flat list for a single text.

        Raises:
            UserError: An argument is invalid, or tensors are requested for rows of different
                lengths without padding.
        """
        for name, value, allowed in (
            ("padding", padding, (False, True, "longest")),
            ("truncation", truncation, (False, True)),
            ("return_tensors", return_tensors, (None, "pt")),
        ):
            if value not in allowed:
                raise UserError(
                    f"{name} {value!r} is not supported: use one of {', '.join(map(repr, allowed))}"
                )
        if truncation != (max_length is not None):
            raise UserError("truncation=True and max_length need each other: pass both or neither")
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
            raise UserError(f"text {brief(text)} is neither a string nor a list of strings")
        ids, mask = self.encode_batch(
            texts,
            padding_side=padding_side,
            max_length=max_length,
            truncation_side=truncation_side,
            add_special_tokens=add_special_tokens,
            parse_special=None if split_special_tokens is None else not split_special_tokens,
        )
        if return_tensors:
            if not padding and not mask.all():
                lengths = mask.sum(1)
                raise UserError(
                    f"texts of {lengths.min()} to {lengths.max()} tokens can't form one tensor: "
                    "pass padding=True"
                )
            return BatchEncoding(input_ids=ids, attention_mask=mask)
        marks = mask.bool() | bool(padding)
        rows = {
            name: [row[kept].tolist() for row, kept in zip(tensor, marks, strict=True)]
            for name, tensor in (("input_ids", ids), ("attention_mask", mask))
        }
        return BatchEncoding({n: r[0] if isinstance(text, str) else r for n, r in rows.items()})

    def decode(self, ids: Iterable[Any], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Broken UTF-8 becomes U+FFFD; unknown ids are skipped."""
        bytes_of = self._reader(skip_special_tokens)
        return b"".join(bytes_of(int(token)) for token in ids).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: list[dict],
        *,
        chat_template: str | None = None,
        tools: list | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of a conversation.

        Encode the text with add_special_tokens=False, because templates write bos themselves.

        Args:
            messages: Messages with `role` and `content`.
            chat_template: Template to use instead of the tokenizer's, or the name of one of its
                templates. By default the one named tool_use is used if there are tools, otherwise
                the one named default.
            tools: As in `megazoo.tokenizer.chat.render`.
            add_generation_prompt: As in `megazoo.tokenizer.chat.render`.
            continue_final_message: As in `megazoo.tokenizer.chat.render`.

        Raises:
            UserError: As in `megazoo.tokenizer.chat.render`, or the tokenizer has no template and
                none is given.
        """
        return render(
            self.find_chat_template(chat_template, tools=tools),
            messages,
            self._texts_of_names(),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def answers_in(
        self,
        messages: list[dict],
        *,
        chat_template: str | None = None,
        tools: list | None = None,
        trained: list[bool] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation and the character ranges to train on.

        The arguments and errors are those of `apply_chat_template`. See
        `megazoo.tokenizer.chat.render_answers`.
        """
        template = self.find_chat_template(chat_template, tools=tools)
        return render_answers(template, messages, self._texts_of_names(), tools, trained)

    def _texts_of_names(self) -> dict[str, str]:
        """Return the contents of the special tokens that a template can name. As in transformers, a
        token that the files only give an id is not one of them."""
        return {**self.own_texts, **self.special_tokens_map}

    def stream(self, *, skip_special_tokens: bool = False) -> Stream:
        """Decode one token at a time. To decode the text after a prompt, put the prompt's ids
        first."""
        return Stream(self._reader(skip_special_tokens))

    def _encode(self, text: str, parse_special: bool) -> np.ndarray:
        """Return the ids of a text, uint32 [tokens], without added special tokens."""
        raise NotImplementedError

    def _reader(self, skip_special_tokens: bool) -> Callable[[int], bytes]:
        """Return a function from a token to its bytes. It must be called with a text's ids in
        order."""
        raise NotImplementedError


def _shortened(row: list[int], room: int, side: Side) -> list[int]:
    """Truncate ids to at most `room` on one side."""
    return row[:room] if side == "right" else row[max(0, len(row) - room) :]


def as_text(text: str | bytes) -> str:
    """Return `text` as a string. Raises UserError if it is not valid Unicode."""
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


def first_token(tokenizer: Any) -> int:
    """Return the token that begins texts: bos, otherwise the end of document."""
    return tokenizer.eod if tokenizer.bos_token_id is None else tokenizer.bos_token_id
