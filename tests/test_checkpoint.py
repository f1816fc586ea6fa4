"""Checkpoints: the bytes, resuming in any layout, and what a kill or a full disk leaves behind."""

import contextlib
import errno
import io
import json
import os
import signal
import struct
import sys
import threading
import time
import zlib

import pytest
import torch
from helpers import CLIP, context, make_batch, replica_rows, tiny_config, worst_relative
from safetensors.torch import load_file

import megazoo
import pretrain_gpt
from megazoo.checkpoint import Checkpoint, Saver, load, save
from megazoo.checkpoint import format as checkpoint_format
from megazoo.checkpoint.places import step_name
from megazoo.errors import UserError
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel import ParallelContext

SAVE = sys.modules[save.__module__]


def run_steps(layout, config, steps, directory=None, resume=None, dtype=torch.float32):
    """Train steps first..last; save at the end into `directory`; start from the checkpoint in
    `resume`.

    Returns the (loss, norm) of every step and this rank's parameters.
    """
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, seed=3, dtype=dtype)
    growing = (
        LossScale(2.0**20, growth_interval=2, hysteresis=1) if dtype == torch.float16 else None
    )
    optimizer = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=CLIP, loss_scale=growing)
    first = load(Checkpoint(resume), model, optimizer)["step"] if resume else 0
    history = []
    for step in range(first + 1, first + steps + 1):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        loss = model.train_batch(ids, targets=targets, num_microbatches=len(ids) // 2, step=step)
        history.append((loss.item(), optimizer.step().item()))
    if directory:
        save(directory, first + steps, model, optimizer, {"consumed_samples": 8 * (first + steps)})
    return history, {entry.name: entry.parameter.detach().clone() for entry in model.entries()}


def world(layout):
    return torch.Size(layout.values()).numel()


def test_stop_and_resume_is_bit_for_bit_with_dropout(ranks, tmp_path):
    layout, config = {"tp": 2, "pp": 2}, tiny_config(dropout=0.1)
    straight = ranks(run_steps, 4, layout, config, 20)
    first = ranks(run_steps, 4, layout, config, 10, tmp_path)
    second = ranks(run_steps, 4, layout, config, 10, None, tmp_path)
    for whole, before, after in zip(straight, first, second, strict=True):
        assert whole[0] == before[0] + after[0]
        assert all(torch.equal(whole[1][name], after[1][name]) for name in whole[1])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("before", "afters"),
    [
        ({"tp": 2, "pp": 2, "dp": 2}, [{"pp": 4}, {"tp": 4, "dp": 2}, {}]),
        ({"pp": 2}, [{"tp": 2, "dp": 2}]),
        ({}, [{"tp": 2, "pp": 2}]),
    ],
    ids=str,
)
def test_resume_in_another_layout(ranks, tmp_path, before, afters, tied):
    config = tiny_config(tied)
    expected, _ = run_steps({}, config, 8)
    ranks(run_steps, world(before), before, config, 4, tmp_path)
    for after in afters:
        history = ranks(run_steps, world(after), after, config, 4, None, tmp_path)[0][0]
        assert worst_relative(history, expected[4:]) < 1e-5, after


@pytest.mark.parametrize("ffn_size", [50, 1283])
def test_resume_in_another_layout_with_inner_features_that_tp_does_not_divide(
    ranks, tmp_path, ffn_size
):
    config = tiny_config(hidden_size=40, heads=5, ffn_size=ffn_size)
    expected, _ = run_steps({}, config, 6)
    ranks(run_steps, 3, {"tp": 3}, config, 3, tmp_path)
    stored = Checkpoint(tmp_path).manifest["tensors"]["layers.0.mlp.up.weight"]["shard"]
    assert stored == {"dim": 0, "parts": [ffn_size], "units": [128] if ffn_size == 1283 else []}
    for after in ({"tp": 2, "dp": 2}, {}):
        run = (after, config, 3, None, tmp_path)
        history, _ = ranks(run_steps, world(after), *run)[0] if after else run_steps(*run)
        assert worst_relative(history, expected[3:]) < 1e-5, after


