"""Fine-tuning data becomes tokens: prompts with completions, and conversations, of which only the
answers carry a loss."""

from collections.abc import Iterator

from megazoo.tokenizer.base import Tokenizer

ROLE, CONTENT = "{role}", "{content}"
CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
ANSWERS = "assistant"  # the role whose words carry a loss


def encode_conversation(
    tokenizer: Tokenizer, value: dict, template: str
) -> tuple[list[int], list[int]]:
    """Return the token ids of an object with `prompt` and `completion`, or with `messages`, and
    its loss mask: 1 for each id that carries a loss.

    The ids are those of the whole text, so that an answer is cut as the tokenizer cuts it there; a
    token that prompt and completion share carries a loss. The tokenizer's bos goes before the text
    if it has one, the end of a document after it. template: what a message looks like, with {role}
    and {content}; what follows the content of an answer carries a loss with it. Only the template's
    special tokens are tokens; those in messages are refused. Raises ValueError for what can't be
    encoded.
    """
    chat = "messages" in value
    pieces = list(_messages(tokenizer, value["messages"], template) if chat else _completion(value))
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
    before, last_carries_loss = tokenizer.before, int(pieces[-1][1])
    return [*before, *ids, tokenizer.eod], [0] * len(before) + loss_mask + [last_carries_loss]


def _completion(value: dict) -> Iterator[tuple[str, bool]]:
    """Yield the prompt and the completion, and whether they carry a loss."""
    for key in ("prompt", "completion"):
        if not isinstance(value.get(key), str):
            raise ValueError(f"no text under {key!r}")
        yield value[key], key == "completion"


def _messages(tokenizer: Tokenizer, messages, template: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of the conversation's text, and whether they carry a loss."""
    before, after = template.split(CONTENT)
    if not isinstance(messages, list):
        raise ValueError("messages is no list")
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("a message has no role or no content")
        for text in (role, content):
            if tokenizer.encode(text) != tokenizer.encode(text, parse_special=False):
                raise ValueError(f"{text[:40]!r} has a special token's name in it")
        yield before.replace(ROLE, role), False
        yield content + after.replace(ROLE, role), role == ANSWERS


def _common(a: list[int], b: list[int]) -> int:
    """Return how many ids two lists have in common at their beginning."""
    return next(
        (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )
