"""An absent rank is named while the others still wait for it; steps that are longer than launchers
wait are told."""

import contextlib
import io
import os
import re
import signal
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from megazoo.launching import absent, heartbeat
from megazoo.launching.absent import naming_absent_ranks
from megazoo.launching.heartbeat import LEFT, Watch
from megazoo.parallel import ParallelContext, failure
from megazoo.parallel.collectives import all_gather_objects
from megazoo.torch_internals import default_store
from megazoo.trainer import stop_signal
from megazoo.trainer.stop_signal import StopSignal
from tests.support.training import context

SOON = 60.0  # seconds, on a machine that does much else


def beats(number: int, *calls: int) -> list[bytes]:
    """What ranks say that have made so many calls each; None for one that left."""
    return [
        LEFT if made is None else f"{number} {made} train_batch {made}".encode() for made in calls
    ]


def looks(watch: Watch, *told: list[bytes], every: float = 1.0) -> list[list[str]]:
    return [watch.look(each, 100 + at * every) for at, each in enumerate(told)]


NAMES = ["rank 0 on a", "rank 1 on a", "rank 2 on b"]


def test_a_rank_that_says_nothing_is_named_once():
    watch = Watch(NAMES, silence=3, lateness=100)
    told = [beats(at, 7, 7, 7)[:2] + beats(0, 7) for at in range(8)]
    found = looks(watch, *told)
    assert found == [[]] * 4 + [
        [
            "rank 2 on b has not responded for 4 s: it was stopped, or its machine or network is "
            "down; its last call was train_batch 7"
        ],
        [], [], [],
    ]  # fmt: skip
    assert [watch.is_silent(rank) for rank in range(3)] == [False, False, True]


def test_a_rank_that_is_named_and_speaks_again_may_be_named_again():
    watch = Watch(NAMES[:1], silence=3, lateness=100)
    told = [beats(number, 1) for number in [1] * 6 + [2] * 6]
    assert [bool(lines) for lines in looks(watch, *told)].count(True) == 2


def test_a_rank_that_does_not_enter_a_call_is_named():
    watch = Watch(NAMES, silence=100, lateness=3)
    told = [beats(at, 8, 7, 8) for at in range(6)]
    assert looks(watch, *told) == [[]] * 4 + [
        [
            "rank 1 on a has not called train_batch 8, in which other ranks have waited for 4 s; "
            "its last call was train_batch 7"
        ],
        [],
    ]


def test_ranks_that_go_on_are_not_late():
    watch = Watch(NAMES, silence=100, lateness=3)
    behind = [beats(at, at + 5, at, at + 5) for at in range(9)]
    assert not any(looks(watch, *behind))
    watch = Watch(NAMES, silence=100, lateness=3)
    together = [beats(at, 5, 5, 5) for at in range(9)]  # in one long call
    assert not any(looks(watch, *together))


def test_ranks_that_left_are_not_absent():
    watch = Watch(NAMES, silence=3, lateness=3)
    assert not any(looks(watch, *[beats(at, 5, None, None) for at in range(9)]))
    assert not watch.is_silent(1)
    assert not any(looks(Watch(NAMES, 3, 3), *[beats(at, None, None, None) for at in range(9)]))


def test_who_was_stopped_itself_blames_nobody():
    watch = Watch(NAMES, silence=3, lateness=3)
    assert not any(looks(watch, beats(1, 5, 4, 5), beats(1, 5, 4, 5), every=1000.0))


def hears(absent: str, who: int):
    """Ranks within naming_absent_ranks, of which one is stopped by a signal, or does not enter a
    call. Returns what this rank said meanwhile, once the one that tells has said it."""
    ctx, said = context(dp=3), io.StringIO()
    heartbeat.PERIOD, heartbeat.SILENCE = 0.05, 2.0
    if absent == "late":  # after half of the timeout; the groups' own stays 60 s
        object.__setattr__(ctx, "timeout", timedelta(seconds=4))
    pids = all_gather_objects(os.getpid(), ctx)
    teller = 2 if who == 0 and absent == "stopped" else 0
    waker = 1  # lets the one that was stopped go on
    failure._note("earlier")
    # The ranks' own store is a file, whose lock the one that is stopped might hold.
    mine = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("localhost", all_gather_objects(mine.port, ctx)[waker])
    heartbeat.store_of_a_thread = store.clone
    began = time.monotonic()
    with contextlib.redirect_stderr(said), naming_absent_ranks(ctx):
        if ctx.rank != who:
            failure._note("train_batch")
        elif absent == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while ctx.rank == teller and not said.getvalue():
            assert time.monotonic() < began + SOON
            time.sleep(0.02)
        if ctx.rank == teller:
            store.set("seen", "")
        while not store.check(["seen"]):
            assert time.monotonic() < began + 2 * SOON
            time.sleep(0.02)
        if ctx.rank == waker and absent == "stopped":
            os.kill(pids[who], signal.SIGCONT)
    all_gather_objects(None, ctx)  # until all have left, the waker keeps the store
    return said.getvalue()


