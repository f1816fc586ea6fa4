"""Choose tokens from logits: greedy, sampling or beam search, on the last stage, for one group of
rows."""

from dataclasses import dataclass

import torch

from megazoo.errors import UserError
from megazoo.generate.settings import GenerationSettings
from megazoo.parallel.random import derive_seed

NOTHING = -1e9  # the score of a missing beam


def not_finite(dtype: torch.dtype) -> UserError:
    """Return the error for a model whose logits are NaN or infinite. dtype: that of the model."""
    kind = str(dtype).removeprefix("torch.")
    hint = "" if dtype == torch.float32 else "; try --dtype float32, which has a larger range"
    return UserError(
        "the model's logits are not finite (NaN or infinite): "
        f"its weights are broken, or overflow in {kind}{hint}",
        exit_code=1,
    )


GOES_ON, OVER, BROKEN = range(3)  # states of a group after a choice


@dataclass
class Choice:
    """The next tokens of the rows of a group; the rows of one prompt are adjacent.

    tokens: int64 [rows]. sources: int64 [rows], the row that each one continues, or None if each
    continues itself. state: GOES_ON, OVER if all rows have ended, or BROKEN if the logits were not
    finite: an int, or an int64 tensor until the host needs it.
    """

    tokens: torch.Tensor
    sources: torch.Tensor | None
    state: torch.Tensor | int

    @property
    def done(self) -> bool:
        """Whether the group has ended, possibly before the maximum number of tokens."""
        return self._known_state() != GOES_ON

    @property
    def broken(self) -> bool:
        """Whether the tokens are invalid."""
        return self._known_state() == BROKEN

    def _known_state(self) -> int:
        self.state = int(self.state)
        return self.state

    def message(self) -> torch.Tensor:
        """Return the choice as a CPU tensor: int64 [1 + rows (+ rows)]."""
        state = torch.as_tensor(self.state, device=self.tokens.device).view(1)
        sources = [] if self.sources is None else [self.sources]
        message = torch.cat([state, self.tokens, *sources]).cpu()
        self.state = int(message[0])
        return message

    @staticmethod
    def empty_message(rows: int, sources: bool, device: torch.device) -> torch.Tensor:
        """Return a CPU tensor for a message to a rank with this device."""
        length = 1 + rows * (1 + sources)
        return torch.empty(length, dtype=torch.int64, pin_memory=device.type == "cuda")

    @classmethod
    def of(cls, message: torch.Tensor, sources: bool, device: torch.device) -> "Choice":
        """Return the choice in a message, on a device. sources: whether it has them."""
        rows = (len(message) - 1) // (1 + sources)
        there = message.to(device, non_blocking=True)
        return cls(there[1 : 1 + rows], there[1 + rows :] if sources else None, int(message[0]))


