"""Generate text with a megazoo checkpoint or a Hugging Face model, in any parallel layout.

$ megazoo generate runs/a --prompt "def main(" --max-new-tokens 100
$ torchrun --nproc-per-node 4 -m megazoo generate path/to/llama --tp 2 --pp 2 \\
      --prompts questions.txt --num-beams 3

Without --prompt, --prompts and --messages, prompts are read from stdin, one per line. A single
answer is printed token by token, except with beam search. Only prompts and answers go to stdout;
the messages of --messages are not printed. Notes go to stderr. Decoding is greedy, unless
generation_config.json of the model samples; with --temperature, --top-k or --top-p, tokens are
sampled.
"""

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megazoo.cli.flags import parse_flags
from megazoo.cli.inference import run_with_model
from megazoo.cli.prompts import (
    Answers,
    Printer,
    Prompt,
    prompt_of_messages,
    read_messages,
    read_prompts,
)
from megazoo.cli.sampling import SamplingOptions, end_of_answers, sampling_settings, with_stops
from megazoo.environment import is_rank_zero
from megazoo.errors import UserError
from megazoo.models.base import Model
from megazoo.parallel.collectives import all_gather_objects
from megazoo.settings import File, Text
from megazoo.terminal import count_bar, note_rank_0, print_rank_0
from megazoo.tokenizer import Tokenizer

# Arguments of `Model.generate` that have flags with the same names.
SAME_NAMES = (
    "min_new_tokens",
    "num_beams",
    "num_return_sequences",
    "length_penalty",
    "early_stopping",
    "no_repeat_ngram_size",
)


@dataclass
class Options(SamplingOptions):
    """Prompts and decoding."""

    prompt: Text = None
    """Prompt text."""
    prompts: File = None
    """File of prompts: one per line, or JSONL with prompt in each line."""
    messages: File = None
    """JSONL file of conversations, with messages in each line. The chat template of the model
    formats them, and the model answers the last message."""
    output: File = None
    """JSONL file to write: the lines of the input, each with answer or answers. Nothing is printed.
    """
    batch_size: int = 8
    """Number of prompts of a file per batch."""
    min_new_tokens: int = 0
    """Minimum number of new tokens."""
    num_beams: int = 1
    """Number of beams; above 1: beam search."""
    num_return_sequences: int = 1
    """Number of answers per prompt: samples, or the best beams."""
    length_penalty: float = 1.0
    """Length penalty of beam search; above 0 prefers longer answers."""
    early_stopping: bool = False
    """Stop beam search as soon as --num-beams answers are complete."""
    no_repeat_ngram_size: int = 0
    """Length of token sequences that may not be repeated, including those in the prompt. 0: no
    limit."""


