"""Muon: torch's own of the same matrices, and the same in every layout."""

import gc
import weakref
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES
from megazoo.models.registry import find_config
from megazoo.optim import AdamW, Muon
from megazoo.optim.muon import linear_names
from megazoo.optim.newton_schulz import cost_of
from megazoo.optim.whole_matrices import stepped_matrices
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.shard import ParameterSpec
from megazoo.parallel.storage import in_memory
from megazoo.testing import Layout
from tests.support.layouts import LAYOUTS, in_layout
from tests.support.sampling import marked_slow, pairs_covered
from tests.support.training import (
    MODELS,
    context,
    make_batch,
    randomize,
    replica_rows,
    tiny_config,
)

CONFIGS = {
    "gpt2": tiny_config(),
    "untied": tiny_config(tied=False),
    "llama": MODELS["llama"],
    "llama, one KV head": MODELS["llama, one KV head"],
    "mpt": MODELS["mpt"],
}
HOW = {
    "plain": {},
    "recomputed": {"recompute": "full"},
    "frozen": {"train_only": "attention|norm"},
    "adapters": {"lora_rank": 3, "lr": 0.004},  # at 0.02 they oscillate, and rounding grows
    "without nesterov": {"nesterov": False, "momentum": 0.8, "ns_steps": 3},
}
ADAMW = {"lr": 1e-2, "eps": 1e-3}


def built(config, ctx, lora_rank=0, train_only=None, recompute="none", dtype=torch.float32):
    model = randomize(megazoo.from_config(config, ctx, seed=3, dtype=dtype)).recompute(recompute)
    if lora_rank:
        megazoo.lora.add(model, rank=lora_rank, alpha=6, targets="all-linear")
    if train_only:
        model.train_only(train_only)
    return model


def step_of(model, optimizer, step, schedule="1f1b"):
    """Train a step; the loss."""
    ids, targets = (replica_rows(tensor, model.ctx) for tensor in make_batch(step))
    count = min(4, len(ids))
    batch = {"num_microbatches": count, "schedule": schedule, "step": step}
    loss = model.train_batch(ids, targets=targets, **batch)
    optimizer.step()
    return loss.item()


def train(config, layout, steps=3, schedule="1f1b", zero=0, path=None, made=None, lr=0.02, **how):
    """The losses, the weights after the first step, by box, and what this rank's matrices cost."""
    ctx = context(**layout)
    of_muon = {name: how.pop(name) for name in ("nesterov", "momentum", "ns_steps") if name in how}
    model = built(config, ctx, **how)
    optimizer = Muon(model, lr=lr, adamw=ADAMW, clip_grad=0.2, zero=zero, **of_muon)
    if path:
        load(Checkpoint(path), model, optimizer)
    losses, first = [], None
    for step in range(steps):
        losses.append(step_of(model, optimizer, step, schedule))
        first = first or parts(model)
    if made:
        save(made, steps, model, optimizer)
    owned = [m for m in optimizer.wholes[0].matrices if m.owner == optimizer.wholes[0].me]
    cost = sum(cost_of(m.rows, m.columns) for m in owned)
    return losses, first, cost


def parts(model):
    """Copies of this rank's parts of the parameters, by name and box."""
    ctx = model.ctx
    return {
        (entry.name, piece.box): entry.parameter.detach()[piece.index()].clone()
        for entry in in_memory(model, model.entries())
        for piece in entry.spec.pieces(ctx.place)
    }


@cache
def one_process(config, how, steps):
    return train(config, {}, steps=steps, **HOW[how])


def assert_alike(results, expected, least=1e-5):
    losses, first, _ = expected
    for ours, after_one, _ in results:
        assert max(abs(a - b) for a, b in zip(ours, losses, strict=True)) < least
        for (name, box), part in after_one.items():
            assert (part - part_of(first, name, box)).abs().max() < least, name


def part_of(parts, name, box):
    """What other parts, of one process, have of a box."""
    for (other, around), tensor in parts.items():
        if other == name and around[0][0] <= box[0][0] < around[0][1]:
            pairs = zip(box, around, strict=True)
            return tensor[tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)]
    raise AssertionError(name)


