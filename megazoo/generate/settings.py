"""The settings of generation, with the names and meanings of transformers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megazoo.errors import UserError, advise, nearest
from megazoo.files import brief

WHOLE_NUMBERS = (
    "min_new_tokens",
    "min_length",
    "num_beams",
    "num_return_sequences",
    "no_repeat_ngram_size",
    "top_k",
    "seed",
)
COLDEST = 1e-30  # temperature: scores divided by less may overflow float32
MOST_ROWS = 1 << 20  # per prompt
NUMBERS = ("temperature", "top_p", "repetition_penalty", "length_penalty")
GENERATION = "generation_config.json"
# The settings that generation_config.json may set.
OF_FILES = (
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "do_sample", "temperature",
    "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size", "num_beams",
    "num_return_sequences", "length_penalty", "early_stopping", "eos_token_id", "pad_token_id",
)  # fmt: skip
OF_SAMPLES = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
# Settings of transformers that change the tokens and that megazoo lacks, with the values that
# change nothing.
NOT_APPLIED: dict[str, tuple] = {
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "encoder_repetition_penalty": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "stop_strings": ([],),
    "max_time": (),
    "watermarking_config": ({},),
}


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of `Model.generate`. The defaults are those without a generation_config.json.

    Attributes:
        max_new_tokens: maximum number of new tokens per row; default: 20.
        max_length: maximum number of tokens with the prompt and its padding, instead of
            max_new_tokens.
        min_new_tokens: minimum number of new tokens per row.
        min_length: minimum number of tokens with the prompt and its padding, unless min_new_tokens
            is set.
        do_sample: whether to sample tokens instead of taking the most likely ones. temperature,
            top_k and top_p then apply, in this order.
        temperature: divisor of the scores.
        top_k: sample from this number of most likely tokens; 0 or None: all.
        top_p: sample from the most likely tokens whose probabilities add up to this.
        repetition_penalty: divides positive scores, and multiplies negative ones, of tokens that
            are already in the row, without padding.
        no_repeat_ngram_size: n: no n tokens occur twice in a row, including the prompt, without
            padding; 0: off. It is ignored where it would forbid all tokens.
        num_beams: number of beams; above 1: beam search.
        num_return_sequences: number of rows per prompt, one after the other: independent samples,
            or the best beams.
        length_penalty: exponent of the length in beam search.
        early_stopping: when beam search ends: True, False or "never".
        eos_token_id: one id or several, each of which ends a row.
        pad_token_id: token after the end of a row; default: the first of eos_token_id.
        stop: strings; a row ends when its new text contains one of them. It needs the tokenizer.
        tokenizer: the tokenizer, for stop.
        halt: called after each token on the ranks of the last stage, which must agree: True ends
            all rows.
        seed: seed of the samples. The samples of a row depend on it, on the number of the prompt in
            the batch, and on the number of the row among those of its prompt.
    """

    max_new_tokens: int | Any = None  # an int after `after`
    max_length: int | None = None
    min_new_tokens: int = 0
    min_length: int = 0
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
    eos_token_id: tuple[int, ...] | Any = None  # stored as a tuple
    pad_token_id: int | None = None
    stop: tuple[str, ...] | Any = ()  # stored as a tuple
    tokenizer: Any = None
    halt: Callable[[], bool] | None = None
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens is not None and self.max_length is not None:
            raise UserError("max_new_tokens and max_length exclude each other: use one of them")
        ends = () if self.eos_token_id is None else self.eos_token_id
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self._set("eos_token_id", _ids("eos_token_id", ends))
        if self.pad_token_id is not None:
            _ids("pad_token_id", self.pad_token_id)
        if not all(isinstance(stop, str) for stop in stops):
            raise UserError(f"stop must be a string or several strings, got {self.stop!r}")
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
        if not isinstance(self.do_sample, bool):
            raise UserError(f"do_sample {self.do_sample!r} is neither True nor False")
        for name in NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UserError(f"{name} {value!r} is not a number")

    def _set(self, name: str, value) -> None:
        """Set an attribute during construction; afterwards the object is frozen."""
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: dict, saved: dict) -> "GenerationSettings":
        """Return settings from arguments. Those that are not given, or None, are as in `saved`, the
        values of generation_config.json. UserError for an unknown name."""
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise UserError(
                    f"generate has no argument {name}{nearest(name, names)}; supported: "
                    f"{', '.join(names)}"
                )
        given = {name: value for name, value in given.items() if value is not None}
        values = of_file(saved, given)
        settings = cls(**{**values, **given})
        only_in_file = {"do_sample", "num_beams"} & values.keys() - given.keys()
        if settings.do_sample and settings.num_beams > 1 and only_in_file:
            raise UserError(
                f"{min(only_in_file)} of {GENERATION}: do_sample and num_beams above 1 exclude "
                "each other; pass do_sample=False or num_beams=1"
            )
        return settings

    def limited(self, given: dict, prompt: int, longest: int) -> "GenerationSettings":
        """Return the settings, with lengths of generation_config.json that the model and the call
        have room for.

        given: the arguments of the call, which are not changed. prompt: its tokens. longest: tokens
        of the model's longest sequence.
        """
        changed: dict[str, Any] = {}
        if self.max_length is not None and given.get("max_length") is None:
            changed["max_length"] = min(self.max_length, longest)
        elif self.max_length is None and given.get("max_new_tokens") is None:
            changed["max_new_tokens"] = min(self.max_new_tokens, max(1, longest - prompt))
        settings = replace(self, **changed)
        most = settings.max_length
        new = settings.max_new_tokens if most is None else most - prompt
        if given.get("min_new_tokens") is None:
            settings = replace(settings, min_new_tokens=max(0, min(self.min_new_tokens, new)))
        return settings

    def after(self, prompt: int) -> "GenerationSettings":
        """Return the settings with max_new_tokens and min_new_tokens instead of max_length and
        min_length, for a prompt of this number of tokens."""
        settings = self
        if self.max_length is not None:
            if self.max_length <= prompt:
                raise UserError(
                    f"max_length {self.max_length} leaves no new token after a prompt of {prompt}"
                )
            settings = replace(self, max_new_tokens=self.max_length - prompt, max_length=None)
        least = settings.min_new_tokens or min(
            max(0, self.min_length - prompt), settings.max_new_tokens
        )
        return replace(settings, min_new_tokens=least, min_length=0)

    def within(self, vocab_size: int) -> "GenerationSettings":
        """Return the settings without the ends that are outside the vocabulary: no row has them."""
        ends = tuple(token for token in self.eos_token_id if 0 <= token < vocab_size)
        return replace(self, eos_token_id=ends, pad_token_id=self.padding)

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
                f"num_return_sequences {self.num_return_sequences} needs do_sample=True, or "
                f"num_beams of at least {self.num_return_sequences}"
            )
        if self.stop and self.tokenizer is None:
            raise UserError("stop also needs the argument tokenizer")

    @property
    def padding(self) -> int:
        """The token after the end of a row."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_id[0] if self.eos_token_id else 0

    @property
    def rows_of_prompt(self) -> int:
        """The number of rows per prompt: beams, or samples."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    @property
    def candidates(self) -> int:
        """The number of candidate tokens per beam: enough that, if all tokens that end a row are
        among them, the number of beams stays the same."""
        return max(2, 1 + len(self.eos_token_id))


