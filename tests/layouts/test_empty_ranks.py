"""Stages of no layers, ranks that own no tensor, replicas of no rows: every call does what one
process does."""

import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.cli.program import run_program
from megazoo.errors import Advice
from megazoo.evaluation.scoring import score
from megazoo.models.counts import parameter_count
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.parallel import ParameterSpec
from megazoo.parallel.layout import Layout
from megazoo.parallel.schedule import SCHEDULES, placement_named_by
from megazoo.planning import PlannedRun, Planner
from megazoo.programs import convert, generate, inspect_checkpoint
from megazoo.testing import check_parallel
from tests.support.layouts import in_layout
from tests.support.sampling import marked_slow
from tests.support.scripts import merge_shards
from tests.support.training import context, make_batch, randomize

# The tied vocabulary weighs as much as ten layers: the last stage gets none, and its norm is all
# that it owns, which tp rank 0 writes.
TINY = dict(vocab_size=2000, max_positions=8, hidden_size=16, layers=4, heads=2)
RATES = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0)
CONFIGS = {
    "gpt2": GPT2Config(**TINY, **RATES),
    "llama": LlamaConfig(**TINY, kv_heads=1, ffn_size=32, tie_embeddings=True),
    "mpt": MPTConfig(**TINY),
}
CASES = [  # the first ones in `make test`
    ("gpt2", "tp2pp2+sp"),
    # the last of four stages is empty, the one before it on the same rank is not
    ("gpt2", "pp2v2"),
    ("llama", "pp2dp2"),  # the second replica is given no rows
    ("mpt", "tp2pp2"),
    ("gpt2", "tp2dp2+sp"),
    ("gpt2", "tp2pp2"),
    ("gpt2", "pp2dp2"),
    ("llama", "tp2pp2"),
    ("mpt", "pp2dp2"),
]


def batch_of(step: int, ctx) -> dict[str, torch.Tensor]:
    """This replica's part of a global batch with padding: all rows are the first replica's."""
    ids, targets = make_batch(step, batch=4, sequence=8, vocab=TINY["vocab_size"])
    mask = torch.ones_like(ids)
    mask[0, 5:], targets[0, 5:] = 0, -100
    batch = {"input_ids": ids, "targets": targets, "attention_mask": mask}
    return batch if ctx.dp_rank == 0 else {name: tensor[:0] for name, tensor in batch.items()}


def one_step(model, optimizer, step: int, **how) -> list[float]:
    loss = model.train_batch(**batch_of(step, model.ctx), num_microbatches=2, step=step, **how)
    return [loss.item(), optimizer.step().item()]


def new_run(family: str, ctx, **optimizer):
    model = randomize(megazoo.from_config(CONFIGS[family], ctx, seed=3))
    return model, megazoo.optim.AdamW(model, lr=1e-2, clip_grad=0.2, **optimizer)


def everything(family: str, layout: dict) -> dict[str, list[float]]:
    """What every call that runs the model gives, in numbers, by the call."""
    ctx, numbers = context(**layout), {}
    loops = [name for name in SCHEDULES if placement_named_by(name) == "loop"]
    for schedule in loops if ctx.virtual_size == 1 else ("gpipe", "1f1b"):
        model, optimizer = new_run(family, ctx)
        numbers[schedule] = one_step(model, optimizer, 0, schedule=schedule)
        numbers[f"{schedule}, again"] = one_step(model, optimizer, 1, schedule=schedule)
    model.recompute("full")
    numbers["recompute"] = one_step(model, optimizer, 2)
    mine = {"ids": batch_of(3, ctx), "all": batch_of(3, megazoo.ParallelContext())}
    loss, labelled = model.eval_batch(**mine["ids"], num_microbatches=2, return_count=True)
    numbers["eval_batch"] = [loss.item(), labelled.item()]
    ids, targets, mask = mine["all"].values()
    numbers["forward"] = [model(ids, mask, labels=ids).loss.item()]
    nothing = model(ids[:0], mask[:0], labels=ids[:0])
    numbers["forward of nothing"] = [nothing.loss.item()]
    scores = score(model, ids, targets)
    numbers["score"] = torch.stack([part.double() for part in scores]).flatten().tolist()
    numbers["score of one row"] = score(model, ids[:1], targets[:1]).log_likelihood.tolist()
    if ctx.virtual_size == 1:
        parts = []
        for out in model.microbatches(**mine["ids"], num_microbatches=2):
            out.loss.backward()
            parts.append(out.loss.item())
        numbers["microbatches"] = [sum(parts), optimizer.step().item()]
    return numbers


@cache
def one_process(family: str) -> dict[str, list[float]]:
    return everything(family, {})


@pytest.mark.parametrize(("family", "layout"), marked_slow(CASES, lambda number, _: number > 2))
def test_every_call_gives_the_numbers_of_one_process(family, layout, ranks):
    for numbers in in_layout(ranks, everything, layout, family):
        for call, found in numbers.items():
            assert found == pytest.approx(one_process(family)[call], rel=1e-5), call


def save_and_go_on(family: str, directory: Path, layout: dict, **optimizer) -> list[float]:
    """Two steps, a checkpoint; then a third step by a run that loads it."""
    ctx = context(**layout)
    model, adamw = new_run(family, ctx, **optimizer)
    for step in range(2):
        one_step(model, adamw, step)
    save(directory / "run", 2, model, adamw, {"consumed_samples": 8})
    model.save_parallelized(directory / "shards")
    model.save_parallelized(directory / "merged", merge_checkpoints=True)
    return go_on(family, directory / "run", layout, **optimizer)


