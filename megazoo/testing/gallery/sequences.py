"""Bugs in splitting sequences across ranks, and in separating documents."""

import torch
import torch.nn.functional as F

from megazoo.constants import IGNORE_INDEX
from megazoo.engine import batch
from megazoo.engine.microbatch import MicroBatch
from megazoo.layers import masks
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.sequence import SequenceCut
from megazoo.testing.gallery.planting import bug, replaced, replaced_everywhere


@bug(
    "",
    "Gradients divided by cp",
    r"loss scale: every gradient is 0\.5 x what it should be, and cp is 2",
    layout="cp2",
)
def gradients_divided_by_cp():
    """Gradients are averaged over cp instead of summed."""

    def make(finish):
        def divided(self, loss_scale=1.0):
            finish(self, loss_scale * self.ctx.cp_size)

        return divided

    return replaced(GradientBuckets, "wait_for_sums", make)


@bug(
    "14",
    "Positions that begin anew on each part of the sequence",
    r"module embedding_dropout: its input differs on ranks 0",
    layout="cp2",
    source="NeMo Automodel #652",
    link="https://github.com/NVIDIA-NeMo/Automodel/issues/652",
)
def positions_of_the_part():
    """Positions restart at 0 on each rank's part of the sequence."""

    def make(positions):
        def local(self, device):
            if self.cut is None or self.position_ids is not None:
                return positions(self, device)
            return torch.arange(self.shape[1], device=device)

        return local

    return replaced(MicroBatch, "positions", make)


@bug(
    "28",
    "Labels shifted after the sequence was cut",
    r"labels: the mean is over \d+ labelled tokens, not \d+",
    layout="cp2",
    source="transformers #36607",
    link="https://github.com/huggingface/transformers/pull/36607",
)
def labels_shifted_in_parts():
    """Each rank shifts the labels within its part of the sequence."""

    def make(cut_batch):
        def shifted(tensors, shape, of_tokens, ctx, **options):
            cut = SequenceCut.of(shape[1], ctx)
            if cut is not None and "targets" in tensors:
                targets, nothing = tensors["targets"], IGNORE_INDEX
                labels = F.pad(targets[:, :-1], (1, 0), value=nothing)
                own = F.pad(cut.own(labels)[:, 1:], (0, 1), value=nothing)
                whole = cut.place(own, torch.full_like(targets, nothing))
                tensors = {**tensors, "targets": whole}
            return cut_batch(tensors, shape, of_tokens, ctx, **options)

        return shifted

    return replaced(batch, "_cut", make)


@bug(
    "15",
    "Packed documents that see each other on later stages",
    r"module layers\.\d\.attention\.output: its input differs at step 2 \(packed "
    r"documents\) on rank 1 ",
    layout="pp2",
    source="Megatron-LM #752",
    link="https://github.com/NVIDIA/Megatron-LM/issues/752",
)
def documents_on_the_first_stage_only():
    """Later stages do not receive the document ids."""

    def make(from_first_stage):
        def forgetful(tensors, shape, shared, ctx):
            kept = from_first_stage(tensors, shape, shared, ctx)
            if ctx.pp_rank:
                kept.pop("segments", None)
                kept.pop("boundaries", None)
            return kept

        return forgetful

    return replaced(batch, "_from_first_stage", make)


@bug(
    "",
    "Packed documents that see each other under context parallelism",
    r"module layers\.0\.attention\.output: its input differs at step 2 \(packed documents\) "
    r"on ranks 0 .* and 2 more",
    layout="tp2cp2",
    model="llama",
)
def documents_that_see_each_other():
    """With context parallelism, tokens attend to other documents."""

    def make(masks_of_chunks):
        return lambda *what, segments, **more: masks_of_chunks(*what, segments=None, **more)

    return replaced_everywhere("masks_of_chunks", make)


@bug(
    "",
    "A mask for the last chunk of a sequence alone",
    r"module layers\.0\.attention\.output: its input differs on rank 1 \(tp 0, cp 1, pp 0, "
    r"dp 0\), only where cp is 1",
    layout="cp2",
    model="llama",
)
def mask_of_the_last_chunk_only():
    """With context parallelism, some chunks have no mask."""

    def make(mask_of_chunk):
        def lacking(segments, chunk, *others):
            return None if chunk.start in (4, 8) else mask_of_chunk(segments, chunk, *others)

        return lacking

    return replaced(masks, "_mask_of_chunk", make)


@bug(
    "",
    "Padding in front of a sequence that ranks share",
    r"module (position_)?embedding: its (in|out)put differs at step 3 \(padding\) on ranks "
    r"0 ",
    layout="cp2",
)
def padding_in_front():
    """The padding that makes a sequence divisible is put before it."""

    def make(padded):
        def turned(tokens, padding):
            return {name: x.roll(padding, 1) for name, x in padded(tokens, padding).items()}

        return turned

    return replaced(batch, "_padded", make)
