"""Measure which planted faults the tests find, so that a smaller suite can be compared with a
larger one.

A fault changes one expression: an operator, a constant, a condition, or an argument that is
dropped. `faults.json` has sixty of them. They were drawn with a seed, at most one per file, from
the expressions that `make test` evaluates. `found_by` is the first test of `make test` at 7494586
that failed; null if none did, and "limit" if none did in four minutes. 47 are found, as were 46 at
cdd8644, whose `make test` took 2,879 worker seconds.

Run these commands in a clone with a separate environment, because `cover` and `run` change the
source files, and restore them at the end:

    python -m tests.support.faults draw --seed 68 --count 120 > FAULTS
    python -m tests.support.faults cover COVERAGE [--list FAULTS] [-- PYTEST ARGUMENTS]
    python -m tests.support.faults run COVERAGE RESULTS [--part 1/2] [-- PYTEST ARGUMENTS]

`cover` runs the tests once, with a probe at each fault, and writes which tests evaluate it. `run`
plants one fault at a time, and runs the tests that evaluate it, quick tests first, until one fails.
Faults that RESULTS already has are not run again.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("faults.json")
EXCLUDED = "megazoo/testing/gallery/"  # bugs that are planted already
LIMIT = 240  # seconds that the tests of one fault may take

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"is not": "is", "is": "is not", "not in": "in", "in": "not in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*"}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}

# The module that a probe calls. It is installed as a package, because programs run in other
# directories.
PROBE = '''
import os
DIRECTORY = {directory!r}
seen = set()

def hit(number):
    """Record that the running test evaluates a fault. If the worker is unknown, record the
    running tests of all workers."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    for name in os.listdir(DIRECTORY):
        if name.startswith("current-") and (not worker or name == "current-" + worker):
            with open(os.path.join(DIRECTORY, name)) as file:
                test = file.read()
            if (number, test) not in seen:
                seen.add((number, test))
                with open(os.path.join(DIRECTORY, "hits"), "a") as file:
                    file.write(f"{{number}} {{test}}\\n")
