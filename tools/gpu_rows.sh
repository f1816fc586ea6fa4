#!/usr/bin/env bash
# Test and measure one GPU in at most ten minutes:
#
#   bash tools/gpu_rows.sh DIRECTORY [--tiny]
#
# It runs the tests of the marker gpu, then each row of `benchmark.py gpu_rows`. Each part has its
# own time limit, and a part that fails or exceeds its limit does not end the script. DIRECTORY gets
# gpu_rows.json, with the device, the commit, the outcome of each part and the results, and rows.md,
# the table for docs/benchmarks.md. --tiny runs tiny models on the CPU, to try the script.
# PYTHON is the interpreter (default: python).
set -uo pipefail
python=$(command -v "${PYTHON:-python}") && python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") || exit 2
directory=$(mkdir -p "${1:?usage: bash tools/gpu_rows.sh DIRECTORY [--tiny]}" && cd "$1" && pwd) || exit 2
tiny=(${2:+"$2"})
cd "$(dirname "$0")/.." || exit 2
parts=$(mktemp -d) && trap 'rm -rf "$parts"' EXIT

# part NAME SECONDS COMMAND...: run a command, and record its name, seconds and exit code (124: limit).
part() {
    local name=$1 limit=$2 start=$SECONDS code=0
    shift 2
    timeout -k 5 "$limit" "$@" > "$parts/$name.log" 2>&1 || code=$?
    echo "$name $((SECONDS - start)) $code" | tee -a "$parts/outcomes"
    [ "$code" = 0 ] || tail -n 3 "$parts/$name.log"
}

part tests 75 "$python" -m pytest -m gpu tests/gpu --junitxml "$parts/tests.xml"
for row in train-llama3.2-1b:70 train-gpt2-1.5b:70 train-llama3-8b:70 train-olmoe-1b-7b:70 \
    float8-llama3-8b:95 zero3-llama3.2-1b:70 \
    decode-llama3.2-1b:40 decode-gpt2-1.5b:40; do
    name=${row%:*}
    part "$name" "${row#*:}" "$python" tools/benchmark.py gpu_rows --rows "$name" --pairs 5 \
        --json "$parts/$name.json" ${tiny[@]+"${tiny[@]}"}
done

"$python" - "$directory" "$parts" <<'PYTHON'
import datetime
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

directory, parts = map(Path, sys.argv[1:])
head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
found = {"date": str(datetime.date.today()), "commit": head.stdout.strip(), "parts": {}}
found |= {"machine": None, "tests": None, "results": []}
report = parts / "tests.xml"
if report.exists() and report.read_text().rstrip().endswith("</testsuites>"):
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    names = ("tests", "failures", "errors", "skipped")
    found["tests"] = {name: int(suite.get(name)) for name in names}
lines = []
for outcome in (parts / "outcomes").read_text().splitlines():
    name, seconds, code = outcome.split()
    found["parts"][name] = {"seconds": int(seconds), "exit": int(code)}
    results = parts / f"{name}.json"
    if results.exists():
        values = json.loads(results.read_text())
        found["machine"] = values["machine"]
        found["results"] += values["results"]
        lines += [line for line in (parts / f"{name}.log").read_text().splitlines() if line[:2] == "| "]
(directory / "gpu_rows.json").write_text(json.dumps(found, indent=1) + "\n")
(directory / "rows.md").write_text("\n".join(dict.fromkeys(lines)) + "\n")
print(f"{directory}/gpu_rows.json: {len(found['results'])} results, tests {found['tests']}")
PYTHON
