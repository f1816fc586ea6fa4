"""Check the inputs of a model and split them into the micro-batches that its stages run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from megazoo.constants import IGNORE_INDEX
from megazoo.engine.microbatch import MicroBatch, numbers_of
from megazoo.errors import UserError, check_number
from megazoo.parallel.collectives import broadcast_from_stage
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.random import derive_seed
from megazoo.parallel.sequence import SequenceCut, padded_length


@dataclass(frozen=True)
class Batch:
    """The inputs of one replica. Every tensor is int64 [batch, sequence], and may be None.

    A batch may have no rows: tensors [0, sequence]. The masks and positions of the first stage are
    sent to all other stages, and the shape of the batch to stages without tensors.

    Attributes:
        input_ids: needed on the first stage.
        labels: aligned with input_ids; they are shifted within each document. Needed on the last
            stage, or targets. -100 has no loss. Labels on padding count: set them to -100. For a
            classifier: int64 [batch], or floats [batch] or [batch, labels]. For a custom loss: any
            shape that starts with the batch.
        targets: already shifted, instead of labels.
        attention_mask: 1 for tokens, 0 for padding on either side.
        position_ids: default: 0, 1, 2, ... ALiBi models ignore them, because their positions are
            distances.
        document_ids: tokens attend only to tokens with the same number, for packed documents.
        sequence_length: number of tokens of the full sequence, if input_ids and targets are only a
            context-parallel rank's part, as `SequenceCut.own` returns it for a sequence that is
            padded on the right to its `padded_length`. All other tensors are full sequences, the
            same on all ranks along cp. By default these two are also full sequences.
        named: further tensors that a loss needs, by name: [batch, ...] or [batch, sequence, ...].
            Those per row are per document if rows have several: [batch, documents].
    """

    input_ids: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    sequence_length: int | None = None
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def micro_batches(
        self,
        count: int,
        ctx: ParallelContext,
        task: Any,
        *,
        longest: int,
        own_loss: bool,
        seed: int,
        step: int,
        loss: Any = None,
    ) -> list[MicroBatch]:
        """Check the batch, and split it into `count` micro-batches on the device.

        Args:
            count: number of micro-batches.
            ctx: parallel context.
            task: task of the model, which interprets its labels: see `megazoo.models.outputs`.
            longest: tokens of the longest sequence that the model supports.
            own_loss: whether the labels are for a custom loss.
            seed: seed of the model, from which the dropout seeds are derived.
            step: number of the call, from which they are derived, too.
            loss: the `megazoo.losses.Loss`, if it is not the cross-entropy.
        """
        check_number("num_microbatches", count, 1, whole=True)
        tokens = self._given()
        if ctx.pp_rank == 0 and "input_ids" not in tokens:
            raise UserError("the first stage needs input_ids")
        if self.sequence_length is not None:
            tokens |= _whole_of_parts(tokens, self.sequence_length, ctx, task)
        # Labels that are not per token have another shape.
        labels = None if task.labels_are_of_tokens and not own_loss else tokens.pop("labels", None)
        shape, shared, documents = _agree_on_shape(tokens, ctx, loss)
        labels = tokens.pop("labels", labels)
        _check_size(shape, count, longest)
        _check_ids(tokens, task.vocab_size, longest)
        targets = task.targets(tokens.pop("targets", None), labels, shape, own_loss)
        scored = task.scored_positions(tokens.get("input_ids") if ctx.pp_rank == 0 else None, shape)
        if labels is not None and len(labels) != shape[0]:
            raise UserError(
                f"labels have the shape {list(labels.shape)}; the batch has {shape[0]} rows"
            )

        mask, numbers = tokens.pop("attention_mask", None), tokens.pop("document_ids", None)
        columns = {**tokens, "segments": _segments(mask, numbers)}
        rows: dict[str, torch.Tensor | None] = {"scored": scored}  # tensors that are not per token
        if own_loss:
            rows["labels"] = targets if labels is None else labels
        if task.labels_are_of_tokens:
            columns["targets"] = targets
        else:
            rows["targets"] = targets
        if loss and documents == 1 and shape[0] // count % loss.rows_together:
            raise UserError(
                f"a micro-batch has {shape[0] // count} rows, but the loss needs a multiple of "
                f"{loss.rows_together}: use fewer micro-batches"
            )
        needs, named = loss.needs if loss else {}, {}
        if ctx.pp_rank == ctx.placement.last_rank:
            named = self._checked_named(needs, shape, documents)
        columns |= {name: each for name, each in named.items() if needs[name] == "token"}
        rows |= {name: each for name, each in named.items() if needs[name] != "token"}
        padding = padded_length(shape[1], ctx) - shape[1]
        if ctx.pp_rank == 0 and _takes_boundaries(ctx):
            rows["boundaries"] = _boundaries(columns["segments"], padding, count)
        tensors = _padded(_on_device(columns, ctx), padding) | _on_device(rows, ctx)
        padded_shape = (shape[0], shape[1] + padding)
        if ctx.pp_size > 1:
            shared["scored"] = not task.labels_are_of_tokens
            if shared["segments"] and _takes_boundaries(ctx):
                held = tensors.get("boundaries")
                (shared["boundaries"],) = _tell([0 if held is None else len(held)], ctx)
            tensors = _from_first_stage(tensors, padded_shape, shared, ctx)
        shifted = labels is not None and task.labels_are_of_tokens
        if shifted and {"targets", "segments"} <= tensors.keys():
            tensors["targets"] = _within_documents(tensors["targets"], tensors["segments"])
        replica = ctx.token_axis.rank
        seeds = [derive_seed(seed, "dropout", step, index, replica) for index in range(count)]
        of_tokens = {"position_ids", *columns} - {"segments"}  # attention needs all segments
        return _cut(
            tensors,
            padded_shape,
            of_tokens,
            ctx,
            length=shape[1],
            dropout_seeds=seeds,
            named=named.keys(),
            documents=documents,
        )

    def _checked_named(
        self, needs: Mapping[str, str], shape: tuple[int, int], documents: int
    ) -> dict[str, torch.Tensor]:
        """Return the named tensors. UserError unless they are those that the loss needs, with a row
        for each row of the batch."""
        if self.named.keys() != needs.keys():
            given, needed = (", ".join(each) or "none" for each in (self.named, needs))
            raise UserError(f"the loss needs the tensors {needed}, and was given {given}")
        named = dict(self.named)
        for name, tensor in self.named.items():
            is_tensor(name, tensor)
            wanted = shape if needs[name] == "token" else shape[:1]
            if needs[name] == "row" and documents > 1:
                wanted = (shape[0], documents)
                # Rows of another replica may have more documents.
                tensor = named[name] = tensor[:, :documents] if tensor.dim() > 1 else tensor
            if tuple(tensor.shape[: len(wanted)]) != wanted:
                raise UserError(
                    f"{name} has the shape {list(tensor.shape)}: it must begin with {list(wanted)}"
                )
        return named

    def _given(self) -> dict[str, torch.Tensor]:
        """Return the given tensors, with ids as int64."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        del given["sequence_length"], given["named"]
        is_mask(given["attention_mask"])
        return {
            name: tensor if name in ("labels", "attention_mask") else ids_of(name, tensor)
            for name, tensor in given.items()
            if is_tensor(name, tensor)
        }


