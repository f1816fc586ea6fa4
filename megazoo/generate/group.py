"""Prompts, and the rows that continue them, that pass through the stages together."""

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.microbatch import takes_static_steps as forward_takes_static_steps
from megazoo.generate.decoding import BeamSearch, Choice, Chooser, Sampler
from megazoo.generate.graph import StepGraph
from megazoo.generate.prefill import Prefix, PromptChunk, pieces_of, shared_prefix
from megazoo.generate.settings import GenerationSettings
from megazoo.layers import KVCache
from megazoo.layers.layer import Layer, attentions_of, declared
from megazoo.layers.static_cache import StaticKVCache
from megazoo.parallel.context import ParallelContext
from megazoo.torch_internals import takes_pages


def takes_static_steps(model: Any) -> bool:
    """Return whether steps use a StaticKVCache: on CUDA, if the family supports it and all layers
    use CausalSelfAttention. On a CPU, growing shapes are cheaper."""
    return (
        model.ctx.device.type == "cuda"
        and forward_takes_static_steps(model)
        and all(map(_takes_static_cache, model.layers.values()))
    )


def _takes_static_cache(layer: nn.Module) -> bool:
    attentions = list(attentions_of(layer))
    return bool(attentions) and all(declared(each, "static_cache") for each in attentions)


def takes_paged_steps(model: Any) -> bool:
    """Return whether steps with a StaticKVCache use pages: if all attention layers support Packed,
    and the device has a kernel for pages."""
    attentions = [each for layer in model.layers.values() for each in attentions_of(layer)]
    packed = all(isinstance(each, Layer) and each.takes_packed(model.dtype) for each in attentions)
    return packed and takes_pages(model.ctx.device, model.dtype)


def takes_graphs(ctx: ParallelContext) -> bool:
    """Return whether steps with fixed shapes become CUDA graphs: on CUDA, if a rank has a full
    replica, so that no step waits for another rank."""
    has_replica = ctx.tp_size == ctx.pp_size == 1 and not ctx.folded
    return ctx.device.type == "cuda" and has_replica