FAST = [  # each way to cut a matrix, to share the work and to train; copies of KV heads at tp 4
    ("llama", "tp4", "plain"),
    ("mpt", "tp2+sp", "recomputed"),
    ("llama, one KV head", "tp2dp2+sp+zero2", "without nesterov"),
    ("gpt2", "cp2+ulysses", "adapters"),
    ("untied", "cp2+zero3", "frozen"),
    ("gpt2", "pp2+zb-h1", "plain"),
]
PAIRS = pairs_covered(list(CONFIGS), LAYOUTS, list(HOW), seed=28)
CASES = [*FAST, ("llama", "tp2pp2dp2+sp", "plain"), *(case for case in PAIRS if case not in FAST)]


@pytest.mark.parametrize(
    ("name", "layout", "how"),
    marked_slow(CASES, lambda number, _: number >= len(FAST), name="-".join),
)
def test_an_update_and_the_losses_are_those_of_one_process(ranks, request, name, layout, how):
    """Of two steps and three layers in `make test`, else of twenty steps."""
    config, steps, place = CONFIGS[name], 20, Layout.named(layout)
    if not request.node.get_closest_marker("slow"):
        config, steps = replace(config, layers=3), 2
    settings = {"schedule": place.schedule, "zero": place.zero, **HOW[how]}
    results = in_layout(ranks, train, layout, config, steps=steps, **settings)
    assert_alike(results, one_process(config, how, steps))


class Mix(ShardedModule):
    """A layer of one's own: a matrix, a stack of them, and what is none."""

    multiplied = ("matrix", "stack", "vector")

    def __init__(self):
        super().__init__(ParallelContext())
        shapes = {"matrix": (4, 6), "stack": (2, 4, 6), "vector": (6,), "table": (9, 6)}
        for name, shape in shapes.items():
            self.add_parameter(name, ParameterSpec(shape))


def test_a_layer_of_ones_own_says_what_its_matrices_are():
    assert linear_names(torch.nn.ModuleDict({"mix": Mix()})) == {"mix.matrix", "mix.stack"}


@pytest.mark.parametrize("nesterov", [True, False])
def test_one_process_is_torchs_muon(nesterov):
    """To the bit, in the precision of torch's: of fused projections each part is a matrix."""
    config = replace(CONFIGS["llama"], layers=2)
    model = built(config, megazoo.ParallelContext())
    ours = Muon(model, lr=0.02, nesterov=nesterov, clip_grad=0, ns_dtype="bfloat16")
    matrices = {}
    for entry in model.entries():
        if entry.name in linear_names(model):
            sizes = entry.spec.shard.parts if entry.spec.shard.dim == 0 else entry.spec.shape[:1]
            for number, part in enumerate(entry.parameter.detach().split(sizes)):
                matrices[entry.name, number] = torch.nn.Parameter(part.clone()), sizes
    parameters = [parameter for parameter, _ in matrices.values()]
    theirs = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, nesterov=nesterov)
    own = dict(model.named_parameters())
    for step in range(4):
        ids, targets = make_batch(step)
        model.train_batch(ids, targets=targets, num_microbatches=2, step=step)
        for (name, number), (parameter, sizes) in matrices.items():
            parameter.grad = own[name].grad.split(sizes)[number].clone()
        ours.step()
        theirs.step()
        for (name, number), (parameter, sizes) in matrices.items():
            assert (own[name].split(sizes)[number] - parameter).abs().max() < 1e-6, name
    assert len(matrices) == config.layers * 7


def test_a_step_is_nearly_orthogonal():
    """Of a momentum that has all directions, singular values come near 1; and so in fp32."""
    config = CONFIGS["gpt2"]
    model = built(config, megazoo.ParallelContext())
    optimizer = Muon(model, lr=1.0, weight_decay=0.0, momentum=0.0, clip_grad=0, ns_steps=12)
    before = model.layers["0"].mlp.up.weight.detach().clone()
    step_of(model, optimizer, 0)
    change = before - model.layers["0"].mlp.up.weight.detach()
    values = torch.linalg.svdvals(change) / 4**0.5  # rows / columns is 4
    assert values[:20].min() > 0.6
    assert values.max() < 1.3


