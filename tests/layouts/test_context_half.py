"""Context parallelism in half precision: steps as those of one process in the same dtype, and every
collective with uneven parts."""

import pytest
import torch
import torch.distributed as dist

import megazoo
from megazoo.parallel.collectives import exchange_parts
from tests.support.training import MODELS, context, make_batch, randomize

# losses and norms of two runs that round differently differ by a few units in the last place
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def steps(config, layout, dtype):
    """Return the loss and the norm of two steps."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3, dtype=dtype))
    optimizer = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=0.2)
    history = []
    for step in range(2):
        ids, targets = make_batch(step)
        loss = model.train_batch(ids, targets=targets, num_microbatches=2, step=step)
        history.append((loss.item(), optimizer.step().item()))
    return torch.tensor(history)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("method", ["allgather", "ulysses"])
@pytest.mark.parametrize("name", ["llama", "mpt"])
def test_half_precision_trains_as_one_process_does(ranks, name, method, dtype):
    expected = steps(MODELS[name], {}, dtype)
    for found in ranks(steps, 2, MODELS[name], dict(cp=2, method=method), dtype):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=0)


ROWS = [[1, 2, 0], [3, 0, 1], [0, 0, 2]]  # that rank r sends to each


def exchanged(dtype):
    rank = context(cp=3).cp_rank
    x = torch.arange(sum(ROWS[rank]) * 4).view(-1, 4) + 100 * rank
    receives = [row[rank] for row in ROWS]
    return exchange_parts(x.to(dtype), dist.group.WORLD, ROWS[rank], receives).long()


@pytest.mark.parametrize("dtype", [torch.float32, *TOLERANCE], ids=str)
def test_uneven_and_empty_parts_are_exchanged(ranks, dtype):
    sent = [(torch.arange(sum(ROWS[r]) * 4).view(-1, 4) + 100 * r).split(ROWS[r]) for r in range(3)]
    for rank, found in enumerate(ranks(exchanged, 3, dtype)):
        assert torch.equal(found, torch.cat([sent[other][rank] for other in range(3)]))
