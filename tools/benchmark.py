"""Run ours and a reference in turn, on the same files, and print how they compare.

$ python tools/benchmark.py checkpoint --json results.json

generate: tokens from random GPT-2s of transformers, 30 and 5 million parameters, against its own generate, in one
process on the same weights.
checkpoint: Hugging Face to shards of tp 2 x pp 2, checksums included, against `cp -r` of the same bytes, and against
transformers' from_pretrained and save_pretrained; all ended by sync.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro

from megazoo.errors import UserError
from megazoo.flags import File, parse_flags
from megazoo.launch import run_program

TOOLS = Path(__file__).parent


@dataclass
class Options:
    """What to compare."""

    case: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="{generate,checkpoint,all}")]] = "all"
    """Which comparison."""
    pairs: int = 5
    """Runs of each side, in turn."""
    gigabytes: float = 4.0
    """Size of the model whose checkpoints are converted."""
    directory: File = None
    """Where to write what is measured: a disk with room for five such models; the temporary directory by default."""
    json: File = None
    """File for the numbers."""


class Result(NamedTuple):
    """One comparison: the seconds of each run, ours and the reference's; memory: the peaks of both, resident bytes, or
    nothing where one process runs both."""

    name: str
    ours: list[float]
    reference: list[float]
    memory: tuple[int, ...]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.reference, strict=True)]

    def row(self) -> str:
        ratios = f"{statistics.median(self.ratios):.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        seconds = (f"{statistics.median(side):.3g} s" for side in (self.ours, self.reference))
        memory = (f"{peak / 1e6:,.0f} MB" for peak in self.memory) if self.memory else "  "
        return f"| {self.name} | {' | '.join(seconds)} | {ratios} | {' | '.join(memory)} |"


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.case not in (*CASES, "all"):
        raise UserError(f"no case {options.case}: there are {', '.join(CASES)} and all")
    print(f"{machine()}\n")
    print("| case | ours | reference | ratio: median (range) | peak memory of ours | of the reference |")
    print("| --- | --- | --- | --- | --- | --- |")
    results = []
    for case in CASES if options.case == "all" else [options.case]:
        for result in CASES[case](options):
            results.append(result)
            print(result.row(), flush=True)
    if options.json:
        values = [{**result._asdict(), "median_ratio": statistics.median(result.ratios)} for result in results]
        options.json.write_text(json.dumps({"machine": machine(), "results": values}, indent=1) + "\n")


def machine() -> str:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpus = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} x {cpus[0] if cpus else platform.machine()}, {memory:.0f} GiB, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )


class Side(NamedTuple):
    """What is timed: commands, one after the other. output: what they write; it is removed before."""

    commands: list[list]
    output: Path

    def run(self) -> tuple[float, int]:
        """Seconds, and the largest peak of resident memory, bytes."""
        shutil.rmtree(self.output, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        began = time.perf_counter()
        peak = max(map(process, self.commands))
        return time.perf_counter() - began, peak


def in_turn(name: str, pairs: int, ours: Side, reference: Side) -> Result:
    """Run A B A B ..., after one run of each that isn't counted."""
    runs = [[side.run() for side in (ours, reference)] for _ in range(pairs + 1)]
    seconds = [[run[side][0] for run in runs[1:]] for side in range(2)]
    return Result(name, *seconds, tuple(max(run[side][1] for run in runs) for side in range(2)))


def process(command: list) -> int:
    """Run a command to its end; returns its peak resident memory."""
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as told:
        child = subprocess.Popen(words, stdout=told, stderr=told)
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            told.seek(0)
            raise UserError(f"{' '.join(words)} failed: {told.read()[-500:]}", exit_code=1)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# Generation.

GENERATE = """
import json, sys, tempfile, time
import torch, transformers
import megazoo
hidden, rows, beams, new, pairs = map(int, sys.argv[1:])
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=8192, n_positions=512, n_embd=hidden, n_layer=8, n_head=8)
theirs = transformers.GPT2LMHeadModel(config).eval()
with tempfile.TemporaryDirectory() as directory:
    theirs.save_pretrained(directory)
    ours = megazoo.from_pretrained(directory)
ids = torch.randint(4, 8000, (rows, 16))
how = {"max_new_tokens": new, "min_new_tokens": new, "num_beams": beams, "eos_token_id": 2, "pad_token_id": 3}
sides = [
    lambda: ours.generate(ids, **how),
    lambda: theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **how),
]
seconds = [[], []]
for pair in range(pairs + 1):
    outputs = []
    for side, run in zip(seconds, sides):
        began = time.perf_counter()
        outputs.append(run())
        side.append(time.perf_counter() - began)
    assert torch.equal(*outputs), "they differ"
print(json.dumps([side[1:] for side in seconds]))
"""


def generate_cases(options: Options) -> Iterator[Result]:
    new = 128
    for size, hidden, rows, beams in [("30M", 512, 1, 1), ("30M", 512, 1, 3), ("30M", 512, 8, 1), ("5M", 192, 1, 1)]:
        arguments = map(str, (hidden, rows, beams, new, options.pairs))
        done = subprocess.run([sys.executable, "-c", GENERATE, *arguments], capture_output=True, text=True, check=True)
        how = f"beam {beams}" if beams > 1 else "greedy"
        ours, theirs = json.loads(done.stdout.splitlines()[-1])
        yield Result(f"generate {new} tokens, {size}, {how}, batch {rows}, against transformers", ours, theirs, ())


# Checkpoints.

RESAVE = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""


MAKE = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16}
LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=int(sys.argv[2]))).save_pretrained(sys.argv[1])
"""


def checkpoint_cases(options: Options) -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="megazoo-benchmark-") as name:
        directory = Path(name)
        hf, shards = directory / "hf", directory / "shards"
        make_llama(hf, options.gigabytes)
        convert = [sys.executable, TOOLS / "convert_hf.py", hf, shards, "--tp", 2, "--pp", 2]
        copy, saved = directory / "copy", directory / "saved"
        ours, sync = Side([convert, ["sync"]], shards), ["sync"]
        yield in_turn("convert_hf, against cp -r", options.pairs, ours, Side([["cp", "-r", hf, copy], sync], copy))
        shutil.rmtree(copy)
        resave = [sys.executable, "-c", RESAVE, hf, saved]
        name = "convert_hf, against transformers' from_pretrained and save_pretrained"
        yield in_turn(name, options.pairs, ours, Side([resave, sync], saved))


def make_llama(directory: Path, gigabytes: float) -> None:
    """A Hugging Face directory with a LLaMA of about this size, of random weights."""
    layers = round((gigabytes * 1e9 - 2 * 4 * 32000 * 2048) / (4 * (4 * 2048**2 + 3 * 2048 * 5504)))
    process([sys.executable, "-c", MAKE, directory, max(1, layers)])


CASES = {"generate": generate_cases, "checkpoint": checkpoint_cases}

if __name__ == "__main__":
    run_program(main)