def is_tensor(name: str, tensor: Any) -> bool:
    """Return whether there is a tensor; False for None, UserError for anything else."""
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise UserError(
            f"{name} must be a tensor, not {type(tensor).__name__}: use torch.tensor(...)"
        )
    return tensor is not None


def ids_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ids of tokens, positions or documents as int64; UserError if they are not integers."""
    is_tensor(name, tensor)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{name} must be whole numbers, int64, not {kind}")
    return tensor.long()


def labels_from_tokens(input_ids: torch.Tensor, attention_mask: Any) -> torch.Tensor:
    """Return labels that predict each token after a token: without padding, and without the first
    token after padding."""
    if not is_mask(attention_mask) or attention_mask.shape != input_ids.shape:
        return input_ids  # another shape is an error of the batch
    tokens = attention_mask != 0
    follows = F.pad(tokens[:, :-1], (1, 0))
    return input_ids.masked_fill(~(tokens & follows).to(input_ids.device), IGNORE_INDEX)


def is_mask(tensor: Any) -> bool:
    """Return whether there is an attention mask; UserError for an additive mask, in which 0 means a
    token. On CUDA the host waits only for the values of a floating-point mask."""
    given = is_tensor("attention_mask", tensor)
    if given and tensor.is_floating_point():
        tokens = tensor == 1
        if not (tokens | (tensor == 0)).all() or (tensor.numel() and not tokens.any()):
            raise UserError(
                "attention_mask must be 1 for tokens and 0 for padding, not a mask that is added "
                "to scores"
            )
    return given


def check_range(
    what: str, tensor: torch.Tensor | None, end: int, where: str, besides: int | None = None
) -> None:
    """Raise UserError for numbers outside 0 <= n < end, except `besides`. It is skipped on CUDA,
    where it would wait for the device."""
    if tensor is None or tensor.is_cuda or not tensor.numel():
        return
    tensor = tensor if besides is None else tensor.masked_fill(tensor == besides, 0)
    low, high = tensor.min().item(), tensor.max().item()
    if low < 0 or high >= end:
        raise UserError(f"{what} {low if low < 0 else high} is outside {where}")


def _whole_of_parts(
    tokens: dict[str, torch.Tensor], length: int, ctx: ParallelContext, task: Any
) -> dict[str, torch.Tensor]:
    """Return input_ids and targets as full sequences of this length, with this rank's part in its
    place, and 0 or IGNORE_INDEX elsewhere."""
    check_number("sequence_length", length, 1, whole=True)
    if not task.labels_are_of_tokens or "labels" in tokens:
        raise UserError(
            "labels cannot be combined with sequence_length, because they are shifted by "
            "one token: pass targets, shifted before the split, or omit sequence_length"
        )
    padded, whole = padded_length(length, ctx), {}
    cut, part = SequenceCut.of(padded, ctx), padded // ctx.cp_size
    for name, nothing in (("input_ids", 0), ("targets", IGNORE_INDEX)):
        if name not in tokens:
            continue
        own = tokens[name]
        if own.dim() != 2 or own.shape[1] != part:
            raise UserError(
                f"{name} has the shape {list(own.shape)}, not [batch, {part}], a "
                f"rank's part of {padded} tokens"
            )
        if cut is not None:
            own = cut.place(own, own.new_full((len(own), padded), nothing))
        whole[name] = own[:, :length]
    return whole


def _agree_on_shape(
    tokens: dict[str, torch.Tensor], ctx: ParallelContext, loss: Any
) -> tuple[tuple[int, int], dict[str, int], int]:
    """Return the shape of the batch on the first stage, the tensors that it has for all stages, and
    with a loss the number of documents of the row with the most; UserError for a tensor with
    another shape."""
    shape = tuple(next(iter(tokens.values())).shape) if tokens else ()
    segments = "document_ids" in tokens or _has_padding(tokens.get("attention_mask"))
    shared: dict[str, int] = {"position_ids": "position_ids" in tokens, "segments": segments}
    documents = _documents_of_rows(tokens, loss) if loss else 1
    if ctx.pp_size > 1:
        if ctx.pp_rank == 0 and len(shape) != 2:
            raise UserError(f"input_ids has the shape {list(shape)}, not [batch, sequence]")
        told = [*shape, *shared.values(), documents] if ctx.pp_rank == 0 else [0] * 5
        *told, documents = _tell(told, ctx)
        shape = tuple(told[:2])
        shared = {"position_ids": bool(told[2]), "segments": bool(told[3])}
    for name, tensor in tokens.items():
        if len(shape) != 2:
            raise UserError(f"{name} has the shape {list(tensor.shape)}, not [batch, sequence]")
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{name} has the shape {list(tensor.shape)}, not the batch's {list(shape)}"
            )
    batch, sequence = shape
    return (batch, sequence), shared, documents


def _documents_of_rows(tokens: dict[str, torch.Tensor], loss: Any) -> int:
    """Return the number of documents of the row with the most; UserError if a row has several, and
    not a multiple of those that the loss needs together."""
    ids, mask = tokens.get("document_ids"), tokens.get("attention_mask")
    if ids is None or ids.dim() != 2 or not ids.numel():
        return 1
    counts, together = numbers_of(ids).amax(dim=1) + 1, loss.rows_together
    if mask is not None and mask.shape == ids.shape:
        given = counts
        counts = numbers_of(ids.masked_fill((mask == 0).to(ids.device), -1)).amax(dim=1) + 1
        if together > 1 and not torch.equal(given, counts):
            raise UserError(
                "attention_mask has 0 within or instead of a document, whose parts a loss would "
                "mix up: mark padding with document_ids of -1"
            )
    most = int(counts.max())
    if most > 1 and (wrong := counts[counts % together != 0]).numel():
        raise UserError(
            f"a row has {int(wrong[0])} documents, but the loss needs a multiple of {together}: "
            "rows have either one document each, or whole groups of them"
        )
    return most


def _tell(numbers: list[int], ctx: ParallelContext) -> list[int]:
    """Return the numbers of the first stage, sent as a CPU tensor, so that no rank waits for a
    device."""
    return broadcast_from_stage(torch.tensor(numbers), ctx.placement.first_rank, ctx).tolist()


def _check_size(shape: tuple[int, int], count: int, longest: int) -> None:
    """Raise UserError if the batch can't be split into `count`, or its sequences are too long."""
    batch, sequence = shape
    if batch % count:
        raise UserError(f"num_microbatches {count} does not divide the batch of {batch}")
    if sequence > longest:
        raise UserError(f"a sequence of {sequence} exceeds the model's max-positions {longest}")


