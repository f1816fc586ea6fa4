"""Adapters train alike in every layout, and leave the weights beside them as they were; beside what
else users do: low precision, models of their own, generating, copying, freezing later."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES
from megazoo.layers import ColumnParallelLinear, RowParallelLinear
from megazoo.lora.settings import is_adapter
from megazoo.parallel import failure
from megazoo.parallel.module import initialize
from megazoo.parallel.random import derive_seed
from megazoo.testing import Layout
from tests.support.layouts import LAYOUTS, in_layout
from tests.support.lora import assert_alike, one_process, train
from tests.support.sampling import marked_slow, pairs_covered
from tests.support.training import MODELS, context, make_batch, randomize, tiny_config

HOW = {
    "plain": {},
    "offload": {"offload": True},
    "selective": {"recompute": ("selective",)},
    "full": {"recompute": ("full", 1)},
    "interval": {"recompute": ("full", 2)},
    "own loop": {"by": "own loop"},
    "microbatches": {"by": "microbatches"},
    "norms, too": {"trained": "lora|norm"},
    "dropout": {"dropout": 0.2},
    "dropout, recomputed": {"dropout": 0.2, "recompute": ("full", 2)},
    "dropout, selective": {"dropout": 0.2, "recompute": ("selective",)},
}


# The last has a head that weighs more than all layers, so that the last stage has none of these.
CONFIGS = {
    "llama": MODELS["llama"],
    "gpt2": tiny_config(tied=False),
    "gpt2, tied": MODELS["gpt2"],
    "mpt": MODELS["mpt"],
    "heavy head": tiny_config(tied=False, vocab_size=1000),
}
TARGETS = {
    "all": "all-linear",
    "q and v": ("q", "v"),
    "first layer": ("layers.0.attention.q", "layers.0.mlp.down"),
    "third layer": ("layers.2.attention.v", "layers.2.attention.output"),
    "last layer": ("layers.4.attention.v", "layers.4.mlp.down"),
}


def possible(config, targets, layout, how):
    """Whether there is such a case, and it should be as in one process.

    Replicas and context-parallel ranks drop other elements; so do tp ranks of what is cut over
    them, the input of row-parallel layers.
    """
    place = Layout.named(layout)
    if how == "own loop" and place.pp * place.dp > 1:  # its loss is a replica's
        return False
    if how.startswith("dropout"):
        alike = place.tp == 1 or targets == "q and v"
        return place.dp * place.cp == 1 and alike
    return True


CASES = pairs_covered(list(CONFIGS), list(TARGETS), LAYOUTS, list(HOW), possible=possible)
FAST = [  # each way to cut adapters, each family, each way to train
    ("llama", "all", "tp2pp2+sp", "plain"),
    ("llama", "all", "tp4", "norms, too"),
    ("mpt", "all", "tp2cp2+sp+ulysses", "plain"),
    ("gpt2, tied", "all", "pp2dp2+zero2", "plain"),
    ("llama", "q and v", "dp2+zero3", "plain"),
    ("gpt2", "third layer", "pp2+zb-h1", "interval"),
    ("heavy head", "all", "pp2+zb-h1", "plain"),
    ("mpt", "q and v", "tp2", "dropout, recomputed"),
    ("llama", "last layer", "pp2v2", "dropout, selective"),
    ("gpt2", "q and v", "cp2", "own loop"),
    ("llama", "first layer", "dp2", "offload"),
]
MORE = [("mpt", "all", "cp4+ulysses", "full"), ("mpt", "all", "pp2v2+zb-v", "plain")]


@pytest.mark.parametrize(
    ("config", "targets", "layout", "how"),
    marked_slow(
        [*FAST, *MORE, *(case for case in CASES if case not in FAST + MORE)],
        lambda number, _: number >= len(FAST),
        name="-".join,
    ),
)
def test_adapters_train_as_in_one_process(ranks, request, config, targets, layout, how):
    """Two steps in `make test`, else ten: each pair of settings, and all layouts."""
    steps = 10 if request.node.get_closest_marker("slow") else 2
    place, what = Layout.named(layout), TARGETS[targets]
    of_all = {key: HOW[how][key] for key in ("by", "trained", "dropout") if key in HOW[how]}
    expected = one_process(CONFIGS[config], targets=what, steps=steps, **of_all)
    settings = {"schedule": place.schedule, "zero": place.zero, **HOW[how]}
    found = in_layout(ranks, train, layout, CONFIGS[config], targets=what, steps=steps, **settings)
    assert_alike(found, expected)


def with_adapters(config, ctx=None, scale=0.3, **how):
    """A model whose adapters do something."""
    model = randomize(megazoo.from_config(config, ctx or context(), seed=3))
    megazoo.lora.add(model, **{"rank": 3, "targets": "all-linear", **how})
    for entry in model.trained_entries():
        spec = replace(entry.spec, std=scale, bound=0.0)
        initialize(entry.parameter, spec, model.ctx, derive_seed(1, entry.name))
    return model


def in_low_precision(dtype, layout):
    """Losses of some steps, and whether adapters and their state are of the right dtypes."""
    ctx, losses = context(**layout), []
    model = megazoo.from_config(replace(MODELS["llama"], layers=2), ctx, seed=3, dtype=dtype)
    megazoo.lora.add(model, rank=3, targets="all-linear")
    optimizer = megazoo.optim.AdamW(model, lr=1e-2)
    ids, _ = make_batch(0)
    for step in range(8):
        loss = model.train_batch(ids, labels=ids, num_microbatches=2, step=step)
        losses.append(loss.item())
        optimizer.step()
    for entry in model.trained_entries():
        assert is_adapter(entry.name)
        assert (entry.parameter.dtype, entry.parameter.grad.dtype) == (dtype, torch.float32)
        state = optimizer.state[entry.name]
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        assert torch.equal(state["master"].view_as(entry.parameter).to(dtype), entry.parameter)
    return losses, None if model.engine.loss_scale is None else model.engine.loss_scale.value


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_low_precision_has_fp32_masters(ranks, dtype):
    expected, scale = in_low_precision(dtype, {})
    assert expected[-1] < expected[0] - 0.1
    assert (scale is not None) == (dtype == torch.float16)
    for layout in ("tp2+sp", "pp2"):
        for losses, its in in_layout(ranks, in_low_precision, layout, dtype):
            assert its == scale
            torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


def initial(layout):
    ctx, found = context(**layout), {}
    model = megazoo.lora.add(
        megazoo.from_config(replace(MODELS["llama"], layers=2), ctx, seed=3),
        rank=64,
        targets="all-linear",
    )
    for entry in model.trained_entries():
        for piece in entry.spec.pieces(ctx.place):
            found[entry.name, piece.box] = entry.parameter.detach()[piece.index()]
    return found


def test_initial_values_are_even_and_the_same_in_every_layout(ranks):
    whole = {name: value for (name, _), value in initial({}).items()}
    for name, value in whole.items():
        if name.endswith("B"):
            assert not value.any()
            continue
        bound = value.shape[1] ** -0.5
        assert 0.98 * bound < value.abs().max() <= bound
        assert abs(value.std() * 3**0.5 / bound - 1) < 0.05  # of an even distribution
        assert value.mean().abs() < 0.05 * bound
    for layout in ("tp4", "tp2pp2+sp"):
        parts = in_layout(ranks, initial, layout)
        assert {name for found in parts for name, _ in found} == set(whole)
        for found in parts:
            for (name, box), part in found.items():
                assert torch.equal(part, whole[name][tuple(slice(*ends) for ends in box)])


def generated(layout, config=MODELS["llama"]):
    model = with_adapters(config, context(**layout), scale=1.0)
    ids = make_batch(0)[0][:2, :5]
    return model.generate(ids, max_new_tokens=6)


@pytest.mark.parametrize(
    "layout", marked_slow(["tp2+sp", "cp2", "pp2", "tp4"], lambda number, _: number > 0)
)
def test_generation_runs_the_adapters(ranks, layout):
    expected = generated({})
    plain = randomize(megazoo.from_config(MODELS["llama"], seed=3))
    assert not torch.equal(expected, plain.generate(make_batch(0)[0][:2, :5], max_new_tokens=6))
    for ids in in_layout(ranks, generated, layout):
        assert torch.equal(ids, expected)


@pytest.fixture
def qwen():
    """A family that is known for this test only."""
    from tests.support.own_family import Qwen

    megazoo.register("qwen")(Qwen)
    yield Qwen.presets["qwen-tiny"]
    del FAMILIES["qwen"]


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_registered_family_of_ones_own(ranks, layout, qwen):
    expected = one_process(qwen, steps=2, targets=("q", "v", "down"))
    found = in_layout(ranks, train, layout, qwen, steps=2, targets=("q", "v", "down"))
    assert_alike(found, expected)


class Own(torch.nn.Module):
    """No model of megazoo's: gathered outputs, whole inputs, and fused parts without names."""

    def __init__(self, ctx):
        super().__init__()
        self.fused = ColumnParallelLinear(12, (8, 8), ctx=ctx)
        self.gathered = ColumnParallelLinear(12, 10, gather_output=True, ctx=ctx)
        self.whole = RowParallelLinear(10, 6, input_is_parallel=False, ctx=ctx)
        self.down = RowParallelLinear(8, 6, ctx=ctx)

    def forward(self, x):
        one, other = self.fused(x).chunk(2, dim=-1)
        return self.down(one * other) + self.whole(self.gathered(x).tanh())


