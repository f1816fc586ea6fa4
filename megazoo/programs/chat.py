"""Chat with a model of any layout, or of Hugging Face's, in the terminal or through a pipe.

$ megazoo chat HuggingFaceTB/SmolLM2-135M-Instruct
$ megazoo chat runs/a --tp 2 --system "Be brief." --temperature 0.7

Each line is a message, and the answer appears as it comes. The model's chat template renders the
conversation. /reset begins a new one, /exit or the end of input ends the program. Ctrl-C ends an
answer, and between answers the program. Only answers go to stdout.
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import torch
import torch.distributed as dist

from megazoo.cli.flags import Text, parse_flags, unset
from megazoo.cli.inference import load_for_inference
from megazoo.cli.sampling import SamplingOptions, sampling_settings, with_stops
from megazoo.data.conversations import as_jinja, template_of
from megazoo.environment import is_rank_zero
from megazoo.errors import UserError
from megazoo.parallel.collectives import all_gather_objects, all_reduce
from megazoo.terminal import note_rank_0, print_rank_0
from megazoo.tokenizer.chat import ANSWER, ANSWERS

RESET, EXIT = "/reset", "/exit"


@dataclass
class Options(SamplingOptions):
    """How to chat."""

    system: Text = None
    """Message of the system, before the others."""
    chat_template: Annotated[str | None, unset("TEXT|FILE", "the model's, or ChatML")] = None
    """What the conversation looks like: a template of Jinja in a .jinja file, or a message as text
    with {role} and {content}."""
    max_new_tokens: int = 512
    """Tokens of an answer at most."""


class Interrupts:
    """Ctrl-C: within an answer it ends this; elsewhere it raises KeyboardInterrupt.

    Every rank gets the signal. A launcher of megazoo passes it on each time to ranks that catch
    SIGUSR1, too.
    """

    def __init__(self):
        self.answering, self.came = False, False
        signal.signal(signal.SIGINT, self._take)
        signal.signal(signal.SIGUSR1, lambda *_: None)

    def _take(self, *_) -> None:
        if not self.answering and is_rank_zero():
            raise KeyboardInterrupt
        self.came = self.answering


class Printer:
    """Prints an answer as its tokens come, without special tokens and without the tokens `ends` and
    the texts `stops` that end it; `text` is what was printed."""

    def __init__(self, tokenizer, ids: list[int], ends: list[int], stops: tuple[str, ...]):
        self.stream, self.stops = tokenizer.stream(skip_special_tokens=True), stops
        self.ends = ends
        self.text, self.held, self.over = "", "", False
        for token in ids:
            self.stream.put(token)

    def put(self, tokens: torch.Tensor) -> None:
        token = int(tokens[0])
        if token not in self.ends:
            self._add(self.stream.put(token))

    def end(self) -> None:
        self._add(self.stream.end())
        self._print("" if self.over else self.held)
        print_rank_0()

    def _add(self, text: str) -> None:
        """Print what can't be the beginning of a stop."""
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


class Chat:
    """A conversation. settings: arguments of `Model.generate`."""

    def __init__(self, model, tokenizer, settings: dict, system: str | None, halt: Callable):
        self.model, self.tokenizer, self.settings, self.halt = model, tokenizer, settings, halt
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.first)

    def answer(self, text: str) -> None:
        """Print the answer to a message. UserError if there is no room for it, or the template
        refuses it: then the conversation is as it was."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = torch.tensor([self.tokenizer.encode(prompt, add_special_tokens=False)])
        room = self.model.longest_sequence(self.model.config) - ids.shape[1]
        if room < 1:
            raise UserError(
                f"the conversation has {ids.shape[1]} tokens, for which this model has no room: "
                f"{RESET} begins a new one"
            )
        room = min(room, self.settings["max_new_tokens"])
        ends, stops = self.settings["eos_token_id"], self.settings.get("stop", ())
        printer = Printer(self.tokenizer, ids[0].tolist(), ends, stops)
        settings = {**self.settings, "max_new_tokens": room, "halt": self.halt}
        self.model.generate(ids, streamer=printer, **settings)
        self.messages = [*messages, {"role": ANSWERS, "content": printer.text}]
        self.settings["seed"] += 1


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    model, tokenizer = load_for_inference(options, keep_on_interrupt=True)
    template = template_of(options.chat_template, tokenizer)
    tokenizer.chat_template = as_jinja(template, tokenizer)
    settings = sampling_settings(options, model, tokenizer)
    if end := end_of_answers(tokenizer, settings["eos_token_id"]):
        settings |= with_stops((*options.stop, end), tokenizer)
    interrupts, ctx = Interrupts(), model.ctx

    def halt() -> bool:
        """Say whether Ctrl-C came; the same on all ranks of the last stage."""
        came = torch.tensor(int(interrupts.came), device=ctx.device)
        all_reduce(came, ctx.tp.group)
        return bool(came)

    chat = Chat(model, tokenizer, settings, options.system, halt)
    converse(chat, interrupts)
    if dist.is_initialized():
        dist.destroy_process_group()


def end_of_answers(tokenizer, ends: list[int]) -> str | None:
    """Return the text by which the template ends an answer; None where that is a token that ends
    it, or nothing."""
    messages = [{"role": "user", "content": "?"}, {"role": ANSWERS, "content": ANSWER}]
    tail = tokenizer.apply_chat_template(messages).rpartition(ANSWER)[2].strip()
    ids = tokenizer.encode(tail, add_special_tokens=False)
    return None if not ids or ids[0] in ends else tail


def converse(chat: Chat, interrupts: Interrupts) -> None:
    """Answer line by line, until the end of input; say why of a message that has no answer."""
    # the other ranks wait for what is typed
    ctx = chat.model.ctx
    patient = ctx.new_cpu_group(timeout=timedelta(days=30))
    while True:
        line = read_line() if is_rank_zero() else None
        interrupts.answering = True
        line = all_gather_objects(line, ctx, patient)[0]
        interrupts.came = False
        text = (line or "").strip()
        if not line or text == EXIT:
            return
        try:
            if text == RESET:
                chat.reset()
            elif text:
                chat.answer(text)
        except UserError as error:
            note_rank_0(f"({error})")
        interrupts.answering = False


def read_line() -> str | None:
    """Read a line; None at the end of input, and if Ctrl-C comes instead."""
    try:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return None
