"""Float8: its products are torchao's, and a layout changes no more than the order of sums does."""

import copy
import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import megazoo
from megazoo.data.corpus import standard_library
from megazoo.errors import UserError
from megazoo.evaluation.scoring import score
from megazoo.layers import ColumnParallelLinear, RowParallelLinear
from megazoo.layers.experts import ColumnParallelExperts, RowParallelExperts, StackedLinear
from megazoo.layers.float8 import Float8Product, multiply_in_float8
from megazoo.layers.product import PLAIN
from megazoo.models.llama import LlamaConfig
from megazoo.models.mixtral import MixtralConfig
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.layout import Layout
from megazoo.parallel.shard import ParameterSpec
from tests.support.layouts import MODELS, sizes_of
from tests.support.sampling import marked_slow
from tests.support.training import TINY, context, make_batch, replica_rows, run_in_layout

# torchao 0.18: Float8Linear of each recipe, on a CPU with emulate=True
TORCHAO = Path(__file__).parents[1] / "oracles" / "float8_of_torchao.safetensors"
RECIPES = ["tensorwise", "rowwise"]
LLAMA = replace(MODELS["llama"], layers=2, tie_embeddings=False)
MIXTRAL = MixtralConfig(
    **{**TINY, "layers": 2}, kv_heads=2, ffn_size=48, experts=4, experts_per_token=2
)


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_torchao(recipe):
    with safe_open(TORCHAO, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    x, weight, grad = (stored[name] for name in ("x", "weight", "grad"))

    def products(product):
        ready = product.gradient(grad)
        yield "output", product.output(x, weight)
        yield "input_gradient", product.input_gradient(ready, weight)
        yield "weight_gradient", product.weight_gradient(ready, x)

    plain = dict(products(PLAIN))
    product = Float8Product(recipe, context(), ParameterSpec(tuple(weight.shape)))
    for name, found in products(product):
        expected = stored[f"{recipe}.{name}"]
        assert relative(found, expected) < 1e-6 < 0.02 < relative(plain[name], expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_matrix_of_a_stack_is_multiplied_as_one_alone(recipe):
    """One of them gets no rows."""
    generator = torch.Generator().manual_seed(0)
    weight, x, grad = (
        torch.randn(shape, generator=generator) * 10 ** torch.arange(-2.0, 3)[: shape[0], *rest]
        for shape, rest in (((3, 8, 16), (None, None)), ((5, 16), (None,)), ((5, 8), (None,)))
    )
    counts, parts = torch.tensor([2, 0, 3]), [slice(0, 2), slice(2, 2), slice(2, 5)]
    stack, alone = (
        Float8Product(recipe, context(), ParameterSpec(shape)) for shape in ((3, 8, 16), (8, 16))
    )
    of_weight = stack.weight_gradient(grad, x, counts)
    for number, rows in enumerate(parts):
        ready = alone.gradient(grad[rows])
        for found, expected in (
            (stack.output(x, weight, counts=counts)[rows], alone.output(x[rows], weight[number])),
            (
                stack.input_gradient(stack.gradient(grad), weight, counts)[rows],
                alone.input_gradient(ready, weight[number]),
            ),
            (of_weight[number], alone.weight_gradient(ready, x[rows])),
        ):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().sum())


def integers(*shape, seed, largest):
    """Random integers up to 6. largest: one of each matrix of a stack, and of each group of rows.
    With 7 the scale is a power of two, so that float8 changes none."""
    values = torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed)).float()
    if largest:
        values[..., 0, seed] = values[..., 5, seed] = largest
    return values


