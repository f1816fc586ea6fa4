"""What the stages of every model share: building, ties, the loss, and the calls that users make.
Never a forward of a model: that stands, whole, in the model's own file."""

import fnmatch
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from megazoo.engine.batch import Batch
from megazoo.engine.microbatch import MicroBatch, Output
from megazoo.engine.pipeline import run_pipeline
from megazoo.engine.stepwise import run_stepwise, with_backward
from megazoo.errors import UserError, advise, nearest
from megazoo.generate.decoding import GenerationSettings
from megazoo.generate.generate import generate
from megazoo.layers import Dropout, VocabParallelHead, classification, vocab_parallel_cross_entropy
from megazoo.layers.cross_entropy import IGNORE_INDEX
from megazoo.models.config import check_sizes
from megazoo.models.hugging_face.names import HFNames
from megazoo.models.pretrained import load_weights, one_of, open_directory, save_parallelized
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.buckets import UNSUMMED, GradientBuckets, accumulate_in_fp32
from megazoo.parallel.collectives import all_gather_objects, all_reduce
from megazoo.parallel.compile import prepare_to_compile
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.failure import failing_together, together, together_in_replica
from megazoo.parallel.module import Entry, ShardedModule, initialize, sum_over_copies
from megazoo.parallel.p2p import sum_between_stages
from megazoo.parallel.random import derive_seed
from megazoo.parallel.recompute import MODES, recomputed
from megazoo.parallel.schedule import schedule_named, splits_backward
from megazoo.parallel.stages import Stage, cut_into_stages


