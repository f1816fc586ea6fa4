"""Two runs in one directory: they never mix, and the second is told who the first one is."""

import contextlib
import fcntl
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint, Saver, locks, save, saving
from megazoo.checkpoint.locks import run_lock
from megazoo.errors import UserError
from tests.support.directories import FORK, PROGRAM, names, tiny_model
from tests.support.training import context, tiny_config


def save_again_and_again(directory, barrier, first: float, rounds: int):
    model = tiny_model()
    for number in range(rounds):
        for parameter in model.parameters():
            parameter.data.fill_(first + number)
        barrier.wait(250)
        for _ in range(1000):
            with contextlib.suppress(UserError):
                save(directory, 1, model)
                break
        barrier.wait(250)  # both have saved
        barrier.wait(250)  # the test has looked
    os._exit(0)


@pytest.mark.parametrize("rounds", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_each_step_is_of_one_of_two_runs_that_save_at_once(tmp_path, rounds):
    barrier = FORK.Barrier(3)
    children = [
        FORK.Process(target=save_again_and_again, args=(tmp_path, barrier, first, rounds))
        for first in (1000.0, 2000.0)
    ]
    for child in children:
        child.start()
    last = set()
    for number in range(rounds):
        barrier.wait(250)
        barrier.wait(250)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.verify()
        values = load_file(checkpoint.path / "model_tp_0_pp_0.safetensors").values()
        found = torch.cat([tensor.flatten() for tensor in values]).unique().tolist()
        assert found in ([1000 + number], [2000 + number])
        last.add(found[0] // 1000)
        assert names(tmp_path) == ["latest", "step_00000001"]
        barrier.wait(250)
    for child in children:
        child.join(250)
        assert child.exitcode == 0


def test_the_second_run_is_told_who_the_first_one_is(tmp_path):
    """From the start, also of a directory that is still to be made."""
    model, run = tiny_model(), tmp_path / "run"
    optimizer = megazoo.optim.AdamW(model)
    held = f"{run}: another run is saving there: process {os.getpid()} on {os.uname().nodename} sin"
    for there in ([], ["latest", "step_00000001"]):
        with Saver(run, model, optimizer) as saver:
            with pytest.raises(UserError, match=f"^{held}ce 20") as refused:
                save(run, 2, model)
            ending = ": give another --save, or wait; earlier checkpoints are untouched"
            assert ending in str(refused.value)
            with pytest.raises(UserError, match=held), Saver(run, model, optimizer):
                pytest.fail("the second has the lock, too")
            with pytest.raises(UserError, match=held) as refused:
                pretrain.main([*PROGRAM, "--steps", "1", "--save", str(run)])
            assert refused.value.exit_code == 2  # before any work
            if there:
                assert names(run) == [".lock", *there]
            saver.save(1, {})
        assert names(run) == ["latest", "step_00000001"]
    save(run, 2, model)
    assert names(run) == ["latest", "step_00000001", "step_00000002"]
    with Saver(tmp_path / "unused", model, optimizer):
        pass
    assert names(tmp_path) == ["run"]


def refusal_of_rank(directory):
    model = megazoo.from_config(tiny_config(), context(tp=2))
    try:
        with Saver(directory, model, megazoo.optim.AdamW(model)):
            return None
    except UserError as error:
        return str(error)


def test_every_rank_is_told_that_another_run_saves_there(ranks, tmp_path):
    with run_lock(tmp_path):
        first, second = ranks(refusal_of_rank, 2, tmp_path)
    assert f"another run is saving there: process {os.getpid()}" in first
    assert first == second
    assert ranks(refusal_of_rank, 2, tmp_path) == [None, None]


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        run_lock(tmp_path).__enter__()
        worker = os.fork()  # which outlives its run for a while
        if worker:
            os.write(write, str(worker).encode())
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(read, 20))
    model = tiny_model()
    with pytest.raises(UserError, match=f"another run is saving there: process {child} "):
        save(tmp_path, 1, model)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        save(tmp_path, 1, model)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read)
        os.close(write)
    assert names(tmp_path) == ["latest", "step_00000001"]


def test_who_only_looks_at_a_lock_stops_no_run(tmp_path):
    lock = run_lock(tmp_path)
    lock.file.touch()
    looking = os.open(lock.file, os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.1, os.close, [looking])
    timer.start()
    with lock:
        timer.join()
        with pytest.raises(UserError, match="another run is saving there"):
            run_lock(tmp_path).check()
    run_lock(tmp_path).check()
    assert names(tmp_path) == []


def test_a_restarted_job_waits_for_the_lock_of_a_node_that_went_down(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "MOMENT", 0.05)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    held = contextlib.ExitStack()
    held.enter_context(run_lock(tmp_path))
    timer = threading.Timer(0.5, held.close)
    timer.start()
    run_lock(tmp_path).check()
    with run_lock(tmp_path):
        timer.join()
    monkeypatch.setattr(locks, "LEASE", 0.1)
    with run_lock(tmp_path), pytest.raises(UserError, match="another run is saving there"):
        run_lock(tmp_path).__enter__()


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    save(tmp_path, 1, tiny_model())
    assert names(tmp_path) == ["latest", "step_00000001"]


def test_a_lock_file_of_another_program_stays_as_it_is(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("my text")
    for kind, make in {
        "text": lambda lock: lock.write_text("my text"),
        "link": lambda lock: lock.symlink_to(mine),
        "directory": lambda lock: lock.mkdir(),
        "pipe": os.mkfifo,
    }.items():
        lock = tmp_path / kind / ".lock"
        lock.parent.mkdir()
        make(lock)
        with pytest.raises(UserError, match=f"{lock} is not a lock file of megazoo: move it"):
            save(lock.parent, 1, tiny_model())
        assert mine.read_text() == "my text"
        assert names(lock.parent) == [".lock"]
    assert (tmp_path / "text" / ".lock").read_text() == "my text"


def test_a_step_that_another_program_changed_is_not_published(tmp_path, monkeypatch):
    model, run = tiny_model(), tmp_path / "run"
    save(run, 1, model)
    other = save(tmp_path / "other", 2, tiny_model(5.0)) / "model_tp_0_pp_0.safetensors"

    def last_byte(file):
        with open(file, "r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"x")

    original = saving.write_rank
    for change in (
        last_byte,
        lambda file: os.replace(shutil.copy(other, tmp_path / "copy"), file),  # by another file
        lambda file: file.unlink(),
        lambda file: (file.parent / "model_tp_1_pp_0.safetensors").touch(),
    ):

        def meddled(staging, files, ctx, change=change):
            written = original(staging, files, ctx)
            change(staging / other.name)
            return written

        monkeypatch.setattr(saving, "write_rank", meddled)
        with pytest.raises(UserError, match=r"safetensors was changed by another program while"):
            save(run, 2, model)
        assert names(run) == ["latest", "step_00000001"]


def test_a_file_whose_time_and_number_change_by_themselves_is_published(tmp_path, monkeypatch):
    original = saving.write_rank

    def touched(staging, files, ctx):
        written = original(staging, files, ctx)
        for file in list(staging.iterdir()):
            shutil.copy(file, staging / "copy")
            os.replace(staging / "copy", file)
            os.utime(file, (1, 1))
        return written

    monkeypatch.setattr(saving, "write_rank", touched)
    Checkpoint(save(tmp_path, 1, tiny_model())).verify()
