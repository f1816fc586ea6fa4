"""--record keeps what another needs to repeat a run; tools/check_run.py does so in any layout."""

import hashlib
import json
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.pretraining import ROOT, SMALL, TORCHRUN, losses, start
from tests.support.programs import run_tool

STEPS = 6
TEXTS = [{"text": f"line {n} of a text that is there to be learned, {n * n}"} for n in range(200)]


def checked(directory, *arguments):
    return run_tool("check_run.py", directory, *arguments)


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
    path = directory / "record.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


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


def test_the_same_layout_repeats_it_to_the_bit(recorded):
    done = checked(recorded / "record")
    assert done.returncode == 0, done.stderr
    assert "1 files are as they were" in done.stdout
    assert f"{STEPS} steps are the same to the bit" in done.stdout


def test_other_layouts_repeat_it(recorded):
    done = checked(recorded / "record", "--layouts", "pp4,dp2+zero,tp2pp2+sp", "--steps", 4)
    assert done.returncode == 0, done.stderr
    for layout in ("pp4", "dp2+zero", "tp2pp2+sp"):
        assert f"\n{layout:16}4 steps are the same" in done.stdout


def test_changed_data_is_named(recorded, data, tmp_path):
    changed = tmp_path / data.name
    changed.write_bytes(data.read_bytes().replace(b"line 7 ", b"line 8 ", 1))
    done = checked(recorded / "record", "--data", changed)
    assert done.returncode == 1
    assert "texts.jsonl (data) has as many bytes, but other contents" in done.stdout
    assert "1 of the files that the run read are not as they were" in done.stderr
    changed.write_bytes(data.read_bytes() + b'{"text": "more"}\n')
    done = checked(recorded / "record", "--data", changed)
    size = data.stat().st_size
    assert f"texts.jsonl (data) had {size:,} bytes, and has {size + 17:,}" in done.stdout


def test_a_changed_token_is_named(data, tmp_path):
    prefix, record = tmp_path / "tokens_text_document", tmp_path / "record"
    done = run_tool("preprocess_data.py", "--input", data, "--output-prefix", tmp_path / "tokens")
    assert done.returncode == 0, done.stderr
    arguments = (*SMALL, "--steps", 2, "--data", prefix, "--record", record)
    assert start([], *arguments).returncode == 0
    assert checked(record).returncode == 0
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    done = checked(record)
    assert done.returncode == 1
    assert "tokens_text_document.bin (data) has as many bytes, but other contents" in done.stdout


def test_a_step_that_parts_is_named(copy):
    lines = (copy / "steps.jsonl").read_text().splitlines()
    third = json.loads(lines[2])
    lines[2] = json.dumps({**third, "loss": third["loss"] * (1 + 1e-4)})
    (copy / "steps.jsonl").write_text("\n".join(lines) + "\n")
    done = checked(copy)
    assert done.returncode == 1
    assert "parts at step 3: loss" in done.stdout
    assert "1 of 1 layouts part from the record" in done.stderr


def test_another_setting_parts(copy):
    change(copy, lambda values: values["settings"].update(lr=0.001))
    done = checked(copy, "--steps", 3)
    assert done.returncode == 1
    assert "parts at step 2" in done.stdout


def test_weights_that_it_began_with(recorded, data, tmp_path):
    """A resumed run has a record of its own; weights that are not as they were are named."""
    saved, record = tmp_path / "saved", tmp_path / "record"
    common = (*SMALL, "--data", data)
    assert start([], *common, "--steps", 2, "--save", saved).returncode == 0
    done = start([], *common, "--load", saved, "--steps", 5, "--record", record)
    assert done.returncode == 0, done.stderr
    done = checked(record, "--layouts", "tp2")
    assert done.returncode == 0, done.stderr
    assert "3 steps are the same" in done.stdout
    (step,) = saved.glob("step_*")
    (step / "extra.txt").write_text("new")
    assert "extra.txt (weights) is new" in checked(record).stdout
    shutil.rmtree(saved)
    done = checked(record)
    assert done.returncode == 2
    assert "--load says where" in done.stderr


def test_a_run_that_goes_on_continues_its_record(data, tmp_path):
    """Steps after the checkpoint that it goes on from are written anew."""
    saved, record = tmp_path / "saved", tmp_path / "record"
    common = (*SMALL, "--data", data, "--save", saved, "--record", record)
    common = (*common, "--lr-decay-steps", 6, "--save-interval", 2)
    assert start([], *common, "--steps", 5, "--eval-steps", 0).returncode == 0
    shutil.rmtree(saved / "step_00000005")
    (saved / "latest").write_text("step_00000004")
    done = start([], *common, "--load", saved, "--steps", 6)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (record / "steps.jsonl").open()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert json.loads((record / "record.json").read_text())["resumed"] == [
        {"step": 4, "changes": []}
    ]
    assert "6 steps are the same to the bit" in checked(record).stdout
    done = start([], *SMALL, "--steps", 2, "--record", record)
    assert done.returncode == 2
    assert "holds the record of another run" in done.stderr


def test_a_restart_before_the_first_checkpoint_begins_anew(data, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, megazoo\n"
        "@megazoo.on_step\n"
        "def fail(step, values, model):\n"
        "    if step == 2 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os._exit(9)\n"
    )
    record = tmp_path / "record"
    done = start(
        [*TORCHRUN, "--nproc-per-node", "1", "--max-restarts", "1"], *SMALL, "--steps", 3,
        "--data", data, "--import", tmp_path / "mine.py", "--save", tmp_path / "saved",
        "--record", record,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (record / "steps.jsonl").open()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    done = checked(record)
    assert done.returncode == 2
    assert "the run imported" in done.stderr
    (tmp_path / "mine.py").write_text("# nothing\n")
    done = checked(record, "--import", tmp_path / "mine.py")
    assert "mine.py (import) had" in done.stdout


def test_dropout_has_its_own_layout(data, tmp_path):
    record = tmp_path / "record"
    arguments = (*SMALL, "--data", data, "--steps", 2, "--dropout", 0.1, "--record", record)
    assert start([], *arguments).returncode == 0
    assert "2 steps are the same to the bit" in checked(record).stdout
    assert "2 steps are the same" in checked(record, "--layouts", "pp2").stdout
    done = checked(record, "--layouts", "dp2")
    assert done.returncode == 2
    assert "dp2: the run has dropout" in done.stderr


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
    "more ranks than there are": (lambda v: v["settings"].update(tp=4096), "takes 4,096 ranks"),
    "more replicas": (lambda v: v.update(dp=2**20), "takes 2,097,152 ranks"),
    "ranks below 1": (lambda v: v["settings"].update(pp=-1), "pp -1 must be at least 1"),
    "steps from nowhere": (lambda v: v.update(first_step=10**9), "settings lacks load"),
    "weights that are a device": (lambda v: v["settings"].update(load="/dev/zero"), "no directory"),
    "a tokenizer that is one": (
        lambda v: v["settings"].update(tokenizer="/dev/zero"), "unknown tokenizer"
    ),
    "data that is one": (lambda v: v["settings"].update(data=["/dev/zero"]), "unknown data"),
    "data without a name": (lambda v: v["settings"].update(data=[]), "data"),
    "words for a terminal": (
        lambda v: v["inputs"].update({"import": ["\x1b[2J\nfine.py"]}), "imported ?[2J?fine.py"
    ),
}


# fmt: on


@pytest.mark.parametrize("what", FORGED)
def test_forged_records_are_refused_in_one_line(copy, what):
    edit, told = FORGED[what]
    change(copy, edit)
    done = checked(copy)
    assert done.returncode == 2, done.stdout
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda d: shutil.rmtree(d), "is no record of a run"),
        (lambda d: (d / "record.json").write_text("{"), "can't be read"),
        (lambda d: (d / "steps.jsonl").unlink(), "it has no steps.jsonl"),
        (lambda d: (d / "steps.jsonl").write_text('{"step": "one"}\n'), "line 1"),
        (lambda d: (d / "steps.jsonl").write_text(""), "has no steps"),
    ],
    ids=["missing", "half", "no steps", "a wrong step", "an empty list"],
)
def test_damaged_records_are_told_in_one_line(copy, damage, told):
    damage(copy)
    done = checked(copy)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_directory_that_cant_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = start([], *SMALL, "--steps", 2, "--record", tmp_path / "file")
    assert done.returncode == 2
    assert f"--record: {tmp_path / 'file'} is not a directory" in done.stderr


@pytest.mark.slow
def test_the_main_job_at_pp_4_and_dp_2(tmp_path):
    """That of the README, whose record has all of its settings, for its first steps."""
    config = (ROOT / "configs" / "gpt2_tiny.toml").read_text()
    lines = [line for line in config.splitlines() if not line.startswith(("save", "metrics"))]
    (tmp_path / "main.toml").write_text("\n".join(lines))
    done = start(
        [], "--config", tmp_path / "main.toml", "--record", tmp_path / "record", "--steps", 12,
        "--lr-decay-steps", 400, "--eval-steps", 0, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = checked(tmp_path / "record", "--layouts", "pp4,dp2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("10 steps are the same") == 2
