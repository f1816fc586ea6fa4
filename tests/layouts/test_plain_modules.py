"""Modules of torch's own in a model of a user: the same values, losses and checkpoints in every
layout, or a refusal that names them."""

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES
from megazoo.models.counts import flops_per_token, parameter_count
from tests.support.layouts import in_layout
from tests.support.sampling import marked_slow
from tests.support.training import context, make_batch, replica_rows, worst_relative


@pytest.fixture(scope="module")
def make():
    """Makes its config; the family is known as "plain" for these tests only."""
    from tests.support import plain_family

    FAMILIES["plain"] = plain_family.Plain
    yield plain_family.plain_config
    del FAMILIES["plain"]


def trained(config, saved, dtype, layout):
    """Two steps, a checkpoint, and a third one from it: losses, norms and this rank's weights."""
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, seed=3, dtype=dtype)
    optimizer = megazoo.optim.AdamW(model, lr=1e-2, zero=int(ctx.dp_size > 1))
    history = []
    for step in range(3):
        if step == 2:
            save(saved, 2, model, optimizer)
            model = megazoo.from_config(config, ctx, seed=4, dtype=dtype)
            optimizer = megazoo.optim.AdamW(model, lr=1e-2, zero=int(ctx.dp_size > 1))
            load(Checkpoint(saved), model, optimizer)
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        loss = model.train_batch(ids, targets=targets, num_microbatches=len(ids) // 2)
        history.append((loss.item(), optimizer.step().item()))
    return history


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        ["tp2", "tp2+sp", "pp2", "dp2+zero", "cp2", "tp2pp2+sp", "pp2v2"],
        lambda number, _: number in (0, 3, 4, 6),
    ),
)
def test_a_model_with_plain_modules_trains_as_in_one_process(ranks, make, tmp_path, layout):
    expected = trained(make(), tmp_path / "one", torch.float32, {})
    for history in in_layout(ranks, trained, layout, make(), tmp_path / "many", torch.float32):
        assert worst_relative(history, expected) < 1e-5
    names = Checkpoint(tmp_path / "one").tensors.keys()
    assert names == Checkpoint(tmp_path / "many").tensors.keys()
    assert {"layers.2.gate.weight", "layers.0.scale", "final.weight.exp_avg"} <= names


def test_plain_modules_have_the_dtype_of_the_model(make, tmp_path):
    config = make()
    model = megazoo.from_config(config, seed=3, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.layers["0"].table.dtype == model.layers["0"].shift.dtype == torch.float32
    (first, _), *_ = trained(config, tmp_path / "half", torch.bfloat16, {})
    (exact, _), *_ = trained(config, tmp_path / "whole", torch.float32, {})
    assert abs(first - exact) < 0.01


def test_they_are_drawn_by_their_own_modules_from_the_seed(make):
    weights = [
        megazoo.from_config(make(), seed=seed).layers["1"].gate.weight.detach()
        for seed in (3, 3, 4)
    ]
    assert torch.equal(*weights[:2])
    assert not torch.equal(*weights[1:])
    bound = weights[0].shape[1] ** -0.5  # nn.Linear's
    assert bound / 2 < weights[0].abs().max() <= bound
    model = megazoo.from_config(make(), seed=3)
    assert not torch.equal(weights[0], model.layers["2"].gate.weight)
    assert (model.layers["2"].outer.inner.weight == 2.0).all()  # as its whole says at last
    assert model.layers["2"].undefined.isnan().all()


def test_a_model_on_meta_makes_nothing_else(make, monkeypatch):
    """Not even for a moment; where a module looks at its values, they are made."""
    family, made = FAMILIES["plain"], []
    reset = torch.nn.Linear.reset_parameters

    def watched(self):
        made.append(self.weight.is_meta)
        reset(self)

    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", watched)
    family.on_meta(make(), megazoo.ParallelContext())
    assert made
    assert all(made)
    model = family.on_meta(make("looks"), megazoo.ParallelContext())
    assert not all(made)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_they_are_counted(make):
    model = megazoo.from_config(make())
    assert parameter_count(make()) == sum(p.numel() for p in model.parameters())
    h, layers = 32, 4
    without = parameter_count(make()) - layers * (h * h + 6 * h) - h * h
    flops = flops_per_token(make(), 16)
    vocabulary_and_matrices = 6 * (61 * h + 12 * layers * h * h + (layers + 1) * h * h)
    assert flops == vocabulary_and_matrices + 12 * layers * 16 * h
    assert without == parameter_count(megazoo.models.gpt2.GPT2Config(
        vocab_size=61, max_positions=16, hidden_size=h, layers=layers, heads=4
    ))  # fmt: skip


def gradients(config, own, layout):
    """Of every parameter: of train_batch, or of a backward of one's own, at last synced."""
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, seed=3)
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    if not own:
        model.train_batch(ids, targets=targets)
        return {e.name: e.parameter.grad.clone() for e in model.entries() if e.spec.plain}
    optimizer = megazoo.optim.AdamW(model)
    model(ids, labels=ids).loss.backward()
    if ctx.sequence_parallel:
        with pytest.raises(UserError, match=r"call model.sync_gradients\(\) on every rank"):
            optimizer.step()
    model.sync_gradients()
    found = {e.name: e.parameter.grad.clone() for e in model.entries() if e.spec.plain}
    model.train_batch(ids, labels=ids)
    expected = {e.name: e.parameter.grad for e in model.entries() if e.spec.plain}
    return [(found[name] - expected[name]).norm() / expected[name].norm() for name in found]


