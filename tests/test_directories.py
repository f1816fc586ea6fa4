"""What is written never harms what was there: two runs in one directory, links, files of others,
and what killed programs leave."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers import context, in_fresh_processes, tiny_config
from helpers_pretrain import ROOT
from safetensors.torch import load_file, save_file

import megazoo
import pretrain_gpt
from megazoo.checkpoint import Checkpoint, Saver, directories, load, locks, save, saving
from megazoo.checkpoint.locks import run_lock
from megazoo.checkpoint.places import step_name
from megazoo.errors import UserError
from megazoo.models.hugging_face.export import write_hugging_face
from megazoo.models.pretrained import open_source
from megazoo.models.resharding import write_shards
from megazoo.parallel.collectives import all_gather_objects

FORK = multiprocessing.get_context("fork")
PROGRAM = (
    "--eval-steps 0 --device cpu --seq-length 32 --hidden-size 32 --heads 2 --layers 1 "
    "--global-batch-size 2 --micro-batch-size 2 --warmup-steps 0"
).split()


def tiny_model(value: float | None = None):
    model = megazoo.from_config(tiny_config(layers=1), seed=3)
    for parameter in model.parameters() if value is not None else ():
        parameter.data.fill_(value)
    return model


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def in_child(work, *arguments) -> int:
    """Call a function in a process of its own; returns its exit code."""
    child = FORK.Process(target=work, args=arguments)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


# Two runs in one directory


def save_again_and_again(directory, barrier, first: float, rounds: int):
    model = tiny_model()
    for number in range(rounds):
        for parameter in model.parameters():
            parameter.data.fill_(first + number)
        barrier.wait(60)
        for _ in range(1000):
            with contextlib.suppress(UserError):
                save(directory, 1, model)
                break
        barrier.wait(60)  # both have saved
        barrier.wait(60)  # the test has looked
    os._exit(0)


def test_each_step_is_of_one_of_two_runs_that_save_at_once(tmp_path):
    rounds = 25
    barrier = FORK.Barrier(3)
    children = [
        FORK.Process(target=save_again_and_again, args=(tmp_path, barrier, first, rounds))
        for first in (1000.0, 2000.0)
    ]
    for child in children:
        child.start()
    last = set()
    for number in range(rounds):
        barrier.wait(60)
        barrier.wait(60)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.verify()
        values = load_file(checkpoint.path / "model_tp_0_pp_0.safetensors").values()
        found = torch.cat([tensor.flatten() for tensor in values]).unique().tolist()
        assert found in ([1000 + number], [2000 + number])
        last.add(found[0] // 1000)
        assert names(tmp_path) == ["latest", "step_00000001"]
        barrier.wait(60)
    for child in children:
        child.join(60)
        assert child.exitcode == 0


def test_the_second_run_is_told_who_the_first_one_is(tmp_path):
    model = tiny_model()
    with Saver(tmp_path, model, megazoo.optim.AdamW(model)) as saver:
        with pytest.raises(UserError) as refused:  # before it has saved anything
            save(tmp_path, 2, model)
        saver.save(1, {})
        told = str(refused.value)
        assert told.startswith(
            f"{tmp_path}: another run is saving there: process {os.getpid()} "
            f"on {os.uname().nodename} since 20"
        )
        assert ": give another --save, or wait; earlier checkpoints are untouched" in told
        with pytest.raises(UserError, match="another run is saving there") as refused:
            pretrain_gpt.main([*PROGRAM, "--steps", "1", "--save", str(tmp_path)])
        assert refused.value.exit_code == 2  # before any work
        assert names(tmp_path) == [".lock", "latest", "step_00000001"]
    save(tmp_path, 2, model)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_a_directory_that_is_still_to_be_made_is_locked_from_the_start(tmp_path):
    model, run = tiny_model(), tmp_path / "run"
    optimizer = megazoo.optim.AdamW(model)
    held = f"{run}: another run is saving there: process"
    with Saver(run, model, optimizer) as first:
        with pytest.raises(UserError, match=held), Saver(run, model, optimizer):
            pytest.fail("the second has the lock, too")
        with pytest.raises(UserError, match=held) as refused:
            pretrain_gpt.main([*PROGRAM, "--steps", "1", "--save", str(run)])
        assert refused.value.exit_code == 2  # before any work
        first.save(1, {})
    assert names(run) == ["latest", "step_00000001"]
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


@pytest.mark.parametrize("kind", ["text", "link", "directory", "pipe"])
def test_a_lock_file_of_another_program_stays_as_it_is(tmp_path, kind):
    directory, mine = tmp_path / "run", tmp_path / "mine"
    directory.mkdir()
    mine.write_text("my text")
    lock = directory / ".lock"
    if kind == "text":
        lock.write_text("my text")
        mine = lock
    elif kind == "link":
        lock.symlink_to(mine)
    elif kind == "directory":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    with pytest.raises(UserError, match=f"{lock} is not a lock of megazoo's: move it"):
        save(directory, 1, tiny_model())
    assert mine.read_text() == "my text"
    assert names(directory) == [".lock"]


@pytest.mark.parametrize("change", ["bytes", "other file", "missing", "added"])
def test_a_step_that_another_program_changed_is_not_published(tmp_path, monkeypatch, change):
    model = tiny_model()
    save(tmp_path / "run", 1, model)
    other = save(tmp_path / "other", 2, tiny_model(5.0))
    original = saving.write_rank

    def meddled(staging, files, ctx):
        written = original(staging, files, ctx)
        file = staging / "model_tp_0_pp_0.safetensors"
        if change == "bytes":
            with open(file, "r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"x")
        elif change == "other file":
            os.replace(other / file.name, file)
        elif change == "missing":
            file.unlink()
        else:
            (staging / "model_tp_1_pp_0.safetensors").touch()
        return written

    monkeypatch.setattr(saving, "write_rank", meddled)
    with pytest.raises(UserError, match=r"safetensors was changed by another program while it was"):
        save(tmp_path / "run", 2, model)
    assert names(tmp_path / "run") == ["latest", "step_00000001"]


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


# What megazoo did not write


@pytest.fixture
def precious(tmp_path):
    """A checkpoint outside of the directories that are written."""
    save(tmp_path / "precious", 7, tiny_model(7.0))
    path = tmp_path / "precious" / step_name(7)
    yield path
    Checkpoint(path).verify()
    assert "thesis.tex" not in names(path)


def test_a_link_is_not_followed(tmp_path, precious):
    model = tiny_model()
    run = tmp_path / "run"
    run.mkdir()
    (run / step_name(2)).symlink_to(precious)
    (run / step_name(3)).symlink_to(tmp_path / "none")
    (run / "latest").symlink_to(precious / "trainer.json")
    (tmp_path / "out").symlink_to(precious)
    for step in (2, 3):
        refusal = f"{run / step_name(step)} is a symbolic link: name what it points to"
        with pytest.raises(UserError, match=refusal):
            save(run, step, model)
    assert names(run) == ["latest", step_name(2), step_name(3)]
    refusal = f"{tmp_path}/out is a symbolic link: name what it points to"
    with pytest.raises(UserError, match=refusal):
        model.save_parallelized(tmp_path / "out")
    source = open_source(precious)
    for write in (write_hugging_face, lambda *a, **k: write_shards(*a, 1, 1, **k)):
        with pytest.raises(UserError, match=refusal):
            write(source, tmp_path / "out", overwrite=True)
    save(run, 4, model, keep_last=1)
    assert names(run) == ["latest", step_name(2), step_name(3), step_name(4)]
    assert (run / "latest").read_text() == f"{step_name(4)}\n"
    # a directory that is named by a link is as good as any
    (tmp_path / "link").symlink_to(run)
    save(tmp_path / "link", 5, model)
    assert Checkpoint(run).path.name == step_name(5)


def test_small_files_are_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("my text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".latest.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"\.latest\.partial is a link, and would be written"):
        save(tmp_path / "run", 1, tiny_model())
    assert (tmp_path / "mine").read_text() == "my text"
    assert names(tmp_path / "run") == [".latest.partial"]


def test_keep_last_removes_only_steps_of_this_run(tmp_path, precious):
    model = tiny_model()
    save(tmp_path / "run", 1, model, trainer={"run": "other"})
    save(tmp_path / "run", 2, model, trainer={"run": "ours"})
    save(tmp_path / "run", 3, model)  # of an older version
    run = tmp_path / "run"
    mine = ["step_00000002-best", "step_final", "step_2", "step_000000002"]
    for name in mine:
        shutil.copytree(run / step_name(2), run / name)
    (run / step_name(9)).symlink_to(precious)
    (run / step_name(2) / "notes.txt").write_text("my notes")
    for step in (4, 5):
        save(run, step, model, trainer={"run": "ours"}, keep_last=1)
    kept = ["latest", step_name(1), step_name(2), step_name(3), step_name(5), step_name(9)]
    assert names(run) == sorted([*kept, *mine])
    for name in [*mine, step_name(1), step_name(3), step_name(5)]:
        Checkpoint(run / name).verify()
    assert names(run / step_name(2)) == ["notes.txt"]


def test_notes_in_a_step_stay_when_it_is_saved_again(tmp_path):
    model = tiny_model()
    step = save(tmp_path, 1, model)
    (step / "notes.txt").write_text("my notes")
    (step / "plots").mkdir()
    save(tmp_path, 1, model)
    assert (step / "notes.txt").read_text() == "my notes"
    assert "plots" in names(step)
    assert names(tmp_path) == ["latest", "step_00000001"]
    Checkpoint(step).verify()


def test_the_program_keeps_the_steps_of_its_run_apart(tmp_path):
    run = [*PROGRAM, "--save", str(tmp_path), "--save-interval", "1", "--keep-last", "1"]
    pretrain_gpt.main([*run, "--steps", "2"])
    first = json.loads((tmp_path / step_name(2) / "trainer.json").read_text())["run"]
    pretrain_gpt.main([*run, "--steps", "1"])  # another
    assert names(tmp_path) == ["latest", step_name(1), step_name(2)]
    pretrain_gpt.main([*run, "--steps", "3", "--load", str(tmp_path / step_name(2))])
    assert names(tmp_path) == ["latest", step_name(1), step_name(3)]
    again = json.loads((tmp_path / step_name(3) / "trainer.json").read_text())["run"]
    other = json.loads((tmp_path / step_name(1) / "trainer.json").read_text())["run"]
    assert first == again != other


def writers(source, directory):
    """What replaces a directory, each as a function without arguments."""
    return {
        "reshard": lambda: write_shards(source, directory, 1, 1, overwrite=True),
        "merge": lambda: write_hugging_face(source, directory, overwrite=True),
    }


@pytest.mark.parametrize("tool", ["reshard", "merge"])
def test_overwrite_replaces_only_what_megazoo_wrote(tmp_path, tool, precious):
    source, out = open_source(precious), tmp_path / "out"
    for before in ("reshard", "merge"):
        writers(source, out)[before]()
        writers(source, out)[tool]()
        open_source(out)
        assert names(tmp_path) == ["out", "precious"]
        for name in ("thesis.tex", ".hidden"):
            (out / name).write_text("my work")
            refusal = f"{out} holds {name}, which megazoo did not write: move it, or choose another"
            with pytest.raises(UserError, match=refusal):
                writers(source, out)[tool]()
            assert (out / name).read_text() == "my work"
            (out / name).unlink()
        (out / "config.json.d").mkdir()
        with pytest.raises(UserError, match=r"holds config\.json\.d, which megazoo did not"):
            writers(source, out)[tool]()
        shutil.rmtree(out)
    out.mkdir()
    (out / "config.json").write_text("{}")  # no weights of ours: not our model
    with pytest.raises(UserError, match=r"holds config\.json, which megazoo did not write"):
        writers(source, out)[tool]()
    save_file({"a": torch.ones(2)}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="did not write"):
        writers(source, out)[tool]()
    with pytest.raises(UserError, match="is not empty, and not of megazoo's writing: choose anoth"):
        tiny_model().save_parallelized(out)
    assert names(out) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("tool", ["reshard", "merge"])
def test_overwrite_spares_runs_and_the_input(tmp_path, tool, precious):
    source, run = open_source(precious), tmp_path / "run"
    save(run, 1, tiny_model())
    for output, refusal in (
        (run, f"{run} holds latest: it is a run's; choose another"),
        (precious, f"{precious} is the input, too: choose another"),
        (precious.parent, f"{precious.parent} holds the input, {precious}: choose another"),
        (precious / "out", f"{precious}/out lies in the input, {precious}: choose another"),
        (tmp_path / "x/../precious" / precious.name, "is the input, too: choose another"),
    ):
        with pytest.raises(UserError, match=refusal):
            writers(source, output)[tool]()
    with pytest.raises(UserError, match="not of megazoo's writing: choose another"):
        tiny_model().save_parallelized(run)
    Checkpoint(run).verify()
    assert names(run) == ["latest", step_name(1)]
    assert names(tmp_path) == ["precious", "run"]


# What killed programs leave


def killed_at_rename(moment, work):
    """Do some work in a process that dies instead of its rename number `moment`."""

    def dying():
        calls, rename = [], os.rename

        def die(*arguments):
            calls.append(arguments)
            if len(calls) == moment:
                os._exit(77)
            rename(*arguments)

        os.rename = die
        work()
        os._exit(0)

    assert in_child(dying) == 77


def hidden(directory) -> list[str]:
    return [name for name in names(directory) if name.startswith(".") and name[-5:] != ".lock"]


@pytest.mark.parametrize("moment", [1, 2])
def test_what_a_killed_save_leaves_goes(tmp_path, moment):
    model = tiny_model(1.0)
    for step in (1, 2):
        save(tmp_path, step, model)
    (tmp_path / ".step_00000009.partial").mkdir()  # of an older version, and not whole
    (tmp_path / ".step_00000009.partial" / "model_tp_0_pp_0.safetensors").touch()
    newer = tiny_model(2.0)
    killed_at_rename(moment, lambda: save(tmp_path, 2, newer))
    assert len(hidden(tmp_path)) == moment
    Checkpoint(tmp_path).verify()
    save(tmp_path, 3, model)
    assert names(tmp_path) == ["latest", *map(step_name, (1, 2, 3))]
    fresh = tiny_model(0.0)
    load(Checkpoint(tmp_path / step_name(2)), fresh)
    assert fresh.embedding.weight.unique().tolist() == [1.0]  # it has its name again


@pytest.mark.parametrize("moment", range(1, 7))
def test_what_a_killed_removal_of_an_old_step_leaves_goes(tmp_path, moment):
    """Whatever of an old step is gone, the next save removes the rest, and what is whole is whole
    until then."""
    model = tiny_model()
    for step in (1, 2):
        save(tmp_path, step, model)

    def dying():
        calls, unlink = [], Path.unlink

        def die(path, *arguments, **options):
            calls.append(path)
            if len(calls) == moment:
                os._exit(77)
            unlink(path, *arguments, **options)

        Path.unlink = die
        save(tmp_path, 3, model, keep_last=1)
        os._exit(0)

    assert in_child(dying) == 77
    assert Checkpoint(tmp_path).path.name == step_name(3)
    save(tmp_path, 4, model, keep_last=1)
    assert names(tmp_path) == ["latest", step_name(4)]


def test_a_file_that_is_still_open_on_nfs_fails_no_save(tmp_path, monkeypatch):
    """NFS keeps such a file under another name, in a directory that can't be removed then."""
    model, rmdir = tiny_model(), Path.rmdir
    save(tmp_path, 1, model)

    def busy(path):
        (path / ".nfs0001").touch()
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", busy)
    save(tmp_path, 2, model, keep_last=1)
    monkeypatch.undo()
    (left,) = hidden(tmp_path)
    (tmp_path / left / ".nfs0001").unlink()
    save(tmp_path, 3, model)
    assert names(tmp_path) == ["latest", step_name(2), step_name(3)]


