"""The inputs of a stage for one micro-batch, and the output of a forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.errors import UserError
from megazoo.layers.cache import KVCache
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut

ForwardStage = TypeVar("ForwardStage", bound=Callable)


@dataclass
class Output:
    """The result of a forward.

    Like an output of transformers, it can be indexed and unpacked as keywords: output[0],
    output[:2], output["loss"], f(**output). These contain only the fields that are set. Iterating
    over it raises UserError.

    Attributes:
        loss: 0-dimensional fp32, or None.
        logits: [batch, sequence, vocabulary], or None.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def keys(self) -> list[str]:
        """Return the names of the fields that are set."""
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]

    def to_tuple(self) -> tuple[torch.Tensor, ...]:
        """Return the fields that are set: (loss, logits), (loss,) or (logits,)."""
        return tuple(getattr(self, name) for name in self.keys())

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Return the names and values of the fields that are set."""
        return list(zip(self.keys(), self.to_tuple(), strict=True))

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return the values of the fields that are set."""
        return self.to_tuple()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the field with this name, or the default if it is not set."""
        return dict(self.items()).get(key, default)

    def __len__(self) -> int:
        return len(self.keys())

    def __getitem__(self, key: int | slice | str) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def __iter__(self) -> NoReturn:
        raise UserError(
            "an output can't be iterated over: to loop over micro-batches, call "
            "model.microbatches(...); to unpack loss and logits, call to_tuple()"
        )


def static_steps(forward_stage: ForwardStage, parts: Sequence[str] = ()) -> ForwardStage:
    """Decorate a family's `forward_stage` that also supports a StaticKVCache, or a method that it
    calls. parts: the names of those methods, each of which must be decorated, too.

    Generation on CUDA then passes a StaticKVCache for steps of one token, and captures them as a
    CUDA graph. Such a function must not read tensors on the host. It takes the positions of tokens
    from the attention, `batch.positions` and `batch.position`, not from `batch.keys`.
    """
    vars(forward_stage)["static_steps"] = tuple(parts)
    return forward_stage


def takes_static_steps(model: Any) -> bool:
    """Return whether a model's forward of a stage is decorated with `static_steps`, and its
    parts."""
    parts = getattr(model.forward_stage, "static_steps", None)
    return parts is not None and all(
        hasattr(getattr(model, part), "static_steps") for part in parts
    )


def numbers_of(segments: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's document within its row, from 0, int64 [batch, sequence].

    segments: tokens with the same number, next to each other, are a document. -1: padding, which
    has the number of the document before.
    """
    before = F.pad(segments[:, :-1], (1, 0), value=-1)
    starts = (segments != before) & (segments != -1)
    return (starts.cumsum(1) - 1).clamp_(min=0)


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of a stage for one micro-batch, in addition to the activations.

    Tensors are int64 [batch, sequence]. Under context parallelism that is this rank's part of the
    sequence, unless stated otherwise.

    Attributes:
        shape: (batch, sequence), with the padding that the ranks need to split the sequence.
        input_ids: None on all stages except the first.
        targets: targets[b, s] is the token to predict at position s, or -100. For a classifier its
            labels, of any shape that starts with the batch. None on all stages except the last.
        position_ids: None for 0, 1, 2, ...
        segments: tokens attend only to tokens with the same number; of the full sequence. None: one
            segment.
        boundaries: int32 [documents + 1], as in layers.Packed, of the full sequence; if each
            segment is one run of tokens and the device has a kernel for it.
        dropout_seed: seed of the dropout.
        scored: [batch], the position in the full sequence from which a classifier scores each row.
        labels: the labels for a custom loss.
        named: further tensors that a loss needs, by name, on the last stage: per row, or per token.
        documents: number of documents of the row with the most, if a `megazoo.losses.Loss` is
            computed; 1 unless document_ids are given.
        length: length of the full sequence without padding.
        cut: this rank's part of the sequence; None for the full sequence.
        longest: tokens of the longest row, if this rank can't compute it from its part. In
            generation: of the longest row of the whole batch.
        cache: in generation, the KVCache of the earlier tokens, if any. The segments then include
            those tokens.
        last_only: in generation, whether only the logits of the last position are needed.
    """

    shape: tuple[int, int]
    input_ids: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    boundaries: torch.Tensor | None = None
    dropout_seed: int = 0
    scored: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)
    documents: int = 1
    length: int | None = None
    cut: SequenceCut | None = None
    longest: int | torch.Tensor | None = None
    cache: KVCache | None = None
    last_only: bool = False

    def document_numbers(self) -> torch.Tensor | None:
        """Return the number of each token's document within its row, from 0: int64 [batch, this
        rank's part of the sequence]. Padding has that of the document before. None: one document.
        """
        if self.segments is None or self.documents == 1:
            return None
        numbers = numbers_of(self.segments)
        return numbers if self.cut is None else self.cut.own(numbers)

    @property
    def keys(self) -> int:
        """The number of tokens that can be attended to: those of the sequence and of the cache (for
        a StaticKVCache its slots, which may be more)."""
        return self.cache.keys(self.shape[1]) if self.cache else self.shape[1]

    def for_layer(self, layer: nn.Module) -> "MicroBatch":
        """Return the batch with the part of its cache that a layer needs: see KVCache.for_layer."""
        cache = self.cache and self.cache.for_layer(layer)
        return self if cache is self.cache else replace(self, cache=cache)

    @property
    def position(self) -> torch.Tensor | None:
        """The position of the only token in a StaticKVCache: int64 [1]. None without one."""
        return self.cache.position if self.cache and not self.cache.in_prompt else None

    def is_token(self, ctx: ParallelContext) -> torch.Tensor:
        """Return which activations of a layer on this rank are of tokens. False: padding of the
        batch, or padding that the layout adds. bool [batch, this rank's part of the sequence under
        context and sequence parallelism]."""
        if self.cut is None:
            places = torch.arange(self.shape[1], device=ctx.device)
        else:
            places = self.cut.positions(ctx.device)
        tokens = (places < (self.length or self.shape[1])).expand(self.shape)
        if self.segments is not None:
            segments = self.segments if self.cut is None else self.cut.own(self.segments)
            tokens = tokens & (segments[:, -self.shape[1] :] != -1)
        return tokens.chunk(ctx.tp_size, 1)[ctx.tp_rank] if ctx.sequence_parallel else tokens

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions of the tokens: int64, [sequence] or [batch, sequence]."""
        if self.position_ids is not None:
            return self.position_ids
        if self.cut is not None:
            positions = self.cut.positions(device)
        else:
            positions = torch.arange(self.keys - self.shape[1], self.keys, device=device)
        whole = self.shape[1] if self.cut is None else self.cut.length
        if self.length is None or self.length == whole:
            return positions
        return positions.clamp_(max=self.length - 1)  # padding repeats the last position
