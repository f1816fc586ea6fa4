"""Measure the memory of processes, by what Linux tells in /proc. All sizes are in bytes."""

import subprocess
import tempfile
import time
from pathlib import Path

from megazoo.errors import UserError


def resident(name: str) -> int:
    """Return this process's resident memory: VmRSS now, VmHWM its peak, RssAnon without files."""
    return _entry(Path("/proc/self/status"), name)


def proportional(command: list, kind: str = "Pss") -> int:
    """Run a command to its end, and return the peak of the sum of its processes' PSS.

    kind: "Pss_Anon" leaves out the pages of files, which the system may take back.
    """
    words, peak = [str(word) for word in command], 0
    with tempfile.TemporaryFile("w+") as told:
        child = subprocess.Popen(words, stdout=told, stderr=told)
        while child.poll() is None:
            peak = max(peak, sum(_pss(pid, kind) for pid in _family(child.pid)))
            time.sleep(0.2)
        if child.returncode:
            told.seek(0)
            raise UserError(f"{' '.join(words)} failed: {told.read()[-500:]}", exit_code=1)
    return peak


def _family(pid: int) -> list[int]:
    """Return a process and those that came of it."""
    try:
        children = [
            int(word)
            for file in Path(f"/proc/{pid}/task").glob("*/children")
            for word in file.read_text().split()
        ]
    except OSError:  # it has just ended
        return []
    return [pid, *(each for child in children for each in _family(child))]


def _pss(pid: int, kind: str) -> int:
    """Return a process's proportional set size; 0 if it has ended."""
    try:
        return _entry(Path(f"/proc/{pid}/smaps_rollup"), kind)
    except (OSError, StopIteration):
        return 0


def _entry(file: Path, name: str) -> int:
    """Return the entry of a file of /proc whose lines are `name:  123 kB`."""
    lines = file.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