class Group:
    """Prompts, and the rows that continue them, that pass through the stages together.

    numbers: of the prompts in the batch. input_ids, positions, segments: the tokens of the next
    forward, int64 [rows, tokens]; without a cache, all tokens; segments include the cached tokens.
    pieces: remaining pieces of the prompts. forwards: number of forwards so far. longest: tokens of
    the longest prompt in the batch. prefix: the common prefix of all prompts, if it is run first,
    and prefix_cache, its cache with one row. chooser: only on the last stage; choice: its last
    choice. graph: runs steps of one token, or None.

    With a StaticKVCache these tensors are the same in every step of one token, and are overwritten.
    """

    def __init__(
        self,
        model,
        input_ids: torch.Tensor,
        real: torch.Tensor | None,
        numbers: range,
        longest: int,
        settings: GenerationSettings,
        use_cache: bool,
    ):
        """real: which tokens of the prompts are not padding, bool, or None for all."""
        self.numbers, self.longest = numbers, longest
        self.copies, self.beams = settings.rows_of_prompt, settings.num_beams > 1
        self.done, self.steps, self.most = False, 0, settings.max_new_tokens
        self.forwards = 0
        positions = segments = None
        if real is not None:
            positions = (real.cumsum(1) - 1).clamp(min=0)
            segments = real.long() - 1  # padding has the segment number -1
        self.pieces = deque([PromptChunk(input_ids, positions, segments)])
        self.cache: KVCache | None = None
        self.prefix: Prefix | None = None
        self.prefix_cache: KVCache | None = None
        self.chooser: Chooser | None = None
        self.choice: Choice | None = None
        self.graph: StepGraph | None = None
        self.static = use_cache and takes_static_steps(model)
        if use_cache:
            paged = self.static and real is None and takes_paged_steps(model)
            self._make_caches(input_ids, real, paged)
            self.pieces = pieces_of(input_ids, positions, segments, self.prefix)
        self.input_ids, self.positions, self.segments = self.pieces.popleft()
        if self.static and takes_graphs(model.ctx):
            self.graph = StepGraph(input_ids.device)
        if model.stages[-1].last and self.beams:
            self.chooser = BeamSearch(settings, input_ids, real)
        elif model.stages[-1].last:
            self.chooser = Sampler(settings, input_ids, real, numbers)

    def _make_caches(self, input_ids: torch.Tensor, real: torch.Tensor | None, paged: bool) -> None:
        prompt = input_ids.shape[1]
        length = prompt + self.most - 1
        self.cache = KVCache(length, self.copies, prompt=prompt)
        if self.static:
            self.cache = StaticKVCache(
                length, self.copies, input_ids.device, prompt=prompt, paged=paged
            )
        self.prefix = shared_prefix(input_ids, real)
        if self.prefix is not None:
            tokens = self.prefix.input_ids.shape[1]
            self.prefix_cache = KVCache(tokens, prompt=tokens, windows=False)

    @property
    def chooses(self) -> bool:
        """Whether tokens are chosen after the next forward, which has the last tokens of the
        prompts."""
        return not self.pieces

    @property
    def rows(self) -> int:
        """The number of rows to choose tokens for, including beams."""
        return len(self.numbers) * self.copies

    def batch(self) -> MicroBatch:
        """Return the input of the next forward."""
        rows, tokens = self.input_ids.shape
        batch = MicroBatch(
            (rows, tokens),
            self.input_ids,
            position_ids=self.positions,
            segments=self.segments,
            longest=self.longest + self.steps,
            cache=self.cache if self.prefix_cache is None else self.prefix_cache,
            last_only=True,
        )
        if self.static and self.steps > 0:
            seen = None if self.segments is None else self.segments[:, : batch.keys]
            alone = batch.position if self.positions is None else self.positions
            return replace(batch, position_ids=alone, segments=seen)
        return batch

    def take_piece(self) -> None:
        """Continue with the next piece of the prompts."""
        self.forwards += 1
        cache = self.prefix_cache
        if cache is not None and cache.used == cache.length:
            assert self.cache  # made together with the others
            assert self.prefix
            self.cache.begin_with(cache, self.prefix.padding, self.prefix.places)
            self.prefix_cache = None
        self.input_ids, self.positions, self.segments = self.pieces.popleft()

    def take(self, choice: Choice) -> None:
        """Continue with the chosen tokens."""
        self.forwards += 1
        self.done = self.steps + 1 == self.most or choice.done
        if self.done:
            return
        if self.copies > 1 and self.steps == 0:
            self._copy_prompts()
        self.steps += 1
        tokens = choice.tokens[:, None]
        if self.cache is None:
            self._append(tokens, choice.sources)
            return
        if choice.sources is not None:
            self.cache.reorder(choice.sources)
        if not self.static or self.steps == 1:
            self._begin_steps(tokens)
        else:
            self.input_ids.copy_(tokens)
            if self.positions is not None:
                self.positions += 1

    def _append(self, tokens: torch.Tensor, sources: torch.Tensor | None) -> None:
        """Append the chosen tokens to all tokens: without a cache."""
        earlier = self.input_ids if sources is None else self.input_ids[sources]
        self.input_ids = torch.cat([earlier, tokens], dim=1)
        if self.positions is not None and self.segments is not None:
            self.positions = torch.cat([self.positions, self.positions[:, -1:] + 1], dim=1)
            self.segments = torch.cat([self.segments, torch.zeros_like(tokens)], dim=1)

    def _begin_steps(self, tokens: torch.Tensor) -> None:
        """Continue with only the tokens [rows, 1], in separate tensors."""
        self.input_ids = tokens.clone()
        if self.positions is None or self.segments is None:
            return
        assert self.cache
        self.positions = self.positions[:, -1:] + 1
        # room for the next token, or for all possible ones
        more = self.cache.length - self.segments.shape[1] if self.static else 1
        new = self.segments.new_zeros(len(tokens), more)
        self.segments = torch.cat([self.segments, new], dim=1)

    def _copy_prompts(self) -> None:
        """Create one row for every beam or sample."""
        self.input_ids = self.input_ids.repeat_interleave(self.copies, 0)
        if self.positions is not None and self.segments is not None:
            self.positions = self.positions.repeat_interleave(self.copies, 0)
            self.segments = self.segments.repeat_interleave(self.copies, 0)
