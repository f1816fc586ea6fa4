"""Generation in every layout: rows pass through the stages in groups, and the last stage chooses
their tokens."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count as count_up
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megazoo.engine.batch import ids_of, is_mask
from megazoo.engine.calls import using_context
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.stage import activation_shape, run_stage
from megazoo.errors import UserError
from megazoo.generate.decoding import Choice, not_finite
from megazoo.generate.group import Group
from megazoo.generate.settings import GenerationSettings
from megazoo.generate.traffic import Traffic, Turn, stage_in
from megazoo.layers.dropout import without_dropout
from megazoo.parallel.agreement import sharing_axis
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shares import share_of

IDLE, WAITING, RUNNING = range(3)  # states of a rank in a tick


def generate(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    settings: GenerationSettings,
    *,
    use_cache: bool = True,
    streamer: Any = None,
) -> torch.Tensor:
    """Generate tokens; see `Model.generate`. model: a `megazoo.models.base.Model`."""
    model.ctx.require_ranks()
    sharing = sharing_axis(model.ctx, input_ids, attention_mask)
    with using_context(model, model.ctx.cp_as_dp):
        return _generate(model, input_ids, attention_mask, settings, use_cache, streamer, sharing)


def _generate(
    model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    settings: GenerationSettings,
    use_cache: bool,
    streamer,
    sharing: Axis,
) -> torch.Tensor:
    ctx = model.ctx
    if model.config.num_labels:
        raise UserError("a classifier can't generate")
    input_ids = ids_of("input_ids", input_ids)
    is_mask(attention_mask)
    if input_ids.dim() != 2 or not input_ids.numel():
        raise UserError(
            f"input_ids have the shape {list(input_ids.shape)}, not [batch, at least one token]"
        )
    settings = settings.after(input_ids.shape[1])
    settings.check(model.config.vocab_size)
    settings = settings.within(model.config.vocab_size)
    _check(model, input_ids, attention_mask, settings)
    if streamer is not None and len(input_ids) * settings.rows_of_prompt > 1:
        raise UserError("a streamer supports one row, without beams or num_return_sequences")
    mine = share_of(range(len(input_ids)), sharing.size, sharing.rank)
    length = input_ids.shape[1] + settings.max_new_tokens
    use_cache = use_cache and model.can_cache(model.config, length)
    input_ids = input_ids.to(ctx.device)
    with _generating(model), torch.inference_mode():
        groups = _groups(model, input_ids, attention_mask, mine, settings, use_cache)
        for group in groups:
            if group.chooser and (streamer is not None or ctx.pp_size > 1):
                group.chooser.looks = True  # other ranks get the state after each token
        _run(model, groups, streamer)
    new = _new_tokens(model, groups, input_ids, settings, sharing)
    if streamer is not None:
        if not groups:  # another replica had the row
            for token in new.T:
                streamer.put(token)
        streamer.end()
    return torch.cat([input_ids.repeat_interleave(settings.num_return_sequences, 0), new], dim=1)


def _check(
    model, input_ids: torch.Tensor, mask: torch.Tensor | None, settings: GenerationSettings
) -> None:
    """Raise UserError for prompts that can't be continued."""
    if mask is not None and mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask has the shape {list(mask.shape)}, input_ids {list(input_ids.shape)}"
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


def _groups(
    model, input_ids, mask, mine: range, settings: GenerationSettings, use_cache: bool
) -> list[Group]:
    """Return enough groups of this replica's rows to keep all stages busy."""
    count, groups = min(model.ctx.pp_size, len(mine)), []
    longest = input_ids.shape[1] if mask is None else int((mask != 0).sum(dim=1).max())
    for index in range(count):
        numbers = share_of(mine, count, index)
        rows = slice(numbers.start, numbers.stop)
        real = None if mask is None else mask[rows].to(input_ids.device) != 0
        real = None if real is None or bool(real.all()) else real
        groups.append(Group(model, input_ids[rows], real, numbers, longest, settings, use_cache))
    return groups


