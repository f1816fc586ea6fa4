"""Programs that tests start: from a server that has imported torch already, or by Python itself.

`python()` is the path of a stand-in for Python that takes 0.05 s to start where Python with torch takes 2. What it
starts differs from a real start in this: its parent is the server, only SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2
reach it (the stand-in's death by SIGKILL kills it, too), variables that libraries read while they are loaded (MALLOC_*,
PYTHONHASHSEED) do nothing, and what the server has imported is not imported again. A test of any of these takes
`sys.executable`.
"""

import atexit
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def python() -> str:
    """The stand-in's path: an executable named `python`, with a `torchrun` beside it. The server starts at once."""
    directory = tempfile.TemporaryDirectory(prefix="megazoo-programs-")
    path = Path(directory.name)
    client = [sys.executable, "-I", "-S", str(HERE / "program_client.py"), str(path / "socket"), sys.executable]
    exported = f"export MEGAZOO_TEST_PYTHON={shlex.quote(str(path / 'python'))}\n"
    for name, arguments in (("python", []), ("torchrun", ["-m", "torch.distributed.run"])):
        (path / name).write_text(f'#!/bin/sh\n{exported}exec {shlex.join([*client, *arguments])} "$@"\n')
        (path / name).chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
    }
    server = subprocess.Popen(
        [sys.executable, HERE / "program_server.py", path / "socket"], stdin=subprocess.PIPE, env=environment
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
