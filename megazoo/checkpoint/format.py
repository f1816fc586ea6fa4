"""Checkpoints on disk: streamed safetensors files, the manifest that makes a directory whole, and how one is found.

    ckpt/latest                                            text: step_00000100
    ckpt/step_00000100/megazoo.json                        the manifest, written last
    ckpt/step_00000100/model_tp_0_pp_0.safetensors         one for each (tp, pp) rank
    ckpt/step_00000100/optimizer_tp_0_pp_0_dp_0.safetensors
    ckpt/step_00000100/trainer.json                        step, consumed samples, seed ...

A step is written in a hidden directory and renamed when its manifest is on disk. A manifest appears at once, after all
that it names, and is the first to go when a directory is removed. So a directory that has one is whole, hidden or not,
and a kill at any moment leaves the old checkpoint or the new one.
"""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from megazoo.errors import UserError

FORMAT_VERSION = 1
MANIFEST, TRAINER, LATEST = "megazoo.json", "trainer.json", "latest"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PIECE_BYTES = 64 << 20  # what is held of a tensor while it is written


def step_name(step: int) -> str:
    return f"step_{step:08d}"


class Lazy(NamedTuple):
    """A tensor that is made when it is written, so that one at a time is in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor | Lazy]) -> dict:
    """Stream tensors into a safetensors file, and to the disk; returns its {"size", "crc32"}.

    The format is eight bytes of header length (little-endian), a JSON header, and the raw bytes of the tensors.
    """
    header, end = {"__metadata__": {"format": "pt", "writer": "megazoo"}}, 0
    for name, tensor in tensors.items():
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    crc = 0
    with open(path, "wb") as file:

        def write(data) -> None:
            nonlocal crc
            crc = zlib.crc32(data, crc)
            file.write(data)

        write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            tensor = tensor.load() if isinstance(tensor, Lazy) else tensor
            flat = tensor.detach().contiguous().view(-1)
            for piece in flat.split(PIECE_BYTES // tensor.element_size()):
                write(piece.cpu().view(torch.uint8).numpy())
        sync(file)
        return {"size": file.tell(), "crc32": crc}


def write_json(path: Path, value) -> dict:
    """Write JSON to the disk; returns its {"size", "crc32"}."""
    return write_at_once(path, (json.dumps(value, indent=1) + "\n").encode())


def write_at_once(path: Path, data: bytes) -> dict:
    """Write a file that is there whole or not at all; returns its {"size", "crc32"}."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(data)
        sync(file)
    os.replace(partial, path)
    return {"size": len(data), "crc32": zlib.crc32(data)}


def remove(directory: Path) -> None:
    """Remove a step's directory, if it is there; its manifest goes first, so that what is left never looks whole."""
    if directory.exists():
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory)


def sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def staging_directory(directory: Path, step: int) -> Path:
    """An empty hidden directory in which a step is written."""
    staging = directory / f".{step_name(step)}.partial"
    directory.mkdir(parents=True, exist_ok=True)
    remove(staging)
    staging.mkdir()
    return staging


def publish(staging: Path, step: int) -> Path:
    """Give a whole step its name, in place of an older one of that name, and point `latest` at it."""
    directory, final = staging.parent, staging.parent / step_name(step)
    replaced = directory / f".{step_name(step)}.replaced"
    remove(replaced)
    sync_directory(staging)
    if final.exists():
        os.rename(final, replaced)
    os.rename(staging, final)
    write_at_once(directory / LATEST, f"{final.name}\n".encode())
    sync_directory(directory)
    remove(replaced)
    return final


def check_replaceable(directory: Path, overwrite: bool = False) -> None:
    """Raise UserError unless a new directory may take this one's place: it is empty, or ours, or to be overwritten."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise UserError(f"{directory} is not empty: choose another, or --overwrite")


@contextmanager
def replaced_directory(directory: Path):
    """A new directory in which to write; when the block ends well, it takes the place of `directory`, else it goes."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging, replaced = (directory.parent / f".{directory.name}.{what}" for what in ("partial", "replaced"))
    remove(staging)
    staging.mkdir()
    try:
        yield staging
        sync_directory(staging)
        remove(replaced)
        if directory.exists():
            os.rename(directory, replaced)
        os.rename(staging, directory)
        sync_directory(directory.parent)
        remove(replaced)
    except BaseException:
        remove(staging)
        raise


def find_checkpoint(path: str | Path) -> Path:
    """The directory of one step: `path` itself, what its `latest` names, or else its newest whole step.

    Raises UserError if there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if (path / LATEST).is_file():
        named = path / (path / LATEST).read_text().strip()
        if named.parent == path and (named / MANIFEST).is_file():
            return named
    whole = [manifest.parent for manifest in [*path.glob("step_*/" + MANIFEST), *path.glob(".step_*/" + MANIFEST)]]
    if not whole:
        why = "no such directory" if not path.is_dir() else f"it has neither {LATEST} nor {MANIFEST}"
        raise UserError(f"{path} is not a checkpoint: {why}")
    return max(whole, key=lambda step: step.name.strip("."))
