"""A call that fails on one rank ends on all, in seconds and with its message; one that fails on all
breaks nothing."""

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megazoo
from megazoo.errors import UserError
from megazoo.evaluation.scoring import score
from megazoo.parallel import failure
from megazoo.testing import RankError, RankPool
from megazoo.trainer.stop_signal import StopSignal
from tests.support.programs import ROOT, python
from tests.support.sampling import marked_slow
from tests.support.training import context, layout_name, make_batch, tiny_config, world

OWN = "a rank's own trouble"


class Broken(RuntimeError):
    pass


def break_down(model, in_backward: bool) -> None:
    """Make a call of a layer of this rank, or its backward, fail."""

    def fail(*_):
        raise Broken(OWN)

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


def catching(layout, kind: str, broken: int, in_backward: bool = False):
    """What a call raises where one rank fails: another message, if it waited for its timeout. Ends
    the process group without a barrier, for which it is no longer fit."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(), ctx, seed=3)
    if kind not in ("generate", "beams", "score"):
        call(model, kind)  # connections are made
    if ctx.rank == broken:
        break_down(model, in_backward)
    told = None
    with mock.patch.object(failure, "PATIENCE", 0.3):
        try:
            call(model, kind)
        except Exception as error:
            told = type(error).__name__, str(error)
    torch.distributed.destroy_process_group()
    return told


def assert_all_hear_of_it(ranks, layout, kind, broken, in_backward=False):
    answers = ranks(catching, world(layout), layout, kind, broken, in_backward)
    assert answers.pop(broken) == ("Broken", OWN)
    assert set(answers) == {("UserError", f"rank {broken} failed: Broken: {OWN}")}


FAST_CALLS = (5, 7, 8)  # a split backward, a loop, no backward
CALLS = ["1f1b", "gpipe", "zb-h1", "microbatches", "eval", "forward", "score", "generate", "beams"]


@pytest.mark.parametrize(
    ("kind", "broken"),
    marked_slow(list(product(CALLS, [0, 1])), lambda number, _: number not in FAST_CALLS),
)
def test_the_other_stage_hears_of_it(ranks, kind, broken):
    assert_all_hear_of_it(ranks, dict(pp=2), kind, broken)


LAYOUTS = [dict(tp=2), dict(dp=2), dict(pp=2, dp=2), dict(pp=4), dict(tp=2, pp=2)]


@pytest.mark.parametrize(
    ("layout", "in_backward"),
    marked_slow(list(product(LAYOUTS, [False, True])), lambda number, _: number not in (1, 2, 8)),
    ids=str,
)
def test_all_other_ranks_hear_of_it(ranks, layout, in_backward):
    assert_all_hear_of_it(ranks, layout, "1f1b", world(layout) - 1, in_backward)


@pytest.mark.parametrize("broken", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_backward_in_a_loop_is_heard_of(ranks, broken):
    answers = ranks(catching, 2, dict(pp=2), "microbatches", broken, in_backward=True)
    assert answers[1 - broken] == ("UserError", f"rank {broken} failed: Broken: {OWN}")


REFUSED = pytest.raises(UserError, match="does not divide the batch of 8")
# Who does not see that all have failed waits so long, and then breaks the connections.
PATIENT = mock.patch.object(failure, "PATIENCE", 30.0)


def alike(layout):
    """All ranks refuse a batch; then they go on."""
    model = megazoo.from_config(tiny_config(), context(**layout), seed=3)
    ids, _ = make_batch(0)
    for _ in range(2):
        with REFUSED, PATIENT:
            model.train_batch(ids, labels=ids, num_microbatches=3)
    return model.train_batch(ids, labels=ids).item()


def one_replica_refuses(layout):
    """Replicas call forward without one another: what one refuses is its own affair."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(), ctx, seed=3)
    ids, _ = make_batch(0)
    with torch.no_grad(), PATIENT:
        if ctx.dp_rank == 0:
            with pytest.raises(UserError, match="exceeds the model's max-positions"):
                model(ids.repeat(1, 2))
            model(ids)
    with REFUSED, PATIENT:
        model.train_batch(ids, labels=ids, num_microbatches=3)
    return model.train_batch(ids, labels=ids).item()


