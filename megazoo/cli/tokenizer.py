"""The tokenizer of a run: the one that a setting names, and its files in checkpoints."""

from contextlib import suppress
from pathlib import Path

from megazoo.checkpoint.places import NoCheckpoint, find_checkpoint
from megazoo.cli.run import Run
from megazoo.models.base import Model
from megazoo.tokenizer import (
    TOKENIZER_FILES,
    TOKENIZER_SIDECARS,
    has_tokenizer,
    tokenizer_files,
)


def find_tokenizer(where: str | Path) -> str:
    """Return what `open_tokenizer` takes for the tokenizer that a setting names.

    Of a checkpoint's directory that is the step to read; all else is returned as it is. "byte" is
    the tokenizer of bytes, whatever directory has that name.
    """
    path = Path(where)
    if str(where) != "byte" and path.is_dir() and not has_tokenizer(path):
        with suppress(NoCheckpoint):
            return str(find_checkpoint(path))
    return str(where)


def take_along_tokenizer(run: Run, model: Model) -> None:
    """Have checkpoints carry the tokenizer's files, instead of those that came with the weights; a
    resumed run finds them there."""
    source = run.tokenizer.source
    run.options.data.tokenizer = "byte" if source == "byte" else None
    others = (*TOKENIZER_FILES, *TOKENIZER_SIDECARS)
    kept = {name: data for name, data in model.sidecar_files.items() if name not in others}
    model.sidecar_files = tokenizer_files(source) | kept
