"""The tokenizer that a setting names."""

from contextlib import suppress
from pathlib import Path

from megazoo.checkpoint.places import NoCheckpoint, find_checkpoint, named_directory
from megazoo.tokenizer import has_tokenizer


def find_tokenizer(where: str | Path) -> str:
    """Return what `open_tokenizer` takes for the tokenizer that a setting names.

    Of a checkpoint's directory that is the step to read, of a name on the Hugging Face hub the
    directory of its files; all else is returned as it is. "byte" is the tokenizer of bytes,
    whatever directory has that name.
    """
    if str(where) == "byte":
        return "byte"
    path = named_directory(where, tokenizer_alone=True)
    if path.is_dir() and not has_tokenizer(path):
        with suppress(NoCheckpoint):
            return str(find_checkpoint(path))
    return str(path)