class Model(nn.Module):
    """This rank's stages of a language model. A family adds its Config, its layers, and
    `forward_stage`.

    config: the family's dataclass. ctx: the parallel context. seed: of the dropout; `from_config`
    also draws the initial weights from it. Parameter names are global: `layers.17.mlp.up.weight` is
    layer 17 of the whole model.
    """

    Config: type
    presets: dict
    # For Hugging Face directories: our modules to theirs, what a backbone's files leave out of the
    # names, and a regular expression of tensors that may be there besides.
    HUGGING_FACE_NAMES: ClassVar[dict[str, HFNames]] = {}
    HUGGING_FACE_PREFIX = ""
    HUGGING_FACE_LEGACY = "$^"

    def __init__(self, config, ctx: ParallelContext, seed: int = 0):
        super().__init__()
        self.check(config, ctx.tp_size, ctx.pp_size, ctx.virtual_size)
        self.config, self.ctx, self.seed = config, ctx, seed
        self.stages: list[Stage] = self.all_stages(config, ctx)[ctx.pp_rank :: ctx.pp_size]
        # global name -> the pipeline ranks that share the parameter
        self.tied: dict[str, tuple[int, ...]] = {}
        self._recompute, self._interval = "none", 1
        self.loss_scale: LossScale | None = None  # of float16; its optimizer makes it
        # tokenizer files and the like that came with the weights, on rank 0
        self.sidecar_files: dict[str, bytes] = {}
        self.generation: dict = {}  # what its generation_config.json says
        self._calls = 0
        self._buckets: GradientBuckets | None = None
        # names of tied parameters that are frozen, once ranks agreed
        self._frozen_ties: set[str] | None = None

    # What a family defines.

    @classmethod
    def stage_costs(cls, config) -> tuple[float, float, float]:
        """Multiply-adds a token of one layer, of what comes before the layers, and of what comes
        after."""
        raise NotImplementedError

    @classmethod
    def longest_sequence(cls, config) -> int:
        """Tokens of the longest sequence that the model takes."""
        return config.max_positions

    @classmethod
    def can_cache(cls, config, length: int) -> bool:
        """Whether the keys and values of a sequence's tokens stay as they are while it grows to
        `length` tokens."""
        return True

    def forward_stage(self, x: torch.Tensor, batch: MicroBatch, stage: Stage) -> torch.Tensor:
        """One stage: token ids (first stage) or activations in; activations out, of the last stage
        those that `outputs` takes: [batch, sequence, hidden]."""
        raise NotImplementedError

    # Build.

    @classmethod
    def check(cls, config, tp: int, pp: int, virtual: int = 1) -> None:
        """Raise UserError, naming what would do, if the model can't be cut into tp x pp, with so
        many stages a rank."""
        check_sizes(config, tp, pp, virtual)

    @classmethod
    def all_stages(cls, config, ctx: ParallelContext) -> list[Stage]:
        """The stages of all ranks, in the order of the forward."""
        return cut_into_stages(
            config.layers, ctx.stage_count, ctx.stage_layers, cls.stage_costs(config)
        )

    @classmethod
    def build(cls, config, ctx: ParallelContext, *, dtype=torch.float32, seed: int = 0) -> "Model":
        """This rank's stages with initial weights: planned on meta, then filled parameter by
        parameter."""
        model = cls.empty(config, ctx, dtype=dtype, seed=seed)
        for entry in model.entries():
            initialize(entry.parameter, entry.spec, ctx, derive_seed(seed, entry.name))
        return model

    @classmethod
    def empty(cls, config, ctx: ParallelContext, *, dtype=torch.float32, seed: int = 0) -> "Model":
        """This rank's stages on its device, to be filled. Warns, on rank 0, of stages without
        layers."""
        model = cls.on_meta(config, ctx, seed=seed)
        if ctx.rank == 0 and ctx.device.type != "meta":
            cls._warn_of_empty_stages(config, ctx)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                parameter = nn.Parameter(
                    torch.empty(parameter.shape, dtype=dtype, device=ctx.device)
                )
                accumulate_in_fp32(parameter)
                setattr(module, name, parameter)
        if ctx.mesh is not None and ctx.dp_size > 1:
            model.fit_buckets()  # they notice a backward whose gradients nobody sums
        return model

    @classmethod
    def _warn_of_empty_stages(cls, config, ctx: ParallelContext) -> None:
        layer, first, last = cls.stage_costs(config)
        for stage in cls.all_stages(config, ctx):
            if not stage.layers:
                what, cost = ("embedding", first) if stage.first else ("head", last)
                advise(
                    f"stage {stage.index + 1} of {stage.count} gets no layers: its {what} weighs as much as "
                    f"{cost / layer:.1f} of them; use stage_layers uniform (--stage-layers uniform), or a smaller pp"
                )

    @classmethod
    def on_meta(cls, config, ctx: ParallelContext, *, seed: int = 0) -> "Model":
        """This rank's stages without memory: what a virtual context can build."""
        with ctx, torch.device("meta"):
            model = cls(config, ctx, seed)
        for name, module in model.named_modules():
            if isinstance(module, Dropout):
                module.site = name
        return model

    def tie(self, name: str, *stages: int) -> None:
        """Say that the parameter `name` (a global name) is one, though several stages build it: -1
        is the last stage.

        Its gradients are summed, it counts once in the norm, and a checkpoint has it once.
        """
        ranks = tuple(
            dict.fromkeys(stage % self.ctx.stage_count % self.ctx.pp_size for stage in stages)
        )
        if len(ranks) > 1:
            self.tied[name] = ranks

    def entries(self) -> Iterator[Entry]:
        """This rank's parameters with their global names and cuts, in the order of the forward."""
        for prefix, module in self.named_modules():
            if isinstance(module, ShardedModule):
                for name, spec in module.specs.items():
                    full = f"{prefix}.{name}"
                    stages = self.tied.get(full, (self.ctx.pp_rank,))
                    yield Entry(full, getattr(module, name), spec, stages)

    def trained_entries(self) -> list[Entry]:
        """List this rank's parameters that are not frozen (`requires_grad_(False)`): those that
        have gradients."""
        return [entry for entry in self.entries() if entry.parameter.requires_grad]

    @property
    def gradient_buckets(self) -> GradientBuckets:
        """What sums the gradients over the replicas, made for the parameters that are not frozen;
        see `fit_buckets`."""
        return self._buckets or self.fit_buckets()

    def fit_buckets(self) -> GradientBuckets:
        """Make the gradient buckets anew if parameters were frozen or unfrozen since they were
        made; returns them."""
        entries = self.trained_entries()
        if self._buckets is None or not self._buckets.are_of(entry.parameter for entry in entries):
            late = {
                e.parameter
                for e in entries
                if len(e.stages) > 1 or e.spec.has_partial_gradient(self.ctx)
            }
            buckets = GradientBuckets([entry.parameter for entry in entries], self.ctx, late=late)
            if self._buckets:
                self._buckets.give_way_to(buckets)
            self._buckets = buckets
        return self._buckets

    def agree_on_frozen(self) -> None:
        """Freeze on every rank what any rank has frozen its part or copy of; all ranks call it
        together.

        A tied parameter of which one stage's copy learned and the other's did not would be two.
        AdamW calls it, and the first batch that is trained on. UserError if nothing is left to
        train.
        """
        entries = list(self.entries())
        frozen = {entry.name for entry in entries if not entry.parameter.requires_grad}
        told = [(frozen, len(entries))]
        if self.ctx.mesh is not None:
            told = all_gather_objects(told[0], self.ctx)
        if all(len(names) == count for names, count in told):
            raise UserError("every parameter is frozen: there is nothing to train")
        frozen = set().union(*(names for names, _ in told))
        for entry in entries:
            if entry.name in frozen:
                entry.parameter.requires_grad_(False)
        self._frozen_ties = {
            entry.name for entry in entries if len(entry.stages) > 1 and entry.name in frozen
        }

    def train_only(self, pattern: str) -> "Model":
        """Freeze every parameter whose global name does not match the pattern; returns self.

        pattern: a regular expression that is searched for in the names, such as "head|norm" or
        "layers[.](10|11)[.]"; or, where it is none, a glob of whole names, such as "*norm*". Call
        it before the optimizer is made. UserError, with the names there are, if it matches nothing
        in the whole model.
        """
        trained = self._names_matching(pattern)
        for entry in self.entries():
            entry.parameter.requires_grad_(entry.name in trained)
        return self

    def freeze(self, pattern: str) -> "Model":
        """Freeze the parameters whose global name matches the pattern, as in `train_only`; returns
        self."""
        frozen = self._names_matching(pattern)
        for entry in self.entries():
            if entry.name in frozen:
                entry.parameter.requires_grad_(False)
        return self

    def _names_matching(self, pattern: str) -> set[str]:
        """Find the parameters of the whole model, in whatever stage, whose names match."""
        return names_matching(
            pattern, [e.name for e in self.on_meta(self.config, ParallelContext()).entries()]
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients, or zero them in place."""
        super().zero_grad(set_to_none)
        if self._buckets:
            self._buckets.forget()

    # Layers.

    def recompute(self, mode: str = "full", interval: int = 1) -> "Model":
        """Trade memory for time; returns self. "none" keeps all that backward needs. "selective"
        keeps neither what attention saves nor what the MLPs' activations return. "full" keeps one
        input for `interval` layers and runs them again. What selective means to a module it says
        itself: those that have a boolean `recompute` are told.
        """
        if mode not in MODES:
            raise UserError(f"unknown recompute {mode!r}: there are {', '.join(MODES)}")
        self._recompute, self._interval = mode, interval
        for module in self.modules():
            if isinstance(getattr(module, "recompute", None), bool):
                module.recompute = mode == "selective"
        return self

    def compile(self, **options) -> "Model":
        """Put every layer under torch.compile, with its options; returns self. UserError without a
        compiler.

        One layer is compiled for all, with graphs between the collectives.
        """
        prepare_to_compile(self.ctx.device)
        for layer in self.layers.values():
            layer.compile(**options)
        return self

    def run_layers(self, x: torch.Tensor, stage: Stage, *arguments) -> torch.Tensor:
        """The layers of a stage, one after the other: x = layer(x, *arguments)."""

        def run(x: torch.Tensor, layers: range) -> torch.Tensor:
            for i in layers:
                x = self.layers[str(i)](x, *arguments)
            return x

        if self._recompute != "full" or not torch.is_grad_enabled():
            return run(x, stage.layers)
        for first in stage.layers[:: self._interval]:
            layers = range(first, min(first + self._interval, stage.layers.stop))
            if not x.requires_grad:  # nothing before these layers learns
                if not any(
                    p.requires_grad for i in layers for p in self.layers[str(i)].parameters()
                ):
                    x = run(x, layers)
                    continue
                x = x.detach().requires_grad_()
            x = recomputed(partial(run, layers=layers), x)
        return x

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    # Outputs and loss, on the last stage.

    @property
    def output_head(self):
        """The vocabulary-parallel matrix that makes the logits: the head, or the embedding if they
        are tied."""
        return self.head if hasattr(self, "head") else self.embedding

    @property
    def num_labels(self) -> int:
        """Of a classifier of sequences; 0 for a language model."""
        return getattr(self.config, "num_labels", 0)

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """What the model says, from what the last stage returns.

        This rank's logits [batch, sequence, part of the vocabulary] (while generating, those of the
        last position), by the head, or by the embedding if they are tied; of a classifier [batch,
        labels].
        """
        if self.num_labels:
            return self.score(x, batch.scored)
        return self.output_head.logits(x[:, -1:] if batch.last_only else x)

    def whole_logits(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The last stage's outputs with the whole vocabulary, the same on every tp rank."""
        return (
            outputs
            if self.num_labels
            else self.output_head.gather_logits(outputs)[:, : batch.length]
        )

    def token_losses(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The loss of every token, in nats, 0 where it has no target: fp32 [batch, sequence]."""
        start, shape = self.output_head.start, batch.targets.shape
        losses = vocab_parallel_cross_entropy(
            outputs.flatten(0, 1), batch.targets.flatten(), start, ctx=self.ctx
        )
        return losses.view(shape)

    def loss_sum(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The sum over the micro-batch of what the loss is the mean of."""
        if self.num_labels:
            return classification.loss_sum(outputs, batch.targets, self.config.problem_type)
        return self.token_losses(outputs, batch).sum()

    def loss_of(
        self, x: torch.Tensor, batch: MicroBatch, factor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """loss_sum(outputs(x, batch), batch), of a long micro-batch without the logits of all its
        tokens at once.

        factor: what the gradient of it will be, if its backward comes next. Without, gradients need
        all logits.
        """
        differentiated, tokens = torch.is_grad_enabled(), batch.shape[0] * batch.shape[1]
        needs_all = (differentiated and factor is None) or not self._loss_is_ours
        if needs_all or not self.output_head.loss_saves_memory(tokens, differentiated):
            return self.loss_sum(self.outputs(x, batch), batch)
        return self.output_head.loss_sum(x, batch.targets, factor if differentiated else None)

    @property
    def _loss_is_ours(self) -> bool:
        """Whether nothing on the way from the last stage to the loss is a user's own."""
        if self.num_labels:
            return False
        made_of = [(self, Model, name) for name in ("outputs", "token_losses", "loss_sum")]
        made_of.append((self.output_head, VocabParallelHead, "logits"))
        return all(
            getattr(getattr(it, f), "__func__", None) is getattr(ours, f) for it, ours, f in made_of
        )

    def label_count(self, batch: MicroBatch) -> torch.Tensor | int:
        """How many labels the loss is the mean over."""
        if batch.targets is not None:
            ignores = not self.num_labels or not batch.targets.is_floating_point()
            return (batch.targets != IGNORE_INDEX).sum() if ignores else batch.targets.numel()
        return 0 if batch.labels is None else len(batch.labels)

    # What users call.

    def save_parallelized(self, directory=None, **options) -> None:
        """Write the model: see `megazoo.checkpoint.save_parallelized`."""
        save_parallelized(self, directory, **options)

    def from_parallelized(self, directory=None, *, load_directory=None) -> "Model":
        """Take the weights of a checkpoint of any layout, or of a Hugging Face directory; returns
        self.

        load_directory: OSLO's name for directory. UserError if they are of another model.
        """
        directory = one_of("from_parallelized", directory, "load_directory", load_directory)
        load_weights(open_directory(directory), self)
        return self

    @together_in_replica
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        document_ids: torch.Tensor | None = None,
        return_logits: bool = False,
    ) -> Output:
        """Run one batch; call it with the same inputs on every rank of a (pp, tp) group.

        Inputs: see `Batch`. With labels: loss, the mean over this batch's labelled tokens, on every
        rank. Without, or with return_logits, or where the loss needs them whole anyway (pp and tp
        are 1, or a classifier): logits [batch, sequence, vocabulary] ([batch, labels] of a
        classifier) on every rank of the last stage. They live as long as the output: where memory
        is short keep its loss only. The loss can be differentiated when pp is 1, with
        `sync_gradients` after backward; `train_batch` and `microbatches` train in every layout.
        """
        batch = Batch(input_ids, labels, None, attention_mask, position_ids, document_ids)
        (micro_batch,) = self.micro_batches(batch, 1)
        whole = self.num_labels or self.ctx.pp_size == self.ctx.tp_size == 1
        collect = self.whole_logits if return_logits or labels is None or whole else None
        if self.ctx.pp_size > 1:
            result = run_pipeline(self, [micro_batch], global_batch=False, collect=collect)
            loss, logits = result.loss, result.collected
            loss = with_backward(loss, _refuse_backward)
        else:
            x = self.forward_stage(micro_batch.input_ids, micro_batch, self.stages[0])
            outputs, loss, logits = self.outputs(x, micro_batch), None, None
            if labels is not None:
                count = torch.as_tensor(self.label_count(micro_batch)).clamp(min=1)
                loss = self.loss_sum(outputs, micro_batch) / count
            if collect:
                logits = collect(outputs, micro_batch)
        return Output(None if labels is None else loss, logits)

    @together
    def train_batch(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        targets: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_microbatches: int = 1,
        schedule: str = "1f1b",
        step: int | None = None,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Forward and backward of this replica's batch; returns the mean loss over the global
        batch's labelled tokens.

        Inputs: see `Batch`; stages between the first and the last need none. num_microbatches must
        divide the batch.
        step: numbers the draw of the dropout masks; by default it counts the calls. loss_fn(logits
        fp32 [rows, sequence, vocabulary], labels as given): a loss of your own, on the last stage:
        the mean of a micro-batch. What is returned, and differentiated, is the mean over the global
        batch: micro-batches weigh as many labelled tokens as they have (rows, if the labels are not
        of tokens). A module's own parameters are yours to step. Gradients start from zero;
        afterwards p.grad holds the gradient of the returned mean, the same on all replicas.
        """
        splits = splits_backward(schedule, self.ctx.pp_size, self.ctx.virtual_size)
        buckets = self._buckets_to_train()
        batch = Batch(input_ids, labels, targets, attention_mask, position_ids, document_ids)
        batches = self._with_targets(
            self.micro_batches(batch, num_microbatches, step, loss_fn is not None)
        )
        queue = WeightQueue(buckets.received) if splits else None
        buckets.start(num_microbatches, queue.weights if queue else ())
        try:
            with self._gradients_later(queue):
                scale = self.loss_scale.value if self.loss_scale else 1.0
                how = {"loss_fn": loss_fn, "loss_scale": scale, "weight_queue": queue}
                loss = run_pipeline(self, batches, schedule_named(schedule), **how).loss
            self._finish_gradients(buckets, scale)
        finally:
            buckets.stop()
        return loss

    def microbatches(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        num_microbatches: int = 1,
        **inputs: torch.Tensor,
    ) -> Iterator[Output]:
        """For a loop of your own: `for out in model.microbatches(**batch): out.loss.backward()`.

        Yields after each micro-batch's forward. Every rank of the pipeline must go through it to
        its end, and call backward where one does; then p.grad is what `train_batch` leaves there.
        out.loss: the micro-batch's part of the mean that train_batch returns, the same on every
        rank: they add up to it. inputs: as there. One micro-batch is under way at a time;
        train_batch keeps all stages busy.
        """
        with failing_together(self.ctx):
            buckets = self._buckets_to_train()
            batch = Batch(input_ids, labels, **inputs)
            batches = self._with_targets(self.micro_batches(batch, num_microbatches))
        buckets.start(num_microbatches)
        try:
            scale = self.loss_scale.value if self.loss_scale else 1.0
            with self._gradients_later(None):
                yield from run_stepwise(self, batches, scale)
            with failing_together(self.ctx):
                self._finish_gradients(buckets, scale)
        except GeneratorExit:
            with suppress(UserError), failing_together(self.ctx):  # others may still be in the loop
                raise UserError("it left its loop over model.microbatches()") from None
            raise
        finally:
            buckets.stop()

    @together
    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Make gradients whole after a backward of your own, `model(ids,
        labels=ids).loss.backward()`, before the step.

        They become the mean over the replicas of each one's gradient, as torch's
        DistributedDataParallel has it; those of a parameter that is tied between stages, the sum of
        its copies'. (Copies over tp are summed in backward.) Every rank calls it, once a step.
        After `train_batch` and `microbatches`, which sum by themselves, it does nothing.
        """
        made, buckets = self._buckets is None, self.fit_buckets()
        if made and any(parameter.grad is not None for parameter in buckets.place):
            buckets.fault = UNSUMMED  # of a backward that no hook has seen
        if buckets.fault != UNSUMMED:
            buckets.check()
        pending = torch.tensor(float(buckets.fault == UNSUMMED), device=self.ctx.device)
        for group in (self.ctx.pp_group, self.ctx.dp_group):
            all_reduce(pending, group, op=dist.ReduceOp.MAX)
        if pending:
            buckets.complete()
            self._sum_tied(self.trained_entries())
            buckets.average()

    @together
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
        num_microbatches: int = 1,
        return_count: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The mean loss over the global batch's labelled tokens, without dropout. Arguments as in
        train_batch.

        return_count: also their number, 0-dimensional fp64: what the batch weighs in a mean over
        several.
        """
        batch = Batch(input_ids, labels, targets, attention_mask, position_ids, document_ids)
        with self.without_dropout():
            result = run_pipeline(
                self, self._with_targets(self.micro_batches(batch, num_microbatches))
            )
        return (result.loss, result.labelled) if return_count else result.loss

    @together
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        use_cache: bool = True,
        streamer=None,
        **settings,
    ) -> torch.Tensor:
        """Go on from prompts; returns int64 [batch, prompt + new tokens], the same on every rank.

        input_ids: int64 [batch, prompt]; attention_mask: 0 for padding, on the left. Call it with
        the same inputs on every rank: replicas share the rows, and stages work on groups of them in
        turn. settings: those of `megazoo.generate.decoding.GenerationSettings`, such as
        max_new_tokens or max_length, do_sample, num_beams, num_return_sequences,
        no_repeat_ngram_size, stop, seed; eos_token_id and pad_token_id are the checkpoint's by
        default. With num_return_sequences n there are n rows for each prompt. Rows that ended are
        padded. use_cache False runs all tokens again for each new one. streamer: for one row; its
        put(token ids) is called with each new token, its end() at the end. UserError for a prompt
        or a setting that can't be.
        """
        names = [f.name for f in fields(GenerationSettings)]
        for name in settings:
            if name not in names:
                raise UserError(
                    f"generate has no {name}{nearest(name, names)}; there are {', '.join(names)}"
                )
        ids = {
            name: self.generation[name]
            for name in ("eos_token_id", "pad_token_id")
            if name in self.generation
        }
        settings = GenerationSettings(**{**ids, **settings})
        return generate(
            self, input_ids, attention_mask, settings, use_cache=use_cache, streamer=streamer
        )

    def micro_batches(
        self, batch: Batch, count: int, step: int | None = None, keep_labels: bool = False
    ) -> list[MicroBatch]:
        """A replica's batch, checked and cut."""
        self.ctx.require_ranks()
        self._calls += self.training
        step, longest = self._calls if step is None else step, self.longest_sequence(self.config)
        more = {"longest": longest, "keep_labels": keep_labels, "seed": self.seed, "step": step}
        return batch.micro_batches(count, self.ctx, self.config, **more)

    @contextmanager
    def without_dropout(self):
        """Within this block every module is in evaluation mode; afterwards each is as it was."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    @contextmanager
    def _gradients_later(self, queue: WeightQueue | None):
        """Within this block gradients of copies over tp stay partial: they are summed once for all
        micro-batches.

        queue: where the gradients of linear weights wait.
        """
        modules = [module for module in self.modules() if isinstance(module, ShardedModule)]
        for module in modules:
            module.sums_later, module.weight_queue = True, queue
        try:
            yield
        finally:
            for module in modules:
                module.sums_later, module.weight_queue = False, None

    def _buckets_to_train(self) -> GradientBuckets:
        """Fit the gradient buckets, once all ranks agree on what is frozen."""
        if self._frozen_ties is None:
            self.agree_on_frozen()
        frozen = {
            e.name for e in self.entries() if len(e.stages) > 1 and not e.parameter.requires_grad
        }
        if frozen != self._frozen_ties:
            what = "a tied parameter was frozen or unfrozen after training began"
            raise UserError(
                f"{what}: make a new megazoo.optim.AdamW, or call model.agree_on_frozen() on every rank"
            )
        return self.fit_buckets()

    def _finish_gradients(self, buckets: GradientBuckets, loss_scale: float) -> None:
        """After the last backward: sum what is partial over tp, tied between stages, and over the
        replicas."""
        entries = self.trained_entries()
        buckets.complete()
        partial = [
            (e.parameter.grad, e.spec) for e in entries if e.spec.has_partial_gradient(self.ctx)
        ]
        sum_over_copies(partial, self.ctx)
        self._sum_tied(entries)
        buckets.finish(loss_scale)

    def _sum_tied(self, entries: list[Entry]) -> None:
        for entry in entries:
            if len(entry.stages) > 1:
                sum_between_stages(entry.parameter.grad, list(entry.stages), self.ctx)

    def _with_targets(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        if self.stages[-1].last and batches[0].targets is None and batches[0].labels is None:
            raise UserError("the last stage needs labels or targets")
        return batches


def names_matching(pattern: str, names: list[str]) -> set[str]:
    """The names that have a regular expression in them, or that a glob fits whole; UserError if
    there are none.

    What is not a regular expression, as "*norm*", is a glob.
    """
    wrong = ""
    try:
        found = {name for name in names if re.search(pattern, name)}
    except re.error as error:
        found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        wrong = f", and is no regular expression ({error})"
    if not found:
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names)
        raise UserError(
            f"the pattern {pattern!r} matches no parameter{wrong}; there are {', '.join(kinds)}"
        )
    return found


def _refuse_backward(_: float) -> None:
    """The backward of a pipeline's loss: one stage alone has no way back to the others."""
    raise UserError(
        "the loss of model(...) can't go backward through a pipeline: call model.train_batch(...), or in a loop of "
        "your own model.microbatches(...)"
    )
