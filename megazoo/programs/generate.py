"""Generate text with a model of any layout, or of Hugging Face's, in any layout.

$ megazoo generate runs/a --prompt "def main(" --max-new-tokens 100
$ torchrun --nproc-per-node 4 -m megazoo generate path/to/llama --tp 2 --pp 2 \\
      --prompts questions.txt --num-beams 3

Without --prompt and --prompts it asks for prompts, one a line, until the end of input. A single
answer appears as it comes, unless it is searched with beams. Without --temperature, --top-k and
--top-p the likeliest token is taken; with one of them, tokens are drawn.
"""

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import torch
import torch.distributed as dist

from megazoo.cli.flags import File, Text, parse_flags, unset
from megazoo.cli.inference import InferenceOptions, load_for_inference
from megazoo.environment import is_rank_zero
from megazoo.errors import UserError
from megazoo.files import regular_file, without_mark
from megazoo.parallel.collectives import all_gather_objects
from megazoo.terminal import print_rank_0

# Arguments of `Model.generate` that are flags of the same names.
SAME_NAMES = (
    "max_new_tokens",
    "min_new_tokens",
    "num_beams",
    "num_return_sequences",
    "length_penalty",
    "early_stopping",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "seed",
)


@dataclass
class Options(InferenceOptions):
    """What to generate, and how."""

    prompt: Text = None
    """What to go on from."""
    prompts: File = None
    """File of prompts, one a line."""
    batch_size: int = 8
    """Prompts of the file that are answered together."""
    max_new_tokens: int = 128
    """Tokens of an answer at most."""
    min_new_tokens: int = 0
    """And at least."""
    temperature: Annotated[float | None, unset("FLOAT", "1")] = None
    """Divides the scores: below 1 for likelier tokens, above for others."""
    top_k: Annotated[int | None, unset("INT", "all")] = None
    """Draw from so many of the likeliest tokens."""
    top_p: Annotated[float | None, unset("FLOAT", "1")] = None
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the draws: the same tokens in any layout."""
    num_beams: int = 1
    """Above 1: search with so many beams."""
    num_return_sequences: int = 1
    """Answers to each prompt: drawn, or the best of num-beams."""
    length_penalty: float = 1.0
    """Of beams: above 0 prefers longer answers."""
    early_stopping: bool = False
    """Of beams: end with the first num-beams answers."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that were there become less likely."""
    no_repeat_ngram_size: int = 0
    """Above 0: never repeat so many tokens in a row, the prompt's included."""
    stop: Text = None
    """Text that ends an answer."""


class Printer:
    """Prints a prompt, and then the text of its answer as the tokens come, up to one of those that
    end it. Nothing is printed before the first token, so that a refused prompt prints nothing."""

    def __init__(self, tokenizer, prompt: str, ids: list[int], ends: set[int]):
        self.stream, self.ends, self.over = tokenizer.stream(), ends, False
        self.prompt = prompt
        for token in ids:
            self.stream.put(token)

    def put(self, tokens: torch.Tensor) -> None:
        self._print_prompt()
        token = int(tokens[0])
        self.over = self.over or token in self.ends
        if not self.over:
            print_rank_0(self.stream.put(token), end="")

    def end(self) -> None:
        self._print_prompt()
        print_rank_0(self.stream.end())

    def _print_prompt(self) -> None:
        print_rank_0(self.prompt, end="")
        self.prompt = ""


class Session:
    """Answers prompts, and counts tokens and seconds. settings: arguments of `Model.generate`."""

    def __init__(self, model, tokenizer, settings: dict):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.ends = self.settings["eos_token_id"]
        self.tokens, self.seconds = 0, 0.0

    def answer(self, prompts: list[str]) -> None:
        """Print each prompt with what comes after it, as many times as there are answers."""
        ids, mask = self.tokenizer.encode_batch(prompts, padding_side="left")
        if not ids.numel():
            raise UserError(
                "the prompt is empty, and this tokenizer begins no text: give some text"
            )
        streamer, answers = None, self.settings["num_return_sequences"]
        if len(prompts) == answers == self.settings["num_beams"] == 1:
            streamer = Printer(self.tokenizer, prompts[0], ids[0].tolist(), set(self.ends))
        began = time.perf_counter()
        out = self.model.generate(ids, mask, streamer=streamer, **self.settings)[:, ids.shape[1] :]
        self.seconds += time.perf_counter() - began
        for number, new in enumerate(out.tolist()):
            length = next((i for i, token in enumerate(new) if token in self.ends), len(new))
            self.tokens += min(length + 1, len(new))
            if streamer is None:
                row = number // answers
                stream = self.tokenizer.stream()
                for token in ids[row].tolist():
                    stream.put(token)
                print_rank_0(prompts[row] + "".join(map(stream.put, new[:length])) + stream.end())

    def __str__(self) -> str:
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"{self.tokens:,} new tokens in {self.seconds:.2f} s: {rate:,.1f} tokens/s"


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.prompt is not None and options.prompts:
        raise UserError("--prompt and --prompts exclude each other")
    if options.batch_size < 1:
        raise UserError(f"batch-size {options.batch_size} must be at least 1")
    prompts = None
    if options.prompt is not None:
        prompts = [options.prompt]
    elif options.prompts:
        prompts = read_lines(options.prompts, options.one_rank)
    model, tokenizer = load_for_inference(options)
    session = Session(model, tokenizer, settings_of(options, model, tokenizer))
    if prompts is None:
        converse(session)
        prompts = []
    for first in range(0, len(prompts), options.batch_size):
        session.answer(prompts[first : first + options.batch_size])
    print_rank_0(f"\n{session}")
    if dist.is_initialized():
        dist.destroy_process_group()


def settings_of(options: Options, model, tokenizer) -> dict:
    """Return the arguments of `Model.generate`: the flags of the same names, and what ends an
    answer."""
    settings = {name: getattr(options, name) for name in SAME_NAMES}
    drawn = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if options.num_return_sequences > 1 and not drawn and options.num_beams == 1:
        raise UserError(
            f"num-return-sequences {options.num_return_sequences} needs --temperature, --top-k or "
            "--top-p, or --num-beams of at least as many"
        )
    if drawn:
        settings |= {"do_sample": True, "top_k": 0, **drawn}
    ends = model.generation.get("eos_token_id", tokenizer.eos_token_id)
    if ends is None:
        ends = []
    settings["eos_token_id"] = [ends] if isinstance(ends, int) else list(ends)
    if options.stop:
        settings |= {"stop": options.stop, "tokenizer": tokenizer}
    return settings


def converse(session: Session) -> None:
    """Answer what is typed, a line at a time; say why of a prompt that can't be answered."""
    ctx, seed = session.model.ctx, session.settings["seed"]
    # the other ranks wait for what is typed
    patient = ctx.new_cpu_group(timeout=timedelta(days=30))
    while True:
        line = None
        if is_rank_zero():
            print_rank_0("> ", end="")
            line = sys.stdin.readline()
        line = all_gather_objects(line, ctx, patient)[0]
        if not line:
            return
        if line.strip():
            try:
                session.answer([line.rstrip("\n")])
            except UserError as error:
                print_rank_0(f"({error})")
            seed += 1
            session.settings["seed"] = seed


def read_lines(file, alone: bool = False) -> list[str]:
    """Read the lines of a file that are not empty. alone: no other rank does; the file may be a
    pipe."""
    try:
        text = without_mark(regular_file(file, or_pipe=alone).read_bytes()).decode()
        lines = [line for line in text.splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file} can't be read: {reason}") from error
    if not lines:
        raise UserError(f"{file} has no prompts")
    return lines