class Session:
    """Answers prompts, and counts tokens and seconds.

    settings: arguments of `Model.generate`. output: writer of answers; None prints them. plain:
    whether prompts are plain texts, to which the tokenizer adds its special tokens; otherwise they
    are conversations, whose answers have neither special tokens nor the text of `stop` at the end.
    """

    def __init__(self, model, tokenizer, settings: dict, output=None, plain: bool = True):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.output, self.plain = output, plain
        self.ends, self.stops = self.settings["eos_token_id"], self.settings.get("stop", ())
        self.tokens, self.seconds = 0, 0.0

    def answer(self, prompts: list[Prompt]) -> None:
        """Print each prompt with each of its answers, or write the answers to the output."""
        ids, mask = self.tokenizer.encode_batch(
            [prompt.text for prompt in prompts],
            padding_side="left",
            add_special_tokens=self.plain,
            parse_special=None if self.plain else True,  # a chat template writes special tokens
        )
        if not ids.numel() or not mask.any(dim=1).all():
            raise UserError(
                "the prompt is empty, and this tokenizer has no token that begins a text: use a "
                "prompt with some text"
            )
        streamer, count = None, self.settings["num_return_sequences"]
        if len(prompts) == count == self.settings["num_beams"] == 1 and not self.output:
            shown = prompts[0].text if prompts[0].shown else ""
            first, stops = ids[0].tolist(), () if self.plain else self.stops
            streamer = Printer(
                self.tokenizer,
                first,
                set(self.ends),
                stops,
                prompt=shown,
                skip_special_tokens=not self.plain,
            )
        began = time.perf_counter()
        out = self.model.generate(ids, mask, streamer=streamer, **self.settings)[:, ids.shape[1] :]
        self.seconds += time.perf_counter() - began
        answers = []
        for number, new in enumerate(out.tolist()):
            length = next((i for i, token in enumerate(new) if token in self.ends), len(new))
            self.tokens += min(length + 1, len(new))
            stream = self.tokenizer.stream(skip_special_tokens=not self.plain)
            for token in ids[number // count].tolist():
                stream.put(token)
            answer = "".join(map(stream.put, new[:length])) + stream.end()
            places = [] if self.plain else [answer.find(stop) for stop in self.stops]
            answers.append(answer[: min((place for place in places if place >= 0), default=None)])
        for row, prompt in enumerate(prompts):
            own = answers[row * count : (row + 1) * count]
            if self.output:
                self.output.add(prompt, own)
            elif streamer is None:
                for answer in own:
                    print_rank_0((prompt.text if prompt.shown else "") + answer)

    def __str__(self) -> str:
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"{self.tokens:,} new tokens in {self.seconds:.2f} s: {rate:,.1f} tokens/s"


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    prompts, messages = read_questions(options)
    output = Answers(options.output) if options.output else None
    run_with_model(options, partial(answer_all, options, prompts, messages, output))


def answer_all(
    options: Options,
    prompts: list[Prompt] | None,
    messages: list[dict] | None,
    output: Answers | None,
    model: Model,
    tokenizer: Tokenizer,
) -> None:
    """Answer the prompts, the lines with messages, or the lines of stdin if both are None."""
    settings = settings_of(options, model, tokenizer)
    if messages:
        prompts = [prompt_of_messages(line, tokenizer) for line in messages]
        if end := end_of_answers(tokenizer, settings["eos_token_id"]):
            settings |= with_stops((*options.stop, end), tokenizer)
    session = Session(model, tokenizer, settings, output, plain=not messages)
    if prompts is None:
        converse(session)
        prompts = []
    with count_bar(len(prompts) if output else 0, "generate", "prompts") as bar:
        for first in range(0, len(prompts), options.batch_size):
            session.answer(batch := prompts[first : first + options.batch_size])
            bar.update(len(batch) if output else 0)
    note_rank_0(str(session))
    if dist.is_initialized():
        dist.destroy_process_group()


def read_questions(options: Options) -> tuple[list[Prompt] | None, list[dict] | None]:
    """Return the prompts, or the lines with messages, of the flags; (None, None) for stdin."""
    given = [
        name for name in ("prompt", "prompts", "messages") if getattr(options, name) is not None
    ]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} exclude each other")
    if options.batch_size < 1:
        raise UserError(f"--batch-size {options.batch_size} must be at least 1")
    if options.messages:
        return None, read_messages(options.messages, alone=options.one_rank)
    if options.prompts:
        return read_prompts(options.prompts, alone=options.one_rank), None
    if options.prompt is None:
        return None, None
    return [Prompt(options.prompt, {"prompt": options.prompt})], None


def settings_of(options: Options, model, tokenizer) -> dict:
    """Return the arguments of `Model.generate`: the flags of the same names, the sampling settings,
    and the tokens and texts that end an answer."""
    settings = sampling_settings(options, model, tokenizer)
    settings |= {name: getattr(options, name) for name in SAME_NAMES}
    several = options.num_return_sequences > 1 and options.num_beams == 1
    if several and not settings.get("do_sample", model.generation.get("do_sample")):
        raise UserError(
            f"--num-return-sequences {options.num_return_sequences} needs --temperature, "
            f"--top-k or --top-p, or --num-beams {options.num_return_sequences} or more"
        )
    return settings


def converse(session: Session) -> None:
    """Answer prompts from stdin, one per line. If a prompt is invalid, print why."""
    ctx, seed = session.model.ctx, session.settings["seed"]
    # the other ranks wait for input
    patient = ctx.new_cpu_group(timeout=timedelta(days=30))
    while True:
        line = None
        if is_rank_zero():
            if sys.stdin.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        line = all_gather_objects(line, ctx, patient)[0]
        if not line:
            return
        if line.strip():
            try:
                text = line.rstrip("\n")
                session.answer([Prompt(text, {"prompt": text})])
            except UserError as error:
                if error.exit_code == 1:  # an error of the output, not of the prompt
                    raise
                note_rank_0(f"({error})")
            seed += 1
            session.settings["seed"] = seed
