"""Records of runs: what another needs to repeat one, and the losses that are to come out.

A record is a directory with two files that can be read as they are: record.json, and steps.jsonl
with a line for each step. tools/check_run.py runs the first steps again, and compares.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta

from megazoo.cli.elastic import is_restart
from megazoo.cli.metrics import append_line
from megazoo.cli.options import Options
from megazoo.data.corpus import standard_library_files
from megazoo.data.text_files import is_loose_json
from megazoo.errors import UserError
from megazoo.files import convert, json_object, open_at_once, read_bytes, reason_of
from megazoo.models.registry import family_of
from megazoo.tokenizer import tokenizer_files

RECORD, STEPS = "record.json", "steps.jsonl"
FORMAT = 1
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**20)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Text = Annotated[str, Meta(max_length=100_000)]
# Settings of what a run writes and prints, where it runs, and which file it read: not of what it
# computes.
BESIDE = (
    "save save_interval async_save keep_last on_save_error verify log_interval eval_interval "
    "eval_steps metrics tensorboard wandb peak_tflops profile profile_steps record "
    "timeout device data_workers config import"
).split()
LAYOUT = (
    "tp pp virtual_pp cp cp_method stage_layers sequence_parallel schedule zero offload_optimizer"
).split()


@dataclass
class InputFile:
    """A file that a run reads. kind: data, tokenizer, weights or import. name: without its
    directory."""

    kind: Text
    name: Text
    bytes: Count
    sha256: Sha256

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass
class Recorded:
    """What record.json says.

    command: as it was typed. settings: those that decide what is computed, by their flags' names
    with underscores, all that follow from others filled in. config: the model's. dp: of the layout,
    whose other sizes are settings. first_step: after which it begins. inputs: where the files were,
    by their kinds. files: their checksums. versions, machine: told where a run differs. run: its
    id. resumed: after which steps it was started again.
    """

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    run: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
    command: list[Text]
    family: Text
    config: dict[Text, Any]
    settings: dict[Text, Any]
    dp: Size
    first_step: Count
    inputs: dict[Text, list[Text]]
    files: list[InputFile]
    versions: dict[Text, Text]
    machine: dict[Text, Text]
    resumed: list[Count] = field(default_factory=list)


@dataclass
class Step:
    """A line of steps.jsonl. grad_norm: before clipping; None of a step that was skipped."""

    step: Count
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens: Count | None = None
    validation_loss: float | None = None
    test_loss: float | None = None


def inputs_of(run) -> dict[str, list[str]]:
    """Return where the files are that a run reads, by their kinds."""
    options, weights = run.options, run.weights
    paths = [source.path for source in (weights.base, weights.adapters) if source]
    if options.lora.lora_load and not weights.adapters:  # PEFT's
        paths.append(options.lora.lora_load)
    imported = options.model.import_
    return {
        "data": list(run.sources.names),
        "tokenizer": [str(run.tokenizer.source)],
        "weights": [str(path) for path in paths],
        "import": [str(imported)] if imported else [],
    }


def checksums(inputs: dict[str, list[str]]) -> list[InputFile]:
    """Return the size and SHA-256 of every file that a run reads. inputs: of `inputs_of`."""
    found = []
    for name in inputs["data"]:
        found += [_of_path("data", label, path) for label, path in _data_files(name)]
    for where in inputs["tokenizer"]:
        for name, data in sorted(tokenizer_files(where).items()):
            digest = hashlib.sha256(data).hexdigest()
            found.append(InputFile("tokenizer", name, len(data), digest))
    for where in inputs["weights"]:
        if not Path(where).is_dir():
            raise UserError(f"no directory {where}, where the weights were: --load says where")
        files = sorted(path for path in Path(where).iterdir() if path.is_file())
        found += [_of_path("weights", path.name, path) for path in files]
    found += [_of_path("import", Path(name).name, Path(name)) for name in inputs["import"]]
    return found


def _data_files(name: str) -> Iterable[tuple[str, Path]]:
    """Yield the files of a source of data, each with the name that a record has for it."""
    if name == "mock":
        return
    if name == "stdlib":
        files = standard_library_files()
        root = os.path.commonpath(files)
        yield from ((path.relative_to(root).as_posix(), path) for path in files)
    elif is_loose_json(Path(name)):
        yield Path(name).name, Path(name)
    else:
        yield from ((f"{Path(name).name}{end}", Path(f"{name}{end}")) for end in (".bin", ".idx"))


def _of_path(kind: str, name: str, path: Path) -> InputFile:
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return InputFile(kind, name, file.tell(), digest)
    except OSError as error:
        raise UserError(f"{path}: {reason_of(error)}", exit_code=1) from error


def changed_files(then: list[InputFile], now: list[InputFile]) -> list[str]:
    """Return a line for each file that is not as it was, missing, or new."""
    before, after = _numbered(then), _numbered(now)
    lines = []
    for key, old in before.items():
        new = after.get(key)
        if new is None:
            lines.append(f"{old} is missing")
        elif new.bytes != old.bytes:
            lines.append(f"{old} had {old.bytes:,} bytes, and has {new.bytes:,}")
        elif new.sha256 != old.sha256:
            lines.append(f"{old} has as many bytes, but other contents")
    return lines + [f"{after[key]} is new" for key in after.keys() - before.keys()]


def _numbered(files: list[InputFile]) -> dict[tuple[str, str, int], InputFile]:
    """Return files by kind, name, and how many of that name came before: a blend may have two."""
    found = {}
    for file in files:
        number = sum((file.kind, file.name) == key[:2] for key in found)
        found[file.kind, file.name, number] = file
    return found


def settings_of_run(run, ctx) -> dict:
    """Return the settings that decide what a run computes, all filled in."""
    options = run.options
    groups = [getattr(options, f.name) for f in fields(Options) if f.name != "config"]
    values = {f.name.rstrip("_"): getattr(group, f.name) for group in groups for f in fields(group)}
    values["sequence_parallel"] = ctx.sequence_parallel
    values |= {"tokenizer": str(run.tokenizer.source), "load": None, "epochs": None}
    base, adapters = run.weights.base, run.weights.adapters
    if base:
        values |= {"load": str(base.path), "load_weights_only": not run.resuming}
    if adapters:
        values["lora_load"] = str(adapters.path)
    if values["mock_data"]:
        values["data"] = None
    kept = {name: value for name, value in values.items() if name not in BESIDE}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in kept.items()
        if value is not None and value is not False
    }


def versions() -> dict[str, str]:
    """Return the versions of what decides how numbers are computed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"numpy": np.__version__, "source": _source_checksum()}
    try:
        found["megazoo"] = importlib.metadata.version("megazoo")
    except importlib.metadata.PackageNotFoundError:
        found["megazoo"] = "not installed"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        found["commit"] = told.stdout.strip()
    except (OSError, subprocess.SubprocessError):  # it is installed, or there is no git
        pass
    return found