def test_hidden_directories_of_others_stay(tmp_path):
    for name in (".step_notes.partial", ".git", ".step_00000001.mine.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step_00000005.partial").mkdir()
    (tmp_path / ".step_00000005.partial" / "thesis.tex").write_text("my work")
    (tmp_path / ".step_00000006.partial").symlink_to(tmp_path / ".git")
    before = names(tmp_path)
    save(tmp_path, 1, tiny_model())
    assert names(tmp_path) == sorted([*before, "latest", "step_00000001"])
    assert (tmp_path / ".step_00000005.partial" / "thesis.tex").read_text() == "my work"


@pytest.mark.parametrize("kind", ["merge", "merged by the model", "reshard", "shards"])
@pytest.mark.parametrize("moment", [1, 2])
def test_an_output_that_was_being_replaced_is_found(tmp_path, precious, kind, moment):
    source, out = open_source(precious), tmp_path / "out"
    new = tiny_model(8.0)
    write = {
        **writers(source, out),
        "merged by the model": lambda: new.save_parallelized(out, merge_checkpoints=True),
        "shards": lambda: new.save_parallelized(out),
    }[kind]
    write()
    killed_at_rename(moment, write)
    assert out.exists() == (moment == 1)
    model = megazoo.from_pretrained(out)
    assert model.embedding.weight.unique().tolist() in ([7.0], [8.0])
    open_source(out)
    write()
    assert names(tmp_path) == ["out", "precious"]
    assert open_source(out).path == out


def test_an_unfinished_output_goes_when_it_is_written_again(tmp_path, precious):
    source, out = open_source(precious), tmp_path / "out"
    killed_at_rename(1, lambda: write_hugging_face(source, out))
    assert len(hidden(tmp_path)) == 1
    with pytest.raises(UserError, match="is not a directory"):
        open_source(out)
    write_hugging_face(source, out)
    assert names(tmp_path) == ["out", "precious"]


def test_two_tools_do_not_write_one_output(tmp_path, precious):
    out = tmp_path / "out"
    with (
        directories.new_directory(out),
        pytest.raises(UserError, match=f"{out}: another program is writing it: process"),
    ):
        write_hugging_face(open_source(precious), out)
    assert names(tmp_path) == ["out", "precious"]


# Weights that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value, dtype):
    model = megazoo.from_config(tiny_config(layers=1), seed=3, dtype=dtype)
    optimizer = megazoo.optim.AdamW(model)
    save(tmp_path, 1, model, optimizer)
    refusal = r"{} is not finite \(NaN or infinite\) as {}.*; earlier checkpoints are untouched"
    entries = {entry.name: entry.parameter for entry in model.entries()}
    spoilt_weight = entries["layers.0.mlp.down.weight"]
    spoilt = [(spoilt_weight, "layers.0.mlp.down.weight", dtype)]
    spoilt += [(optimizer.state["embedding.weight"]["exp_avg"], "embedding.weight.exp_avg", None)]
    for tensor, name, kind in spoilt:
        kind = str(kind or tensor.dtype).removeprefix("torch.")
        with torch.no_grad():
            place = tuple(size - 1 for size in tensor.shape)
            before, tensor[place] = tensor[place].clone(), value
        with pytest.raises(UserError, match=refusal.format(name, kind)):
            save(tmp_path, 2, model, optimizer)
        with torch.no_grad():
            tensor[place] = before
    assert names(tmp_path) == ["latest", "step_00000001"]
    save(tmp_path, 2, model, optimizer)


def test_a_conversion_that_overflows_is_refused(tmp_path):
    model = tiny_model(70000.0)
    model.save_parallelized(tmp_path / "large")
    source = open_source(tmp_path / "large")
    refusal = r"not finite \(NaN or infinite\) as float16: numbers above 65504 need bfloat16 or"
    for write in (
        lambda: write_hugging_face(source, tmp_path / "out", dtype=torch.float16),
        lambda: write_shards(source, tmp_path / "out", 2, 1, dtype=torch.float16),
    ):
        with pytest.raises(UserError, match=refusal):
            write()
    assert names(tmp_path) == ["large"]
    write_hugging_face(source, tmp_path / "out", dtype=torch.bfloat16)


# Failures in the background


@pytest.mark.parametrize("failure", [MemoryError, KeyError, SystemExit])
@pytest.mark.parametrize("may_fail", [False, True])
def test_whatever_fails_in_the_thread_is_told(tmp_path, monkeypatch, capsys, failure, may_fail):
    model = tiny_model()

    def fail(*_):
        raise failure("in the middle")

    def run():
        with Saver(tmp_path, model, megazoo.optim.AdamW(model), background=True) as saver:
            saver.save(1, {})
            saver.wait()
            monkeypatch.setattr(saving, "write_rank", fail)
            saver.save(2, {}, may_fail=may_fail)
            saver.wait()

    if may_fail:
        run()
        assert f"{failure.__name__}: " in capsys.readouterr().err
    else:
        with pytest.raises(UserError, match=f"{failure.__name__}: .*in the middle"):
            run()
    assert names(tmp_path) == ["latest", "step_00000001"]


def fail_on_rank_1(directory, background, where):
    model = megazoo.from_config(tiny_config(), context(tp=2), seed=3)

    def fail(*_):
        raise MemoryError("no more")

    original = saving.write_rank, saving._StepContents.copied
    if model.ctx.rank == 1 and where == "write":
        saving.write_rank = fail
    elif model.ctx.rank == 1:
        saving._StepContents.copied = fail
    try:
        with Saver(directory, model, megazoo.optim.AdamW(model), background=background) as saver:
            saver.save(1, {})
    except UserError as error:
        return str(error)
    finally:
        saving.write_rank, saving._StepContents.copied = original
    return None


@pytest.mark.parametrize(
    ("background", "where"), [(False, "write"), (True, "write"), (True, "copy")]
)
def test_whatever_fails_on_one_rank_is_told_by_all(ranks, tmp_path, background, where):
    told = f"can't save to {tmp_path}: MemoryError: no more; earlier checkpoints are untouched"
    assert ranks(fail_on_rank_1, 2, tmp_path, background, where) == [told, told]
    assert names(tmp_path) == []


def stopped_while_saving(directory):
    """Rank 1 is stopped while it writes a step in the background, and goes on when rank 0 has given
    it up; returns the seconds that took, and the error."""
    ctx = megazoo.ParallelContext.from_torch(2, device="cpu", timeout=timedelta(seconds=2))
    model = megazoo.from_config(tiny_config(), ctx, seed=3)
    processes = all_gather_objects(os.getpid(), ctx)
    original = saving.write_rank

    def stop(*arguments):
        os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments)

    if ctx.rank == 1:
        saving.write_rank = stop
    begin = time.monotonic()
    try:
        with Saver(directory, model, megazoo.optim.AdamW(model), background=True) as saver:
            saver.save(1, {})
    except UserError as error:
        return time.monotonic() - begin, str(error)
    finally:
        saving.write_rank = original
        os.kill(processes[1], signal.SIGCONT)
    return None


