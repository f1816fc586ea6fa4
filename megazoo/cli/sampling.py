"""How the programs that generate choose tokens: their options, and what `Model.generate` takes."""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from megazoo.cli.flags import unset
from megazoo.cli.inference import InferenceOptions
from megazoo.models.base import Model
from megazoo.tokenizer import Tokenizer


@dataclass
class SamplingOptions(InferenceOptions):
    """How tokens are chosen."""

    max_new_tokens: int = 128
    """Tokens of an answer at most."""
    temperature: Annotated[float | None, unset("FLOAT", "1")] = None
    """Divides the scores: below 1 for likelier tokens, above for others; 0 takes the likeliest."""
    top_k: Annotated[int | None, unset("INT", "all")] = None
    """Draw from so many of the likeliest tokens."""
    top_p: Annotated[float | None, unset("FLOAT", "1")] = None
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the draws: the same tokens in any layout."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that were there become less likely."""
    stop: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], unset("TEXT", "none")]] = ()
    """Text that ends an answer. It may be given several times."""


def sampling_settings(options: SamplingOptions, model: Model, tokenizer: Tokenizer) -> dict:
    """Return the arguments of `Model.generate`: those of the flags, and the tokens that end an
    answer. Tokens are drawn if a flag asks for it, and the temperature is not 0."""
    drawn = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    settings: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "repetition_penalty": options.repetition_penalty,
        "seed": options.seed,
    }
    if drawn and options.temperature != 0:
        settings |= {"do_sample": True, "top_k": 0, **drawn}
    ends = model.generation.get("eos_token_id", tokenizer.eos_token_id)
    if ends is None:
        ends = []
    settings["eos_token_id"] = [ends] if isinstance(ends, int) else list(ends)
    return settings | with_stops(options.stop, tokenizer)


def with_stops(stops: tuple[str, ...], tokenizer: Tokenizer) -> dict:
    """Return the arguments of `Model.generate` for texts that end an answer."""
    stops = tuple(stop for stop in stops if stop)
    return {"stop": stops, "tokenizer": tokenizer} if stops else {}
