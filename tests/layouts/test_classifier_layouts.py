"""Classifiers in the program: every layout as one process, resumed runs, new heads, and mistakes
in one line."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.errors import UserError
from megazoo.evaluation import evaluate_rows
from megazoo.families.config import add_missing_fields
from megazoo.formats.source import SavedModel
from megazoo.models.pretrained import with_labels
from megazoo.programs import evaluate
from megazoo.testing import Layout
from tests.support.classifiers import PROGRAM, read_rows, write_language_models, write_rows
from tests.support.context_parallel import TOKENS, batch_of, rows_of_replica
from tests.support.data import write_lines
from tests.support.inference import run_main
from tests.support.layouts import assert_gradients_equal, in_layout, model_in, parts_of_gradients
from tests.support.pretraining import SMALL, close, losses, records
from tests.support.sampling import marked_slow
from tests.support.training import MODELS, context, replica_rows


@pytest.fixture(scope="module")
def language_models(tmp_path_factory):
    return write_language_models(tmp_path_factory.mktemp("hf"))


LAYOUTS = {
    "dp2 zero": (2, "--zero 1"),
    "tp2pp2, recomputed": (4, "--tp 2 --pp 2 --recompute full --schedule zb-h1"),
}
SLOW_LAYOUTS = {
    "cp2tp2sp": (4, "--cp 2 --tp 2 --sequence-parallel"),
    "tp2": (2, "--tp 2"),
    "dp4": (4, ""),
    "cp2pp2 ulysses": (4, "--cp 2 --pp 2 --cp-method ulysses"),
    "tp2sp": (2, "--tp 2 --sequence-parallel"),
    "pp2": (2, "--pp 2 --schedule gpipe"),
    "pp2dp2, interleaved": (4, "--pp 2 --virtual-pp 2"),
    "cp2": (2, "--cp 2"),
    "cp2dp2": (4, "--cp 2 --zero 1"),
}


@pytest.fixture(scope="module")
def job(language_models, tmp_path_factory):
    path = tmp_path_factory.mktemp("job")
    file = write_rows(path / "a.jsonl", "2 labels", 61)  # the validation part is 15 rows
    arguments = [*PROGRAM, "--load", language_models / "llama", "--num-labels", 2, "--data", file]
    arguments = [*map(str, arguments), "--eval-interval", "2", "--steps", "4"]
    pretrain.main([*arguments, "--metrics", str(path / "m")])
    return arguments, path / "m"


def numbers(path):
    return [
        {k: v for k, v in record.items() if k.startswith("eval_")}
        for record in records(path)
        if "eval_loss" in record
    ]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        *(pytest.param(*case, id=name) for name, case in LAYOUTS.items()),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.slow)
            for name, case in SLOW_LAYOUTS.items()
        ),
    ],
)
def test_every_layout_trains_and_evaluates_as_one_process(ranks, job, tmp_path, world, layout):
    arguments, one = job
    ranks(pretrain.main, world, [*arguments, *layout.split(), "--metrics", str(tmp_path / "m")])
    assert close(losses(tmp_path / "m"), losses(one))
    for ours, expected in zip(numbers(tmp_path / "m"), numbers(one), strict=True):
        assert ours.pop("eval_loss") == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert ours == {key: value for key, value in expected.items() if key != "eval_loss"}
    assert 0 < expected["eval_accuracy"] < 1  # else a wrong count might hide


@pytest.mark.parametrize(
    "layout", marked_slow(["--pp 2", "--cp 2", "--tp 2", ""], lambda number, _: number > 0)
)
def test_predictions_are_the_same_in_every_layout(ranks, language_models, tmp_path, layout):
    model = megazoo.from_pretrained(language_models / "mpt", num_labels=3, seed=1)
    model.save_parallelized(tmp_path / "mpt")
    file = write_rows(tmp_path / "a.jsonl", "3 labels", 13)
    arguments = [str(tmp_path / "mpt"), "--labels", str(file), "--tokenizer", "byte"]
    evaluate.main([*arguments, "--output", str(tmp_path / "one")])
    ranks(evaluate.main, 2, [*arguments, *layout.split(), "--output", str(tmp_path / "two")])
    for one, two in zip(read_rows(tmp_path / "one"), read_rows(tmp_path / "two"), strict=True):
        assert two.pop("scores") == pytest.approx(one.pop("scores"), abs=1e-5)
        assert one == two


def tallied(layout):
    """The tally of eight rows on this rank, and the loss and what it is a mean over."""
    ctx = context(**layout)
    config = replace(MODELS["llama"], layers=2, num_labels=2, pad_token_id=60)
    model = megazoo.from_config(config, ctx, seed=3)
    ids = torch.randint(0, 60, (8, 15), generator=torch.Generator().manual_seed(1))
    ids, labels = replica_rows(ids, ctx), replica_rows(torch.arange(8) // 3 % 2, ctx)
    loss, count, tally = evaluate_rows(model, ids, labels, num_microbatches=2)
    return tally, count.item(), loss.item()


def test_every_row_is_counted_once_and_told_on_every_rank(ranks):
    expected, count, loss = tallied({})
    assert (expected.rows, expected.labelled, count) == (8, 3, 8)
    assert 0 < expected.right < 8
    for layout in ("cp2", "dp2", "pp2", "tp2"):
        for found in in_layout(ranks, tallied, layout):
            assert found[:2] == (expected, count), layout
            assert found[2] == pytest.approx(loss, abs=1e-5), layout


PAD = 60
PROBLEMS = {  # labels of four rows; sixteen labels are as many as the padded sequence has tokens
    "single_label_classification": (3, torch.tensor([2, -100, 0, 1])),
    "multi_label_classification": (16, (torch.arange(64) % 3 == 1).float().view(4, 16)),
    "regression": (1, torch.tensor([0.5, -2.0, 1.0, 3.0])),
}


def classified(problem: str, loss_fn, layout: dict):
    """Loss, count, logits and gradients of a classifier whose rows end on either cp rank: at
    tokens 12 and 3 on the first of two, 6 and 8 on the second."""
    number, labels = PROBLEMS[problem]
    ctx = context(**layout)
    llama = replace(MODELS["llama"], layers=2)
    config = replace(llama, num_labels=number, pad_token_id=PAD, problem_type=problem)
    model = model_in(config, ctx)
    ids = batch_of(0)["input_ids"].clamp(max=PAD - 1)
    ends = torch.tensor([[13], [7], [4], [9]])
    ids = ids.masked_fill(torch.arange(TOKENS) >= ends, PAD)
    batch = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}
    batch = rows_of_replica(batch, ctx)
    logits = model(**batch).logits
    logits = None if logits is None else logits.detach()
    count = 1 if ctx.dp_size > 1 else 2
    loss = model.train_batch(**batch, num_microbatches=count, loss_fn=loss_fn)
    gradients = parts_of_gradients(model)
    evaluated, counted = model.eval_batch(**batch, return_count=True)
    return (loss.item(), evaluated.item(), counted.item()), (model.has_last, logits), gradients


def classified_each_way(layout: dict) -> list:
    return [classified(*way, layout) for way in WAYS]


def own_loss(logits, labels):
    return (logits.squeeze(-1) - 2 * labels).abs().mean()


WAYS = [*((problem, None) for problem in PROBLEMS), ("regression", own_loss)]
CUTS = ["cp2+ulysses", "tp2cp2+sp", "cp2pp2", "cp2dp2", "cp2", "cp3"]


@pytest.mark.parametrize("layout", marked_slow(CUTS, lambda number, _: number > 2))
def test_a_classifier_is_trained_on_parts_as_in_one_process(ranks, layout):
    results, place = in_layout(ranks, classified_each_way, layout), Layout.named(layout)
    for number, way in enumerate(WAYS):
        numbers, (_, logits), gradients = classified(*way, {})
        size = len(logits) // place.dp
        for rank, (ours, (has_last, theirs), _) in enumerate(each[number] for each in results):
            assert ours == pytest.approx(numbers, rel=1e-5), way
            assert (theirs is not None) == has_last, way
            if has_last:
                replica = rank // 2 if place.dp > 1 else 0
                mine = logits[replica * size : (replica + 1) * size]
                torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=1e-5)
        assert_gradients_equal([each[number][-1] for each in results], gradients)


def test_a_run_goes_on_bit_for_bit(job, tmp_path):
    arguments, one = job
    arguments = [*arguments, "--save-interval", "2"]
    pretrain.main([*arguments, "--save", str(tmp_path / "run")])
    resumed = ["--load", str(tmp_path / "run" / "step_00000002"), "--device", "cpu"]
    resumed += ["--steps", "4", "--eval-steps", "2", "--metrics", str(tmp_path / "m")]
    pretrain.main(resumed)
    whole = losses(one)
    assert losses(tmp_path / "m") == {step: whole[step] for step in (3, 4)}
    assert numbers(tmp_path / "m") == numbers(one)[-1:]
    with pytest.raises(UserError, match="is a classifier with 2 labels, not 3"):
        pretrain.main([*resumed, "--num-labels", "3"])
    pretrain.main([*resumed, "--num-labels", "2", "--steps", "5"])


def test_a_language_model_of_ours_becomes_a_classifier(tmp_path, capsys):
    """With a new head it is a new run, of a classifier's data; a classifier needs no number."""
    pretrain.main([*SMALL, "--steps", "2", "--save", str(tmp_path / "lm")])
    file = write_rows(tmp_path / "a.jsonl", "any of 3")
    arguments = [*SMALL[10:], "--split", "75,25", "--data", str(file), "--epochs", "1"]
    arguments += ["--save", str(tmp_path / "run"), "--seq-length", "16"]
    capsys.readouterr()
    pretrain.main([*arguments, "--load", str(tmp_path / "lm"), "--num-labels", "3"])
    out = capsys.readouterr().out
    assert "classifier of 3 labels (a new head)" in out
    assert "trained steps 1 to 6" in out
    config = SavedModel(tmp_path / "run" / "step_00000006").config
    assert (config.num_labels, config.pad_token_id) == (3, 256)
    assert config.problem_type == "multi_label_classification"
    again = [*arguments, "--load", str(tmp_path / "run"), "--load-weights-only", "--dtype"]
    pretrain.main([*again, "bfloat16", "--train-only", "score", "--split", "60,20,20"])
    out = capsys.readouterr().out
    assert "classifier of 3 labels, " in out
    assert "test loss" in out
    assert "accuracy" in out


