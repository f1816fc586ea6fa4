"""Classifiers trained by the program: the losses and predictions of transformers and torch, what
evaluate.py writes, and what is exported."""

import re

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import megazoo
from megazoo import pretrain
from megazoo.data import Blend
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.formats.source import SavedModel
from megazoo.models.pretrained import open_source
from megazoo.programs import evaluate
from tests.support.classifiers import (
    EOD,
    LENGTH,
    PROGRAM,
    SEED,
    batch_of,
    read_rows,
    write_language_models,
    write_rows,
)
from tests.support.data import write_lines
from tests.support.inference import run_main
from tests.support.pretraining import losses, records
from tests.support.sampling import marked_slow


@pytest.fixture(scope="module")
def language_models(tmp_path_factory):
    return write_language_models(tmp_path_factory.mktemp("hf"))


def by_transformers(directory, kind, rows, steps, train_only=None):
    """The classifier that transformers and torch train from our first head, its losses, and the
    rows that it is trained on: the first 48, in our order."""
    number = {"2 labels": 2, "a number": 1}.get(kind, 3)
    ours = megazoo.from_pretrained(directory, num_labels=number, pad_token_id=EOD, seed=SEED)
    source = open_source(directory)
    pad = EOD if source.pad_token_id is None else source.pad_token_id
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=number, pad_token_id=pad
    )
    model.score.weight.data.copy_(ours.score.weight.data)
    learns = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(train_only is None or train_only in name)
        learns += [parameter] if parameter.requires_grad else []
    groups = [
        {"params": [p for p in learns if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in learns if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    places = Blend([range(48)], seed=SEED).places(0, 8 * steps)
    found = []
    for step in range(steps):
        ids, labels = batch_of([rows[i] for _, i in places[8 * step : 8 * step + 8]], pad)
        optimizer.zero_grad()
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learns, 1.0)
        optimizer.step()
        found.append(loss.item())
    return model.eval(), found, pad


def told_of(model, rows, pad, kind) -> dict:
    """The evaluation of rows by transformers' logits and plain counts."""
    ids, labels = batch_of(rows, pad)
    with torch.no_grad():
        out = model(ids, labels=labels)
    told = {"eval_loss": out.loss.item()}
    pairs = list(zip(out.logits.tolist(), labels.tolist(), strict=True))
    if kind == "any of 3":
        right = [[float(score > 0) for score in scores] == label for scores, label in pairs]
        told["eval_accuracy"] = sum(right) / len(pairs)
    elif kind != "a number":
        pairs = [(scores.index(max(scores)), label) for scores, label in pairs]
        told["eval_accuracy"] = sum(found == label for found, label in pairs) / len(pairs)
    if kind == "2 labels":
        both = sum(found == label == 1 for found, label in pairs)
        wrong = sum(found != label for found, label in pairs)
        told["eval_f1"] = both / (both + wrong / 2)
    return told


CASES = [
    ("gpt2", "2 labels", None),
    ("llama", "3 labels", None),
    ("mpt", "any of 3", None),
    ("llama", "a number", None),
    ("gpt2", "3 labels", "score"),
]


@pytest.mark.parametrize(
    ("family", "kind", "train_only"), marked_slow(CASES, lambda number, _: number in (0, 1))
)
def test_training_and_evaluation_are_those_of_transformers(
    language_models, tmp_path, monkeypatch, capsys, family, kind, train_only
):
    file, run, steps = write_rows(tmp_path / "a.jsonl", kind), tmp_path / "run", 12
    directory, rows = language_models / family, read_rows(tmp_path / "a.jsonl")
    model, expected, pad = by_transformers(directory, kind, rows, steps, train_only)
    number = model.config.num_labels
    arguments = [*PROGRAM, "--load", directory, "--num-labels", number, "--data", file]
    arguments += ["--metrics", tmp_path / "m", "--save", run, "--steps", steps]
    arguments += ["--train-only", train_only] if train_only else []
    pretrain.main(list(map(str, arguments)))
    out = capsys.readouterr().out
    labels = "1 label" if number == 1 else f"{number} labels"
    assert out.startswith(f"{family}, classifier of {labels} (a new head), ")
    assert f"tools/evaluate.py {run} --labels FILE.jsonl" in out
    assert "nats per token" not in out
    found = losses(tmp_path / "m")
    assert max(abs(found[n] - loss) for n, loss in enumerate(expected, 1)) < 1e-5
    told = told_of(model, rows[48:], pad, kind)
    kept = {key: value for key, value in records(tmp_path / "m")[-1].items() if key != "step"}
    assert kept == pytest.approx(told, abs=2e-5)
    check_predictions(model, rows, pad, kind, run, file, monkeypatch, capsys)
    check_export(run, rows, pad, tmp_path)
    trained = SavedModel(run / f"step_{steps:08d}")
    assert trained.config.pad_token_id == pad
    if train_only:
        check_frozen(trained, directory)


def check_predictions(model, rows, pad, kind, run, file, monkeypatch, capsys):
    """What evaluate.py says and writes of the rows, and of the same rows without labels."""
    output = run / "predictions.jsonl"
    arguments = [run, "--labels", file, "--output", output, "--batch-size", 7]
    arguments += ["--seq-length", LENGTH]
    code, out, _ = run_main(evaluate, monkeypatch, capsys, *arguments)
    assert code == 0
    said = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert said.pop("rows") == "64, 64 of them with a label"
    told = told_of(model, rows, pad, kind)
    assert {f"eval_{k}": float(v) for k, v in said.items()} == pytest.approx(told, abs=2e-5)
    with torch.no_grad():
        logits = model(batch_of(rows, pad)[0]).logits.tolist()
    for row, line, scores in zip(rows, read_rows(output), logits, strict=True):
        assert {key: line[key] for key in row} == row
        assert line["scores"] == pytest.approx(scores, abs=1e-4)
        assert line.keys() - row.keys() == {"prediction", "scores"}
        if kind == "a number":
            assert line["prediction"] == line["scores"][0]
        elif kind == "any of 3":
            assert line["prediction"] == [int(score > 0) for score in scores]
        else:
            assert line["prediction"] == scores.index(max(scores))
    unlabelled = [{k: v for k, v in row.items() if k != "label"} for row in rows]
    write_lines(file.with_name("b.jsonl"), *unlabelled)
    arguments[2], labelled = file.with_name("b.jsonl"), read_rows(output)
    code, out, _ = run_main(evaluate, monkeypatch, capsys, *arguments)
    assert (code, out.split()) == (0, "rows 64, 0 of them with a label".split())
    # the config says what the labels are
    found, expected = (
        [line["prediction"] for line in part] for part in (read_rows(output), labelled)
    )
    assert found == expected


def check_export(run, rows, pad, tmp_path):
    """The exported directory classifies rows as the checkpoint does, by its own pad token."""
    write_hugging_face(open_source(run), tmp_path / "hf")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    ids, _ = batch_of(rows, pad)
    ours = megazoo.from_pretrained(run).eval()
    with torch.no_grad():
        assert (theirs(ids).logits - ours(ids).logits).abs().max() < 1e-5
    assert theirs.config.pad_token_id == pad


def check_frozen(trained, directory):
    """All but the head is what it was, to the bit."""
    after = megazoo.from_pretrained(trained.path)
    before = megazoo.from_pretrained(directory, num_labels=3, pad_token_id=EOD, seed=SEED)
    changed = [
        name
        for (name, a), (_, b) in zip(
            after.named_parameters(), before.named_parameters(), strict=True
        )
        if not torch.equal(a, b)
    ]
    assert changed == ["score.weight"]


def test_flags_that_say_nothing_of_a_classifier_are_refused(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", "2 labels")
    words = [*PROGRAM, "--num-labels", "2", "--data", str(file), "--steps", "1"]
    pretrain.prepare(words)
    for flag in ("packing", "separate-documents"):
        told = f"--{flag} cannot be used with a classifier (each row is one text): remove it"
        with pytest.raises(megazoo.UserError, match=f"^{re.escape(told)}$"):
            pretrain.prepare([*words, f"--{flag}"])
