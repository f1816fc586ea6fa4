"""Random numbers in several dtypes, and what functions make of them."""

import torch

DTYPES = (torch.float32, torch.bfloat16)


TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6}  # relative to the greatest value


def results(function, *inputs):
    """What a function of tensors returns, and the gradients of its inputs for given gradients of
    that."""
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, given)
    return [y.detach() for y in outputs], [x.grad for x in inputs if x.requires_grad]


def assert_equal(ours, theirs, exact_values=False, tolerance=None):
    for mine, its in zip(ours[0], theirs[0], strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its) or not exact_values
    for mine, its in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
        limit = (tolerance or TOLERANCE)[mine.dtype] * its.abs().max()
        assert (mine.float() - its.float()).abs().max() <= limit


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
