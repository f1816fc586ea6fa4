"""What a run or a tool writes finds no room, or no reader: a run goes on without it, a tool ends in
one line."""

import errno
import json
import os
import resource
import shlex
import signal
import subprocess
import time

import pytest

import megazoo
from megazoo import pretrain
from megazoo.errors import Advice, UserError
from megazoo.trainer import callbacks
from megazoo.trainer.outputs import jsonl
from megazoo.trainer.recorder import Recorder
from tests.support.pretraining import ROOT, SMALL, records
from tests.support.programs import python


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_ends_no_run(tmp_path, monkeypatch, capsys):
    """The metrics keep their whole lines, the run its checkpoint; what is lost is told twice."""
    file, append = tmp_path / "metrics.jsonl", jsonl.append_line

    def filling(path, line):
        if json.loads(line)["step"] == 3:
            with open(path, "ab") as there:
                size = there.tell()
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
        try:
            append(path, line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(jsonl, "append_line", filling)
    from torch import profiler

    monkeypatch.setattr(profiler.profile, "export_chrome_trace", full)
    arguments = ["--steps", "5", "--layers", "1", "--eval-steps", "0", "--data", "mock"]
    arguments += ["--metrics", str(file), "--profile", str(tmp_path), "--profile-steps", "1", "2"]
    with pytest.warns(Advice) as told:
        pretrain.main([*SMALL, *arguments, "--save", str(tmp_path / "run")])
    assert [record["step"] for record in records(file)] == [1, 2]
    assert (tmp_path / "run" / "step_00000005").is_dir()
    lines = [str(each.message) for each in told if issubclass(each.category, Advice)]
    out = capsys.readouterr().out
    for flag, why in {
        "--profile": "at step 2: No space left on device: make room on its disk",
        "--metrics": "at step 3: File too large",
    }.items():
        assert f"{flag} could not be written {why}; the run continues without it" in lines
        assert f"  {flag} lost {why}" in out


def test_a_full_disk_for_tensorboard_ends_no_run(tmp_path, monkeypatch, capfd):
    """TensorBoard writes in a thread, whose own traceback is not shown."""
    from tensorboard.summary.writer import record_writer

    words = [*SMALL, "--data", "mock", "--layers", "1", "--tensorboard", str(tmp_path)]
    run = pretrain.prepare(words)
    model = megazoo.from_config(run.config)
    recorder = Recorder(run, model, megazoo.optim.AdamW(model))
    log = callbacks.Metrics(recorder)
    log.on_start()
    monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    monkeypatch.setattr(callbacks, "advise", (told := []).append)
    for step in range(1, 50):
        log.on_step(step, {"loss": 1.0})
        time.sleep(0.01)
    log.on_stop(failed=False)
    assert list(recorder.lost) == ["--tensorboard"]
    assert len(told) == 1
    assert told[0].startswith("--tensorboard could not be written at step ")
    assert "No space left on device" in told[0]
    assert "Traceback" not in capfd.readouterr().err
    monkeypatch.setattr(record_writer.RecordWriter, "flush", full)
    with pytest.raises(UserError, match=r"--tensorboard .*No space left on device"):
        callbacks.Metrics(recorder).on_start()


def test_output_that_nobody_reads_ends_quietly():
    command = f"{shlex.quote(python())} tools/plot_schedule.py --help"
    for line, code, words in (
        (f"{command} | true; exit ${{PIPESTATUS[0]}}", 128 + signal.SIGPIPE, []),
        (
            f"{command} > /dev/full",
            1,
            ["plot_schedule.py: error: standard output: No space left on device: make room on it"],
        ),
    ):
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code
        lines = done.stderr.splitlines()
        assert len(lines) == len(words)
        assert all(line.startswith(word[:-10]) for line, word in zip(lines, words, strict=True))