def test_a_fresh_classifier_of_random_rows(tmp_path):
    arguments = [*SMALL, "--mock-data", "--steps", "2", "--vocab-size", "61"]
    for number in (1, 2):
        metrics = tmp_path / f"{number}"
        pretrain.main([*arguments, "--num-labels", str(number), "--metrics", str(metrics)])
        evaluation = records(metrics)[-1]
        names = {"step", "eval_loss", *(["eval_accuracy", "eval_f1"] if number == 2 else [])}
        assert set(evaluation) == names
        assert math.isfinite(evaluation["eval_loss"])


def test_frozen_but_for_the_head_in_a_pipeline(ranks, job, tmp_path):
    arguments, _ = job
    arguments = [*arguments, "--train-only", "score", "--metrics"]
    pretrain.main([*arguments, str(tmp_path / "one")])
    ranks(pretrain.main, 2, [*arguments, str(tmp_path / "two"), "--pp", "2"])
    assert close(losses(tmp_path / "two"), losses(tmp_path / "one"))


def test_a_family_without_labels_makes_no_classifier(tmp_path):
    @dataclass(frozen=True)
    class Bare:
        vocab_size: int = 61

    source = SimpleNamespace(config=Bare(), path=tmp_path, pad_token_id=None)
    add_missing_fields(Bare)
    with pytest.raises(UserError, match="Bare has no num_labels: its family has no classifier"):
        with_labels(source, 2)


