"""Functions that a file of --import registers: what they are called with, when, and what a mistake
in them does."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megazoo
from megazoo import UserError, callbacks, pretrain
from megazoo.cli import mistakes
from tests.support.inference import run_main
from tests.support.programs import python

ROOT = Path(__file__).parents[3]
SMALL = (
    "--hidden-size 16 --heads 2 --layers 2 --max-positions 16 --seq-length 16 --device cpu "
    "--eval-steps 1 --global-batch-size 4 --micro-batch-size 1 --warmup-steps 1"
).split()
FILE = """
import json
import megazoo

def tell(kind, mark=""):
    def callback(step, values, model):
        whole = ("path" not in values) or (values["path"] / "megazoo.json").is_file()
        rows = [p.numel() for p in model.parameters()]
        with open(f"{FOLDER}/{model.ctx.rank}", "a") as file:
            values = {key: str(value) if key == "path" else value for key, value in values.items()}
            file.write(json.dumps([kind + mark, step, values, whole, len(rows) > 0]) + "\\n")
    return callback

megazoo.on_step(tell("step"))
megazoo.on_step(tell("step", " again"))
megazoo.on_evaluation(tell("evaluation"))
megazoo.on_save(tell("save"))
"""


@pytest.fixture(autouse=True)
def _registers():
    """Take out again what a test registers in this process."""
    registers = (callbacks._steps, callbacks._evaluations, callbacks._saves, mistakes.user_files)
    yield
    for register in registers:
        register.clear()


def train_with(arguments: list[str]) -> None:
    """Run pretrain.main, without leaving what it registers on the rank."""
    try:
        pretrain.main(arguments)
    finally:
        for register in (callbacks._steps, callbacks._evaluations, callbacks._saves):
            register.clear()


@pytest.mark.parametrize("background", [False, True], ids=["save", "async save"])
def test_every_rank_calls_them_in_order(background, ranks, tmp_path):
    file, run, metrics = tmp_path / "mine.py", tmp_path / "run", tmp_path / "metrics"
    file.write_text(FILE.replace("{FOLDER}", str(tmp_path)))
    job = [*SMALL, *"--tp 2 --pp 2 --steps 3".split()]
    job += ["--import", str(file), "--metrics", str(metrics)]
    job += ["--save", str(run), "--save-interval", "2", *(["--async-save"] if background else [])]
    ranks(train_with, 4, job)
    called = {
        rank: [json.loads(line) for line in (tmp_path / str(rank)).read_text().splitlines()]
        for rank in range(4)
    }
    first, second, third = ([("step", n), ("step again", n)] for n in (1, 2, 3))
    expected = [*first, *second, ("save", 2), *third, ("save", 3), ("evaluation", 3)]
    if background:  # known when the next save begins
        expected = [*first, *second, *third, ("save", 2), ("evaluation", 3), ("save", 3)]
    for calls in called.values():
        assert [(kind, step) for kind, step, *_ in calls] == expected
        assert all(whole and model for *_, whole, model in calls)
    told = [json.loads(line) for line in metrics.read_text().splitlines()]
    first = [
        {"step": step, **values}
        for kind, step, values, *_ in called[0]
        if kind in ("step", "evaluation")
    ]
    assert first == told
    same = [
        [values["loss"] for kind, _, values, *_ in called[rank] if kind == "step"]
        for rank in range(4)
    ]
    assert same == [same[0]] * 4
    paths = [values["path"] for kind, _, values, *_ in called[0] if kind == "save"]
    assert paths == [str(run / f"step_0000000{n}") for n in (2, 3)]


def test_a_checkpoint_that_failed_is_not_called_saved(tmp_path):
    saved = []
    megazoo.on_save(lambda step, values, model: saved.append(step))
    run = tmp_path / "run"

    @megazoo.on_step
    def spoil(step, values, model):
        shutil.rmtree(run) if run.is_dir() else run.unlink(missing_ok=True)
        if step == 1:
            run.write_text("a file")

    how = "--steps 2 --save-interval 1 --on-save-error continue".split()
    pretrain.main([*SMALL, *how, "--save", str(run)])
    assert saved == [2]


def test_an_exception_ends_the_run(tmp_path, monkeypatch, capsys):
    told = "pretrain_gpt.py: error: check, called after a step: too hot"
    for name, raises, line in [
        ("hot.py", "megazoo.UserError('too hot')", told),
        ("bug.py", "ValueError('a bug')", "ValueError: a bug"),
    ]:
        (file := tmp_path / name).write_text(
            "import megazoo\n\n@megazoo.on_step\ndef check(step, values, model):\n"
            f"    raise {raises}\n"
        )
        words = [*SMALL, "--steps", "2", "--import", file]
        code, _, error = run_main(pretrain, monkeypatch, capsys, *words)
        callbacks._steps.clear()
        assert (code, error.splitlines()[-1]) == (1, line)
        assert ("Traceback" in error) == ("bug" in line)


def test_one_ranks_exception_ends_the_run_in_one_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import megazoo\n\n@megazoo.on_step\ndef check(step, values, model):\n"
        "    if model.ctx.rank == 1:\n"
        "        raise megazoo.UserError('too hot')\n"
    )
    job = [*SMALL, *"--tp 2 --steps 2 --import".split(), str(file)]
    command = [python(), "pretrain_gpt.py", *job]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("pretrain_gpt.py: ")]
    assert lines == ["pretrain_gpt.py: error: rank 1 failed: check, called after a step: too hot"]
    assert "too hot" not in done.stderr.replace(lines[0], "")


def test_after_an_exception_nothing_more_is_called(tmp_path):
    """The first save, in the background, is finished all the same."""
    saved, run = [], tmp_path / "run"
    megazoo.on_save(lambda step, values, model: saved.append(step))

    @megazoo.on_step
    def fail(step, values, model):
        if step == 2:
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        pretrain.main(
            [*SMALL, "--steps", "3", "--save", str(run), "--save-interval", "1", "--async-save"]
        )
    assert saved == []
    assert (run / "step_00000001" / "megazoo.json").is_file()


WANDB = """
import json
from pathlib import Path
from types import SimpleNamespace