@pytest.mark.parametrize(
    ("absent", "who"),
    [pytest.param("stopped", 2, marks=pytest.mark.slow), ("stopped", 0), ("late", 1)],
)
def test_the_others_name_the_absent_rank_while_they_wait(absent, who):
    from megazoo.testing import RankPool

    pool = RankPool()  # of its own: settings are changed in its processes
    try:
        said = pool.run(hears, 3, absent, who, timeout=3 * SOON)
    finally:
        pool.close()
    teller = 2 if who == 0 else 0
    name = rf"rank {who} \(tp 0, pp 0, dp {who}\) on {re.escape(os.uname().nodename)} "
    line = {
        "stopped": name + r"has not responded for \d+ s: .*; its last call was earlier 1\n",
        "late": name + r"has not called train_batch 1, in which other ranks have waited for \d+ s; "
        r"its last call was earlier 1\n",
    }
    assert re.fullmatch(line[absent], said[teller])
    assert not any(text for rank, text in enumerate(said) if rank != teller)


class Unreachable:
    """A store whose machine is gone."""

    def set(self, *_):
        threading.Event().wait(SOON)


class Until:
    """A clock by which one sleeps until both ranks that wait in vain have said so."""

    def __init__(self, store):
        self.store = store

    def sleep(self, _):
        self.store.wait(["waited in vain/0", "waited in vain/2"], timedelta(seconds=SOON))


def waits_in_vain():
    """What this rank says where rank 1 does not take part in what the others wait for: after a
    timeout, after a broken connection, and where the job's store can't be reached."""
    ctx, found = context(dp=3), []
    for reason, store in [
        ("[gloo] Timed out waiting 4000ms\nat some line", dist.PrefixStore("1", default_store())),
        ("[gloo] Connection closed by peer", dist.PrefixStore("2", default_store())),
        ("[gloo] Timed out waiting 4000ms", Unreachable()),
    ]:
        with (
            mock.patch.object(absent, "time", Until(store)),  # in place of GRACE
            mock.patch.object(absent, "OUT_OF_REACH", 0 if found[1:] else SOON),
            mock.patch.object(absent, "default_store", lambda store=store: store),
            contextlib.redirect_stderr(io.StringIO()) as said,
            contextlib.suppress(RuntimeError),
            naming_absent_ranks(ctx),
        ):
            if ctx.rank != 1:
                raise RuntimeError(reason)
        found.append(said.getvalue())
        all_gather_objects(None, ctx)
    return found


def test_who_was_waited_for_in_vain_is_told_once(ranks):
    told = (
        "no response from rank 1 (tp 0, pp 0, dp 1): it hung for longer than the timeout, or died "
    )
    told += "([gloo] Timed out waiting 4000ms)\n"
    lost = " can't reach the other ranks or the job's store: is a node or its network down?\n"
    name = os.uname().nodename
    first, absent, last = ranks(waits_in_vain, 3)
    assert first == [told, "", f"rank 0 on {name}{lost}"]
    assert absent == ["", "", ""]
    assert last == ["", "", f"rank 2 on {name}{lost}"]


def left_in_order():
    """The threads before, within and after, where a beat takes a while."""

    def slow(_):
        time.sleep(0.3)

    ctx, counts = context(dp=2), [threading.active_count()]
    with (
        mock.patch.object(heartbeat, "PERIOD", 0.01),
        mock.patch.object(heartbeat._Heart, "_exchange", slow),
        naming_absent_ranks(ctx),
    ):
        time.sleep(0.1)
        counts.append(threading.active_count())
    return [*counts, threading.active_count()]


