"""The order in which groups of rows pass through a pipeline in generation, and the communication
between the ranks.

Time is divided into ticks. In each one a rank runs at most one group through one of its stages.
With pp ranks, group g enters the first stage in tick g, and moves one stage further per tick. After
the last stage it continues at the first one, with the next piece of its prompts, or afterwards with
the chosen tokens. At the end of a tick, the ranks that have computed send, one after the other.

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


@dataclass(frozen=True)
class Turn:
    """The pass of a group through one stage of a rank.

    forward: number of earlier forwards of the group, including pieces of its prompts. stage: index
    among the stages of the rank. group: index of the group.
    """

    forward: int
    stage: int
    group: int


def turn_in(tick: int, pp_rank: int, groups: int, pp: int, virtual: int) -> Turn | None:
    """Return what a pipeline rank computes in a tick, or None. groups: number of groups, at most
    pp, which never end here."""
    rounds, group = divmod(tick - pp_rank, pp)
    if rounds < 0 or group >= groups:
        return None
    return Turn(*divmod(rounds, virtual), group)


class Traffic:
    """The communication of a rank: activations to the next stage, and the choices of the last stage
    to all other ranks, as CPU tensors over gloo.

    streamer: gets the tokens of every choice.
    """

    def __init__(self, model: Any, groups: list[Group], streamer: Any = None):
        self.model, self.ctx, self.groups, self.streamer = model, model.ctx, groups, streamer
        self.last = self.ctx.placement.last_rank  # the pipeline rank that chooses
        # By group: the tensor to receive, and the work to wait for.
        self.activations: dict[int, tuple] = {}
        self.choices: dict[int, tuple] = {}
        self.sent: deque = deque()  # (work, tensor): keeps the tensor until the work is done

    def turn_of(self, tick: int, pp_rank: int) -> Turn | None:
        """Return what a rank computes in a tick, or None after the group has ended. First, the
        group continues with the last choice, for which the rank waits."""
        ctx = self.ctx
        turn = turn_in(tick, pp_rank, len(self.groups), ctx.pp_size, ctx.virtual_size)
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
        return pp_rank == self.last and turn.stage == self.ctx.virtual_size - 1

    def input_for(self, turn: Turn) -> torch.Tensor:
        """Return the activations from the previous stage: [rows, tokens, hidden size]."""
        x, work = self.activations.pop(turn.group)
        work.wait()
        return x

    def end_tick(self, tick: int, turn: Turn | None, result: torch.Tensor | Choice | None) -> None:
        """Send the result of this rank's turn, and start receiving the results for it. result: a
        Choice, if the last stage has chosen tokens."""
        me = self.ctx.pp_rank
        before = (me - 1) % self.ctx.pp_size
        for source in sorted({before, me, self.last}):
            if source == me:
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
            self._start_send(result.contiguous(), (self.ctx.pp_rank + 1) % self.ctx.pp_size)
        elif self.last and self.groups[turn.group].chooses:
            assert isinstance(result, Choice)
            message = result.message()
            for pp_rank in range(self.last):
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
        elif (source + 1) % ctx.pp_size == ctx.pp_rank:
            shape = (*group.input_ids.shape, self.model.config.hidden_size)
            buffer = torch.empty(shape, dtype=self.model.dtype, device=ctx.device)
            coming = self.activations
        else:
            return
        coming[turn.group] = (buffer, start_receive(buffer, source, ctx))