class Error(Exception):
    pass

def told(*words):
    with Path(__file__).with_name("told").open("a") as file:
        file.write(json.dumps(words) + "\\n")

def init(**how):
    told("init", how)
    if how["project"] == "forbidden":
        raise Error("no such project")
    return SimpleNamespace(
        id=how["id"] or "run-1",
        define_metric=lambda *names, **how: told("define", names, how),
        log=lambda values: told("log", values),
        finish=lambda exit_code: told("finish", exit_code),
    )
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A package wandb that writes down what it is told; returns the calls so far."""
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def test_wandb_is_told_what_the_metrics_file_says(wandb, tmp_path):
    metrics, run = tmp_path / "metrics", tmp_path / "run"
    job = ["--metrics", str(metrics), "--wandb", "mine", "--save", str(run), "--device", "cpu"]
    pretrain.main([*SMALL, *job, "--steps", "2"])
    init, define, *logs, finish = wandb()
    config = init[1].pop("config")
    assert init == ["init", {"project": "mine", "id": None, "resume": "allow"}]
    assert (config["hidden_size"], config["global_batch_size"], config["tp"]) == (16, 4, 1)
    assert define == ["define", ["*"], {"step_metric": "step"}]
    assert finish == ["finish", 0]
    expected = []
    for record in map(json.loads, metrics.read_text().splitlines()):
        kind = "eval" if "eval_loss" in record else "train"
        names = {
            key: key if key == "step" else f"{kind}/{key.removeprefix('eval_')}" for key in record
        }
        expected.append(["log", {names[key]: value for key, value in record.items()}])
    assert logs == expected
    pretrain.main([*job, "--load", str(run), "--steps", "3"])
    assert wandb()[len(logs) + 3][1]["id"] == "run-1"  # the run goes on in the same one
    pretrain.main(["--load", str(run), "--save", str(run), "--device", "cpu", "--steps", "4"])
    pretrain.main([*job, "--load", str(run), "--steps", "5"])
    assert [words[1]["id"] for words in wandb() if words[0] == "init"] == [None, "run-1", "run-1"]


TRACKIO = """
import json
from pathlib import Path
from types import SimpleNamespace

def told(*words):
    with Path(__file__).with_name("told").open("a") as file:
        file.write(json.dumps(words) + "\\n")

def init(project, **how):
    told("init", project, how)
    if project == "for/bidden":
        raise ValueError("no such project")
    return SimpleNamespace(
        name=how["name"] or "dainty-sunset-0",
        log=lambda values, step: told("log", {"step": step, **values}),
    )

def finish():
    told("finish")
    raise RuntimeError("the disk is full")
