"""Prompts from flags and files, and the output of answers."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megazoo.environment import is_rank_zero
from megazoo.errors import UserError
from megazoo.files import brief, regular_file, without_mark
from megazoo.terminal import print_rank_0
from megazoo.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


class Prompt(NamedTuple):
    """A prompt.

    text: text to encode. line: object that the prompt comes from, repeated by --output. shown:
    whether the text is printed before the answer.
    """

    text: str
    line: dict
    shown: bool = True


def read_prompts(file: Path, *, alone: bool = False) -> list[Prompt]:
    """Read the prompts of a text file, one per line, or `prompt` of each line of a JSONL file.

    `alone`: whether only this rank reads the file; it may be a pipe. UserError without a prompt.
    """
    if file.suffix == ".jsonl":
        prompts = []
        for number, line in _objects(file, alone):
            if not isinstance(line.get("prompt"), str):
                raise UserError(f"{file}, line {number}: it has no text under 'prompt'")
            prompts.append(Prompt(line["prompt"], line))
    else:
        lines = [line.removesuffix("\r") for line in _text(file, alone).split("\n")]
        texts = [line for line in lines if line]
        prompts = [Prompt(text, {"prompt": text}) for text in texts]
    if not prompts:
        raise UserError(f"{file} has no prompts")
    return prompts


def read_messages(file: Path, *, alone: bool = False) -> list[dict]:
    """Read the objects of a JSONL file, each with at least one message in `messages`.

    `alone`: whether only this rank reads the file; it may be a pipe. UserError without messages.
    """
    lines = []
    for number, line in _objects(file, alone):
        messages = line.get("messages")
        is_list = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
        if not is_list or not messages:
            raise UserError(f"{file}, line {number}: it has no list of objects under 'messages'")
        lines.append(line)
    if not lines:
        raise UserError(f"{file} has no messages")
    return lines


def prompt_of_messages(line: dict, tokenizer: Tokenizer) -> Prompt:
    """Return the prompt for an answer to the messages of a line, with the tokenizer's template."""
    text = tokenizer.apply_chat_template(
        line["messages"], tools=line.get("tools"), add_generation_prompt=True
    )
    return Prompt(text, line, shown=False)


def _objects(file: Path, alone: bool) -> list[tuple[int, dict]]:
    """Return the objects in the non-empty lines of a JSONL file, with their line numbers."""
    found = []
    for number, text in enumerate(_text(file, alone).split("\n"), 1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise UserError(f"{file}, line {number}: {brief(text)} is not a JSON object")
        found.append((number, value))
    return found


def _text(file: Path, alone: bool) -> str:
    try:
        return without_mark(regular_file(file, or_pipe=alone).read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file} can't be read: {reason}") from error


class Answers:
    """The JSONL file of --output, written by rank 0: one line per prompt, with answer or answers.

    Raises UserError before the model is built if the file can't be written. Its old contents remain
    until the first answer.
    """

    def __init__(self, file: Path):
        self.file, self.mode = file, "w"
        if is_rank_zero():
            self._write("", "a")

    def add(self, prompt: Prompt, answers: list[str]) -> None:
        if is_rank_zero():
            new = {"answer": answers[0]} if len(answers) == 1 else {"answers": answers}
            self._write(json.dumps({**prompt.line, **new}, ensure_ascii=False) + "\n", self.mode)
            self.mode = "a"

    def _write(self, text: str, mode: str) -> None:
        try:
            with regular_file(self.file).open(mode, encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError as error:
            raise UserError(f"--output {self.file}: {error.strerror}", exit_code=1) from error


class Printer:
    """Prints a prompt and then its answer token by token, without the tokens `ends` and the texts
    `stops` that end it. `text` is the printed text of the answer.

    Nothing is printed before the first token, so that an invalid prompt prints nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: list[int],
        ends: Collection[int],
        stops: tuple[str, ...] = (),
        *,
        prompt: str = "",
        skip_special_tokens: bool = False,
    ):
        self.stream = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self.ends, self.stops, self.prompt = ends, stops, prompt
        self.text, self.held, self.ended, self.over = "", "", False, False
        for token in ids:
            self.stream.put(token)

    def put(self, tokens: "torch.Tensor") -> None:
        self._print_prompt()
        token = int(tokens[0])
        self.ended = self.ended or token in self.ends
        if not self.ended:
            self._add(self.stream.put(token))

    def end(self) -> None:
        self._print_prompt()
        self._add(self.stream.end())
        self._print("" if self.over else self.held)
        print_rank_0()

    def _add(self, text: str) -> None:
        """Print the text that cannot be the beginning of a stop text."""
        self.held += text
        if self.over:
            return
        places = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if places:
            self.over, shown = True, min(places)
        else:
            kept = (
                length
                for stop in self.stops
                for length in range(1, len(stop))
                if self.held.endswith(stop[:length])
            )
            shown = len(self.held) - max(kept, default=0)
        self._print(self.held[:shown])
        self.held = self.held[shown:]

    def _print(self, text: str) -> None:
        self.text += text
        print_rank_0(text, end="")

    def _print_prompt(self) -> None:
        print_rank_0(self.prompt, end="")
        self.prompt = ""