def _run(model, groups: list[Group], streamer) -> None:
    """Generate until every group has ended. First the prompts pass through all stages in pieces,
    then the chosen tokens. For the order see megazoo/generate/traffic.py.

    With folded axes, replicas communicate in their layers. So all run until the last one has ended,
    and a replica without a turn runs the stage on a padding token.
    """
    ctx, traffic = model.ctx, Traffic(model, groups, streamer)
    for tick in count_up():
        turn = traffic.turn_of(tick, ctx.pp_rank)
        done = all(group.done for group in groups)
        wanted = _most_urgent(IDLE if done else WAITING if turn is None else RUNNING, ctx)
        if wanted == IDLE:
            break
        result = _forward(model, groups[turn.group], turn, traffic) if turn else None
        if wanted == RUNNING and turn is None:
            _run_padding(model, stage_in(tick, ctx.pp_rank, ctx.placement))
        if not done:
            traffic.end_tick(tick, turn, result)
    traffic.finish()


def _most_urgent(state: int, ctx: ParallelContext) -> int:
    """Return the largest state of all replicas, if their layers communicate; otherwise `state`."""
    if not ctx.folded:
        return state
    most = torch.tensor(state)
    all_reduce(most, ctx.token_axis.group, torch.distributed.ReduceOp.MAX)
    return int(most)


def _run_padding(model, index: int) -> None:
    """Run a stage of this rank on one padding token, for the layers of other replicas. index: among
    the stages of the rank."""
    stage, device = model.stages[index], model.ctx.device
    batch = MicroBatch((1, 1), torch.zeros(1, 1, dtype=torch.int64, device=device), longest=1)
    received = torch.zeros(activation_shape(model, batch), dtype=model.dtype, device=device)
    run_stage(model, stage, batch, None if stage.first else received)


def _forward(model, group: Group, turn: Turn, traffic: Traffic) -> torch.Tensor | Choice:
    """Run a group's tokens through a stage of this rank. Return the activations, or, on the last
    stage after the prompts, the choice of the next tokens."""
    batch, stage = group.batch(), model.stages[turn.stage]
    received = None if stage.first else traffic.input_for(turn)
    next_logits = partial(_next_logits, model, batch) if group.chooses else None
    compute = partial(run_stage, model, stage, batch, received, next_logits)
    x = compute() if group.graph is None or group.steps == 0 else group.graph(compute, batch.keys)
    if batch.cache is not None and stage is model.stages[-1]:
        batch.cache.advance(batch.shape[1])
    if not stage.last or not group.chooses:
        return x
    assert group.chooser  # on the last stage
    group.choice = group.chooser.choose(x)
    return group.choice


def _next_logits(model, batch: MicroBatch, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of the next token, fp32 [rows, vocabulary]. x: the output of the last
    stage."""
    head = model.output_head
    return head.full_outputs(head.outputs(x, batch), batch)[:, -1].float()


def _new_tokens(
    model,
    groups: list[Group],
    input_ids: torch.Tensor,
    settings: GenerationSettings,
    sharing: Axis,
) -> torch.Tensor:
    """Return the new tokens of all rows, on every rank: int64 [batch, new]. UserError, on every
    rank, if the logits of a row were NaN or infinite."""
    ctx, each = model.ctx, settings.num_return_sequences
    # per row: the number of tokens (-1 if the logits were not finite), and the tokens
    new = input_ids.new_zeros(len(input_ids) * each, 1 + settings.max_new_tokens)
    for group in groups if model.stages[-1].last else ():
        rows = new[group.numbers.start * each : group.numbers.stop * each]
        assert group.chooser  # of the last stage
        if group.chooser.broken:
            rows[:, 0] = -1
            continue
        result = group.chooser.result()  # [rows, tokens]
        rows[:, 0] = result.shape[1]
        rows[:, 1:] = settings.padding
        rows[:, 1 : 1 + result.shape[1]] = result
    broadcast_from_stage(new, ctx.placement.last_rank, ctx)
    all_reduce(new, sharing.group)  # each rank has its rows, and zeros
    if bool((new[:, 0] < 0).any()):
        raise not_finite(model.dtype)
    return new[:, 1 : 1 + int(new[:, 0].max())]


@contextmanager
def _generating(model):
    """Within this block, dropout and sequence parallelism are off, because one token can't be
    split."""
    whole = replace(model.ctx, layout=replace(model.ctx.layout, sequence_parallel=False))
    with (
        using_context(model, whole),
        without_dropout(model),
        _kernels_for_all_lengths(model.ctx.device),
    ):
        yield


def _kernels_for_all_lengths(device: torch.device):
    """Within this block, attention does not use cuDNN, which creates a plan for each new length: 23
    to 37 ms per token on an H100."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
