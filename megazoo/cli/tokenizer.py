"""Find the tokenizer that a setting names."""

from contextlib import suppress
from pathlib import Path

from megazoo.checkpoint.places import NoCheckpoint, find_checkpoint, named_directory
from megazoo.tokenizer import has_tokenizer


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
