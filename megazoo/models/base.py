"""The base class of all models: how stages are built, tied parameters, layers, and generation.

Each family implements the forward of a stage, which run_stage calls (engine/stage.py)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from megazoo.engine.calls import BatchCalls
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.training import TrainingEngine
from megazoo.errors import UserError, check_number
from megazoo.families.config import add_missing_fields, check_sizes
from megazoo.families.names import HFFiles, HFNames
from megazoo.layers import VocabParallelEmbedding
from megazoo.layers.dropout import dropout_seed
from megazoo.layers.layer import declared
from megazoo.layers.linear import refuse_packed
from megazoo.models.attachment import Attachment
from megazoo.models.building import fill, make_empty, make_on_meta
from megazoo.models.costs import stage_costs
from megazoo.models.freezing import Freezing
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
from megazoo.parallel.storage import storage_of

if TYPE_CHECKING:
    from megazoo.checkpoint.source import TensorSource

# The model's head defines these; an override on the model would have no effect.
OF_THE_HEAD = ("outputs", "full_logits", "token_losses", "loss_sum", "label_count", "loss_of")


def _of_the_head(what: str) -> UserError:
    return UserError(
        f"{what} would have no effect: the head computes the outputs and the loss; override it in "
        "a subclass of megazoo.models.outputs.LanguageModelHead, and pass the subclass to add_head"
    )


def _of_layer(argument: Any, layer: nn.Module) -> Any:
    """Return an argument of all layers as one of them needs it."""
    return argument.for_layer(layer) if isinstance(argument, MicroBatch) else argument


class Layers(nn.ModuleDict):
    """This rank's layers by their numbers in the whole model: layers[17] or layers["17"]."""

    def __getitem__(self, key: int | str) -> nn.Module:
        if str(key) in self:
            return super().__getitem__(str(key))
        here = ", ".join(self) or "none"
        raise UserError(
            f"layer {key} is not on this rank, which has the layers: {here}; pass the number of one"
        )


