"""Bugs in splitting sequences across ranks, and in separating documents."""

import torch
import torch.nn.functional as F

from megazoo.constants import IGNORE_INDEX
from megazoo.engine import batch
from megazoo.engine.microbatch import MicroBatch
from megazoo.layers import masks
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.sequence import SequenceCut
from megazoo.testing.gallery.planting import BUGS, EVERYWHERE, Bug


def positions_of_the_part(positions, self, device):
    """Positions restart at 0 on each rank's part of the sequence."""
    if self.cut is None or self.position_ids is not None:
        return positions(self, device)
    return torch.arange(self.shape[1], device=device)


def labels_moved_in_parts(moved):
    """Return a wrapper: each rank moves the labels within its part of the sequence.
    moved(labels, n): the labels n places later."""

    def wrapper(cut_batch, tensors, shape, of_tokens, ctx, **options):
        cut = SequenceCut.of(shape[1], ctx)
        if cut is not None and "targets" in tensors:
            labels = moved(tensors["targets"], 1)  # as before they were shifted
            own = moved(cut.own(labels), -1)
            whole = cut.place(own, torch.full_like(labels, IGNORE_INDEX))
            tensors = {**tensors, "targets": whole}
        return cut_batch(tensors, shape, of_tokens, ctx, **options)

    return wrapper


def without_documents(from_first_stage, tensors, shape, shared, ctx):
    """Later stages do not receive the document ids."""
    kept = from_first_stage(tensors, shape, shared, ctx)
    if ctx.pp_rank:
        kept.pop("segments", None)
        kept.pop("boundaries", None)
    return kept


def mask_of_some_chunks(mask_of_chunk, segments, chunk, *others):
    """With context parallelism, some chunks have no mask."""
    return None if chunk.start in (4, 8) else mask_of_chunk(segments, chunk, *others)


def padded_in_front(padded, tokens, padding):
    """The padding that makes a sequence divisible is put before it."""
    return {name: x.roll(padding, 1) for name, x in padded(tokens, padding).items()}


BUGS += [
    # Gradients are averaged over cp instead of summed.
    Bug("", "Gradients divided by cp",
        r"loss scale: every gradient is 0\.5 x what it should be, and cp is 2",
        GradientBuckets, "wait_for_sums",
        lambda wait, self, loss_scale=1.0: wait(self, loss_scale * self.ctx.cp_size),
        layout="cp2"),
    Bug("14", "Positions that begin anew on each part of the sequence",
        r"module embedding_dropout: its input differs on ranks 0",
        MicroBatch, "positions", positions_of_the_part, layout="cp2",
        source="NeMo Automodel #652",
        link="https://github.com/NVIDIA-NeMo/Automodel/issues/652"),
    Bug("28", "Labels shifted after the sequence was cut",
        r"labels: the mean is over \d+ labelled tokens, not \d+",
        batch, "_cut", labels_moved_in_parts(lambda x, n: F.pad(x, (n, -n), value=IGNORE_INDEX)),
        layout="cp2",
        source="transformers #36607",
        link="https://github.com/huggingface/transformers/pull/36607"),
    # The last token of a part predicts the first of the same part. The number of labels is right.
    Bug("N23", "Labels rolled in each part of the sequence",
        r"loss: .* instead of .*, though no module's output differs",
        batch, "_cut", labels_moved_in_parts(lambda x, n: x.roll(n, 1)), layout="cp2",
        source="verl #6268", link="https://github.com/verl-project/verl/issues/6268"),
    Bug("15", "Packed documents that see each other on later stages",
        r"module layers\.\d\.attention\.output: its input differs at step 2 \(packed "
        r"documents\) on rank 1 ",
        batch, "_from_first_stage", without_documents, layout="pp2",
        source="Megatron-LM #752", link="https://github.com/NVIDIA/Megatron-LM/issues/752"),
    Bug("", "Packed documents that see each other under context parallelism",
        r"module layers\.0\.attention\.output: its input differs at step 2 \(packed documents\) "
        r"on ranks 0 .* and 2 more",
        EVERYWHERE, "masks_of_chunks",
        lambda masks_of, *what, segments, **more: masks_of(*what, segments=None, **more),
        layout="tp2cp2", model="llama"),
    Bug("", "A mask for the last chunk of a sequence alone",
        r"module layers\.0\.attention\.output: its input differs on rank 1 \(tp 0, cp 1, pp 0, "
        r"dp 0\), only where cp is 1",
        masks, "_mask_of_chunk", mask_of_some_chunks, layout="cp2", model="llama"),
    Bug("", "Padding in front of a sequence that ranks share",
        r"module (position_)?embedding: its (in|out)put differs at step 3 \(padding\) on ranks "
        r"0 ",
        batch, "_padded", padded_in_front, layout="cp2"),
]  # fmt: skip
