"""The order in which groups of rows pass through a pipeline in generation, and the communication
between the ranks.

Time is divided into ticks. In each one a rank runs at most one group through one of its stages.
Group g enters the first stage in tick g, or in tick 2 g if the stages form a V, and moves one stage
further per tick. After the last stage it continues at the first one, with the next piece of its
prompts, or afterwards with the chosen tokens. At the end of a tick, the ranks that have computed
send, one after the other.

All ranks start their transfers in this one order, so they never wait for each other in a circle,
even if a send blocks until it is received.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from megazoo.generate.decoding import Choice
from megazoo.generate.group import Group
from megazoo.parallel.p2p import start_receive, start_send
from megazoo.parallel.placement import Placement


@dataclass(frozen=True)
class Turn:
    """The pass of a group through one stage of a rank.

    forward: number of earlier forwards of the group, including pieces of its prompts. stage: index
    among the stages of the rank. group: index of the group.
    """

    forward: int
    stage: int
    group: int


def turn_in(tick: int, pp_rank: int, groups: int, placement: Placement) -> Turn | None:
    """Return what a pipeline rank computes in a tick, or None. groups: number of groups, at most
    the number of pipeline ranks, which never end here."""
    apart = 2 if placement.name == "v" else 1  # ticks; a rank of a V has an even and an odd stage
    for index, stage in enumerate(placement.stages_of(pp_rank)):
        forward, entered = divmod(tick - stage, placement.count)
        group, between = divmod(entered, apart)
        if forward >= 0 and not between and group < groups:
            return Turn(forward, index, group)
    return None


def stage_in(tick: int, pp_rank: int, placement: Placement) -> int:
    """Return the index, among the stages of a pipeline rank, of the stage that computes in a tick
    if enough groups are on their way."""
    turn = turn_in(tick + placement.count, pp_rank, placement.pp, placement)
    assert turn
    return turn.stage


class Traffic:
    """The communication of a rank: activations to the next stage, and the choices of the last stage
    to all other ranks, as CPU tensors over gloo.

    streamer: gets the tokens of every choice.
    """

    def __init__(self, model: Any, groups: list[Group], streamer: Any = None):
        self.model, self.ctx, self.groups, self.streamer = model, model.ctx, groups, streamer
        placement = self.ctx.placement
        self.last = placement.last_rank  # the pipeline rank that chooses
        mine = placement.stages_of(self.ctx.pp_rank)
        # the ranks of transfers with this rank, in the order in which they send
        before = {placement.rank_of(stage - 1) for stage in mine if stage}
        self.sources = sorted(before | {self.ctx.pp_rank, self.last})
        # By group: the tensor to receive, and the work to wait for.
        self.activations: dict[int, tuple] = {}
        self.choices: dict[int, tuple] = {}
        self.sent: deque = deque()  # (work, tensor): keeps the tensor until the work is done

    def turn_of(self, tick: int, pp_rank: int) -> Turn | None:
        """Return what a rank computes in a tick, or None after the group has ended. First, the
        group continues with the last choice, for which the rank waits."""
        turn = turn_in(tick, pp_rank, len(self.groups), self.ctx.placement)
        if turn is None:
            return None
        group = self.groups[turn.group]
        if group.forwards < turn.forward and not group.done:
            if group.chooses:
                self._take_choice(turn.group)
            else:
                group.take_piece()
        return None if group.done else turn

    def is_last(self, turn: Turn, pp_rank: int) -> bool:
        """Return whether a turn of a rank is the last of a forward: tokens are then chosen, or a
        piece of the prompts is done."""
        return self.stage_of(turn, pp_rank) == self.ctx.placement.count - 1

    def stage_of(self, turn: Turn, pp_rank: int) -> int:
        """Return the number of the stage of a turn of a rank."""
        return self.ctx.placement.stages_of(pp_rank)[turn.stage]

    def input_for(self, turn: Turn) -> torch.Tensor:
        """Return the activations from the previous stage: [rows, tokens, hidden size]."""
        x, work = self.activations.pop(turn.group)
        if work is not None:  # otherwise it is from another stage of this rank
            work.wait()
        return x

    def end_tick(self, tick: int, turn: Turn | None, result: torch.Tensor | Choice | None) -> None:
        """Send the result of this rank's turn, and start receiving the results for it. result: a
        Choice, if the last stage has chosen tokens."""
        for source in self.sources:
            if source == self.ctx.pp_rank:
                self._send(turn, result)
            else:
                self._receive(source, self.turn_of(tick, source))

    def finish(self) -> None:
        """Wait for all unfinished transfers."""
        while self.sent:
            self._wait_for_oldest()

    def _take_choice(self, index: int) -> None:
        """Pass the chosen tokens to a group."""
        group = self.groups[index]
        choice = group.choice
        if self.ctx.pp_rank != self.last:
            message, work = self.choices.pop(index)
            work.wait()
            choice = Choice.of(message, group.beams, self.ctx.device)
        assert choice  # from this rank, or received
        if self.streamer is not None and not choice.broken:
            self.streamer.put(choice.tokens)
        group.take(choice)

    def _send(self, turn: Turn | None, result: torch.Tensor | Choice | None) -> None:
        if turn is None:
            return
        if not self.is_last(turn, self.ctx.pp_rank):
            assert isinstance(result, torch.Tensor)
            target = self.ctx.placement.rank_of(self.stage_of(turn, self.ctx.pp_rank) + 1)
            if target == self.ctx.pp_rank:
                self.activations[turn.group] = (result, None)
            else:
                self._start_send(result.contiguous(), target)
        elif self.ctx.pp_size > 1 and self.groups[turn.group].chooses:
            assert isinstance(result, Choice)
            message = result.message()
            for pp_rank in range(self.ctx.pp_size):
                if pp_rank != self.last:
                    self._start_send(message, pp_rank)

    def _start_send(self, tensor: torch.Tensor, pp_rank: int) -> None:
        work = start_send(tensor, pp_rank, self.ctx)
        if work is not None:
            self.sent.append((work, tensor))
        while len(self.sent) > 2 * len(self.groups) * self.ctx.pp_size:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self.sent.popleft()[0].wait()

    def _receive(self, source: int, turn: Turn | None) -> None:
        """Start receiving what a rank sends to this one after its turn, if anything."""
        ctx = self.ctx
        if turn is None:
            return
        group = self.groups[turn.group]
        if self.is_last(turn, source):
            if not group.chooses:
                return
            buffer, coming = Choice.empty_message(group.rows, group.beams, ctx.device), self.choices
        elif ctx.placement.rank_of(self.stage_of(turn, source) + 1) == ctx.pp_rank:
            shape = (*group.input_ids.shape, self.model.config.hidden_size)
            buffer = torch.empty(shape, dtype=self.model.dtype, device=ctx.device)
            coming = self.activations
        else:
            return
        coming[turn.group] = (buffer, start_receive(buffer, source, ctx))
