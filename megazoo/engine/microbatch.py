"""What a stage is given of a micro-batch, and what a forward returns."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeVar

import torch

from megazoo.errors import UserError
from megazoo.layers.cache import KVCache
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut

ForwardStage = TypeVar("ForwardStage", bound=Callable)


@dataclass
class Output:
    """What a forward returns. loss: 0-dimensional fp32, or None. logits: [batch, sequence,
    vocabulary], or None.

    Like an output of transformers it can be indexed and given on as keywords: output[0],
    output[:2], output["loss"], f(**output). Only what is not None counts. Iterating over it raises
    UserError.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def keys(self) -> list[str]:
        """The names of the fields that are not None."""
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]

    def to_tuple(self) -> tuple[torch.Tensor, ...]:
        """The fields that are not None: (loss, logits), (loss,) or (logits,)."""
        return tuple(getattr(self, name) for name in self.keys())

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """The names and values of the fields that are not None."""
        return list(zip(self.keys(), self.to_tuple(), strict=True))

    def values(self) -> tuple[torch.Tensor, ...]:
        """The fields that are not None."""
        return self.to_tuple()

    def get(self, key: str, default: Any = None) -> Any:
        """The field of a name, or the default if there is none, or it is None."""
        return dict(self.items()).get(key, default)

    def __len__(self) -> int:
        return len(self.keys())

    def __getitem__(self, key: int | slice | str) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def __iter__(self) -> NoReturn:
        raise UserError(
            "an output can't be iterated over: for a loop over micro-batches call "
            "model.microbatches(...), to unpack loss and logits call to_tuple()"
        )


def static_steps(forward_stage: ForwardStage) -> ForwardStage:
    """Decorate a family's `forward_stage` that takes a StaticKVCache, too, for which generation
    then gives it steps of one token on CUDA, and makes them a CUDA graph.

    Such a function reads no tensor on the host, and leaves the places of tokens to the attention,
    to `batch.positions` and to `batch.position`: `batch.keys` doesn't tell them.
    """
    vars(forward_stage)["static_steps"] = True
    return forward_stage


@dataclass(frozen=True)
class MicroBatch:
    """What a stage may need to know of a micro-batch besides the activations. Tensors are int64
    [batch, sequence]; under context parallelism that is this rank's part of the sequence.

    shape: (batch, sequence), with the padding that the ranks need to share it. length: of the whole
    sequence without it. cut: which part of it this rank has; None for all.
    input_ids: None on all stages but the first. targets: targets[b, s] is the token that position s
    is to predict, or -100; of a classifier its labels, of any shape that begins with the batch.
    None on all stages but the last. labels: what a loss of the user's own is given.
    position_ids: None for 0, 1, 2 ... segments: tokens see those of the same number only; None
    where there is one segment; of the whole sequence. boundaries: int32 [documents + 1], as in
    layers.Packed, of the whole sequence, too, where each segment is one run of tokens and the
    device has a kernel for that. scored: [batch], the position of each row that a classifier judges
    it by, in the whole sequence. dropout_seed: what its dropout is drawn from.

    longest: the tokens of the longest row, where this rank can't tell it from its own; while
    generating, of the whole batch's. While generating, too: cache, the KVCache of the tokens
    before, if they are kept (segments are then of these, too); and last_only: only the last
    position's logits are wanted.
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
    length: int | None = None
    cut: SequenceCut | None = None
    longest: int | torch.Tensor | None = None
    cache: KVCache | None = None
    last_only: bool = False

    @property
    def keys(self) -> int:
        """How many tokens may be looked at: those of the sequence, and of the cache (of a
        StaticKVCache its places, which may be more)."""
        return self.cache.keys(self.shape[1]) if self.cache else self.shape[1]

    @property
    def position(self) -> torch.Tensor | None:
        """Where the only token is in a StaticKVCache: int64 [1]. None elsewhere."""
        return self.cache.position if self.cache and not self.cache.in_prompt else None

    def is_token(self, ctx: ParallelContext) -> torch.Tensor:
        """Return which activations of a layer on this rank are of tokens: False for padding of the
        batch, and for padding that the layout adds. bool [batch, this rank's part of the sequence
        under context and sequence parallelism]."""
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
        return positions.clamp_(max=self.length - 1)  # what is padded: the last position again
