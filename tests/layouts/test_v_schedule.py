"""Schedules of a user's own whose stages lie in a V: everything but generation is as in one
process."""

import json
import runpy
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.errors import UserError
from megazoo.evaluation import score
from megazoo.models.counts import parameter_count
from megazoo.parallel.layout import Layout
from megazoo.parallel.placement import Placement
from megazoo.parallel.schedule import (
    SCHEDULES,
    Action,
    Exchange,
    placed,
    program,
    tables_of,
    timeline,
)
from megazoo.parallel.stages import cut_into_stages
from megazoo.planning import PlannedRun, Planner, find_layouts
from megazoo.planning.plan import schedule_tables
from megazoo.planning.ranks import place_in
from megazoo.programs import plan as plan_tool
from megazoo.testing import all_layouts
from tests.support import training
from tests.support.sampling import marked_slow
from tests.support.training import (
    CLIP,
    GLOBAL_BATCH,
    context,
    layout_name,
    make_batch,
    randomize,
    replica_rows,
    run_in_layout,
    tiny_config,
    train_and_keep_gradients,
    worst_gradient,
    worst_relative,
)

FILE = Path(training.__file__).with_name("v_schedule.py")  # greedy-v, with I and W
V = dict(pp=2, v=2, placement="v")


@placed("v")
def v_gpipe(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """All forwards down the ranks, all up again, then the backwards."""
    stages = Placement("v", pp, virtual).stages_of(rank)
    forwards = [Action("F", stage, m) for stage in stages for m in range(microbatches)]
    return forwards + [Action("B", stage, m) for stage in stages[::-1] for m in range(microbatches)]


@contextmanager
def own_schedules():
    """Within this block a user's own schedules are known: greedy-v and v-gpipe."""
    with mock.patch.dict(SCHEDULES, {"v-gpipe": v_gpipe}):
        runpy.run_path(str(FILE))
        yield


def named(case) -> str:
    return layout_name({k: v for k, v in case.items() if k != "placement"}) if case else "one"


# The user's file.


def test_it_has_forty_lines_at_most_and_half_the_bubble_of_zb_h1():
    """With F, I and W equally long: that of zb-h1 is (pp - 1) / (3 m)."""
    assert len(FILE.read_text().splitlines()) <= 40
    with own_schedules():
        for pp, count in [(2, 4), (2, 8), (4, 8), (4, 16)]:
            spans = timeline(tables_of(SCHEDULES["greedy-v"], pp, 2, count)).values()
            assert max(span.end for span in spans) == 6 * count + (pp - 1), (pp, count)


@pytest.mark.parametrize("pp", range(2, 6))
def test_it_has_each_action_once_and_never_deadlocks(pp):
    with own_schedules():
        for count in range(1, 14):
            tables = tables_of(SCHEDULES["greedy-v"], pp, 2, count)
            assert sorted(action for table in tables for action in table) == sorted(
                Action(kind, stage, m) for kind in "FIW" for stage in range(2 * pp)
                for m in range(count)
            )  # fmt: skip
            timeline(tables)


# Training.


def train_in_v(layout, schedule=None, **how):
    if schedule:
        how["schedule"] = schedule
    with own_schedules():
        return train_and_keep_gradients(tiny_config(), layout, steps=2, micro_batch=2, **how)


@pytest.fixture(scope="module")
def expected():
    return train_in_v({})


TRAINED = [  # the first ones in `make test`: each schedule, and each other axis
    (V, "greedy-v"),
    (V, "v-gpipe"),
    (V, "v-min"),
    (dict(tp=2, **V), "v-half"),
    (dict(dp=2, **V), "dualpipe-v"),
    (dict(cp=2, **V), "zb-v"),
    (V, "zb-v"),
    (V, "v-half"),
    (V, "dualpipe-v"),
    (dict(dp=2, **V), "v-gpipe"),
]


@pytest.mark.parametrize(
    ("layout", "schedule"),
    marked_slow(
        TRAINED, lambda number, _: number > 5, name=lambda case: f"{named(case[0])}-{case[1]}"
    ),
)
def test_it_trains_as_one_process_does(ranks, expected, layout, schedule):
    losses, gradients = expected
    found = run_in_layout(ranks, train_in_v, layout, schedule=schedule)
    for ours, _ in found:
        assert worst_relative(ours, losses) < 1e-5
    for step, of_one in enumerate(gradients):
        worst, name = worst_gradient([each[step] for _, each in found], of_one)
        assert worst < 1e-4, name


def losses_in_v(layout, schedule=None, train_only=None, steps=2, **how):
    """[(loss, gradient norm)] of the steps."""
    with own_schedules():
        ctx = context(**layout)
        model = randomize(megazoo.from_config(tiny_config(tied=train_only is None), ctx, seed=3))
        if train_only:
            model.train_only(train_only)
        model.recompute(how.pop("recompute", "none"))
        optimizer = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=CLIP, **how)
        return run_steps(model, optimizer, schedule, range(steps)), model.engine.first_trained_stage


