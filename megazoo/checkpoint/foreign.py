"""Names what a path holds if it is not a checkpoint that megazoo reads, and what to do. This module
does not need torch."""

import re
from pathlib import Path

from megazoo.checkpoint.places import CONFIG, LATEST
from megazoo.files import check_whole

HUB = re.compile(r"(?:models--)([^/]+?)--([^/]+)")  # a folder of the hub's cache
TRAINER_STEP = re.compile(r"checkpoint-(\d+)")  # of transformers' Trainer
PICKLES = (".pt", ".pth", ".ckpt")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
CONVERT = (
    "load it with the program that wrote it, build the model of transformers, and write that with "
    "its save_pretrained"
)


def what_is(path: Path) -> str:
    """Return a text that follows a path: what it holds, and what to pass in its place. "" if that
    is not known. Raises UserError for a pointer of Git LFS.

    Known are the output of transformers' Trainer, folders of the Hugging Face hub's cache,
    checkpoints of DeepSpeed, torch.distributed.checkpoint, Meta and other programs, and weights
    without a config.json.
    """
    if path.is_file():
        return _of_file(check_whole(path))
    if not path.is_dir():
        return ""
    names = sorted(entry.name for entry in path.iterdir())
    steps = {int(m[1]): path / n for n in names if (m := TRAINER_STEP.fullmatch(n))}
    if steps:
        return (
            "holds the checkpoints of a training with transformers: pass one of them, such as "
            f"{steps[max(steps)]}"
        )
    if found := _of_hub(path, names):
        return found
    texts = (_content(path / LATEST) if LATEST in names else "", *names)
    if any(re.match(r"global_step\d+|.*_model_states\.pt", text) for text in texts):
        return (
            "is a checkpoint of DeepSpeed, which megazoo does not read: run its zero_to_fp32.py to "
            f"write pytorch_model.bin next to the model's {CONFIG}, and pass that directory"
        )
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return (
            f"is a checkpoint of torch.distributed.checkpoint without a {CONFIG}: copy the model's "
            f"{CONFIG} there, and its tokenizer"
        )
    if found := sorted(path.glob("*/.metadata"), key=lambda file: file.stat().st_mtime):
        return f"holds several checkpoints: pass one of them, such as {found[-1].parent}"
    if any(any(path.glob(pattern)) for pattern in WEIGHTS) and CONFIG not in names:
        return f"has weights but no {CONFIG}: copy the model's {CONFIG} there, and its tokenizer"
    pickles = [name for name in names if Path(name).suffix in PICKLES]
    return f"has {pickles[0]}, a checkpoint of another program: {CONVERT}" if pickles else ""


def _of_file(path: Path) -> str:
    if path.suffix in (".safetensors", ".bin", ".json"):
        return f"is a file of a model: pass its directory, {path.parent}, with {CONFIG}"
    if path.suffix in PICKLES:
        return f"is a checkpoint of another program: {CONVERT}"
    return ""


def _of_hub(path: Path, names: list[str]) -> str:
    """Return the text for the cache of the Hugging Face hub, or for a model's folder in it."""
    folders = [found for name in names if (found := HUB.fullmatch(name))]
    if folders:
        return (
            "is the cache of the Hugging Face hub: pass the name of a model, such as "
            f"{folders[0][1]}/{folders[0][2]}"
        )
    snapshots = sorted(path.glob(f"snapshots/*/{CONFIG}"))
    found = HUB.fullmatch(path.name)
    if not snapshots and not found:
        return ""
    ways = [f"{found[1]}/{found[2]}"] if found else []
    ways += [str(snapshots[-1].parent)] if snapshots else []
    return f"is a folder of the Hugging Face hub's cache: pass {' or '.join(ways)}"


def _content(path: Path) -> str:
    """Return the start of a small text file; "" if it can't be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read(200).strip()
    except OSError:
        return ""