# Mistakes.


def test_the_program_tells_mistakes_in_one_line(language_models, tmp_path, monkeypatch, capsys):
    rows = write_rows(tmp_path / "a.jsonl", "2 labels")
    bad = write_lines(tmp_path / "bad.jsonl", {"text": "a", "label": 0}, {"text": "a", "label": 7})
    megazoo.from_pretrained(language_models / "gpt2", num_labels=3).save_parallelized(
        tmp_path / "three"
    )
    needs = "a classifier of 2 labels needs JSONL with text and label in each line"
    classifier = ["--load", tmp_path / "three", "--load-weights-only", "--tokenizer", "byte"]
    sizes = ["--device", "cpu", "--seq-length", "32"]
    for arguments, code, message in [
        (["--num-labels", 2], 2, f"data stdlib: {needs}"),
        (["--num-labels", 0, "--data", rows], 2, "--num-labels 0 must be at least 1"),
        (classifier, 2, "data stdlib: a classifier of 3 labels needs JSONL"),
        (
            [*classifier, "--num-labels", 2, "--data", rows],
            2,
            "is a classifier with 3 labels, not",
        ),
        (["--num-labels", 2, "--data", bad], 1, "line 2: label 7 is not a whole number from 0"),
    ]:
        told = run_main(pretrain, monkeypatch, capsys, *sizes, *arguments)
        assert (told[0], told[2].count("\n"), message in told[2]) == (code, 1, True), told


def test_evaluate_tells_mistakes_in_one_line(language_models, tmp_path, monkeypatch, capsys):
    rows = write_rows(tmp_path / "a.jsonl", "2 labels")
    bad = write_lines(tmp_path / "bad.jsonl", {"text": "a"}, {"text": "a", "label": 2})
    none = write_lines(tmp_path / "none.jsonl", {"text": ""})
    megazoo.from_pretrained(language_models / "gpt2", num_labels=2).save_parallelized(
        tmp_path / "two"
    )
    two, label = tmp_path / "two", "label 2 is not a whole number from 0 to 1"
    for model, arguments, message in [
        (
            language_models / "gpt2",
            ["--labels", rows],
            "gpt2 is not a classifier (`megazoo pretrain --num-labels`",
        ),
        (two, ["--labels", rows, "--text", rows], "use exactly one of --text, --choices"),
        (two, ["--labels", bad], f"{bad}, line 2: {label}"),
        (two, ["--labels", none], f"{none}, line 1: its text has no tokens"),
        (two, ["--labels", rows, "--seq-length", 33], "--seq-length 33 must be from 1 to"),
        (two, ["--text", rows], "a classifier does not score tokens"),
    ]:
        arguments = [model, *arguments, "--tokenizer", "byte"]
        code, _, error = run_main(evaluate, monkeypatch, capsys, *arguments)
        assert (code, error.count("\n"), message in error) == (2, 1, True), error