def run_steps(model, optimizer, schedule, steps):
    history = []
    for step in steps:
        ids, targets = (replica_rows(tensor, model.ctx) for tensor in make_batch(step))
        loss = model.train_batch(
            ids,
            targets=targets,
            num_microbatches=len(ids) // 2,
            schedule=schedule or "1f1b",
            step=step,
        )
        history.append((loss.item(), optimizer.step().item()))
    return history


WAYS = {
    "zero": (dict(dp=2, **V), dict(zero=2), 0),
    "recompute": (V, dict(recompute="full"), 0),
    "frozen": (V, dict(train_only="layers.[34]"), 2),
    "head": (V, dict(train_only="head"), 0),  # the first rank has the embedding and the head
}


@pytest.mark.parametrize(
    ("schedule", "way"),
    marked_slow(
        list(product(["zb-v", "v-gpipe"], WAYS)),
        lambda _, case: (case[0] == "v-gpipe") != (case[1] == "recompute"),
    ),
)
def test_its_losses_are_those_of_one_process(ranks, way, schedule):
    """With ZeRO-1; recomputing all layers; with frozen stages before all that is trained."""
    layout, how, first = WAYS[way]
    one, _ = losses_in_v({}, **{k: v for k, v in how.items() if k != "zero"})
    for ours, found in run_in_layout(ranks, losses_in_v, layout, schedule=schedule, **how):
        assert worst_relative(ours, one) < 1e-5
        assert found == first


@pytest.mark.parametrize("costs", [(1, 0, 0), (2, 1, 3), (1, 2, 5), (3, 0, 7)])
def test_balanced_stages_make_the_slowest_rank_as_fast_as_can_be(costs):
    """The embedding and the head are both on the first rank."""
    layer, first, last = costs
    placement = Placement("v", 3, 2)

    def slowest(layers_of_ranks):
        load = [layer * n for n in layers_of_ranks]
        return max(load[0] + first + last, *load[1:])

    for layers in range(6, 12):
        stages = cut_into_stages(layers, 6, "balanced", costs, placement)
        found = [len(stage.layers) for stage in stages]
        assert sum(found) == layers
        every = product(range(layers + 1), repeat=2)
        best = min(slowest([*c, layers - sum(c)]) for c in every if sum(c) <= layers)
        of_ranks = [found[rank] + found[5 - rank] for rank in range(3)]
        assert slowest(of_ranks) == best, (layers, found)


# What else a model is asked.


