"""What users give to a model, checked and cut into the micro-batches that its stages run."""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError, check_number
from megazoo.layers.cross_entropy import IGNORE_INDEX
from megazoo.parallel.collectives import broadcast_from_stage
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.random import derive_seed
from megazoo.parallel.sequence import SequenceCut, padded_length


@dataclass(frozen=True)
class Batch:
    """A replica's batch as users give it. Every tensor is int64 [batch, sequence], and may be None.

    input_ids: needed on the first stage.
    labels: aligned with input_ids, to be shifted within each document; or targets: shifted already,
    taken as given. Needed on the last stage. -100 carries no loss; a label on padding counts: put
    -100 there. A classifier's labels are int64 [batch], or floats [batch(, labels)] for its other
    problems; those of a loss of one's own have any shape that begins with the batch.
    attention_mask: 1 for tokens, 0 for padding on either side.
    position_ids: by default 0, 1, 2 ...; models with ALiBi, whose positions are distances, have no
    use for them.
    document_ids: tokens see those of the same number only, for packed documents.
    sequence_length: the tokens of a sequence, where input_ids and targets are a context-parallel
    rank's part of it alone, as `SequenceCut.own` returns it of a sequence that is padded on the
    right to its `padded_length`. All other tensors, and by default these two, are of whole
    sequences, the same on all ranks along cp.

    A replica's batch may have no rows: tensors [0, sequence]. The first stage's masks and positions
    go to all others, and the batch's shape to stages that are given no tensor.
    """

    input_ids: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    sequence_length: int | None = None

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
    ) -> list[MicroBatch]:
        """Check the batch, and cut it into `count` micro-batches on the device.

        task: the model's, which knows its labels: see `megazoo.models.outputs`. longest: tokens of
        the model's longest sequence. own_loss: the labels are for a loss of the user's own. seed,
        step: of the dropout.
        """
        check_number("num_microbatches", count, 1, whole=True)
        tokens = self._given()
        if ctx.pp_rank == 0 and "input_ids" not in tokens:
            raise UserError("the first stage needs input_ids")
        if self.sequence_length is not None:
            tokens |= _whole_of_parts(tokens, self.sequence_length, ctx, task)
        # Labels that are not of tokens have a shape of their own.
        labels = None if task.labels_are_of_tokens and not own_loss else tokens.pop("labels", None)
        shape, shared = _agree_on_shape(tokens, ctx)
        labels = tokens.pop("labels", labels)
        _check_size(shape, count, longest)
        _check_ids(tokens, task.vocab_size, longest)
        targets = task.targets(tokens.pop("targets", None), labels, shape, own_loss)
        scored = task.scored_positions(tokens.get("input_ids") if ctx.pp_rank == 0 else None, shape)
        if labels is not None and len(labels) != shape[0]:
            raise UserError(f"labels are of shape {list(labels.shape)}, in a batch of {shape[0]}")

        mask, documents = tokens.pop("attention_mask", None), tokens.pop("document_ids", None)
        columns = {**tokens, "segments": _segments(mask, documents)}
        rows: dict[str, torch.Tensor | None] = {"scored": scored}  # what is not of tokens
        if own_loss:
            rows["labels"] = targets if labels is None else labels
        if task.labels_are_of_tokens:
            columns["targets"] = targets
        else:
            rows["targets"] = targets
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
        of_tokens = {"position_ids", *columns} - {"segments"}  # attention looks at all segments
        return _cut(tensors, padded_shape, of_tokens, ctx, length=shape[1], dropout_seeds=seeds)

    def _given(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are there, ids as int64."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        del given["sequence_length"]
        is_mask(given["attention_mask"])
        return {
            name: tensor if name in ("labels", "attention_mask") else ids_of(name, tensor)
            for name, tensor in given.items()
            if is_tensor(name, tensor)
        }


def is_tensor(name: str, tensor: Any) -> bool:
    """Return whether there is a tensor, or None; UserError for anything else."""
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise UserError(f"{name} must be a tensor, not {type(tensor).__name__}: torch.tensor(...)")
    return tensor is not None


def ids_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers of tokens, positions or documents as int64; UserError if they are not whole
    numbers."""
    is_tensor(name, tensor)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{name} must be whole numbers, int64, not {kind}")
    return tensor.long()


def is_mask(tensor: Any) -> bool:
    """Return whether there is an attention mask, or None; UserError for one that is added to
    scores, in which 0 stands for a token. On CUDA the host waits for the values of one of floating
    point, and for no other."""
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
    """Refuse numbers outside 0 <= n < end, but for `besides`; on CUDA the check would wait for the
    device, and is left out."""
    if tensor is None or tensor.is_cuda or not tensor.numel():
        return
    tensor = tensor if besides is None else tensor.masked_fill(tensor == besides, 0)
    low, high = tensor.min().item(), tensor.max().item()
    if low < 0 or high >= end:
        raise UserError(f"{what} {low if low < 0 else high} is outside {where}")


def _whole_of_parts(
    tokens: dict[str, torch.Tensor], length: int, ctx: ParallelContext, task: Any
) -> dict[str, torch.Tensor]:
    """Return input_ids and targets as whole sequences of this length, that have this rank's part
    where it belongs, and nothing elsewhere."""
    check_number("sequence_length", length, 1, whole=True)
    if not task.labels_are_of_tokens or "labels" in tokens:
        raise UserError(
            "labels go with whole sequences: give targets, shifted before they were cut, or no "
            "sequence_length"
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
    tokens: dict[str, torch.Tensor], ctx: ParallelContext
) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the batch's shape, as the first stage has it, and which tensors it has for all others;
    UserError for a tensor of another shape."""
    shape = tuple(next(iter(tokens.values())).shape) if tokens else ()
    segments = "document_ids" in tokens or _has_padding(tokens.get("attention_mask"))
    shared: dict[str, int] = {"position_ids": "position_ids" in tokens, "segments": segments}
    if ctx.pp_size > 1:
        if ctx.pp_rank == 0 and len(shape) != 2:
            raise UserError(f"input_ids has the shape {list(shape)}, not [batch, sequence]")
        told = [*shape, *shared.values()] if ctx.pp_rank == 0 else [0] * 4
        told = _tell(told, ctx)
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
    return (batch, sequence), shared


def _tell(numbers: list[int], ctx: ParallelContext) -> list[int]:
    """Return the first stage's numbers: on the CPU, for nobody is to wait for a device."""
    return broadcast_from_stage(torch.tensor(numbers), ctx.placement.first_rank, ctx).tolist()


def _check_size(shape: tuple[int, int], count: int, longest: int) -> None:
    """Refuse a batch that can't be cut into `count`, or sequences that the model can't take."""
    batch, sequence = shape
    if batch % count:
        raise UserError(f"num_microbatches {count} doesn't divide the batch of {batch}")
    if sequence > longest:
        raise UserError(f"a sequence of {sequence} exceeds the model's max-positions {longest}")


def _check_ids(tokens: dict[str, torch.Tensor], vocab_size: int, longest: int) -> None:
    """Refuse token ids and positions that the model doesn't have."""
    vocabulary, positions = f"the vocabulary of {vocab_size}", f"the model's {longest} positions"
    check_range("token id", tokens.get("input_ids"), vocab_size, vocabulary)
    check_range("position", tokens.get("position_ids"), longest, positions)


def _segments(mask: torch.Tensor | None, documents: torch.Tensor | None) -> torch.Tensor | None:
    """Number each token's segment; it sees the same number only. Padding is a segment of its own,
    -1. None if there is one segment."""
    if mask is None or not _has_padding(mask):
        return documents
    if documents is None:
        documents = torch.zeros_like(mask, dtype=torch.int64)
    documents = documents.to(mask.device)
    return documents.masked_fill(mask == 0, -1)


def _within_documents(targets: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Return shifted labels without those that the last token of a document would have: the first
    token of the next one."""
    here, following = segments[:, :-1], segments[:, 1:]
    crosses = (here != following) & (here != -1) & (following != -1)
    return targets.masked_fill(F.pad(crosses, (0, 1)), IGNORE_INDEX)


def _has_padding(mask: torch.Tensor | None) -> bool:
    # On CUDA to look would wait for the device.
    return mask is not None and (mask.is_cuda or not bool(mask.all()))


def _takes_boundaries(ctx: ParallelContext) -> bool:
    return ctx.device.type == "cuda"


def _boundaries(segments: torch.Tensor | None, padding: int, count: int) -> torch.Tensor | None:
    """Return the boundaries of the segments of each of `count` micro-batches, one micro-batch after
    the other, as many of each. padding: so much is to come on the right.

    None where there is one segment, or none; where a number is that of several runs of tokens,
    which see each other though others stand between them; and on CUDA, where to look would wait for
    the device.
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
    """Return the tensor on the device. The host waits for no copy: it is from page-locked memory
    of its own, whatever becomes of the tensor."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return staged.to(device, non_blocking=True)


def _padded(tokens: dict[str, torch.Tensor], padding: int) -> dict[str, torch.Tensor]:
    """Add so much padding on the right, which no token sees, as the ranks need to share the
    sequence: targets without loss, the last position again, token 0 of no segment."""
    if not padding:
        return tokens
    values = {"targets": IGNORE_INDEX, "segments": -1}
    padded = {name: F.pad(x, (0, padding), value=values.get(name, 0)) for name, x in tokens.items()}
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
    """Replace what the first stage has for all others; a stage's own tensors of such names don't
    count. shared: whether it has a tensor, by its name; how many boundaries."""
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
) -> list[MicroBatch]:
    """Cut tensors along the batch into one micro-batch for each seed, and those that are of_tokens
    along the sequence, of which this rank takes its part. shape: with padding; length: of the
    sequence without."""
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
        batches.append(
            MicroBatch(of_each, length=length, cut=cut, dropout_seed=dropout_seed, **given)
        )
    return batches


def _longest(positions: torch.Tensor | None, length: int) -> int | torch.Tensor:
    """Return the tokens of a micro-batch's longest row, by the positions of whole sequences.
    length: of the sequence, without padding."""
    if positions is None or not positions.numel():
        return length
    return positions.max() + 1  # on the device: only who needs the number waits for it
