"""The settings of generation: the names and meanings are transformers'."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megazoo.errors import UserError, nearest

WHOLE_NUMBERS = (
    "min_new_tokens",
    "num_beams",
    "num_return_sequences",
    "no_repeat_ngram_size",
    "top_k",
    "seed",
)
COLDEST = 1e-30  # temperature: scores divided by less may be more than float32 holds
MOST_ROWS = 1 << 20  # of a prompt
NUMBERS = ("temperature", "top_p", "repetition_penalty", "length_penalty")


@dataclass(frozen=True)
class GenerationSettings:
    """How to generate.

    max_new_tokens, min_new_tokens: of each row, without its prompt; 20 and 0 by default.
    max_length: instead of max_new_tokens, and with the prompt and its padding.
    do_sample: draw tokens, instead of taking the likeliest; then temperature, top_k (0 or None:
    all) and top_p apply, in this order.
    repetition_penalty: divides the scores above 0, and multiplies those below, of the tokens that a
    row has, its padding left out.
    no_repeat_ngram_size: no row has the same n tokens in succession twice, its prompt included and
    its padding left out. 0: no such rule. Where it would forbid all tokens, it does not hold.
    num_beams: above 1 for beam search, with length_penalty, and early_stopping True, False or
    "never".
    num_return_sequences: so many rows of each prompt, one after the other: drawn independently, or
    the best of num_beams.
    eos_token_id: one id or several, of which each ends a row. pad_token_id: what comes after it; by
    default the first of eos_token_id.
    stop: strings; a row ends once its new text, by the tokenizer, has one of them.
    halt: is called after each token, on the ranks of the last stage, which must agree: True ends
    all rows.
    seed: of the draws. A row's draws depend on it, on the prompt's number in the batch, and on
    which of the prompt's rows it is.
    """

    max_new_tokens: int | Any = None  # an int, once `after` has said so
    max_length: int | None = None
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    eos_token_id: tuple[int, ...] | Any = None  # what is given becomes a tuple
    pad_token_id: int | None = None
    stop: tuple[str, ...] | Any = ()  # likewise
    tokenizer: Any = None
    halt: Callable[[], bool] | None = None
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens is not None and self.max_length is not None:
            raise UserError("max_new_tokens and max_length exclude each other: give one")
        ends = () if self.eos_token_id is None else self.eos_token_id
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self._set("eos_token_id", _ids("eos_token_id", ends))
        if self.pad_token_id is not None:
            _ids("pad_token_id", self.pad_token_id)
        if not all(isinstance(stop, str) for stop in stops):
            raise UserError(f"stop {self.stop!r} is not a string, nor several")
        self._set("stop", tuple(stop for stop in stops if stop))
        self._set("top_k", self.top_k or 0)
        self._set("top_p", 1.0 if self.top_p is None else self.top_p)
        self._set("no_repeat_ngram_size", self.no_repeat_ngram_size or 0)
        if self.num_return_sequences is None:
            self._set("num_return_sequences", 1)
        if self.max_new_tokens is None and self.max_length is None:
            self._set("max_new_tokens", 20)
        length = "max_new_tokens" if self.max_length is None else "max_length"
        for name in (length, *WHOLE_NUMBERS):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise UserError(f"{name} {value!r} is not a whole number")
        for name in NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UserError(f"{name} {value!r} is not a number")

    def _set(self, name: str, value) -> None:
        """Set an attribute while this is made; afterwards it is frozen."""
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: dict, saved: dict) -> "GenerationSettings":
        """Return the settings that are given, by name, with the ids of a generation_config.json for
        those that are not. UserError for an unknown name."""
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise UserError(
                    f"generate has no {name}{nearest(name, names)}; there are {', '.join(names)}"
                )
        ids = {name: saved[name] for name in ("eos_token_id", "pad_token_id") if name in saved}
        return cls(**{**ids, **given})

    def after(self, prompt: int) -> "GenerationSettings":
        """Return the settings with max_new_tokens in place of max_length, after a prompt of so many
        tokens."""
        if self.max_length is None:
            return self
        if self.max_length <= prompt:
            raise UserError(
                f"max_length {self.max_length} leaves no new token after a prompt of {prompt}"
            )
        return replace(self, max_new_tokens=self.max_length - prompt, max_length=None)

    def check(self, vocab_size: int) -> None:
        """Raise UserError for a value that is out of range, or excluded by another."""
        wrong = {
            "max_new_tokens": self.max_new_tokens < 1,
            "min_new_tokens": not 0 <= self.min_new_tokens <= self.max_new_tokens,
            "temperature": not COLDEST < self.temperature < math.inf,
            "top_k": self.top_k < 0,
            "top_p": not 0 < self.top_p <= 1,
            "repetition_penalty": not 0 < self.repetition_penalty < math.inf,
            "length_penalty": not math.isfinite(self.length_penalty),
            "no_repeat_ngram_size": self.no_repeat_ngram_size < 0,
            "num_beams": not 1 <= self.num_beams <= vocab_size // self.candidates,
            "num_return_sequences": not 1 <= self.num_return_sequences <= MOST_ROWS,
            "early_stopping": self.early_stopping not in (True, False, "never"),
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise UserError(f"{name} {getattr(self, name)!r} is out of range")
        if self.do_sample and self.num_beams > 1:
            raise UserError("do_sample and num_beams above 1 exclude each other")
        if self.num_return_sequences > self.num_beams and not self.do_sample:
            raise UserError(
                f"num_return_sequences {self.num_return_sequences} needs do_sample, "
                "or num_beams of at least as many"
            )
        if self.stop and self.tokenizer is None:
            raise UserError("stop needs the tokenizer, too")
        for token in (*self.eos_token_id, self.padding):
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"token {token} that ends or pads a row "
                    f"is outside the vocabulary of {vocab_size}"
                )

    @property
    def padding(self) -> int:
        """The token after the end of a row."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_id[0] if self.eos_token_id else 0

    @property
    def rows_of_prompt(self) -> int:
        """How many rows go on from each prompt: beams, or what is drawn."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    @property
    def candidates(self) -> int:
        """How many tokens of each beam are looked at: so many that, if all that end a row are among
        the best, as many beams as before still go on."""
        return max(2, 1 + len(self.eos_token_id))


def _ids(name: str, value) -> tuple[int, ...]:
    """Return the ids of tokens that a setting names, one or several; UserError if they are none."""
    try:
        ids = tuple(torch.as_tensor(value).flatten().tolist())
    except (TypeError, ValueError, RuntimeError):
        ids = (value,)
    if not all(type(token) is int for token in ids):
        raise UserError(f"{name} {value!r} is not the id of a token")
    return ids
