"""Chat templates: a conversation becomes the text that its model was trained on, by the Jinja
template of the tokenizer's files, as with transformers."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from megazoo.errors import UserError

# Stands at the end of a message that is to go on. A template that trims messages takes its space.
END = "END-OF-THE-LAST-MESSAGE "


def render(
    template: str,
    messages: list[dict],
    special_tokens: dict[str, str],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Return the text of a conversation: messages with `role` and `content`.

    special_tokens: texts that the template may name, such as bos_token. add_generation_prompt: the
    text ends with what begins an answer. continue_final_message: it ends with the last message's
    content, for the model to go on with. UserError with the template's own words if it refuses the
    messages, and for a template that is no Jinja.
    """
    if not messages:
        raise UserError("a chat template needs at least one message")
    if add_generation_prompt and continue_final_message:
        raise UserError("add_generation_prompt and continue_final_message exclude each other")
    messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
    last = messages[-1].get("content")
    if continue_final_message:
        if not isinstance(last, str):
            raise UserError("the last message has no text to go on with")
        messages[-1] = {**messages[-1], "content": last + END}
    try:
        text = _compiled(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except Exception as error:  # of the template, whatever it is
        raise UserError(f"the chat template can't be applied: {error}") from error
    return _up_to_end(text, str(last)) if continue_final_message else text


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
        """Takes {% generation %}, which marks an answer for training, as a plain block."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

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
