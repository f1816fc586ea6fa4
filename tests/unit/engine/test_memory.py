"""The bytes that live in a step, tensor by tensor, are those that the planner tells; a pipeline's
peak of memory does not grow with the number of micro-batches."""

import gc
import sys
import weakref
from dataclasses import replace

import pytest
import torch

import megazoo
from megazoo.engine.microbatch import MicroBatch
from megazoo.layers import cross_entropy, fused_cross_entropy
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.models.outputs import LanguageModelHead
from megazoo.parallel.layout import Layout
from megazoo.planning import PlannedRun, Planner
from megazoo.torch_internals import TorchDispatchMode
from tests.support.sampling import sampled
from tests.support.training import (
    NO_DROPOUT,
    PeakMemory,
    context,
    give_back_freed_memory,
    in_fresh_processes,
)

ROWS, LENGTH = 8, 128
SIZES = dict(vocab_size=2048, max_positions=LENGTH, hidden_size=128, layers=8, heads=4)
CONFIGS = {
    "gpt2": GPT2Config(**SIZES, **NO_DROPOUT),
    "llama": LlamaConfig(**SIZES, ffn_size=384),
    "mpt": MPTConfig(**SIZES),
}


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that come to be within the block, while they live, and the
    most of them at once."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0
        self.known: dict[int, weakref.ref] = {}

    def know(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return

        def freed(_) -> None:
            del self.known[key]
            self.live -= size

        self.known[key] = weakref.ref(storage, freed)
        self.live += size
        self.most = max(self.most, self.live)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.know(each, each.untyped_storage().nbytes())
        return result


def bytes_of_a_step(config, layout, microbatches, rows=ROWS) -> tuple[int, int]:
    """What this rank has before its second step, and the most that the step has beside it."""
    model = megazoo.from_config(config, context(**layout))
    optimizer = megazoo.optim.AdamW(model)
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % config.vocab_size

    def step():
        model.train_batch(ids, targets=ids, num_microbatches=microbatches)
        optimizer.step()

    with pytest.MonkeyPatch.context() as patch:
        # The planner makes as many logits at once as GPUs do.
        for sizes in (cross_entropy.PIECE_ELEMENTS, fused_cross_entropy.CHUNK_ELEMENTS):
            patch.setitem(sizes, "cpu", sizes["cuda"])
        step()
        gc.collect()
        live = Live()
        for parameter in model.parameters():
            live.know(parameter, parameter.nbytes)
            if parameter.grad is not None:
                live.know(parameter.grad, parameter.grad.untyped_storage().nbytes())
        for state in optimizer.state.values():
            for tensor in state.values():
                live.know(tensor, tensor.untyped_storage().nbytes())
        before = live.live
        for each in filter(torch.is_tensor, gc.get_objects()):  # what ranks talk by, for one
            live.know(each, 0)
        del each, tensor  # the step is to hold them alone
        with live:
            step()
    return before, live.most - before


@pytest.mark.parametrize(
    "family",
    ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mpt"))],
)
@pytest.mark.parametrize(
    ("layout", "microbatches"),
    sampled([({}, 1), ({}, 4), ({"tp": 2}, 1), ({"pp": 2}, 4), ({"cp": 2}, 1)], 2, seed=4),
)
def test_the_live_bytes_of_a_step_are_those_of_the_plan(ranks, family, layout, microbatches):
    config, parallel = CONFIGS[family], Layout(**layout)
    measured = ranks(bytes_of_a_step, parallel.ranks, config, layout, microbatches)
    run = PlannedRun(
        micro_batch_size=ROWS // microbatches,
        global_batch_size=ROWS,
        seq_length=LENGTH,
        dtype="float32",
    )
    planned = Planner(config).plan(parallel, run).ranks
    for rank, (kept, most) in enumerate(measured):
        told = planned[rank if parallel.pp > 1 else 0]
        assert kept == told.total - told.activations
        assert most == pytest.approx(told.activations, rel=0.05)


def test_micro_batches_more_need_no_more(ranks):
    """Each of a pipeline's micro-batches is freed before others begin."""
    config = replace(CONFIGS["llama"], layers=2)
    few, many = (
        ranks(bytes_of_a_step, 2, config, {"pp": 2}, count, rows=2 * count) for count in (3, 6)
    )
    for (_, most), (_, most_of_many) in zip(few, many, strict=True):
        assert most_of_many < 1.05 * most


def peaks(schedule, virtual, counts):
    """Of steps with so many micro-batches, above the level after building model and optimizer."""
    give_back_freed_memory()
    sizes = dict(vocab_size=61, max_positions=256, hidden_size=128, layers=8, heads=4, ffn_size=512)
    model = megazoo.from_config(LlamaConfig(**sizes), context(pp=2, v=virtual))
    optimizer = megazoo.optim.AdamW(model)
    with PeakMemory() as built:
        pass
    found = []
    for count in counts:
        ids = torch.randint(0, 61, (2 * count, 256))
        with PeakMemory() as peak:
            model.train_batch(ids, labels=ids, num_microbatches=count, schedule=schedule)
            optimizer.step()
        found.append(peak.peak - built.start)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("gpipe", 1)]
)
def test_32_micro_batches_need_what_8_do(schedule, virtual):
    for few, many in in_fresh_processes(peaks, schedule, virtual, (8, 32), processes=2):
        assert few > 20e6
        assert (many < 1.05 * few) == (schedule != "gpipe")


def test_token_logprobs_and_their_backward_never_have_all_logits(monkeypatch):
    """At most an eighth of the fp32 logits, with the gradients of the head; on the meta device,
    with pieces as on CPUs."""
    monkeypatch.setitem(cross_entropy.PIECE_ELEMENTS, "meta", cross_entropy.PIECE_ELEMENTS["cpu"])
    config, live = GPT2Config(128_256, 4096, hidden_size=64, heads=1, **NO_DROPOUT), Live()
    head = LanguageModelHead(config).to("meta")
    x = torch.empty(1, 4096, 64, device="meta", requires_grad=True)
    batch = MicroBatch((1, 4096), targets=torch.empty(1, 4096, dtype=torch.int64, device="meta"))
    with live:
        logprobs, *_ = head.log_probabilities(x, batch, top_k=8)
        logprobs.sum().backward()
    assert x.grad is not None
    assert head.weight.grad is not None
    assert 256 * 128_256 * 4 <= live.most <= 4096 * 128_256 * 4 / 8, live.most
