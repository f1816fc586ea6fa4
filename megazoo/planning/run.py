"""The settings of a run that a plan needs, in addition to its model and its layout."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to plan.

    global_batch_size: sequences per step, over all replicas and micro-batches. micro_batch_size:
    sequences per micro-batch. seq_length: tokens per sequence. dtype: of weights and activations.
    offload_optimizer: whether its state is on the CPU. recompute, recompute_interval: as in
    `Model.recompute`. optimizer: "adamw" or "muon". train_only: as in `Model.train_only`; None: all
    parameters are trained, or the adapters. ema: decay of the moving average of the weights; 0: no
    average.
    """

    global_batch_size: int
    micro_batch_size: int
    seq_length: int
    dtype: str = "float32"
    offload_optimizer: bool = False
    recompute: str = "none"
    recompute_interval: int = 1
    optimizer: str = "adamw"
    train_only: str | None = None
    ema: float = 0.0

    def microbatches(self, dp: int) -> int:
        """Return the number of micro-batches of a replica, in a step."""
        return self.global_batch_size // (dp * self.micro_batch_size)
