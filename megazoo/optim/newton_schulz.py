"""Orthogonalise a matrix by Newton-Schulz iterations, as Muon does."""

import torch

# Of the quintic polynomial, whose slope at 0 is as large as can be: Jordan et al. 2024.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def orthogonalised(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return U S' V^T of a matrix U S V^T, where S' is between about 0.7 and 1.2: [rows, columns]
    -> the same, of `dtype`, in which it is computed.

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
    """Return the multiply-adds of one iteration."""
    short, long = sorted((rows, columns))
    return 2 * short * short * long + short**3
