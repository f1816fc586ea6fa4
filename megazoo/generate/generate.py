"""Generation works in every layout: rows go through the stages in groups, and the last stage
chooses their tokens."""

from collections import deque
from contextlib import contextmanager
from dataclasses import replace

import torch

from megazoo.engine.batch import ids_of, is_tensor
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.shares import share_of
from megazoo.errors import UserError
from megazoo.generate.decoding import BeamSearch, Choice, Sampler, not_finite
from megazoo.generate.settings import GenerationSettings
from megazoo.layers import KVCache
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.p2p import receive_from_stage, send_to_stage
from megazoo.parallel.stages import Stage, rank_of


def generate(
    model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    settings: GenerationSettings,
    *,
    use_cache: bool = True,
    streamer=None,
) -> torch.Tensor:
    """Generate as `Model.generate` says. model: a `megazoo.models.base.Model`."""
    ctx = model.ctx
    ctx.require_ranks()
    if model.num_labels:
        raise UserError("a classifier does not generate")
    input_ids = ids_of("input_ids", input_ids)
    is_tensor("attention_mask", attention_mask)
    if input_ids.dim() != 2 or not input_ids.numel():
        raise UserError(
            f"input_ids are of shape {list(input_ids.shape)}, not [batch, at least one token]"
        )
    settings = settings.after(input_ids.shape[1])
    settings.check(model.config.vocab_size)
    _check(model, input_ids, attention_mask, settings)
    if streamer is not None and len(input_ids) * settings.rows_of_prompt > 1:
        raise UserError("a streamer takes one row, without beams or num_return_sequences")
    mine = share_of(range(len(input_ids)), ctx.dp_size, ctx.dp_rank)  # this replica's rows
    length = input_ids.shape[1] + settings.max_new_tokens
    use_cache = use_cache and model.can_cache(model.config, length)
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
    """Refuse prompts that can't be continued."""
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
            f"a prompt of {prompt} tokens and {settings.max_new_tokens} new ones exceed "
            f"the model's max-positions {longest}: {left}"
        )


class _Group:
    """Prompts, and the rows that go on from them, that go through the stages together.

    numbers: of the prompts in the whole batch. input_ids, positions, segments: of the tokens that
    the next forward takes, int64 [rows, tokens], without a cache all of them; segments are of the
    cached tokens, too. longest: tokens of the whole batch's longest prompt. chooser: on the last
    stage alone; choice: what it chose last.
    """

    def __init__(
        self,
        model,
        input_ids: torch.Tensor,
        real: torch.Tensor | None,
        numbers: range,
        longest: int,
        settings: GenerationSettings,
        use_cache: bool,
    ):
        """real: which of the prompts' tokens are not padding, bool, or None for all."""
        self.numbers, self.longest = numbers, longest
        self.copies, self.beams = settings.rows_of_prompt, settings.num_beams > 1
        self.done, self.steps = False, 0
        self.input_ids, self.positions, self.segments = input_ids, None, None
        if real is not None:
            self.positions = (real.cumsum(1) - 1).clamp(min=0)
            self.segments = real.long() - 1  # padding is a segment of its own, -1
        self.cache = self.chooser = self.choice = None
        if use_cache:
            length = input_ids.shape[1] + settings.max_new_tokens - 1
            self.cache = KVCache(len(model.layers), length, self.copies)
        if model.stages[-1].last and self.beams:
            self.chooser = BeamSearch(settings, input_ids, real)
        elif model.stages[-1].last:
            self.chooser = Sampler(settings, input_ids, real, numbers)

    @property
    def rows(self) -> int:
        """The rows that are chosen for: beams count."""
        return len(self.numbers) * self.copies

    def batch(self) -> MicroBatch:
        """Return what the stages' next forward takes."""
        return MicroBatch(
            tuple(self.input_ids.shape),
            self.input_ids,
            position_ids=self.positions,
            segments=self.segments,
            longest=self.longest + self.steps,
            cache=self.cache,
            last_only=True,
        )

    def take(self, choice: Choice) -> None:
        """Go on with the chosen tokens."""
        self.done = choice.done
        if self.done:
            return
        if self.copies > 1 and self.steps == 0:
            self._copy_prompts()
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

    def _copy_prompts(self) -> None:
        """Give every beam, or every row that is drawn, a row of its own."""
        self.input_ids = self.input_ids.repeat_interleave(self.copies, 0)
        if self.positions is not None:
            self.positions = self.positions.repeat_interleave(self.copies, 0)
            self.segments = self.segments.repeat_interleave(self.copies, 0)


def _groups(
    model, input_ids, mask, mine: range, settings: GenerationSettings, use_cache: bool
) -> list[_Group]:
    """Make as many groups of this replica's rows as keep all stages busy."""
    count, groups = min(model.ctx.pp_size, len(mine)), []
    longest = input_ids.shape[1] if mask is None else int((mask != 0).sum(dim=1).max())
    for index in range(count):
        numbers = share_of(mine, count, index)
        rows = slice(numbers.start, numbers.stop)
        real = None if mask is None else mask[rows].to(input_ids.device) != 0
        real = None if real is None or bool(real.all()) else real
        groups.append(_Group(model, input_ids[rows], real, numbers, longest, settings, use_cache))
    return groups


