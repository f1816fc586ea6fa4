"""From logits to tokens: greedy choice, sampling and beam search, on the last stage, for one group
of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megazoo.errors import UserError
from megazoo.parallel.random import derive_seed

NOTHING = -1e9  # the score of a beam that is not there


@dataclass(frozen=True)
class GenerationSettings:
    """How to generate: the names and meanings are transformers'.

    max_new_tokens, min_new_tokens: of each row, without its prompt; 20 and 0 by default.
    max_length: instead of max_new_tokens, and with the prompt and its padding. do_sample: draw
    tokens, instead of taking the likeliest; then temperature, top_k (0 or None: all) and top_p
    apply, in this order. repetition_penalty: divides what is above 0, and multiplies what is below,
    of the tokens that a row has, its padding left out. no_repeat_ngram_size: no row has the same n
    tokens in succession twice, its prompt included and its padding left out; 0 for no such rule,
    which does not hold where it would forbid all tokens. num_beams: above 1 for beam search, with
    length_penalty, and early_stopping True, False or "never". num_return_sequences: of each prompt
    so many rows, one after the other: drawn independently, or the best of num_beams. eos_token_id:
    one id or several, of which each ends a row. pad_token_id: what comes after; the first of
    eos_token_id by default. stop: strings that end a row, once its new text, by the tokenizer, has
    one.
    seed: of the draws: a row's depend on it, the prompt's number, and which of the prompt's rows it
    is.
    """

    max_new_tokens: int | None = None
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
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    stop: str | Sequence[str] = ()
    tokenizer: object = None
    seed: int = 0

    def __post_init__(self):
        given = self.eos_token_id
        ids = () if given is None else torch.as_tensor(given).flatten().tolist()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        plain = {"eos_token_id": tuple(ids), "stop": tuple(stop for stop in stops if stop)}
        plain |= {"top_k": self.top_k or 0, "top_p": 1.0 if self.top_p is None else self.top_p}
        plain |= {"no_repeat_ngram_size": self.no_repeat_ngram_size or 0}
        plain |= {
            "num_return_sequences": 1
            if self.num_return_sequences is None
            else self.num_return_sequences
        }
        if self.max_new_tokens is not None and self.max_length is not None:
            raise UserError("max_new_tokens and max_length exclude each other: give one")
        if self.max_new_tokens is None and self.max_length is None:
            plain["max_new_tokens"] = 20
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        whole = (
            "min_new_tokens num_beams num_return_sequences no_repeat_ngram_size top_k seed".split()
        )
        for name in ("max_new_tokens" if self.max_length is None else "max_length", *whole):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise UserError(f"{name} {getattr(self, name)!r} is not a whole number")

    def after(self, prompt: int) -> "GenerationSettings":
        """The settings with max_new_tokens in place of max_length, after a prompt of so many
        tokens."""
        if self.max_length is None:
            return self
        if self.max_length <= prompt:
            raise UserError(
                f"max_length {self.max_length} leaves no new token after a prompt of {prompt}"
            )
        return replace(self, max_new_tokens=self.max_length - prompt, max_length=None)

    def check(self, vocab_size: int) -> None:
        """Raise UserError for a value that can't be."""
        wrong = {
            "max_new_tokens": self.max_new_tokens < 1,
            "min_new_tokens": not 0 <= self.min_new_tokens <= self.max_new_tokens,
            "temperature": not self.temperature > 0,
            "top_k": self.top_k < 0,
            "top_p": not 0 < self.top_p <= 1,
            "repetition_penalty": not self.repetition_penalty > 0,
            "no_repeat_ngram_size": self.no_repeat_ngram_size < 0,
            "num_beams": not 1 <= self.num_beams <= vocab_size // self.candidates,
            "num_return_sequences": self.num_return_sequences < 1,
            "early_stopping": self.early_stopping not in (True, False, "never"),
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise UserError(f"{name} {getattr(self, name)!r} is out of range")
        if self.do_sample and self.num_beams > 1:
            raise UserError("do_sample and num_beams above 1 exclude each other")
        at_most = (
            self.num_beams
            if self.num_beams > 1 or not self.do_sample
            else self.num_return_sequences
        )
        if self.num_return_sequences > at_most:
            what = f"num_return_sequences {self.num_return_sequences}"
            raise UserError(f"{what} needs do_sample, or num_beams of at least as many")
        if self.stop and self.tokenizer is None:
            raise UserError("stop needs the tokenizer, too")
        for token in (*self.eos_token_id, self.padding):
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"token {token} that ends or pads a row is outside the vocabulary of {vocab_size}"
                )

    @property
    def padding(self) -> int:
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_id[0] if self.eos_token_id else 0

    @property
    def rows_of_prompt(self) -> int:
        """Rows that go on from each prompt: beams, or what is drawn."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    @property
    def candidates(self) -> int:
        """For each beam: so many that, if all ends are among the best, as many beams as before
        still go on."""
        return max(2, 1 + len(self.eos_token_id))


@dataclass
class Choice:
    """What a group goes on with, several rows of each prompt in succession if several go on from
    it. tokens: int64 [rows]. sources: the row that each continues, [rows], if they move."""

    tokens: torch.Tensor
    sources: torch.Tensor | None
    done: bool


class _Chooser:
    """What both ways of choosing share: scores, and the ends of rows.

    prompt: int64 [prompts, tokens]; real: which of them are not padding, bool, or None for all.
    """

    def __init__(
        self, settings: GenerationSettings, prompt: torch.Tensor, real: torch.Tensor | None
    ):
        self.settings = settings
        self.prompt = prompt.repeat_interleave(settings.rows_of_prompt, 0)  # [rows, tokens]
        self.real = None if real is None else real.repeat_interleave(settings.rows_of_prompt, 0)
        self.step = 0  # new tokens
        self.ends = torch.tensor(settings.eos_token_id, dtype=torch.int64, device=prompt.device)
        self.seen: torch.Tensor | None = None  # bool [rows, vocabulary]
        # tokens that can hold one
        self.window = max((len(stop.encode()) for stop in settings.stop), default=0) + 4

    def _of_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [rows, vocabulary]; at first they are of the prompts."""
        return (
            logits.repeat_interleave(self.settings.rows_of_prompt, 0) if self.step == 0 else logits
        )

    def _adjusted(self, scores: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """scores [rows, vocabulary] after the repetition penalty, without ends that come too early
        and without tokens that would repeat an n-gram. new: int64 [rows, new tokens] so far."""
        s = self.settings
        if s.repetition_penalty != 1.0:
            if self.seen is None:
                padded = self._marked_prompt(scores.shape[-1])
                seen = scores.new_zeros(len(padded), scores.shape[-1] + 1, dtype=torch.bool)
                self.seen = seen.scatter_(1, padded, True)[:, :-1]
            penalised = torch.where(
                scores < 0, scores * s.repetition_penalty, scores / s.repetition_penalty
            )
            scores = torch.where(self.seen, penalised, scores)
        if self.step < s.min_new_tokens and len(self.ends):
            scores = scores.index_fill(-1, self.ends, -torch.inf)
        if s.no_repeat_ngram_size:
            tokens = torch.cat([self._marked_prompt(scores.shape[-1]), new], dim=1)
            left = scores.masked_fill(
                repeating(tokens, s.no_repeat_ngram_size, scores.shape[-1]), -torch.inf
            )
            scores = torch.where(left.isinf().all(dim=-1, keepdim=True), scores, left)
        return scores

    def _marked_prompt(self, padding: int) -> torch.Tensor:
        """The prompt with an id for its padding that no token has."""
        return self.prompt if self.real is None else self.prompt.masked_fill(~self.real, padding)

    def _see(self, tokens: torch.Tensor) -> None:
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)

    def _ended(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Which rows end with their newest token. tokens [...]; rows [..., new tokens], these the
        last of them."""
        ended = (tokens[..., None] == self.ends).any(dim=-1)
        if self.settings.stop:
            texts = map(
                self.settings.tokenizer.decode, rows[..., -self.window :].flatten(0, -2).tolist()
            )
            found = [any(stop in text for stop in self.settings.stop) for text in texts]
            ended = ended | torch.tensor(found, device=ended.device).view(ended.shape)
        return ended


class Sampler(_Chooser):
    """Greedy choice, or sampling. numbers: of the prompts in the whole batch, from which their
    rows' draws follow."""

    def __init__(
        self,
        settings: GenerationSettings,
        prompt: torch.Tensor,
        real: torch.Tensor | None,
        numbers: range,
    ):
        super().__init__(settings, prompt, real)
        s = settings
        self.tokens = prompt.new_full((len(self.prompt), s.max_new_tokens), s.padding)
        self.ended = torch.zeros(len(self.prompt), dtype=torch.bool, device=prompt.device)
        self.some_ended = self.all_ended = False
        if s.do_sample:
            draws = [
                torch.rand(
                    s.max_new_tokens,
                    generator=_generator(s.seed, number, copy),
                    dtype=torch.float64,
                )
                for number in numbers
                for copy in range(s.num_return_sequences)
            ]
            self.draws = torch.stack(draws).to(prompt.device)

    def advance(self, logits: torch.Tensor) -> Choice:
        """The next token of every row. logits: fp32 [rows, vocabulary], or at first [prompts,
        vocabulary]."""
        scores = self._adjusted(self._of_rows(logits), self.tokens[:, : self.step])
        if self.settings.do_sample:
            tokens = draw(keep_likely(scores, self.settings), self.draws[:, self.step])
        else:
            tokens = scores.argmax(dim=-1)
        if self.some_ended:
            tokens = tokens.masked_fill(self.ended, self.settings.padding)
        self.tokens[:, self.step] = tokens
        self.step += 1
        self._see(tokens)
        if len(self.ends) or self.settings.stop:
            ended = self._ended(tokens, self.tokens[:, : self.step])
            if ended.any():
                self.ended, self.some_ended = self.ended | ended, True
                self.all_ended = bool(self.ended.all())
        return Choice(tokens, None, self.all_ended or self.step == self.settings.max_new_tokens)

    def result(self) -> torch.Tensor:
        """The new tokens: int64 [rows, new], those that ended padded."""
        return self.tokens[:, : self.step]


def keep_likely(scores: torch.Tensor, settings: GenerationSettings) -> torch.Tensor:
    """Divide scores [rows, vocabulary] by the temperature and set those out of top_k or top_p to
    -inf."""
    scores = scores / settings.temperature
    if 0 < settings.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(settings.top_k).values[:, -1:], -torch.inf)
    if settings.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - settings.top_p
        unlikely[:, -1] = False
        scores = scores.masked_fill(unlikely.scatter(1, order, unlikely), -torch.inf)
    return scores


