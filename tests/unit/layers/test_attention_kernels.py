"""Which of torch's kernels computes the attention: on CUDA by torch's rules, on the CPU as torch
says; and that what is done to have a fast one changes no result."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import megazoo
from megazoo.layers import (
    ALiBi,
    CausalSelfAttention,
    KVCache,
    alibi_bias,
    alibi_slopes,
    attend,
    segment_mask,
)
from megazoo.layers.masks import additive
from megazoo.torch_internals import attention_kernel
from tests.support.fakecuda import WHY_NOT, in_own_process
from tests.support.training import MODELS, context, make_batch

PAGE = Path(__file__).parents[3] / "docs" / "layers.md"
ROWS = re.findall(r"^\| (half|fp32) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
TABLE = [(dtype, *rest.split(" | ")) for dtype, rest in ROWS]
CPU = torch.device("cpu")
needs_fake_cuda = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))


class Asked(TorchFunctionMode):
    """Notes the kernel of each call of scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        self.kernels = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            kernel = attention_kernel(*args[:3], mask, kwargs.get("dropout_p", 0.0))
            self.kernels.add(kernel.name.removesuffix("_ATTENTION").lower())
        return function(*args, **kwargs)


def test_the_page_has_every_case():
    half = {("half", mask) for mask in ("none", "segments", "documents", "ALiBi")}
    cases = {(*case, heads) for case in half for heads in ("as many", "fewer")}
    cases |= {("fp32", *case[1:]) for case in cases if case[1] != "documents"}
    assert {row[:3] for row in TABLE} == cases
    assert len(TABLE) == len(cases)