def go_on(family: str, run: Path, layout: dict, **optimizer) -> list[float]:
    model, adamw = new_run(family, context(**layout), **optimizer)
    load(Checkpoint(run), model, adamw)
    return one_step(model, adamw, 2)


@pytest.mark.parametrize(
    ("family", "layout", "zero"),
    marked_slow([("gpt2", "tp2pp2", 0), ("gpt2", "pp2dp2", 1), ("gpt2", "pp2v2", 0),
                 ("llama", "tp2pp2", 0), ("mpt", "tp2pp2", 0)],
                lambda number, _: number > 1),
)  # fmt: skip
def test_checkpoints_load_everywhere(family, layout, zero, ranks, tmp_path, capsys):
    """And come back the same through every tool."""
    found = in_layout(ranks, save_and_go_on, layout, family, tmp_path, zero=zero)
    # The losses of the third step of one process: its recomputing gives the same.
    for loss, norm in [*found, go_on(family, tmp_path / "run", {})]:
        assert [loss, norm] == pytest.approx(one_process(family)["recompute"], rel=1e-5)
    run, there, back = str(tmp_path / "run"), str(tmp_path / "there"), str(tmp_path / "back")
    convert.main([run, there, "--tp", "2", "--pp", "2"])
    convert.main([there, back])
    for tool, source in ((inspect_checkpoint, run), (inspect_checkpoint, there)):
        tool.main([source, "--verify"])
        assert "all files match their checksums" in capsys.readouterr().out
    saved, again = Checkpoint(run), Checkpoint(back)
    for name, line in saved.tensors.items():
        shape = tuple(line["shape"])
        whole = ParameterSpec(shape)
        ours, theirs = torch.empty(shape), torch.ones(shape)
        saved.read_into(name, ours, whole, megazoo.ParallelContext())
        again.read_into(name, theirs, whole, megazoo.ParallelContext())
        assert torch.equal(ours, theirs), name
    merge_shards.main([there, str(tmp_path / "exported")])
    convert.main(
        [str(tmp_path / "exported"), str(tmp_path / "converted"), "--tp", "2", "--pp", "2"]
    )
    expected = {entry.name: entry.parameter for entry in megazoo.from_pretrained(run).entries()}
    for name in ("shards", "merged", "exported", "converted"):
        for entry in megazoo.from_pretrained(tmp_path / name).entries():
            assert torch.equal(entry.parameter, expected[entry.name]), (name, entry.name)


@pytest.mark.parametrize("layout", ["pp2v2", pytest.param("tp2pp2", marks=pytest.mark.slow)])
def test_checks_know_empty_ranks(layout):
    (verdict,) = check_parallel(CONFIGS["gpt2"], [layout], steps=1)
    assert verdict.passed, verdict.cause


def test_plans_know_empty_ranks():
    planner = Planner(CONFIGS["gpt2"])
    plan = planner.plan(
        Layout(tp=2, pp=2),
        PlannedRun(global_batch_size=4, micro_batch_size=2, seq_length=8),
    )
    assert [rank.layers for rank in plan.ranks] == [4, 0]
    assert plan.parameters == parameter_count(CONFIGS["gpt2"])


def warnings_of_building(layout: dict) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        megazoo.from_config(CONFIGS["gpt2"], context(**layout))
    return [str(warning.message) for warning in told]


def test_rank_0_warns_of_a_stage_without_layers(ranks):
    line = (
        "stage 2 of 2 gets no layers: its head costs as much compute as 10.0 layers; "
        "use stage_layers uniform (--stage-layers uniform), or a smaller pp"
    )
    assert ranks(warnings_of_building, 4, dict(tp=2, pp=2)) == [[line], [], [], []]
    assert ranks(warnings_of_building, 4, dict(pp=2, dp=2, stage_layers="uniform")) == [[]] * 4


def told_by(main, arguments: list[str]) -> list[str]:
    """What a rank of a program advises."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", Advice)
        main(arguments)
    return [str(warning.message) for warning in told if warning.category is Advice]


def test_programs_warn_in_one_line(ranks, tmp_path):
    """The training program, which saves what a tool then reads; and that tool, which can also cut
    otherwise."""
    sizes = "--vocab-size 2000 --hidden-size 16 --heads 2 --layers 2 --max-positions 16"
    job = f"{sizes} --seq-length 16 --device cpu --pp 2 --tp 2 --steps 1 --eval-steps 0"
    job += " --global-batch-size 2 --micro-batch-size 1 --save"
    assert ranks(told_by, 4, pretrain.main, [*job.split(), str(tmp_path)]) == [
        [
            "stage 2 of 2 gets no layers: its head costs as much compute as 9.6 layers; "
            "use stage_layers uniform (--stage-layers uniform), or a smaller pp"
        ],
        *[[]] * 3,
    ]
    writing = [str(tmp_path), *"--device cpu --pp 2 --prompt a --max-new-tokens 2".split()]
    for more, count in (([], 1), (["--stage-layers", "uniform"], 0)):
        told, _ = ranks(told_by, 2, generate.main, [*writing, *more])
        assert len([line for line in told if line.startswith("stage 2 of 2")]) == count


def test_a_program_prints_advice_in_one_line(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    run_program(lambda _: told.append(warnings.formatwarning(Advice("text"), Advice, "file", 1)))
    assert told == ["warning: text\n"]
