"""Saves that fail: numbers that are not finite, and whatever goes wrong in the background or on one
rank."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Saver, save, saving
from megazoo.errors import UserError
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.formats.resharding import write_shards
from megazoo.models.pretrained import open_source
from megazoo.parallel.collectives import all_gather_objects
from tests.support.directories import PROGRAM, names, tiny_model
from tests.support.pretraining import ROOT
from tests.support.processes import free_port
from tests.support.training import context, in_fresh_processes, tiny_config

# Weights that are not finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_that_are_not_finite_are_not_saved(tmp_path, dtype):
    model = megazoo.from_config(tiny_config(layers=1), seed=3, dtype=dtype)
    optimizer = megazoo.optim.AdamW(model)
    save(tmp_path, 1, model, optimizer)
    refusal = r"{} is not finite \(NaN or infinite\) as {}.*; earlier checkpoints are untouched"
    entries = {entry.name: entry.parameter for entry in model.entries()}
    weight, state = "layers.0.mlp.down.weight", "embedding.weight.exp_avg"
    spoilt = [(entries[weight], weight, dtype)]
    spoilt += [(optimizer.state["embedding.weight"]["exp_avg"], state, torch.float32)]
    for value, (tensor, name, kind) in product(map(float, ("nan", "inf", "-inf")), spoilt):
        with torch.no_grad():
            place = tuple(size - 1 for size in tensor.shape)
            before, tensor[place] = tensor[place].clone(), value
        assert tensor.dtype == kind
        kind = str(kind).removeprefix("torch.")
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


@pytest.mark.parametrize("may_fail", [False, True])
def test_whatever_fails_in_the_thread_is_told(tmp_path, monkeypatch, capsys, may_fail):
    model = tiny_model()
    optimizer = megazoo.optim.AdamW(model)
    for failure in (MemoryError, KeyError, SystemExit):

        def fail(*_, failure=failure):
            raise failure("in the middle")

        told = f"{failure.__name__}: .*in the middle"
        expected = contextlib.nullcontext() if may_fail else pytest.raises(UserError, match=told)
        with (
            pytest.MonkeyPatch.context() as patch,
            expected,
            Saver(tmp_path, model, optimizer, background=True) as saver,
        ):
            saver.save(1, {})
            saver.wait()
            patch.setattr(saving, "write_rank", fail)
            saver.save(2, {}, may_fail=may_fail)
            saver.wait()
        assert (f"{failure.__name__}: " in capsys.readouterr().err) == may_fail
        assert names(tmp_path) == ["latest", "step_00000001"]


def fail_on_rank_1(directory, background, where):
    model = megazoo.from_config(tiny_config(), context(tp=2), seed=3)

    def fail(*_):
        raise MemoryError("no more")

    original = saving.write_rank, saving.StepContents.copied
    if model.ctx.rank == 1 and where == "write":
        saving.write_rank = fail
    elif model.ctx.rank == 1:
        saving.StepContents.copied = fail
    try:
        with Saver(directory, model, megazoo.optim.AdamW(model), background=background) as saver:
            saver.save(1, {})
    except UserError as error:
        return str(error)
    finally:
        saving.write_rank, saving.StepContents.copied = original
    return None


def test_whatever_fails_on_one_rank_is_told_by_all(ranks, tmp_path):
    told = f"can't save to {tmp_path}: MemoryError: no more; earlier checkpoints are untouched"
    for background, where in ((False, "write"), (True, "write"), (True, "copy")):
        found = ranks(fail_on_rank_1, 2, tmp_path, background, where)
        assert found == [told, told], (background, where)
        assert names(tmp_path) == []


def stopped_while_saving(directory):
    """Rank 1 is stopped while it writes a step in the background, and goes on when rank 0 has given
    it up; returns the seconds that took, and the error."""
    ctx = megazoo.ParallelContext.from_torch(2, device="cpu", timeout=timedelta(seconds=5))
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
    assert seconds > 4, "given up before the timeout of 5 s"
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
    port = free_port()
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
        until = time.monotonic() + 250
        while Path(f"/proc/{ranks[1].pid}/stat").read_text().split()[2] != "T":
            assert time.monotonic() < until
            time.sleep(0.05)
        assert ranks[0].wait(250) not in (0, None)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)
    assert "no response from rank 1" in (tmp_path / "rank_0").read_text()
    assert not (tmp_path / "run").exists()


def test_the_program_refuses_weights_that_are_not_finite(tmp_path):
    run = [*PROGRAM, "--save", str(tmp_path), "--steps", "1", "--dtype", "float32"]
    with pytest.raises(UserError, match=r"is not finite \(NaN or infinite\) as float32") as refused:
        pretrain.main([*run, "--lr", "1e39"])
    assert refused.value.exit_code == 1
    assert names(tmp_path) == []
