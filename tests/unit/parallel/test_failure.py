"""A call that fails on one rank ends on all, in seconds and with its message; one that fails on all
breaks nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.cli.elastic import StopSignal
from megazoo.errors import UserError
from megazoo.evaluation.scoring import score
from megazoo.parallel import failure
from tests.support.programs import python
from tests.support.training import context, layout_name, make_batch, tiny_config, world

SOON = 10.0  # seconds; the groups' timeout is 60


class Broken(RuntimeError):
    pass


def break_down(model, in_backward: bool) -> None:
    """Make a call of a layer of this rank, or its backward, fail."""

    def fail(*_):
        raise Broken("a rank's own trouble")

    # The norm, where there are no layers.
    module = next((layer for layer in model.layers.values()), getattr(model, "norm", None))
    if in_backward:
        module.register_full_backward_hook(fail)
    else:
        module.register_forward_pre_hook(fail)


def call(model, kind: str) -> None:
    ids, _ = make_batch(0)
    ids = ids.chunk(model.ctx.dp_size)[model.ctx.dp_rank]
    if kind in ("1f1b", "gpipe", "zb-h1"):
        model.train_batch(ids, labels=ids, num_microbatches=4, schedule=kind)
    elif kind == "microbatches":
        for out in model.microbatches(ids, labels=ids, num_microbatches=2):
            out.loss.backward()
    elif kind == "eval":
        model.eval_batch(ids, labels=ids)
    elif kind == "forward":
        model(ids, labels=ids)
    elif kind == "score":
        score(model, ids, ids)
    elif kind == "beams":
        model.generate(ids[:2, :4], max_new_tokens=4, num_beams=2)
    else:
        model.generate(ids[:2, :4], max_new_tokens=4)


def told(layout, kind: str, broken: int, in_backward: bool):
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(), ctx, seed=3)
    if kind not in ("generate", "beams", "score"):
        call(model, kind)  # connections are made
    if ctx.rank == broken:
        break_down(model, in_backward)
    began = time.monotonic()
    with mock.patch.object(failure, "PATIENCE", 0.3):
        try:
            call(model, kind)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "none", "", 0.0


def catching(layout, kind, broken, in_backward=False):
    """As told, and ends the process group without a barrier, for which it is no longer fit."""
    answer = told(layout, kind, broken, in_backward)
    torch.distributed.destroy_process_group()
    return answer


CALLS = ["1f1b", "gpipe", "zb-h1", "microbatches", "eval", "forward", "score", "generate", "beams"]


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("broken", [0, 1])
def test_the_other_stage_hears_of_it(ranks, kind, broken):
    answers = ranks(catching, 2, dict(pp=2), kind, broken)
    assert answers[broken][:2] == ("Broken", "a rank's own trouble")
    assert answers[1 - broken][:2] == (
        "UserError",
        f"rank {broken} failed: Broken: a rank's own trouble",
    )
    assert max(seconds for *_, seconds in answers) < SOON


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    "layout",
    [dict(tp=2), dict(dp=2), dict(tp=2, pp=2), dict(pp=2, dp=2), dict(pp=4)],
    ids=layout_name,
)
def test_all_other_ranks_hear_of_it(ranks, layout, in_backward):
    broken = world(layout) - 1
    answers = ranks(catching, world(layout), layout, "1f1b", broken, in_backward)
    assert answers.pop(broken)[:2] == ("Broken", "a rank's own trouble")
    for kind, text, seconds in answers:
        assert (kind, text) == ("UserError", f"rank {broken} failed: Broken: a rank's own trouble")
        assert seconds < SOON


def in_backward_of_a_loop(broken):
    return catching(dict(pp=2), "microbatches", broken, in_backward=True)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_backward_in_a_loop_is_heard_of(ranks, broken):
    answers = ranks(in_backward_of_a_loop, 2, broken)
    assert answers[1 - broken][:2] == (
        "UserError",
        f"rank {broken} failed: Broken: a rank's own trouble",
    )


def alike(layout):
    """All ranks refuse a batch; then they go on."""
    model = megazoo.from_config(tiny_config(), context(**layout), seed=3)
    ids, _ = make_batch(0)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(UserError, match="doesn't divide the batch of 8"):
            model.train_batch(ids, labels=ids, num_microbatches=3)
        assert time.monotonic() - began < 1
    return model.train_batch(ids, labels=ids).item()


@pytest.mark.parametrize("layout", [dict(pp=2), dict(tp=2), dict(dp=2)], ids=layout_name)
def test_what_all_ranks_refuse_breaks_nothing(ranks, layout):
    losses = ranks(alike, 2, layout)
    assert losses[0] == losses[1]


def one_replica_refuses(layout):
    """Replicas call forward without one another: what one refuses is its own affair."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(), ctx, seed=3)
    ids, _ = make_batch(0)
    with torch.no_grad():
        if ctx.dp_rank == 0:
            with pytest.raises(UserError, match="exceeds the model's max-positions"):
                model(ids.repeat(1, 2))
            model(ids)
    began = time.monotonic()
    with pytest.raises(UserError, match="doesn't divide the batch of 8"):
        model.train_batch(ids, labels=ids, num_microbatches=3)
    assert time.monotonic() - began < 1 + 2 * (ctx.dp_rank == 1)
    return model.train_batch(ids, labels=ids).item()


