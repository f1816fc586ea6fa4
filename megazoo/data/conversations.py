"""Tokenize fine-tuning data: prompts with completions, and conversations. Only the answers carry a
loss."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import read_bytes
from megazoo.tokenizer.base import Tokenizer, as_text
from megazoo.tokenizer.chat import ANSWERS

ROLE, CONTENT = "{role}", "{content}"
WRITTEN_AS = re.compile(r"\{# megazoo: (.*?) #\}")  # the text of which `as_jinja` made a template
CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"


def template_of(given: str | None, tokenizer: Tokenizer) -> str:
    """Return the chat template that a setting names.

    It is the content of a .jinja file, or the setting itself. The default is the tokenizer's
    template, or ChatML without one. UserError if it has no placeholder for messages.
    """
    if given is None:
        own = tokenizer.chat_template or CHATML
        text = WRITTEN_AS.match(own)
        return json.loads(text[1]) if text else own
    if given.endswith(".jinja"):
        given = as_text(read_bytes(Path(given)))
    if not is_jinja(given) and given.count(CONTENT) != 1:
        raise UserError(
            f"chat template {given!r} is not valid: use Jinja, or a text that contains "
            f"{CONTENT} once (and optionally {ROLE})"
        )
    return given


def as_jinja(template: str, tokenizer: Tokenizer) -> str:
    """Return a chat template in Jinja, for generation.

    A text with {role} and {content} becomes a template that renders the same tokens as
    `encode_conversation`, except for the end of the document.
    """
    if is_jinja(template):
        return template
    before, after = (_in_jinja(part) for part in template.split(CONTENT))
    text = json.dumps(template).replace("#}", "#\\u007d")  # for `template_of`, which reads it
    begin = f"{{# megazoo: {text} #}}"
    if tokenizer.bos_token_id in tokenizer.before:
        begin += "{{ bos_token }}"
    asked = _in_jinja(template.split(CONTENT)[0].replace(ROLE, ANSWERS))
    return (
        f"{begin}{{% for message in messages %}}{before}{{{{ message['content'] }}}}{after}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{asked}{{% endif %}}"
    )


def _in_jinja(text: str) -> str:
    """Return an expression of Jinja for a text, in which {role} stands for a message's."""
    parts = [f"{{{{ {json.dumps(part, ensure_ascii=False)} }}}}" for part in text.split(ROLE)]
    return "{{ message['role'] }}".join(parts)


def is_jinja(template: str) -> bool:
    """Return whether a chat template is Jinja, rather than a text with {role} and {content}."""
    return "{%" in template or "{{" in template


def encode_conversation(
    tokenizer: Tokenizer, value: dict, template: str
) -> tuple[list[int], list[int]]:
    """Return the token ids of an object with `prompt` and `completion`, or with `messages`, and
    its loss mask: 1 for each id that carries a loss.

    The ids are those of the whole text, so that an answer is cut as the tokenizer cuts it there; a
    token that prompt and completion share carries a loss. template: Jinja, which decides how the
    text begins and ends, and which is given the object's `tools`, too; or what a message looks
    like, with {role} and {content}: then the tokenizer's bos goes before the text if it has one,
    the end of a document after it, and what follows the content of an answer carries a loss with
    it. Only the template's special tokens are tokens; those in messages are refused. Raises
    ValueError or UserError for what can't be encoded.
    """
    chat = "messages" in value
    whole_text = chat and is_jinja(template)
    pieces = list(_pieces(tokenizer, value, template) if chat else _completion(value))
    whole = "".join(piece for piece, _ in pieces)
    ids = tokenizer.encode(whole, add_special_tokens=False, parse_special=chat)
    text, loss_mask, last = "", [], 0
    for number, (piece, carries_loss) in enumerate(pieces, 1):
        text += piece
        if number == len(pieces):
            end = len(ids)
        else:
            part = tokenizer.encode(text, add_special_tokens=False, parse_special=chat)
            end = _common(ids, part)
        loss_mask += [int(carries_loss)] * (end - last)
        last = max(last, end)
    if not any(loss_mask):
        raise ValueError(
            f"nothing to learn: no words of the {ANSWERS}" if chat else "the completion is empty"
        )
    if whole_text:
        return ids, loss_mask
    before, last_carries_loss = tokenizer.before, int(pieces[-1][1])
    return [*before, *ids, tokenizer.eod], [0] * len(before) + loss_mask + [last_carries_loss]


def _pieces(tokenizer: Tokenizer, value: dict, template: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of the conversation's text, and whether they carry a loss."""
    messages = value["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ValueError("messages is not a list of objects")
    _check_words(tokenizer, messages, plain=not is_jinja(template))
    if is_jinja(template):
        tools = value.get("tools")
        text, spans = tokenizer.answers_in(messages, chat_template=template, tools=tools)
        done = 0
        for start, end in spans:
            yield text[done:start], False
            yield text[start:end], True
            done = end
        yield text[done:], False
        return
    before, after = template.split(CONTENT)
    for message in messages:
        role, content = message["role"], message["content"]
        yield before.replace(ROLE, role), False
        yield content + after.replace(ROLE, role), role == ANSWERS


def _check_words(tokenizer: Tokenizer, messages: list[dict], *, plain: bool) -> None:
    """Raise ValueError for messages without a role or content, and for content that contains the
    name of a special token. plain: content must be a text; otherwise the template checks it."""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or (plain and not isinstance(content, str)):
            raise ValueError("a message has no role or no content")
        for text in _texts_in(message):
            if tokenizer.encode(text) != tokenizer.encode(text, parse_special=False):
                raise ValueError(f"{text[:40]!r} contains the name of a special token")


def _texts_in(value) -> Iterator[str]:
    """Yield all texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(each)


def _completion(value: dict) -> Iterator[tuple[str, bool]]:
    """Yield the prompt and the completion, and whether they carry a loss."""
    for key in ("prompt", "completion"):
        if not isinstance(value.get(key), str):
            raise ValueError(f"no text under {key!r}")
        yield value[key], key == "completion"


def _common(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two lists of ids."""
    return next(
        (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )
