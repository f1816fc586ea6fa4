"""--record keeps what another needs to repeat a run, also one that is started again;
tools/check_run.py does so in any layout, and names what has changed."""

import hashlib
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from megazoo import callbacks, pretrain
from megazoo.errors import UserError
from megazoo.programs import check_run, preprocess_data
from megazoo.trainer import record as run_record
from megazoo.trainer.record import InputFile, Recorded, Resumed, Step
from tests.support.inference import run_main
from tests.support.pretraining import ROOT, SMALL, TORCHRUN, losses, start
from tests.support.processes import Program
from tests.support.programs import python

STEPS = 6
TEXTS = [{"text": f"line {n} of a text that is there to be learned, {n * n}"} for n in range(200)]
ODD = "\U0001f600{role}\x7f\u2028{content}\n"


@pytest.fixture
def checked(monkeypatch, capsys):
    """Runs tools/check_run.py in this process; its ranks are processes of their own. Returns its
    exit code, what it prints, and what it says of a mistake."""
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # it sets it

    def check(directory, *arguments):
        capsys.readouterr()
        return run_main(check_run, monkeypatch, capsys, directory, *arguments)

    return check


def train(*arguments):
    pretrain.main([*SMALL, *map(str, arguments)])


def read(directory):
    return json.loads((directory / "record.json").read_text())


def steps_in(directory):
    lines = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def repeated(out, steps, layout):
    """Whether a layout repeats the steps: within the tolerance, or, as on some CPUs, to the bit."""
    return any(
        f"\n{layout:16}{steps} steps {how}" in out for how in ("match", "are bitwise identical")
    )