def test_the_rest_is_adamws():
    """With a learning rate of 0 for matrices, nothing else differs from AdamW."""
    config, results = tiny_config(layers=2), []
    for make in (
        lambda m: Muon(m, lr=0.0, weight_decay=0.0, adamw={"lr": 1e-2}, clip_grad=0.2),
        lambda m: AdamW(m, lr=1e-2, clip_grad=0.2),
    ):
        model = built(config, megazoo.ParallelContext())
        optimizer = make(model)
        step_of(model, optimizer, 0)
        linear = linear_names(model)
        results.append({n: p for n, p in model.named_parameters() if n not in linear})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize(
    ("layout", "zero"),
    marked_slow(list(product(["tp2dp2", "tp2dp2+sp"], [0, 1])), lambda number, _: number > 0),
)
def test_no_rank_orthogonalises_what_another_does(ranks, layout, zero):
    config = CONFIGS["llama"]
    results = in_layout(ranks, train, layout, config, steps=1, zero=zero)
    costs = [cost for *_, cost in results]
    *_, whole = train(config, {}, steps=1)
    assert sum(costs) == whole
    assert max(costs) <= 0.3 * whole


def elements_of_state(config, zero, layout):
    model = built(config, context(**layout))
    optimizer = Muon(model, zero=zero)
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    matrices = sum(p.numel() for n, p in model.named_parameters() if n in linear_names(model))
    return sum(tensor.numel() for tensor in states), matrices, sum(
        p.numel() for p in model.parameters()
    )  # fmt: skip


def test_the_state_is_one_momentum_and_shared(ranks):
    whole, matrices, every = elements_of_state(CONFIGS["llama"], 0, {})
    assert whole == matrices + 2 * (every - matrices)
    shared = in_layout(ranks, elements_of_state, "dp2", CONFIGS["llama"], 1)
    assert sum(elements for elements, *_ in shared) == whole


@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    marked_slow([("dp2", "tp4"), ("tp1", "tp2dp2"), ("tp2", "pp2")], lambda number, _: number > 0),
)
def test_a_run_goes_on_in_another_layout(ranks, tmp_path, saved_in, loaded_in):
    config, zero = replace(CONFIGS["llama"], layers=2), int("dp" in saved_in)
    in_layout(ranks, train, saved_in, config, steps=2, zero=zero, made=tmp_path / "a")
    zero = int("dp" in loaded_in)
    step = next((tmp_path / "a").glob("step_*"))
    alone = train(config, {}, steps=2, path=step)
    results = in_layout(ranks, train, loaded_in, config, steps=2, zero=zero, path=step)
    assert_alike(results, alone)


