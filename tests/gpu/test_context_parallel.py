"""What one CUDA device can show of context parallelism: the attention of chunks is that of the
whole sequence."""

import pytest
import torch

from megazoo.layers import CausalSelfAttention
from megazoo.layers.masks import Packed, masks_of_chunks
from megazoo.parallel.device import set_fp32_precision
from megazoo.parallel.sequence import SequenceCut

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"
    ),
]
LENGTHS = [(100, 28), (1, 63, 1, 63)]  # of documents in two rows


def reference(q, k, v, seen):
    """Return attention in fp64 by the formula. seen: bool [rows, 1, queries, keys]."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("dtype", "packed", "tolerance"),
    [
        (torch.bfloat16, True, 2e-2),
        (torch.bfloat16, False, 2e-2),
        (torch.float16, True, 4e-3),
        (torch.float32, False, 1e-5),
    ],
    ids=str,
)
def test_chunks_attend_as_the_whole_sequence(dtype, packed, tolerance, kv_heads, documents):
    """Outputs, and the gradients of queries, keys and values, over both ranks of two."""
    set_fp32_precision("ieee")
    torch.manual_seed(0)
    layer = CausalSelfAttention(256, 4, kv_heads).to("cuda", dtype)
    heads = (4, kv_heads, kv_heads)
    q, k, v = (
        torch.randn(2, n, 128, 64, device="cuda", dtype=dtype, requires_grad=True) for n in heads
    )
    ids, flat = torch.zeros(2, 128, dtype=torch.int64, device="cuda"), [128, 128]
    if documents:
        flat = [size for row in LENGTHS for size in row]
        ids = torch.arange(len(flat)).repeat_interleave(torch.tensor(flat)).view(2, 128).cuda()
    boundaries = torch.tensor([0, *flat], device="cuda").cumsum(0).int()
    seen = (ids[:, :, None] == ids[:, None]).tril()[:, None]
    expected = reference(q, k, v, seen)
    weights = torch.randn_like(expected)
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))

    given = {"segments": ids, "boundaries": boundaries if packed else None} if documents else {}
    found = torch.zeros_like(expected)
    for rank in range(2):
        cut = SequenceCut(128, 2, rank, "allgather")
        masks = masks_of_chunks(cut, 2, dtype, q.device, packed=packed, **given).masks
        for chunk, mask in zip(cut.chunks, masks, strict=True):
            assert isinstance(mask, Packed) is packed
            part = q[:, :, chunk.start : chunk.stop]
            y = layer.attend._here(part, k[:, :, : chunk.stop], v[:, :, : chunk.stop], mask)
            found = found + torch.nn.functional.pad(
                y.double(), (0, 0, chunk.start, 128 - chunk.stop)
            )
    ours = torch.autograd.grad((found * weights).sum(), (q, k, v))
    for mine, its in zip((found, *ours), (expected, *theirs), strict=True):
        assert mine.isfinite().all()
        assert (mine.double() - its.double()).norm() < tolerance * its.double().norm()
