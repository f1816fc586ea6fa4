"""A kernel for the pages of a cache, on a CPU: torch has one for CUDA only."""

from contextlib import contextmanager
from unittest import mock

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.layers import attend
from megazoo.layers.static_cache import StaticKVCache
from megazoo.torch_internals import takes_pages

OPERATOR = "_flash_attention_forward"
WHY_NOT = None
if "block_table" not in str(torch.ops.aten._flash_attention_forward.default._schema):
    WHY_NOT = "this version of torch has no pages"


def by_hand(
    q, k, v, boundaries, slot_boundaries, longest, slots, dropout, causal, debug, *,
    window_size_left, window_size_right, seqused_k, block_table, scale=None,
):  # fmt: skip
    """Return the softmax of each row's query over the keys in use, by the formula."""
    rows, heads, size = q.shape
    assert k.shape == v.shape
    assert k.shape[1] == slots
    assert slots % 256 == 0
    assert k.stride(-1) == v.stride(-1) == q.stride(-1) == 1
    assert (longest, dropout, causal, debug) == (1, 0.0, False, False)
    assert window_size_left == window_size_right == -1
    for each in (boundaries, slot_boundaries, seqused_k, block_table):
        assert each.dtype == torch.int32
        assert each.device == q.device
        assert each.is_contiguous()
    assert boundaries.tolist() == list(range(rows + 1))
    assert slot_boundaries.tolist() == [slots * row for row in range(rows + 1)]
    assert block_table.shape == (rows, 1)
    y = torch.empty(q.shape, dtype=q.dtype)
    for row in range(rows):
        page, used = int(block_table[row, 0]), int(seqused_k[row])
        assert 0 < used <= slots
        keys, values = (x[page, :used].float() for x in (k, v))  # [used, heads, size]
        keys, values = (x.repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[row].float(), keys)
        weights = (scores * (size**-0.5 if scale is None else scale)).softmax(-1)
        y[row] = torch.einsum("hk,khd->hd", weights, values)
    none = torch.empty(0)
    return y, none, none, none, none


@contextmanager
def pages(kernel=by_hand, dtypes=(torch.float32,)):
    """Within this block torch has this kernel on CPUs, and attention uses it for these dtypes.
    Yields the number of keys in the cache at each of its calls."""
    slots = []

    def counted(*given, **options):
        slots.append(given[1].shape[1])
        return kernel(*given, **options)

    library = torch.library.Library("aten", "IMPL")
    library.impl(OPERATOR, counted, "CPU")
    takes_pages.cache_clear()
    try:
        with mock.patch.object(attend, "HALF", dtypes):
            yield slots
    finally:
        library._destroy()
        takes_pages.cache_clear()


def logits_of_steps(model, ids: torch.Tensor, prompt: int, paged: bool) -> torch.Tensor:
    """Return the logits of given tokens after a prompt, fp32 [rows, tokens, vocabulary], from a
    StaticKVCache."""
    cache, logits = StaticKVCache(ids.shape[1], 1, ids.device, paged=paged), []
    with torch.inference_mode():
        for tokens in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            place = cache.position if cache.used else None
            batch = MicroBatch(
                tuple(tokens.shape), tokens, position_ids=place, longest=ids.shape[1], cache=cache
            )
            x = model.forward_stage(tokens, batch, model.stages[0])
            logits.append(model.output_head.outputs(x, batch)[:, -1].float())
            cache.advance(tokens.shape[1])
    return torch.stack(logits, dim=1)