def test_states_are_not_mistaken_for_one_another(tmp_path):
    ctx = megazoo.ParallelContext()
    made = {}
    for name, kind in (("muon", Muon), ("adamw", AdamW)):
        model = built(CONFIGS["gpt2"], ctx)
        optimizer = kind(model)
        step_of(model, optimizer, 0)
        made[name] = save(tmp_path / name, 1, model, optimizer)
    model = built(CONFIGS["gpt2"], ctx)
    with pytest.raises(UserError, match=r"momentum of .*, not the exp_avg and exp_avg_sq of Adam"):
        load(Checkpoint(next((tmp_path / "muon").glob("step_*"))), model, AdamW(model))
    with pytest.raises(UserError, match=r"exp_avg and exp_avg_sq of .*, not the momentum of Muon"):
        load(Checkpoint(next((tmp_path / "adamw").glob("step_*"))), model, Muon(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_fp32_masters(ranks, dtype):
    """Steps that are too small for the weights' own precision add up in the masters."""
    model = built(tiny_config(layers=2), megazoo.ParallelContext(), dtype=dtype)
    optimizer = Muon(model, lr=1e-5, adamw={"lr": 1e-5})
    name = "layers.0.mlp.up.weight"
    before = optimizer.state[name]["master"].clone()
    weights = dict(model.named_parameters())[name].detach().view(-1)
    assert torch.equal(before, weights.float())
    for step in range(3):
        step_of(model, optimizer, step)
    change = (optimizer.state[name]["master"] - before).norm()
    assert change > 0
    assert torch.equal(weights, optimizer.state[name]["master"].to(dtype))


def test_the_learning_rates_keep_their_proportion():
    model = built(CONFIGS["gpt2"], megazoo.ParallelContext())
    optimizer = Muon(model, lr=0.02, adamw={"lr": 0.005})
    optimizer.lr = 0.01
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.0025, 0.0025]
    assert optimizer.lr == 0.01


def test_what_cant_be_is_refused():
    model = built(CONFIGS["gpt2"], megazoo.ParallelContext())
    for settings, message in [
        ({"lr": -1}, "lr -1 must be"),
        ({"momentum": 1.5}, "momentum 1.5"),
        ({"ns_steps": 0}, "ns_steps 0"),
        ({"adamw": {"momentum": 0.9}}, "adamw has no setting momentum"),
        (
            {"ns_dtype": "float16"},
            "ns_dtype 'float16' is not supported: use auto, float32, bfloat16",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            Muon(model, **settings)
    with pytest.raises(UserError, match=r"pass a megazoo model, not its parameters: Muon\(model"):
        Muon(model.parameters())


@pytest.mark.parametrize("zero", [0, 1])
def test_who_has_nothing_to_send_takes_part_on_the_same_device(zero):
    """Of six matrices, in a round of 20 owners, most ranks own none: on a device other than the CPU
    a message of theirs from there would be in another collective than the others'."""
    meta = torch.device("meta")
    for rank in range(20):
        ctx = replace(megazoo.ParallelContext.virtual(4, 1, 5, rank=rank), device=meta)
        optimizer = Muon(FAMILIES["gpt2"].on_meta(tiny_config(layers=1), ctx), zero=zero)
        state, mine, taken = optimizer.state, optimizer.wholes[0].mine, []

        def give(matrix, state=state, mine=mine):
            return state[matrix.entry.name]["momentum"][mine(matrix)]

        def take(matrix, part, give=give, taken=taken):
            assert part.is_meta
            assert part.shape == give(matrix).shape
            taken.append(matrix)

        optimizer.wholes[0].apply(lambda whole, _: whole, give, take)
        assert len(set(taken)) == len(taken) == 6


def test_every_matrix_has_one_owner_and_the_work_is_balanced():
    """Of a large model, on many ranks."""
    ctx = megazoo.ParallelContext.virtual(8, 1, 8)
    config = find_config("llama-7b")
    model = FAMILIES["llama"].on_meta(config, ctx)
    linear = linear_names(model)
    entries = [entry for entry in model.entries() if entry.name in linear]
    load_of = {}
    matrices = stepped_matrices(entries, ctx, cost_of, ctx.token_axis.size)
    for matrix in matrices:
        load_of[matrix.owner] = load_of.get(matrix.owner, 0) + cost_of(matrix.rows, matrix.columns)
    assert len({(m.entry.name, m.part) for m in matrices}) == len(matrices) == 32 * 7
    assert max(load_of.values()) < 1.25 * sum(load_of.values()) / 64


def test_a_matrix_without_a_gradient_stays_as_it_is():
    """In a loop of one's own, whose loss does not reach it."""
    model = built(CONFIGS["gpt2"], megazoo.ParallelContext())
    optimizer = Muon(model, lr=0.1)
    ids, _ = make_batch(0)
    model(ids, labels=ids).loss.backward()
    up = model.layers["0"].mlp.up.weight
    up.grad, before, down = None, parts(model), model.layers["0"].mlp.down.weight.detach().clone()
    model.sync_gradients()
    optimizer.step()
    ((_, same),) = [item for item in before.items() if item[0][0] == "layers.0.mlp.up.weight"]
    assert torch.equal(up, same)
    assert not torch.equal(model.layers["0"].mlp.down.weight, down)


def test_its_state_dict_goes_on_under_torchs_scheduler():
    """Both rates fall together, and what is loaded steps as what was saved."""
    results, config = [], replace(CONFIGS["llama"], layers=2)
    for resumed in (False, True):
        model = built(config, megazoo.ParallelContext())
        optimizer = Muon(model, lr=0.02, adamw={"lr": 0.01})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(4):
            if resumed and step == 2:
                state = optimizer.state_dict(), schedule.state_dict()
                optimizer = Muon(model, lr=0.02, adamw={"lr": 0.01})
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
                optimizer.load_state_dict(state[0])
                schedule.load_state_dict(state[1])
            step_of(model, optimizer, step)
            schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.00125, 0.000625, 0.000625]
        results.append(parts(model))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def freed_without_collecting(layout):
    """Whether an optimizer and its model go when nothing names them."""
    gc.collect()
    gc.disable()
    try:
        model = built(CONFIGS["gpt2"], context(**layout))
        optimizer = Muon(model, zero=1)
        alive = [weakref.ref(optimizer), weakref.ref(model)]
        del optimizer, model
        return [each() is None for each in alive]
    finally:
        gc.enable()


def test_nothing_keeps_a_dropped_optimizer_and_its_model(ranks):
    assert in_layout(ranks, freed_without_collecting, "dp2") == [[True, True]] * 2