def results_of(make, product_of, layout, delayed, largest):
    """The output of a layer of 16 inputs and 8 outputs, and the gradients of x and its weight."""
    ctx = context(**layout)
    layer = make(ctx)
    product_of(layer)
    # of what the ranks share, one has the largest value
    of_tp, of_cp = largest * (ctx.tp_rank == 0), largest * (ctx.cp_rank == 0)
    is_column = isinstance(layer, (ColumnParallelLinear, ColumnParallelExperts))
    of_x, of_grad = (of_cp, of_cp and of_tp) if is_column else (of_cp and of_tp, of_cp)
    layer.weight.data = integers(*layer.weight.shape, seed=1, largest=of_tp)
    queue = layer.weight_queue = WeightQueue(lambda _: None) if delayed else None
    x = integers(12, layer.weight.shape[-1], seed=2, largest=of_x).requires_grad_()
    counts = torch.tensor([5, 7, *[0] * (len(layer.weight) - 2)])  # rows of each expert
    y = layer(x, counts) if layer.weight.dim() == 3 else layer(x)
    y.backward(integers(*y.shape, seed=3, largest=of_grad))
    if queue:
        queue.take()()
    return [y.detach(), x.grad, layer.weight.grad]


LAYERS = {
    "column": lambda ctx: ColumnParallelLinear(16, 16, bias=False, ctx=ctx),
    "row": lambda ctx: RowParallelLinear(16, 16, bias=False, ctx=ctx),
    "column of experts": lambda ctx: ColumnParallelExperts(4, 16, 16, ctx=ctx),
    "row of experts": lambda ctx: RowParallelExperts(4, 16, 16, ctx=ctx),
}


def differences(layout, recipe, delayed, largest):
    found = []
    for make in LAYERS.values():
        rounded = results_of(
            make, lambda layer: multiply_in_float8(layer, recipe), layout, delayed, largest
        )
        plain = results_of(make, lambda _: PLAIN, layout, delayed, largest)
        found += [(a - b).abs().max().item() for a, b in zip(rounded, plain, strict=True)]
    return found


SHARDED = list(itertools.product(RECIPES, ["tp2", "tp2+sp", "cp2", "dp2ep2"], [False, True]))


@pytest.mark.parametrize(
    ("recipe", "layout", "delayed"), marked_slow(SHARDED, lambda number, _: number % 3)
)
def test_float8_changes_no_product_of_values_that_it_has(ranks, recipe, layout, delayed):
    """17 has five bits; with it as the largest value of a factor, others change, too."""
    layout = Layout.named(layout)
    found = ranks(differences, layout.ranks, sizes_of(layout), recipe, delayed, 7)
    assert max(map(max, found)) < 1e-6
    found = ranks(differences, layout.ranks, sizes_of(layout), recipe, delayed, 17)
    assert min(map(max, zip(*found, strict=True))) > 1e-3, "every product is computed in float8"


def losses(config, count, recipe, kinds, adapted, unreduced, schedule, layout):
    """Train three steps. count: micro-batches. recipe: None without float8. kinds: of layers in
    float8. adapted: whether with adapters on the layers. unreduced: of "inputs", "outputs" and
    "rows", the dimensions whose largest values are not reduced over the ranks: a bug."""
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, seed=3)
    for layer in filter(lambda layer: recipe and isinstance(layer, kinds), model.modules()):
        multiply_in_float8(layer, recipe)
        layer.product.__class__ = type("Wrong", (Float8Product,), dict.fromkeys(unreduced, ()))
    if adapted:
        megazoo.lora.add(model, rank=4)
    optimizer, found = megazoo.optim.AdamW(model, lr=1e-2), []
    for step in range(3):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        how = {"num_microbatches": count, "schedule": schedule}
        found.append(model.train_batch(ids, targets=targets, **how).item())
        optimizer.step()
    return found