def own_module(layout):
    """Outputs, and gradients of the adapters by their boxes."""
    ctx = context(**layout)
    torch.manual_seed(5)
    model = megazoo.lora.add(Own(ctx), rank=3, targets="all-linear")
    found = {}
    for name, layer in model.named_children():
        for part, adapter in layer.lora.items():
            spec = replace(adapter.specs["B"], std=0.3)
            initialize(adapter.B, spec, ctx, derive_seed(1, name))
            found |= {(name, part, factor): adapter for factor in "AB"}
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    y = model(x)
    y.square().sum().backward()
    assert all(p.grad is None for n, p in model.named_parameters() if ".lora." not in n)
    gradients = {}
    for (*name, factor), adapter in found.items():
        for piece in adapter.specs[factor].pieces(ctx.place):
            part = getattr(adapter, factor).grad[piece.index()]
            gradients[*name, factor, piece.box] = part
    return y.detach(), gradients


def test_a_module_of_ones_own(ranks):
    """Its backward sums what is partial by itself: no model does it after the last."""
    y, whole = own_module({})
    whole = {name: torch.cat([g for n, g in whole.items() if n[:3] == name]) for name in
             {n[:3] for n in whole}}  # fmt: skip
    for ours, gradients in ranks(own_module, 2, dict(tp=2)):
        torch.testing.assert_close(ours, y, atol=1e-5, rtol=1e-5)
        for (*name, box), gradient in gradients.items():
            expected = whole[tuple(name)][tuple(slice(*ends) for ends in box)]
            torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)


