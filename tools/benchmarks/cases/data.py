"""Compare tokenizing text into token files with tiktoken, and opening and reading such files with
reading their bytes."""

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from benchmarks.memory import proportional, resident
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, TOOLS, alone


class Opened(NamedTuple):
    """The measurements of token files.

    Attributes:
        opened: Seconds per run to open the files and make the first batch.
        made: Seconds per run to make 200 batches.
        copied: Seconds per run to copy the same number of tokens.
        resident: Bytes of memory used by opening.
    """

    opened: list[float]
    made: list[float]
    copied: list[float]
    resident: int


def cases(setup: Setup) -> Iterator[Result]:
    documents = 200_000
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as name:
        directory = Path(name)
        alone(make_corpus, directory, documents, 32_000)
        corpus, prefix = directory / "corpus.jsonl", directory / "out" / "a"
        tool = [sys.executable, TOOLS / "preprocess_data.py", "--append-eod"]
        tool += ["--input", corpus, "--output-prefix", prefix]
        tool += ["--tokenizer", directory, "--workers", CORES]
        ours, reference, peaks = [], [], []
        for _ in range(setup.pairs + 1):
            shutil.rmtree(prefix.parent, ignore_errors=True)
            began = time.perf_counter()
            peaks.append(proportional(tool))
            ours.append(time.perf_counter() - began)
            reference.append(alone(seconds_of_tiktoken, directory, corpus))
        name = (
            f"preprocess_data, {documents:,} documents, start to end, "
            "against tiktoken's encode_batch alone"
        )
        yield Result(name, ours[1:], reference[1:], (max(peaks), 0))
        few = alone(seconds_of_opening, directory / "b", 10**7, setup.pairs)
        many = alone(seconds_of_opening, directory / "b", 10**9, setup.pairs)
        name = "open 1,000 million tokens and make a batch, against 10 million"
        yield Result(name, many.opened, few.opened, (many.resident, few.resident))
        name = "200 batches of 16 x 1,025 of them, against copying the tokens"
        yield Result(name, many.made, many.copied)


def make_corpus(directory: Path, count: int, tokens: int) -> None:
    """Write corpus.jsonl, with documents from the source of Python's library, and tokenizer.json, a
    BPE trained on it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from megazoo.data.corpus import standard_library

    text = "".join(document.decode(errors="ignore") for document in standard_library())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    parts = [text[start : start + 10_000] for start in range(0, len(text), 10_000)]
    bpe.train_from_iterator(parts, trainer)
    bpe.save(str(directory / "tokenizer.json"))
    generator = random.Random(0)
    with open(directory / "corpus.jsonl", "w") as file:
        for _ in range(count):
            start = generator.randrange(len(text) - 800)
            file.write(json.dumps({"text": text[start : start + generator.randint(1, 800)]}) + "\n")


def seconds_of_tiktoken(directory: Path, corpus: Path) -> float:
    """Encode the corpus with tiktoken only, with all texts in one call."""
    from megazoo.tokenizer import open_tokenizer

    encoding = open_tokenizer(str(directory))._bpe
    with open(corpus) as lines:
        texts = [json.loads(line)["text"] for line in lines]
    began = time.perf_counter()
    encoding.encode_ordinary_batch(texts, num_threads=CORES)
    return time.perf_counter() - began


def write_tokens(prefix: Path, tokens: int) -> None:
    """Write token files of random tokens, in documents of about 500 tokens."""
    from megazoo.data.indexed import write_index

    lengths = np.random.default_rng(0).multinomial(tokens, np.full(tokens // 500, 500 / tokens))
    with open(f"{prefix}.bin", "wb") as file:
        for start in range(0, tokens, 1 << 20):
            generator, count = np.random.default_rng(start), min(1 << 20, tokens - start)
            generator.integers(0, 50000, count, dtype=np.uint16).tofile(file)
    write_index(f"{prefix}.idx", lengths, np.dtype(np.uint16))


def seconds_of_opening(prefix: Path, tokens: int, pairs: int) -> Opened:
    """Open token files of this many tokens, and read 200 batches of them."""
    from megazoo.data import Batches, check_data, open_datasets
    from megazoo.parallel import ParallelContext
    from megazoo.tokenizer import ByteTokenizer

    write_tokens(prefix, tokens)
    opened, made, copied, memory = [], [], [], []
    for pair in range(pairs + 1):
        before, began = resident("RssAnon"), time.perf_counter()
        sources = check_data([str(prefix)], "99,1")
        blend = open_datasets(
            sources, ByteTokenizer(), seq_length=1024, vocab_size=50257, seed=pair
        ).training
        batches = Batches(blend, 16, ParallelContext())
        batches(0)
        opened.append(time.perf_counter() - began)
        memory.append(resident("RssAnon") - before)
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
    return Opened(opened[1:], made[1:], copied[1:], max(memory))