def draw(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at `uniform` [rows], float64 in [0, 1), of the probabilities' running sum: int64
    [rows].

    Not torch.multinomial, whose draws would depend on the device and on who else is in the batch.
    """
    sums = scores.double().softmax(dim=-1).cumsum(dim=-1)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]


def repeating(tokens: torch.Tensor, size: int, vocabulary: int) -> torch.Tensor:
    """Which tokens would make a row have some `size` tokens in succession twice: bool [rows,
    vocabulary].

    tokens: int64 [rows, tokens], of which `vocabulary` stands for padding.
    """
    banned = torch.zeros(len(tokens), vocabulary + 1, dtype=torch.bool, device=tokens.device)
    if tokens.shape[1] >= size:
        windows = tokens.unfold(1, size, 1)  # [rows, windows, size]
        newest = tokens[:, tokens.shape[1] + 1 - size :]
        alike = (windows[:, :, :-1] == newest[:, None]).all(dim=-1)
        banned.scatter_(1, windows[:, :, -1].masked_fill(~alike, vocabulary), True)
    return banned[:, :-1]


def _generator(seed: int, row: int, copy: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, "generate", row, copy))


class BeamSearch(_Chooser):
    """Beam search as transformers has it: of each prompt the best num_beams rows go on, and the
    best ended are kept."""

    def __init__(
        self, settings: GenerationSettings, prompt: torch.Tensor, real: torch.Tensor | None
    ):
        super().__init__(settings, prompt, real)
        rows, beams, device = len(prompt), settings.num_beams, prompt.device
        self.tokens = prompt.new_empty(rows, beams, 0)
        self.scores = torch.full((rows, beams), NOTHING, device=device)
        self.scores[:, 0] = 0  # all beams are alike at first: only one may have children
        self.kept = prompt.new_full((rows, beams, settings.max_new_tokens), settings.padding)
        self.kept_scores = torch.full((rows, beams), NOTHING, device=device)
        self.kept_lengths = torch.zeros(rows, beams, dtype=torch.int64, device=device)
        self.can_improve = torch.ones(rows, dtype=torch.bool, device=device)

    def advance(self, logits: torch.Tensor) -> Choice:
        """The next token of every beam. logits: fp32 [rows x beams, vocabulary], or at first [rows,
        vocabulary]."""
        s, (rows, beams) = self.settings, self.scores.shape
        scores = self._adjusted(
            self._of_rows(logits).log_softmax(dim=-1), self.tokens.flatten(0, 1)
        )
        vocabulary = scores.shape[-1]
        self.step += 1
        total = scores.view(rows, beams, vocabulary) + self.scores[:, :, None]
        best, index = total.flatten(1).topk(s.candidates * beams)
        beam, token = index // vocabulary, index % vocabulary  # [rows, candidates]
        tokens = torch.cat([_of_beams(self.tokens, beam), token[:, :, None]], dim=-1)
        ended = self._ended(token, tokens) | (self.step == s.max_new_tokens)

        self._keep(tokens, best, ended)
        self.scores, chosen = (best + ended * NOTHING).topk(beams)  # the best that go on
        self.tokens = _of_beams(tokens, chosen)
        first = torch.arange(0, rows * beams, beams, device=beam.device)[:, None]
        sources = (beam.gather(1, chosen) + first).flatten()
        if self.seen is not None:
            self.seen = self.seen[sources]
        self._see(self.tokens[:, :, -1].flatten())

        longest = (
            s.max_new_tokens if s.early_stopping == "never" and s.length_penalty > 0 else self.step
        )
        hope = self.scores[:, 0] / longest**s.length_penalty
        worst = torch.where(self._full(), self.kept_scores.amin(dim=1), NOTHING)
        self.can_improve &= hope > worst
        over = ~self.can_improve | self._full() if s.early_stopping is True else ~self.can_improve
        return Choice(self.tokens[:, :, -1].flatten(), sources, bool(over.all() | ended.all()))

    def _keep(self, tokens: torch.Tensor, best: torch.Tensor, ended: torch.Tensor) -> None:
        """Keep the rows that ended, if they are among the best num_beams and better than those kept
        before."""
        s, beams = self.settings, self.scores.shape[1]
        counts = ended & self.can_improve[:, None]
        counts[:, beams:] = False
        if s.early_stopping is True:
            counts &= ~self._full()[:, None]
        if not counts.any():
            return
        scores = torch.where(counts, best / self.step**s.length_penalty, 2 * NOTHING)
        padded = torch.nn.functional.pad(tokens, (0, s.max_new_tokens - self.step), value=s.padding)
        self.kept_scores, chosen = torch.cat([self.kept_scores, scores], 1).topk(beams)
        self.kept = _of_beams(torch.cat([self.kept, padded], 1), chosen)
        lengths = torch.cat(
            [self.kept_lengths, torch.full_like(best, self.step, dtype=torch.int64)], 1
        )
        self.kept_lengths = lengths.gather(1, chosen)

    def _full(self) -> torch.Tensor:
        """Rows of which num_beams have ended. bool [rows]."""
        return (self.kept_lengths > 0).all(dim=1)

    def result(self) -> torch.Tensor:
        """The best rows of each prompt: int64 [prompts x num_return_sequences, new], padded."""
        count = self.settings.num_return_sequences
        return self.kept[:, :count, : int(self.kept_lengths[:, :count].max())].flatten(0, 1)


def _of_beams(values: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """values [rows, beams, tokens] of the beams [rows, chosen]: [rows, chosen, tokens]."""
    return values.gather(1, beams[:, :, None].expand(-1, -1, values.shape[-1]))