def distance(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


LINEAR = (ColumnParallelLinear, RowParallelLinear)


@cache
def in_one_process(config, count, recipe, kinds, adapted):
    return losses(config, count, recipe, kinds, adapted, (), "1f1b", {})


SHARED = {
    "tp2": ("inputs", "outputs"),
    "tp2+sp": ("inputs", "outputs"),
    "cp2": ("rows",),
    "pp2v2+zb-v": (),
    "dp2+zero3": (),
    "dp2ep2": (),
}


TRAINED = list(itertools.product(RECIPES, SHARED, [False, True]))


@pytest.mark.parametrize(
    ("recipe", "layout", "adapted"), marked_slow(TRAINED, lambda number, _: number % 5)
)
def test_the_losses_in_float8_are_those_of_one_process(ranks, recipe, layout, adapted):
    """They differ by at most a tenth of what float8 changes, and by more if the largest value of
    one kind of factor is not reduced. Replicas scale what they multiply: one process takes their
    rows as micro-batches, and experts get those of all."""
    layout, shared = Layout.named(layout), SHARED[layout]
    config = MIXTRAL if layout.ep > 1 else replace(LLAMA, layers=2 * layout.virtual_pp)
    kinds = (StackedLinear,) if layout.ep > 1 else LINEAR
    count = 2 if layout.pp > 1 or layout.zero else 1
    expected = in_one_process(config, count, recipe, kinds, adapted)
    changed = distance(expected[:2], in_one_process(config, count, None, kinds, adapted)[:2])

    def losses_of(unreduced=()):
        here = 1 if layout.dp > 1 else count
        how = (config, here, recipe, kinds, adapted, unreduced, layout.schedule)
        return run_in_layout(ranks, losses, sizes_of(layout), *how)[0]

    # two steps: in the third, one factor that is rounded to the other neighbour shows
    assert distance(losses_of()[:2], expected[:2]) <= changed / 10
    for what in shared if recipe == "tensorwise" else ():  # powers of two hide it
        assert distance(losses_of({what}), expected) > changed / 10, what


def mean_of_the_last_losses(recipe):
    """Train a Llama of 30.9 million parameters in bfloat16 for 200 steps of 8 x 256 bytes: 20 of
    warm-up, then a cosine to a tenth."""
    text = np.frombuffer(b"".join(standard_library()), np.uint8).astype(np.int64)
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, layers=9, heads=8, ffn_size=1536, max_positions=256
    )
    model = megazoo.from_config(config, seed=1, dtype=torch.bfloat16)
    if recipe:
        multiply_in_float8(model, recipe)
    optimizer, found = megazoo.optim.AdamW(model), []
    generator = np.random.default_rng(0)
    for step in range(200):
        starts = generator.integers(len(text) - 257, size=8)
        rows = torch.from_numpy(np.stack([text[start : start + 257] for start in starts]))
        loss = model.train_batch(rows[:, :-1], targets=rows[:, 1:])
        decay = 0.55 + 0.45 * math.cos(math.pi * max(0, step - 20) / 180)
        optimizer.lr = 6e-4 * min(1, (step + 1) / 20) * decay
        optimizer.step()
        found.append(loss.item())
    return sum(found[-20:]) / 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_steps_with_a_scale_per_row_reach_the_loss_of_bfloat16():
    """About 20 minutes on two cores."""
    expected = mean_of_the_last_losses(None)
    assert mean_of_the_last_losses("rowwise") == pytest.approx(expected, rel=0.01)


def scored(layout):
    """Each rank of cp gets other rows, or none."""
    ctx = context(**layout)
    model = megazoo.from_config(LLAMA, ctx, seed=3)
    multiply_in_float8(copy.deepcopy(model))
    multiply_in_float8(model)
    ids = make_batch(0)[0][:1]
    found = score(model, ids, ids).log_likelihood
    return found.tolist(), model.generate(ids[:, :4], max_new_tokens=3).tolist()


def test_cp_ranks_score_and_generate_other_rows(ranks):
    (expected, tokens), *_ = [scored({})]
    for found, found_tokens in ranks(scored, 2, dict(cp=2)):
        assert found == pytest.approx(expected, rel=1e-5)
        assert found_tokens == tokens


def test_a_custom_product_is_not_replaced():
    model = megazoo.from_config(LLAMA)
    multiply_in_float8(model)
    with pytest.raises(UserError, match="weights with a custom product can't be multiplied"):
        multiply_in_float8(model, "rowwise")
    with pytest.raises(UserError, match=r"unknown recipe 'rowwise_with_gw_hp' of float8: use"):
        multiply_in_float8(megazoo.from_config(LLAMA), "rowwise_with_gw_hp")
