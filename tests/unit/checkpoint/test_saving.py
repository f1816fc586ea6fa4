"""Saving: in the background, and what a kill, a full disk or --keep-last leaves behind."""

import contextlib
import errno
import io
import os
import shutil
import signal
import threading
import time
import zlib

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint, Saver, load, save, saving, writing
from megazoo.checkpoint.places import step_name
from megazoo.checkpoint.saving import SHARDS
from megazoo.errors import UserError
from megazoo.formats.dcp.saving import DCP
from megazoo.models.pretrained import open_source
from tests.support.checkpoints import run_steps
from tests.support.directories import PROGRAM, names, tiny_model
from tests.support.sampling import marked_slow
from tests.support.training import context, make_batch, tiny_config


def filled(value: float):
    """Return a model and its optimizer, all of whose numbers are one."""
    model = tiny_model(value)
    optimizer = megazoo.optim.AdamW(model)
    for tensor in tensors_of((model, optimizer)):
        tensor.data.fill_(value)
    return model, optimizer


def tensors_of(pair) -> list[torch.Tensor]:
    model, optimizer = pair
    states = [tensor for states in optimizer.state.values() for tensor in states.values()]
    return [*model.parameters(), *states]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Killed(BaseException):
    """Stands for kill -9: nothing catches it, nothing is cleaned up after it."""


def killed_at(moment, monkeypatch):
    """Make the moment-th call that changes the disk, and all that follow, raise Killed before they
    act; returns the calls counted so far."""
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) >= moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return calls


@pytest.mark.parametrize(
    ("second_step", "form"),
    [(2, SHARDS), (1, SHARDS), pytest.param(1, DCP, marks=pytest.mark.slow)],
    ids=["new step", "same step again", "same step again, dcp"],
)
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path, second_step, form):
    def save(directory, step, model, optimizer):
        with Saver(directory, model, optimizer, format=form) as saver:
            saver.save(step, {})

    old, new, fresh = map(filled, (1.0, 2.0, 3.0))

    def value_on_disk(directory):
        for tensor in tensors_of(fresh):
            tensor.data.fill_(3.0)
        load(open_source(directory), *fresh)
        (value,) = {tensor.unique().item() for tensor in tensors_of(fresh)}
        return value

    save(tmp_path / "0", 1, *old)
    moment, found = 0, []
    while True:
        moment += 1
        directory = tmp_path / str(moment)
        shutil.copytree(tmp_path / "0", directory)
        with pytest.MonkeyPatch.context() as patch:
            calls = killed_at(moment, patch)
            with contextlib.suppress(Killed):
                save(directory, second_step, *new)
        found.append(value_on_disk(directory))
        # and the next save is not disturbed by what is left
        save(directory, second_step, *new)
        assert value_on_disk(directory) == 2.0
        assert set(names(directory)) == {"latest", step_name(1), step_name(second_step)}
        shutil.rmtree(directory)
        if len(calls) < moment:
            break
    assert moment > 10
    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}
    assert found.count(2.0) > 1  # of the save that was not killed, and of one that was


def test_a_directory_without_its_manifest_is_never_chosen(tmp_path):
    model = megazoo.from_config(tiny_config(), seed=3)
    step = save(tmp_path, 1, model)
    # killed while writing, or while being removed
    for leftover in (".step_00000002.partial", "step_00000003"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / ".megazoo.json.partial").write_text("{}")
    (tmp_path / "latest").unlink()
    assert Checkpoint(tmp_path).path == step


@pytest.mark.parametrize("rounds", marked_slow([4, 20], lambda _, rounds: rounds == 20))
def test_kill_minus_nine_while_saving(tmp_path, rounds):
    """A process that does nothing but save is killed at several moments; each time a checkpoint
    loads, whole."""
    delays = torch.rand(rounds, generator=torch.Generator().manual_seed(0)) * 0.1
    model, optimizer = filled(1.0)
    for number, delay in enumerate(delays.tolist(), 1):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            background = number % 2 == 0
            with Saver(tmp_path, model, optimizer, background=background, keep_last=2) as saver:
                for step in range(1, 1000):
                    model.embedding.weight.data.fill_(1000 * number + step)
                    saver.save(1 + step % 3, {})
                    if step == 2:  # the first step is on the disk, whichever thread writes
                        os.write(tell, b"1")
            os._exit(0)
        os.read(told, 1)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
        checkpoint, fresh = Checkpoint(tmp_path), filled(0.0)
        load(checkpoint, *fresh)
        for name, info in checkpoint.manifest["files"].items():
            assert zlib.crc32((checkpoint.path / name).read_bytes()) == info["crc32"]
        assert fresh[0].embedding.weight[0, 0].item() // 1000 == number


def save_with_full_disk(directory, failing_rank):
    model = megazoo.from_config(tiny_config(), context(tp=2), seed=3)
    with pytest.MonkeyPatch.context() as patch:
        if model.ctx.rank == failing_rank:
            patch.setattr(writing, "sync", full)
        try:
            save(directory, 2, model)
        except UserError as error:
            return str(error), error.exit_code
    return None


def test_a_full_disk_on_one_rank_is_reported_by_all_and_costs_nothing(ranks, tmp_path):
    ranks(run_steps, 2, {"tp": 2}, tiny_config(), 1, tmp_path)
    told = f"can't save to {tmp_path}: No space left on device; earlier checkpoints are untouched"
    for failing_rank in (0, 1):
        assert ranks(save_with_full_disk, 2, tmp_path, failing_rank) == [(told, 1)] * 2
        assert names(tmp_path) == ["latest", "step_00000001"]
    ranks(run_steps, 2, {"tp": 2}, tiny_config(), 1, None, tmp_path)


