"""tools/gpu_rows.sh and its benchmark case, without a GPU: on tiny models on the CPU, and on the
fake device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazoo.errors import UserError
from tests.support.fakecuda import WHY_NOT, in_own_process

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_rows(monkeypatch):
    """The module of the benchmark case."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    from benchmarks.cases import gpu_rows

    return gpu_rows


@pytest.mark.slow
def test_as_many_layers_as_fit_by_the_bytes_of_their_states(gpu_rows):
    """A layer of LLaMA 3 8B has 218 million parameters: 4 x 4096^2 x (1 + 1/4) / 2 of attention and
    3 x 4096 x 14336 of its MLP. Each needs 18 bytes, of bf16 weights, and of fp32 gradients, master
    weights and Adam's two moments."""
    layer = 18 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096)
    memory = 80 * 10**9
    layers = gpu_rows.layers_that_fit("llama3-8b", 512, 1, memory)
    states = 18 * (2 * 128256 * 4096 + 4096)
    assert memory - 2 * layer - 10 * 10**9 < states + layers * layer < memory


def test_a_device_without_room_and_an_unknown_row(gpu_rows):
    from benchmarks.results import Setup

    with pytest.raises(UserError, match="one layer of llama3-8b needs more than 1 GB"):
        gpu_rows.layers_that_fit("llama3-8b", 512, 1, 10**9)
    with pytest.raises(UserError, match="unknown row train-x: use train-llama3"):
        next(gpu_rows.cases(Setup(1, 1.0, None, ("train-x",), tiny=True)))


def train_on_the_fake_device(preset: str) -> tuple:
    """Return what a row measures, and the faults that the fake device noted. Without
    torch.compile, and with sizes of a device that it does not have."""
    import torch

    import megazoo
    from tests.support.fakecuda import measure

    sys.path.insert(0, str(ROOT / "tools"))
    from benchmarks.cases import gpu_rows

    with pytest.MonkeyPatch.context() as patch, measure.watched() as audit:
        patch.setattr(megazoo.ParallelContext, "from_torch", lambda device, zero: measure.context())
        patch.setattr(megazoo.models.base.Model, "compile", lambda model: model)
        patch.setattr(gpu_rows, "memory_of", lambda device: 10**9)
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 1)
        return gpu_rows.train(preset, 64, 2, 1, "cuda"), audit.faults


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
@pytest.mark.parametrize("preset", ["llama-tiny", "gpt2-tiny"])
def test_a_row_of_training_runs_on_the_fake_device(preset):
    (layers, tokens, at_the_peak, memory), faults = in_own_process(train_on_the_fake_device, preset)
    assert (layers, len(tokens), memory) == (4, 1, 1)
    assert 1e8 < at_the_peak[0] < 1e9, "989 TFLOP/s, and some million FLOPs per token"
    assert not faults


@pytest.mark.slow
def test_the_script_tries_every_row_on_the_cpu(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", "tools/gpu_rows.sh", str(tmp_path), "--tiny"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_rows.json").read_text())
    assert {part["exit"] for part in found["parts"].values()} == {0}
    assert found["tests"]["tests"] > 20
    assert len(found["results"]) == 8
    assert (tmp_path / "rows.md").read_text().count("\n") == 2 + 8
