"""Fuzzing: seeded cases of a kind, each run in a forked child under limits of time and memory.

A kind is made with a directory for what all of its cases start from; it is then called for each
case with a random.Random of the case's own and an empty directory, which is the working directory.
It raises an AssertionError for what must not be; any other exception than the UserErrors that it
catches is a finding, too.
"""

import contextlib
import copy
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megazoo.errors import UserError

SECONDS = 60  # for a case, on a machine that does much else
MEMORY = 4 << 30  # bytes of address space above what the child has from the start
GRACE = 5  # seconds after which a case is killed that doesn't notice its alarm
MOST_WARNINGS = 5

Case = Callable[[random.Random, Path], None]

HOSTILE = [
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, 2**70, 10**23, 10**400, -(2**63), 0.5, -0.0,
    2.0, 1e-300, 1e23, 1e308, float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "1",
    "true", "nan", "../x", "/dev/zero", "/dev/full", "/nowhere/x", ".", "d", "--steps=3", "--save",
    "\ud800", "a\nb", "\0", "x" * 5000, "x" * 300, "{tp}", "{0}", "{", "{tp.__class__}",
    "{tp:>99999999999}", "%s", "é☃🙂", "F64", "float16", [], {}, [[]], [0], [-1], [1, 2], [None],
    ["x"], {"x": 1}, {"": {}},
]  # fmt: skip


class Hang(BaseException):
    """A case has run out of its time."""


def hostile(chance: random.Random):
    """Return one of the values that nobody expects; a copy, as it may be changed."""
    return copy.deepcopy(chance.choice(HOSTILE))


def deep(levels: int):
    """Return lists in lists, as deep as the json module writes them."""
    value = []
    for _ in range(levels):
        value = [value]
    return value


def mutated(value, chance: random.Random, mutations: int = 0):
    """Return a copy of a value of JSON with something done to one of its parts, or to several."""
    root = json.loads(json.dumps({"": value}))  # below a root, so that all of it may change
    for _ in range(mutations or chance.choice((1, 1, 1, 2, 4))):
        holder, key = _place(root, chance)
        _mutate(holder, key, chance)
    return root[""]


def _place(root: dict, chance: random.Random):
    """Return a part of a value, by what holds it and its key there."""
    holder, key = root, ""
    while isinstance(holder[key], dict | list) and holder[key] and chance.random() > 0.15:
        holder = holder[key]
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    return holder, key


def _mutate(holder, key, chance: random.Random) -> None:
    old = holder[key]
    kind = chance.choice(["replace", "replace", "tweak", "tweak", "drop", "add", "swap", "retype"])
    if kind == "tweak":
        holder[key] = tweaked(old, chance)
    elif kind == "retype":
        holder[key] = chance.choice([[old], {"x": old}, str(old), [old, old], deep(500)])
        if isinstance(old, int | float) and chance.random() < 0.7:
            holder[key] = chance.choice([str(old), bool(old), [old], f"{old}.0"])
    elif kind == "drop" and key != "":
        del holder[key]
    elif kind == "add" and isinstance(old, dict):
        name = chance.choice([*old, *map(str, HOSTILE[-20:])]) if old else "x"
        old[name + chance.choice(["", "_", " "])] = hostile(chance)
    elif kind == "add" and isinstance(old, list):
        old.insert(chance.randrange(len(old) + 1), chance.choice([*old, hostile(chance)]))
    elif kind == "swap" and len(holder) > 1:
        other = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], old
    else:
        holder[key] = hostile(chance)


