"""What context parallelism is for: a rank's memory of a long sequence; and what it sends for it."""

import sys
from dataclasses import replace

import pytest
import torch

import megazoo
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.parallel.context import ParallelContext
from megazoo.planning import PlannedRun, Planner, find_layouts
from megazoo.testing import GROUP_TIMEOUT
from megazoo.torch_internals import TorchDispatchMode
from tests.support import planning
from tests.support.sampling import marked_slow
from tests.support.training import (
    NO_DROPOUT,
    PeakMemory,
    give_back_freed_memory,
    in_fresh_processes,
)

LENGTH, LAYERS = 2048, 8
SIZES = dict(vocab_size=500, max_positions=LENGTH, hidden_size=128, layers=LAYERS, heads=4)
LONG = {
    "gpt2": GPT2Config(**SIZES, **NO_DROPOUT),
    "llama": LlamaConfig(**SIZES, kv_heads=2, ffn_size=512),
}
TINY = dict(vocab_size=61, max_positions=32, hidden_size=32, layers=3)


def context(cp, method="allgather", tp=1):
    ctx = ParallelContext.from_torch(
        tp, context_parallel_size=cp, context_parallel_method=method, device="cpu",
        timeout=GROUP_TIMEOUT,
    )  # fmt: skip
    torch.set_num_threads(1)
    return ctx


def plan(config, cp, method="allgather", dp=1, parallel=None, **run):
    layout = {"dp": dp, "cp": cp, "cp_method": method, **(parallel or {})}
    return planning.plan(config, layout, **run)


def peak_of_activations(config, length, cp, recompute, rows=2):
    """Of two micro-batches of so many rows, above the model and its gradients, bytes. Activations
    must be many more than gradients, which are copied into a bucket after the last backward."""
    give_back_freed_memory()
    ctx = context(cp)
    small = type(config)(**{**TINY, "heads": 4})
    for each, tokens in ((small, 32), (config, length)):  # first what is imported and made once
        model = megazoo.from_config(each, ctx).recompute(recompute)
        ids = torch.arange(2 * rows * tokens).view(-1, tokens) % 61
        model.train_batch(ids[:, :32], targets=ids[:, :32], num_microbatches=2)
        with PeakMemory() as peak:
            model.train_batch(ids, targets=ids, num_microbatches=2)
    return peak.above


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_ranks_need_half_the_activations_of_one(name):
    """With full recomputation."""
    measured = {
        cp: max(
            in_fresh_processes(
                peak_of_activations, LONG[name], LENGTH, cp, "full", processes=cp, timeout=240
            )
        )
        for cp in (1, 2)
    }
    assert measured[1] > 50e6
    assert measured[2] < 0.55 * measured[1], measured


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_two_ranks_are_planned_half_the_activations_of_one(name):
    how = dict(micro_batch_size=2, global_batch_size=4, seq_length=LENGTH, recompute="full")
    told = {cp: plan(LONG[name], cp, dtype="bfloat16", **how).ranks[0] for cp in (1, 2)}
    assert told[2].activations < 0.55 * told[1].activations


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize(("name", "recompute"), [("llama", "selective"), ("gpt2", "none")])
def test_activations_are_within_a_tenth_of_the_plan(name, recompute):
    measured = in_fresh_processes(
        peak_of_activations, LONG[name], LENGTH, 2, recompute, processes=2
    )
    how = dict(micro_batch_size=2, global_batch_size=4, seq_length=LENGTH, recompute=recompute)
    told = plan(LONG[name], 2, dtype="float32", **how).ranks[0].activations
    assert measured == pytest.approx([told, told], rel=0.1)


