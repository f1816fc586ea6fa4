"""What needs a CUDA device: the same program on it, against the CPU."""

import json

import pytest
import torch

import megazoo
import pretrain_gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


def losses_on(device, directory):
    metrics = directory / f"{device}.jsonl"
    arguments = "--steps 20 --warmup-steps 5 --global-batch-size 8 --micro-batch-size 4 --eval-steps 0".split()
    pretrain_gpt.main([*arguments, "--device", device, "--metrics", str(metrics), "--save", str(directory / device)])
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_the_program_trains_on_cuda_as_on_the_cpu(tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, on_cuda = losses_on("cpu", tmp_path), losses_on("cuda", tmp_path)
    assert len(on_cuda) == 20
    assert max(abs(a / b - 1) for a, b in zip(on_cuda, on_cpu, strict=True)) < 1e-3


def test_dropout_on_cuda_draws_by_name():
    from megazoo.layers import Dropout

    layer, x = Dropout(0.5), torch.ones(1000, device="cuda")
    layer.site = "a"
    assert torch.equal(layer(x, seed=1), layer(x, seed=1))
    assert not torch.equal(layer(x, seed=1), layer(x, seed=2))


def test_forward_takes_token_ids_from_the_cpu():
    model = megazoo.from_config("gpt2-tiny", megazoo.ParallelContext.from_torch(device="cuda"))
    assert model(torch.zeros(2, 8, dtype=torch.long)).logits.is_cuda