def of_file(saved: dict, given: dict) -> dict:
    """Return the settings of generation_config.json that apply, by name.

    saved: the values of the file. given: the arguments. A length in the arguments replaces both of
    the file, and temperature, top_k and top_p apply only if tokens are sampled. Settings of
    transformers that megazoo lacks are not applied, with one warning that lists them. UserError for
    a value of another type.
    """
    values = {name: saved[name] for name in OF_FILES if saved.get(name) is not None}
    if "max_new_tokens" in values or {"max_new_tokens", "max_length"} & given.keys():
        values.pop("max_length", None)
    if "max_length" in given:
        values.pop("max_new_tokens", None)
    samples = given.get("do_sample", values.get("do_sample", False))
    if not samples:
        for name in ("temperature", "top_k", "top_p"):
            values.pop(name, None)
    try:
        GenerationSettings(**values)
    except UserError as error:
        raise UserError(f"{GENERATION}: {error}") from None
    names = NOT_APPLIED.keys() - (() if samples else OF_SAMPLES)
    missing = {name: saved[name] for name in sorted(names) if saved.get(name) is not None}
    missing = {name: value for name, value in missing.items() if value not in NOT_APPLIED[name]}
    if missing:
        listed = ", ".join(f"{name} {brief(value)}" for name, value in missing.items())
        advise(f"{GENERATION} sets {listed}: megazoo generates without it")
    return values


def _ids(name: str, value) -> tuple[int, ...]:
    """Return the token ids in a setting, one or several, as a tuple; UserError for other values."""
    try:
        ids = tuple(torch.as_tensor(value).flatten().tolist())
    except (TypeError, ValueError, RuntimeError):
        ids = (value,)
    if not all(type(token) is int for token in ids):
        raise UserError(f"{name} {value!r} is not the id of a token")
    return ids