def test_no_thread_outlives_the_watch(ranks):
    for before, within, after in ranks(left_in_order, 2):
        assert within > before
        assert after == before


class Deaf:
    """A store that answers threads other than the main one only where it is told to."""

    answers = threading.Event()
    beats = 0

    def set(self, _, beat):
        if threading.current_thread() is not threading.main_thread() and beat != LEFT:
            assert self.answers.wait(SOON)
            Deaf.beats += 1

    def multi_get(self, keys):
        return beats(self.beats, *[1 for _ in keys])


@pytest.mark.parametrize(("rank", "local", "tells"), [(4, 0, True), (5, 1, False), (7, 3, True)])
def test_a_store_that_does_not_answer_is_told_once(capfd, monkeypatch, rank, local, tells):
    """When it answers again, as one whose launcher was stopped and goes on, beats go on: else this
    rank would be named for its silence."""
    monkeypatch.setattr(Deaf, "answers", threading.Event())
    monkeypatch.setattr(heartbeat, "PERIOD", 0.02)
    monkeypatch.setattr(heartbeat, "SILENCE", 0.1)
    monkeypatch.setattr(heartbeat, "store_of_a_thread", Deaf)
    monkeypatch.setattr(heartbeat, "all_gather_objects", lambda value, _: [value] * 8)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    heart = heartbeat._Heart(ParallelContext.virtual(dp=8, rank=rank))
    try:
        said, until = "", time.monotonic() + SOON
        while tells and "\n" not in said and time.monotonic() < until:
            time.sleep(0.01)
            said += capfd.readouterr().err
        heart._thread.join(0.5)  # of many periods, each of which might tell it again
        heart.silence = SOON  # the beats that follow may be late
        before = Deaf.beats
        Deaf.answers.set()
        until = time.monotonic() + SOON
        while Deaf.beats < before + 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert Deaf.beats >= before + 3
    finally:
        heart.close()
    said += capfd.readouterr().err
    line = (
        rf"rank {rank} on {re.escape(os.uname().nodename)} has had no answer from the job's store "
    )
    line += r"for \d+ s: is its machine or the network down\?\n"
    assert re.fullmatch(line if tells else "", said)


class Clock:
    """A clock that stands still but for what is added to it."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


LAUNCHERS = [
    ({}, None),
    ({"MEGAZOO_LAUNCHER": "7"}, None),
    ({"SLURM_JOB_ID": "7"}, "its step: --signal=USR1@300\n"),
    ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun forwards SIGTERM, and kills all ranks 30 s later\n"),
]


def test_steps_longer_than_a_launcher_waits_are_told_once_under_it(monkeypatch, capsys):
    for launcher, advice in LAUNCHERS:
        for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MEGAZOO_LAUNCHER", "RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        clock, signals = Clock(), StopSignal(ParallelContext())
        monkeypatch.setattr(stop_signal, "time", clock)
        said = []
        for passed in (300, 19, 45, 60):  # the first step may compile
            clock.now += passed
            assert signals.agreed() is None
            said.append(capsys.readouterr().err)
        assert [bool(text) for text in said] == [False, False, advice is not None, False]
        if advice is None:
            continue
        start = (
            "warning: a step took 45 s, including the save, but a rank exits 20 s after a SIGTERM, "
        )
        assert said[2].startswith(start + "even if the step is not saved: to stop the run, ")
        assert said[2].endswith(advice)


@pytest.mark.parametrize("died", [True, False])
def test_the_launchers_death_is_named_if_sigterm_is_received_first(monkeypatch, died):
    """The parent changes when the launcher's last thread ends."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    asked = []
    monkeypatch.setattr(os, "getppid", lambda: 2 if died and len(asked) > 3 else asked.append(1))
    signals = StopSignal(ParallelContext())
    assert signals.agreed() is None
    signals.noted = signal.SIGTERM
    assert signals.agreed() == ("the launcher's death" if died else "SIGTERM")


def test_signals_are_noted_where_there_are_many_sockets():
    """A descriptor above 1023, which select.select refuses."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this system allows fewer")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1024:
            opened.append(os.dup(opened[0]))
        with StopSignal(ParallelContext()) as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals._watcher.is_alive()
            assert signals.agreed() == "SIGUSR1"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
