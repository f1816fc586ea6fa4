"""Failures that context parallelism had elsewhere, each planted once: the comparison with one
process finds it, by far, and the code as it is passes; some show in the probe, too."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megazoo.engine import batch as batches
from megazoo.layers import ALiBi, alibi_slopes, attend, masks
from megazoo.layers.attend import Attend
from megazoo.layers.context_parallel import _GatheredAgain
from megazoo.models.outputs import LanguageModelHead
from megazoo.parallel import regions
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.sequence import SequenceCut
from megazoo.testing import Layout
from tests.support.context_parallel import CHANGED, LENGTHS, positions_that_differ
from tests.support.layouts import (
    logits_of_both,
    named_run,
    one_process_beside,
    worst_difference,
)
from tests.support.sampling import marked_slow

FAR = 1e-3  # a hundred times what passes


class Scaled(torch.autograd.Function):
    """x, with a gradient that is wrong by 1.2 of itself."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2.2 * grad


def a_wrong_gradient_of(which: int):
    """Of q, k or v."""
    across_ranks = attend.attend_across_ranks

    def scaled(kernel, *qkv_and_more, **how):
        what = list(qkv_and_more)
        what[which] = Scaled.apply(what[which])
        return across_ranks(kernel, *what, **how)

    return patch.object(attend, "attend_across_ranks", scaled)


@contextmanager
def stale_keys_and_values():
    """Backward gathers again what the newest layer had, not its own."""
    begin, gather, newest = _GatheredAgain.__init__, _GatheredAgain.gather, {}

    def begins(self, own, *what):
        newest["own"] = own
        begin(self, own, *what)

    def of_the_newest(self):
        self.own = newest["own"]
        gather(self)

    with (
        patch.object(_GatheredAgain, "__init__", begins),
        patch.object(_GatheredAgain, "gather", of_the_newest),
    ):
        yield


def labels_rolled_after_the_cut():
    """Each rank's last labels are its first, not the next rank's."""
    cut = batches._cut

    def rolled(tensors, *what, **more):
        if "targets" not in tensors:
            return cut(tensors, *what, **more)
        labels = tensors["targets"].roll(1, dims=1)
        parts = cut(tensors | {"targets": labels}, *what, **more)
        return [replace(part, targets=part.targets.roll(-1, dims=1)) for part in parts]

    return patch.object(batches, "_cut", rolled)


def a_loss_divided_by_cp():
    loss_of = LanguageModelHead.loss
    return patch.object(
        LanguageModelHead,
        "loss",
        lambda self, *what, **more: loss_of(self, *what, **more) / self.ctx.cp_size,
    )


def gradients_times(power: int):
    """Times cp, or divided by it."""
    finish = GradientBuckets.wait_for_sums

    def wrong(self, loss_scale=1.0):
        finish(self, loss_scale / self.ctx.cp_size**power)

    return patch.object(GradientBuckets, "wait_for_sums", wrong)