@pytest.mark.parametrize(
    "layout", [dict(dp=2), dict(tp=2, dp=2), dict(pp=2, dp=2)], ids=layout_name
)
def test_what_one_replica_refuses_and_catches_breaks_nothing(ranks, layout):
    losses = ranks(one_replica_refuses, world(layout), layout)
    assert len(set(losses)) == 1


def own_trouble(in_body: bool, broken: int = 1):
    """In the body of a loop over micro-batches; or in a user's loss, in words of the network's."""
    ctx = context(pp=2)
    model = megazoo.from_config(tiny_config(), ctx, seed=3)
    ids, _ = make_batch(0)

    def ask(*_):
        raise RuntimeError("reward server: connection refused")

    with mock.patch.object(failure, "PATIENCE", 0.3):
        try:
            if in_body:
                for number, out in enumerate(
                    model.microbatches(ids, labels=ids, num_microbatches=4)
                ):
                    if number == 1 and ctx.pp_rank == broken:
                        ask()
                    out.loss.backward()
            else:
                model.train_batch(ids, labels=ids, num_microbatches=2, loss_fn=ask)
        except Exception as error:
            text = str(error)
    torch.distributed.destroy_process_group()
    return text


@pytest.mark.parametrize("in_body", [True, False])
def test_trouble_in_a_users_own_code_is_heard_of(ranks, in_body):
    first, last = ranks(own_trouble, 2, in_body)
    assert last == "reward server: connection refused"
    expected = "it left its loop over model.microbatches()" if in_body else f"RuntimeError: {last}"
    assert first == f"rank 1 failed: {expected}"


def test_the_first_stages_trouble_in_a_loop_is_heard_of(ranks):
    first, last = ranks(own_trouble, 2, True, 0)
    assert first == "reward server: connection refused"
    assert last == "rank 0 failed: it left its loop over model.microbatches()"


def after_the_end():
    model = megazoo.from_config(tiny_config(), context(dp=2), seed=3)
    torch.distributed.destroy_process_group()
    return model(make_batch(0)[0]).logits.shape


def test_a_replica_is_used_after_the_end_of_the_process_group(ranks):
    assert ranks(after_the_end, 2) == [(8, 16, 61)] * 2


def test_no_thread_outlives_the_watch_for_signals():
    """One that held the context to the end of the interpreter aborted the process."""
    before = threading.enumerate()
    with StopSignal(megazoo.ParallelContext()):
        assert len(threading.enumerate()) == len(before) + 1
    assert threading.enumerate() == before


def dies():
    ctx = context(pp=2)
    model = megazoo.from_config(tiny_config(), ctx, seed=3)
    call(model, "1f1b")
    if ctx.rank == 1:
        model.norm.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="onnection"):
        call(model, "1f1b")
    raise RuntimeError(f"heard after {time.monotonic() - began:.0f} s")


def test_a_rank_that_dies_without_a_word_is_no_longer_waited_for():
    from megazoo.testing import RankPool
    from megazoo.testing.ranks import RankError

    pool, began = RankPool(), time.monotonic()
    with pytest.raises(RankError):
        pool.run(dies, 2)
    pool.close()
    assert time.monotonic() - began < 2 * SOON


def test_a_program_tells_it_in_one_line(tmp_path):
    (tmp_path / "own.py").write_text(
        """
import torch.distributed as dist

import megazoo
from megazoo.models.gpt2 import GPT2


@megazoo.register("own")
class Own(GPT2):
    class Config(GPT2.Config):
        pass

    presets = {
        "own-tiny": Config(vocab_size=257, max_positions=256, hidden_size=32, layers=2, heads=2)
    }

    def forward_stage(self, x, batch, stage):
        if self.ctx.rank == 1 and self._calls > 2:
            raise megazoo.UserError("what this rank has met")
        return super().forward_stage(x, batch, stage)
"""
    )
    command = [
        python(),
        "pretrain_gpt.py",
        "--import",
        tmp_path / "own.py",
        "--model",
        "own",
        "--pp",
        "2",
    ]
    began = time.monotonic()
    done = subprocess.run(
        [
            *map(str, command),
            "--mock-data",
            "--steps",
            "9",
            "--seq-length",
            "16",
            "--device",
            "cpu",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [
        line for line in done.stderr.splitlines() if "error:" in line and "pretrain_gpt" in line
    ]
    assert lines == ["pretrain_gpt.py: error: rank 1 failed: what this rank has met"]
    assert done.returncode == 1
    assert time.monotonic() - began < 4 * SOON, sys.executable