def test_copies_and_states():
    """A copy has adapters of its own, and a state goes from one model to another."""
    model, ids = with_adapters(MODELS["llama"]), make_batch(0)[0]
    twin = copy.deepcopy(model)
    before = model.eval_batch(ids, labels=ids)
    assert torch.equal(twin.eval_batch(ids, labels=ids), before)
    optimizer = megazoo.optim.AdamW(twin, lr=1e-2)
    twin.train_batch(ids, labels=ids)
    optimizer.step()
    assert torch.equal(model.eval_batch(ids, labels=ids), before)
    assert twin.eval_batch(ids, labels=ids) < before
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.eval_batch(ids, labels=ids), before)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    optimizer = megazoo.optim.AdamW(half, lr=1e-2)
    assert abs(half.train_batch(ids, labels=ids) - before) < 0.05
    optimizer.step()
    assert {e.parameter.grad.dtype for e in half.trained_entries()} == {torch.float32}


def test_evaluation_drops_nothing():
    model, ids = with_adapters(MODELS["llama"], dropout=0.5), make_batch(0)[0]
    whole = with_adapters(MODELS["llama"])
    expected = whole.eval_batch(ids, labels=ids)
    assert torch.equal(model.eval_batch(ids, labels=ids), expected)
    assert not torch.equal(model.train_batch(ids, labels=ids), expected)


def test_adapters_of_a_model_that_is_evaluated_drop_nothing():
    logits, ids = [], make_batch(0)[0]
    for rate in (0.0, 0.5):
        model = megazoo.from_config(MODELS["llama"], seed=3).eval()
        megazoo.lora.add(model, rank=3, alpha=6, dropout=rate)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.fill_(0.1)
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_adapters_are_frozen_by_name():
    model = with_adapters(MODELS["llama"]).requires_grad_(True)
    model.freeze("lora")
    assert not any(is_adapter(entry.name) for entry in model.trained_entries())
    model.train_only("lora.*B$")
    assert {entry.name[-1] for entry in model.trained_entries()} == {"B"}


