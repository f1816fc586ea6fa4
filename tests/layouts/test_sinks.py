"""Attention sinks: values and gradients are those of gpt-oss in transformers, in any layout."""

from types import SimpleNamespace

import pytest
import torch

from megazoo.errors import UserError
from megazoo.layers import Attend, KVCache, MaskPerWindow, RowParallelLinear, segment_mask
from megazoo.layers.masks import masks_of_chunks
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.sequence import SequenceCut
from tests.support.numbers import numbers
from tests.support.training import context, layout_name, run_in_layout

ROWS, HEADS, KV_HEADS, TOKENS, SIZE = 2, 6, 3, 16, 8
NAMES = ("q", "k", "v", "sinks")
HIDDEN = torch.finfo(torch.float32).min


def inputs() -> dict[str, torch.Tensor]:
    shapes = [(ROWS, heads, TOKENS, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return {
        name: 2 * numbers(*shape, seed=seed)
        for seed, (name, shape) in enumerate(zip(NAMES, [*shapes, (HEADS,)], strict=True))
    }


def given_gradient() -> torch.Tensor:
    return numbers(ROWS, TOKENS, HEADS * SIZE, seed=9)


def of_transformers(seen: torch.Tensor, added: torch.Tensor | float = 0.0) -> dict:
    """The output and gradients of gpt-oss. seen: where a query may attend."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    given = {name: x.requires_grad_() for name, x in inputs().items()}
    module = SimpleNamespace(
        num_key_value_groups=HEADS // KV_HEADS, sinks=given["sinks"], training=False
    )
    mask = torch.zeros(1).masked_fill(~seen, HIDDEN) + added
    q, k, v = (given[name] for name in "qkv")
    y, _ = eager_attention_forward(module, q, k, v, mask, SIZE**-0.5)
    return with_gradients(y.flatten(2), given)


def with_gradients(y: torch.Tensor, given: dict) -> dict:
    y.backward(given_gradient())
    return {"y": y.detach()} | {name: x.grad for name, x in given.items()}


def assert_close(found: dict, wanted: dict) -> None:
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() < 1e-5, name


def causal(window: int | None = None) -> torch.Tensor:
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


def documents() -> torch.Tensor:
    """Segments of the tokens of each row."""
    return torch.arange(TOKENS).expand(ROWS, -1) // torch.tensor([[5], [7]])


def within_documents() -> torch.Tensor:
    segments = documents()
    return (segments[:, :, None] == segments[:, None])[:, None]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["causal", "boolean", "additive"])
def test_sinks_work_with_all_masks(window, kind):
    given = {name: x.requires_grad_() for name, x in inputs().items()}
    seen, mask, added = causal(window), None, 0.0
    if kind == "boolean":
        seen, mask = seen & within_documents(), causal() & within_documents()
    elif kind == "additive":
        added = numbers(HEADS, TOKENS, TOKENS, seed=8)
        mask = added.masked_fill(~causal(), -torch.inf)
    attend = Attend(HEADS, SIZE, KV_HEADS, sinks=True, window=window)
    assert_close(with_gradients(attend(**given, mask=mask), given), of_transformers(seen, added))


def mask_of_documents(window: int | None, cut: SequenceCut | None):
    if cut is None:
        return segment_mask(documents(), window=window)
    how = {"segments": documents(), "window": window}
    chunks = masks_of_chunks(cut, ROWS, torch.float32, torch.device("cpu"), **how)
    return MaskPerWindow({window: chunks})


def in_layout(window, packed, layout) -> dict:
    """The output and gradients of all ranks, gathered."""
    ctx = context(**layout)
    attend = Attend(HEADS, SIZE, KV_HEADS, sinks=True, window=window, ctx=ctx)
    cut = SequenceCut.of(TOKENS, ctx)
    own = torch.arange(TOKENS) if cut is None else cut.positions(torch.device("cpu"))

    def mine(whole: torch.Tensor, axis: int) -> torch.Tensor:
        """A view of this rank's heads, along an axis."""
        return whole.unflatten(axis, (ctx.tp_size, -1)).select(axis, ctx.tp_rank)

    whole = inputs()
    given = {"sinks": mine(whole["sinks"], 0).requires_grad_()}
    given |= {name: mine(whole[name], 1)[:, :, own].requires_grad_() for name in "qkv"}
    mask = mask_of_documents(window, cut) if packed else None
    y = attend(**given, mask=mask)
    y.backward(mine(given_gradient(), 2)[:, own])
    found = {name: torch.zeros_like(x) for name, x in whole.items()}
    found["y"] = torch.zeros_like(given_gradient())
    mine(found["y"], 2)[:, own] = y.detach()
    mine(found["sinks"], 0).copy_(given["sinks"].grad)
    for name in "qkv":
        mine(found[name], 1)[:, :, own] = given[name].grad
    for each in found.values():
        all_reduce_over(each, [ctx.tp, ctx.cp])
    return found


LAYOUTS = [{"tp": 3}, {"cp": 2}, {"cp": 2, "method": "ulysses"}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize(("window", "packed"), [(None, False), (5, False), (5, True)])
def test_sinks_of_a_rank_are_those_of_its_heads(ranks, layout, window, packed):
    seen = causal(window) & within_documents() if packed else causal(window)
    (found, *_) = run_in_layout(ranks, in_layout, layout, window, packed)
    assert_close(found, of_transformers(seen))


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_work_with_a_cache(window):
    given, attend = inputs(), Attend(HEADS, SIZE, KV_HEADS, sinks=True, window=window)
    memory, outputs = KVCache(TOKENS), []
    for part in torch.arange(TOKENS).split([6, 3, *[1] * 7]):  # the prompt in two forwards
        q, k, v = (given[name][:, :, part] for name in "qkv")
        outputs.append(attend(q, k, v, cache=memory, sinks=given["sinks"]))
        memory.advance(len(part))
    assert_close({"y": torch.cat(outputs, dim=1)}, {"y": of_transformers(causal(window))["y"]})


def test_the_gradient_of_sinks_is_the_same_with_recomputation():
    attend, output = Attend(HEADS, SIZE, KV_HEADS, sinks=True), RowParallelLinear(HEADS * SIZE, 4)

    def gradients(recompute: bool) -> list[torch.Tensor]:
        tensors = [x.requires_grad_() for x in inputs().values()]

        def run(q, k, v, sinks):
            return attend(q, k, v, sinks=sinks, keep=recompute)

        y = output(tuple(tensors), recompute=run) if recompute else output(run(*tensors))
        y.square().sum().backward()
        return [x.grad for x in tensors]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)


def test_sinks_are_declared():
    """They have no kernel for Packed masks, which are built before the attention is called."""
    q, k, v, sinks = inputs().values()
    assert Attend(HEADS, SIZE, KV_HEADS).takes_packed(torch.bfloat16)
    assert not Attend(HEADS, SIZE, KV_HEADS, sinks=True).takes_packed(torch.bfloat16)
    with pytest.raises(UserError, match="sinks=False was called with sinks"):
        Attend(HEADS, SIZE, KV_HEADS)(q, k, v, sinks=sinks)
    with pytest.raises(UserError, match="sinks=True was called without sinks"):
        Attend(HEADS, SIZE, KV_HEADS, sinks=True)(q, k, v)
