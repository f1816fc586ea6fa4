"""Transports: they bring a stage what other stages send, and take what it sends to them."""

from collections import deque

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.stage import PipelineModel, activation_shape
from megazoo.parallel.p2p import start_receive, start_send
from megazoo.parallel.schedule import Action, Exchange
from megazoo.parallel.timing import spent

MAX_OPEN_EXCHANGES = 2  # limit of unfinished sends when `exchange` returns


class RankTransport:
    """The transport between the ranks of a pipeline. It holds received tensors, and those to send.

    batches: the micro-batches of the run.
    """

    def __init__(self, model: PipelineModel, batches: list[MicroBatch]):
        self.model, self.ctx, self.batches = model, model.ctx, batches
        # by consuming action: the received tensor, and the work to wait for; no work if it is from
        # another stage of this rank
        self.arrived: dict[Action, tuple] = {}
        # by consuming action of another rank: the tensor to send
        self.leaving: dict[Action, torch.Tensor] = {}
        # unfinished sends: the work to wait for, and the tensor
        self.open: deque[tuple] = deque()

    def take(self, action: Action) -> torch.Tensor | None:
        """Return the tensor that an action needs, after it has arrived; None if it needs none."""
        if action not in self.arrived:
            return None
        buffer, work = self.arrived.pop(action)
        if work is not None:
            with spent("communication", "wait"):
                work.wait()
        return buffer

    def pass_on(self, consumer: Action, tensor: torch.Tensor) -> bool:
        """Store the input of an action until it is sent, or, if this rank has its stage, until the
        action runs."""
        leaves = self.ctx.placement.rank_of(consumer.stage) != self.ctx.pp_rank
        if leaves:
            self.leaving[consumer] = tensor
        else:
            self.arrived[consumer] = (tensor, None)
        return leaves

    @spent("communication", "exchange")
    def exchange(self, exchange: Exchange) -> None:
        """Start a transfer. It waits only for the completion of much earlier sends."""
        for transfer in exchange.receives:
            buffer = self._empty_input(transfer.consumer.microbatch)
            work = start_receive(buffer, transfer.source, self.ctx)
            self.arrived[transfer.consumer] = (buffer, work)
        for transfer in exchange.sends:
            tensor = self.leaving.pop(transfer.consumer).contiguous()
            work = start_send(tensor, transfer.target, self.ctx)
            if work is not None:
                self.open.append((work, tensor))
        while len(self.open) > MAX_OPEN_EXCHANGES:
            self._close_oldest()

    @spent("communication", "wait")
    def wait_for_sends(self) -> None:
        """Wait until all sends are complete."""
        while self.open:
            self._close_oldest()

    def _empty_input(self, microbatch: int) -> torch.Tensor:
        """Return memory for a tensor from another stage."""
        shape = activation_shape(self.model, self.batches[microbatch])
        return torch.empty(shape, dtype=self.model.dtype, device=self.ctx.device)

    def _close_oldest(self) -> None:
        work, _tensor = self.open.popleft()  # the tensor lives until its send is done
        work.wait()


class MetaTransport:
    """The transport of one stage on the meta device: it brings empty tensors, and drops the
    outputs."""

    def __init__(self, model: PipelineModel, batch: MicroBatch):
        self.model, self.shape = model, activation_shape(model, batch)

    def take(self, action: Action) -> torch.Tensor | None:
        """Return an empty tensor; None if the action needs nothing."""
        without_input = 0 if action.kind == "F" else self.model.ctx.stage_count - 1
        if action.stage == without_input:
            return None
        return torch.empty(self.shape, dtype=self.model.dtype, device="meta")

    def pass_on(self, consumer: Action, tensor: torch.Tensor) -> bool:
        """Drop a tensor."""
        return True
