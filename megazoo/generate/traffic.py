"""The order in which groups of rows go through a pipeline while generating, and what then travels
between the ranks.

Time goes in ticks. In each one a rank takes at most one group through one of its stages. With pp
ranks, group g comes to the first stage in tick g, and one stage further with every tick; after the
last stage it begins anew at the first one, with the next piece of its prompts or, once they are
through, with the tokens that were chosen for it. At the end of a tick the ranks that have computed
send, one after the other.

This is one order of all transfers, in which every rank starts its own, so that ranks never wait
for each other in a circle even if a send does not end before it is received.
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
    """A group's way through one stage of a rank.

    forward: how many of the group's forwards came before, those of its prompts' pieces included.
    stage: which of the rank's stages. group: its index.
    """

    forward: int
    stage: int
    group: int


def turn_in(tick: int, pp_rank: int, groups: int, pp: int, virtual: int) -> Turn | None:
    """Return what a pipeline rank computes in a tick, if anything, of so many groups, pp at most,
    that never end."""
    rounds, group = divmod(tick - pp_rank, pp)
    if rounds < 0 or group >= groups:
        return None
    return Turn(*divmod(rounds, virtual), group)


class Traffic:
    """What a rank sends and receives: activations to the next stage, and the choices of the last
    one to all other ranks, as CPU tensors, which travel by gloo.

    streamer: is given the tokens of every choice.
    """

    def __init__(self, model: Any, groups: list[Group], streamer: Any = None):
        self.model, self.ctx, self.groups, self.streamer = model, model.ctx, groups, streamer
        self.last = self.ctx.placement.last_rank  # the pipeline rank that chooses
        # By group: the tensor that will come, and the work to wait for.
        self.activations: dict[int, tuple] = {}
        self.choices: dict[int, tuple] = {}
        self.sent: deque = deque()  # (work, tensor), which lives until then

    def turn_of(self, tick: int, pp_rank: int) -> Turn | None:
        """Return what a rank computes in a tick: nothing once the group has ended. Lets the group
        go on first, for which it waits for what was chosen before."""
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
        """Say whether a rank's turn is through the last stage, after which tokens are chosen, or a
        piece of the prompts has no further way to go."""
        return pp_rank == self.last and turn.stage == self.ctx.virtual_size - 1

    def input_for(self, turn: Turn) -> torch.Tensor:
        """Return what the stage before has sent: [rows, tokens, hidden size]."""
        x, work = self.activations.pop(turn.group)
        work.wait()
        return x

    def end_tick(self, tick: int, turn: Turn | None, result: torch.Tensor | Choice | None) -> None:
        """Send the result of this rank's turn, and begin to receive those that others send it.
        result: a Choice, if the turn was the last stage's and tokens were chosen."""
        me = self.ctx.pp_rank
        before = (me - 1) % self.ctx.pp_size
        for source in sorted({before, me, self.last}):
            if source == me:
                self._send(turn, result)
            else:
                self._receive(source, self.turn_of(tick, source))

    def finish(self) -> None:
        """Wait for what is still under way."""
        while self.sent:
            self._wait_for_oldest()

    def _take_choice(self, index: int) -> None:
        """Give a group the tokens that were chosen for it."""
        group = self.groups[index]
        choice = group.choice
        if self.ctx.pp_rank != self.last:
            message, work = self.choices.pop(index)
            work.wait()
            choice = Choice.of(message, group.beams, self.ctx.device)
        assert choice  # this rank has made it, or received it
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
        """Begin to receive what a rank sends this one after its turn, if anything."""
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
