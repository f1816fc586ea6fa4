"""The methods of a model that run batches. Those that train or evaluate call the TrainingEngine:
see training.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from megazoo.engine.batch import Batch, is_tensor, labels_from_tokens
from megazoo.engine.habits import CALL, refuse
from megazoo.engine.microbatch import Output
from megazoo.engine.pipeline import run_pipeline
from megazoo.engine.stepwise import with_backward
from megazoo.engine.training import TrainingEngine
from megazoo.errors import UserError, check_number
from megazoo.parallel.agreement import Terms
from megazoo.parallel.collectives import broadcast_from_stage
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import on_all_ranks, on_replica_ranks
from megazoo.parallel.stages import Stage


class BatchCalls:
    """The part of `Model` that runs batches, in any parallel layout.

    The tensors of a batch are described at `Batch`, in engine/batch.py.
    """

    family: str
    config: Any
    seed: int
    ctx: ParallelContext
    stages: list[Stage]
    training: bool
    has_last: bool
    num_labels: int
    dtype: torch.dtype
    output_head: Any
    engine: TrainingEngine
    forward_stage: Callable[..., torch.Tensor]

    def terms(self) -> Terms:
        """Return the values that must be equal on the ranks that call this model."""
        settings = {"family": self.family, "seed": self.seed, "training mode": self.training}
        # dropout masks are drawn by the number of training calls
        rows = {"the number of training calls": self.engine.calls}
        terms = Terms({"schedule": self.ctx.layout.schedule}, rows=rows)
        terms.take({f"the model's {name}": value for name, value in settings.items()})
        terms.take_config(self.config)
        if self.has_last:
            settings = self.output_head.settings
            terms.rows |= settings
            terms.replicas |= settings
        return terms

    @on_replica_ranks
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        document_ids: torch.Tensor | None = None,
        return_logits: bool = False,
        **unsupported: Any,
    ) -> Output:
        """Run one batch. Call it with the same inputs on every rank of a replica.

        Args:
            input_ids: int64 [batch, sequence], as the other tensors of the batch: see `Batch`.
            attention_mask: 1 for tokens, 0 for padding.
            position_ids: default: 0, 1, 2, ...
            labels: not shifted; the last stage needs them for the loss. A classifier's have another
                shape.
            document_ids: of packed documents.
            return_logits: whether to return logits also when there are labels.
            unsupported: other arguments of transformers, such as use_cache, with values that change
                nothing.

        Returns:
            An Output. With labels, `loss` is the mean over the labelled tokens of this batch,
            0-dimensional fp32, on every rank. `logits` are [batch, sequence, vocabulary] (of a
            classifier: [batch, labels]), on every rank of the last stage. They are returned without
            labels, with return_logits, and always if pp, tp and cp are 1 or for a classifier. The
            output holds their memory: keep only the loss if memory is short.

        Raises:
            UserError: The inputs are invalid, or an argument of transformers is not supported, such
                as output_hidden_states=True.

        The loss can be differentiated if pp is 1: call `sync_gradients` after backward.
        `train_batch` and `microbatches` train in every layout.

        Example:
            logits = model(ids).logits  # on the last stage
            loss = model(ids, labels=ids).loss
        """
        refuse(unsupported, CALL, "model(...)")
        batch = Batch(input_ids, labels, None, attention_mask, position_ids, document_ids)
        (micro_batch,) = self.engine.micro_batches(batch, 1)
        together = self.ctx.pp_size * self.ctx.tp_size * self.ctx.cp_size == 1
        whole = self.config.num_labels or together
        collects = return_logits or labels is None or whole
        collect = self.output_head.full_outputs if collects and self.has_last else None
        one_stage = self.ctx.pp_size == 1
        result = run_pipeline(
            self, [micro_batch], global_batch=False, keep_graph=one_stage, collect=collect
        )
        loss = result.loss if one_stage else with_backward(result.loss, _refuse_backward)
        return Output(None if labels is None else loss, result.collected)

    @on_replica_ranks
    def token_logprobs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        document_ids: torch.Tensor | None = None,
        top_k: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the log-probability of each token, given the tokens before it.

        Call it with the same inputs on every rank of a replica. The logits are computed for a few
        tokens at a time, and again in backward, so that they are never all in memory.

        Args:
            input_ids: int64 [batch, sequence], as the other tensors of the batch: see `Batch`.
            attention_mask: 1 for tokens, 0 for padding.
            position_ids: default: 0, 1, 2, ...
            document_ids: of packed documents.
            top_k: number of most likely next tokens to return for each position.

        Returns:
            fp32 [batch, sequence], in nats, the same on every rank of the replica. It is 0 for
            padding, and for the first token of each row and of each document. With top_k, a tuple
            of it, the top_k largest log-probabilities of the token after each position, fp32
            [batch, sequence, top_k], in descending order, and their ids, int64 of the same shape.

        Raises:
            UserError: The model is a classifier, or the inputs or top_k are invalid.

        The log-probabilities can be differentiated if pp is 1: call `sync_gradients` after
        backward. Those of top_k have no gradient.

        Example:
            of_rows = model.token_logprobs(ids, attention_mask=mask).sum(dim=1)
        """
        if self.config.num_labels:
            raise UserError("a classifier has no log-probabilities of tokens: use a language model")
        if not is_tensor("input_ids", input_ids):
            raise UserError("token_logprobs needs input_ids on every rank")
        if top_k is not None:
            check_number("top_k", top_k, 1, self.config.vocab_size + 1, whole=True)
        labels, count = labels_from_tokens(input_ids, attention_mask), top_k or 0
        batch = Batch(input_ids, labels, None, attention_mask, position_ids, document_ids)
        (micro_batch,) = self.engine.micro_batches(batch, 1)
        head = self.output_head.of_log_probabilities(count) if self.has_last else None
        found = run_pipeline(
            self,
            [micro_batch],
            global_batch=False,
            keep_graph=self.ctx.pp_size == 1,
            head=head,
            collect=head.full_outputs if head else None,
        ).collected
        if found is None:
            found = torch.empty(*input_ids.shape, 1 + 2 * count, device=self.ctx.device)
        found = broadcast_from_stage(found, self.ctx.placement.last_rank, self.ctx)
        logprobs = F.pad(found[:, :-1, 0], (1, 0))
        if top_k is None:
            return logprobs
        values, ids = found[..., 1:].detach().chunk(2, dim=-1)
        return logprobs, values, ids.long()

    @on_all_ranks
    def train_batch(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        targets: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sequence_length: int | None = None,
        num_microbatches: int = 1,
        schedule: str | None = None,
        step: int | None = None,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        loss: Any = None,
        **named: torch.Tensor,
    ) -> torch.Tensor:
        """Run forward and backward of this replica's batch.

        Gradients start from zero. Afterwards p.grad is the gradient of the returned mean, the same
        on all replicas; call the step of the optimizer next. The model is set to training mode.
        Stages between the first and the last need no inputs.

        Args:
            input_ids: int64 [batch, sequence], as the other tensors of the batch: see `Batch`.
            labels: not shifted; the last stage needs them. A classifier's have another shape.
            targets: shifted, instead of labels.
            attention_mask: 1 for tokens, 0 for padding.
            position_ids: default: 0, 1, 2, ...
            document_ids: of packed documents.
            sequence_length: of the full sequence, if input_ids and targets are a rank's part.
            num_microbatches: number of micro-batches; it must divide the batch.
            schedule: name of the pipeline schedule, one of
                `megazoo.parallel.schedule.SCHEDULES`; default: that of the context. It
                must place the stages as the context does.
            step: number from which the dropout masks are drawn; default: the number of calls.
            loss_fn: custom loss, called on the last stage as loss_fn(logits, labels), with logits
                fp32 [rows, sequence, vocabulary] and labels as given. It returns the mean of a
                micro-batch. Micro-batches are weighted by their labelled tokens (by rows, if labels
                are not per token). Label smoothing and z-loss of the head are not applied. You step
                the parameters of a loss module yourself.
            loss: a `megazoo.losses.Loss` to train with, such as DPO(beta=0.1).
            named: the further tensors that this loss needs, on the last stage.

        Returns:
            The mean loss over the labelled tokens of the global batch, 0-dimensional fp32, on every
            rank.

        Raises:
            UserError: The inputs are invalid, or the ranks do not make the same call.

        Example:
            loss = model.train_batch(ids, labels=ids, num_microbatches=4)
            norm = optimizer.step()
        """
        batch = Batch(
            input_ids,
            labels,
            targets,
            attention_mask,
            position_ids,
            document_ids,
            sequence_length,
            named,
        )
        schedule = schedule or self.ctx.layout.schedule
        return self.engine.train_batch(batch, num_microbatches, schedule, step, loss_fn, loss)

    def microbatches(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        num_microbatches: int = 1,
        **inputs: torch.Tensor,
    ) -> Iterator[Output]:
        """Yield after the forward of each micro-batch, for a custom loop.

        Every rank of the pipeline must run the loop to its end, and call backward if one rank does.
        Then p.grad is the same as after `train_batch`. The model stays in its mode: after
        from_pretrained, call model.train() first. One micro-batch runs at a time; train_batch keeps
        all stages busy.

        Args:
            input_ids: int64 [batch, sequence], as the other tensors of the batch: see `Batch`.
            labels: not shifted; the last stage needs them. A classifier's have another shape.
            num_microbatches: number of micro-batches; it must divide the batch.
            **inputs: targets, attention_mask, position_ids, document_ids and sequence_length, as in
                `train_batch`.

        Yields:
            An Output per micro-batch. Its `loss` is the micro-batch's part of the mean that
            train_batch returns, the same on every rank: the parts add up to the mean.

        Example:
            for out in model.microbatches(ids, labels=ids, num_microbatches=4):
                out.loss.backward()
            optimizer.step()
        """
        given = {"input_ids": input_ids, "labels": labels, **inputs}
        yield from self.engine.microbatches(given, num_microbatches)

    @on_all_ranks
    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Synchronize the gradients after a custom backward, before the optimizer step.

        They become the mean over the replicas, as in DistributedDataParallel. Gradients of a
        parameter that is tied between stages are summed over its copies. (Copies over tp are summed
        in backward.) Every rank calls it, once per step. After `train_batch` and `microbatches`,
        which synchronize themselves, it does nothing.

        Example:
            model(ids, labels=ids).loss.backward()
            model.sync_gradients()
            optimizer.step()
        """
        self.engine.gradients.complete_custom()

    @on_all_ranks
    @torch.no_grad()
    def eval_batch(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        targets: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sequence_length: int | None = None,
        num_microbatches: int = 1,
        return_count: bool = False,
        loss: Any = None,
        **named: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss over the labelled tokens of the global batch, without dropout.

        Afterwards each module is in its previous mode.

        Args:
            input_ids: int64 [batch, sequence], as the other tensors of the batch: see `Batch`.
            labels: not shifted; the last stage needs them. A classifier's have another shape.
            targets: shifted, instead of labels.
            attention_mask: 1 for tokens, 0 for padding.
            position_ids: default: 0, 1, 2, ...
            document_ids: of packed documents.
            sequence_length: of the full sequence, if input_ids and targets are a rank's part.
            num_microbatches: number of micro-batches; it must divide the batch.
            return_count: whether to return also the number of labelled tokens, the weight of this
                batch in a mean over several.
            loss: as in `train_batch`.
            named: as in `train_batch`.

        Returns:
            The loss, 0-dimensional fp32, on every rank; with return_count a tuple of the loss and
            the number, 0-dimensional fp64.

        Raises:
            UserError: The inputs are invalid, or the ranks do not make the same call.
        """
        batch = Batch(
            input_ids,
            labels,
            targets,
            attention_mask,
            position_ids,
            document_ids,
            sequence_length,
            named,
        )
        result = self.engine.eval_batch(batch, num_microbatches, loss)
        return (result.loss, result.labelled) if return_count else result.loss


@contextmanager
def using_context(model: Any, ctx: ParallelContext) -> Iterator[None]:
    """Within this block, a model and its modules have another context with the same ranks."""
    before = model.ctx
    modules = [m for m in model.modules() if getattr(m, "ctx", None) is before]
    for module in modules:
        module.ctx = ctx
    try:
        yield
    finally:
        for module in modules:
            module.ctx = before


def _refuse_backward(_: float) -> None:
    """Raise UserError: the loss of a pipeline has no backward through the other stages."""
    raise UserError(
        "the loss of model(...) has no backward through a pipeline: call model.train_batch(...), "
        "or model.microbatches(...) in a custom loop"
    )
