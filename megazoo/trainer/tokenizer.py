"""Find the tokenizer that a setting names."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megazoo.checkpoint.places import NoCheckpoint, find_checkpoint, named_directory
from megazoo.terminal import note_rank_0
from megazoo.tokenizer import Tokenizer, has_tokenizer


def find_tokenizer(where: str | Path) -> str:
    """Return the argument of `open_tokenizer` for the tokenizer that a setting names.

    For the directory of a run it is its latest step, for a name on the Hugging Face hub the
    directory of the downloaded files. Other values are returned unchanged. "byte" is always the
    byte tokenizer, even if a directory has that name.
    """
    if str(where) == "byte":
        return "byte"
    path = named_directory(where, tokenizer_alone=True)
    if path.is_dir() and not has_tokenizer(path):
        with suppress(NoCheckpoint):
            return str(find_checkpoint(path))
    return str(path)


def with_vocabulary(config: Any, tokenizer: Tokenizer) -> Any:
    """Return the config of a new model, with the vocabulary of the tokenizer if that is larger, and
    print a note then."""
    if tokenizer.vocab_size <= config.vocab_size:
        return config
    note_rank_0(
        f"vocab-size: {tokenizer.vocab_size:,}, as the tokenizer {tokenizer.source} needs, in "
        f"place of {config.vocab_size:,}"
    )
    return replace(config, vocab_size=tokenizer.vocab_size)
