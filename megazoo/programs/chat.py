"""Chat with a megazoo checkpoint or a Hugging Face model, in the terminal or through a pipe.

$ megazoo chat HuggingFaceTB/SmolLM2-135M-Instruct
$ megazoo chat runs/a --tp 2 --system "Be brief." --temperature 0.7

Each input line is one message. Answers are printed token by token. The chat template of the model
formats the conversation. /reset starts a new conversation; /help lists the commands; /exit or the
end of input ends the program. Ctrl-C stops the current answer, or the program if there is none.
Only answers go to stdout. Decoding is greedy, unless generation_config.json of the model samples;
with --temperature, --top-k or --top-p, tokens are sampled.
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist

from megazoo.cli.flags import parse_flags
from megazoo.cli.inference import run_with_model
from megazoo.cli.prompts import Printer
from megazoo.cli.sampling import SamplingOptions, end_of_answers, sampling_settings, with_stops
from megazoo.data.conversations import as_jinja, only_template, template_of
from megazoo.environment import is_rank_zero
from megazoo.errors import UserError
from megazoo.models.base import Model
from megazoo.parallel.collectives import all_gather_objects, all_reduce
from megazoo.settings import Text, unset
from megazoo.terminal import note_rank_0
from megazoo.tokenizer import Tokenizer
from megazoo.tokenizer.chat import ANSWERS

RESET, EXIT, HELP = "/reset", "/exit", "/help"
COMMANDS = (
    f"{RESET} starts a new conversation, {HELP} prints this line, {EXIT} or Ctrl-D ends the chat, "
    "Ctrl-C stops an answer"
)


@dataclass
class Options(SamplingOptions):
    """Conversation and sampling."""

    system: Text = None
    """System message at the start of the conversation."""
    chat_template: Annotated[str | None, unset("chatml|TEXT|FILE", "the model's")] = None
    """Chat template: chatml, a .jinja file, or the text of one message with {role} and
    {content}."""
    max_new_tokens: int = 512
    """Maximum number of tokens per answer."""


class Interrupts:
    """Ctrl-C: stop the current answer; between answers, raise KeyboardInterrupt.

    Every rank gets the signal. A launcher of megazoo forwards it every time to ranks that also
    catch SIGUSR1.
    """

    def __init__(self):
        self.answering, self.came = False, False
        signal.signal(signal.SIGINT, self._take)
        signal.signal(signal.SIGUSR1, lambda *_: None)

    def _take(self, *_) -> None:
        if not self.answering and is_rank_zero():
            raise KeyboardInterrupt
        self.came = self.answering


class Chat:
    """A conversation. settings: arguments of `Model.generate`."""

    def __init__(self, model, tokenizer, settings: dict, system: str | None, halt: Callable):
        self.model, self.tokenizer, self.settings, self.halt = model, tokenizer, settings, halt
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.first)

    def answer(self, text: str) -> None:
        """Print the answer to a message.

        Raises:
            UserError: The conversation is too long, or the template raised an error. The
                conversation is then unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = torch.tensor(
            [self.tokenizer.encode(prompt, add_special_tokens=False, parse_special=True)]
        )
        room = self.model.longest_sequence(self.model.config) - ids.shape[1]
        if room < 1:
            raise UserError(
                f"the conversation has {ids.shape[1]} tokens, too many for this model: "
                f"type {RESET} to start a new one"
            )
        room = min(room, self.settings["max_new_tokens"])
        ends, stops = self.settings["eos_token_id"], self.settings.get("stop", ())
        printer = Printer(self.tokenizer, ids[0].tolist(), ends, stops, skip_special_tokens=True)
        settings = {**self.settings, "max_new_tokens": room, "halt": self.halt}
        self.model.generate(ids, streamer=printer, **settings)
        self.messages = [*messages, {"role": ANSWERS, "content": printer.text}]
        self.settings["seed"] += 1


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if sys.stdin.isatty() and options.source:
        note_rank_0(f"loading {options.source} ...")
    run_with_model(options, partial(chat_with, options), keep_on_interrupt=True)


def chat_with(options: Options, model: Model, tokenizer: Tokenizer) -> None:
    """Chat with a loaded model."""
    template = template_of(options.chat_template, tokenizer)
    template = template or only_template(tokenizer, "conversations")
    tokenizer.chat_template = as_jinja(template, tokenizer)
    settings = sampling_settings(options, model, tokenizer)
    if end := end_of_answers(tokenizer, settings["eos_token_id"]):
        settings |= with_stops((*options.stop, end), tokenizer)
    interrupts, ctx = Interrupts(), model.ctx

    def halt() -> bool:
        """Return whether Ctrl-C was pressed; the same on all ranks of the last stage."""
        came = torch.tensor(int(interrupts.came), device=ctx.device)
        all_reduce(came, ctx.tp.group)
        return bool(came)

    chat = Chat(model, tokenizer, settings, options.system, halt)
    if sys.stdin.isatty():
        note_rank_0(COMMANDS)
    converse(chat, interrupts)
    if dist.is_initialized():
        dist.destroy_process_group()


def converse(chat: Chat, interrupts: Interrupts) -> None:
    """Answer messages line by line until the end of input. If a message is invalid, print why."""
    # the other ranks wait for input
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
            elif text == HELP:
                note_rank_0(COMMANDS)
            elif text:
                chat.answer(text)
        except UserError as error:
            note_rank_0(f"({error})")
        interrupts.answering = False


def read_line() -> str | None:
    """Read a line; "" at the end of input, None after Ctrl-C."""
    try:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return None
