"""Where a checkpoint lies on disk, and how the step to read is found. Nothing here needs torch.

    ckpt/latest                                            text: step_00000100
    ckpt/step_00000100/megazoo.json                        the manifest, written last
    ckpt/step_00000100/model_tp_0_pp_0.safetensors         one for each (tp, pp) rank
    ckpt/step_00000100/optimizer_tp_0_pp_0_dp_0.safetensors
    ckpt/step_00000100/trainer.json                        step, consumed samples, seed ...

A step is written in a hidden directory and renamed when its manifest is on disk. A manifest appears
at once, after all that it names, and is the first to go when a directory is removed. So a directory
that has one is whole, hidden or not, and a kill at any moment leaves the old checkpoint or the new
one.
"""

import re
from pathlib import Path

from megazoo.errors import UserError

MANIFEST, TRAINER, LATEST = "megazoo.json", "trainer.json", "latest"


def step_name(step: int) -> str:
    """Return the name of a step's directory: step_00000100."""
    return f"step_{step:08d}"


class NoCheckpoint(UserError):
    """There is no checkpoint where one was looked for."""


def find_checkpoint(path: str | Path) -> Path:
    """Return the directory of one step: `path` itself, what its `latest` names, or else its newest
    whole step.

    Raises NoCheckpoint if there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if (path / LATEST).is_file():
        name = (path / LATEST).read_text(errors="replace").strip()
        if re.fullmatch(r"step_\d+", name) and (path / name / MANIFEST).is_file():
            return path / name
    manifests = [*path.glob("step_*/" + MANIFEST), *path.glob(".step_*/" + MANIFEST)]
    whole = [manifest.parent for manifest in manifests]
    if not path.exists():  # the program was killed while a new directory took the place of this one
        asides = (path.parent / f".{path.name}.{kind}" for kind in ("partial", "replaced"))
        whole = [aside for aside in asides if (aside / MANIFEST).is_file()][:1]
    if not whole and not path.is_dir():
        raise NoCheckpoint(f"{path} is not a checkpoint: no such directory")
    if not whole:
        raise NoCheckpoint(f"{path} is not a checkpoint: it has neither {LATEST} nor {MANIFEST}")
    return max(whole, key=lambda step: step.name.strip("."))
