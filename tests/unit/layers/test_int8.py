"""Linear layers whose weights are rounded to 8 bits: what they compute, in every layout."""

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo.errors import UserError
from megazoo.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    int8,
    round_to_float8,
    round_to_int8,
)
from megazoo.layers.int8 import int8_linear, rounded_to_int8
from megazoo.layers.product import PLAIN, Product
from megazoo.programs import evaluate, generate
from tests.support.inference import PROMPT, run_main, write_model
from tests.support.sampling import marked_slow
from tests.support.training import MODELS, context, layout_name, randomize, run_in_layout


def test_a_row_is_whole_numbers_and_a_scale():
    weight = torch.tensor([[127.0, -64.0, 0.4], [0.5, 0.0, -0.25], [0.0, 0.0, 0.0]])
    numbers, scale = rounded_to_int8(weight)
    assert numbers.dtype == torch.int8
    assert numbers[0].tolist() == [127, -64, 0]
    assert scale[0] == 1
    # 0.5 / 127 has more digits than bfloat16: the nearest of its numbers is 0.00393677
    assert scale[1].item() == pytest.approx(0.0039367676, rel=1e-6)
    assert numbers[1].tolist() == [127, 0, -64]
    assert numbers[2].tolist() == [0, 0, 0]
    assert scale[2] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_of_the_rounded_weight(dtype):
    torch.manual_seed(0)
    counts = [1, int8.FEW_ROWS, int8.FEW_ROWS + 1, 200]
    for rows, (outputs, inputs) in product(counts, [(48, 32), (33, 17)]):
        numbers, scale = rounded_to_int8(torch.randn(outputs, inputs))
        x, bias = torch.randn(2, rows, inputs).to(dtype)[:1], torch.randn(outputs).to(dtype)
        y = int8_linear(x, numbers, scale, bias)
        expected = F.linear(x.double(), numbers.double() * scale.double()[:, None], bias.double())
        by_kernel = rows <= int8.FEW_ROWS and outputs % 16 == 0
        exact = dtype == torch.float32 and not by_kernel
        tolerance = 1e-5 if exact else 2**-6
        assert y.dtype == dtype
        assert y.shape == (1, rows, outputs)
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=4 * tolerance)


def test_float16_does_not_overflow():
    numbers, scale = torch.full((16, 4096), 127, dtype=torch.int8), torch.full((16,), 2**-7)
    y = int8_linear(torch.ones(17, 4096).half(), numbers, scale, None)
    assert torch.equal(y, torch.full((17, 16), 4064.0).half())


def test_no_rows_give_none():
    numbers, scale = rounded_to_int8(torch.randn(32, 16))
    assert int8_linear(torch.randn(0, 3, 16), numbers, scale, None).shape == (0, 3, 32)


