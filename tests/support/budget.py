"""The seconds that each folder of tests may take in `make test`, and what a run took.

The budgets are worker seconds: the durations of all tests, setup and teardown included, of all
workers together, on two quiet cores of an AMD EPYC (9 folders, 1,100 seconds in total). Nothing
fails by the clock; the summary at the end of a run says which folder is over its budget.
durations.json has the seconds of the last run that `make durations` recorded, so that a change can
state what it costs.
"""

import datetime
import json
import os
import platform
import subprocess
from collections import Counter
from pathlib import Path

BUDGET = {
    "tests/layouts": 200,
    "tests/oracles": 150,
    "tests/programs": 150,
    "tests/docs": 90,
    "tests/unit/testing": 120,
    "tests/files": 60,
    "tests/fake_cuda": 60,
    "tests/unit/planning": 60,
}
REST = "the rest"
BUDGET[REST] = 210
DURATIONS = Path(__file__).with_name("durations.json")


def folder_of(test: str) -> str:
    """The folder of BUDGET that has the test with this node id."""
    return next((folder for folder in BUDGET if test.startswith(folder + "/")), REST)


def by_folder(reports) -> tuple[Counter, Counter]:
    """Return the seconds and the number of tests per folder of BUDGET.

    reports: pytest's reports; each test has one for setup, call and teardown.
    """
    seconds, tests = Counter(), Counter()
    for report in reports:
        if hasattr(report, "duration"):
            folder = folder_of(report.nodeid)
            seconds[folder] += report.duration
            tests[folder] += report.when == "call"
    return seconds, tests


def table(seconds: Counter, tests: Counter, recorded: dict | None) -> list[str]:
    """Return the lines of the summary: seconds per folder, its budget, and the difference to the
    recorded run, of the folders that have tests.

    recorded: the contents of durations.json, or None. A run of fewer or more tests, such as make
    test-all, is not compared with it.
    """
    if recorded and not 0.9 < tests.total() / sum(recorded["tests"].values()) < 1.1:
        recorded = None
    before = recorded["seconds"] if recorded else {}
    rows = [("folder", "tests", "seconds", "budget", "recorded", "difference", "")]

    def row(name, count, found, budget, old):
        over = found - budget
        values = [name, str(count), f"{found:.0f}", str(budget)]
        values += [f"{old:.0f}", f"{found - old:+.0f}"] if old is not None else ["", ""]
        rows.append((*values, f"over by {over:.0f}" if over >= 0.5 else ""))

    here = [folder for folder in BUDGET if tests[folder]]
    for folder in here:
        row(folder, tests[folder], seconds[folder], BUDGET[folder], before.get(folder))
    total = sum(before.get(folder, 0) for folder in here) if before else None
    row("total", tests.total(), seconds.total(), sum(BUDGET[folder] for folder in here), total)
    lines = [
        f"{row[0]:20}" + "".join(f"{value:>11}" for value in row[1:6]) + f"  {row[6]}".rstrip()
        for row in rows
    ]
    if recorded:
        lines.append("recorded: {date}, commit {commit}, {machine}".format(**recorded))
    return lines


def recorded() -> dict | None:
    """The run that `make durations` has recorded; None without one."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else None


def record(seconds: Counter, tests: Counter, path: Path) -> None:
    """Write the seconds and tests of a run, with its date, commit and machine."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=path.parent, capture_output=True, text=True).stdout
    found = {
        "date": datetime.date.today().isoformat(),
        "commit": commit.strip() or "unknown",
        "machine": machine(),
        "seconds": {folder: round(seconds[folder], 1) for folder in BUDGET},
        "tests": {folder: tests[folder] for folder in BUDGET},
    }
    path.write_text(json.dumps(found, indent=2) + "\n")


def machine() -> str:
    """The name of the CPU as Linux gives it, and the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {name}"