def tweaked(value, chance: random.Random):
    """Return another value of the same type, near to this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice([value + 1, value - 1, -value, 2 * value, value // 2, value + 10**9])
    if isinstance(value, float):
        return chance.choice([value * 2, -value, value + 1, value / 1e30, value * 1e30])
    if isinstance(value, str):
        place = chance.randrange(len(value) + 1)
        other = chance.choice(["", "x", "0", "\ud800", "/", "{", " ", "\0", "é"])
        return value[:place] + other + value[place + chance.randrange(3) :]
    if isinstance(value, list):
        return chance.choice([value[:-1], value[::-1], value * 2, value[:1]])
    if isinstance(value, dict) and value:
        names = list(value)
        a, b = chance.choice(names), chance.choice(names)
        return {
            a if name == b else b if name == a else name: inner for name, inner in value.items()
        }
    return hostile(chance)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with something done to some of them."""
    for _ in range(chance.choice((1, 1, 2, 8))):
        place, length = chance.randrange(len(data) + 1), chance.choice((1, 1, 2, 8, 64))
        new = chance.choice(
            [
                b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n", b"[" * 10_000, b"9" * 5_000,
                b"\xed\xa0\x80", b'"', b"'", b"{", b"}", b"]", b"=", b",", b":", b"-", b"e9", b"#",
                data[place : place + length][::-1], data[place : place + length] * 2,
                chance.randbytes(length),
            ]
        )  # fmt: skip
        keep = chance.choice((0, 0, length, len(data)))
        data = data[:place] + new + data[place + keep :]
    return data


def refusal(function: Callable, *args, **kwargs):
    """Return what a function returns, and the one line with which it refuses, if it does."""
    try:
        return function(*args, **kwargs), ""
    except UserError as caught:
        error = caught
    assert str(error), "a UserError that says nothing"
    assert len(str(error).splitlines()) == 1, f"more than one line: {str(error)!r}"
    assert error.exit_code in (1, 2), error.exit_code
    return None, str(error)


def files_under(directory: Path) -> set[str]:
    """Return the paths of all that is in a directory."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def findings(kind: str, case: Case, numbers: list[int], directory: Path) -> list[str]:
    """Run the cases with these numbers; returns a line for each that has found something."""
    found, left = [], list(numbers)
    while left:
        for number, problem in _in_a_child(kind, case, left, directory):
            left.remove(number)
            if problem:
                found.append(f"python -m tests.files.test_fuzz {kind} {number}: {problem}")
    return found


def run_case(kind: str, case: Case, number: int, directory: Path) -> None:
    """Run one case in this process."""
    place = directory / f"{kind}_{number}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    os.chdir(place)
    told = io.StringIO()
    with (
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(told),
    ):
        warnings.simplefilter("always")
        case(random.Random(f"{kind} {number}"), place)
    shutil.rmtree(place, ignore_errors=True)
    lines = [str(warning.message) for warning in warned] + told.getvalue().splitlines()
    assert len(lines) <= MOST_WARNINGS, f"{len(lines)} warnings: {lines[:3]}"


def _in_a_child(
    kind: str, case: Case, numbers: list[int], directory: Path
) -> Iterator[tuple[int, str]]:
    """Yield the number of each case and what is wrong with it, until one ends the child."""
    numbers = list(numbers)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _work(kind, case, numbers, directory, writer)
        finally:
            os._exit(0)
    os.close(writer)
    rest, current, hung = b"", numbers[0], False
    try:
        while True:
            ready, _, _ = select.select([reader], [], [], SECONDS + GRACE)
            hung = not ready
            data = b"" if hung else os.read(reader, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                number, problem = json.loads(line)
                yield number, problem
                current = next(iter(numbers[numbers.index(number) + 1 :]), None)
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(reader)
    if current is not None:
        yield current, "no answer to its alarm" if hung else f"its process ended with {status}"


def _work(kind: str, case: Case, numbers: list[int], directory: Path, writer: int) -> None:
    # torch makes its pool anew after a fork, which several threads must not do at once.
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.signal(signal.SIGALRM, _give_up)
    for number in numbers:
        problem, began = "", time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            run_case(kind, case, number, directory)
        except Hang:
            problem = f"still running after {SECONDS} s"
        except BaseException as error:
            problem = f"{_last_of_megazoo(error)}{type(error).__name__}: {str(error)[:500]}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not problem and time.monotonic() - began > SECONDS:
            problem = "it took too long"
        os.write(writer, (json.dumps([number, problem]) + "\n").encode())


def _give_up(*_):
    raise Hang


def _last_of_megazoo(error: BaseException) -> str:
    """Return where in megazoo, or else in the tests, an error arose."""
    if isinstance(error, AssertionError) and str(error):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if "/megazoo/" in f.filename] or frames[-1:]
    return f"{Path(places[-1].filename).name}:{places[-1].lineno} {places[-1].name}: "
