"""A source of training data of the user's: tests/support/own_csv.py, run with --import."""

import csv
import hashlib
import json
import shutil
import sys

import pytest

from megazoo import pretrain
from megazoo.data import (
    Rows,
    Source,
    check_data,
    fingerprints,
    needs_preparation,
    register_source,
    sources,
)
from megazoo.data.conversations import CHATML
from megazoo.data.labels import labels_in
from megazoo.data.sources import find_source
from megazoo.errors import UserError
from megazoo.programs import check_run
from megazoo.user_files import run_file
from tests.support.data import open_all, write_lines
from tests.support.inference import run_main
from tests.support.pretraining import ROOT, SMALL, losses
from tests.support.programs import python

OWN = ROOT / "tests" / "support" / "own_csv.py"
TEXTS = [f'line {n} of a text, with "quotes",\nand {n * n}' for n in range(60)]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The registered sources; those of a test are removed at its end."""
    monkeypatch.setattr(sources, "CUSTOM", [])


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def data(tmp_path):
    return write_csv(tmp_path / "texts.csv", [{"n": 1, "text": text} for text in TEXTS])


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a program in this process; it starts without registered sources. Returns its exit code,
    output and errors."""
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # check_run sets it

    def start(program, *arguments):
        sources.CUSTOM.clear()
        capsys.readouterr()
        return run_main(program, monkeypatch, capsys, *arguments)

    return start


def test_a_run_its_record_and_its_resume(data, tmp_path, run):
    saved, record, metrics = tmp_path / "saved", tmp_path / "record", tmp_path / "metrics"
    words = ["--import", OWN, "--data", data, "--split", "90,10", "--record", record]
    words += ["--metrics", metrics, "--save", saved, "--save-interval", 2, "--lr-decay-steps", 4]
    code, _, errors = run(pretrain, *SMALL, *words, "--steps", 4)
    assert (code, "warning" in errors) == (0, False), errors
    full = losses(metrics)

    # The same texts in JSONL give the same losses.
    lines = write_lines(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    same = ["--data", lines, "--split", "90,10", "--metrics", tmp_path / "same", "--steps", 4]
    assert run(pretrain, *SMALL, *same)[0] == 0
    assert losses(tmp_path / "same") == full

    (file,) = (each for each in files_in(record) if each["kind"] == "data")
    digest, size = hashlib.sha256(data.read_bytes()).hexdigest(), data.stat().st_size
    assert file == {"kind": "data", "name": data.name, "bytes": size, "sha256": digest}
    trainer = json.loads((saved / "step_00000002" / "trainer.json").read_text())
    (stored,) = trainer["data"]
    assert (stored["source"], stored["bytes"], stored["documents"]) == (str(data), size, len(TEXTS))
    assert stored["checksum"]

    code, out, errors = run(check_run, record, "--import", OWN)
    assert code == 0, errors
    assert "2 files are unchanged" in out
    assert "4 steps are bitwise identical" in out

    shutil.rmtree(saved / "step_00000004")
    (saved / "latest").write_text("step_00000002")
    resume = ["--import", OWN, "--load", saved, "--device", "cpu", "--steps", 4]
    code, _, errors = run(pretrain, *resume, "--metrics", tmp_path / "resumed")
    assert (code, "warning" in errors) == (0, False), errors
    assert losses(tmp_path / "resumed") == {step: full[step] for step in (3, 4)}

    write_csv(data, [{"n": 1, "text": text} for text in [*TEXTS, "more"]])
    code, _, errors = run(pretrain, *resume)
    assert code == 0, errors
    assert f"warning: {data} has changed since the checkpoint: {size:,} bytes then" in errors
    code, out, _ = run(check_run, record, "--import", OWN)
    assert (code, f"texts.csv (data) had {size:,} bytes" in out) == (1, True)


def files_in(record):
    return json.loads((record / "record.json").read_text())["files"]


def test_without_the_import_the_usual_error_is_printed(data, run):
    code, _, errors = run(pretrain, *SMALL, "--data", data)
    assert code == 2
    assert f"--data {str(data)!r} is not found, or not supported: use stdlib" in errors
    code, _, errors = run(pretrain, *SMALL, "--import", OWN, "--data", "missing.csv")
    assert (code, "'missing.csv' is not found, or not supported" in errors) == (2, True)


def test_the_keys_of_the_rows_decide_the_format(tmp_path):
    run_file(OWN)
    talks = [{"prompt": f"{n} + 1 = ", "completion": str(n + 1)} for n in range(10)]
    lines = write_lines(tmp_path / "talks.jsonl", *talks)
    table = write_csv(tmp_path / "talks.csv", talks)
    settings = {"chat_template": CHATML, "split": "100,0"}
    found, expected = (open_all(path, **settings).training for path in (table, lines))
    for one, other in zip(found.samples(0, 10), expected.samples(0, 10), strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.targets.tolist() == other.targets.tolist()
        assert -100 in one.targets
    wrong = write_csv(tmp_path / "wrong.csv", [{"title": "a"}])
    with pytest.raises(UserError, match=r"wrong\.csv, row 1: it needs text"):
        open_all(wrong)
    wrong.write_text("n,text\n1,a\n2\n")
    with pytest.raises(UserError, match=r"wrong\.csv, row 2: no text under 'text'"):
        open_all(wrong)
    wrong.write_text("text\n")
    with pytest.raises(UserError, match=r"wrong\.csv has no rows"):
        open_all(wrong)
    wrong.write_bytes(b"text\n" + b"a\n" * 10_000 + b"\xff\n")
    with pytest.raises(UserError, match=r"wrong\.csv can't be read: 'utf-8' codec"):
        open_all(wrong)


def test_a_classifier_trains_on_rows_with_labels(tmp_path):
    rows = [{"text": f"text {n}", "label": n % 2} for n in range(10)]

    @register_source
    class Labelled(Rows):
        suffixes = (".labelled",)

        def rows(self):
            return rows

    (tmp_path / "rows.labelled").touch()
    lines = write_lines(tmp_path / "rows.jsonl", *rows)
    labels = labels_in([str(tmp_path / "rows.labelled")], 2, None)
    found, expected = (
        open_all(path, split="100,0", labels=labels).training
        for path in (tmp_path / "rows.labelled", lines)
    )
    for one, other in zip(found.samples(0, 10), expected.samples(0, 10), strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.label == other.label


def test_tokens_are_created_again_if_the_python_file_changes(data, tmp_path):
    copy, code = tmp_path / "changing_csv.py", OWN.read_text()
    fewer = code.replace("csv.DictReader(file)", "list(csv.DictReader(file))[:1]")
    for text, documents, caches in ((code, 60, 1), (code, 60, 1), (fewer, 1, 2)):
        copy.write_text(text)
        run_file(copy)
        (stored,) = fingerprints([str(data)], "byte", None)
        assert stored["documents"] == documents
        assert len(list(tmp_path.glob("texts.csv.tokens/*.idx"))) == caches


def test_a_custom_source_is_asked_before_those_of_megazoo():
    @register_source
    class Own(Source):
        @classmethod
        def accepts(cls, name):
            return name.startswith("own:") or name == "stdlib"

    assert isinstance(find_source("stdlib"), Own)
    assert not isinstance(find_source("mock"), Own)
    assert find_source("missing.csv") is None
    nothing = {"source": "own:x", "bytes": 0, "documents": 0, "checksum": 0}
    assert fingerprints(["own:x"], "byte", None) == [nothing]
    assert not needs_preparation(check_data(["own:x"], "95,5"))
