"""Run ours and a reference in turn, on the same files, and print how they compare.

$ python tools/benchmark.py checkpoint --json results.json

generate: tokens from random GPT-2s of transformers, 30 and 5 million parameters, against its own generate, in one
process on the same weights.
checkpoint: Hugging Face to shards of tp 2 x pp 2, checksums included, against `cp -r` of the same bytes, and against
transformers' from_pretrained and save_pretrained; all ended by sync.
data: text to token files against tiktoken alone, and opening and reading such files against reading their bytes.
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

    case: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="{generate,checkpoint,data,all}")]] = "all"
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
        memory = (f"{peak / 1e6:,.0f} MB" if peak else "" for peak in self.memory) if self.memory else "  "
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


# Data.

CORPUS = """
import json, random, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from megazoo.data.corpus import standard_library
directory, count, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
text = "".join(document.decode(errors="ignore") for document in standard_library())
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=tokens, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
)
bpe.train_from_iterator([text[start : start + 10_000] for start in range(0, len(text), 10_000)], trainer)
bpe.save(str(directory / "tokenizer.json"))
generator = random.Random(0)
with open(directory / "corpus.jsonl", "w") as file:
    for _ in range(count):
        start = generator.randrange(len(text) - 800)
        file.write(json.dumps({"text": text[start : start + generator.randint(1, 800)]}) + chr(10))
"""


TIKTOKEN = """
import json, sys, time
from megazoo.tokenizer import open_tokenizer
encoding = open_tokenizer(sys.argv[1])._bpe
texts = [json.loads(line)["text"] for line in open(sys.argv[2])]
began = time.perf_counter()
encoding.encode_ordinary_batch(texts, num_threads=int(sys.argv[3]))
print(time.perf_counter() - began)
"""


OPEN = """
import json, sys, time
import numpy as np, torch
from pathlib import Path
from megazoo.data import Batches, check_data, open_datasets
from megazoo.data.indexed import write_index
from megazoo.parallel import ParallelContext
from megazoo.tokenizer import ByteTokenizer
prefix, tokens, pairs, resident = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), []
lengths = np.random.default_rng(0).multinomial(tokens, np.full(tokens // 500, 500 / tokens))
with open(f"{prefix}.bin", "wb") as file:
    for start in range(0, tokens, 1 << 20):
        np.random.default_rng(start).integers(0, 50000, min(1 << 20, tokens - start), dtype=np.uint16).tofile(file)
write_index(f"{prefix}.idx", lengths, np.dtype(np.uint16))
opened, read, made, copied = [], [], [], []
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
for pair in range(pairs + 1):
    before, began = anonymous(), time.perf_counter()
    sources = check_data([str(prefix)], "99,1")
    blend = open_datasets(sources, ByteTokenizer(), seq_length=1024, vocab_size=50257, seed=pair).training
    batches = Batches(blend, 16, ParallelContext())
    batches(0)
    opened.append(time.perf_counter() - began)
    resident.append(anonymous() - before)
    began = time.perf_counter()
    index = np.fromfile(f"{prefix}.idx", np.uint8)
    read.append(time.perf_counter() - began)
    places = [index for _, index in blend.places(0, 16 * 200)]
    whole = np.memmap(f"{prefix}.bin", np.uint16, "r")
    began = time.perf_counter()
    for place in places:
        torch.from_numpy(whole[place * 1024 : place * 1024 + 1025].astype(np.int64))
    copied.append(time.perf_counter() - began)
    began = time.perf_counter()
    for batch in range(200):
        batches(16 * batch)
    made.append(time.perf_counter() - began)
print(json.dumps([opened[1:], read[1:], made[1:], copied[1:], max(resident)]))
"""


def data_cases(options: Options) -> Iterator[Result]:
    cores, documents = len(os.sched_getaffinity(0)), 200_000
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="megazoo-benchmark-") as name:
        directory = Path(name)
        process([sys.executable, "-c", CORPUS, directory, documents, 32_000])
        corpus, prefix = directory / "corpus.jsonl", directory / "out" / "a"
        tool = [sys.executable, TOOLS / "preprocess_data.py", "--input", corpus, "--output-prefix", prefix]
        tool += ["--tokenizer", directory, "--workers", cores, "--append-eod"]
        ours, reference, peaks = [], [], []
        for _ in range(options.pairs + 1):
            shutil.rmtree(prefix.parent, ignore_errors=True)
            began = time.perf_counter()
            peaks.append(proportional(tool))
            ours.append(time.perf_counter() - began)
            reference.append(float(output_of([sys.executable, "-c", TIKTOKEN, directory, corpus, cores])))
        what = f"preprocess_data, {documents:,} documents, start to end, against tiktoken's encode_batch alone"
        yield Result(what, ours[1:], reference[1:], (max(peaks), 0))
        for tokens in (10, 100, 1000):
            shown = [sys.executable, "-c", OPEN, directory / "b", tokens * 10**6, options.pairs]
            opened, read, made, copied, resident = json.loads(output_of(shown))
            what = f"open {tokens:,} million tokens and make a batch, against reading the index"
            yield Result(what, opened, read, (resident, 0))
            yield Result("200 batches of 16 x 1,025 of them, against copying the tokens", made, copied, ())


def output_of(command: list) -> str:
    """What a command prints last."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def proportional(command: list) -> int:
    """Run a command to its end; returns the peak of its processes' memory together, bytes: the sum of their PSS."""
    child = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while child.poll() is None:
        peak = max(peak, sum(map(pss, family(child.pid))))
        time.sleep(0.2)
    if child.returncode:
        raise UserError(f"{' '.join(map(str, command))} failed", exit_code=1)
    return peak


def family(pid: int) -> list[int]:
    """A process and those that came of it."""
    try:
        children = [
            int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()
        ]
    except OSError:  # it has just ended
        return []
    return [pid, *(each for child in children for each in family(child))]


def pss(pid: int) -> int:
    """Proportional set size, bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


CASES = {"generate": generate_cases, "checkpoint": checkpoint_cases, "data": data_cases}

if __name__ == "__main__":
    run_program(main)
