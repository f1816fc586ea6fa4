"""What needs a CUDA device with float8: its products are those that are emulated elsewhere."""

import pytest
import torch

from megazoo import torch_internals
from megazoo.layers import ColumnParallelLinear, float8, round_to_float8
from megazoo.layers.float8 import Float8Product
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with float8; this machine has none",
    ),
]


@pytest.fixture
def counted(monkeypatch):
    """The products that the device has multiplied in float8."""
    found = []

    def product(*arguments, **options):
        found.append(arguments)
        return torch_internals.float8_product(*arguments, **options)

    monkeypatch.setattr(float8, "float8_product", product)
    return found


def drawn(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("rows", "kernels"), [(64, 3), (33, 0)])
def test_products_are_those_of_the_emulation(counted, recipe, rows, kernels):
    x, weight, grad = drawn(rows, 32), drawn(48, 32), drawn(rows, 48)
    results = []
    for device in ("cpu", "cuda"):
        product = Float8Product(recipe, ParallelContext(), ParameterSpec((48, 32)))
        on_device = [tensor.to(device) for tensor in (x, weight, grad)]
        ready = product.gradient(on_device[2])
        results.append([
            product.output(on_device[0], on_device[1]),
            product.input_gradient(ready, on_device[1]),
            product.weight_gradient(ready, on_device[0]),
        ])  # fmt: skip
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
    assert len(counted) == kernels


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_rounded_weight_is_multiplied_in_float8(counted, rows):
    layer = ColumnParallelLinear(32, 48, ctx=ParallelContext(device=torch.device("cuda")))
    layer = layer.to(torch.bfloat16)
    round_to_float8(layer)
    x = drawn(rows, 32).cuda()
    with torch.no_grad():
        found = layer(x)
        expected = x.float() @ layer.product.widened(layer.weight).t() + layer.bias.float()
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)
    assert len(counted) == 1
