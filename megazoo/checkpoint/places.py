"""The paths of a checkpoint, and how the step to read is found. This module does not need torch.

    ckpt/latest                                            text: step_00000100
    ckpt/step_00000100/megazoo.json                        the manifest, written last
    ckpt/step_00000100/model_tp_0_pp_0.safetensors         one per (tp, pp) rank
    ckpt/step_00000100/optimizer_tp_0_pp_0_dp_0.safetensors
    ckpt/step_00000100/trainer.json                        step, consumed samples, seed ...

A step is written in a hidden directory, `.step_00000100.RANDOM.partial`, and renamed when its
manifest is on disk. An older step of that name is `.step_00000100.RANDOM.replaced` until it is
removed. A manifest is written atomically, after all files that it names, and is removed first. So a
directory with a manifest is complete, hidden or not, and a kill at any moment leaves the old
checkpoint or the new one. The tools write their outputs in the same way.

With --save-format dcp, a step has .metadata of torch.distributed.checkpoint in place of the
manifest, and __RANK_0.distcp in place of the safetensors files.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from megazoo.errors import UserError
from megazoo.hub import local_directory

MANIFEST, TRAINER, LATEST = "megazoo.json", "trainer.json", "latest"
CONFIG, INDEX = "config.json", "model.safetensors.index.json"  # in a Hugging Face directory
DCP_METADATA = ".metadata"  # in a checkpoint of torch.distributed.checkpoint
PARTIAL, REPLACED = "partial", "replaced"
COMPLETE = (MANIFEST, DCP_METADATA)  # the file of a step that is written last


def is_complete(directory: Path) -> bool:
    """Return whether a directory has the file that is written last: it is a complete checkpoint."""
    return any((directory / name).is_file() for name in COMPLETE)


def step_name(step: int) -> str:
    """Return the name of a step's directory: step_00000100."""
    return f"step_{step:08d}"


def is_step_name(name: str) -> bool:
    """Return whether a name is exactly the `step_name` of a number."""
    digits = name.removeprefix("step_")
    return digits.isascii() and digits.isdigit() and name == step_name(int(digits))


def hidden_directories(parent: Path, name: str) -> list[Path]:
    """Return the hidden directories of killed programs for the final name `name`: incomplete ones
    and replaced ones. name: a regular expression. Links are ignored."""
    pattern = re.compile(rf"\.({name})(\.[0-9a-f]{{8}})?\.({PARTIAL}|{REPLACED})")
    with suppress(OSError), os.scandir(parent) as entries:
        return sorted(
            Path(parent, entry.name)
            for entry in entries
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )
    return []


def asides(directory: Path) -> list[Path]:
    """Return the hidden directories that killed programs left next to a directory."""
    return hidden_directories(directory.parent, re.escape(directory.name))


def present(directory: Path) -> Path:
    """Return a directory, or the complete hidden directory in its place.

    If a program was killed while it replaced the directory, the directory is missing, and the new
    or the old one is next to it under a hidden name.
    """
    if directory.exists():
        return directory
    whole = [
        aside for aside in asides(directory) if aside.suffix == f".{REPLACED}" or is_complete(aside)
    ]
    # The new one, if it is known to be complete.
    return max(whole, key=lambda aside: aside.suffix == f".{PARTIAL}", default=directory)


def named_directory(where: str | Path, *, tokenizer_alone: bool = False) -> Path:
    """Return the directory of a path, or of org/name[@revision] on the Hugging Face hub. See
    `present` and `megazoo.hub.local_directory`."""
    path = present(Path(where))
    return path if path.exists() else local_directory(where, tokenizer_alone=tokenizer_alone)


class NoCheckpoint(UserError):
    """The given path does not hold a checkpoint."""


def find_checkpoint(path: str | Path) -> Path:
    """Return the directory of one step: `path` itself, the step that its file `latest` names, or
    its newest complete step.

    Raises:
        NoCheckpoint: if there is no complete step.
    """
    path = present(Path(path))
    if is_complete(path):
        return path
    if (path / LATEST).is_file():
        name = (path / LATEST).read_text(errors="replace").strip()
        if re.fullmatch(r"step_\d+", name) and is_complete(path / name):
            return path / name
    steps = [*filter(is_complete, (*path.glob("step_*"), *path.glob(".step_*")))]
    if not steps and not path.is_dir():
        raise NoCheckpoint(f"{path} is not a checkpoint: no such directory")
    if not steps:
        raise NoCheckpoint(f"{path} is not a checkpoint: it has neither {LATEST} nor {MANIFEST}")
    return max(steps, key=_age)


def has_checkpoint(path: Path) -> bool:
    """Return whether `find_checkpoint` finds a step."""
    try:
        find_checkpoint(path)
    except NoCheckpoint:
        return False
    return True


def _age(step: Path) -> tuple[int, str]:
    """Return a key to order steps by number. Other names, such as step_00000002-best, come
    first."""
    number = re.fullmatch(r"\.?step_([0-9]+)(\..*)?", step.name)
    return int(number[1]) if number else -1, step.name.strip(".")
