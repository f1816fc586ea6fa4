"""Generation in every layout: rows go through the stages in groups, and the last stage chooses
their tokens."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.generate.decoding import BeamSearch, Choice, GenerationSettings, Sampler
from megazoo.layers import KVCache
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.p2p import receive_from_stage, send_to_stage
from megazoo.parallel.stages import rank_of


def generate(
    model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    settings: GenerationSettings,
    *,
    use_cache: bool = True,
    streamer=None,
) -> torch.Tensor:
    """See `Model.generate`. model: a `megazoo.models.base.Model`."""
    ctx = model.ctx
    ctx.require_ranks()
    if model.num_labels:
        raise UserError("a classifier does not generate")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise UserError(
            f"input_ids are of shape {list(input_ids.shape)}, not [batch, at least one token]"
        )
    settings = settings.after(input_ids.shape[1])
    settings.check(model.config.vocab_size)
    _check(model, input_ids, attention_mask, settings)
    if streamer is not None and len(input_ids) * settings.rows_of_prompt > 1:
        raise UserError("a streamer takes one row, without beams or num_return_sequences")
    # of this replica
    mine = range(len(input_ids))[share_of(len(input_ids), ctx.dp_size, ctx.dp_rank)]
    use_cache = use_cache and model.can_cache(
        model.config, input_ids.shape[1] + settings.max_new_tokens
    )
    input_ids = input_ids.to(ctx.device)
    with _generating(model), torch.inference_mode():
        groups = _groups(model, input_ids, attention_mask, mine, settings, use_cache)
        _run(model, groups, settings.max_new_tokens, streamer)
    new = _new_tokens(model, groups, input_ids, settings)
    if streamer is not None:
        if not groups:  # another replica had the row
            for token in new.T:
                streamer.put(token)
        streamer.end()
    return torch.cat([input_ids.repeat_interleave(settings.num_return_sequences, 0), new], dim=1)


def _check(
    model, input_ids: torch.Tensor, mask: torch.Tensor | None, settings: GenerationSettings
) -> None:
    """Refuse prompts that can't be gone on from."""
    if mask is not None and mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask is of shape {list(mask.shape)}, input_ids of {list(input_ids.shape)}"
        )
    if mask is not None and not bool(mask[:, -1].all()):
        row = int((mask[:, -1] == 0).nonzero()[0, 0])
        raise UserError(f"row {row} ends with padding: pad prompts on the left")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= model.config.vocab_size:
        token = low if low < 0 else high
        raise UserError(f"token id {token} is outside the vocabulary of {model.config.vocab_size}")
    prompt, longest = input_ids.shape[1], model.longest_sequence(model.config)
    if prompt + settings.max_new_tokens > longest:
        left = (
            f"at most {longest - prompt} new ones fit" if prompt < longest else "shorten the prompt"
        )
        raise UserError(
            f"a prompt of {prompt} tokens and {settings.max_new_tokens} new ones exceed the model's "
            f"max-positions {longest}: {left}"
        )


class _Group:
    """Prompts, and the rows that go on from them, that go through the stages together, on this
    rank."""

    def __init__(
        self,
        model,
        input_ids,
        real: torch.Tensor | None,
        numbers: range,
        longest: int,
        settings,
        use_cache,
    ):
        self.numbers, self.copies, self.beams = (
            numbers,
            settings.rows_of_prompt,
            settings.num_beams > 1,
        )
        self.done, self.steps = False, 0
        self.input_ids, self.positions, self.segments = input_ids, None, None
        if real is not None:
            self.positions = (real.cumsum(1) - 1).clamp(min=0)
            self.segments = real.long() - 1  # padding is a segment of its own, -1
        self.longest = longest
        self.cache = (
            KVCache(
                len(model.layers), input_ids.shape[1] + settings.max_new_tokens - 1, self.copies
            )
            if use_cache
            else None
        )
        self.chooser = None
        if model.stages[-1].last:
            prompt = (settings, input_ids, real)
            self.chooser = BeamSearch(*prompt) if self.beams else Sampler(*prompt, numbers)

    @property
    def rows(self) -> int:
        """The rows that are chosen for: beams count."""
        return len(self.numbers) * self.copies

    def batch(self) -> MicroBatch:
        shape = tuple(self.input_ids.shape)
        tokens = {"position_ids": self.positions, "segments": self.segments}
        longest = self.longest + self.steps
        return MicroBatch(
            shape, self.input_ids, **tokens, longest=longest, cache=self.cache, last_only=True
        )

    def take(self, choice: Choice) -> None:
        """Go on with the chosen tokens."""
        self.done = choice.done
        if self.done:
            return
        if self.copies > 1 and self.steps == 0:  # from now on every beam, or copy, is a row
            for name in ("input_ids", "positions", "segments"):
                if (tensor := getattr(self, name)) is not None:
                    setattr(self, name, tensor.repeat_interleave(self.copies, 0))
        self.steps += 1
        tokens = choice.tokens[:, None]
        if self.segments is not None:
            self.segments = torch.cat([self.segments, torch.zeros_like(tokens)], dim=1)
        if self.cache is not None:
            self.input_ids = tokens
            self.positions = None if self.positions is None else self.positions[:, -1:] + 1
            if choice.sources is not None:
                self.cache.reorder(choice.sources)
            return
        earlier = self.input_ids if choice.sources is None else self.input_ids[choice.sources]
        self.input_ids = torch.cat([earlier, tokens], dim=1)
        if self.positions is not None:
            self.positions = torch.cat([self.positions, self.positions[:, -1:] + 1], dim=1)