def test_files_and_manifest_are_as_documented(ranks, tmp_path):
    ranks(run_steps, 4, {"tp": 2, "dp": 2}, tiny_config(), 1, tmp_path)
    step = tmp_path / "step_00000001"
    assert (tmp_path / "latest").read_text().strip() == step.name
    models = {f"model_tp_{t}_pp_0.safetensors" for t in range(2)}
    optimizers = {f"optimizer_tp_{t}_pp_0_dp_{d}.safetensors" for t in range(2) for d in range(2)}
    assert {path.name for path in step.iterdir()} == models | optimizers | {
        "megazoo.json",
        "trainer.json",
    }
    manifest = json.loads((step / "megazoo.json").read_text())
    for name, info in manifest["files"].items():
        data = (step / name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (info["size"], info["crc32"])
    assert manifest["layout"] == {"tp": 2, "pp": 1, "dp": 2}
    assert manifest["family"] == "gpt2"
    assert manifest["config"]["vocab_size"] == 61
    vocabulary = [load_file(step / name)["embedding.weight"] for name in sorted(models)]
    assert [len(part) for part in vocabulary] == [31, 30]
    assert manifest["tensors"]["embedding.weight"]["shape"] == [61, 32]
    # Every tensor is stored once: replicated ones by tp rank 0 only, optimizer states by one
    # replica each.
    assert "norm.weight" in load_file(step / "model_tp_0_pp_0.safetensors")
    assert "norm.weight" not in load_file(step / "model_tp_1_pp_0.safetensors")
    states = [set(load_file(step / f"optimizer_tp_0_pp_0_dp_{d}.safetensors")) for d in range(2)]
    assert states[0]
    assert states[1]
    assert not states[0] & states[1]
    assert {"embedding.weight.exp_avg", "embedding.weight.exp_avg_sq"} <= states[0] | states[1]
    assert json.loads((step / "trainer.json").read_text())["consumed_samples"] == 8


def test_safetensors_bytes_written_by_hand(tmp_path):
    tensors = {
        "a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "b": torch.tensor([5.0], dtype=torch.bfloat16),
    }
    info = checkpoint_format.write_safetensors(tmp_path / "x", tensors)
    header = {
        "__metadata__": {"format": "pt", "writer": "megazoo"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [1], "data_offsets": [16, 18]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    expected = (
        struct.pack("<Q", len(text)) + text + struct.pack("<4f", 1, 2, 3, 4) + bytes.fromhex("a040")
    )
    assert (tmp_path / "x").read_bytes() == expected
    assert info == {"size": len(expected), "crc32": zlib.crc32(expected)}


class Killed(BaseException):
    """Stands for kill -9: nothing catches it, nothing is cleaned up after it."""


def killed_at(moment, monkeypatch):
    """Make the moment-th call that changes the disk raise Killed before it acts; returns the calls
    counted so far."""
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) == moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in ("rename", "replace", "fsync", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(
        checkpoint_format.shutil, "rmtree", counted(checkpoint_format.shutil.rmtree)
    )
    return calls


@pytest.mark.parametrize("second_step", [2, 1], ids=["new step", "same step again"])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path, second_step):
    model = megazoo.from_config(tiny_config(), seed=3)
    optimizer = megazoo.optim.AdamW(model)
    ids, targets = make_batch(0)

    def values_on_disk(directory):
        fresh = megazoo.from_config(tiny_config(), seed=4)
        load(Checkpoint(directory), fresh, megazoo.optim.AdamW(fresh))
        return fresh.embedding.weight.detach().clone()

    def train():
        model.train_batch(ids, targets=targets)
        optimizer.step()
        return model.embedding.weight.detach().clone()

    old = train()
    save(tmp_path / "0", 1, model, optimizer)
    new = train()
    moment = outcomes = 0
    while True:
        moment += 1
        directory = tmp_path / str(moment)
        checkpoint_format.shutil.copytree(tmp_path / "0", directory)
        with pytest.MonkeyPatch.context() as patch:
            calls = killed_at(moment, patch)
            with contextlib.suppress(Killed):
                save(directory, second_step, model, optimizer)
        value = values_on_disk(directory)
        assert torch.equal(value, old) or torch.equal(value, new), f"killed before call {moment}"
        outcomes += torch.equal(value, new)
        # and the next save is not disturbed by what is left
        save(directory, second_step, model, optimizer)
        assert torch.equal(values_on_disk(directory), new)
        if len(calls) < moment:
            break
    assert moment > 10
    assert 1 < outcomes < moment


def test_a_directory_without_its_manifest_is_never_chosen(tmp_path):
    model = megazoo.from_config(tiny_config(), seed=3)
    step = save(tmp_path, 1, model)
    # killed while writing, or while being removed
    for leftover in (".step_00000002.partial", "step_00000003"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / ".megazoo.json.partial").write_text("{}")
    (tmp_path / "latest").unlink()
    assert Checkpoint(tmp_path).path == step


def test_kill_minus_nine_while_saving(tmp_path):
    """A process that does nothing but save is killed at twenty moments; each time a checkpoint
    loads, whole."""
    delays = torch.rand(20, generator=torch.Generator().manual_seed(0)) * 0.3
    model = megazoo.from_config(tiny_config(), seed=3)
    optimizer = megazoo.optim.AdamW(model)
    save(tmp_path, 1, model, optimizer)
    steps = []
    for round_number, delay in enumerate(delays.tolist(), 1):
        child = os.fork()
        if child == 0:
            with Saver(
                tmp_path, model, optimizer, background=round_number % 2 == 0, keep_last=2
            ) as saver:
                for step in range(1, 1000):
                    model.embedding.weight.data.fill_(1000 * round_number + step)
                    saver.save(1 + step % 3, {})
            os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        fresh = megazoo.from_config(tiny_config(), seed=4)
        checkpoint = Checkpoint(tmp_path)
        load(checkpoint, fresh, megazoo.optim.AdamW(fresh))
        for name, info in checkpoint.manifest["files"].items():
            assert zlib.crc32((checkpoint.path / name).read_bytes()) == info["crc32"]
        steps.append(fresh.embedding.weight[0, 0].item())
    assert len(set(steps)) > 3


def save_with_full_disk(directory, failing_rank):
    model = megazoo.from_config(tiny_config(), context(tp=2), seed=3)
    if model.ctx.rank != failing_rank:
        return save_expecting_refusal(directory, model)
    original = checkpoint_format.sync

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint_format.sync = full
    try:
        return save_expecting_refusal(directory, model)
    finally:
        checkpoint_format.sync = original


def save_expecting_refusal(directory, model):
    try:
        save(directory, 2, model)
    except UserError as error:
        return str(error), error.exit_code
    return None


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_told_by_all_and_costs_nothing(ranks, tmp_path, failing_rank):
    ranks(run_steps, 2, {"tp": 2}, tiny_config(), 1, tmp_path)
    answers = ranks(save_with_full_disk, 2, tmp_path, failing_rank)
    assert answers[0] == answers[1]
    assert answers[0][1] == 1
    assert "No space left on device; earlier checkpoints are untouched" in answers[0][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]
    ranks(run_steps, 2, {"tp": 2}, tiny_config(), 1, None, tmp_path)


def save_in_the_background(directory):
    """Train on while two steps are written; returns what was saved, and what the weights were when
    they were."""
    model = megazoo.from_config(tiny_config(), context(tp=2), seed=3)
    optimizer = megazoo.optim.AdamW(model)
    held, begun = threading.Event(), threading.Event()
    original = SAVE.write_rank

    def slow(*arguments):
        begun.set()
        held.wait(60)
        return original(*arguments)

    weights = []
    ids, targets = make_batch(0)
    said = []
    SAVE.write_rank = slow
    try:
        with Saver(directory, model, optimizer, background=True, say=said.append) as saver:
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
                assert len(said) == step - 1
                held.set()
    finally:
        SAVE.write_rank = original
    return weights, said


def test_training_goes_on_while_a_step_is_written(ranks, tmp_path):
    results = ranks(save_in_the_background, 2, tmp_path)
    for step in (1, 2):
        model = megazoo.from_config(tiny_config(), seed=4)
        load(Checkpoint(tmp_path / f"step_0000000{step}"), model, megazoo.optim.AdamW(model))
        assert torch.equal(
            model.embedding.weight, torch.cat([weights[step - 1] for weights, _ in results])
        )
    assert [len(said) for _, said in results] == [2, 2]
    assert results[0][1][1] == f"saved {tmp_path}/step_00000002"


def fail_in_the_background(directory, may_fail):
    """Rank 1's disk is full at step 2; returns what the following save, or the end, raises."""
    model = megazoo.from_config(tiny_config(), context(tp=2), seed=3)
    optimizer = megazoo.optim.AdamW(model)
    original = checkpoint_format.sync

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(told),
            Saver(directory, model, optimizer, background=True) as saver,
        ):
            saver.save(1, {}, may_fail=may_fail)
            saver.wait()
            if model.ctx.rank == 1:
                checkpoint_format.sync = full
            saver.save(2, {}, may_fail=may_fail)
            while saver._thread.is_alive():
                time.sleep(0.01)
            checkpoint_format.sync = original
            saver.save(3, {}, may_fail=may_fail)
    except UserError as error:
        return str(error), told.getvalue()
    finally:
        checkpoint_format.sync = original
    return None, told.getvalue()


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
    assert sorted(path.name for path in tmp_path.iterdir()) == steps


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
    assert {path.name for path in tmp_path.iterdir()} == left
    save(tmp_path, 3, model, keep_last=2)
    assert {path.name for path in tmp_path.iterdir()} == left - {step_name(9)}
    assert Checkpoint(tmp_path).path.name == step_name(3)


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_training_stops_or_goes_on_as_on_save_error_says(tmp_path, monkeypatch, capsys, policy):
    arguments = "--steps 4 --save-interval 1 --eval-steps 0 --device cpu --seq-length 32 --keep-last 2".split()
    arguments += (
        "--hidden-size 32 --heads 2 --global-batch-size 2 --micro-batch-size 2 --async-save".split()
    )
    original, calls = os.mkdir, []

    def refused(path, *rest, **options):
        if "step_" in str(path):
            calls.append(path)
            if len(calls) == 2:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(path, *rest, **options)

    monkeypatch.setattr(os, "mkdir", refused)
    run = [*arguments, "--save", str(tmp_path / "run"), "--on-save-error", policy]
    message = f"can't save to {tmp_path}/run: Permission denied; earlier checkpoints are untouched"
    if policy == "stop":
        with pytest.raises(UserError, match=message):
            pretrain_gpt.main(run)
        assert capsys.readouterr().err == ""
        assert Checkpoint(tmp_path / "run").path.name == step_name(1)
    else:
        pretrain_gpt.main(run)
        assert capsys.readouterr().err == f"warning: {message}\n"
        assert sorted(path.name for path in (tmp_path / "run").glob("step*")) == [
            step_name(3),
            step_name(4),
        ]
    Checkpoint(tmp_path / "run").verify()


def test_what_is_not_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a checkpoint: no such directory"):
        Checkpoint(tmp_path / "none")
    with pytest.raises(
        UserError, match=r"is not a checkpoint: it has neither latest nor megazoo.json"
    ):
        Checkpoint(tmp_path)
    (tmp_path / "megazoo.json").write_text("{}")
    with pytest.raises(UserError, match="is not a manifest"):
        Checkpoint(tmp_path)


def test_a_newer_format_is_refused(tmp_path):
    path = save(tmp_path, 1, megazoo.from_config(tiny_config()))
    manifest = json.loads((path / "megazoo.json").read_text())
    (path / "megazoo.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(UserError, match="has format 2; this megazoo reads 1: upgrade megazoo"):
        Checkpoint(tmp_path)


def test_loading_reads_only_the_ranks_own_bytes(ranks, tmp_path):
    ranks(run_steps, 2, {"tp": 2}, tiny_config(tied=False), 1, tmp_path)
    for rank in range(4):
        model = megazoo.from_config(
            tiny_config(tied=False), ParallelContext.virtual(tp=2, pp=2, rank=rank)
        )
        checkpoint = Checkpoint(tmp_path)
        load(checkpoint, model)
        assert checkpoint.bytes_read == sum(parameter.nbytes for parameter in model.parameters())
