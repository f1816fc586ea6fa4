"""Measure the memory of processes with Linux's /proc. All sizes are in bytes."""

import subprocess
import tempfile
import time
from pathlib import Path

from megazoo.errors import UserError


def resident(name: str) -> int:
    """Return this process's resident memory: VmRSS (now), VmHWM (peak) or RssAnon (without
    files)."""
    return _entry(Path("/proc/self/status"), name)


def proportional(command: list, kind: str = "Pss") -> int:
    """Run a command and return the peak of the summed PSS of its processes.

    Args:
        command: The command.
        kind: "Pss_Anon" excludes file pages, which the system can reclaim.
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
    """Return a process and its descendants."""
    try:
        children = [
            int(word)
            for file in Path(f"/proc/{pid}/task").glob("*/children")
            for word in file.read_text().split()
        ]
    except OSError:  # the process has ended
        return []
    return [pid, *(each for child in children for each in _family(child))]


def _pss(pid: int, kind: str) -> int:
    """Return a process's proportional set size; 0 if it has ended."""
    try:
        return _entry(Path(f"/proc/{pid}/smaps_rollup"), kind)
    except (OSError, StopIteration):
        return 0


def _entry(file: Path, name: str) -> int:
    """Return the value of a line `name:  123 kB` in a file of /proc."""
    lines = file.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
