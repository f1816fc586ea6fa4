"""Products of one x by several weights, as layers with adapters make them: equal to the plain
formulas, with one gather, and with nothing kept for weights that are frozen."""

from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megazoo.layers import ColumnParallelLinear, RowParallelLinear, matmul
from megazoo.lora import add
from megazoo.parallel import collectives
from megazoo.parallel.cpu import products
from megazoo.parallel.deferred import WeightQueue
from tests.support.numbers import DTYPES, assert_equal, numbers, results
from tests.support.training import context

SHAPES = [(2, 7, 24), (16, 24), (3, 24), (5, 24), (16,)]  # x, three weights, the first's bias


def inputs_of(dtype, tokens=7):
    shapes = [(2, tokens, 24), *SHAPES[1:]]
    return [numbers(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def plain(x, first, second, third, bias, recompute=None):
    x = recompute(x) if recompute else x
    return F.linear(x, first, bias), F.linear(x, second), F.linear(x, third)


@pytest.mark.parametrize("frozen", [(), (0,), (0, 1, 2)], ids=str)
def test_several_products_of_one_input(frozen):
    for case in product(DTYPES, [None, torch.tanh], [False, True]):
        check_products(*case, frozen)


def check_products(dtype, recompute, deferred, frozen):
    queue, weights = WeightQueue(lambda weight: None) if deferred else None, []

    def freeze(*given):
        return [w.detach() if n in frozen else w for n, w in enumerate(given)]

    def ours(x, *given):
        *given, bias = given
        for weight in given:
            weight.grad_dtype = None  # as parameters of a model have it: gradients are fp32
        weights[:] = given
        return matmul.multiply(x, freeze(*given), bias, recompute=recompute, queue=queue)

    def theirs(x, *given):
        *given, bias = given
        return plain(x, *freeze(*given), bias, recompute)

    values, gradients = results(ours, *inputs_of(dtype))
    expected, wanted = results(theirs, *inputs_of(dtype))
    if deferred:
        assert gradients[1:4] == [None] * 3
        queue.take()()
        gradients[1:4] = [None if w.grad is None else w.grad.to(dtype) for w in weights]
    assert [g is None for g in gradients] == [g is None for g in wanted]
    assert [g is None for g in gradients[1:4]] == [number in frozen for number in range(3)]
    there = [[g for g in each if g is not None] for each in (gradients, wanted)]
    assert_equal((values, there[0]), (expected, there[1]), exact_values=True)


def test_products_of_bfloat16_widened_on_cpus(monkeypatch):
    monkeypatch.setattr(products, "methods", lambda: products.Methods(True, False))
    inputs = inputs_of(torch.bfloat16, tokens=64)
    exact = results(plain, *(x.float() for x in inputs))
    ours = results(lambda x, *w: matmul.multiply(x, w[:3], w[3]), *inputs)
    rounded = [y.bfloat16() for y in exact[0]], [x.bfloat16() for x in exact[1]]
    assert_equal(ours, rounded)


def counted(function):
    """What a function's collectives were, in their order."""
    done, run = [], collectives._run

    def noted(operation, *args, **kwargs):
        done.append(operation.__name__.removeprefix("_"))
        return run(operation, *args, **kwargs)

    no_memory = mock.patch.object(collectives, "_reducer_for", return_value=None)
    with no_memory, mock.patch.object(collectives, "_run", noted):
        function()
    return done


def entered_by_all(sp, hides):
    """Results of products that enter tensor parallelism by the twin and plainly, and the
    collectives of forward and backward."""
    ctx, found = context(tp=2, sp=sp), []
    x, first, second, third, bias = inputs_of(torch.float32, tokens=6)
    x = x.chunk(2, dim=1)[ctx.tp_rank] if sp else x
    with mock.patch("megazoo.layers.matmul.hides_communication", return_value=hides):
        for frozen in ((), (0,), (0, 1, 2)):

            def run(x, *weights, frozen=frozen):
                weights = [w.detach() if n in frozen else w for n, w in enumerate(weights)]
                return matmul.multiply(x, weights[:3], weights[3], entering=ctx)

            inputs = x, first, second, third, bias
            done = counted(lambda run=run, inputs=inputs: found.append(results(run, *inputs)))
            found[-1] = (*found[-1], done)
    return found


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "cut"])
def test_products_enter_together(ranks, sp):
    """By one gather in forward, and in backward by one more only if a weight is trained."""
    twins, plain_ones = (ranks(entered_by_all, 2, sp, hides) for hides in (True, False))
    for twin, plain_one in zip(twins, plain_ones, strict=True):
        for number, (ours, expected) in enumerate(zip(twin, plain_one, strict=True)):
            for mine, its in zip([*ours[0], *ours[1]], [*expected[0], *expected[1]], strict=True):
                assert (mine is None) == (its is None)
                if mine is not None:
                    torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-5)
            gathers = [2, 2, 1][number] if sp else 0
            for _, _, done in (ours, expected):
                assert sum("gather" in each for each in done) == gathers, done
                assert len(done) == gathers + 1, done


