"""Formats of fine-tuning data: convert an object of a file to a conversation, or to a prompt and a
completion.

A format is a function in `FORMATS`. The keys of an object decide which one reads it.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megazoo.errors import any_of
from megazoo.files import brief
from megazoo.tokenizer.chat import ANSWERS

# Roles by their names in ShareGPT.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), ANSWERS),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
CALLS = ("tool_calls", "function_call")  # keys of a message that may have no content
MARKS = ("weight", "train", "training")  # keys of a message that remove its loss
NEEDED = (
    "it needs text, or prompt and completion, or messages, or conversations, or instruction and "
    "output"
)
SHOWN = 20  # keys that an error lists
SAFE = re.compile(r"[A-Za-z0-9_ .-]{1,40}")  # keys that can be printed in a command
QUESTIONS = ("question", "prompt", "instruction", "query", "user", "human", "input")
REPLIES = ("answer", "response", "completion", "output", "assistant", "reply", "target")


class Conversation(NamedTuple):
    """Messages with `role` and `content`.

    Attributes:
        messages: as transformers' `apply_chat_template` accepts them.
        trained: for each message, whether it carries a loss if the assistant wrote it.
        tools: value of `tools` in the chat template, or None.
    """

    messages: list[dict]
    trained: list[bool]
    tools: list | None = None


class Completion(NamedTuple):
    """A text and its continuation, which carries the loss."""

    prompt: str
    completion: str


class Preference(NamedTuple):
    """Two answers to the same prompt."""

    chosen: "Conversation | Completion"
    rejected: "Conversation | Completion"


Example = Conversation | Completion


def read_example(value: dict) -> Example:
    """Convert an object to the conversation, or the prompt and completion, that it contains.

    Raises:
        ValueError: its keys belong to no format of fine-tuning data, or a value is not valid.
    """
    read = reader_for(given_keys(value))
    if read is None:
        if "text" in value:
            raise ValueError("it has only text, but the file begins with a conversation")
        raise ValueError(keys_error(value))
    return read(value)


def given_keys(value: dict) -> list[str]:
    """Return the keys of an object, except those that are null."""
    return [key for key, part in value.items() if part is not None]


def reader_for(keys: Iterable[str]) -> Callable[[dict], Example] | None:
    """Return the function that reads objects with these keys; None if they are texts, or belong to
    no format."""
    found = set(keys)
    return next((read for needed, read in FORMATS if needed <= found), None)


def is_conversation(value: dict) -> bool:
    """Return whether an object needs a chat template."""
    read = reader_for(given_keys(value))
    return read is not None and (read is not _of_completion or isinstance(value["prompt"], list))


def is_preference(value: dict) -> bool:
    """Return whether an object has an answer that was chosen and one that was rejected."""
    return {"chosen", "rejected"} <= {*given_keys(value)}


def keys_error(value: dict, *, json_file: bool = True) -> str:
    """Return the end of an error for an object of no format: its keys, and a command that converts
    such objects. json_file: it is in a JSON file, which the command can read."""
    if is_preference(value):
        return f"it has preferences: use --loss dpo; {keys_of(value)}"
    if not json_file:
        return f"{NEEDED}; {keys_of(value)}"
    return (
        f"{NEEDED}; {keys_of(value)}. To convert the file, for example: "
        f"jq -c '{_conversion(value)}' FILE > NEW.jsonl"
    )


def keys_of(value: dict) -> str:
    """Return a text that lists the keys of an object."""
    found = ", ".join(brief(key) for key in list(value)[:SHOWN]) or "none"
    more = ", ..." if len(value) > SHOWN else ""
    return f"its keys are: {found}{more}"


def _conversion(value: dict) -> str:
    """Return a filter of jq that converts a file of such objects, an array or not."""
    if any(needed <= value.keys() for needed in ({"role", "content"}, {"from", "value"})):
        return "{messages: .}"  # the array is one conversation
    return f"(arrays | .[]), objects | {_conversion_of_object(value)}"


def _conversion_of_object(value: dict) -> str:
    """Return a filter of jq that converts an object to a known format, with its own keys."""
    names = [key for key in value if SAFE.fullmatch(key)]
    texts = [name for name in names if isinstance(value[name], str)]
    for name in names:
        each = value[name][0] if isinstance(value[name], list) and value[name] else None
        if isinstance(each, dict) and {"role", "from"} & each.keys():
            return f'{{messages: ."{name}"}}'
        if isinstance(each, dict) and len(texts) < 2:
            return f'."{name}"[]'
    if len(texts) == 1:
        return f'{{text: ."{texts[0]}"}}'
    asked = _first_like(QUESTIONS, texts) or "QUESTION"
    rest = [name for name in texts if name != asked]
    said = _first_like(REPLIES, rest) or "ANSWER"
    return (
        f'{{messages: [{{role: "user", content: ."{asked}"}}, '
        f'{{role: "assistant", content: ."{said}"}}]}}'
    )


def _first_like(words: tuple[str, ...], names: list[str]) -> str | None:
    """Return the name that contains the earliest of the words; otherwise the first name."""
    found = (name for word in words for name in names if word in name.lower())
    return next(found, names[0] if names else None)


def _of_messages(value: dict) -> Conversation:
    """Read `messages`, and optionally `tools`."""
    return Conversation(*_messages(value, "messages"), _tools(value))


def _of_completion(value: dict) -> Example:
    """Read `prompt` and `completion`: two texts, or two lists of messages. Only the completion
    carries a loss."""
    kinds = {type(value[key]) for key in ("prompt", "completion")}
    if kinds == {list}:
        prompt, _ = _messages(value, "prompt")
        completion, trained = _messages(value, "completion")
        return Conversation(prompt + completion, [False] * len(prompt) + trained, _tools(value))
    if list in kinds and str in kinds:
        raise ValueError("prompt and completion must be two texts, or two lists of messages")
    return Completion(_text(value, "prompt"), _text(value, "completion"))


def _of_sharegpt(value: dict) -> Conversation:
    """Read `conversations` of ShareGPT, and optionally `system` and `tools`."""
    messages, trained = _messages(value, "conversations")
    for message in messages:
        role = message.get("role")
        if isinstance(role, str):
            message["role"] = ROLES.get(role.lower(), role)
    system = _system(value)
    return Conversation(system + messages, [True] * len(system) + trained, _tools(value))


def _of_alpaca(value: dict) -> Conversation:
    """Read `instruction` and `output` of Alpaca, and optionally `input`, `system` and `history`, a
    list of earlier instructions with their outputs."""
    history = value.get("history") or []
    pairs = isinstance(history, list) and all(
        isinstance(pair, list) and [type(each) for each in pair] == [str, str] for pair in history
    )
    if not pairs:
        raise ValueError("history is not a list of pairs of texts")
    more = _text(value, "input") if value.get("input") is not None else ""
    asked = _text(value, "instruction") + (f"\n\n{more}" if more else "")
    messages = _system(value)
    for question, answer in (*history, (asked, _text(value, "output"))):
        messages += [_message("user", question), _message(ANSWERS, answer)]
    return Conversation(messages, [True] * len(messages))


def read_preference(value: dict) -> Preference:
    """Read `chosen` and `rejected`, with or without `prompt`: texts, or lists of messages.

    Without a prompt it is the common beginning of both, as in TRL; also if the prompt is a text and
    the answers are lists of messages.

    Raises:
        ValueError: an answer is missing, or is neither.
    """
    if not is_preference(value):
        raise ValueError(f"it has no chosen and rejected answers; {keys_of(value)}")
    answers = {key: value[key] for key in ("chosen", "rejected")}
    prompt, kinds = value.get("prompt"), {type(answer) for answer in answers.values()}
    if kinds == {list} and isinstance(prompt, str):
        prompt = None
    if kinds not in ({str}, {list}) or (prompt is not None and {type(prompt)} != kinds):
        raise ValueError("prompt, chosen and rejected must be texts, or lists of messages")
    if prompt is None:
        shared = _shared(*answers.values())
        prompt = answers["chosen"][:shared]
        answers = {key: answer[shared:] for key, answer in answers.items()}
    made = (
        _of_completion({**value, "prompt": prompt, "completion": answer})
        for answer in answers.values()
    )
    return Preference(*made)


def _shared(chosen: str | list, rejected: str | list) -> int:
    """Return the length of the common beginning of two answers, which leaves a part of both. In
    texts it ends before a space."""
    most = max(0, min(len(chosen), len(rejected)) - 1)
    pairs = enumerate(zip(chosen[:most], rejected[:most], strict=True))
    end = next((n for n, (one, other) in pairs if one != other), most)
    return end - 1 if isinstance(chosen, str) and end and chosen[end - 1] == " " else end


# The keys that an object must have, and the function that reads it; None for texts. The first
# format whose keys it has decides.
FORMATS: tuple[tuple[frozenset[str], Callable[[dict], Example] | None], ...] = (
    (frozenset({"messages"}), _of_messages),
    (frozenset({"prompt", "completion"}), _of_completion),
    (frozenset({"text"}), None),
    (frozenset({"conversations"}), _of_sharegpt),
    (frozenset({"instruction", "output"}), _of_alpaca),
)


def _messages(value: dict, key: str) -> tuple[list[dict], list[bool]]:
    """Return the messages under a key, without marks, and whether each carries a loss."""
    given = value[key]
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ValueError(f"{key} is not a list of objects")
    messages, trained = [], []
    for number, each in enumerate(given, 1):
        trained.append(all(_carries_loss(each, mark, number) for mark in MARKS))
        message = {name: part for name, part in each.items() if name not in MARKS}
        if message.get("role") is None and "from" in message:
            role = message.pop("from")
            if not isinstance(role, str) or role.lower() not in ROLES:
                raise ValueError(
                    f"message {number} is from {brief(role)}, which is not supported: use "
                    f"{any_of(ROLES)}"
                )
            message["role"] = ROLES[role.lower()]
        if message.get("content") is None and isinstance(message.get("value"), str):
            message["content"] = message.pop("value")
        if message.get("content") is None and not any(map(message.get, CALLS)):
            raise ValueError(f"message {number} has no content; {keys_of(each)}")
        messages.append(message)
    return messages, trained


def _carries_loss(message: dict, mark: str, number: int) -> bool:
    """Return whether a mark of a message lets it carry a loss."""
    value = message.get(mark)
    if value is None:
        return True
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise ValueError(
            f"message {number} has {mark} {brief(value)}: use 0 or false (no loss), or 1 or true"
        )
    return bool(value)


def _message(role: str, content: Any) -> dict:
    return {"role": role, "content": content}


def _system(value: dict) -> list[dict]:
    """Return the system message under `system`, if there is one."""
    return [_message("system", _text(value, "system"))] if value.get("system") else []


def _tools(value: dict) -> list | None:
    """Return the list under `tools`, which may also be JSON in a text; None if it is missing."""
    tools = value.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools) if tools else None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools is not a list: {brief(tools)}")
    return tools


def _text(value: dict, key: str) -> str:
    if not isinstance(value[key], str):
        raise ValueError(f"no text under {key!r}")
    return value[key]
