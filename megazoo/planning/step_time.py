"""Estimate the time of a step on GPUs: computation, and the communication that is not overlapped.

Overlapped communication costs time only if it takes longer than the work that it overlaps with, as
in the engine on CUDA:

- The reductions of gradients over the replicas overlap with the backward of the last micro-batch;
  under ZeRO-2, with that of each.
  The reductions of tied parameters and of copies over tp start after it.
- Tensor-parallel communication in the backward of a column-parallel layer overlaps with the
  products of that layer.
- Activations are sent between stages while both compute. A stage waits for late ones.

All other communication adds to the time: the rest over tp, all over cp, and the gathers of
parameters after the update (ZeRO-1 and 2) or in each micro-batch (ZeRO-3). Not counted are the
update of the optimizer (except the products of Muon) and the start of a ring over many nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megazoo.parallel.schedule import Action, Span, timeline
from megazoo.planning.meter import Cost
from megazoo.planning.static import Static

NODE = 8  # GPUs
# The share of data-sheet rates that programs reach. FLOPs: cuBLAS, large matrices. Links: NCCL's
# rings, with messages of some tens of MB.
OF_FLOPS, OF_MEMORY, OF_LINKS = 0.75, 0.75, 0.7
KERNEL = 5e-6  # seconds to launch, start and end a kernel
COLLECTIVE = 20e-6  # seconds: the same for an NCCL collective within a node


@dataclass(frozen=True)
class GPU:
    """Data-sheet values of an NVIDIA GPU in an SXM module, eight per node (DGX).

    flops: per second, for dense matrices in bfloat16; half of it in TF32. Bytes per second: memory,
    read and written; nvlink, sent to other GPUs of the node; network, sent to other nodes by the
    adapter of each GPU (200 Gbit/s on DGX A100, 400 on the others).
    """

    flops: float
    memory: float
    nvlink: float
    network: float


GPUS = {
    "a100": GPU(flops=312e12, memory=2.04e12, nvlink=300e9, network=25e9),
    "h100": GPU(flops=989e12, memory=3.35e12, nvlink=450e9, network=50e9),
    "h200": GPU(flops=989e12, memory=4.8e12, nvlink=450e9, network=50e9),
    "b200": GPU(flops=2250e12, memory=8e12, nvlink=900e9, network=50e9),
}


@dataclass(frozen=True)
class Speed:
    """Rates of each rank of a layout, per second: FLOPs of matrix products, bytes of memory
    traffic, and bytes sent along each axis.

    dp: over the replicas, including the ranks along cp. pp: from a stage to the next.
    """

    flops: float
    memory: float
    tp: float
    cp: float
    dp: float
    pp: float

    @classmethod
    def of(cls, gpu: GPU, dtype: str, tp: int, pp: int, cp: int, dp: int) -> "Speed":
        """Return the rates of a layout on a GPU. Ranks are ordered as in
        `megazoo.parallel.context.AXES`: tp varies fastest, then cp, dp and pp."""

        def ring(stride: int, size: int) -> float:
            if stride * size <= NODE:
                return OF_LINKS * gpu.nvlink
            here = max(1, NODE // stride)  # ranks of the ring per node
            return OF_LINKS * min(gpu.nvlink, here * gpu.network)

        one_node = tp * cp * dp * pp <= NODE
        return cls(
            flops=OF_FLOPS * gpu.flops / (2 if dtype == "float32" else 1),
            memory=OF_MEMORY * gpu.memory,
            tp=ring(1, tp),
            cp=ring(tp, cp),
            dp=ring(tp, cp * dp),
            pp=OF_LINKS * (gpu.nvlink if one_node else gpu.network),
        )

    def computing(self, cost: Cost) -> float:
        """Return the computation time of an action in seconds."""
        return cost.flops / self.flops + cost.moved / self.memory + cost.kernels * KERNEL

    def action(self, kind: str, cost: Cost) -> float:
        """Return the time of an action in seconds, including its communication."""
        # A backward of only the inputs has too few products to overlap with.
        beside = cost.sent_beside / self.tp if kind == "B" else 0.0
        waited = cost.sent_tp / self.tp + cost.sent_cp / self.cp - beside
        return max(self.computing(cost), beside) + waited + cost.collectives * COLLECTIVE

    def afterwards(self, static: Static) -> float:
        """Return the seconds from the end of a rank's last backward, and of the reductions that
        overlap with it, to the end of the step."""
        return (
            (static.sent_dp - static.sent_early) / self.dp
            + static.sent_tp / self.tp
            + static.sent_tied / self.pp
            + static.optimizer_flops / self.flops
        )


@dataclass(frozen=True)
class StepTime:
    """The time of a step in seconds: total, and without communication."""

    total: float
    computing: float

    @property
    def exposed(self) -> float:
        """The share of a step for communication that is not overlapped."""
        return 1 - self.computing / self.total


def step_time(
    tables: Sequence[list[Action]],
    costs: dict[tuple[str, int], Cost],
    statics: Sequence[Static],
    boundary: int,
    speed: Speed,
) -> StepTime:
    """Return the time of a step.

    tables: one per pipeline rank. costs: by kind of action and stage. statics: one per pipeline
    rank. boundary: bytes that a stage sends to the next per micro-batch.
    """
    products = max(static.optimizer_flops for static in statics) / speed.flops
    alone = timeline(tables, {key: speed.computing(cost) for key, cost in costs.items()})
    seconds = {key: speed.action(key[0], cost) for key, cost in costs.items()}
    spans = timeline(tables, seconds, boundary / speed.pp)
    end = max(
        _end_of_sums(table, spans, static.sent_early / speed.dp)
        for table, static in zip(tables, statics, strict=True)
    )
    waited = max(
        sum(
            max(0.0, static.sent_each / speed.dp - seconds["B", action.stage])
            for action in [action for action in table if action.kind == "B"][:-1]
        )
        for table, static in zip(tables, statics, strict=True)
    )
    waited += max(
        len({action.microbatch for action in table}) * static.sent_gathers / speed.dp
        for table, static in zip(tables, statics, strict=True)
    )
    return StepTime(
        total=end + max(map(speed.afterwards, statics)) + waited,
        computing=max(span.end for span in alone.values()) + products,
    )


def _end_of_sums(table: list[Action], spans: dict[Action, Span], sums: float) -> float:
    """Return when a rank has finished its backwards and the reductions over replicas. The
    reductions start during the last backward of each stage. sums: their total time in seconds,
    divided equally among the stages."""
    last = {action.stage: spans[action] for action in table if action.kind != "F"}
    end = 0.0
    for span in sorted(last.values()):
        end = max(span.end, max(span.start, end) + sums / len(last))
    return end