class Model(BatchCalls, Freezing, Saving, nn.Module):
    """Hold this rank's stages of a language model or sequence classifier.

    `megazoo.from_config` and `megazoo.from_pretrained` build models. A new family subclasses
    Decoder, or Model if its stages have other parts; `megazoo.register` registers it. It defines
    Config, presets, Block and, as a Model, `forward_stage`. Parameter names are global:
    `layers.17.mlp.up.weight` belongs to layer 17 of the whole model.

    Args:
        config: the family's config.
        ctx: parallel context.
        seed: seed of dropout. `from_config` also draws the initial weights from it.
    """

    _engine: TrainingEngine | None = None
    family: str  # the name that it is registered under
    Config: type[Any]  # a ModelConfig, or a dataclass with the same fields
    Block: Callable[..., nn.Module]  # a layer: Block(config, its index in the whole model)
    presets: dict
    # None on a rank whose stages lack it
    embedding: VocabParallelEmbedding
    norm: nn.Module
    head: LanguageModelHead
    score: ClassifierHead
    layers: nn.ModuleDict
    HUGGING_FACE = HFFiles()  # properties of its Hugging Face directories, except the names
    HUGGING_FACE_NAMES: ClassVar[dict[str, HFNames]] = {}  # megazoo's names to Hugging Face's

    def __init_subclass__(cls, **options):
        """Add the missing optional fields to the family's Config. UserError if the class overrides
        a method of the head."""
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
        # the tied parameters that several stages of this rank use, each in a separate backward
        self.used_again: set[str] = set()
        self._recompute, self._interval = "none", 1
        # tokenizer files and other small files that were loaded with the weights, on rank 0
        self.sidecar_files: dict[str, bytes] = {}
        self.generation: dict = {}  # the values of generation_config.json
        self.attached: Attachment | None = None  # additional parameters, such as adapters
        self.weights_path: str | None = None  # the directory that the weights were read from
        # the sources of the weights until a step, from which fp32 masters start
        self.read_from: Sequence[TensorSource] = ()
        for part in ("embedding", "norm", "head", "score"):
            setattr(self, part, None)

    def __setattr__(self, name: str, value) -> None:
        """Set an attribute; UserError for a method that the head defines."""
        if name in OF_THE_HEAD and callable(value) and not isinstance(value, nn.Module):
            raise _of_the_head(f"the {name} that is set on a model")
        super().__setattr__(name, value)

    # What a family defines.

    @classmethod
    def stage_costs(cls, config: Any) -> tuple[float, float, float]:
        """Return the multiply-adds per token of one layer, of the embedding, and of the head. The
        layers are divided into stages by them."""
        return stage_costs(cls, config)

    @classmethod
    def longest_sequence(cls, config: Any) -> int:
        """Return the length of the longest sequence that the model accepts, in tokens."""
        return config.max_positions

    @classmethod
    def can_cache(cls, config: Any, length: int) -> bool:
        """Return whether a KV cache is valid for sequences of `length` tokens: the keys and values
        of a token must not change when the sequence grows."""
        return True

    def forward_stage(self, x: torch.Tensor, batch: MicroBatch, stage: Stage) -> torch.Tensor:
        """Run one stage.

        Args:
            x: token ids, int64 [batch, sequence], on the first stage; on the others the activations
                of the previous stage.
            batch: the micro-batch.
            stage: the stage to run.

        Returns:
            Activations, [batch, sequence, hidden]: the input of the next stage, or of the head.
        """
        raise NotImplementedError

    # Build.

    @classmethod
    def check(cls, config: Any, tp: int, pp: int, virtual: int = 1) -> None:
        """Raise UserError if the model can't be sharded over tp x pp ranks with `virtual` stages
        per rank; the error lists allowed sizes."""
        check_sizes(config, tp, pp, virtual)

    @classmethod
    def all_stages(cls, config: Any, ctx: ParallelContext) -> list[Stage]:
        """Partition the layers into the stages of all ranks, in the order of the forward."""
        costs = cls.stage_costs(config) if ctx.stage_count > 1 else (1.0, 0.0, 0.0)
        return cut_into_stages(
            config.layers, ctx.stage_count, ctx.layout.stage_layers, costs, ctx.placement
        )

    @classmethod
    def build(
        cls, config: Any, ctx: ParallelContext, *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> "Model":
        """Build this rank's stages with initial weights. Arguments: see `megazoo.from_config`."""
        return fill(cls.empty(config, ctx, dtype=dtype, seed=seed), seed)

    @classmethod
    def empty(
        cls, config: Any, ctx: ParallelContext, *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> "Model":
        """Build this rank's stages on its device, with uninitialized weights. Only plain modules
        have their initial values. Rank 0 warns about stages without layers."""
        return make_empty(cls, config, ctx, dtype, seed)

    @classmethod
    def on_meta(cls, config: Any, ctx: ParallelContext, *, seed: int = 0) -> "Model":
        """Build this rank's stages on the meta device, without memory. ctx may be virtual."""
        return make_on_meta(cls, config, ctx, seed)

    def __reduce_ex__(self, protocol):
        if storage_of(self):
            raise UserError("a model with zero 3 can't be copied: save it, and load the checkpoint")
        refuse_packed(self, "copied")
        return super().__reduce_ex__(protocol)

    @property
    def engine(self) -> TrainingEngine:
        """The training engine of this model. A deep copy has a separate one; a shallow copy, which
        has the same parameters, shares it."""
        if self._engine is None or self._engine.model is None:
            self._engine = TrainingEngine(self, self._engine)
        return self._engine

    def _apply(self, fn, recurse: bool = True) -> "Model":
        """Convert the model, as half() and to() do. Gradients stay fp32."""
        if storage_of(self):
            raise UserError(
                "a model with zero 3 can't be converted: pass its dtype when you build it"
            )
        refuse_packed(self, "converted")
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
        """Whether this rank has the last stage, which computes the outputs."""
        return self.stages[-1].last

    @property
    def task(self) -> LanguageModeling | SequenceClassification:
        """The task of the model: language modeling, or classification if the config has labels."""
        return task_of(self.config)

    @property
    def output_head(self) -> OutputHead:
        """The head of the last stage: `score` of a classifier, `head` of a language model."""
        return self.score if self.config.num_labels else self.head

    def _ties_head(self) -> bool:
        """Return whether the head uses the embedding's matrix; a classifier's head never does."""
        return self.config.tie_embeddings and not self.config.num_labels

    def add_embedding(self) -> None:
        """Add the token embedding on the rank of the first stage. If it is tied to the head, the
        rank of the last stage has a copy, which stays equal."""
        tied = self._ties_head()
        if self.has_first or (self.has_last and tied):
            self.embedding = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size)
        if tied:
            self.tie("embedding.weight", 0, -1)

    def add_layers(self) -> None:
        """Add this rank's layers, each a Block."""
        indices = (index for stage in self.stages for index in stage.layers)
        self.layers = Layers({str(index): self.Block(self.config, index) for index in indices})

    def add_head(self, head: type[LanguageModelHead] = LanguageModelHead, **options: Any) -> None:
        """Add the head on the rank of the last stage.

        A classifier gets a ClassifierHead; `head` and `options` are then ignored.

        Args:
            head: class of the language-model head.
            options: arguments of that class, such as soft_cap.
        """
        if not self.has_last:
            return
        if self.config.num_labels:
            self.score = ClassifierHead(self.config)
            return
        tied = self._ties_head()
        if tied and self.embedding is None:
            raise UserError("the head is tied to the embedding: call add_embedding() before it")
        self.head = head(self.config, embedding=self.embedding if tied else None, **options)

    def tie(self, name: str, *stages: int) -> None:
        """Tie a parameter that several stages build.

        After the last backward the gradients of its copies are summed (engine/gradients.py). The
        gradient norm counts it once, and a checkpoint stores it once.

        Args:
            name: global name of the parameter.
            stages: indices of the stages that build it; -1 is the last stage.
        """
        indices = [stage % self.ctx.stage_count for stage in stages]
        ranks = tuple(dict.fromkeys(map(self.ctx.placement.rank_of, indices)))
        if len(ranks) > 1:
            self.tied[name] = ranks
        if len({*indices} & {stage.index for stage in self.stages}) > 1:
            self.used_again.add(name)

    def entries(self) -> Iterator[NamedParameter]:
        """Yield this rank's parameters with their global names and shards, in the order of the
        forward. Those of plain modules come last."""
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
        """Recompute activations in the backward pass, to save memory.

        Args:
            mode: "none" stores all activations that backward needs. "selective" does not store the
                internal activations of attention and the outputs of the MLP activation functions;
                a custom layer declares what it recomputes (see `Layer`). "full" stores only the
                input of every `interval` layers and runs the layers again.
            interval: number of layers per stored input in mode "full".

        Returns:
            The model itself.

        Raises:
            UserError: for an unknown mode, or an interval below 1.
        """
        if mode not in MODES:
            raise UserError(f"unknown recompute mode {mode!r}; supported: {', '.join(MODES)}")
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
        """Recompute every layer in backward: `recompute("full")` under its name in transformers.

        Args:
            gradient_checkpointing_kwargs: accepted for compatibility; it has no effect.
        """
        self.recompute("full")

    def compile(self, **options: Any) -> "Model":
        """Compile every layer with torch.compile.

        All layers share one compiled code, with graph breaks at the collectives.

        Args:
            options: arguments of torch.compile.

        Returns:
            The model itself.

        Raises:
            UserError: if the machine lacks the compiler: C++ for CPUs, Triton for GPUs.
        """
        if storage_of(self):
            raise UserError("compile is not supported with zero 3: use zero 2, or do not compile")
        prepare_to_compile(self.ctx.device)
        for layer in self.layers.values():
            layer.compile(**options)
        return self

    def run_layers(self, x: torch.Tensor, stage: Stage, *arguments: Any) -> torch.Tensor:
        """Run the layers of a stage, one after the other: x = layer(x, *arguments).

        Args:
            x: activations, [batch, sequence, hidden].
            stage: the stage.
            arguments: further arguments of each layer. Dropout without a seed uses the seed of a
                MicroBatch among them.

        Returns:
            Activations, [batch, sequence, hidden].
        """
        batches = [each for each in arguments if isinstance(each, MicroBatch)]
        seed = next((batch.dropout_seed for batch in batches), None)

        def run(x: torch.Tensor, layers: range) -> torch.Tensor:
            with dropout_seed(seed):
                for i in layers:
                    layer = self.layers[str(i)]
                    x = layer(x, *(_of_layer(each, layer) for each in arguments))
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
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        min_new_tokens: int | None = None,
        min_length: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        no_repeat_ngram_size: int | None = None,
        num_beams: int | None = None,
        num_return_sequences: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | str | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        halt: Callable[[], bool] | None = None,
        use_cache: bool = True,
        streamer: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Continue prompts. Every rank calls it, with the same inputs on the ranks of a replica.

        If all replicas pass the same prompts, they share the work, and each returns all rows.
        Otherwise each replica continues its prompts.

        A setting that is not passed, or None, is that of the model's generation_config.json. The
        names and meanings are those of transformers.

        Args:
            input_ids: prompts, int64 [batch, prompt].
            attention_mask: [batch, prompt], 0 for padding, which must be on the left; by default
                all tokens count.
            use_cache: store keys and values in a KV cache. Otherwise all tokens are run again for
                each new token.
            streamer: object with the methods put(token_ids), called after each new token, and
                end(), called once at the end. It needs a batch of one row.
            max_new_tokens: maximum number of new tokens per row; default: 20.
            max_length: maximum number of tokens with the prompt and its padding, instead of
                max_new_tokens.
            min_new_tokens: minimum number of new tokens per row.
            min_length: minimum number of tokens with the prompt and its padding, unless
                min_new_tokens is set.
            do_sample: whether to sample tokens instead of taking the most likely ones. temperature,
                top_k and top_p then apply, in this order.
            temperature: divisor of the scores.
            top_k: sample from this number of most likely tokens; 0: all.
            top_p: sample from the most likely tokens whose probabilities add up to this.
            repetition_penalty: divides positive scores, and multiplies negative ones, of tokens
                that are already in the row, without padding.
            no_repeat_ngram_size: n: no n tokens occur twice in a row, including the prompt, without
                padding; 0: off. It is ignored where it would forbid all tokens.
            num_beams: number of beams; above 1: beam search.
            num_return_sequences: number of rows per prompt, one after the other: independent
                samples, or the best beams.
            length_penalty: exponent of the length in beam search.
            early_stopping: when beam search ends: True, False or "never".
            eos_token_id: one id or several, each of which ends a row.
            pad_token_id: token after the end of a row; default: the first of eos_token_id.
            stop: strings; a row ends when its new text contains one of them. It needs the
                tokenizer.
            tokenizer: the tokenizer, for stop.
            halt: called after each token on the ranks of the last stage, which must agree: True
                ends all rows.
            seed: seed of the samples. The samples of a row depend on it, on the number of the
                prompt in the batch, and on the number of the row among those of its prompt.
            others: names that generate does not have, for the error.

        Returns:
            The prompts with the new tokens, int64 [batch x num_return_sequences, prompt + new].
            Rows that ended early are padded on the right.

        Raises:
            UserError: for an invalid prompt or setting.

        Example:
            ids = torch.tensor([[464, 3290]])
            out = model.generate(ids, max_new_tokens=8, do_sample=True, seed=1)
        """
        # imported here, so that a model that trains does not load generation
        from megazoo.generate.generate import generate
        from megazoo.generate.settings import GenerationSettings

        given = {
            "max_new_tokens": max_new_tokens,
            "max_length": max_length,
            "min_new_tokens": min_new_tokens,
            "min_length": min_length,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "num_beams": num_beams,
            "num_return_sequences": num_return_sequences,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "stop": stop,
            "tokenizer": tokenizer,
            "seed": seed,
            "halt": halt,
        }
        asked = GenerationSettings.of({**given, **others}, self.generation)
        if isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2:
            longest = self.longest_sequence(self.config)
            asked = asked.limited(given, input_ids.shape[1], longest)
        storage = storage_of(self)
        with storage.all_in_memory() if storage else nullcontext():
            return generate(
                self, input_ids, attention_mask, asked, use_cache=use_cache, streamer=streamer
            )
