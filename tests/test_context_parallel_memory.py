"""What context parallelism is for: a rank's memory of a long sequence; and what it sends for it."""

import sys
from functools import partial

import pytest
import torch
from helpers import NO_DROPOUT, PeakMemory, give_back_freed_memory, in_fresh_processes

import megazoo
from megazoo.cli.options import ParallelOptions, TrainingOptions
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.parallel.context import ParallelContext
from megazoo.planning import Planner
from megazoo.testing import GROUP_TIMEOUT
from megazoo.torch_internals import TorchDispatchMode

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


def plan(config, cp, method="allgather", dp=1, parallel=None, **training):
    parallel = ParallelOptions(cp=cp, cp_method=method, **(parallel or {}))
    planner, training = Planner(config), TrainingOptions(**training)
    planner.check(parallel, training, dp)
    return planner.plan(parallel, training, dp)


def peak_of_activations(config, length, cp, recompute, dtype=torch.float32):
    """Of a batch of two micro-batches of a sequence, above the model and its gradients, bytes."""
    give_back_freed_memory()
    ctx = context(cp)
    small = type(config)(**{**TINY, "heads": 4})
    for each, tokens in ((small, 32), (config, length)):  # first what is imported and made once
        model = megazoo.from_config(each, ctx, dtype=dtype).recompute(recompute)
        ids = torch.arange(2 * tokens).view(2, tokens) % 61
        model.train_batch(ids[:, :32], targets=ids[:, :32], num_microbatches=2)
        with PeakMemory() as peak:
            model.train_batch(ids, targets=ids, num_microbatches=2)
    return peak.above


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize("name", LONG)
def test_two_ranks_need_half_the_activations_of_one(name):
    """With full recomputation; measured, and as planned."""
    measured = {
        cp: max(
            in_fresh_processes(
                peak_of_activations, LONG[name], LENGTH, cp, "full", processes=cp, timeout=240
            )
        )
        for cp in (1, 2)
    }
    assert measured[1] > 25e6
    assert measured[2] < 0.55 * measured[1], measured
    how = dict(micro_batch_size=1, global_batch_size=2, seq_length=LENGTH, recompute="full")
    told = {cp: plan(LONG[name], cp, dtype="bfloat16", **how).ranks[0] for cp in (1, 2)}
    assert told[2].activations < 0.55 * told[1].activations
