"""Sampling options of the programs that generate text, and the arguments of `Model.generate`."""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from megazoo.cli.inference import InferenceOptions
from megazoo.generate import GenerationSettings
from megazoo.models.base import Model
from megazoo.settings import unset
from megazoo.terminal import note_rank_0
from megazoo.tokenizer import Tokenizer
from megazoo.tokenizer.chat import ANSWER, ANSWERS

SAMPLING = ("temperature", "top_k", "top_p")


@dataclass
class SamplingOptions(InferenceOptions):
    """Sampling of tokens."""

    max_new_tokens: int = 128
    """Maximum number of new tokens."""
    temperature: Annotated[
        float | None, unset("FLOAT", "the model's, or greedy; 1 with --top-k or --top-p")
    ] = None
    """Sampling temperature: below 1 favors likely tokens, above 1 favors unlikely ones. 0: greedy.
    """
    top_k: Annotated[int | None, unset("INT", "all")] = None
    """Number of most likely tokens to sample from."""
    top_p: Annotated[float | None, unset("FLOAT", "1")] = None
    """Sample only from the most likely tokens whose probabilities add up to this value."""
    seed: int = 0
    """Random seed for sampling. The tokens are the same in any parallel layout."""
    repetition_penalty: Annotated[float | None, unset("FLOAT", "the model's, or 1")] = None
    """Penalty for tokens that already occurred; above 1 makes them less likely."""
    stop: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], unset("TEXT", "none")]] = ()
    """Text that ends an answer. The flag may be repeated."""


def sampling_settings(options: SamplingOptions, model: Model, tokenizer: Tokenizer) -> dict:
    """Return the arguments of `Model.generate`: the flags, and the tokens that end an answer.

    Tokens are sampled if --temperature, --top-k or --top-p is set and the temperature is not 0.
    Without these flags, they are chosen as generation_config.json says, with a note.
    """
    drawn = {name: getattr(options, name) for name in SAMPLING}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    settings: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "repetition_penalty": options.repetition_penalty,
        "seed": options.seed,
    }
    if drawn:
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **drawn}
        settings |= sampled if options.temperature != 0 else {"do_sample": False}
    elif getattr(options, "num_beams", 1) > 1:
        settings["do_sample"] = False
    elif model.generation.get("do_sample") is True:
        saved = GenerationSettings.of({}, model.generation)
        values = [f"{name} {getattr(saved, name)}" for name in SAMPLING]
        note_rank_0(
            f"tokens are sampled with {', '.join(values)}, as generation_config.json says; "
            "--temperature 0 is greedy"
        )
    ends = model.generation.get("eos_token_id", tokenizer.eos_token_id)
    if ends is None:
        ends = []
    settings["eos_token_id"] = [ends] if isinstance(ends, int) else list(ends)
    return settings | with_stops(options.stop, tokenizer)


def end_of_answers(tokenizer: Tokenizer, ends: list[int]) -> str | None:
    """Return the text with which the template ends an answer; None if it is one of the tokens
    `ends`, or empty."""
    messages = [{"role": "user", "content": "?"}, {"role": ANSWERS, "content": ANSWER}]
    tail = tokenizer.apply_chat_template(messages).rpartition(ANSWER)[2].strip()
    ids = tokenizer.encode(tail, add_special_tokens=False, parse_special=True)
    return None if not ids or ids[0] in ends else tail


def with_stops(stops: tuple[str, ...], tokenizer: Tokenizer) -> dict:
    """Return the arguments of `Model.generate` for texts that end an answer."""
    stops = tuple(stop for stop in stops if stop)
    return {"stop": stops, "tokenizer": tokenizer} if stops else {}