def logits_of(config, layout, rounded="layers"):
    """The logits of many rows, which no kernel rounds to bfloat16; rounded: "layers" (to int8) or
    "by hand", the same by other means; "float8" or "float8 by hand"; or None."""
    model = randomize(megazoo.from_config(config, context(**layout), seed=3)).eval()
    matrices = [
        module.weight.data
        for module in model.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    for matrix in matrices:
        matrix *= 10  # so that layers matter
    if rounded == "layers":
        round_to_int8(model)
    elif rounded == "float8":
        round_to_float8(model)
    elif rounded == "float8 by hand":
        for matrix in matrices:
            scale = matrix.abs().amax(1, keepdim=True) / 448
            matrix.copy_((matrix / scale).to(torch.float8_e4m3fn).float() * scale)
    elif rounded == "by hand":
        for matrix in matrices:
            scale = (matrix.abs().amax(1, keepdim=True) / 127).bfloat16().float()
            matrix.copy_((matrix / scale).round() * scale)
    ids = torch.arange(4 * 16).reshape(4, 16) % config.vocab_size
    with torch.no_grad():
        return model(ids).logits


def test_a_model_computes_with_the_rounded_weights():
    for config, whole in product(MODELS.values(), (True, False)):
        ways = ("layers", "by hand", None) if whole else ("float8", "float8 by hand", None)
        rounded, by_hand, plain = (logits_of(config, {}, how) for how in ways)
        torch.testing.assert_close(rounded, by_hand, rtol=1e-5, atol=1e-5)
        assert 1e-3 < (rounded - plain).norm() / plain.norm() < (0.1 if whole else 0.3)


LAYOUTS = [dict(tp=2, sp=True), dict(tp=4), dict(tp=2, pp=2), dict(tp=2), dict(pp=2)]
COMPARED = ["gpt2", "llama, one KV head", "mpt"]


def logits_of_all(layout):
    return [logits_of(MODELS[name], layout, to) for name in COMPARED for to in ("layers", "float8")]


@pytest.mark.parametrize("layout", marked_slow(LAYOUTS, lambda n, _: n > 2, name=layout_name))
def test_every_layout_computes_the_same(ranks, layout):
    found = zip(*run_in_layout(ranks, logits_of_all, layout), strict=True)
    for logits, alone in zip(found, logits_of_all({}), strict=True):
        logits = [each for each in logits if each is not None]
        assert logits
        for each in logits:
            torch.testing.assert_close(each, alone, rtol=1e-5, atol=1e-5)


def test_what_can_not_be_done_is_refused(tmp_path):
    model = megazoo.from_config(MODELS["llama"])
    megazoo.lora.add(model, rank=2)
    with pytest.raises(UserError, match=r"merge\(model\) first"):
        round_to_int8(model)
    megazoo.lora.merge(model)
    down = model.layers["0"].mlp.down
    down.product = Product()
    with pytest.raises(UserError, match=r"set layer\.product to \S+PLAIN first"):
        round_to_int8(model)
    down.product = PLAIN
    round_to_int8(model)
    kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
    round_to_int8(model)  # once more changes nothing
    assert all(torch.equal(kept[name], p) for name, p in model.named_parameters())
    assert model.dtype == torch.float32
    with pytest.raises(UserError, match="rounded to 8 bits can't be saved"):
        model.save_parallelized(tmp_path / "a")
    with pytest.raises(UserError, match="rounded to 8 bits can't be adapted"):
        megazoo.lora.add(model, rank=2)
    megazoo.from_config(MODELS["llama"]).save_parallelized(tmp_path / "b")
    with pytest.raises(UserError, match="rounded to 8 bits can't be loaded"):
        model.from_parallelized(tmp_path / "b")
    ids = torch.arange(8).view(1, 8)
    for train in (lambda: megazoo.optim.AdamW(model), lambda: model.train_batch(ids, labels=ids)):
        with pytest.raises(UserError, match="rounded to 8 bits can't be trained"):
            train()
    down = model.to(torch.bfloat16).layers["0"].mlp.down
    assert (down.weight.dtype, down.product.scale.dtype) == (torch.int8, torch.float32)


def test_a_state_of_the_other_kind_is_refused():
    """Scales are in no state_dict: torch would copy the numbers without them."""
    whole, rounded = (megazoo.from_config(MODELS["llama"], seed=seed) for seed in (1, 2))
    round_to_int8(rounded)
    before = {name: tensor.clone() for name, tensor in rounded.state_dict().items()}
    for model, state, where in (
        (rounded, whole.state_dict(), "the model"),
        (whole, before, "the given state"),
    ):
        with pytest.raises(UserError, match=f"weight is rounded to 8 bits in {where}: load"):
            model.load_state_dict(state)
    layers = [name for name in before if "layers" in name]
    assert all(torch.equal(rounded.state_dict()[name], before[name]) for name in layers)
    whole.load_state_dict(whole.state_dict())


def test_the_tools_round(tokenizer, tmp_path, monkeypatch, capsys):
    model = write_model(tmp_path, tokenizer) / "hf"
    (tmp_path / "text").write_text(PROMPT * 3)
    losses = []
    for flags in ([], ["--int8"], ["--float8"]):
        arguments = [model, "--text", tmp_path / "text", "--device", "cpu", *flags]
        code, out, _ = run_main(evaluate, monkeypatch, capsys, *arguments)
        assert code == 0
        losses.append(float(re.search(r"loss +([\d.]+)", out)[1]))
    assert len({*losses}) == 3
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[2] == pytest.approx(losses[0], rel=0.05)
    arguments = [model, "--prompt", PROMPT, "--max-new-tokens", 4, "--device", "cpu", "--int8"]
    code, out, _ = run_main(generate, monkeypatch, capsys, *arguments)
    assert code == 0
    assert out.startswith(PROMPT)
