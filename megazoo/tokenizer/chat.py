"""Chat templates: a conversation becomes the text that its model was trained on, by the Jinja
template of the tokenizer's files, as with transformers."""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from typing import Any

from megazoo.errors import UserError

ANSWERS = "assistant"  # the role whose words are trained
# Stands at the end of a message that is to go on. A template that trims messages takes its space.
END = "END-OF-THE-LAST-MESSAGE "
ANSWER = "THE-WORDS-OF-AN-ANSWER"  # stands for them, to see where they are
OPEN, CLOSE = "[GENERATION-BLOCK-BEGINS]", "[GENERATION-BLOCK-ENDS]"
Span = tuple[int, int]


def render(
    template: str,
    messages: list[dict],
    special_tokens: dict[str, str],
    *,
    tools: list | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Return the text of a conversation: messages with `role` and `content`.

    special_tokens: texts that the template may name, such as bos_token. tools: what the template
    is given under that name. add_generation_prompt: the text ends with what begins an answer.
    continue_final_message: it ends with the last message's content, for the model to go on with.
    UserError with the template's own words if it refuses the messages, and for a template that is
    no Jinja.
    """
    if not messages:
        raise UserError("a chat template needs at least one message")
    if add_generation_prompt and continue_final_message:
        raise UserError("add_generation_prompt and continue_final_message exclude each other")
    last = messages[-1].get("content")
    if continue_final_message:
        if not isinstance(last, str):
            raise UserError("the last message has no text to go on with")
        messages = [*messages[:-1], {**messages[-1], "content": last + END}]
    names = {**special_tokens, "tools": tools, "add_generation_prompt": add_generation_prompt}
    text, _ = _without_marks(_rendered(template, messages, names))
    return _up_to_end(text, str(last)) if continue_final_message else text


def render_answers(
    template: str, messages: list[dict], special_tokens: dict[str, str], tools: list | None = None
) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and the characters of it that are trained: from, to.

    They are those of the template's {% generation %} blocks. A template without any trains what an
    answer adds: what follows the prompt for it, up to where its message ends. Arguments and errors
    as in `render`; UserError, too, if an answer can't be found in the text.
    """

    def rendered(messages: list[dict], **names) -> str:
        return _rendered(template, messages, {**special_tokens, "tools": tools, **names})

    text, spans = _without_marks(rendered(messages))
    if re.search(r"\{%-?\s*generation\b", template):
        return text, spans
    answers = [place for place, each in enumerate(messages) if each.get("role") == ANSWERS]
    return text, [_span_of(place, messages, text, rendered) for place in answers]


def _span_of(place: int, messages: list[dict], text: str, rendered: Callable[..., str]) -> Span:
    """Return where an answer is in the text of its conversation."""
    asked = _attempt(lambda: rendered(messages[:place], add_generation_prompt=True))
    said = _attempt(lambda: rendered(messages[: place + 1]))
    if asked and said and text.startswith(said) and said.startswith(asked):
        return len(asked), len(said)
    # A template that shows a message otherwise in a longer conversation: the words are looked for.
    content = messages[place].get("content")
    marked = {**messages[place], "content": ANSWER}
    before, mark, after = rendered([*messages[:place], marked, *messages[place + 1 :]]).partition(
        ANSWER
    )
    start, stop = len(before), len(text) - len(after)
    found = mark and text.startswith(before) and text.endswith(after) and start <= stop
    if not found or text[start:stop].strip() != str(content).strip():
        raise UserError(
            f"the chat template does not show message {place + 1} as it is: mark what is trained "
            "with {% generation %} in it"
        )
    # What the template puts around the words of the last answer goes with them here, too.
    alone = _attempt(lambda: rendered([*messages[:place], marked])) or ""
    head, _, ends = alone.partition(ANSWER)
    begins = head.removeprefix(asked) if asked and head.startswith(asked) else ""
    start -= len(begins) if before.endswith(begins) else 0
    same = (a == b for a, b in zip(after, ends, strict=False))
    return start, stop + sum(1 for _ in takewhile(bool, same))


def _attempt(render: Callable[[], str]) -> str | None:
    """Return a part of a conversation as the template shows it; None if it refuses the part."""
    try:
        return render()
    except UserError:
        return None


def _rendered(template: str, messages: list[dict], names: dict[str, Any]) -> str:
    """Return what a template makes of messages, with marks around {% generation %} blocks."""
    messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
    names = {"add_generation_prompt": False, "tools": None, **names}
    try:
        return _compiled(template).render(messages=messages, documents=None, **names)
    except Exception as error:  # of the template, whatever it is
        raise UserError(f"the chat template can't be applied: {error}") from error


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Take the marks out of a text; return where the blocks between them are."""
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
        raise UserError("the chat template does not show the last message, which is to go on")
    return before if after.startswith(" ") else before.rstrip()


@lru_cache
def _compiled(source: str):
    """Return a template in a sandbox, with what transformers gives to templates."""
    # here, so that a process that only tokenizes does without it
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks what is between {% generation %} and {% endgeneration %}."""

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
        """Return JSON as it is: Jinja's own filter writes it for HTML."""
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
