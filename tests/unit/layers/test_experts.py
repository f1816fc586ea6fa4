"""Layers of experts: the kernel and the formula, empty groups, weights of the router."""

import pytest
import torch
import torch.nn.functional as F

from megazoo.errors import UserError
from megazoo.layers import MixtureOfExperts, Router, RowParallelExperts
from megazoo.layers.grouped import grouped_linear
from megazoo.layers.product import grouped_linear_formula
from megazoo.parallel import ParallelContext
from megazoo.parallel.deferred import WeightQueue


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 7, 2), (0, 0, 0, 0)])
@pytest.mark.parametrize("outputs", [16, 7])
def test_a_queue_adds_the_gradient_of_the_weight_later(dtype, counts, outputs):
    torch.manual_seed(1)
    counts, received = torch.tensor(counts), []
    x = torch.randn(int(counts.sum()), 8, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(4, outputs, 8, dtype=dtype))
    weight.grad_dtype = torch.float32
    expected = torch.autograd.grad(grouped_linear(x, weight, counts).square().sum(), (x, weight))
    queue = WeightQueue(received.append)
    for count in range(1, 3):  # micro-batches
        x.grad = None
        grouped_linear(x, weight, counts, queue=queue).square().sum().backward()
        assert len(received) == count - 1
        queue.take()()
        torch.testing.assert_close(x.grad, expected[0])
        torch.testing.assert_close(weight.grad, count * expected[1].float(), rtol=1e-2, atol=1e-5)
    assert len(received) == 2
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 7, 2), (0, 0, 12, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("outputs", [16, 7])
def test_the_kernel_computes_the_formula(dtype, counts, outputs):
    torch.manual_seed(1)
    counts = torch.tensor(counts)
    found = []
    for product in (grouped_linear, grouped_linear_formula):
        torch.manual_seed(2)
        x = torch.randn(int(counts.sum()), 8, dtype=dtype, requires_grad=True)
        weight = torch.randn(4, outputs, 8, dtype=dtype, requires_grad=True)
        y = product(x, weight, counts)
        y.square().sum().backward()
        found.append((y, x.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
                                   atol=1e-5)  # fmt: skip


def plain(moe, x):
    """The definition, expert by expert."""
    weights, chosen = moe.router(x)
    y = torch.zeros_like(x)
    for expert in range(moe.router.experts):
        gate, up = F.linear(x, moe.gate_up.weight[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, moe.down.weight[expert])
        share = (weights * (chosen == expert)).sum(-1, keepdim=True)
        y = y + share * result
    return y


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("normalize", [False, True])
def test_it_is_the_weighted_sum_of_the_chosen_experts(top_k, normalize):
    torch.manual_seed(3)
    router = Router(16, experts=4, top_k=top_k, normalize=normalize, std=1.0)
    moe = MixtureOfExperts(16, 12, router, std=0.3, output_std=0.3)
    gradients = []
    for function in (moe, lambda x: plain(moe, x)):
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(4), requires_grad=True)
        y = function(x)
        moe.zero_grad()
        y.square().sum().backward()
        gradients.append([y, x.grad, *(parameter.grad for parameter in moe.parameters())])
    for one, other in zip(*gradients, strict=True):
        largest = other.abs().max().item()  # sums cancel in small gradients
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * max(1.0, largest))


def test_experts_that_ranks_do_not_divide_are_refused():
    ctx = ParallelContext.virtual(dp=4, folded={"ep": 4})
    with pytest.raises(UserError, match=r"6 experts .* over ep 4: use ep 1, 2, 3 or 6"):
        RowParallelExperts(6, 8, 8, ctx=ctx)
    with pytest.raises(UserError, match="top_k 5 must be from 1 to the number of experts, 4"):
        Router(8, experts=4, top_k=5)
    with pytest.raises(UserError, match="unknown router balance 'even': use sequence, batch, bias"):
        Router(8, experts=4, top_k=1, balance="even")


def test_the_bias_stays_fp32_and_frozen():
    router = Router(8, experts=4, top_k=1, balance="bias", bias_rate=0.25)
    router.batch_counted(torch.tensor([8, 0, 4, 4]))
    assert router.bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    router.bias.data += 1e-5
    before = router.bias.clone()
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.bias, before)
    assert not router.bias.requires_grad
