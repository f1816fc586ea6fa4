"""Train a tokenizer like that of LLaMA: sentencepiece BPE, with byte tokens for characters outside
the vocabulary.

$ megazoo train-tokenizer --input stdlib --vocab-size 4096 --output tokenizer
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import sentencepiece

from megazoo.cli.flags import parse_flags
from megazoo.data.corpus import standard_library
from megazoo.errors import UserError
from megazoo.files import regular_file
from megazoo.settings import mandatory

SMALLEST = 3 + 256  # unk, bos, eos, and the bytes
LARGEST = 1 << 24
CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
}


@dataclass
class Options:
    """Training of a tokenizer."""

    input: str = "stdlib"
    """Text file in UTF-8, or stdlib (the source of Python's standard library)."""
    output: Annotated[Path | None, mandatory("DIR")] = None
    """Directory for tokenizer.model and tokenizer_config.json."""
    vocab_size: int = 4096
    """Size of the vocabulary, including 256 byte tokens and three special tokens."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.output is None:
        raise UserError("--output is required: the directory to write (see --help)")
    if options.vocab_size <= SMALLEST:
        raise UserError(
            f"--vocab-size {options.vocab_size} must be more than {SMALLEST}, the number of "
            "byte and special tokens"
        )
    if options.vocab_size > LARGEST:
        raise UserError(f"--vocab-size {options.vocab_size} must be at most {LARGEST}")
    model = train(lines_of(options.input), options.vocab_size)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "tokenizer.model").write_bytes(model)
        (options.output / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"can't write {options.output}: {error.strerror}", exit_code=1) from error
    print(f"wrote {options.output}: open_tokenizer({str(options.output)!r}) opens it")


def lines_of(name: str) -> Iterator[str]:
    """Return the lines of a text file or of the standard library; UserError if it can't be read."""
    if name == "stdlib":
        return (line for text in standard_library() for line in text.decode().split("\n"))
    try:
        return iter(regular_file(name, or_pipe=True).read_text(encoding="utf-8-sig").split("\n"))
    except OSError as error:
        raise UserError(f"--input {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--input {name} is not UTF-8") from error


def train(lines: Iterator[str], vocab_size: int) -> bytes:
    """Train a sentencepiece model with the settings of LLaMA, and return the bytes of its file.

    Raises UserError if there is too little text.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 24,  # bytes; sentencepiece skips longer lines
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or "too little text"
        raise UserError(f"can't train a tokenizer on this input: {reason}", exit_code=1) from error
    return model.getvalue()