"""


@pytest.mark.filterwarnings("ignore:--trackio could not be written")
def test_trackio_is_told_what_the_metrics_file_says(tmp_path, monkeypatch, capsys):
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    job = ["--trackio", "mine", "--save", str(run), "--device", "cpu"]
    try:
        pretrain.main([*SMALL, *job, "--steps", "2", "--metrics", str(tmp_path / "metrics")])
        assert "--trackio lost at the end: the disk is full" in capsys.readouterr().out
        pretrain.main(["--load", str(run), *job[2:], "--steps", "3"])
        pretrain.main(["--load", str(run), *job, "--steps", "4"])
        with pytest.raises(UserError, match="--trackio for/bidden: no such project"):
            pretrain.main([*SMALL, "--trackio", "for/bidden", "--steps", "1"])
    finally:
        sys.modules.pop("trackio", None)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    (init, *logs, finish), resumed, refused = told[:5], told[5], told[-1]
    assert init[2].pop("config")["hidden_size"] == 16
    assert init == ["init", "mine", {"name": None, "resume": "allow", "embed": False}]
    assert finish == ["finish"]
    for (word, values), line in zip(
        logs, (tmp_path / "metrics").read_text().splitlines(), strict=True
    ):
        record = json.loads(line)
        kind = "eval" if "eval_loss" in record else "train"
        names = {key: f"{kind}/{key.removeprefix('eval_')}" for key in record if key != "step"}
        assert word == "log"
        assert values == {"step": record["step"]} | {n: record[key] for key, n in names.items()}
    # its name outlives a start without the flag
    assert (resumed[:2], resumed[2]["name"]) == (["init", "mine"], "dainty-sunset-0")
    assert refused[:2] == ["init", "for/bidden"]


MLFLOW = """
import json
from pathlib import Path
from types import SimpleNamespace

def told(*words):
    with Path(__file__).with_name("told").open("a") as file:
        file.write(json.dumps(words) + "\\n")

def set_experiment(name):
    told("experiment", name)
    if name == "forbidden":
        raise ConnectionError("no server")

def start_run(run_id):
    told("run", run_id)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "run-1"))

def log_params(values):
    told("params", values)

def log_metrics(values, step):
    told("metrics", step, values)

def end_run(status):
    told("end", status)
"""


def test_mlflow_is_told_what_the_metrics_file_says(tmp_path, monkeypatch):
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(tmp_path)
    run, metrics = tmp_path / "run", tmp_path / "metrics"
    job = ["--mlflow", "mine", "--save", str(run), "--device", "cpu"]
    try:
        pretrain.main([*SMALL, *job, "--steps", "2", "--metrics", str(metrics)])
        pretrain.main(["--load", str(run), *job, "--steps", "3"])
        with pytest.raises(UserError, match="the loss is nan"):
            pretrain.main([*SMALL, "--mlflow", "mine", "--steps", "2", "--lr", "1e30"])
        with pytest.raises(UserError, match="--mlflow forbidden: no server"):
            pretrain.main([*SMALL, "--mlflow", "forbidden", "--steps", "1"])
    finally:
        sys.modules.pop("mlflow", None)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    (experiment, started, params, *logs, end), *rest = told[:7], *told[7:]
    assert (experiment, started, end) == (
        ["experiment", "mine"],
        ["run", None],
        ["end", "FINISHED"],
    )
    assert params[1]["hidden_size"] == "16"
    for (word, step, values), line in zip(logs, metrics.read_text().splitlines(), strict=True):
        record = json.loads(line)
        kind = "eval" if "eval_loss" in record else "train"
        names = {key: f"{kind}/{key.removeprefix('eval_')}" for key in record if key != "step"}
        assert (word, step) == ("metrics", record["step"])
        assert values == {name: record[key] for key, name in names.items()}
    assert rest[1] == ["run", "run-1"]  # a run that is resumed
    assert [words[1] for words in rest if words[0] == "end"] == ["FINISHED", "FAILED"]
    assert [words[0] for words in rest].count("params") == 1


def test_only_rank_0_tells_wandb(ranks, wandb, tmp_path):
    ranks(with_wandb, 2, tmp_path, [*SMALL, "--tp", "2", "--steps", "1", "--wandb", "mine"])
    assert [words[0] for words in wandb()] == ["init", "define", "log", "log", "finish"]


def with_wandb(folder: Path, arguments: list[str]) -> None:
    sys.path.insert(0, str(folder))
    try:
        pretrain.main(arguments)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("wandb", None)


def test_what_wandb_refuses_is_told_in_one_line(wandb):
    with pytest.raises(
        megazoo.UserError, match="--wandb forbidden: no such project; WANDB_MODE=offline needs"
    ):
        pretrain.main([*SMALL, "--steps", "1", "--wandb", "forbidden"])


def test_without_the_package_one_line_says_so(tmp_path, monkeypatch):
    """The directory wandb, which runs leave behind, is no package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        megazoo.UserError, match="--wandb needs the package wandb: install it, or remove --wandb"
    ):
        pretrain.main([*SMALL, "--steps", "1", "--wandb", "mine"])
