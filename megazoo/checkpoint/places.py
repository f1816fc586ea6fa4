"""Where a checkpoint lies on disk, and how the step to read is found. Nothing here needs torch.

    ckpt/latest                                            text: step_00000100
    ckpt/step_00000100/megazoo.json                        the manifest, written last
    ckpt/step_00000100/model_tp_0_pp_0.safetensors         one for each (tp, pp) rank
    ckpt/step_00000100/optimizer_tp_0_pp_0_dp_0.safetensors
    ckpt/step_00000100/trainer.json                        step, consumed samples, seed ...

A step is written in a hidden directory, `.step_00000100.RANDOM.partial`, and renamed when its
manifest is on disk; what had its name before is `.step_00000100.RANDOM.replaced` until it is
removed. A manifest appears at once, after all that it names, and is the first to go when a
directory is removed. So a directory that has one is whole, hidden or not, and a kill at any moment
leaves the old checkpoint or the new one. The tools write their outputs likewise.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from megazoo.errors import UserError
from megazoo.hub import local_directory

MANIFEST, TRAINER, LATEST = "megazoo.json", "trainer.json", "latest"
CONFIG, INDEX = "config.json", "model.safetensors.index.json"  # of a Hugging Face directory
PARTIAL, REPLACED = "partial", "replaced"


def step_name(step: int) -> str:
    """Return the name of a step's directory: step_00000100."""
    return f"step_{step:08d}"


def is_step_name(name: str) -> bool:
    """Whether a name is exactly what `step_name` makes of a number."""
    digits = name.removeprefix("step_")
    return digits.isascii() and digits.isdigit() and name == step_name(int(digits))


def hidden_directories(parent: Path, name: str) -> list[Path]:
    """Return the hidden directories that programs that were killed have left: what was to be called
    `name`, or had to give way. name: a regular expression. Links are left out."""
    pattern = re.compile(rf"\.({name})(\.[0-9a-f]{{8}})?\.({PARTIAL}|{REPLACED})")
    with suppress(OSError), os.scandir(parent) as entries:
        return sorted(
            Path(parent, entry.name)
            for entry in entries
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )
    return []


def asides(directory: Path) -> list[Path]:
    """Return what programs that were killed have left beside a directory that they wrote."""
    return hidden_directories(directory.parent, re.escape(directory.name))


def present(directory: Path) -> Path:
    """Return a directory, or what stands for it: if a program was killed while a new one took its
    place, it is absent, and the new or the old one lies beside it, whole."""
    if directory.exists():
        return directory
    whole = [
        aside
        for aside in asides(directory)
        if aside.suffix == f".{REPLACED}" or (aside / MANIFEST).is_file()
    ]
    # A new one, if it is known to be whole.
    return max(whole, key=lambda aside: aside.suffix == f".{PARTIAL}", default=directory)


def named_directory(where: str | Path, *, tokenizer_alone: bool = False) -> Path:
    """Return the directory that a user names: a path, or org/name[@revision] on the Hugging Face
    hub. See `present` and `megazoo.hub.local_directory`."""
    path = present(Path(where))
    return path if path.exists() else local_directory(where, tokenizer_alone=tokenizer_alone)


class NoCheckpoint(UserError):
    """There is no checkpoint where one was looked for."""


def find_checkpoint(path: str | Path) -> Path:
    """Return the directory of one step: `path` itself, what its `latest` names, or else its newest
    whole step.

    Raises NoCheckpoint if there is none.
    """
    path = present(Path(path))
    if (path / MANIFEST).is_file():
        return path
    if (path / LATEST).is_file():
        name = (path / LATEST).read_text(errors="replace").strip()
        if re.fullmatch(r"step_\d+", name) and (path / name / MANIFEST).is_file():
            return path / name
    manifests = [*path.glob("step_*/" + MANIFEST), *path.glob(".step_*/" + MANIFEST)]
    if not manifests and not path.is_dir():
        raise NoCheckpoint(f"{path} is not a checkpoint: no such directory")
    if not manifests:
        raise NoCheckpoint(f"{path} is not a checkpoint: it has neither {LATEST} nor {MANIFEST}")
    return max((manifest.parent for manifest in manifests), key=_age)


def has_checkpoint(path: Path) -> bool:
    """Say whether `find_checkpoint` finds one."""
    try:
        find_checkpoint(path)
    except NoCheckpoint:
        return False
    return True


def _age(step: Path) -> tuple[int, str]:
    """Order steps by their number. What a user has named, step_00000002-best, comes first."""
    number = re.fullmatch(r"\.?step_([0-9]+)(\..*)?", step.name)
    return int(number[1]) if number else -1, step.name.strip(".")