def save_in_the_background(directory):
    """Train on while two steps are written; returns what was saved, and what the weights were when
    they were."""
    model = megazoo.from_config(tiny_config(), context(tp=2), seed=3)
    optimizer = megazoo.optim.AdamW(model)
    held, begun = threading.Event(), threading.Event()
    original = saving.write_rank

    def slow(*arguments):
        begun.set()
        held.wait(60)
        return original(*arguments)

    weights = []
    ids, targets = make_batch(0)
    reported = []
    saving.write_rank = slow
    try:
        with Saver(directory, model, optimizer, background=True, report=reported.append) as saver:
            for step in (1, 2):
                held.clear()
                begun.clear()
                model.train_batch(ids, targets=targets)
                optimizer.step()
                weights.append(model.embedding.weight.detach().clone())
                saver.save(step, {})
                begun.wait(60)
                for _ in range(2):  # while the thread is held, collectives and all
                    model.train_batch(ids, targets=targets)
                    optimizer.step()
                assert len(reported) == step - 1
                held.set()
    finally:
        saving.write_rank = original
    return weights, reported


def test_training_goes_on_while_a_step_is_written(ranks, tmp_path):
    results = ranks(save_in_the_background, 2, tmp_path)
    for step in (1, 2):
        model = megazoo.from_config(tiny_config(), seed=4)
        load(Checkpoint(tmp_path / f"step_0000000{step}"), model, megazoo.optim.AdamW(model))
        assert torch.equal(
            model.embedding.weight, torch.cat([weights[step - 1] for weights, _ in results])
        )
    assert [len(reported) for _, reported in results] == [2, 2]
    assert results[0][1][1] == f"saved {tmp_path}/step_00000002"


def fail_in_the_background(directory, may_fail):
    """Rank 1's disk is full at step 2; returns what the following save, or the end, raises."""
    model = megazoo.from_config(tiny_config(), context(tp=2), seed=3)
    optimizer = megazoo.optim.AdamW(model)
    original, stderr = writing.sync, io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(stderr),
            Saver(directory, model, optimizer, background=True) as saver,
        ):
            saver.save(1, {}, may_fail=may_fail)
            assert saver.has(1)
            if model.ctx.rank == 1:
                writing.sync = full
            saver.save(2, {}, may_fail=may_fail)
            while saver._thread.is_alive():
                time.sleep(0.01)
            writing.sync = original
            assert not saver.has(2)  # it raises unless a write may fail
            saver.save(3, {}, may_fail=may_fail)
    except UserError as error:
        return str(error), stderr.getvalue()
    finally:
        writing.sync = original
    return None, stderr.getvalue()


@pytest.mark.parametrize("may_fail", [False, True])
def test_a_failure_in_the_background_is_reported_by_the_next_save(ranks, tmp_path, may_fail):
    message = (
        f"can't save to {tmp_path}: No space left on device; earlier checkpoints are untouched"
    )
    answers = ranks(fail_in_the_background, 2, tmp_path, may_fail)
    if may_fail:
        assert answers == [(None, f"warning: {message}\n"), (None, "")]
        steps = ["latest", "step_00000001", "step_00000003"]
    else:
        assert answers == [(message, "")] * 2
        steps = ["latest", "step_00000001"]
    assert names(tmp_path) == steps


def test_what_fails_first_is_raised_after_the_last_step_is_written(tmp_path):
    model = megazoo.from_config(tiny_config(), seed=3)

    def fail():
        with Saver(tmp_path, model, megazoo.optim.AdamW(model), background=True) as saver:
            saver.save(1, {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    Checkpoint(tmp_path).verify()


def test_the_last_steps_are_kept(tmp_path):
    model = megazoo.from_config(tiny_config(), seed=3)
    (tmp_path / "step_notes").mkdir()
    for step in (1, 9, 2, 3):  # 9: of an earlier run; what counts is when it was written
        save(tmp_path, step, model, keep_last=3)
    left = {"step_notes", "latest", *(step_name(step) for step in (9, 2, 3))}
    assert set(names(tmp_path)) == left
    save(tmp_path, 3, model, keep_last=2)
    assert set(names(tmp_path)) == left - {step_name(9)}
    assert Checkpoint(tmp_path).path.name == step_name(3)


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_training_stops_or_goes_on_as_on_save_error_says(tmp_path, monkeypatch, capsys, policy):
    original, calls, directory = os.mkdir, [], tmp_path / "run"

    def refused(path, *rest, **options):
        if "step_" in str(path):
            calls.append(path)
            if len(calls) == 2:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(path, *rest, **options)

    monkeypatch.setattr(os, "mkdir", refused)
    run = [*PROGRAM, *"--steps 4 --save-interval 1 --keep-last 2 --async-save".split()]
    run += ["--save", str(directory), "--on-save-error", policy]
    message = f"can't save to {directory}: Permission denied; earlier checkpoints are untouched"
    if policy == "stop":
        with pytest.raises(UserError, match=message):
            pretrain.main(run)
        assert capsys.readouterr().err == ""
        assert Checkpoint(directory).path.name == step_name(1)
    else:
        pretrain.main(run)
        assert capsys.readouterr().err == f"warning: {message}\n"
        assert names(directory) == ["latest", step_name(3), step_name(4)]
    Checkpoint(directory).verify()
