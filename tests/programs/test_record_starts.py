"""Records of runs that are started, stopped and started again; of files that have moved or can't be
read; and how a check is stopped."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megazoo.cli import run_record
from megazoo.cli.run_record import InputFile, Recorded, Resumed, Step
from megazoo.errors import UserError
from tests.support.pretraining import ROOT, SMALL, TORCHRUN, start
from tests.support.processes import Program
from tests.support.programs import run_tool
from tools import check_run

TEXTS = "".join(json.dumps({"text": f"line {n} of a text, {n * n}"}) + "\n" for n in range(200))
ODD = "\U0001f600{role}\x7f\u2028{content}\n"


def checked(directory, *arguments):
    return run_tool("check_run.py", directory, *arguments)


def read(directory):
    return json.loads((directory / "record.json").read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text(TEXTS)
    return path


@pytest.fixture
def begun(data, tmp_path):
    """The arguments of a run of four steps that has saved two of them, and its record."""
    saved, record = tmp_path / "saved", tmp_path / "record"
    common = (*SMALL, "--data", data, "--save", saved, "--record", record, "--save-interval", 2)
    common = (*common, "--eval-steps", 0, "--lr-decay-steps", 6)
    assert start([], *common, "--steps", 4).returncode == 0
    shutil.rmtree(saved / "step_00000004")
    (saved / "latest").write_text("step_00000002")
    return (*common, "--load", saved), record


def test_one_process_repeats_it_to_the_bit(tmp_path):
    """With as many threads; with a switch that is off where the preset's is on, and with texts that
    TOML writes otherwise than JSON."""
    record = tmp_path / "record"
    arguments = (*SMALL, "--mock-data", "--steps", 3, "--tie-embeddings", "False")
    done = start([], *arguments, "--chat-template", ODD, "--record", record)
    assert done.returncode == 0, done.stderr
    assert read(record)["settings"]["tie_embeddings"] is False
    done = checked(record)
    assert "3 steps are the same to the bit" in done.stdout, done.stderr
    assert " then, " not in done.stdout


@pytest.mark.parametrize(
    "value", [ODD, "a\\b\"'\t\x00\x1f\ud7ff", ["\U0010ffff", "x"], 1e-5, False]
)
def test_settings_in_toml(value):
    assert tomllib.loads(f"x = {check_run.toml(value)}")["x"] == value


def test_a_run_that_goes_on_otherwise_is_compared_until_there(begun):
    arguments, record = begun
    done = start([], *arguments, "--steps", 5, "--lr", 0.004)
    assert done.returncode == 0, done.stderr
    (resumed,) = read(record)["resumed"]
    assert resumed == {"step": 2, "changes": ["lr: 0.005 then, 0.004 now"]}
    done = checked(record)
    assert done.returncode == 0, done.stderr
    assert "after step 2 the run went on otherwise" in done.stdout
    assert "  lr: 0.005 then, 0.004 now\n" in done.stdout
    assert "2 steps are the same to the bit" in done.stdout


def test_a_run_that_goes_on_from_where_its_record_begins(begun, tmp_path):
    """Its record begins anew, with the settings that it has now."""
    arguments, _ = begun
    arguments = (*arguments, "--save", tmp_path / "other", "--record", tmp_path / "second")
    assert start([], *arguments, "--steps", 5).returncode == 0
    assert start([], *arguments, "--steps", 4, "--lr", 0.004).returncode == 0
    said = read(tmp_path / "second")
    assert (said["first_step"], said["settings"]["lr"], said["resumed"]) == (2, 0.004, [])
    lines = (tmp_path / "second" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 4]


def test_a_full_disk_leaves_the_steps_before(begun):
    arguments, record = begun
    before = (record / "steps.jsonl").read_text()
    command = [sys.executable, "pretrain_gpt.py", *map(str, (*arguments, "--steps", 5))]

    def files_are_short():
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))

    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=files_are_short,
    )
    assert done.returncode == 1
    assert f"--record {record}: File too large" in done.stderr
    assert (record / "steps.jsonl").read_text() == before


def test_a_restart_leaves_the_record_of_another_run(begun, data, tmp_path):
    """torchrun starts a run again that has refused to write over it."""
    _, record = begun
    before = [(record / name).read_text() for name in ("record.json", "steps.jsonl")]
    torchrun = [*TORCHRUN, "--nproc-per-node", "1", "--max-restarts", "1"]
    done = start(torchrun, *SMALL, "--steps", 2, "--data", data, "--record", record)
    assert done.returncode != 0
    assert "holds the record of another run" in done.stderr
    assert [(record / name).read_text() for name in ("record.json", "steps.jsonl")] == before


def test_weights_and_adapters_that_have_moved(data, tmp_path):
    """The tokenizer is where they are; the directory above that of a step will do."""
    base, lora, record = (tmp_path / name for name in ("base", "lora", "record"))
    common = (*SMALL, "--data", data, "--eval-steps", 0, "--warmup-steps", 0)
    assert start([], *common, "--steps", 1, "--save", base).returncode == 0
    adapters = (*common, "--load", base, "--lora-rank", 2, "--steps", 1, "--save", lora)
    assert start([], *adapters).returncode == 0
    done = start([], "--device", "cpu", "--lora-load", lora, "--steps", 3, "--record", record)
    assert done.returncode == 0, done.stderr
    base.rename(tmp_path / "base2")
    assert "no directory" in (told := checked(record).stderr)
    assert "--load says where" in told
    lora.rename(tmp_path / "lora2")
    assert "--lora-load says where" in checked(record, "--load", tmp_path / "base2").stderr
    moved = ("--load", tmp_path / "base2", "--lora-load", tmp_path / "lora2")
    done = checked(record, *moved)
    assert "2 steps are the same to the bit" in done.stdout, done.stderr
    (change,) = (tmp_path / "lora2").glob("step_*")
    (change / "added").write_text("")
    assert "added (weights) is new" in checked(record, *moved).stdout


def test_layouts_that_cant_be_are_refused_before_any_training(tmp_path):
    record = tmp_path / "record"
    assert start([], *SMALL, "--mock-data", "--steps", 2, "--record", record).returncode == 0
    for layout, told in {"dp3": "dp3: the global batch of 8 is not", "pp9": "pp9: "}.items():
        done = checked(record, "--layouts", f"tp1,{layout}")
        assert done.returncode == 2
        assert told in done.stderr
        assert done.stderr.count("\n") == 1
        assert "training" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_stopped_leaves_nothing(number, tmp_path, monkeypatch):
    record, here = tmp_path / "record", tmp_path / "here"
    here.mkdir()
    assert start([], *SMALL, "--mock-data", "--steps", 2, "--record", record).returncode == 0
    lines = "".join(f'{{"step": {step}, "loss": 5.0}}\n' for step in range(1, 100_001))
    (record / "steps.jsonl").write_text(lines)
    monkeypatch.setenv("TMPDIR", str(here))
    words = ("--steps", 100_000, "--layouts", "tp2,pp2")
    program = Program("tools/check_run.py", record, *words)
    try:
        program.wait_for("training 100000 steps at tp2")
        program.wait_for_ranks(2)
        assert list(here.glob("megazoo-check-*"))
        os.kill(program.process.pid, number)
        assert program.process.wait(60) == 128 + number
        assert not any(Path(f"/proc/{pid}").exists() for pid in program.ranks)
        assert not list(here.glob("megazoo-check-*"))
        assert "pp2" not in "".join(program.out)
        assert "error" not in "".join(program.err)
    finally:
        program.process.kill()


def recorded(**others):
    values = dict(
        format=1, run="a", command=[], family="gpt2", config={}, settings={}, dp=1, first_step=2,
        inputs={}, files=[], versions={}, machine={},
    )  # fmt: skip
    return Recorded(**values | others)


def test_steps_after_a_gap_or_a_change_are_not_compared(tmp_path, capsys):
    steps = [Step(n, 1.0) for n in (3, 4, 6, 7)]
    found = check_run.steps_to_train(tmp_path, recorded(), steps)
    assert [step.step for step in found] == [3, 4]
    resumed = [Resumed(3, []), Resumed(3, ["lr: 1\n2"])]
    found = check_run.steps_to_train(tmp_path, recorded(resumed=resumed), steps)
    assert [step.step for step in found] == [3]
    assert "lr: 1?2\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="has no steps"):
        check_run.steps_to_train(tmp_path, recorded(first_step=0), steps)


def test_a_loss_that_is_no_number_is_left_out():
    """JSON has no nan: other programs could not read the line."""
    assert run_record._line(Step(3, 1.5, validation_loss=math.nan)) == '{"step": 3, "loss": 1.5}'


def test_files_are_named_in_order_and_many_are_fast():
    files = [InputFile("data", f"{n}\n", 1, "0" * 64) for n in range(100_000)]
    assert run_record.changed_files([], files[:3]) == [f"{n}? (data) is new" for n in range(3)]
    assert run_record.changed_files(files, files) == []


def test_weights_in_ranks_directories_and_a_pipe(tmp_path):
    """Those of Megatron-LM lie a directory further down."""
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    inputs = {"data": [], "tokenizer": [], "weights": [str(tmp_path)], "import": []}
    (found,) = run_record.checksums(inputs)
    assert (found.name, found.bytes) == ("mp_rank_00/model_optim_rng.pt", 7)
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UserError, match="is a device or a pipe"):
        run_record.checksums({**inputs, "import": [str(tmp_path / "pipe.py")]})


def test_the_program_counts_as_source_and_no_foreign_repository_does(tmp_path, monkeypatch):
    """As where megazoo is installed below a project of the user's."""
    inside = tmp_path / "site-packages" / "megazoo" / "cli"
    inside.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    commit = ["commit", "-q", "--allow-empty", "-m", "one"]
    subprocess.run(["git", "-C", tmp_path, *identity, *commit], check=True)
    monkeypatch.setattr(run_record, "__file__", str(inside / "run_record.py"))
    before = run_record.versions()
    assert "commit" not in before
    (tmp_path / "site-packages" / "pretrain_gpt.py").write_text("print()")
    assert run_record.versions()["source"] != before["source"]
