"""What needs a CUDA device: initial values, saving and loading on it, bit for bit as on the CPU."""

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, Saver, load, save
from megazoo.models.llama import LlamaConfig
from megazoo.parallel.staging import BUFFER_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"
    ),
]

DEVICE = "cuda"
# Its embedding does not fit into two buffers, and has an odd number of rows.
CONFIG = LlamaConfig(
    vocab_size=20011, max_positions=32, hidden_size=512, layers=2, heads=8, kv_heads=2
)


def built(device: str, dtype=torch.float32, seed: int = 3):
    ctx = megazoo.ParallelContext.from_torch(device=device)
    return megazoo.from_config(CONFIG, ctx, dtype=dtype, seed=seed)


def trained(model, optimizer, steps: int) -> dict[str, torch.Tensor]:
    """Train; returns a copy of all that a checkpoint is to hold."""
    for step in range(steps):
        ids = torch.randint(0, 20011, (4, 32), generator=torch.Generator().manual_seed(step))
        model.train_batch(ids, labels=ids)
        optimizer.step()
    return values_of(model, optimizer)


def values_of(model, optimizer) -> dict[str, torch.Tensor]:
    values = {entry.name: entry.parameter for entry in model.entries()}
    for name, states in optimizer.state.items():
        values |= {f"{name}.{state}": tensor for state, tensor in states.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in values.items()}


def loaded(path, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = built(device, dtype, seed=4)
    optimizer = megazoo.optim.AdamW(model)
    load(Checkpoint(path), model, optimizer)
    return values_of(model, optimizer)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_built_on_cuda_is_the_one_built_on_the_cpu(dtype):
    ours, theirs = built(DEVICE, dtype), built("cpu", dtype)
    assert max(parameter.nbytes for parameter in ours.parameters()) > 2 * BUFFER_BYTES
    for (name, on_cuda), on_cpu in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert on_cuda.device.type == DEVICE
        assert torch.equal(on_cuda.cpu(), on_cpu), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cuda_saves_loads_anywhere(tmp_path, dtype):
    model = built(DEVICE, dtype)
    optimizer = megazoo.optim.AdamW(model)
    values = trained(model, optimizer, 2)
    save(tmp_path, 2, model, optimizer)
    for device in ("cpu", DEVICE):
        assert_equal(loaded(tmp_path, device, dtype), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_while_cuda_saves_in_the_background(tmp_path, dtype):
    model = built(DEVICE, dtype)
    optimizer = megazoo.optim.AdamW(model)
    expected = {}
    with Saver(tmp_path, model, optimizer, background=True) as saver:
        for step in range(1, 4):
            expected[step] = trained(model, optimizer, 2)
            saver.save(step, {})
            trained(model, optimizer, 1)
            with torch.no_grad():  # by a loop of one's own
                for parameter in model.parameters():
                    parameter.mul_(0.999)
    for step, values in expected.items():
        assert_equal(loaded(tmp_path / f"step_{step:08d}", "cpu", dtype), values)
