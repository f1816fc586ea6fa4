"""Programs that tests start: from a server that has imported torch already, or by Python itself.

`python()` is the path of a stand-in for Python that takes 0.05 s to start where Python with torch
takes 2. A program that it starts differs from a real one in this, so that a test of any of it takes
`sys.executable`:
- its parent is the server; it is not a child of who started it, nor has /proc/PID/environ its
    environment;
- of signals to the stand-in only SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 reach it; if the
  stand-in dies, it is killed;
- of variables that Python and libraries read when they are loaded (PYTHON*, MALLOC_*, MKL_*) only
  PYTHONPATH, PYTHONUNBUFFERED and OMP_NUM_THREADS are heeded;
- what the server has imported is not imported again;
- it ends after threads, atexit functions and the last output, without freeing its modules;
- a fork server or worker of multiprocessing is a fork of the program that starts it.
"""

import atexit
import contextlib
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
MARK = "MEGAZOO_TEST_MARK"


@functools.cache
def python() -> str:
    """The path of the stand-in, named `python`, with `torchrun` and `megazoo` beside it. The first
    call starts the server."""
    directory = tempfile.TemporaryDirectory(prefix="megazoo-programs-")
    path = Path(directory.name)
    client = [
        sys.executable,
        "-I",
        "-S",
        str(HERE / "program_client.py"),
        str(path / "socket"),
        sys.executable,
    ]
    exported = f"export MEGAZOO_TEST_PYTHON={shlex.quote(str(path / 'python'))}\n"
    modules = {"python": [], "torchrun": ["torch.distributed.run"], "megazoo": ["megazoo"]}
    for name, module in modules.items():
        arguments = ["-m", *module] if module else []
        (path / name).write_text(
            f'#!/bin/sh\n{exported}exec {shlex.join([*client, *arguments])} "$@"\n'
        )
        (path / name).chmod(0o755)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
    }
    command = [sys.executable, HERE / "program_server.py", path / "socket"]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True
    )

    @atexit.register
    def close() -> None:
        server.stdin.close()
        server.wait(10)
        directory.cleanup()

    while not (path / "socket").exists():
        assert server.poll() is None, "the program server ended"
        time.sleep(0.01)
    return str(path / "python")


def marked(mark: str) -> list[int]:
    """The processes that were started with MEGAZOO_TEST_MARK=mark in their environment. (Of a
    program that the server has started, the stand-in; if that is killed, so is the program.)"""
    found, wanted = [], f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


ROOT = Path(__file__).parents[2]


def run_tool(tool, *arguments):
    command = [python(), f"tools/{tool}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
