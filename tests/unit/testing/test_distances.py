"""How far two numbers or tensors are apart."""

import math

import torch

from megazoo.testing.distances import relative


def test_nothing_is_near_a_number_that_is_none():
    assert relative(math.nan, 1.0) == relative(0.0, math.nan) == math.inf
    assert relative(torch.tensor(math.nan), torch.tensor(2.0)) == math.inf
    assert relative(torch.tensor(3.0), torch.tensor(2.0)) == 1.5
    assert relative(0.0, 0.0) == 0.0
