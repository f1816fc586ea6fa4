"""What the stages of every model share: building, ties, layers, and the calls that users make.

The model's own file has the forward of a stage, which PipelineRun.forward calls
(engine/pipeline.py)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from megazoo.checkpoint.source import TensorSource
from megazoo.engine.calls import BatchCalls
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.training import TrainingEngine
from megazoo.errors import UserError, check_number
from megazoo.generate.generate import generate
from megazoo.generate.settings import GenerationSettings
from megazoo.layers import VocabParallelEmbedding
from megazoo.layers.dropout import dropout_seed
from megazoo.layers.layer import declared
from megazoo.models.attachment import Attachment
from megazoo.models.building import fill, make_empty, make_on_meta
from megazoo.models.config import add_missing_fields, check_sizes
from megazoo.models.freezing import Freezing
from megazoo.models.hugging_face.names import HFFiles, HFNames
from megazoo.models.outputs import (
    ClassifierHead,
    LanguageModelHead,
    LanguageModeling,
    OutputHead,
    SequenceClassification,
    task_of,
)
from megazoo.models.plain import plain_parameters
from megazoo.models.saving import Saving
from megazoo.parallel.buckets import accumulate_in_fp32
from megazoo.parallel.compile import prepare_to_compile
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import on_all_ranks
from megazoo.parallel.module import NamedParameter, ShardedModule
from megazoo.parallel.recompute import MODES, recomputed
from megazoo.parallel.shard import ParameterSpec
from megazoo.parallel.stages import Stage, cut_into_stages

# A family or a user that overrides these on the model would not be heard.
OF_THE_HEAD = ("outputs", "full_logits", "token_losses", "loss_sum", "label_count", "loss_of")


def _of_the_head(what: str) -> UserError:
    return UserError(
        f"{what} would have no effect: the head makes outputs and loss; override it in a subclass "
        "of megazoo.models.outputs.LanguageModelHead, and give that to add_head"
    )


class Model(BatchCalls, Freezing, Saving, nn.Module):
    """This rank's stages of a language model. A family adds its Config, its Block, and
    `forward_stage`.

    config: the family's dataclass. ctx: the parallel context. seed: of the dropout; `from_config`
    also draws the initial weights from it. Parameter names are global: `layers.17.mlp.up.weight` is
    layer 17 of the whole model.
    """

    _engine: TrainingEngine | None = None
    family: str  # the name that it is registered by
    Config: type[Any]  # a ModelConfig, or a dataclass that is like one
    Block: Callable[..., nn.Module]  # a layer: Block(config, its index in the whole model)
    presets: dict
    embedding: VocabParallelEmbedding
    layers: nn.ModuleDict
    head: LanguageModelHead
    score: ClassifierHead
    HUGGING_FACE = HFFiles()  # of Hugging Face directories, beside the names
    HUGGING_FACE_NAMES: ClassVar[dict[str, HFNames]] = {}  # our modules to theirs

    def __init_subclass__(cls, **options):
        """Complete the family's Config, if it does not inherit from ModelConfig. UserError for what
        the head does."""
        super().__init_subclass__(**options)
        for name in OF_THE_HEAD:
            if hasattr(cls, name):
                raise _of_the_head(f"{cls.__name__}.{name}")
        if "Config" in vars(cls):
            add_missing_fields(cls.Config)

    def __init__(self, config: Any, ctx: ParallelContext, seed: int = 0):
        super().__init__()
        self.check(config, ctx.tp_size, ctx.pp_size, ctx.virtual_size)
        self.config, self.ctx, self.seed = config, ctx, seed
        mine = ctx.placement.stages_of(ctx.pp_rank)
        all_stages = self.all_stages(config, ctx)
        self.stages: list[Stage] = [all_stages[index] for index in mine]
        # global name -> the pipeline ranks that share the parameter
        self.tied: dict[str, tuple[int, ...]] = {}
        # the tied parameters that several stages of this rank use, each with a backward of its own
        self.used_again: set[str] = set()
        self._recompute, self._interval = "none", 1
        # tokenizer files and the like that came with the weights, on rank 0
        self.sidecar_files: dict[str, bytes] = {}
        self.generation: dict = {}  # what its generation_config.json says
        self.attached: Attachment | None = None  # parameters beside its own, such as adapters
        self.weights_path: str | None = None  # of the directory that its weights were read from
        self.read_from: Sequence[TensorSource] = ()  # the sources of the weights, until a step

    def __setattr__(self, name: str, value) -> None:
        """Set an attribute; UserError for what the head does."""
        if name in OF_THE_HEAD and callable(value) and not isinstance(value, nn.Module):
            raise _of_the_head(f"the {name} that is set on a model")
        super().__setattr__(name, value)

    # What a family defines.

    @classmethod
    def stage_costs(cls, config: Any) -> tuple[float, float, float]:
        """Return the multiply-adds a token of one layer, of what comes before the layers, and of
        what comes after."""
        raise NotImplementedError

    @classmethod
    def longest_sequence(cls, config: Any) -> int:
        """Return how many tokens the longest sequence has that the model takes."""
        return config.max_positions

    @classmethod
    def can_cache(cls, config: Any, length: int) -> bool:
        """Return whether the keys and values of a sequence's tokens stay as they are while it grows
        to `length` tokens."""
        return True

    def forward_stage(self, x: torch.Tensor, batch: MicroBatch, stage: Stage) -> torch.Tensor:
        """Run one stage: token ids (first stage) or activations in; activations out, of the last
        stage those that the head takes: [batch, sequence, hidden]."""
        raise NotImplementedError

    # Build.

    @classmethod
    def check(cls, config: Any, tp: int, pp: int, virtual: int = 1) -> None:
        """Raise UserError, naming what would do, if the model can't be cut into tp x pp, with so
        many stages a rank."""
        check_sizes(config, tp, pp, virtual)

    @classmethod
    def all_stages(cls, config: Any, ctx: ParallelContext) -> list[Stage]:
        """Cut the layers into the stages of all ranks, in the order of the forward."""
        return cut_into_stages(
            config.layers, ctx.stage_count, ctx.stage_layers, cls.stage_costs(config)
        )

    @classmethod
    def build(
        cls, config: Any, ctx: ParallelContext, *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> "Model":
        """This rank's stages with initial weights: planned on meta, then filled parameter by
        parameter."""
        return fill(cls.empty(config, ctx, dtype=dtype, seed=seed), seed)

    @classmethod
    def empty(
        cls, config: Any, ctx: ParallelContext, *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> "Model":
        """This rank's stages on its device, to be filled; plain modules have their initial values.
        Warns, on rank 0, of stages without layers."""
        return make_empty(cls, config, ctx, dtype, seed)

    @classmethod
    def on_meta(cls, config: Any, ctx: ParallelContext, *, seed: int = 0) -> "Model":
        """Make this rank's stages without memory: what a virtual context can build."""
        return make_on_meta(cls, config, ctx, seed)

    @property
    def engine(self) -> TrainingEngine:
        """What trains this model. A deep copy has its own; a shallow copy, which has the same
        parameters, shares it."""
        if self._engine is None or self._engine.model is None:
            self._engine = TrainingEngine(self, self._engine)
        return self._engine

    def _apply(self, fn, recurse: bool = True) -> "Model":
        """Convert the model, as half() and to() do. Gradients stay fp32."""
        super()._apply(fn, recurse)
        for parameter in self.parameters():
            accumulate_in_fp32(parameter)
        return self

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage, which takes token ids."""
        return self.stages[0].first

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which makes the outputs."""
        return self.stages[-1].last

    @property
    def task(self) -> LanguageModeling | SequenceClassification:
        """What the model is for, by its config."""
        return task_of(self.config)

    @property
    def output_head(self) -> OutputHead:
        """What the last stage ends in: `score` of a classifier, `head` of a language model."""
        return self.score if self.config.num_labels else self.head

    def _ties_head(self) -> bool:
        """Return whether the embedding's matrix makes the logits; a classifier has its own."""
        return self.config.tie_embeddings and not self.config.num_labels

    def add_embedding(self) -> None:
        """Make the token embedding, on the rank of the first stage; and where it is tied to the
        head, and the last stage is on another rank, a copy there that stays equal."""
        tied = self._ties_head()
        if self.has_first or (self.has_last and tied):
            self.embedding = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size)
        if tied:
            self.tie("embedding.weight", 0, -1)

    def add_layers(self) -> None:
        """Make this rank's layers, each a Block."""
        indices = (index for stage in self.stages for index in stage.layers)
        self.layers = nn.ModuleDict(
            {str(index): self.Block(self.config, index) for index in indices}
        )

    def add_head(self, head: type[LanguageModelHead] = LanguageModelHead, **options: Any) -> None:
        """Make what the last stage ends in: a classifier's scores, or the logits and their loss.

        head: the class of a language model's head. options: its arguments, such as soft_cap.
        """
        if not self.has_last:
            return
        if self.config.num_labels:
            self.score = ClassifierHead(self.config)
            return
        tied = self._ties_head()
        if tied and not hasattr(self, "embedding"):
            raise UserError("the head is tied to the embedding: call add_embedding() before it")
        self.head = head(self.config, embedding=self.embedding if tied else None, **options)

    def tie(self, name: str, *stages: int) -> None:
        """Say that the parameter `name` (a global name) is one, though several stages build it: -1
        is the last stage.

        After the last backward the stages sum its gradients (engine/training.py); it counts once in
        the norm, and a checkpoint has it once.
        """
        indices = [stage % self.ctx.stage_count for stage in stages]
        ranks = tuple(dict.fromkeys(map(self.ctx.placement.rank_of, indices)))
        if len(ranks) > 1:
            self.tied[name] = ranks
        if len({*indices} & {stage.index for stage in self.stages}) > 1:
            self.used_again.add(name)

    def entries(self) -> Iterator[NamedParameter]:
        """Yield this rank's parameters with their global names and cuts, in the order of the
        forward; last those of plain modules."""
        for prefix, module in self.named_modules():
            if isinstance(module, ShardedModule):
                for name, spec in module.specs.items():
                    full = f"{prefix}.{name}"
                    pp_ranks = self.tied.get(full, (self.ctx.pp_rank,))
                    yield NamedParameter(full, getattr(module, name), spec, pp_ranks)
        for name, module, key in plain_parameters(self):
            parameter = getattr(module, key)
            spec = ParameterSpec(tuple(parameter.shape), plain=True)
            yield NamedParameter(name, parameter, spec, self.tied.get(name, (self.ctx.pp_rank,)))

    # Layers.

    def recompute(self, mode: str = "full", interval: int = 1) -> "Model":
        """Trade memory for time; returns self. "none" keeps all that backward needs. "selective"
        keeps neither what attention saves nor what the MLPs' activations return. "full" keeps one
        input for `interval` layers and runs them again. What selective means to a layer it
        declares: see `Layer`.
        """
        if mode not in MODES:
            raise UserError(f"unknown recompute {mode!r}: there are {', '.join(MODES)}")
        check_number("interval", interval, 1, whole=True)
        self._recompute, self._interval = mode, interval
        for module in self.modules():
            if declared(module, "recompute") is not None:
                layer: Any = module
                layer.recompute = mode == "selective"
        return self

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict | None = None
    ) -> None:
        """Recompute every layer in backward: recompute("full"), by the name in transformers, whose
        keyword arguments have no effect here."""
        self.recompute("full")

    def compile(self, **options: Any) -> "Model":
        """Put every layer under torch.compile, with its options; returns self. UserError without a
        compiler.

        One layer is compiled for all, with graphs between the collectives.
        """
        prepare_to_compile(self.ctx.device)
        for layer in self.layers.values():
            layer.compile(**options)
        return self

    def run_layers(self, x: torch.Tensor, stage: Stage, *arguments: Any) -> torch.Tensor:
        """Run the layers of a stage, one after the other: x = layer(x, *arguments). If a MicroBatch
        is among the arguments, dropout that is given no seed draws by the batch's."""
        batches = (each for each in arguments if isinstance(each, MicroBatch))
        seed = next((batch.dropout_seed for batch in batches), None)

        def run(x: torch.Tensor, layers: range) -> torch.Tensor:
            with dropout_seed(seed):
                for i in layers:
                    x = self.layers[str(i)](x, *arguments)
            return x

        if self._recompute != "full" or not torch.is_grad_enabled():
            return run(x, stage.layers)
        for first in stage.layers[:: self._interval]:
            layers = range(first, min(first + self._interval, stage.layers.stop))
            if not x.requires_grad:  # nothing before these layers is trained
                if not self._trains(layers):
                    x = run(x, layers)
                    continue
                x = x.detach().requires_grad_()
            x = recomputed(partial(run, layers=layers), x)
        return x

    def _trains(self, layers: range) -> bool:
        """Return whether a parameter of these layers is not frozen."""
        parameters = (p for index in layers for p in self.layers[str(index)].parameters())
        return any(parameter.requires_grad for parameter in parameters)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """The context's device, where this rank's parameters are."""
        return self.ctx.device

    @on_all_ranks
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        use_cache: bool = True,
        streamer: Any = None,
        **settings: Any,
    ) -> torch.Tensor:
        """Continue prompts; returns int64 [batch, prompt + new tokens] of the given prompts.

        input_ids: int64 [batch, prompt]; attention_mask: 0 for padding, on the left. Every rank
        calls it, with the same inputs on the ranks of a replica. Replicas with the same inputs
        share the rows, and each gets all of them; with inputs of its own, each gets its own.
        settings: those of `megazoo.generate.settings.GenerationSettings`, such as max_new_tokens or
        max_length, do_sample, num_beams, num_return_sequences, no_repeat_ngram_size, stop, seed;
        eos_token_id and pad_token_id are the checkpoint's by default. With num_return_sequences n
        there are n rows for each prompt. Rows that ended are padded. use_cache False runs all
        tokens again for each new one. streamer: for one row; its put(token ids) is called with each
        new token, its end() at the end. UserError for a prompt or a setting that can't be.
        """
        asked = GenerationSettings.of(settings, self.generation)
        return generate(
            self, input_ids, attention_mask, asked, use_cache=use_cache, streamer=streamer
        )