@pytest.mark.parametrize(
    ("refuse", "layout"),
    [
        *((alike, layout) for layout in (dict(pp=2), dict(tp=2))),
        (one_replica_refuses, dict(dp=2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (alike, dict(dp=2)),
                (one_replica_refuses, dict(tp=2, dp=2)),
                (one_replica_refuses, dict(pp=2, dp=2)),
            )
        ),
    ],
    ids=lambda part: layout_name(part) if isinstance(part, dict) else part.__name__,
)
def test_what_all_ranks_or_one_replica_refuse_and_catch_breaks_nothing(ranks, refuse, layout):
    assert len(set(ranks(refuse, world(layout), layout))) == 1


def own_trouble(in_body: bool, broken: int):
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


@pytest.mark.parametrize(("in_body", "broken"), [(True, 1), (True, 0), (False, 1)])
def test_trouble_in_a_users_own_code_is_heard_of(ranks, in_body, broken):
    answers = ranks(own_trouble, 2, in_body, broken)
    own = answers.pop(broken)
    assert own == "reward server: connection refused"
    expected = (
        "it left its loop over model.microbatches() before the end"
        if in_body
        else f"RuntimeError: {own}"
    )
    assert answers == [f"rank {broken} failed: {expected}"]


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
    with pytest.raises(RuntimeError, match="onnection"):
        call(model, "1f1b")


def test_a_rank_that_dies_without_a_word_is_no_longer_waited_for():
    pool = RankPool()
    with pytest.raises(RankError, match="rank 1 of 2: the process died"):
        pool.run(dies, 2)
    pool.close()


@pytest.mark.slow
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
        if self.ctx.rank == 1 and self.engine.calls > 2:
            raise megazoo.UserError("what this rank has met")
        return super().forward_stage(x, batch, stage)
"""
    )
    flags = "--model own --pp 2 --mock-data --steps 9 --seq-length 16 --device cpu"
    command = [python(), "pretrain_gpt.py", "--import", tmp_path / "own.py", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    lines = [
        line for line in done.stderr.splitlines() if "error:" in line and "pretrain_gpt" in line
    ]
    assert lines == ["pretrain_gpt.py: error: rank 1 failed: what this rank has met"]
    assert done.returncode == 1


def call_from_two_threads(layout) -> tuple[str, bool]:
    """What a call says while another thread is within one, and whether that one ends as ever."""
    model, ids = megazoo.from_config(tiny_config(), context(**layout), seed=3), make_batch(0)[0]
    expected, inside, going_on = (
        model.eval_batch(ids, labels=ids),
        threading.Event(),
        threading.Event(),
    )

    def wait(*_):
        inside.set()
        assert going_on.wait(60)

    module = next(iter(model.layers.values()))
    handle = module.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(model.eval_batch, ids, labels=ids)
        assert inside.wait(60)
        with pytest.raises(UserError) as refusal:
            model.train_batch(ids, labels=ids)
        going_on.set()
        first = other.result(60)
    handle.remove()
    again = model.eval_batch(ids, labels=ids)
    return str(refusal.value), bool(expected == first == again)


@pytest.mark.parametrize("layout", [dict(tp=2), dict(dp=2)], ids=layout_name)
def test_two_threads_that_call_one_model_are_told(ranks, layout):
    for told, as_ever in ranks(call_from_two_threads, 2, layout):
        assert told.startswith("train_batch was called while eval_batch runs in another thread")
        assert as_ever


def test_what_the_first_rank_says_stays(monkeypatch):
    """Of three ranks two fail, one after the other; the third reads why."""
    monkeypatch.setattr(failure, "PATIENCE", 0.05)
    store = dist.TCPStore("localhost", 0, is_master=True)
    call = object.__new__(failure._Call)
    call.ranks, call.count, call.cause = 3, "failed", "cause"
    assert not call._all_fail(store, "rank 1 failed: first")
    assert not call._all_fail(store, "rank 2 failed: afterwards")
    assert call._first_cause(store) == "rank 1 failed: first"