def unfreezes_the_embedding():
    """After a batch in which the last stage alone was trained."""
    model = megazoo.from_config(MODELS["llama, one KV head"], context(pp=2), seed=3)
    megazoo.lora.add(model, rank=3, targets=("layers.4.mlp.down",))
    ids, _ = make_batch(0)
    model.train_batch(ids, labels=ids, num_microbatches=2)
    assert model.engine.first_trained_stage == 1
    if model.has_first:
        model.embedding.requires_grad_(True)
    with pytest.raises(UserError) as told, mock.patch.object(failure, "PATIENCE", 0.3):
        model.train_batch(ids, labels=ids, num_microbatches=2)
    torch.distributed.destroy_process_group()
    return str(told.value)


def test_what_would_get_no_gradient_is_refused(ranks):
    first, last = ranks(unfreezes_the_embedding, 2)
    assert first.startswith("a parameter before the first trained one was unfrozen after training")
    assert last == f"rank 0 failed: {first}"


def unfreezes_and_agrees():
    model = megazoo.from_config(MODELS["llama, one KV head"], context(pp=2), seed=3)
    megazoo.lora.add(model, rank=3, targets=("layers.4.mlp.down",))
    ids, _ = make_batch(0)
    model.train_batch(ids, labels=ids, num_microbatches=2)
    if model.has_first:
        model.embedding.requires_grad_(True)
    model.engine.agree_on_frozen()
    model.train_batch(ids, labels=ids, num_microbatches=2)
    return not model.has_first or bool(model.embedding.weight.grad.any())


def test_ranks_that_agree_train_it(ranks):
    assert ranks(unfreezes_and_agrees, 2) == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["tp2+sp", "pp2"])
def test_compiled_layers_run_their_adapters(ranks, layout):
    expected = one_process(MODELS["llama"], steps=3)
    found = in_layout(ranks, train, layout, MODELS["llama"], steps=3, compiled=True, timeout=500)
    assert_alike(found, expected, tolerance=1e-4)


class Named(torch.nn.Module):
    """Layers of any names."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            setattr(self, name, ColumnParallelLinear(8, 8))


def test_layers_have_any_name(tmp_path):
    """Those of a ModuleDict's own attributes, too."""
    names = ("keys", "values", "items", "sizes", "up")
    model = megazoo.lora.add(Named(*names), rank=2, targets=names)
    for name in names:
        torch.nn.init.normal_(getattr(model, name).lora[name].B)
    megazoo.lora.save(model, tmp_path / "out")
    again = Named(*names)
    again.load_state_dict(model.state_dict(), strict=False)
    again, x = megazoo.lora.load(again, tmp_path / "out"), torch.randn(3, 8)
    for name in names:
        expected = getattr(model, name)(x)
        assert torch.equal(getattr(again, name)(x), expected)
        assert torch.equal(getattr(copy.deepcopy(again), name)(x), expected)


def test_a_model_without_layers_to_adapt():
    for model in (ColumnParallelLinear, torch.nn.Linear):
        with pytest.raises(UserError, match="the model has no layers to adapt"):
            megazoo.lora.add(model(8, 8), targets="all-linear")


def test_a_layer_called_score_is_no_classifiers_head():
    """Its weight would be trained, and saved by nobody."""
    model = megazoo.lora.add(Named("score", "up"), targets="up")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "up.lora.up.A", "up.lora.up.B"
    }  # fmt: skip


def saves_what_the_last_stage_trains_beside(where):
    model = megazoo.lora.add(megazoo.from_config(MODELS["llama"], context(pp=2), seed=3))
    model.train_only("lora|^norm")
    with pytest.raises(UserError) as told:
        megazoo.lora.save(model, where)
    return str(told.value)


def test_what_is_trained_beside_is_not_lost(ranks, tmp_path):
    """PEFT's files would leave it out, and compute something else."""
    for told in ranks(saves_what_the_last_stage_trains_beside, 2, tmp_path / "out"):
        assert told.startswith("norm.weight: trained in addition to the adapters, but not saved")
    assert not (tmp_path / "out").exists()
