"""lm-evaluation-harness for models in any parallel layout: pass a `HarnessModel` to
`lm_eval.simple_evaluate`."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from megazoo.errors import UserError, check_number
from megazoo.evaluation.scoring import padded, score, windows
from megazoo.files import brief
from megazoo.generate.settings import GenerationSettings
from megazoo.terminal import count_bar
from megazoo.tokenizer.base import first_token

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
except ImportError as error:
    raise UserError(
        f"lm_eval can't be imported: {error} (in the clone of megazoo: pip install -e '.[eval]')"
    ) from error


@register_model("megazoo")
class HarnessModel(TemplateLM):
    """Answers requests of the harness in any parallel layout.

    The answers are those of the harness's HFLM with default options and a batch size of 1. Make the
    same calls on every rank. Each rank acts as the harness's only rank and gets all answers. A
    context that is too long is truncated on the left.

    Args:
        model: A language model.
        tokenizer: Its tokenizer.
        batch_size: Requests per batch; the longest requests are answered first.
        max_length: Maximum number of input tokens; by default the model's max_positions.
        max_gen_toks: Number of tokens to generate if the task does not set it.
        before_batch: Called before each batch, on every rank. Its exceptions end the evaluation.

    Raises:
        UserError: A continuation is empty or longer than max_length, or max_gen_toks leaves no room
            for a prompt.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        before_batch: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        if model.config.num_labels:
            raise UserError("a classifier has no likelihoods of texts: use a language model")
        max_length = model.config.max_positions if max_length is None else max_length
        for name, value in (("batch_size", batch_size), ("max_gen_toks", max_gen_toks)):
            check_number(name, value, 1, whole=True)
        check_number("max_length", max_length, 1, whole=True)
        if max_length > (longest := model.longest_sequence(model.config)):
            raise UserError(f"max_length {max_length} is more than the model's {longest}")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.max_length, self.max_gen_toks = max_length, max_gen_toks
        self.before_batch = before_batch

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text, or None."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: bos, otherwise eos."""
        return first_token(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests that a chat template was applied to."""
        return str(self.tokenizer.source).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text.

        Args:
            string: The text.
            add_special_tokens: By default special tokens are added unless the text begins with the
                prefix token.
        """
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not (prefix and string.startswith(prefix))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding produces it.

        Args:
            requests: Requests with the arguments (context, continuation).
            disable_tqdm: Ignored.
        """
        for request in requests:
            if not request.args[1]:
                raise UserError(f"the continuation of {brief(request.args[0])} is empty")
        return super().loglikelihood(requests, disable_tqdm=True)  # _answered shows a bar

    def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
        rows = []
        for (_, continuation), before, scored in requests:
            if not 0 < len(scored) <= self.max_length:
                raise UserError(
                    f"the continuation {brief(continuation)} has {len(scored)} tokens: it must "
                    f"have from 1 to {self.max_length}"
                )
            # a context of spaces only is scored as part of the continuation
            ids = [*(before or [self.prefix_token_id]), *scored][-self.max_length - 1 :]
            rows.append((ids, len(ids) - len(scored)))
        return self._scored(rows)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text.

        Each token is predicted once, in windows of max_length tokens.

        Args:
            requests: Requests with the argument (text,).
            disable_tqdm: Ignored.
        """
        rows, owners = [], []
        for owner, request in enumerate(requests):
            ids = [self.prefix_token_id, *self.tok_encode(request.args[0])]
            found = list(windows(ids, self.max_length, self.max_length))
            rows += found
            owners += [owner] * len(found)
        sums = [0.0] * len(requests)
        for owner, (likelihood, _) in zip(owners, self._scored(rows), strict=True):
            sums[owner] += likelihood
        return sums

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Generate a text after each context.

        Generation ends at the first string in the request's `until`, at the end of a text, or after
        max_gen_toks tokens. Other settings of `Model.generate`, such as temperature, do_sample and
        top_k, are supported. Sampling depends on torch's seed, which `simple_evaluate` sets.

        Args:
            requests: Requests with the arguments (context, settings).
            disable_tqdm: Ignored.
        """
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(place)
        results, batches = [""] * len(requests), count()
        for places in alike.values():
            contexts = [requests[place].args[0] for place in places]
            answer = self._writer(requests[places[0]].args[1], batches)
            for place, text in zip(places, self._answered(contexts, len, answer), strict=True):
                results[place] = text
        return results

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the tokenizer's chat template. If the template rejects it,
        system messages are removed.

        Args:
            chat_history: Messages with `role` and `content`.
            add_generation_prompt: End the text with the beginning of an answer. Otherwise the last
                message is continued.
        """
        render = partial(
            self.tokenizer.apply_chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        others = [message for message in chat_history if message["role"] != "system"]
        try:
            return render(chat_history)
        except UserError:
            if len(others) == len(chat_history):
                raise
            return render(others)

    def _scored(self, rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each row's ids after the context, and whether they are
        greedy.

        Args:
            rows: Pairs of ids and the number of leading ids that are context.
        """

        def answer(batch: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
            scores = score(self.model, *padded(batch))
            return list(zip(scores.log_likelihood.tolist(), scores.greedy.tolist(), strict=True))

        return self._answered(rows, lambda row: len(row[0]), answer)

    def _answered(self, items: list, length: Callable, answer: Callable) -> list:
        """Return the answers in the order of the items. Items of similar length are answered in one
        batch."""
        order = sorted(range(len(items)), key=lambda place: -length(items[place]))
        results = [None] * len(items)
        with count_bar(len(items), "answer", "requests") as bar:
            for first in range(0, len(order), self.batch_size):
                self.before_batch()
                places = order[first : first + self.batch_size]
                answers = answer([items[place] for place in places])
                for place, result in zip(places, answers, strict=True):
                    results[place] = result
                bar.update(len(places))
        return results

    def _writer(self, given: dict, batches: count) -> Callable[[list[str]], list[str]]:
        """Return a function that generates a text for each context.

        Args:
            given: Generation settings of a task.
            batches: Counter; its value is added to the seed of each batch.
        """
        room, settings = self._settings(given)

        def write(contexts: list[str]) -> list[str]:
            prompts = [(self.tok_encode(c) or [self.prefix_token_id])[-room:] for c in contexts]
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
            places, lengths = torch.arange(longest), torch.tensor([len(ids) for ids in prompts])
            real = (places >= longest - lengths[:, None]).long()
            seed = torch.initial_seed() + next(batches)
            rows = self.model.generate(ids, real, seed=seed, **settings)[:, longest:].tolist()
            return [self._text(row, settings["eos_token_id"], settings["stop"]) for row in rows]

        return write

    def _settings(self, given: dict) -> tuple[int, dict]:
        """Return the maximum number of prompt tokens, and the arguments of `Model.generate`.

        Args:
            given: Generation settings of a task.
        """
        settings: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        new, saved, eos = settings.pop("max_gen_toks"), self.model.generation, self.eot_token_id
        if new >= self.max_length:
            raise UserError(
                f"max_gen_toks {new} leaves no room for a prompt: the model supports "
                f"{self.max_length} tokens in total"
            )
        if not settings["do_sample"]:
            settings.pop("temperature", None)
        if "max_length" not in settings:
            settings["max_new_tokens"] = new
        ends = GenerationSettings.of({}, saved).eos_token_id
        ends = ends if eos is None or eos in ends else (*ends, eos)
        eos_text = "" if eos is None else self.tokenizer.decode([eos])
        settings |= {
            "stop": handle_stop_sequences(settings.pop("until"), eos_text or None),
            "tokenizer": self.tokenizer,
            "eos_token_id": ends,
            "pad_token_id": ends[0] if ends else None,
        }
        return self.max_length - new, settings

    def _text(self, ids: list[int], ends: Sequence[int], until: list[str]) -> str:
        """Return the text of new ids up to the first end token, truncated at the first of the
        strings in `until`."""
        stop = next((place for place, token in enumerate(ids, 1) if token in ends), len(ids))
        text = self.tokenizer.decode(ids[:stop], skip_special_tokens=True)
        return postprocess_generated_text(text, until, None)