'''


def faults_of(path: Path) -> list[dict]:
    """Every fault that can be planted in a file, of expressions on one line within functions."""
    text = path.read_text()
    lines = text.splitlines()
    found = []
    for node in _expressions(ast.parse(text)):
        if node.lineno != node.end_lineno or not lines[node.lineno - 1].isascii():
            continue
        line = lines[node.lineno - 1]
        before = line[node.col_offset : node.end_col_offset]
        for after in _changes(node, line):
            found.append(
                {
                    "file": str(path.relative_to(ROOT)),
                    "number": node.lineno,
                    "line": line,
                    "column": node.col_offset,
                    "before": before,
                    "after": after,
                }
            )
    return found


def _expressions(tree: ast.AST, inside: bool = False):
    """The expressions that run when a function is called: no annotations, defaults or f-strings."""
    for name, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, (ast.JoinedStr, ast.match_case)):
                continue
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(
                tree, ast.Call
            ):
                continue
            if inside and isinstance(node, ast.expr):
                yield node
            body = name == "body" and isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _expressions(node, inside or body)


def _changes(node: ast.expr, line: str):
    """The texts that can replace a node."""

    def source(part):
        return line[part.col_offset : part.end_col_offset]

    match node:
        case ast.Compare(left=left, comparators=[right]):
            yield from _another_operator(node, left, right, COMPARISONS, line)
        case ast.BinOp(left=left, right=right):
            yield from _another_operator(node, left, right, ARITHMETIC, line)
        case ast.BoolOp(values=[left, right]):
            yield from _another_operator(node, left, right, {"and": "or", "or": "and"}, line)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"bool({source(operand)})"
        case ast.Constant(value=bool() | int() as value):
            yield str(not value if isinstance(value, bool) else value + 1)
        case ast.IfExp(test=test, body=body, orelse=other):
            yield f"({source(other)} if {source(test)} else {source(body)})"
        case ast.Call():
            yield from _another_call(node, source(node))


def _another_operator(node: ast.expr, left: ast.expr, right: ast.expr, table: dict, line: str):
    """The text of a node with the operator between its operands replaced."""
    symbol = line[left.end_col_offset : right.col_offset]
    if symbol.strip() in table:
        before = line[node.col_offset : left.end_col_offset]
        after = line[right.col_offset : node.end_col_offset]
        yield before + symbol.replace(symbol.strip(), table[symbol.strip()]) + after


def _another_call(node: ast.Call, text: str):
    """The text of a call of another function, or without its only keyword argument."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield CALLS[name] + text[len(name) :]
        case ast.Call(args=[*_, previous], keywords=[keyword]) if keyword.arg:
            if keyword.value.end_col_offset == node.end_col_offset - 1:
                yield text[: previous.end_col_offset - node.col_offset] + ")"


def draw(seed: int, count: int) -> list[dict]:
    """Draw faults with a seed, at most one per file; longer files are drawn sooner."""
    paths = sorted((ROOT / "megazoo").rglob("*.py"))
    faults = [
        fault
        for path in paths
        if not str(path.relative_to(ROOT)).startswith(EXCLUDED)
        for fault in faults_of(path)
    ]
    random.Random(seed).shuffle(faults)
    drawn: dict[str, dict] = {}
    for fault in faults:
        drawn.setdefault(fault["file"], fault)
    return list(drawn.values())[:count]


def place(fault: dict) -> int:
    """The line index of a fault in the present file: the equal line that is nearest.

    Raises:
        SystemExit: The file or the line does not exist.
    """
    path = ROOT / fault["file"]
    lines = path.read_text().splitlines() if path.exists() else []
    equal = [number for number, line in enumerate(lines, 1) if line == fault["line"]]
    if not equal:
        sys.exit(f"{fault['file']} has no line {fault['line']!r}: update this fault in {LIST}")
    return min(equal, key=lambda number: abs(number - fault["number"])) - 1


@contextlib.contextmanager
def planted(changes: list[tuple[dict, str]]):
    """Replace the expression of each fault by a text, and restore the files at the end."""
    originals: dict[Path, str] = {}
    try:
        for fault, text in changes:
            path = ROOT / fault["file"]
            index = place(fault)
            originals.setdefault(path, path.read_text())
            lines = path.read_text().splitlines(keepends=True)
            start, end = fault["column"], fault["column"] + len(fault["before"])
            lines[index] = lines[index][:start] + text + lines[index][end:]
            path.write_text("".join(lines))
        yield
    finally:
        for path, text in originals.items():
            path.write_text(text)


def cover(faults: list[dict], output: Path, arguments: list[str]) -> None:
    """Run the tests with a probe at each fault, and write the tests that evaluate it."""
    probe = Path(sysconfig.get_path("purelib"), "megazoo_fault_probe.py")
    with tempfile.TemporaryDirectory() as directory:
        probe.write_text(PROBE.format(directory=directory))
        changes = [
            (fault, f"(__import__('megazoo_fault_probe').hit({number}) or ({fault['before']}))")
            for number, fault in enumerate(faults)
        ]
        environment = {**os.environ, "MEGAZOO_FAULT_COVERAGE": directory}
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.faults", *arguments]
        try:
            with planted(changes):
                subprocess.run(command, cwd=ROOT, env=environment, check=False)
        finally:
            probe.unlink()
        tests = defaultdict(set)
        for line in Path(directory, "hits").read_text().splitlines():
            number, _, test = line.partition(" ")
            tests[int(number)].add(test)
        outcomes = [
            json.loads(line) for line in Path(directory, "outcomes").read_text().splitlines()
        ]
        seconds, failed = defaultdict(float), set()
        for test, duration, outcome in outcomes:
            seconds[test] += duration
            if outcome == "failed":
                failed.add(test)
        covered = [{**fault, "tests": sorted(tests[n])} for n, fault in enumerate(faults)]
        result = {"faults": covered, "seconds": seconds, "failed": sorted(failed)}
        output.write_text(json.dumps(result, indent=1) + "\n")


def pytest_runtest_logstart(nodeid):
    """Name the running test for the probes (as a plugin of pytest, in each worker)."""
    directory = os.environ["MEGAZOO_FAULT_COVERAGE"]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker or not list(Path(directory).glob("current-gw*")):
        temporary = Path(directory, f"next-{worker}")
        temporary.write_text(nodeid)
        temporary.replace(Path(directory, f"current-{worker}"))


def pytest_runtest_logreport(report):
    """Record seconds and outcomes (as a plugin of pytest, in the process that starts workers)."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(Path(os.environ["MEGAZOO_FAULT_COVERAGE"], "outcomes"), "a") as file:
            file.write(json.dumps([report.nodeid, report.duration, report.outcome]) + "\n")


def run(coverage: dict, output: Path, part: tuple[int, int], arguments: list[str]) -> None:
    """Plant each fault, and run the tests that evaluate it until one fails."""
    results = json.loads(output.read_text()) if output.exists() else {}
    index, parts = part
    failed, seconds = set(coverage["failed"]), coverage["seconds"]
    for fault in coverage["faults"][index - 1 :: parts]:
        name = f"{fault['file']}: {fault['before']} -> {fault['after']}"
        if name in results:
            continue
        tests = sorted(set(fault["tests"]) - failed, key=lambda test: seconds.get(test, 0))
        with planted([(fault, fault["after"])]):
            results[name] = _first_failure(tests, arguments)
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{results[name] or 'NOT FOUND'} of {len(tests)} tests: {name}", flush=True)
    found = sum(result not in (None, "limit") for result in results.values())
    print(f"{found} of {len(results)} faults are found")


def _first_failure(tests: list[str], arguments: list[str]) -> str | None:
    """The test that fails first; "limit" if none has failed within LIMIT; None if all pass."""
    if not tests:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(tests))
        file.flush()
        command = [sys.executable, "-m", "pytest", "-x", "--timeout", "60", "-m", "", "-o"]
        command += ["addopts=", "-q", "--import-mode=importlib", f"@{file.name}", *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            text, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return "limit"
    if process.returncode == 0:
        return None
    lines = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if process.returncode not in (1, 2) and not lines:  # 2 and 4: a module can't be imported
        sys.exit(
            f"pytest ended with {process.returncode}: record the coverage again\n{text[-2000:]}"
        )
    return lines[0][:300] if lines else text[-300:]


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="print faults that are drawn with a seed, as JSON")
    drawing.add_argument("--seed", type=int, default=68)
    drawing.add_argument("--count", type=int, default=120)
    covering = commands.add_parser("cover", help="record which tests evaluate each fault")
    covering.add_argument("output", type=Path)
    covering.add_argument("--list", type=Path, default=LIST)
    running = commands.add_parser("run", help="plant each fault, and run the tests it is in")
    running.add_argument("coverage", type=Path)
    running.add_argument("output", type=Path)
    running.add_argument("--part", default="1/1", help="the first half of the faults is 1/2")
    options = parser.parse_args(words[:end])
    if options.command == "draw":
        print(json.dumps(draw(options.seed, options.count), indent=1))
    elif options.command == "cover":
        cover(json.loads(options.list.read_text()), options.output.absolute(), words[end + 1 :])
    else:
        index, _, parts = options.part.partition("/")
        coverage = json.loads(options.coverage.read_text())
        run(coverage, options.output, (int(index), int(parts)), words[end + 1 :])


if __name__ == "__main__":
    main()