class Chooser:
    """Base class of the decoding methods: adjusts the scores and detects the rows that end.

    prompt: int64 [prompts, tokens]. real: which tokens are not padding, bool, or None for all.
    looks: whether the host reads the state of the group after each token. If False, it reads the
    state only at the end, and never waits for a GPU.
    """

    def __init__(
        self, settings: GenerationSettings, prompt: torch.Tensor, real: torch.Tensor | None
    ):
        self.settings = settings
        self.prompt = prompt.repeat_interleave(settings.rows_of_prompt, 0)  # [rows, tokens]
        self.real = None if real is None else real.repeat_interleave(settings.rows_of_prompt, 0)
        self.step = 0  # new tokens so far
        # 0 as long as all logits are finite, then NaN
        self._zero = torch.zeros((), device=prompt.device)
        self.can_end = bool(settings.eos_token_id or settings.stop or settings.halt)
        # On a CPU this is free, and logits that are not finite end the group immediately.
        self.looks = self.can_end or prompt.device.type == "cpu"
        self.ends = torch.tensor(settings.eos_token_id, dtype=torch.int64, device=prompt.device)
        self.seen: torch.Tensor | None = None  # the tokens in each row: bool [rows, vocabulary]
        # the newest tokens that may contain a stop string that ends now
        self.window = max((len(stop.encode()) for stop in settings.stop), default=0) + 4

    def choose(self, logits: torch.Tensor) -> Choice:
        """Choose the next token of every row: see `advance`. If the logits are not finite, the
        tokens are invalid, and the group ends if the host reads the state."""
        self._zero.add_(logits.amax(), alpha=0)  # 0 x inf is NaN, and NaN is the largest
        tokens, sources, over = self.advance(logits)
        if self.settings.halt and self.settings.halt():
            over = torch.ones_like(over)
        state = GOES_ON
        if self.looks:
            state = torch.where(self._zero == 0, over.all().long(), BROKEN)
        return Choice(tokens, sources, state)

    def advance(
        self, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Choose the next token of every row. Returns the tokens, their sources (see Choice), and a
        bool tensor of what has ended."""
        raise NotImplementedError

    def result(self) -> torch.Tensor:
        """Return the new tokens: int64 [rows, new]."""
        raise NotImplementedError

    @property
    def broken(self) -> bool:
        """Whether some logits were NaN or infinite."""
        return bool(self._zero != 0)

    def _of_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary]. The first logits are [prompts, vocabulary], and are
        repeated."""
        return (
            logits.repeat_interleave(self.settings.rows_of_prompt, 0) if self.step == 0 else logits
        )

    def _adjusted(self, scores: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return scores [rows, vocabulary] after the repetition penalty. End tokens before the
        minimum length and tokens that would repeat an n-gram get -inf. new: the tokens so far,
        int64 [rows, new tokens]."""
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
            new = new.clamp(0, scores.shape[-1])  # padding may be -1
            tokens = torch.cat([self._marked_prompt(scores.shape[-1]), new], dim=1)
            banned = repeating(tokens, s.no_repeat_ngram_size, scores.shape[-1])
            left = scores.masked_fill(banned, -torch.inf)
            scores = torch.where(left.isinf().all(dim=-1, keepdim=True), scores, left)
        return scores

    def _marked_prompt(self, padding: int) -> torch.Tensor:
        """Return the prompt with its padding replaced by the id `padding`, which no token has."""
        return self.prompt if self.real is None else self.prompt.masked_fill(~self.real, padding)

    def _see(self, tokens: torch.Tensor) -> None:
        """Record the new tokens of the rows."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)

    def _ended(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return which rows end with their newest token: bool [...]. tokens [...] are the newest;
        rows [..., new tokens] are all new tokens, these included."""
        ended = (tokens[..., None] == self.ends).any(dim=-1)
        if self.settings.stop:
            # padding, which may be -1, is only in rows that ended before
            newest = rows[..., -self.window :].clamp(min=0).flatten(0, -2).tolist()
            texts = map(self.settings.tokenizer.decode, newest)
            found = [any(stop in text for stop in self.settings.stop) for text in texts]
            ended = ended | torch.tensor(found, device=ended.device).view(ended.shape)
        return ended


class Sampler(Chooser):
    """Decode greedily, or by sampling.

    numbers: indices of the prompts in the whole batch; they determine the draws of their rows.
    """

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

    def advance(self, logits: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        """Choose the next token of every row. Returns the tokens, None for the sources (see
        Choice), and which rows have ended, bool [rows]. logits: fp32 [rows, vocabulary]; the first
        are [prompts, vocabulary]."""
        scores = self._adjusted(self._of_rows(logits), self.tokens[:, : self.step])
        if self.settings.do_sample:
            tokens = draw(keep_likely(scores, self.settings), self.draws[:, self.step])
        else:
            tokens = scores.argmax(dim=-1)
        # A row that has ended goes on with other tokens, because padding may have no embedding.
        kept = tokens.masked_fill(self.ended, self.settings.padding) if self.can_end else tokens
        self.tokens[:, self.step] = kept
        self.step += 1
        self._see(tokens)
        if self.can_end:
            self.ended |= self._ended(tokens, self.tokens[:, : self.step])
        return tokens, None, self.ended

    def result(self) -> torch.Tensor:
        """Return the new tokens: int64 [rows, new]; rows that ended are padded."""
        return self.tokens[:, : self.step]


def keep_likely(scores: torch.Tensor, settings: GenerationSettings) -> torch.Tensor:
    """Divide scores [rows, vocabulary] by the temperature, and set those outside of top_k or top_p
    to -inf."""
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
    """Return the tokens, int64 [rows], at which the cumulative probabilities reach `uniform`
    [rows], float64 in [0, 1).

    torch.multinomial is not used, because its draws depend on the device and on the other rows of
    the batch.
    """
    sums = scores.double().softmax(dim=-1).cumsum(dim=-1)
    tokens = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=scores.shape[-1] - 1)  # also if the sums are NaN


def repeating(tokens: torch.Tensor, size: int, vocabulary: int) -> torch.Tensor:
    """Return which tokens would repeat an n-gram of `size` tokens in a row: bool [rows,
    vocabulary].

    tokens: int64 [rows, tokens]; the id `vocabulary` stands for padding.
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


class BeamSearch(Chooser):
    """Beam search as in transformers: the best num_beams rows of each prompt are continued, and the
    best rows that ended are kept."""

    def __init__(
        self, settings: GenerationSettings, prompt: torch.Tensor, real: torch.Tensor | None
    ):
        super().__init__(settings, prompt, real)
        self.looks = True  # whether beams can improve
        rows, beams, device = len(prompt), settings.num_beams, prompt.device
        self.tokens = prompt.new_empty(rows, beams, 0)
        self.scores = torch.full((rows, beams), NOTHING, device=device)
        self.scores[:, 0] = 0  # all beams are the same at first: only one is continued
        self.kept = prompt.new_full((rows, beams, settings.max_new_tokens), settings.padding)
        self.kept_scores = torch.full((rows, beams), NOTHING, device=device)
        self.kept_lengths = torch.zeros(rows, beams, dtype=torch.int64, device=device)
        self.can_improve = torch.ones(rows, dtype=torch.bool, device=device)

    def advance(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose the next token of every beam. Returns the tokens, their sources (see Choice), and
        whether the search is over, bool. logits: fp32 [rows x beams, vocabulary]; the first are
        [rows, vocabulary]."""
        s, (rows, beams) = self.settings, self.scores.shape
        scores = self._of_rows(logits).log_softmax(dim=-1)
        scores = self._adjusted(scores, self.tokens.flatten(0, 1))
        vocabulary = scores.shape[-1]
        self.step += 1
        total = scores.view(rows, beams, vocabulary) + self.scores[:, :, None]
        best, index = total.flatten(1).topk(s.candidates * beams)
        beam, token = index // vocabulary, index % vocabulary  # [rows, candidates]
        tokens = torch.cat([_of_beams(self.tokens, beam), token[:, :, None]], dim=-1)
        ended = self._ended(token, tokens) | (self.step == s.max_new_tokens)

        self._keep(tokens, best, ended)
        self.scores, chosen = (best + ended * NOTHING).topk(beams)  # the best that are continued
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
        return self.tokens[:, :, -1].flatten(), sources, over.all() | ended.all()

    def _keep(self, tokens: torch.Tensor, best: torch.Tensor, ended: torch.Tensor) -> None:
        """Keep the rows that ended, if they are among the best num_beams and better than the rows
        kept before."""
        s, beams = self.settings, self.scores.shape[1]
        counts = ended & self.can_improve[:, None]
        counts[:, beams:] = False
        if s.early_stopping is True:
            counts &= ~self._full()[:, None]
        if counts.device.type == "cpu" and not counts.any():  # a GPU would have to wait
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
        """Return which prompts have num_beams ended rows: bool [rows]."""
        return (self.kept_lengths > 0).all(dim=1)

    def result(self) -> torch.Tensor:
        """Return the best rows of each prompt, padded: int64 [prompts x num_return_sequences,
        new]."""
        count = self.settings.num_return_sequences
        return self.kept[:, :count, : int(self.kept_lengths[:, :count].max())].flatten(0, 1)


def _of_beams(values: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """Select values [rows, beams, tokens] by the beams [rows, chosen]: [rows, chosen, tokens]."""
    return values.gather(1, beams[:, :, None].expand(-1, -1, values.shape[-1]))