def _check_ids(tokens: dict[str, torch.Tensor], vocab_size: int, longest: int) -> None:
    """Raise UserError for token ids and positions that the model does not have."""
    vocabulary, positions = f"the vocabulary of {vocab_size}", f"the model's {longest} positions"
    check_range("token id", tokens.get("input_ids"), vocab_size, vocabulary)
    check_range("position", tokens.get("position_ids"), longest, positions)


def _segments(mask: torch.Tensor | None, documents: torch.Tensor | None) -> torch.Tensor | None:
    """Return the segment number of each token, which attends only to the same number. Padding has
    the number -1. None: one segment."""
    if mask is None or not _has_padding(mask):
        return documents
    if documents is None:
        documents = torch.zeros_like(mask, dtype=torch.int64)
    documents = documents.to(mask.device)
    return documents.masked_fill(mask == 0, -1)


def _within_documents(targets: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Return shifted labels without those of the last token of each document, which would be the
    first token of the next one."""
    here, following = segments[:, :-1], segments[:, 1:]
    crosses = (here != following) & (here != -1) & (following != -1)
    return targets.masked_fill(F.pad(crosses, (0, 1)), IGNORE_INDEX)


def _has_padding(mask: torch.Tensor | None) -> bool:
    # On CUDA, reading the mask would wait for the device.
    return mask is not None and (mask.is_cuda or not bool(mask.all()))


def _takes_boundaries(ctx: ParallelContext) -> bool:
    return ctx.device.type == "cuda"


def _boundaries(segments: torch.Tensor | None, padding: int, count: int) -> torch.Tensor | None:
    """Return the segment boundaries of each of `count` micro-batches, concatenated; each
    micro-batch has the same number of entries. padding: number of tokens that will be added on the
    right.

    None if there is one segment or none, if several separate runs of tokens have the same number,
    and on CUDA, where reading the numbers would wait for the device.
    """
    if segments is None or segments.is_cuda or not segments.numel():
        return None
    segments = F.pad(segments, (0, padding), value=-1)
    starts = segments[:, 1:] != segments[:, :-1]
    ordered = segments.sort(dim=1).values
    if not torch.equal(starts.sum(1), (ordered[:, 1:] != ordered[:, :-1]).sum(1)):
        return None
    of_each = F.pad(starts, (1, 0), value=True).view(count, -1)
    places = [starts.nonzero()[:, 0] for starts in of_each]
    tokens = of_each.shape[1]
    together = pad_sequence(places, batch_first=True, padding_value=tokens)
    return F.pad(together, (0, 1), value=tokens).int().flatten()


def _on_device(
    tensors: dict[str, torch.Tensor | None], ctx: ParallelContext
) -> dict[str, torch.Tensor]:
    return {name: _moved(x, ctx.device) for name, x in tensors.items() if x is not None}


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device. The host does not wait for the copy: it is from separate
    pinned memory, so the caller may change the tensor."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return staged.to(device, non_blocking=True)


def _padded(tokens: dict[str, torch.Tensor], padding: int) -> dict[str, torch.Tensor]:
    """Add this number of padding tokens on the right, so that the ranks can split the sequence. No
    token attends to them: they have token 0, the last position, no segment, and no loss."""
    if not padding:
        return tokens
    values = {"targets": IGNORE_INDEX, "segments": -1}
    padded = {
        name: F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding), value=values.get(name, 0))
        for name, x in tokens.items()
    }
    if "position_ids" in tokens:
        last = tokens["position_ids"][:, -1:]
        padded["position_ids"][:, -padding:] = last
    return padded


def _from_first_stage(
    tensors: dict[str, torch.Tensor],
    shape: tuple[int, int],
    shared: dict[str, int],
    ctx: ParallelContext,
) -> dict[str, torch.Tensor]:
    """Replace tensors by those that the first stage has for all stages. shared: for each name,
    whether the first stage has the tensor; for boundaries, their number."""
    sizes = {"scored": shape[:1], "boundaries": (shared.get("boundaries", 0),)}
    kept = {name: tensor for name, tensor in tensors.items() if name not in shared}
    for name in (name for name, there in shared.items() if there):
        size = sizes.get(name, shape)
        dtype = torch.int32 if name == "boundaries" else torch.int64
        if ctx.pp_rank == 0:
            tensor = tensors[name].to(dtype).contiguous()
        else:
            tensor = torch.empty(size, dtype=dtype, device=ctx.device)
        kept[name] = broadcast_from_stage(tensor, ctx.placement.first_rank, ctx)
    return kept


def _cut(
    tensors: dict[str, torch.Tensor],
    shape: tuple[int, int],
    of_tokens: set[str],
    ctx: ParallelContext,
    *,
    length: int,
    dropout_seeds: list[int],
    named: Collection[str],
    documents: int,
) -> list[MicroBatch]:
    """Split tensors along the batch into one micro-batch per seed, and the tensors in of_tokens
    also along the sequence, to this rank's part. shape: with padding. length: of the sequence
    without padding. named: names of tensors for the loss. documents: see MicroBatch."""
    count, cut = len(dropout_seeds), SequenceCut.of(shape[1], ctx)
    of_each = (shape[0] // count, shape[1] // ctx.cp_size)
    parts = {name: tensor.chunk(count) for name, tensor in tensors.items()}
    batches = []
    for index, dropout_seed in enumerate(dropout_seeds):
        given: dict[str, Any] = {name: part[index] for name, part in parts.items()}
        if cut is not None:
            longest = _longest(given.get("position_ids"), length)
            given |= {name: cut.own(given[name]) for name in of_tokens & given.keys()}
            given["longest"] = longest
        given["named"] = {name: given.pop(name) for name in named}
        batches.append(
            MicroBatch(
                of_each,
                length=length,
                cut=cut,
                dropout_seed=dropout_seed,
                documents=documents,
                **given,
            )
        )
    return batches


def _longest(positions: torch.Tensor | None, length: int) -> int | torch.Tensor:
    """Return the number of tokens of the longest row of a micro-batch, from the positions of full
    sequences. length: of the sequence, without padding."""
    if positions is None or not positions.numel():
        return length
    return positions.max() + 1  # on the device: only code that needs the number waits for it
