"""Tokenize fine-tuning data: prompts with completions, and conversations. Only the answers carry a
loss. The formats of the data are in `formats`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from megazoo.data.formats import Conversation, Example, read_example, read_preference
from megazoo.errors import UserError
from megazoo.files import read_bytes
from megazoo.tokenizer.base import Tokenizer, as_text
from megazoo.tokenizer.chat import ANSWERS

ROLE, CONTENT = "{role}", "{content}"
CHATML_WORD = "chatml"  # the value of --chat-template that selects CHATML
WRITTEN_AS = re.compile(r"\{# megazoo: (.*?) #\}")  # the text of which `as_jinja` made a template
CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"


def template_of(given: str | None, tokenizer: Tokenizer) -> str | None:
    """Return the chat template that a setting names.

    It is the tokenizer's template of that name, CHATML for "chatml", the content of a .jinja file,
    or the setting itself. The default is the tokenizer's template, or None without one. UserError
    if it has no placeholder for messages.
    """
    if given is None:
        own = tokenizer.chat_template
        text = WRITTEN_AS.match(own) if own else None
        return json.loads(text[1]) if text else own
    if given in tokenizer.chat_templates:
        return tokenizer.chat_templates[given]
    if given == CHATML_WORD:
        return CHATML
    if given.endswith(".jinja"):
        given = as_text(read_bytes(Path(given)))
    if not is_jinja(given) and given.count(CONTENT) != 1:
        raise UserError(
            f"chat template {given!r} is not valid: use Jinja, a text that contains "
            f"{CONTENT} once (and optionally {ROLE}), or {CHATML_WORD}"
        )
    return given


def only_template(tokenizer: Tokenizer, needed_for: str, tools: list | None = None) -> str:
    """Return the template for a conversation of a tokenizer without a default one: tool_use if the
    conversation has tools.

    Args:
        tokenizer: the tokenizer.
        needed_for: subject of "need" in the error, such as "the conversations of a.jsonl".
        tools: the tools of the conversation.

    Raises:
        UserError: it has no template, or only others, which the error lists.
    """
    if tokenizer.chat_templates:
        return tokenizer.find_chat_template(tools=tools)
    raise UserError(
        f"the tokenizer {tokenizer.source} has no chat template, which {needed_for} need: pass "
        f"--chat-template {CHATML_WORD}, a text with {ROLE} and {CONTENT}, or a .jinja file"
    )


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
    if (bos := tokenizer.bos_token_id) is not None and bos in tokenizer.before:
        begin += f"{{{{ {json.dumps(tokenizer.decode([bos]), ensure_ascii=False)} }}}}"
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


def encode_preference(tokenizer: Tokenizer, value: dict, template: str | None) -> list[list[int]]:
    """Return the token ids and the loss mask of the chosen and of the rejected answer. The
    arguments and errors are those of `encode_conversation`."""
    return [part for each in read_preference(value) for part in _encoded(tokenizer, each, template)]


def encode_conversation(
    tokenizer: Tokenizer, value: dict, template: str | None
) -> tuple[list[int], list[int]]:
    """Return the token ids of an object in one of the formats of `read_example`, and its loss mask:
    1 for each id that carries a loss.

    The ids are those of the whole text, so that an answer is cut as the tokenizer cuts it there; a
    token that prompt and completion share carries a loss. template: Jinja, which decides how the
    text begins and ends, and which is given the object's `tools`, too; or what a message looks
    like, with {role} and {content}: then the tokenizer's bos goes before the text if it has one,
    the end of a document after it, and what follows the content of an answer carries a loss with
    it. Only prompts with completions can be encoded without a template. Only the template's special
    tokens are tokens; those in messages are refused. Raises ValueError or UserError for what can't
    be encoded.
    """
    return _encoded(tokenizer, read_example(value), template)


def _encoded(
    tokenizer: Tokenizer, example: Example, template: str | None
) -> tuple[list[int], list[int]]:
    """Return the token ids and the loss mask of a conversation, or of a prompt and completion."""
    if chat := isinstance(example, Conversation):
        if template is None:
            template = only_template(tokenizer, "conversations", example.tools)
        whole_text = is_jinja(template)
        pieces = list(_pieces(tokenizer, example, template))
    else:
        whole_text = False
        pieces = [(example.prompt, False), (example.completion, True)]
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
            f"nothing to learn: no words of the {ANSWERS} that carry a loss"
            if chat
            else "the completion is empty"
        )
    if whole_text:
        return ids, loss_mask
    before, last_carries_loss = tokenizer.before, int(pieces[-1][1])
    return [*before, *ids, tokenizer.eod], [0] * len(before) + loss_mask + [last_carries_loss]


def _pieces(
    tokenizer: Tokenizer, conversation: Conversation, template: str
) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of the conversation's text, and whether they carry a loss."""
    messages, trained, tools = conversation
    _check_words(tokenizer, messages, plain=not is_jinja(template))
    if is_jinja(template):
        given = None if template == tokenizer.chat_template else template
        text, spans = tokenizer.answers_in(
            messages, chat_template=given, tools=tools, trained=trained
        )
        done = 0
        for start, end in spans:
            yield text[done:start], False
            yield text[start:end], True
            done = end
        yield text[done:], False
        return
    before, after = template.split(CONTENT)
    for message, carries_loss in zip(messages, trained, strict=True):
        role, content = message["role"], message["content"]
        yield before.replace(ROLE, role), False
        yield content + after.replace(ROLE, role), carries_loss and role == ANSWERS


def _check_words(tokenizer: Tokenizer, messages: list[dict], *, plain: bool) -> None:
    """Raise ValueError for messages without a role or content, and for content that contains the
    name of a special token. plain: content must be a text; otherwise the template checks it."""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or (plain and not isinstance(content, str)):
            raise ValueError("a message has no role or no content")
        for text in _texts_in(message):
            ids = tokenizer.encode(text, parse_special=True)
            if ids != tokenizer.encode(text, parse_special=False):
                raise ValueError(f"{text[:40]!r} contains the name of a special token")


def _texts_in(value) -> Iterator[str]:
    """Yield all texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(each)


def _common(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two lists of ids."""
    return next(
        (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )
