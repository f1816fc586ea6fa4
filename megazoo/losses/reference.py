"""Log-probabilities of rows under a reference model."""

from typing import Any

import torch

from megazoo.engine.batch import Batch
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.pipeline import run_pipeline
from megazoo.layers.dropout import without_dropout
from megazoo.losses.base import Loss
from megazoo.parallel.failure import on_all_ranks


class _OfRows(Loss):
    """Computes no loss, but the log-probability of each row's labels: fp32 [batch]."""

    def has_loss(self, batch: MicroBatch) -> bool:
        return False

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.log_probabilities_of_rows(x, batch)

    def full_outputs(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return outputs


@on_all_ranks
@torch.no_grad()
def reference_logprobs(
    model: Any, num_microbatches: int = 1, **batch: Any
) -> dict[str, torch.Tensor]:
    """Return what losses of preferences need of a reference, without dropout.

    Every rank calls it, with the batch of its replica.

    Args:
        model: the reference: a model in the layout of the trained one, or that model within
            `megazoo.lora.off(model)`.
        num_microbatches: number of micro-batches; it must divide the batch.
        batch: tensors of `train_batch`, with labels or targets.

    Returns:
        On the last stage, "reference": the sum of the log-probabilities of each row's labels, fp32
        [batch]. On other stages, nothing.
    """
    with without_dropout(model):
        micro_batches = model.engine.micro_batches(Batch(**batch), num_microbatches)
        head = _OfRows().bound(model.output_head) if model.has_last else None
        collect = head.full_outputs if head else None
        found = run_pipeline(model, micro_batches, head=head, collect=collect).collected
    return {} if found is None else {"reference": found}