def kept(function, *inputs):
    """Shapes of the tensors that backward will have, but the parameters."""
    shapes, module = [], getattr(function, "func", function)
    parameters = {parameter.data_ptr() for parameter in module.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in parameters:
            shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = function(*inputs)
    assert y.requires_grad
    return shapes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_frozen_weights_need_no_input(layer, dtype, monkeypatch):
    """In bfloat16 as it is widened on CPUs, too."""
    monkeypatch.setattr(products, "methods", lambda: products.Methods(True, False))
    module, x = layer(24, 16).to(dtype), numbers(2, 64, 24, dtype=dtype).requires_grad_() * 1
    assert x.shape in kept(module, x) or (128, 24) in kept(module, x)
    module.weight.requires_grad_(False)
    assert not {(2, 64, 24), (128, 24)} & set(kept(module, x))


def kept_by_layers():
    """What backward will have of a column and a row layer with adapters, under sequence
    parallelism and with a recomputed input."""
    ctx = context(tp=2, sp=True)
    column = ColumnParallelLinear(24, (8, 8, 8), part_names=("q", "k", "v"), ctx=ctx)
    row = RowParallelLinear(24, 16, ctx=ctx)
    add(torch.nn.ModuleDict({"qkv": column, "down": row}), rank=2, targets="all-linear")
    x = numbers(2, 3, 24).requires_grad_() * 1
    inner = numbers(2, 6, 12).requires_grad_() * 1
    return kept(column, x), kept(partial(row, recompute=torch.tanh), inner)


def test_layers_with_adapters_keep_their_inputs_alone(ranks):
    for of_column, of_row in ranks(kept_by_layers, 2):
        # beside x, what is between the factors
        assert sorted(of_column) == [(2, 3, 24), (12, 2)]
        assert sorted(of_row) == [(2, 6, 12), (12, 2)]


def collectives_of_layers():
    ctx = context(tp=2, sp=True)
    column = ColumnParallelLinear(24, (8, 8, 8), part_names=("q", "k", "v"), ctx=ctx)
    row = RowParallelLinear(12, 16, ctx=ctx)
    both = torch.nn.Sequential(column, torch.nn.Tanh(), torch.nn.Linear(12, 6), row)
    column.sums_later = row.sums_later = True
    found = []
    for rank in (0, 2):
        if rank:
            add(both, rank=2, targets="all-linear")
            for module in both.modules():
                module.sums_later = True
        else:
            both.requires_grad_(True)
        x = numbers(2, 3, 24).requires_grad_()
        found.append(counted(lambda x=x: both(x).sum().backward()))
    return found


def test_adapters_add_no_collective(ranks):
    for without, with_adapters in ranks(collectives_of_layers, 2):
        assert with_adapters == without
        # in forward a gather and a scatter; in backward those of their pairs, and x once more
        assert len(without) == 5


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_adds_what_its_adapter_says(layer):
    """The formula by itself: an adapter that nobody runs would train alike in every layout."""
    module, x = layer(24, 16), numbers(2, 7, 24)
    add(torch.nn.ModuleDict({"layer": module}), rank=3, alpha=6, targets=("layer",))
    adapter = module.lora["layer"]
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))
    with torch.no_grad():
        adapter.B.copy_(numbers(16, 3, seed=1))
    change = 2 * adapter.B @ adapter.A
    expected = F.linear(x, module.weight + change, module.bias)
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(adapter.change(), change)
    module(x).square().sum().backward()
    assert adapter.A.grad.abs().max() > 0
    assert module.weight.grad is None