@needs_fake_cuda
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("half", torch.bfloat16),
        pytest.param("half", torch.float16, marks=pytest.mark.slow),
        pytest.param("fp32", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_page_says_what_torch_chooses(kind, dtype, monkeypatch):
    from tests.support.fakecuda import measure

    monkeypatch.setattr(attend, "takes_blocks", lambda *_: False)  # as on a CPU without bfloat16
    for row in (row for row in TABLE if row[0] == kind):
        mask, k_heads = row[1], 4 if row[2] == "as many" else 2
        for queries in (128, 1) if mask != "documents" else (128,):
            q, k = (2, 4, queries, 64), (2, k_heads, 128, 64)
            for column, capability in zip(row[3:5], ((9, 0), (8, 0)), strict=True):
                audit = in_own_process(measure.attention, q, k, dtype, mask, capability)
                (seen,) = audit.attention
                sm90, sm80 = re.match(r"sm90 (\w+), sm80 (\w+):", seen).groups()
                kernel, _, expanded = column.partition(", ")
                assert (sm90 if capability == (9, 0) else sm80) == kernel.lower(), row
                shapes = re.search(r"q (\[.*?\]) k (\[.*?\])", seen).groups()
                if mask != "documents":
                    moved = [4, 128, 64] if expanded and queries > 1 else [k_heads, 128, 64]
                    asked = [k_heads, 2, 64] if k_heads < 4 and queries == 1 else [4, queries, 64]
                    assert shapes == (str(asked), str(moved)), row
                assert not audit.syncs
            with Asked() as asked:
                layer = CausalSelfAttention(256, 4, k_heads)
                given = measure_mask(mask, q, k, dtype)
                k = torch.zeros(k, dtype=dtype)
                layer.attend._scaled_dot_product(torch.zeros(q, dtype=dtype), k, k, given)
            assert asked.kernels == {row[5]}, row


def measure_mask(kind, q, k, dtype):
    if kind == "none":
        return None
    if kind == "ALiBi":
        return ALiBi(4, range(4))(q[2], k[2], dtype, CPU)
    return additive(segment_mask(torch.zeros(q[0], k[2], dtype=torch.int64), q[2]), dtype)


def test_no_model_comes_to_the_math_kernel():
    ids, targets = make_batch(0)
    for name, config in MODELS.items():
        model = megazoo.from_config(config, context())
        with Asked() as asked:
            model.train_batch(ids, targets=targets)
            model.train_batch(ids, targets=targets, document_ids=(ids > 30).long())
            model.generate(ids[:, :13], max_new_tokens=2)
        assert asked.kernels == {"flash"}, name


def test_a_mask_that_is_added_gives_the_same_bits():
    layer, segments = CausalSelfAttention(32, 4, 2), torch.tensor([[0] * 9 + [1] * 7, [-1] * 16])
    results = []
    mask = segment_mask(segments)
    for given in (mask, additive(mask, torch.float32)):
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = layer(x, mask=given)
        y.sin().sum().backward()
        results.append((y, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_rows_of_masks_begin_at_multiples_of_16_elements():
    masks = [segment_mask(torch.zeros(rows, 13, dtype=torch.int64)) for rows in (1, 3)]
    biases = [alibi_bias(alibi_slopes(4), 13, 13, torch.bfloat16, CPU, m) for m in (None, *masks)]
    for made in (*biases, *(additive(mask, torch.bfloat16) for mask in masks)):
        assert made.shape[-2:] == (13, 13)
        assert made.stride(-1) == 1
        assert not any(stride % 16 for stride in made.stride()[:-1])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_groups_that_no_kernel_takes_give_the_same(monkeypatch, kv_heads):
    """All tokens at once, then one by one from a cache."""
    layer, x = CausalSelfAttention(32, 4, kv_heads), torch.randn(2, 6, 32)
    rows = segment_mask(torch.tensor([[0] * 6, [-1] * 2 + [0] * 4]))
    heads = alibi_bias(alibi_slopes(4), 6, 6, torch.float32, CPU)

    @torch.no_grad()
    def outputs(mask):
        cache, parts = KVCache(6), [layer(x, mask=mask)]
        for first, last in ((0, 4), (4, 5), (5, 6)):
            part = None if mask is None else mask[..., first:last, :last]
            parts.append(layer(x[:, first:last], mask=part, cache=cache))
            cache.advance(last - first)
        return torch.cat(parts, dim=1)

    masks = None, rows, heads, heads.masked_fill(~rows, -torch.inf)
    expected = list(map(outputs, masks))
    monkeypatch.setattr(attend, "takes_groups", lambda *_: False)
    for mask, given in zip(masks, expected, strict=True):
        torch.testing.assert_close(given[:, :6], given[:, 6:])
        torch.testing.assert_close(outputs(mask), given)


def test_the_bias_is_kept_for_the_next_micro_batch_and_nowhere_else():
    model, (ids, targets) = megazoo.from_config(MODELS["mpt"], context()), make_batch(0)
    reference = copy.deepcopy(model)
    model.generate(ids[:, :15], max_new_tokens=1)  # in inference mode, up to 15 keys
    first = model.alibi(15, 15, torch.float32, CPU)
    assert not first.is_inference()
    assert model.alibi(15, 15, torch.float32, CPU) is first
    assert model.alibi(15, 15, torch.bfloat16, CPU).dtype == torch.bfloat16
    loss = model.train_batch(ids[:, :15], targets=targets[:, :15])
    assert torch.equal(loss, reference.train_batch(ids[:, :15], targets=targets[:, :15]))
    assert not any("alibi" in name for name in model.state_dict())
    assert len(model.alibi._kept) == 1
    for other in (copy.deepcopy(model).alibi, pickle.loads(pickle.dumps(model.alibi))):
        assert not other._kept
        assert torch.equal(other(4, 4, torch.float32, CPU), model.alibi(4, 4, torch.float32, CPU))


def test_bias_is_the_formula_with_a_mask_and_without():
    slopes, segments = alibi_slopes(4), torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, -1, -1]])
    mask = segment_mask(segments)
    for given in (None, mask):
        made = alibi_bias(slopes, 5, 5, torch.float32, CPU, given)
        assert made.shape == ((4, 5, 5) if given is None else (2, 4, 5, 5))
        made = made.view(-1, 4, 5, 5)
        for row, head, q, k in torch.cartesian_prod(*map(torch.arange, made.shape)).tolist():
            seen = k <= q if given is None else bool(mask[row, 0, q, k])
            expected = slopes[head].item() * (k - q) if seen else -torch.inf
            assert made[row, head, q, k] == expected