def texts_of(directory):
    return [(directory / name).read_text() for name in ("record.json", "steps.jsonl")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def recorded(data, tmp_path_factory):
    """A run of tp 2, with its record and its metrics."""
    path = tmp_path_factory.mktemp("run")
    done = start(
        [], *SMALL, "--tp", 2, "--steps", STEPS, "--data", data, "--split", "90,10",
        "--record", path / "record", "--metrics", path / "metrics.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def copy(recorded, tmp_path):
    """The record, to be changed."""
    return Path(shutil.copytree(recorded / "record", tmp_path / "record"))


def change(directory, edit):
    values = read(directory)
    edit(values)
    (directory / "record.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """A run of four steps that has saved two of them, with its record."""
    path = tmp_path_factory.mktemp("stopped")
    words = ("--save-interval", 2, "--eval-steps", 0, "--lr-decay-steps", 6, "--steps", 4)
    train("--data", data, *words, "--save", path / "saved", "--record", path / "record")
    shutil.rmtree(path / "saved" / "step_00000004")
    (path / "saved" / "latest").write_text("step_00000002")
    return path


@pytest.fixture
def begun(stopped, data, tmp_path):
    """The arguments that go on with a copy of that run, and its record."""
    for name in ("saved", "record"):
        shutil.copytree(stopped / name, tmp_path / name)
    saved, record = tmp_path / "saved", tmp_path / "record"
    words = ("--data", data, "--save", saved, "--record", record, "--load", saved)
    return (*words, "--save-interval", 2, "--eval-steps", 0, "--lr-decay-steps", 6), record


def test_the_record_says_what_was_run(recorded, data):
    said = json.loads((recorded / "record" / "record.json").read_text())
    assert said["command"][0] == "pretrain_gpt.py"
    assert said["command"][said["command"].index("--data") + 1] == str(data)
    assert (said["family"], said["config"]["hidden_size"]) == ("gpt2", 32)
    assert (said["settings"]["tp"], said["dp"], said["settings"]["dtype"]) == (2, 1, "float32")
    assert said["settings"]["lr_decay_steps"] == STEPS
    (file,) = said["files"]
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    expected = {"kind": "data", "name": data.name, "bytes": data.stat().st_size, "sha256": digest}
    assert file == expected
    assert said["versions"]["torch"] == torch.__version__
    assert said["versions"]["python"] == platform.python_version()
    assert said["versions"]["numpy"] == np.__version__
    lines = [json.loads(line) for line in (recorded / "record/steps.jsonl").open()]
    found = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert found == losses(recorded / "metrics.jsonl")
    assert len(found) == STEPS
    assert lines[-1].keys() == {"step", "validation_loss"}


def test_the_same_layout_repeats_it_to_the_bit(recorded, checked):
    code, out, error = checked(recorded / "record")
    assert code == 0, error
    assert "1 files are unchanged" in out
    assert f"{STEPS} steps are bitwise identical" in out


def test_one_process_repeats_it_to_the_bit(tmp_path, checked):
    """With as many threads; with a switch that is off where the preset's is on, and with texts that
    TOML writes otherwise than JSON."""
    record = tmp_path / "record"
    words = ("--mock-data", "--steps", 3, "--tie-embeddings", "False", "--chat-template", ODD)
    train(*words, "--record", record)
    assert read(record)["settings"]["tie_embeddings"] is False
    code, out, error = checked(record)
    assert (code, "3 steps are bitwise identical" in out) == (0, True), error
    assert " then, " not in out


def test_settings_in_toml():
    for value in (ODD, "a\\b\"'\t\x00\x1f\ud7ff", ["\U0010ffff", "x"], 1e-5, False):
        assert tomllib.loads(f"x = {check_run.toml(value)}")["x"] == value


@pytest.mark.parametrize(
    "layouts", ["dp2+zero", pytest.param("pp4,dp2+zero,tp2pp2+sp", marks=pytest.mark.slow)]
)
def test_other_layouts_repeat_it(recorded, checked, layouts):
    code, out, error = checked(recorded / "record", "--layouts", layouts, "--steps", 4)
    assert code == 0, error
    for layout in layouts.split(","):
        assert repeated(out, 4, layout)


def test_changed_data_is_named(recorded, data, tmp_path, checked):
    changed = tmp_path / data.name
    changed.write_bytes(data.read_bytes().replace(b"line 7 ", b"line 8 ", 1))
    code, out, error = checked(recorded / "record", "--data", changed)
    assert code == 1
    assert "texts.jsonl (data) has the same size, but different contents" in out
    assert "1 input files of the run have changed" in error
    changed.write_bytes(data.read_bytes() + b'{"text": "more"}\n')
    _, out, _ = checked(recorded / "record", "--data", changed)
    size = data.stat().st_size
    assert f"texts.jsonl (data) had {size:,} bytes, and has {size + 17:,}" in out


def test_a_changed_token_is_named(data, tmp_path, checked):
    prefix, record = tmp_path / "tokens_text_document", tmp_path / "record"
    words = ["--input", data, "--output-prefix", tmp_path / "tokens"]
    preprocess_data.main(list(map(str, words)))
    train("--steps", 2, "--data", prefix, "--record", record)
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    code, out, error = checked(record)
    assert code == 1
    changed = "tokens_text_document.bin (data) has the same size, but different contents"
    assert out.splitlines() == [changed], "the .idx is as it was"
    assert "1 input files of the run have changed" in error


def test_steps_are_compared():
    """Gradient norms within ten times the tolerance of losses; None is of a skipped step."""
    then = [Step(1, 5.0, 2.0), Step(2, 4.0, 3.0), Step(3, 3.0, None)]
    same = ("3 steps are bitwise identical", True)
    assert check_run.compared(then, then, 1e-5) == same
    for step, ours, told in [
        (2, Step(2, 4.0 * (1 + 1e-4), 3.0), "differs at step 2: loss 4.0004"),
        (2, Step(2, 4.0, 3.0 * (1 + 2e-4)), "differs at step 2: gradient norm 3.0006"),
        (3, Step(3, 3.0, 1.0), "differs at step 3: gradient norm 1.0 instead of None (inf)"),
        (1, Step(1, math.nan, 2.0), "differs at step 1: loss nan"),
    ]:
        now = [*then[: step - 1], ours, *then[step:]]
        line, is_same = check_run.compared(then, now, 1e-5)
        assert (is_same, line.startswith(told)) == (False, True), line
    now = [Step(1, 5.0, 2.0 * (1 + 5e-5)), *then[1:]]
    line, is_same = check_run.compared(then, now, 1e-5)
    assert (is_same, "gradient norm 5.0e-05 (step 1)" in line) == (True, True), line
    assert check_run.compared(then, now[:2], 1e-5) == ("2 steps instead of 3", False)


def test_another_setting_parts(copy, checked):
    change(copy, lambda values: values["settings"].update(lr=0.002))
    code, out, error = checked(copy, "--steps", 3)
    assert code == 1
    assert "differs at step 2" in out
    assert "1 of 1 layouts differ from the record" in error


def test_weights_that_it_began_with(begun, tmp_path, checked):
    """A resumed run has a record of its own; weights that are not as they were are named."""
    arguments, _ = begun
    record, saved = tmp_path / "second", tmp_path / "saved"
    train(*arguments, "--steps", 5, "--save", tmp_path / "other", "--record", record)
    code, out, error = checked(record, "--layouts", "tp2")
    assert code == 0, error
    assert repeated(out, 3, "tp2")
    (step,) = saved.glob("step_*")
    (step / "extra.txt").write_text("new")
    assert "extra.txt (weights) is new" in checked(record)[1]
    # where the run goes on from where its record begins, that begins anew, with other settings
    words = ("--save", tmp_path / "third", "--record", record, "--lr", 0.004)
    (step / "extra.txt").unlink()
    (tmp_path / "other" / "latest").unlink()
    train(*arguments, "--steps", 4, *words)
    said = read(record)
    assert (said["first_step"], said["settings"]["lr"], said["resumed"]) == (2, 0.004, [])
    assert steps_in(record) == [3, 4]
    shutil.rmtree(saved)
    code, _, error = checked(record)
    assert code == 2
    assert "with --load" in error


def test_a_run_that_goes_on_continues_its_record(begun, monkeypatch, capsys, checked):
    """Steps after the checkpoint that it goes on from are written anew."""
    arguments, record = begun
    assert steps_in(record) == [1, 2, 3, 4]
    train(*arguments, "--steps", 5)
    assert steps_in(record) == [1, 2, 3, 4, 5]
    assert read(record)["resumed"] == [{"step": 2, "changes": []}]
    assert "5 steps are bitwise identical" in checked(record)[1]
    before = texts_of(record)
    words = (*SMALL, "--steps", 2, "--record", record)
    for restart in ("0", "1"):  # torchrun starts a run again that has refused to write over it
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        code, _, error = run_main(pretrain, monkeypatch, capsys, *words)
        assert (code, "holds the record of another run" in error) == (2, True), error
    assert texts_of(record) == before


def test_a_run_that_goes_on_otherwise_is_compared_until_there(begun, checked):
    arguments, record = begun
    train(*arguments, "--steps", 5, "--lr", 0.004)
    (resumed,) = read(record)["resumed"]
    assert resumed == {"step": 2, "changes": ["lr: 0.001 then, 0.004 now"]}
    code, out, error = checked(record)
    assert code == 0, error
    assert "after step 2 the run resumed with changes" in out
    assert "  lr: 0.001 then, 0.004 now\n" in out
    assert "2 steps are bitwise identical" in out


def test_a_full_disk_leaves_the_steps_before(begun, monkeypatch, capsys):
    arguments, record = begun
    before, write = (record / "steps.jsonl").read_text(), run_record.write_atomically
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(path, text):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            write(path, text)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(run_record, "write_atomically", filling)
    words = (*SMALL, *arguments, "--steps", 5)
    code, _, error = run_main(pretrain, monkeypatch, capsys, *words)
    assert code == 1
    assert f"--record {record}: File too large" in error
    assert (record / "steps.jsonl").read_text() == before


@pytest.fixture
def fails(data, tmp_path):
    """The arguments of a run of three steps whose first start ends after two."""
    yield (
        "--steps", 3, "--data", data, "--import", tmp_path / "mine.py",
        "--save", tmp_path / "saved", "--record", tmp_path / "record",
    )  # fmt: skip
    callbacks._steps.clear()


def test_a_restart_before_the_first_checkpoint_begins_anew(fails, tmp_path, monkeypatch, checked):
    """As torchrun starts it, which says so by a variable."""
    (tmp_path / "mine.py").write_text(
        "import os, megazoo\n\n@megazoo.on_step\ndef fail(step, values, model):\n"
        "    if step == 2 and 'TORCHELASTIC_RESTART_COUNT' not in os.environ:\n"
        "        raise KeyError('a fault of this test')\n"
    )
    with pytest.raises(KeyError, match="a fault of this test"):
        train(*fails)
    callbacks._steps.clear()
    record = tmp_path / "record"
    assert steps_in(record)[0] == 1
    with pytest.raises(UserError, match="holds the record of another run"):
        train(*fails)  # of a user, who has not seen that
    callbacks._steps.clear()
    with monkeypatch.context() as restarted:
        restarted.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        train(*fails)
    assert steps_in(record) == [1, 2, 3]
    code, _, error = checked(record)
    assert code == 2
    assert "the run imported" in error
    (tmp_path / "mine.py").write_text("# nothing\n")
    assert "mine.py (import) had" in checked(record, "--import", tmp_path / "mine.py")[1]


@pytest.mark.slow
def test_a_restart_by_torchrun_before_the_first_checkpoint_begins_anew(fails, tmp_path, checked):
    (tmp_path / "mine.py").write_text(
        "import os, megazoo\n\n@megazoo.on_step\ndef fail(step, values, model):\n"
        "    if step == 2 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os._exit(9)\n"
    )
    launcher = [*TORCHRUN, "--nproc-per-node", "1", "--max-restarts", "1"]
    done = start(launcher, *SMALL, *fails)
    assert done.returncode == 0, done.stderr
    record = tmp_path / "record"
    assert steps_in(record) == [1, 2, 3]
    code, _, error = checked(record)
    assert code == 2
    assert "the run imported" in error


def test_dropout_has_its_own_layout(data, tmp_path, checked):
    record = tmp_path / "record"
    train("--data", data, "--steps", 2, "--dropout", 0.1, "--record", record)
    assert "2 steps are bitwise identical" in checked(record)[1]
    assert repeated(checked(record, "--layouts", "pp2")[1], 2, "pp2")
    code, _, error = checked(record, "--layouts", "dp2")
    assert code == 2
    assert "dp2: the run used dropout" in error


def test_layouts_that_cant_be_are_refused_before_any_training(recorded, checked):
    for layout, told in {"dp3": "dp3: the global batch of 8 is not", "pp9": "pp9: "}.items():
        code, out, error = checked(recorded / "record", "--layouts", f"tp1,{layout}")
        assert code == 2
        assert told in error
        assert error.count("\n") == 1
        assert "training" not in out


def test_weights_and_adapters_that_have_moved(data, tmp_path, checked):
    """The tokenizer is where they are; the directory above that of a step will do."""
    base, lora, record = (tmp_path / name for name in ("base", "lora", "record"))
    common = ("--data", data, "--eval-steps", 0, "--warmup-steps", 0)
    train(*common, "--steps", 1, "--save", base)
    train(*common, "--load", base, "--lora-rank", 2, "--steps", 1, "--save", lora)
    words = ["--device", "cpu", "--lora-load", lora, "--steps", 3, "--record", record]
    pretrain.main(list(map(str, words)))
    base.rename(tmp_path / "base2")
    error = checked(record)[2]
    assert "which is not a directory: pass their new location with --load" in error
    assert "with --load" in error
    lora.rename(tmp_path / "lora2")
    assert "with --lora-load" in checked(record, "--load", tmp_path / "base2")[2]
    moved = ("--load", tmp_path / "base2", "--lora-load", tmp_path / "lora2")
    _, out, error = checked(record, *moved)
    assert "2 steps are bitwise identical" in out, error
    (change,) = (tmp_path / "lora2").glob("step_*")
    (change / "added").write_text("")
    assert "added (weights) is new" in checked(record, *moved)[1]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_check_that_is_stopped_leaves_nothing(copy, number, tmp_path, monkeypatch):
    (here := tmp_path / "here").mkdir()
    lines = "".join(f'{{"step": {step}, "loss": 5.0}}\n' for step in range(1, 100_001))
    (copy / "steps.jsonl").write_text(lines)
    monkeypatch.setenv("TMPDIR", str(here))
    words = ("--steps", 100_000, "--layouts", "tp2,pp2")
    program = Program("tools/check_run.py", copy, *words)
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


# fmt: off
FORGED = {
    "another format": (lambda v: v.update(format=2), "format"),
    "no settings": (lambda v: v.pop("settings"), "settings"),
    "a setting that writes": (lambda v: v["settings"].update(save="x"), "settings has save"),
    "an unknown setting": (lambda v: v["settings"].update(x=1), "unknown setting"),
    "no dtype": (lambda v: v["settings"].pop("dtype"), "settings lacks dtype"),
    "ranks of a wrong type": (lambda v: v["settings"].update(tp="two"), "tp"),
    "a checksum of a wrong kind": (lambda v: v["files"][0].update(sha256="x"), "sha256"),
    "a list in place of it all": (lambda v: v.update(config=[]), "config"),
    "more ranks than there are": (lambda v: v["settings"].update(tp=4096), "has 4,096 ranks"),
    "more replicas": (lambda v: v.update(dp=2**20), "has 2,097,152 ranks"),
    "ranks below 1": (lambda v: v["settings"].update(pp=-1), "pp -1 must be at least 1"),
    "steps from nowhere": (lambda v: v.update(first_step=10**9), "settings lacks load"),
    "weights that are a device": (lambda v: v["settings"].update(load="/dev/zero"), "not a direct"),
    "a tokenizer that is one": (
        lambda v: v["settings"].update(tokenizer="/dev/zero"), "unknown tokenizer"
    ),
    "data that is one": (lambda v: v["settings"].update(data=["/dev/zero"]), "is not found"),
    "data without a name": (lambda v: v["settings"].update(data=[]), "data"),
    "words for a terminal": (
        lambda v: v["inputs"].update({"import": ["\x1b[2J\nfine.py"]}), "imported ?[2J?fine.py"
    ),
}
# fmt: on

DAMAGES = {
    "missing": (lambda d: shutil.rmtree(d), "is not the record of a run"),
    "half": (lambda d: (d / "record.json").write_text("{"), "can't be read"),
    "no steps": (lambda d: (d / "steps.jsonl").unlink(), "it has no steps.jsonl"),
    "a wrong step": (lambda d: (d / "steps.jsonl").write_text('{"step": "one"}\n'), "line 1"),
    "an empty list": (lambda d: (d / "steps.jsonl").write_text(""), "has no steps"),
}


def test_forged_and_damaged_records_are_refused_in_one_line(recorded, tmp_path, checked):
    damages = {
        name: (lambda d, e=edit: change(d, e), told) for name, (edit, told) in FORGED.items()
    }
    for number, (name, (damage, told)) in enumerate((damages | DAMAGES).items()):
        copy = Path(shutil.copytree(recorded / "record", tmp_path / str(number)))
        damage(copy)
        code, _, error = checked(copy)
        assert (code, error.count("\n"), told in error) == (2, 1, True), (name, error)


def test_a_directory_that_cant_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    words = (*SMALL, "--steps", 2, "--record", tmp_path / "file")
    code, _, error = run_main(pretrain, monkeypatch, capsys, *words)
    assert code == 2
    assert f"--record: {tmp_path / 'file'} is not a directory" in error


@pytest.mark.slow
def test_the_main_job_at_pp_4_and_dp_2(tmp_path, checked):
    """That of the README, whose record has all of its settings, for its first steps."""
    config = (ROOT / "configs" / "gpt2_tiny.toml").read_text()
    lines = [line for line in config.splitlines() if not line.startswith(("save", "metrics"))]
    (tmp_path / "main.toml").write_text("\n".join(lines))
    done = start(
        [], "--config", tmp_path / "main.toml", "--record", tmp_path / "record", "--steps", 12,
        "--lr-decay-steps", 400, "--eval-steps", 0, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code, out, error = checked(tmp_path / "record", "--layouts", "pp4,dp2")
    assert code == 0, error
    assert repeated(out, 10, "pp4")
    assert repeated(out, 10, "dp2")


def record_of(**others):
    values = dict(
        format=1, run="a", command=[], family="gpt2", config={}, settings={}, dp=1, first_step=2,
        inputs={}, files=[], versions={}, machine={},
    )  # fmt: skip
    return Recorded(**values | others)


def test_steps_after_a_gap_or_a_change_are_not_compared(tmp_path, capsys):
    steps = [Step(n, 1.0) for n in (3, 4, 6, 7)]
    found = check_run.steps_to_train(tmp_path, record_of(), steps)
    assert [step.step for step in found] == [3, 4]
    resumed = [Resumed(3, []), Resumed(3, ["lr: 1\n2"])]
    found = check_run.steps_to_train(tmp_path, record_of(resumed=resumed), steps)
    assert [step.step for step in found] == [3]
    assert "lr: 1?2\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="has no steps"):
        check_run.steps_to_train(tmp_path, record_of(first_step=0), steps)


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


def test_the_package_counts_as_source_and_no_foreign_repository_does(tmp_path, monkeypatch):
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
    (tmp_path / "site-packages" / "megazoo" / "pretrain.py").write_text("print()")
    assert run_record.versions()["source"] != before["source"]