@pytest.mark.parametrize("layout", ["tp2+sp", "tp2"])
def test_a_backward_of_ones_own_is_summed(ranks, make, layout):
    for distances in in_layout(ranks, gradients, layout, make(), True):
        assert len(distances) == 29
        assert max(distances) < 1e-5


MISTAKES = [
    ("dropout", r"layers\.0\.drop is nn\.Dropout, whose masks depend on the parallel layout"),
    (
        "batch norm",
        r"layers\.0\.statistics is nn\.BatchNorm1d, whose statistics cover only the rows",
    ),
    ("random", r"layers\.0\.angle has random or uninitialized values when the model is built"),
    ("drawn", r"layers\.0\.drawn has random or uninitialized values .* reset_parameters\(\)"),
    (
        "no spec",
        r"layers\.0\.attention\.qkv\.extra has no ParameterSpec: if a Layer creates",
    ),
    ("hidden", "engine is an attribute of every Model: use another name"),
    (
        "scalar",
        r"layers\.0\.scalar is a scalar, which is not supported: use a parameter of shape \[1\]",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_what_depends_on_the_layout_is_refused(make, mistake, message):
    with pytest.raises(UserError, match=message):
        megazoo.from_config(make(mistake))


def refused(config, layout):
    ctx = context(**layout)
    try:
        model = megazoo.from_config(config, ctx)
        ids, _ = make_batch(0)
        model.train_batch(ids, labels=ids)
    except UserError as error:
        return str(error)
    return "nothing is refused"


@pytest.mark.parametrize(
    ("mistake", "layout", "message"),
    [
        ("inside", "tp2", "the gradients of layers.0.inside.weight differ between the tp ranks"),
        (
            "around",
            "tp2+sp",
            "the gradients of layers.0.around.weight are the same on all tp ranks",
        ),
        ("on every stage", "pp2", "everywhere.weight is built on pp ranks 0 and 1: build it only"),
        ("aliased", "pp2", "nothing is refused"),
        (
            "shared",
            "pp2",
            "layers.3.mlp.up.weight and layers.0.mlp.up.weight are one parameter in one process, "
            "but separate parameters on pp ranks 0 and 1: build the shared module under one name",
        ),
    ],
)
def test_what_only_several_ranks_show_is_refused(ranks, make, mistake, layout, message):
    for text in in_layout(ranks, refused, layout, make(mistake)):
        assert text.startswith(message)
