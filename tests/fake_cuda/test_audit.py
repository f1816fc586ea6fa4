"""The fake device notes where the host would wait for a real one: each way by itself."""

import pytest
import torch

from tests.support.fakecuda import WHY_NOT, in_own_process

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))

WAYS = {
    "a number": lambda x, mask: bool(x.sum()),
    "a list": lambda x, mask: x[:1].tolist(),
    "to the CPU": lambda x, mask: x.cpu(),
    "to the CPU, not waited for, but it is pageable": lambda x, mask: x.to(
        "cpu", non_blocking=True
    ),
    "from the CPU": lambda x, mask: torch.zeros(4).to(x.device),
    "from pageable memory": lambda x, mask: x.copy_(torch.zeros(4), non_blocking=True),
    "a list of tensors from the CPU": lambda x, mask: torch._foreach_copy_([x], [torch.zeros(4)]),
    "places": lambda x, mask: mask.nonzero(),
    "an index by a mask": lambda x, mask: x[mask],
    "a write by a mask": lambda x, mask: x.index_put_((mask,), x[:2]),
    "indices of the CPU": lambda x, mask: x[torch.tensor([0, 1])],
    "a write by indices of the CPU": lambda x, mask: x.index_put_((torch.tensor([0]),), x[:1]),
    "a stream": lambda x, mask: torch.cuda.current_stream().synchronize(),
    "the device": lambda x, mask: torch.cuda.synchronize(),
}
FREE = {
    "one number by a mask": lambda x, mask: x.masked_fill_(mask, 0.0),
    "one number written by a mask": lambda x, mask: x.__setitem__(mask, 0.0),
    "indices of the device": lambda x, mask: x[mask.long()],
    "pinned memory": lambda x, mask: x.copy_(torch.zeros(4, pin_memory=True), non_blocking=True),
    "a list of tensors of the device": lambda x, mask: torch._foreach_copy_([x], [x + 1]),
    "a choice by a mask": lambda x, mask: torch.where(mask, x, 1.0),
}


def waits(name: str) -> int:
    """Count the waits of one of these ways."""
    from tests.support.fakecuda.audit import CUDA
    from tests.support.fakecuda.measure import seen, watched

    with watched():
        x, mask = torch.zeros(4, device=CUDA), torch.zeros(4, dtype=torch.bool, device=CUDA)
        seen()
        {**WAYS, **FREE}[name](x, mask)
        return seen().syncs.total()


def test_each_wait_is_noted_and_nothing_else():
    noted = {name: in_own_process(waits, name) for name in WAYS | FREE}
    assert noted == dict.fromkeys(WAYS, 1) | dict.fromkeys(FREE, 0)