class Largest(TorchDispatchMode):
    """Finds the most elements of a tensor that is made within the block."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        sizes = [x.untyped_storage().nbytes() // 4 for x in made if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


MPT = MPTConfig(vocab_size=300, max_positions=8192, hidden_size=32, layers=1, heads=2)


def largest_tensor(length, cp):
    ids = torch.arange(length).view(1, length) % 61
    with Largest() as largest:
        megazoo.from_config(MPT, context(cp)).train_batch(ids, targets=ids)
    return largest.elements


def test_no_tensor_is_of_all_heads_queries_and_keys(ranks):
    """Of 8,192 tokens on four ranks: a bias is of a chunk, and keys up to its end."""
    s = 8192
    assert max(ranks(largest_tensor, 4, s, 4, timeout=240)) == MPT.heads * (s // 8) * s
    assert largest_tensor(1024, 1) == MPT.heads * 1024**2  # so the measure sees it


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_a_rank_of_four_needs_three_tenths_for_a_long_sequence_with_alibi():
    measured = {
        cp: max(
            in_fresh_processes(
                peak_of_activations, MPT, 8192, cp, "none", 1, processes=cp, timeout=240
            )
        )
        for cp in (1, 4)
    }
    assert measured[4] < 0.3 * measured[1], measured


GROUPED = LlamaConfig(**TINY, heads=4, kv_heads=2, ffn_size=48)
ROWS, TOKENS, MICRO_BATCHES = 2, 32, 2


def sent_over_cp(layout, method, recompute):
    """Bytes that this rank sends over cp for attention, of a forward and of a step, by wrapping
    what torch.distributed is asked for."""
    from megazoo.parallel import collectives
    from megazoo.parallel.cpu import shared_memory

    ctx, sent = context(**layout, method=method), 0.0
    model = megazoo.from_config(GROUPED, ctx).recompute(recompute)
    ids = torch.arange(MICRO_BATCHES * ROWS * TOKENS).view(-1, TOKENS) % 61

    def counted(real):
        def collective(result, given, *sizes, group=None, **more):
            nonlocal sent
            if group is ctx.cp_group:
                if sizes:  # an all-to-all: what of `given` goes to others
                    others = sum(n for rank, n in enumerate(sizes[1]) if rank != ctx.cp_rank)
                    sent += given[:1].nbytes * others
                else:
                    whole = max(result.nbytes, given.nbytes)
                    sent += whole * (ctx.cp_size - 1) / ctx.cp_size
            return real(result, given, *sizes, group=group, **more)

        collective.__name__ = real.__name__
        return collective

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "shared_by", lambda group, kind: None)
        patch.setattr(collectives, "_all_gather", counted(collectives._all_gather))
        patch.setattr(collectives, "_reduce_scatter", counted(collectives._reduce_scatter))
        patch.setattr(torch.distributed, "all_to_all_single",
                      counted(torch.distributed.all_to_all_single))  # fmt: skip
        model.eval_batch(ids[:ROWS], targets=ids[:ROWS])
        forward, sent = sent, 0.0
        model.train_batch(ids, targets=ids, num_microbatches=MICRO_BATCHES)
    return forward, sent


def forward_by_hand(cp, tp, method):
    """The bytes of a layer's forward, fp32."""
    b, s, heads, d_kv = ROWS, TOKENS, 4 // tp, 8 * 2 // tp
    if method == "allgather":
        return 4 * 2 * b * s * d_kv * (cp - 1) / cp
    # To each other rank: a share of the query heads and the heads of keys and values they use; and
    # for its tokens this rank's heads of the result.
    share = heads // cp
    return 4 * (cp - 1) * (share + 2 + share) * b * (s // cp) * 8


@pytest.mark.parametrize(
    ("tp", "method", "recompute"),
    marked_slow(
        [
            (1, "allgather", "none"), (2, "allgather", "selective"), (1, "allgather", "full"),
            (1, "ulysses", "none"), (2, "ulysses", "full"), (2, "allgather", "none"),
            (2, "allgather", "full"),
        ],
        lambda number, _: number not in (1, 2, 3),
    ),
)  # fmt: skip
def test_bytes_over_cp_are_those_of_the_plan_and_by_hand(ranks, tp, method, recompute):
    """2 b s d_kv (cp - 1) / cp elements of a layer's forward. Backward gathers again, and scatters
    as many gradients; what is recomputed is gathered once more."""
    cp, layers = 2, GROUPED.layers
    real = ranks(sent_over_cp, tp * cp, dict(cp=cp, tp=tp), method, recompute)
    forward = forward_by_hand(cp, tp, method)
    # By how many times a forward's a step sends.
    gathers = {"none": 2, "selective": 2, "full": 3} if method == "allgather" else {"none": 1}
    times = gathers.get(recompute, 2) + 1
    how = dict(global_batch_size=ROWS * MICRO_BATCHES, dtype="float32", recompute=recompute)
    told = plan(
        GROUPED, cp, method, parallel=dict(tp=tp), micro_batch_size=ROWS, seq_length=TOKENS, **how
    )
    for rank in told.ranks:
        assert rank.sent_cp == times * layers * MICRO_BATCHES * forward
    assert set(real) == {(layers * forward, rank.sent_cp)}


# A GPT-2 of 4,096 tokens on four ranks; cut over four, each has as few as can be searched.
LONGER, LITTLE = replace(LONG["gpt2"], max_positions=4096), 90 * 10**6


def layouts_found(memory: int, length: int) -> dict:
    how = PlannedRun(micro_batch_size=1, global_batch_size=4, seq_length=length, dtype="bfloat16")
    found = find_layouts(Planner(LONGER, quick=True), 4, memory, how)
    return {
        (each.layout.tp, each.layout.pp, each.layout.cp, each.layout.dp): each for each in found
    }


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "length"), [(10**9, 4096), (LITTLE, 2047)])
def test_a_search_offers_no_cp_to_sequences_that_fit_or_are_short(memory, length):
    assert {cp for _, _, cp, _ in layouts_found(memory, length)} == {1}


@pytest.mark.slow
def test_a_search_offers_cp_to_sequences_that_do_not_fit_otherwise():
    tight = layouts_found(LITTLE, 4096)
    assert tight[1, 1, 1, 4].recompute != "none"
    assert tight[1, 1, 4, 1].recompute == "none"
    assert tight[1, 1, 4, 1].sent_cp > 0
    for (tp, pp, cp, dp), each in tight.items():
        assert tp * pp * cp * dp == 4
        assert each.total <= LITTLE
        exact = plan(
            LONGER, cp, dp=dp, micro_batch_size=1, global_batch_size=4, seq_length=4096,
            dtype="bfloat16", recompute=each.recompute, parallel=dict(
                tp=tp, pp=pp, virtual_pp=each.layout.virtual_pp, zero=each.layout.zero,
                sequence_parallel=each.layout.sequence_parallel,
            ),
        )  # fmt: skip
        assert each.sent_cp == max(rank.sent_cp for rank in exact.ranks)
        assert each.sent_dp == max(rank.sent_dp for rank in exact.ranks)
