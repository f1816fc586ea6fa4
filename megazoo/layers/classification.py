"""The head of a sequence classifier."""

import torch
import torch.nn.functional as F

from megazoo.parallel import collectives
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, ShardedModule


class ClassificationHead(ShardedModule):
    """Scores of each label from one position of each sequence; no bias; the same on every tp rank.

    Args: hidden_size; num_labels; std: of the initial weights; ctx: parallel context.
    Shapes: x [batch, sequence, hidden] (under sequence parallelism this rank's part of it), positions int64 [batch] ->
    [batch, num_labels].
    """

    def __init__(self, hidden_size: int, num_labels: int, *, std: float = 0.02, ctx: ParallelContext | None = None):
        super().__init__(ctx)
        self.add_parameter("weight", ParameterSpec((num_labels, hidden_size), std=std))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(x), device=x.device)
        if not self.ctx.sequence_parallel:
            return F.linear(x[rows, positions], self.whole("weight"))
        local = positions - self.ctx.tp_rank * x.shape[1]  # one rank has the position, the others add zeros
        here = (local >= 0) & (local < x.shape[1])
        pooled = x[rows, local.masked_fill(~here, 0)].masked_fill(~here[:, None], 0)
        return collectives.reduce_from_tensor_parallel(F.linear(pooled, self.whole("weight")), self.ctx)