def test_a_rank_that_is_stopped_while_saving_is_given_up_after_the_timeout(tmp_path):
    (seconds, told), _ = in_fresh_processes(stopped_while_saving, tmp_path, processes=2)
    assert 1.5 < seconds < 20
    assert "step 1 was not saved: " in told
    assert names(tmp_path) == []


STOP = """
import os, signal
from megazoo.checkpoint import saving

original = saving.write_rank

def stop(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(*arguments)

saving.write_rank = stop
"""


@pytest.mark.slow
def test_the_program_gives_up_a_stopped_rank_after_its_timeout(tmp_path):
    (tmp_path / "stop.py").write_text(STOP)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, ROOT / "pretrain_gpt.py", *PROGRAM, "--tp", "2", "--timeout", "5"]
    command += ["--steps", "100000", "--save-interval", "1", "--save", tmp_path / "run"]
    command += ["--async-save", "--import", tmp_path / "stop.py"]
    ranks = []
    for rank in range(2):
        here = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(tmp_path / f"rank_{rank}", "wb") as output:
            ranks.append(subprocess.Popen(command, env=here, stdout=output, stderr=output))
    try:
        until = time.monotonic() + 60
        while Path(f"/proc/{ranks[1].pid}/stat").read_text().split()[2] != "T":
            assert time.monotonic() < until
            time.sleep(0.05)
        begin = time.monotonic()
        assert ranks[0].wait(60) not in (0, None)
        assert time.monotonic() - begin < 40
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)
    assert "no word from rank 1" in (tmp_path / "rank_0").read_text()
    assert not (tmp_path / "run").exists()


def test_the_program_refuses_weights_that_are_not_finite(tmp_path):
    run = [*PROGRAM, "--save", str(tmp_path), "--steps", "1", "--dtype", "float32"]
    with pytest.raises(UserError, match=r"is not finite \(NaN or infinite\) as float32") as refused:
        pretrain_gpt.main([*run, "--lr", "1e39"])
    assert refused.value.exit_code == 1
    assert names(tmp_path) == []
