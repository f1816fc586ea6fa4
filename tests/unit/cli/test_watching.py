"""How ranks watch each other and their launcher, and what they do where that is not allowed."""

import contextlib
import errno
import io
import os
import signal
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest

from megazoo.launching import deaths
from megazoo.launching.local_ranks import catches
from megazoo.launching.orphans import end_with_launcher
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.trainer.stop_signal import StopSignal
from tests.support.processes import SOON, lives
from tests.support.training import context


def test_handlers_that_nobody_tells_of_are_taken_to_be_there(monkeypatch):
    for status in ("", "Name:\tpython\nState:\tS (sleeping)\n"):  # gVisor's has no SigCgt
        monkeypatch.setattr(Path, "read_text", lambda *_, said=status: said)
        assert catches(os.getpid(), signal.SIGUSR1)


def test_a_process_that_can_not_be_watched_is_left_out(monkeypatch):
    for error in (errno.ENOSYS, errno.EPERM, errno.ESRCH):

        def refused(_, error=error):
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
        watch = deaths._Watch([("rank 1", 1, os.getpid())])
        watch.close()
        assert not watch._thread.is_alive()


@pytest.mark.timeout(120)
def test_a_forked_child_holds_up_no_thread():
    """It has all ends of the pipes that the threads wait at."""
    watch = deaths._Watch([("rank 1", 1, os.getpid())])
    try:
        with StopSignal(ParallelContext()):
            child = os.fork()
            if not child:
                time.sleep(10 * SOON)
                os._exit(0)
        watch.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_rank_that_was_told_to_end_did_not_die():
    with subprocess.Popen(["sleep", "60"]) as process:
        process.terminate()
        while lives(process.pid):
            time.sleep(0.01)
        assert deaths._death(process.pid, 1) is None


def test_how_a_process_died_is_read_before_its_parent_is_told_and_after():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert deaths._wait_status(process.pid) is None
        process.kill()
        while lives(process.pid):
            time.sleep(0.01)
        assert deaths._wait_status(process.pid) == signal.SIGKILL
        assert deaths._death(process.pid, 1).startswith("was killed by SIGKILL")
        process.wait()
        assert deaths._wait_status(process.pid) is None


def loses_a_neighbour():
    """What this rank says when rank 1 of three, for which a child stands here, is killed."""
    ctx, said = context(dp=3), io.StringIO()
    with (
        subprocess.Popen(["sleep", "600"]) as stand_in,
        contextlib.redirect_stderr(said),
        contextlib.ExitStack() as watching,
    ):
        with mock.patch.object(os, "getpid", return_value=stand_in.pid):
            watching.enter_context(deaths.naming_dead_ranks(ctx))
        all_gather_objects(None, ctx)
        if ctx.rank == 1:
            os.kill(stand_in.pid, signal.SIGKILL)
        until = time.monotonic() + SOON
        while ctx.rank == 0 and "\n" not in said.getvalue():
            assert time.monotonic() < until
            time.sleep(0.01)
        all_gather_objects(None, ctx)
        watching.close()
        all_gather_objects(None, ctx)  # nobody watches any more
        stand_in.kill()
    return said.getvalue()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="processes can't be watched here")
def test_the_rank_before_names_one_that_died(ranks):
    line = f"rank 1 (tp 0, pp 0, dp 1) on {os.uname().nodename} was killed by SIGKILL: out of "
    assert ranks(loses_a_neighbour, 3) == [f"{line}memory, perhaps\n", "", ""]


def test_a_rank_whose_launcher_died_before_it_could_watch_it_ends(monkeypatch):
    """The launcher of this rank, torchrun by its environment, dies while the rank still imports."""
    with contextlib.suppress(PermissionError):  # of a first process that is another user's
        if "python" in os.readlink("/proc/1/exe"):
            pytest.skip("the first process here could be torchrun")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("MEGAZOO_LAUNCHER", raising=False)
    read, write = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        begun = os.getpid()
        if os.fork() == 0:
            while os.getppid() == begun:
                time.sleep(0.01)
            os.write(write, b"1" if os.getppid() == 1 else b"?")
            end_with_launcher()
            os.write(write, b"goes on")
        os._exit(0)
    os.waitpid(launcher, 0)
    os.close(write)
    with open(read, "rb") as told:
        words = told.read()
    if words.startswith(b"?"):
        pytest.skip("orphans here have another parent than the first process")
    assert words == b"1"