def asked(layout):
    """What a model says of a batch: its losses, its scores, and gradients of a loop of its own."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(tiny_config(), ctx, seed=3))
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    count = len(ids) // 2
    found = {
        "eval_batch": model.eval_batch(ids, targets=targets, num_microbatches=count).item(),
        "scores": score(model, ids, targets).log_likelihood.tolist(),
        "loss": model(ids, labels=ids).loss.item(),
    }
    parts = []
    for out in model.microbatches(ids, targets=targets, num_microbatches=count):
        out.loss.backward()
        parts.append(out.loss.item())
    return found | {"microbatches": sum(parts)}, training.gradients_of(model)


@pytest.mark.parametrize(
    "layout", marked_slow([V, dict(dp=2, **V)], lambda number, _: number > 0, name=named)
)
def test_it_is_evaluated_scored_and_driven_by_a_loop(ranks, layout):
    numbers, gradients = asked({})
    found = run_in_layout(ranks, asked, layout)
    replicas = layout.get("dp", 1)
    for rank, (ours, _) in enumerate(found):
        for name in ("eval_batch", "microbatches"):
            assert worst_relative([ours[name]], [numbers[name]]) < 1e-5, name
        if replicas == 1:
            for name in ("scores", "loss"):
                assert worst_relative([ours[name]], [numbers[name]]) < 1e-5, (rank, name)
    worst, name = worst_gradient([each for _, each in found], gradients)
    assert worst < 1e-4, name


def generated(layout):
    """Return tokens from prompts of unequal length: greedy, by beams, and sampled."""
    model = randomize(megazoo.from_config(tiny_config(layers=6), context(**layout), seed=3))
    ids = torch.arange(5 * 6).view(5, 6) % 50
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padding on the left
    ways = [{}, {"num_beams": 3}, {"do_sample": True, "seed": 5}, {"use_cache": False}]
    return [model.generate(ids, attention_mask=mask, max_new_tokens=7, **way) for way in ways]


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        [V, V | dict(pp=3), dict(tp=2, **V), dict(dp=2, **V)],
        lambda number, _: number > 1,
        name=named,
    ),
)
def test_it_generates_the_tokens_of_one_process(ranks, layout):
    one = generated({})
    for found in run_in_layout(ranks, generated, layout):
        for way, (ours, expected) in enumerate(zip(found, one, strict=True)):
            assert torch.equal(ours, expected), way


# Checkpoints.


def go_on(first, directory, layout, schedule=None):
    """Train a step from the checkpoint before it, if there is one, and save."""
    with own_schedules():
        ctx = context(**layout)
        model = randomize(megazoo.from_config(tiny_config(), ctx, seed=3))
        optimizer = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=CLIP)
        if first:
            load(Checkpoint(directory), model, optimizer)
        history = run_steps(model, optimizer, schedule, [first])
        save(directory, first + 1, model, optimizer)
        return history


def test_its_checkpoints_go_on_in_a_loop_and_back(ranks, tmp_path):
    one = losses_in_v({}, steps=3)[0]
    layouts = [(V, "v-half"), (dict(pp=2), None), (V, "dualpipe-v")]
    for step, (layout, schedule) in enumerate(layouts):
        for ours in run_in_layout(ranks, go_on, layout, step, tmp_path, schedule=schedule):
            assert worst_relative(ours, one[step : step + 1]) < 1e-5, step


# Plans.


def planner_in_v(config=None):
    """A planner, a layout of two ranks, and a run of one micro-batch."""
    run = PlannedRun(micro_batch_size=2, global_batch_size=2, seq_length=16, dtype="float32")
    layout = Layout(pp=2, schedule="greedy-v")
    return Planner(config or tiny_config()), layout, run


@pytest.mark.parametrize("schedule", ["greedy-v", "v-gpipe"])
def test_a_plan_counts_what_is_sent_to_another_rank(schedule):
    count, activation = 4, 4 * 2 * 16 * 32
    with own_schedules():
        planner, layout, run = planner_in_v()
        layout = replace(layout, schedule=schedule)
        run = replace(run, global_batch_size=2 * count)
        told = planner.plan(layout, run)
        assert told.parameters == parameter_count(tiny_config())
        for rank in told.ranks:
            steps = program(SCHEDULES[schedule], rank.pp, 2, 2, count)
            sends = sum(len(step.sends) for step in steps if isinstance(step, Exchange))
            assert rank.sent_pp == sends * activation


def test_a_plan_holds_each_gradient_once_after_a_step_of_one_micro_batch():
    """A tied embedding has one gradient, which two stages of a rank make."""
    with own_schedules():
        planner, layout, run = planner_in_v(tiny_config(vocab_size=6100))
        model = planner.build(place_in(layout, 0))
        costs = planner.costs(model, run, schedule_tables(layout, run)[0])
        held = sum(of_stage["W"].held for of_stage in costs)
        assert held == pytest.approx(planner.static(model, run).gradients, rel=0.01)


def test_the_command_searches_with_a_v_schedule(capsys):
    words = "--preset gpt2-tiny --seq-length 16 --micro-batch-size 1 --global-batch-size 8"
    words += " --search --gpus 2 --memory 1GB --schedule zb-v --json -"
    plan_tool.main(words.split())
    found = json.loads(capsys.readouterr().out)
    assert [(each["pp"], each["virtual_pp"]) for each in found] == [(2, 2)]


def test_a_search_finds_layouts_of_its_placement():
    with own_schedules():
        planner, layout, run = planner_in_v(tiny_config(layers=8))
        run = replace(run, global_batch_size=16)
        found = list(find_layouts(planner, 4, 10**9, run, layout=layout))
    layouts = [each.layout for each in found]
    assert {layout.virtual_pp for layout in layouts} == {2}
    assert {(layout.tp, layout.pp, layout.dp) for layout in layouts} == {
        (2, 2, 1),
        (1, 2, 2),
        (1, 4, 1),
    }


def test_the_check_tries_it_with_two_stages_a_rank():
    with own_schedules():
        names = {str(layout) for layout in all_layouts(tiny_config(layers=8), 4)}
    assert {
        "pp2v2+greedy-v",
        "pp4v2+v-gpipe",
        "tp2pp2v2+sp+greedy-v",
        "pp2dp2v2+zero+greedy-v",
    } <= {*names}
    assert "pp2+greedy-v" not in names


# What is refused.


def refused(layout, call):
    with own_schedules(), pytest.raises(UserError) as told:
        call(megazoo.from_config(tiny_config(), context(**layout)))
    return str(told.value)


def train(model, schedule):
    ids, _ = make_batch(0, GLOBAL_BATCH)
    model.train_batch(ids, labels=ids, num_microbatches=4, schedule=schedule)


def in_1f1b(model):
    train(model, "1f1b")


def in_greedy_v(model):
    train(model, "greedy-v")


REFUSED = [
    (V, in_1f1b, "schedule 1f1b needs placement loop, but the model's context has v: create the c"),
    (dict(pp=2, v=2), in_greedy_v, "schedule greedy-v needs placement v, but the model's context "),
]


@pytest.mark.parametrize(("layout", "call", "line"), REFUSED, ids=["another placement", "a loop"])
def test_what_cannot_be_is_refused_on_every_rank(ranks, layout, call, line):
    for told in ranks(refused, 2, layout, call):
        assert told.startswith(line)
        assert "\n" not in told
