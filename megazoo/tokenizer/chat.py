"""Chat templates: the Jinja template in the tokenizer's files converts a conversation to text, as
in transformers."""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from typing import Any, TypeVar

from megazoo.errors import UserError

ANSWERS = "assistant"  # the role whose messages are trained on
# Marks the end of a message to continue. A template that trims messages removes the space.
END = "END-OF-THE-LAST-MESSAGE "
ANSWER = "THE-WORDS-OF-AN-ANSWER"  # placeholder that shows where an answer is
OPEN, CLOSE = "[GENERATION-BLOCK-BEGINS]", "[GENERATION-BLOCK-ENDS]"
Span = tuple[int, int]
Result = TypeVar("Result")


def render(
    template: str,
    messages: list[dict],
    special_tokens: dict[str, str],
    *,
    tools: list | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Render a conversation as text.

    Args:
        template: The Jinja template.
        messages: Messages with `role` and `content`.
        special_tokens: Texts that the template can use, such as bos_token.
        tools: Value of `tools` in the template.
        add_generation_prompt: End the text with the beginning of an answer.
        continue_final_message: End the text with the last message's content, so that the model
            continues it.

    Raises:
        UserError: The template is not valid Jinja, or rejects the messages (the error contains the
            template's message).
    """
    if not messages:
        raise UserError("a chat template needs at least one message")
    if add_generation_prompt and continue_final_message:
        raise UserError("add_generation_prompt and continue_final_message exclude each other")
    last = messages[-1].get("content")
    if continue_final_message:
        if not isinstance(last, str):
            raise UserError("the last message has no text to continue")
        messages = [*messages[:-1], {**messages[-1], "content": last + END}]
    names = {**special_tokens, "tools": tools, "add_generation_prompt": add_generation_prompt}
    text, _ = _without_marks(_rendered(template, messages, names))
    return _up_to_end(text, str(last)) if continue_final_message else text


def render_answers(
    template: str,
    messages: list[dict],
    special_tokens: dict[str, str],
    tools: list | None = None,
    trained: list[bool] | None = None,
) -> tuple[str, list[Span]]:
    """Render a conversation as text and find the characters to train on.

    These are the contents of the template's {% generation %} blocks. In a template without such
    blocks, they are the text that an answer adds: from the end of its prompt to the end of its
    message.

    Args:
        template, messages, special_tokens, tools: As in `render`.
        trained: Whether each message is trained, if the assistant wrote it. By default all are.

    Returns:
        The text, and the ranges (start, end) of its characters to train on.

    Raises:
        UserError: As in `render`, or an answer is not found in the text.
    """

    def rendered(messages: list[dict], **names) -> str:
        return _rendered(template, messages, {**special_tokens, "tools": tools, **names})

    def blocks(count: int) -> int:
        """Return the number of blocks in the text of the first messages."""
        return len(_without_marks(rendered(messages[:count]))[1]) if count else 0

    text, spans = _without_marks(rendered(messages))
    answers = [place for place, each in enumerate(messages) if each.get("role") == ANSWERS]
    wanted = [place for place in answers if trained is None or trained[place]]
    if not re.search(r"\{%-?\s*generation\b", template):
        return text, [_span_of(place, messages, text, rendered) for place in wanted]
    if wanted == answers:
        return text, spans
    counts = [_attempt(lambda p=place: blocks(p + 1) - blocks(p)) for place in answers]
    if None in counts or sum(filter(None, counts)) != len(spans):
        raise UserError(
            "the chat template has other {% generation %} blocks in a longer conversation, so that "
            "the loss of some messages can't be removed: use one block per message"
        )
    of = [place for place, count in zip(answers, counts, strict=True) for _ in range(count or 0)]
    return text, [span for span, place in zip(spans, of, strict=True) if place in wanted]


def _span_of(place: int, messages: list[dict], text: str, rendered: Callable[..., str]) -> Span:
    """Return the range of an answer in the text of its conversation."""
    asked = _attempt(lambda: rendered(messages[:place], add_generation_prompt=True))
    said = _attempt(lambda: rendered(messages[: place + 1]))
    if asked and said and text.startswith(said) and said.startswith(asked):
        return len(asked), len(said)
    # The template renders a message differently in a longer conversation: search for its content.
    content = messages[place].get("content")
    marked = {**messages[place], "content": ANSWER}
    before, mark, after = rendered([*messages[:place], marked, *messages[place + 1 :]]).partition(
        ANSWER
    )
    start, stop = len(before), len(text) - len(after)
    found = mark and text.startswith(before) and text.endswith(after) and start <= stop
    if not found or text[start:stop].strip() != str(content).strip():
        raise UserError(
            f"the chat template changes the text of message {place + 1}: mark the text to "
            f"train with {{% generation %}} in the template"
        )
    # Include the text that the template puts around the content of a last answer.
    alone = _attempt(lambda: rendered([*messages[:place], marked])) or ""
    head, _, ends = alone.partition(ANSWER)
    begins = head.removeprefix(asked) if asked and head.startswith(asked) else ""
    start -= len(begins) if before.endswith(begins) else 0
    same = (a == b for a, b in zip(after, ends, strict=False))
    return start, stop + sum(1 for _ in takewhile(bool, same))


def _attempt(render: Callable[[], Result]) -> Result | None:
    """Return a result of rendering a part of a conversation, or None if the template rejects it."""
    try:
        return render()
    except UserError:
        return None


def _rendered(template: str, messages: list[dict], names: dict[str, Any]) -> str:
    """Render messages, with marks around {% generation %} blocks."""
    messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
    names = {"add_generation_prompt": False, "tools": None, **names}
    try:
        return _compiled(template).render(messages=messages, documents=None, **names)
    except Exception as error:  # templates can raise any exception
        raise UserError(f"the chat template can't be applied: {error}") from error


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Remove the marks from a text. Return the text and the ranges of the blocks between marks."""
    first, *blocks = text.split(OPEN)
    text, spans = first, []
    for block in blocks:
        inside, _, after = block.partition(CLOSE)
        spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def _up_to_end(text: str, last: str) -> str:
    """Return a rendered text up to the end of its last message."""
    before, mark, after = text.rpartition(END.strip())
    if not mark or last.strip() not in before:
        raise UserError(
            "the rendered chat template does not contain the last message, which is to be continued"
        )
    return before if after.startswith(" ") else before.rstrip()


@lru_cache
def _compiled(source: str):
    """Compile a template in a sandbox, with the functions that transformers provides."""
    # here: a process that only tokenizes needs no jinja2
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks the text between {% generation %} and {% endgeneration %}."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        """Return JSON without the HTML escapes of Jinja's own filter."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    names: dict[str, Any] = environment.globals
    names["raise_exception"] = refuse
    names["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