def machine(ctx) -> dict[str, str]:
    """Return what the ranks run on."""
    processor = platform.processor() or platform.machine()
    try:
        told = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = told[1] if told else processor
    except OSError:  # of another system
        pass
    found = {"processor": processor, "cores": str(os.cpu_count()), "system": platform.system()}
    found |= {"threads": str(torch.get_num_threads()), "device": ctx.device.type}
    if ctx.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(ctx.device)
    return found


def _source_checksum() -> str:
    """Return the SHA-256 of this library's own files, by which two copies can be told apart."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def begin_record(directory: Path, run, ctx, run_id: str) -> None:
    """Write record.json, or, where the run goes on, what is to follow the steps before.

    A run that torchrun starts again before its first checkpoint begins its record anew. UserError
    if the directory has the record of another run, or can't be written.
    """
    recorded, steps = None, []
    if (directory / RECORD).exists() and (run.resuming or not is_restart()):
        recorded = read_record(directory)
        if not run.resuming or recorded.run != run_id or recorded.first_step > run.first_step:
            raise UserError(
                f"--record {directory} holds the record of another run: choose another directory"
            )
        steps = [step for step in read_steps(directory) if step.step <= run.first_step]
        recorded.resumed.append(run.first_step)
    else:
        recorded = Recorded(
            FORMAT,
            run_id,
            ["pretrain_gpt.py", *run.arguments],
            family_of(run.config),
            json.loads(json.dumps(asdict(run.config))),
            settings_of_run(run, ctx),
            ctx.dp_size,
            run.first_step,
            inputs_of(run),
            run.files,
            versions(),
            machine(ctx),
        )
    lines = "".join(f"{_line(step)}\n" for step in steps)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in ((STEPS, lines), (RECORD, json.dumps(asdict(recorded), indent=1) + "\n")):
            with open(directory / name, "w", opener=open_at_once) as file:
                file.write(text)
    except OSError as error:
        raise UserError(f"--record {directory}: {reason_of(error)}", exit_code=1) from error


def record_step(directory: Path, step: Step) -> None:
    """Append a line to steps.jsonl; OSError if it can't be written."""
    append_line(directory / STEPS, f"{_line(step)}\n".encode())


def _line(step: Step) -> str:
    return json.dumps({key: value for key, value in asdict(step).items() if value is not None})


def read_record(directory: Path) -> Recorded:
    """Return what record.json says; UserError if it is none."""
    path = directory / RECORD
    if not path.is_file():
        raise UserError(f"{directory} is no record of a run: it has no {RECORD}")
    return convert(json_object(path, read_bytes(path)), Recorded, str(path))


def read_steps(directory: Path) -> list[Step]:
    """Return the lines of steps.jsonl; UserError if one of them is none."""
    path, steps = directory / STEPS, []
    if not path.is_file():
        raise UserError(f"{directory} is no record of a run: it has no {STEPS}")
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        name = Path(f"{path}, line {number}")
        steps.append(convert(json_object(name, line), Step, str(name)))
    return steps