def _run(model, groups: list[_Group], steps: int, streamer) -> None:
    """Generate, until every group is done: first the prompts go through all stages, then each
    choice of tokens.

    Each stage takes the groups in turn: one computes while another travels. A group comes back to
    a rank's first stage with the tokens that the last stage has chosen for it; the last of `steps`
    choices is only taken.
    """
    traffic = _Traffic(model, most_sent=2 * len(groups) * model.ctx.pp_size)
    for step in range(steps + 1):
        for stage in model.stages:
            for group in groups:
                if step > 0 and stage is model.stages[0] and not group.done:
                    choice = traffic.choice_for(group)
                    if streamer is not None and int(choice.tokens[0]) >= 0:
                        streamer.put(choice.tokens)
                    group.take(choice)
                if not group.done:
                    _forward(model, stage, group, traffic)
    traffic.finish()


def _forward(model, stage: Stage, group: _Group, traffic: "_Traffic") -> None:
    """Take a group's tokens through a stage of this rank, and send on what comes of them: the
    activations to the next stage, or the last stage's choice of tokens to all other ranks."""
    batch = group.batch()
    x = batch.input_ids if stage.first else traffic.activations_for(stage, batch)
    x = model.forward_stage(x, batch, stage)
    if group.cache is not None and stage is model.stages[-1]:
        group.cache.advance(batch.shape[1])
    if stage.last:
        logits = model.whole_logits(model.outputs(x, batch), batch)[:, -1]
        group.choice = group.chooser.choose(logits.float())
        traffic.send_choice(group.choice)
    else:
        traffic.send_activations(stage, x)


class _Traffic:
    """What travels between the stages: activations to the next one, and the last one's choices to
    all others.

    Sends are waited for when more than `most_sent` are under way, and at the end.
    """

    def __init__(self, model, most_sent: int):
        self.model, self.ctx, self.most_sent = model, model.ctx, most_sent
        self.last = self.ctx.pp_size - 1  # the pipeline rank that chooses
        self.sent: deque = deque()  # (work, tensor), which lives until then

    def activations_for(self, stage: Stage, batch: MicroBatch) -> torch.Tensor:
        """Wait for what the stage before sends for a batch: [batch, sequence, hidden size]."""
        before = rank_of(stage.index - 1, self.ctx.pp_size)
        shape = (*batch.shape, self.model.hidden_size)
        return receive_from_stage(shape, self.model.dtype, before, self.ctx)

    def send_activations(self, stage: Stage, x: torch.Tensor) -> None:
        """Send a stage's output to the next one."""
        self._send(x.contiguous(), rank_of(stage.index + 1, self.ctx.pp_size))

    def choice_for(self, group: _Group) -> Choice:
        """Return the last stage's choice for a group; other ranks wait for it."""
        if self.ctx.pp_rank == self.last:
            return group.choice
        rows = group.rows
        length = 1 + rows * (1 + group.beams)
        message = receive_from_stage((length,), torch.int64, self.last, self.ctx)
        sources = message[1 + rows :] if group.beams else None
        return Choice(message[1 : 1 + rows], sources, bool(message[0]))

    def send_choice(self, choice: Choice) -> None:
        """Send the last stage's choice to all other ranks, as int64 [1 + rows (+ rows)]: done,
        tokens, sources."""
        if not self.last:
            return
        done = torch.tensor([choice.done], dtype=torch.int64, device=choice.tokens.device)
        sources = [] if choice.sources is None else [choice.sources]
        message = torch.cat([done, choice.tokens, *sources])
        for pp_rank in range(self.last):
            self._send(message, pp_rank)

    def _send(self, tensor: torch.Tensor, pp_rank: int) -> None:
        self.sent.append((send_to_stage(tensor, pp_rank, self.ctx), tensor))
        while len(self.sent) > self.most_sent:
            self.sent.popleft()[0].wait()

    def finish(self) -> None:
        """Wait for what is still under way."""
        for work, _ in self.sent:
            work.wait()


def _new_tokens(
    model, groups: list[_Group], input_ids: torch.Tensor, settings: GenerationSettings
) -> torch.Tensor:
    """Return what was generated, of all replicas, on every rank: int64 [batch, new]. UserError, on
    every rank, if the logits of a row were no numbers."""
    ctx, each = model.ctx, settings.num_return_sequences
    # of each row how many tokens there are, -1 where the logits were no numbers, and the tokens
    new = input_ids.new_zeros(len(input_ids) * each, 1 + settings.max_new_tokens)
    for group in groups if model.stages[-1].last else ():
        rows = new[group.numbers.start * each : group.numbers.stop * each]
        if group.chooser.broken:
            rows[:, 0] = -1
            continue
        result = group.chooser.result()  # [rows, tokens]
        rows[:, 0] = result.shape[1]
        rows[:, 1:] = settings.padding
        rows[:, 1 : 1 + result.shape[1]] = result
    broadcast_from_stage(new, ctx.pp_size - 1, ctx)
    all_reduce(new, ctx.dp_group)  # each replica has its rows, and zeros
    if bool((new[:, 0] < 0).any()):
        raise not_finite(model.dtype)
    return new[:, 1 : 1 + int(new[:, 0].max())]


@contextmanager
def _generating(model):
    """Turn off dropout within this block, and sequence parallelism: one token can't be cut."""
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
