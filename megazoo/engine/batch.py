"""What users give to a model, checked and cut into the micro-batches that its stages run."""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.layers.classification import check_labels, last_tokens
from megazoo.layers.cross_entropy import IGNORE_INDEX
from megazoo.parallel.collectives import broadcast_from_stage
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.random import derive_seed


@dataclass(frozen=True)
class Batch:
    """A replica's batch as users give it. Every tensor is int64 [batch, sequence], and may be None.

    input_ids: needed on the first stage. labels: aligned with input_ids, to be shifted; or targets:
    shifted already; -100 carries no loss; a label on padding counts: put -100 there. Needed on the
    last stage. A classifier's labels are int64 [batch], or floats [batch(, labels)] for its other
    problems; those of a loss of one's own have any shape that begins with the batch.
    attention_mask: 1 for tokens, 0 for padding on either side.
    position_ids: by default 0, 1, 2 ...; models with ALiBi, whose positions are distances, have no
    use for them.
    document_ids: tokens see those of the same number only, for packed documents. A replica's batch
    may have no rows: tensors [0, sequence].
    The first stage's masks and positions go to all others, and the batch's shape to stages that are
    given no tensor.
    """

    input_ids: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None

    def micro_batches(
        self,
        count: int,
        ctx: ParallelContext,
        config,
        *,
        longest: int,
        keep_labels: bool,
        seed: int,
        step: int,
    ) -> list[MicroBatch]:
        """`count` micro-batches on the device. config: the model's. longest: its longest sequence.
        keep_labels: for a loss of one's own. seed, step: of the dropout.

        Under sequence parallelism a sequence that tp doesn't divide gets padding on the right,
        which no token sees.
        """
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        num_labels, vocab_size = getattr(config, "num_labels", 0), config.vocab_size
        labels = tensors.pop("labels", None) if num_labels or keep_labels else None  # of any shape
        if ctx.pp_rank == 0 and "input_ids" not in tensors:
            raise UserError("the first stage needs input_ids")
        (batch, sequence), shared = _agreed(tensors, ctx)
        if batch % count:
            raise UserError(f"num_microbatches {count} doesn't divide the batch of {batch}")
        if sequence > longest:
            raise UserError(f"a sequence of {sequence} exceeds the model's max-positions {longest}")
        _check_range(
            "token id", tensors.get("input_ids"), vocab_size, f"the vocabulary of {vocab_size}"
        )
        _check_range(
            "position", tensors.get("position_ids"), longest, f"the model's {longest} positions"
        )
        if num_labels:
            apart = _of_classifier(tensors, None if keep_labels else labels, batch, config, ctx)
        else:
            labels = tensors.pop("labels", labels)
            if (
                labels is not None
                and tuple(labels.shape) == (batch, sequence)
                and not labels.is_floating_point()
            ):
                tensors["targets"] = torch.full_like(labels, IGNORE_INDEX)
                tensors["targets"][:, :-1] = labels[:, 1:]
            _check_range(
                "label",
                tensors.get("targets"),
                vocab_size,
                f"the vocabulary of {vocab_size}",
                but=IGNORE_INDEX,
            )
            apart = {}
        if keep_labels and (labels is not None or "targets" in tensors):
            apart["labels"] = tensors["targets"] if labels is None else labels
        if labels is not None and len(labels) != batch:
            raise UserError(f"labels are of shape {list(labels.shape)}, in a batch of {batch}")
        segments = _segments(tensors.pop("attention_mask", None), tensors.pop("document_ids", None))
        if segments is not None:
            tensors["segments"] = segments
        padding = -sequence % ctx.tp_size if ctx.sequence_parallel else 0
        if padding and "position_ids" not in tensors and ctx.pp_rank == 0:
            tensors["position_ids"] = torch.arange(sequence).expand(batch, -1)
        tensors = {
            name: _padded(name, tensor.to(ctx.device), padding) for name, tensor in tensors.items()
        }
        tensors |= {name: tensor.to(ctx.device) for name, tensor in apart.items()}
        if ctx.pp_size > 1:
            shared = {
                **shared,
                "position_ids": shared["position_ids"] or padding > 0,
                "scored": num_labels > 0,
            }
            tensors = _from_first_stage(tensors, (batch, sequence + padding), shared, ctx)
        whole = MicroBatch((batch // count, sequence + padding), **tensors, length=sequence)
        parts = {name: tensor.chunk(count) for name, tensor in tensors.items()}
        return [
            replace(
                whole,
                **{name: part[index] for name, part in parts.items()},
                dropout_seed=derive_seed(seed, "dropout", step, index, ctx.dp_rank),
            )
            for index in range(count)
        ]


def _agreed(
    tensors: dict[str, torch.Tensor], ctx: ParallelContext
) -> tuple[tuple[int, int], dict[str, bool]]:
    """The batch's shape, as the first stage has it, and which tensors it has for all others;
    UserError for others."""
    mine = tuple(next(iter(tensors.values())).shape) if tensors else ()
    segments = "document_ids" in tensors or _has_padding(tensors.get("attention_mask"))
    shape, shared = mine, {"position_ids": "position_ids" in tensors, "segments": segments}
    if ctx.pp_size > 1:
        if ctx.pp_rank == 0 and len(mine) != 2:
            raise UserError(f"input_ids has the shape {list(mine)}, not [batch, sequence]")
        told = [*mine, *shared.values()] if ctx.pp_rank == 0 else [0] * 4
        *shape, positions, segments = broadcast_from_stage(
            torch.tensor(told, device=ctx.device), 0, ctx
        ).tolist()
        shape, shared = tuple(shape), {"position_ids": bool(positions), "segments": bool(segments)}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shape or len(shape) != 2:
            raise UserError(
                f"{name} has the shape {list(tensor.shape)}, not the batch's {list(shape)}"
            )
    return shape, shared


def _of_classifier(
    tensors: dict, labels: torch.Tensor | None, batch: int, config, ctx: ParallelContext
) -> dict[str, torch.Tensor]:
    """What a classifier needs that is not of tokens: its labels, and the position of each row that
    it judges."""
    if "targets" in tensors:
        raise UserError("a classifier takes labels, not targets")
    apart = {}
    if labels is not None:
        labels = labels if labels.is_floating_point() else labels.long()
        check_labels(labels, batch, config.num_labels, config.problem_type)
        apart["targets"] = labels
    if config.pad_token_id is None and batch > 1:
        raise UserError(
            "a classifier of several rows needs pad_token_id in its config, to find where each ends"
        )
    if ctx.pp_rank == 0:
        apart["scored"] = last_tokens(tensors["input_ids"], config.pad_token_id)
    return apart


def _segments(mask: torch.Tensor | None, documents: torch.Tensor | None) -> torch.Tensor | None:
    """A number for each token; it sees the same number only. Padding is a segment of its own, -1."""
    if not _has_padding(mask):
        return documents
    return (
        torch.zeros_like(mask, dtype=torch.int64) if documents is None else documents
    ).masked_fill(mask == 0, -1)


def _has_padding(mask: torch.Tensor | None) -> bool:
    # On CUDA to look would wait for the device.
    return mask is not None and (mask.is_cuda or not bool(mask.all()))


def _padded(name: str, tensor: torch.Tensor, padding: int) -> torch.Tensor:
    """Padding on the right: targets without loss, the last position again, token 0 of no segment."""
    if not padding:
        return tensor
    if name == "position_ids":
        return torch.cat([tensor, tensor[:, -1:].expand(-1, padding)], dim=1)
    return F.pad(tensor, (0, padding), value={"targets": IGNORE_INDEX, "segments": -1}.get(name, 0))


def _from_first_stage(
    tensors: dict, shape: tuple[int, int], shared: dict[str, bool], ctx: ParallelContext
) -> dict[str, torch.Tensor]:
    """The tensors, with those that the first stage has for all others; a stage's own of such names
    don't count."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in shared}
    for name in (name for name, there in shared.items() if there):
        size = shape[:1] if name == "scored" else shape
        mine = (
            tensors[name]
            if ctx.pp_rank == 0
            else torch.empty(size, dtype=torch.int64, device=ctx.device)
        )
        kept[name] = broadcast_from_stage(mine.long().contiguous(), 0, ctx)
    return kept


def _check_range(
    what: str, tensor: torch.Tensor | None, end: int, where: str, but: int | None = None
) -> None:
    """Refuse numbers outside 0 <= n < end; on CUDA the check would wait for the device, and is left
    out."""
    if tensor is None or tensor.is_cuda or not tensor.numel():
        return
    tensor = tensor if but is None else tensor.masked_fill(tensor == but, 0)
    low, high = tensor.min().item(), tensor.max().item()
    if low < 0 or high >= end:
        raise UserError(f"{what} {low if low < 0 else high} is outside {where}")
