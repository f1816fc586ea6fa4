"""What needs a CUDA device: the same program on it, against the CPU."""

import dataclasses
import json

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.parallel.device import set_fp32_precision
from megazoo.parallel.timing import Stopwatch, spent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"
    ),
]


def losses_on(device, directory):
    """Losses of 20 steps at a rate that does not amplify rounding."""
    metrics = directory / f"{device}.jsonl"
    arguments = "--steps 20 --warmup-steps 5 --lr 1e-3 --global-batch-size 8 --micro-batch-size 4"
    arguments += f" --eval-steps 0 --device {device} --dtype float32 --fp32-precision ieee"
    pretrain.main(
        [*arguments.split(), "--metrics", str(metrics), "--save", str(directory / device)]
    )
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_the_program_trains_on_cuda_as_on_the_cpu(tmp_path):
    on_cpu, on_cuda = losses_on("cpu", tmp_path), losses_on("cuda", tmp_path)
    assert len(on_cuda) == 20
    assert max(abs(a / b - 1) for a, b in zip(on_cuda, on_cpu, strict=True)) < 1e-5


def test_dropout_on_cuda_draws_by_name():
    from megazoo.layers import Dropout

    layer, x = Dropout(0.5), torch.ones(1000, device="cuda")
    layer.site = "a"
    assert torch.equal(layer(x, seed=1), layer(x, seed=1))
    assert not torch.equal(layer(x, seed=1), layer(x, seed=2))


def test_forward_takes_token_ids_from_the_cpu():
    model = megazoo.from_config("gpt2-tiny", megazoo.ParallelContext.from_torch(device="cuda"))
    assert model(torch.zeros(2, 8, dtype=torch.long)).logits.is_cuda


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20, "seed": 3}], ids=str
)
def test_generation_on_cuda_as_on_the_cpu(settings):
    set_fp32_precision("ieee")
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [2]])).long()
    outputs = []
    for device in ("cpu", "cuda"):
        model = megazoo.from_config(
            "llama-tiny", megazoo.ParallelContext.from_torch(device=device), seed=3
        )
        for parameter in model.parameters():
            values = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
            )
            parameter.data.copy_(0.3 * values + float(parameter.dim() == 1))
        outputs.append(model.generate(ids, mask, max_new_tokens=12, **settings).cpu())
    assert torch.equal(*outputs)


def test_a_classifier_and_a_score_on_cuda():
    from megazoo.evaluation.scoring import score

    ctx = megazoo.ParallelContext.from_torch(device="cuda")
    config = megazoo.models.find_config("gpt2-tiny")
    ids = torch.randint(0, 256, (4, 9))
    classifier = megazoo.from_config(dataclasses.replace(config, num_labels=3, pad_token_id=0), ctx)
    assert classifier.train_batch(
        ids, labels=torch.tensor([0, 1, 2, 0]), num_microbatches=2
    ).isfinite()
    assert score(megazoo.from_config(config, ctx), ids, ids).log_likelihood.isfinite().all()


def test_events_of_the_stream_tell_what_the_device_was_busy_with():
    x = torch.randn(4096, 4096, device="cuda")
    with Stopwatch(x.device) as watch:
        with spent("forward"):
            for _ in range(20):
                x = x @ x * 1e-3
        with spent("optimizer"):
            x.sum().item()
    times = watch.times()
    assert times["forward"] > 0.5 * watch.seconds > times["optimizer"]


@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny"])
def test_steps_by_pages_are_those_by_masks(preset, monkeypatch):
    """In bf16: the logits of three rows for given tokens, and that generation uses one graph."""
    from megazoo.generate import graph
    from megazoo.torch_internals import takes_pages
    from tests.support.pages import logits_of_steps
    from tests.support.training import randomize

    if not takes_pages(torch.device("cuda"), torch.bfloat16):
        pytest.skip("this version of torch, or this device, has no kernel for pages")
    ctx = megazoo.ParallelContext.from_torch(device="cuda")
    model = randomize(megazoo.from_config(preset, ctx, dtype=torch.bfloat16, seed=3)).eval()
    ids = torch.randint(0, 256, (3, 80), generator=torch.Generator().manual_seed(1)).cuda()
    by_masks, by_pages = (logits_of_steps(model, ids, 60, paged=paged) for paged in (False, True))
    assert (by_pages - by_masks).norm() < 2e-2 * by_masks.norm()

    captures, capture = [], graph.StepGraph._capture
    monkeypatch.setattr(
        graph.StepGraph, "_capture", lambda *given: [captures.append(1), capture(*given)]
    )
    for settings in ({}, {"num_beams": 3}):
        captures.clear()
        model.generate(ids[:, :60], max_new_tokens=20, min_new_tokens=20, **settings)
        assert len(captures) == 1, "from 64 slots to 128, masks need two"

    pytest.importorskip("triton")
    model.compile()
    compiled = logits_of_steps(model, ids, 60, paged=True)
    assert (compiled - by_masks).norm() < 2e-2 * by_masks.norm()
    captures.clear()
    model.generate(ids[:, :60], max_new_tokens=20, min_new_tokens=20)
    assert len(captures) == 1


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_to_pages_is_that_of_a_mask(kv_heads, dtype):
    """For several rows and numbers of keys, eagerly and replayed."""
    from megazoo.torch_internals import paged_attention, takes_pages

    if not takes_pages(torch.device("cuda"), dtype):
        pytest.skip("this version of torch, or this device, has no kernel for pages")
    rows, slots = 3, 768
    k, v = torch.randn(2, rows, slots, kv_heads, 64, device="cuda", dtype=dtype)
    q = torch.randn(rows, 4, 64, device="cuda", dtype=dtype)
    first = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    used = torch.ones(rows, device="cuda", dtype=torch.int32)

    def attend():
        return paged_attention(q, k, v, used, first[:rows, None], first, first * slots, None)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = attend()
    for counts in ([1, 2, 3], [64, 65, 768], [500, 256, 257]):
        used.copy_(torch.tensor(counts))
        graph.replay()
        assert torch.equal(replayed, attend())
        for row, count in enumerate(counts):
            keys, values = (
                x[row, :count].double().repeat_interleave(4 // kv_heads, 1) for x in (k, v)
            )
            weights = (torch.einsum("hd,khd->hk", q[row].double(), keys) / 8).softmax(-1)
            expected = torch.einsum("hk,khd->hd", weights, values)
            assert (replayed[row].double() - expected).norm() < 1e-2 * expected.norm()
