"""Orthogonalise a matrix with Newton-Schulz iterations, as in Muon."""

import torch

# Coefficients of the quintic polynomial with the largest slope at 0: Jordan et al. 2024.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def orthogonalised(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return U S' V^T for a matrix U S V^T, where S' is between about 0.7 and 1.2: [rows, columns]
    -> the same shape, computed in `dtype`.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype, copy=True)
    x = x.T if is_tall else x
    x = x.div_(x.norm().clamp(min=EPSILON))  # no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def cost_of(rows: int, columns: int) -> int:
    """Return the number of multiply-adds of one iteration."""
    short, long = sorted((rows, columns))
    return 2 * short * short * long + short**3