def _groups(
    model, input_ids, mask, mine: range, settings: GenerationSettings, use_cache: bool
) -> list[_Group]:
    """This replica's rows, in as many groups as keep all stages busy."""
    count, groups = min(model.ctx.pp_size, len(mine)), []
    longest = input_ids.shape[1] if mask is None else int((mask != 0).sum(dim=1).max())
    for index in range(count):
        numbers = mine[share_of(len(mine), count, index)]
        rows = slice(numbers.start, numbers.stop)
        real = None if mask is None else mask[rows].to(input_ids.device) != 0
        real = None if real is None or bool(real.all()) else real
        groups.append(_Group(model, input_ids[rows], real, numbers, longest, settings, use_cache))
    return groups


def share_of(count: int, parts: int, index: int) -> slice:
    """The index-th of nearly equal parts, the first of which are the larger ones."""
    return slice(-(-count * index // parts), -(-count * (index + 1) // parts))


def _run(model, groups: list[_Group], steps: int, streamer) -> None:
    """Generate, until every group is done. Each stage takes the groups in turn: one computes while
    another travels."""
    ctx = model.ctx
    last = ctx.pp_size - 1
    sent = []  # tensors on their way, with their works

    def send(tensor: torch.Tensor, pp_rank: int) -> None:
        sent.append((send_to_stage(tensor, pp_rank, ctx), tensor))
        while len(sent) > 2 * len(groups) * ctx.pp_size:
            sent.pop(0)[0].wait()

    def choose(group: _Group, logits: torch.Tensor) -> None:
        group.choice = group.chooser.advance(logits.float())
        message = _message(group.choice) if last else None
        for pp_rank in range(last):
            send(message, pp_rank)

    for step in range(steps + 1):
        for stage in model.stages:
            for group in [group for group in groups if not group.done]:
                if step and stage is model.stages[0]:
                    choice = group.choice if ctx.pp_rank == last else _received(group, last, ctx)
                    if streamer is not None:
                        streamer.put(choice.tokens)
                    group.take(choice)
                    if group.done:
                        continue
                batch = group.batch()
                if stage.first:
                    x = batch.input_ids
                else:
                    before = rank_of(stage.index - 1, ctx.pp_size)
                    x = receive_from_stage(
                        (*batch.shape, model.hidden_size), model.dtype, before, ctx
                    )
                x = model.forward_stage(x, batch, stage)
                if group.cache is not None and stage is model.stages[-1]:
                    group.cache.advance(batch.shape[1])
                if stage.last:
                    choose(group, model.whole_logits(model.outputs(x, batch), batch)[:, -1])
                else:
                    send(x.contiguous(), rank_of(stage.index + 1, ctx.pp_size))
    for work, _ in sent:
        work.wait()


def _message(choice: Choice) -> torch.Tensor:
    """A choice as int64 [1 + rows (+ rows)]: done, tokens, sources."""
    done = torch.tensor([choice.done], dtype=torch.int64, device=choice.tokens.device)
    return torch.cat([done, choice.tokens] + ([] if choice.sources is None else [choice.sources]))


def _received(group: _Group, last: int, ctx) -> Choice:
    """The last stage's choice."""
    rows = group.rows
    message = receive_from_stage((1 + rows * (1 + group.beams),), torch.int64, last, ctx)
    return Choice(
        message[1 : 1 + rows], message[1 + rows :] if group.beams else None, bool(message[0])
    )


def _new_tokens(
    model, groups: list[_Group], input_ids: torch.Tensor, settings: GenerationSettings
) -> torch.Tensor:
    """What was generated, of all replicas, on every rank: int64 [batch, new]."""
    ctx, each = model.ctx, settings.num_return_sequences
    # and how many there are, first
    new = input_ids.new_zeros(len(input_ids) * each, 1 + settings.max_new_tokens)
    for group in groups if model.stages[-1].last else ():
        result = group.chooser.result()
        rows = new[group.numbers.start * each : group.numbers.stop * each]
        rows[:, 0] = result.shape[1]
        rows[:, 1:] = settings.padding
        rows[:, 1 : 1 + result.shape[1]] = result
    broadcast_from_stage(new, ctx.pp_size - 1, ctx)
    all_reduce(new, ctx.dp_group)  # each replica has its rows, and zeros
    return new[:, 1 : 1 + int(new[:, 0].max())]


@contextmanager
def _generating(model):
    """Within this block there is no dropout, and no sequence parallelism: one token can't be cut."""
    cut = [m for m in model.modules() if hasattr(m, "ctx") and m.ctx.sequence_parallel]
    contexts, whole = [module.ctx for module in cut], replace(model.ctx, sequence_parallel=False)
    for module in cut:
        module.ctx = whole
    try:
        with model.without_dropout():
            yield
    finally:
        for module, ctx in zip(cut, contexts, strict=True):
            module.ctx = ctx
