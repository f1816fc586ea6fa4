"""Tokenize text into token files for training, in Megatron-LM's format (.bin and .idx).

$ megazoo preprocess --input corpus.jsonl --output-prefix out/corpus \\
      --tokenizer path/to/llama --append-eod

Inputs are JSONL files (.jsonl or .json, optionally with .gz or .zst) with one document per line,
other files, each of which is one document, or folders of both. Token files in folders are skipped.
If the command is interrupted, run it again to resume.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megazoo.cli.flags import parse_flags
from megazoo.data.encoding import Recipe
from megazoo.data.indexed import IndexedTokens
from megazoo.data.preprocess import input_files, preprocess
from megazoo.errors import UserError
from megazoo.settings import mandatory
from megazoo.terminal import byte_bar
from megazoo.trainer.tokenizer import find_tokenizer

MOST_WORKERS = 1024
TOLD = 5  # lines without text that are reported one by one


@dataclass
class Options:
    """Inputs and tokenization."""

    input: Annotated[
        tuple[Path, ...],
        tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="(required)"),
    ] = ()
    """Input files and folders."""
    output_prefix: Annotated[Path | None, mandatory("PREFIX")] = None
    """Prefix of the output files: PREFIX_KEY_document.bin and .idx."""
    tokenizer: str = "byte"
    """Tokenizer: byte, or a directory or file."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts in each line of a JSONL file. Each key gets separate output files."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    workers: int = os.cpu_count() or 1
    """Number of processes that tokenize."""
    strict: bool = False
    """Stop at the first line that has no text. By default such lines are skipped and reported."""
    overwrite: bool = False
    """Replace existing output files."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    check(options)
    inputs = input_files(list(options.input))
    tokenizer = find_tokenizer(options.tokenizer)
    recipe = Recipe(inputs, tokenizer, options.json_keys, options.append_eod, options.strict)
    told = 0
    began = time.perf_counter()
    with byte_bar(sum(os.path.getsize(file) for file in inputs), "tokenize") as bar:

        def tell(line: str) -> None:
            nonlocal told
            told += 1
            if told <= TOLD:
                bar.write(f"skipped {line}")

        try:
            done = preprocess(
                recipe, options.output_prefix, options.workers, progress=bar.update, report=tell
            )
        except OSError as error:
            raise UserError(
                f"{error.filename or options.output_prefix} can't be written: {error.strerror}",
                exit_code=1,
            ) from error
    seconds = time.perf_counter() - began
    for output in outputs_of(options):
        tokens = IndexedTokens(output)
        count = len(tokens.tokens)
        print(
            f"wrote {output}.bin and .idx: {len(tokens):,} documents, {count:,} tokens "
            f"({tokens.dtype}), {count / seconds:,.0f} tokens/s"
        )
    if done.bad:
        print(f"skipped {done.bad:,} lines without text; --strict stops at the first")


def check(options: Options) -> None:
    """Raise UserError for invalid options, or if the outputs already exist."""
    if not options.input or options.output_prefix is None:
        raise UserError("--input and --output-prefix are required (see --help)")
    if options.workers < 1:
        raise UserError(f"--workers {options.workers} must be at least 1")
    if options.workers > MOST_WORKERS:
        raise UserError(f"--workers {options.workers} must be at most {MOST_WORKERS}")
    if not options.json_keys or len(set(options.json_keys)) < len(options.json_keys):
        raise UserError("--json-keys must be one or more different names")
    for output in outputs_of(options):
        files = (Path(f"{output}.bin"), Path(f"{output}.idx"))
        if not options.overwrite and any(file.exists() for file in files):
            raise UserError(f"{output}.bin or .idx already exists: use --overwrite to replace them")


def outputs_of(options: Options) -> list[Path]:
    """Return the paths of the token files without suffix, one per key."""
    return [Path(f"{options.output_prefix}_{key}_document") for key in options.json_keys]