def the_longest_row_over_cp():
    """Dynamic rope scaling for a part of the length."""
    longest = batches._longest
    return patch.object(batches, "_longest", lambda *what: longest(*what) // 2)


def truncated_documents():
    """Lengths // cp of the documents, times cp again: what is left over goes to the next."""
    segments_of = batches._segments

    def truncated(mask, documents):
        segments = segments_of(mask, documents)
        if segments is None:
            return None
        rows = []
        for row in segments:
            numbers, lengths = row.unique_consecutive(return_counts=True)
            lengths = lengths // 2 * 2
            lengths[-1] += len(row) - lengths.sum()
            rows.append(numbers.repeat_interleave(lengths))
        return torch.stack(rows)

    return patch.object(batches, "_segments", truncated)


@contextmanager
def padding_that_sees_nothing():
    """Rows of scores that are -inf throughout, of which a softmax is nan (torch's own kernels see
    to it that it is not)."""
    segment_mask = masks.segment_mask

    def own(self, q, k, v, mask, dropout=0.0, sinks=None):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return torch.softmax(scores + mask, dim=-1) @ v

    def without(segments, queries=None, window=None):
        mask = segment_mask(segments, queries, window)
        return mask & (segments[:, None, -mask.shape[2] :, None] >= 0)

    with ExitStack() as stack:
        stack.enter_context(patch.object(masks, "HIDDEN", -torch.inf))
        stack.enter_context(patch.object(masks, "segment_mask", without))
        stack.enter_context(patch.object(Attend, "_scaled_dot_product", own))
        yield


def a_mean_over_a_ranks_own_labels():
    """0 / 0 where a rank has none."""
    loss_of, count = LanguageModelHead.loss, LanguageModelHead.label_count

    def mean(self, x, batch, *what, **more):
        own = torch.as_tensor(count(self, batch))
        return loss_of(self, x, batch, *what, **more) / own * own

    return patch.object(LanguageModelHead, "loss", mean)


def tokens_of_rank_0():
    """What a cache of packed samples gives that does not know cp: the first rank's, to all."""
    own = SequenceCut.own

    def of_the_first(self, tensor):
        return own(SequenceCut(self.length, self.size, 0, self.method), tensor)

    return patch.object(SequenceCut, "own", of_the_first)


def biases_kept_without_the_chunk():
    """The first bias that was made, for any number of keys."""
    made, call = {}, ALiBi.__call__

    def kept(self, queries, keys, *what, **more):
        first = made.setdefault(queries, call(self, queries, keys, *what, **more))
        return F.pad(first, (keys - first.shape[-1], 0))

    return patch.object(ALiBi, "__call__", kept)


def biases_kept_without_the_heads():
    """Those of the tp rank's first heads, as without context parallelism."""
    call = ALiBi.__call__

    def kept(self, *what, heads=None, **more):
        heads = heads and self.heads[: len(heads)]
        return call(self, *what, heads=heads, **more)

    return patch.object(ALiBi, "__call__", kept)


def masks_kept_without_the_chunk():
    """The mask of the first chunk that had so many queries and keys, in whatever segments."""
    made, of_chunk = {}, masks._mask_of_chunk

    def kept(segments, chunk, device, window):
        mask = of_chunk(segments, chunk, device, window)
        return made.setdefault((len(chunk), chunk.stop), mask)

    return patch.object(masks, "_mask_of_chunk", kept)


def partial_gradients_of_keys_and_values():
    """Each rank keeps what its own queries say."""
    return patch.object(regions, "reduce_scatter_parts", lambda parts, group: parts[group.rank()])


def partial_gradients_of_parameters():
    """Which all ranks have, and which are not summed over cp."""
    return patch("megazoo.parallel.buckets.all_reduce", lambda *_, **__: None)


def a_sequence_cropped_to_what_divides():
    """What is over is dropped, where it should be padded."""

    def cropped(length, ctx):
        return length - length % (2 * ctx.cp_size)

    return patch.object(batches, "padded_length", cropped)


def local_positions():
    """0, 1, 2 ... on each rank."""

    def local(self, device):
        return torch.arange(self.length // self.size, device=device)

    return patch.object(SequenceCut, "positions", local)


def alibi_of_local_keys():
    """Distances that know how long a chunk is, and not where it is."""
    call = ALiBi.__call__

    def local(self, queries, keys, dtype, device, mask=None, position=None, heads=None):
        bias = call(self, queries, keys, dtype, device, mask, position, heads)
        heads = self.heads if heads is None else heads
        slopes = alibi_slopes(self.total, self.bias_max)[heads.start : heads.stop]
        distance = torch.arange(keys) % queries - torch.arange(queries)[:, None]
        return torch.where(bias < masks.HIDDEN / 2, bias, slopes[:, None, None] * distance)

    return patch.object(ALiBi, "__call__", local)


def a_contiguous_cut():
    """Chunks 2 r and 2 r + 1, which are not those that the ranks' keys are put together as."""

    def chunks(self):
        size = self.length // (2 * self.size)
        starts = (2 * self.rank * size, (2 * self.rank + 1) * size)
        return tuple(range(start, start + size) for start in starts)

    return patch.object(SequenceCut, "chunks", property(chunks))


@dataclass(frozen=True)
class Failure:
    """Planted by plant(*how), and looked for in a training run of a model in a layout. probe: the
    probe finds it, too."""

    plant: object
    model: str
    kind: str
    layout: str = "cp2"
    how: tuple = ()
    probe: bool = False


FAILURES = {
    "dq wrong by 1.2": Failure(a_wrong_gradient_of, "gpt2", "plain", how=(0,)),
    "dk wrong by 1.2": Failure(a_wrong_gradient_of, "llama, yarn", "plain", how=(1,)),
    "dv wrong by 1.2": Failure(a_wrong_gradient_of, "mpt, 12 heads", "plain", "cp2+ulysses", (2,)),
    "stale keys and values in backward": Failure(stale_keys_and_values, "llama, llama3", "plain"),
    "labels rolled after the cut": Failure(labels_rolled_after_the_cut, "gpt2", "plain"),
    "a loss divided by cp": Failure(a_loss_divided_by_cp, "gpt2", "plain"),
    "gradients divided by cp": Failure(gradients_times, "gpt2", "plain", how=(-1,)),
    "gradients times cp": Failure(gradients_times, "gpt2", "plain", how=(1,)),
    "the longest row // cp": Failure(the_longest_row_over_cp, "llama, dynamic", "plain"),
    "documents' lengths // cp": Failure(truncated_documents, "gpt2", "packed", probe=True),
    "nan of padding that sees nothing": Failure(padding_that_sees_nothing, "gpt2", "padded"),
    "nan of a rank without labels": Failure(a_mean_over_a_ranks_own_labels, "gpt2", "padded"),
    "a cache of packed samples": Failure(tokens_of_rank_0, "gpt2", "packed", probe=True),
    "a cache of biases, no chunk": Failure(biases_kept_without_the_chunk, "mpt, 12 heads", "plain"),
    "a cache of biases, no heads": Failure(
        biases_kept_without_the_heads, "mpt, 12 heads", "plain", "cp2+ulysses"
    ),
    "a cache of masks": Failure(masks_kept_without_the_chunk, "gpt2", "packed"),
    "partial gradients of k and v": Failure(
        partial_gradients_of_keys_and_values, "mpt, 12 heads", "plain"
    ),
    "partial gradients of parameters": Failure(partial_gradients_of_parameters, "gpt2", "plain"),
    "a length that doesn't divide": Failure(a_sequence_cropped_to_what_divides, "gpt2", "odd"),
    "local positions, learned": Failure(local_positions, "mpt, learned positions", "plain"),
    "local positions, rotary": Failure(local_positions, "llama, llama3", "plain"),
    "ALiBi by lengths": Failure(alibi_of_local_keys, "mpt, 12 heads", "plain"),
    "a contiguous cut": Failure(a_contiguous_cut, "gpt2", "packed", probe=True),
}


@contextmanager
def planted(name: str | None):
    """Within this block the code has the failure of that name."""
    with ExitStack() as stack:
        if name:
            failure = FAILURES[name]
            stack.enter_context(failure.plant(*failure.how))
        yield


def trained_with(names: list, model: str, layout: Layout, kind: str) -> list:
    """A training step as it is, and one with each failure."""
    found = []
    for name in (None, *names):
        with planted(name):
            found.append(named_run(model, layout, kind, steps=1))
    return found


def probed_with(names: list, layout: Layout) -> list:
    found = []
    for name in names:
        with planted(name):
            found.append(logits_of_both(layout))
    return found


RUNS = sorted({(each.model, each.layout, each.kind) for each in FAILURES.values()})


@pytest.mark.parametrize(
    ("model", "layout", "kind"),
    marked_slow(
        RUNS,
        lambda _, run: run[:2] != ("gpt2", "cp2") and run[1] != "cp2+ulysses",
        name="-".join,
    ),
)
def test_the_comparison_finds_planted_failures(ranks, model, layout, kind):
    run = model, layout, kind
    names = [n for n, each in FAILURES.items() if (each.model, each.layout, each.kind) == run]
    place = Layout.named(layout)
    results = ranks(trained_with, place.ranks, names, model, place, kind)
    expected = one_process_beside(place, model, kind, 1)
    for number, name in enumerate([None, *names]):
        difference, what = worst_difference([each[number] for each in results], expected)
        if name is None:
            assert difference < 1e-5, what
        else:
            assert difference > FAR, name


def test_the_probe_finds_planted_failures(ranks):
    names = [name for name, each in FAILURES.items() if each.probe]
    later = list(range(CHANGED, LENGTHS[0]))
    for found in ranks(probed_with, 2, names, Layout.named("cp2")):
        for name, outputs in zip(names, found, strict=True):
            assert positions_that_differ(*outputs["gpt2"]) != later, name
