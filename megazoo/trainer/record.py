"""Records of runs: everything needed to repeat a run, and its losses.

A record is a directory with two text files: record.json, and steps.jsonl with one line per step.
`megazoo check run` repeats the first steps and compares.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta

from megazoo.checkpoint.places import named_directory
from megazoo.checkpoint.writing import json_bytes, write_atomically
from megazoo.commands import entry
from megazoo.data.sources import source_named
from megazoo.environment import restarts
from megazoo.errors import UserError
from megazoo.families.registry import family_of
from megazoo.files import append_line, convert, json_object, read_bytes, reason_of, regular_file
from megazoo.formats.megatron.source import is_iteration
from megazoo.gguf_file import names_of_parts
from megazoo.settings import described
from megazoo.tokenizer import tokenizer_files
from megazoo.trainer.adapters import Weights
from megazoo.trainer.options import (
    Options,
    with_registered,
)

RECORD, STEPS = "record.json", "steps.jsonl"
FORMAT = 1
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**20)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Text = Annotated[str, Meta(max_length=100_000)]


@dataclass
class InputFile:
    """A file that a run reads. kind: data, tokenizer, weights or import. name: file name without
    directory."""

    kind: Text
    name: Text
    bytes: Count
    sha256: Sha256

    def __str__(self) -> str:
        return shown(f"{self.name} ({self.kind})")


@dataclass
class Resumed:
    """A resumption of a run.

    Attributes:
        step: last step before it.
        changes: one line for each change since the record began.
    """

    step: Count
    changes: list[Text]


@dataclass
class Recorded:
    """The contents of record.json.

    Attributes:
        format: version of the format.
        run: id of the run.
        command: the command line as typed.
        family: model family.
        config: config of the model.
        settings: all settings that determine the computation, including defaults. Keys are the
            flags' names with underscores.
        dp: data-parallel size. The other sizes of the layout are settings.
        first_step: step after which the record begins.
        inputs: locations of the input files, by kind.
        files: checksums of the input files.
        versions, machine: software versions and hardware, printed if a repeated run differs.
        resumed: later starts of the run from a checkpoint.
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
    resumed: list[Resumed] = field(default_factory=list)


@dataclass
class Step:
    """A line of steps.jsonl. grad_norm: before clipping; None if the step was skipped."""

    step: Count
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens: Count | None = None
    validation_loss: float | None = None
    test_loss: float | None = None


def shown(text: str) -> str:
    """Make a text safe for one line of a terminal: printable and at most 100 characters."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 100 else f"{text[:97]}..."


def inputs_of(run) -> dict[str, list[str]]:
    """Return the locations of a run's input files, by kind."""
    imported = run.options.model.import_
    return {
        "data": list(run.sources.names),
        "tokenizer": [str(run.tokenizer.source)],
        "weights": [
            *directories_of(run.weights, run.options.lora.lora_load),
            *map(str, filter(None, [run.options.loss.reference])),
        ],
        "import": [str(imported)] if imported else [],
    }


def directories_of(weights: Weights, lora_load: Path | None) -> list[str]:
    """Return the locations of the weights with which a run starts."""
    paths = [source.path for source in (weights.base, weights.adapters) if source]
    if lora_load and not weights.adapters:  # a PEFT adapter
        paths.append(named_directory(lora_load))
    return [str(path) for path in paths]


def checksums(inputs: dict[str, list[str]]) -> list[InputFile]:
    """Return the size and SHA-256 of each input file of a run. inputs: from `inputs_of`."""
    found = []
    for name in inputs["data"]:
        found += [_of_path("data", label, path) for label, path in source_named(name).files()]
    for where in inputs["tokenizer"]:
        for name, data in sorted(tokenizer_files(where).items()):
            digest = hashlib.sha256(data).hexdigest()
            found.append(InputFile("tokenizer", name, len(data), digest))
    for where in inputs["weights"]:
        root = Path(where)
        if root.is_file():  # GGUF
            root, entries = root.parent, [root.parent / name for name in names_of_parts(root)]
        else:
            entries = (
                root.rglob("*") if is_iteration(root) else root.iterdir()
            )  # ranks' directories
        for path in sorted(path for path in entries if path.is_file()):
            found.append(_of_path("weights", path.relative_to(root).as_posix(), path))
    found += [_of_path("import", Path(name).name, Path(name)) for name in inputs["import"]]
    return found


def _of_path(kind: str, name: str, path: Path) -> InputFile:
    try:
        with open(regular_file(path), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return InputFile(kind, name, file.tell(), digest)
    except OSError as error:
        raise UserError(f"{path}: {reason_of(error)}", exit_code=1) from error


def changed_files(then: list[InputFile], now: list[InputFile]) -> list[str]:
    """Return a line for each changed, missing or new file."""
    before, after = _numbered(then), _numbered(now)
    lines = []
    for key, old in before.items():
        new = after.get(key)
        if new is None:
            lines.append(f"{old} is missing")
        elif new.bytes != old.bytes:
            lines.append(f"{old} had {old.bytes:,} bytes, and has {new.bytes:,}")
        elif new.sha256 != old.sha256:
            lines.append(f"{old} has the same size, but different contents")
    return lines + [f"{new} is new" for key, new in after.items() if key not in before]


def _numbered(files: list[InputFile]) -> dict[tuple[str, str, int], InputFile]:
    """Return files by kind, name and occurrence: a blend may contain a name twice."""
    found, seen = {}, Counter()
    for file in files:
        found[file.kind, file.name, seen[file.kind, file.name]] = file
        seen[file.kind, file.name] += 1
    return found


def settings_of_run(run, ctx) -> dict:
    """Return all settings that determine the computation of a run, including defaults."""
    options = run.options
    values = options.values
    values |= {"sequence_parallel": ctx.sequence_parallel, "virtual_pp": ctx.virtual_size}
    values |= {"tokenizer": str(run.tokenizer.source), "load": None, "epochs": None}
    base, adapters = run.weights.base, run.weights.adapters
    if base:
        values |= {"load": str(base.path), "load_weights_only": not run.resuming}
    if adapters:
        values["lora_load"] = str(adapters.path)
    if values["mock_data"]:
        values["data"] = None
    settings = described(type(options))
    kept = {name: value for name, value in values.items() if settings[name].result}
    there = {name: value for name, value in kept.items() if value is not None}
    return json.loads(json.dumps(there, default=str))  # for paths


def versions() -> dict[str, str]:
    """Return the versions of the software that determines the results."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"numpy": np.__version__, "source": _source_checksum()}
    try:
        found["megazoo"] = importlib.metadata.version("megazoo")
    except importlib.metadata.PackageNotFoundError:
        found["megazoo"] = "not installed"
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # fails in another repository
        found["commit"] = _git("describe", "--always", "--dirty")
    except (OSError, subprocess.SubprocessError):  # megazoo is installed, or git is missing
        pass
    return found


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def machine(ctx) -> dict[str, str]:
    """Return a description of the hardware."""
    processor = platform.processor() or platform.machine()
    try:
        told = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = told[1] if told else processor
    except OSError:  # not Linux
        pass
    found = {"processor": processor, "cores": str(os.cpu_count()), "system": platform.system()}
    found |= {"threads": str(torch.get_num_threads()), "device": ctx.device.type}
    if ctx.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(ctx.device)
    return found


def _source_checksum() -> str:
    """Return the SHA-256 of the source files of this library."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def begin_record(directory: Path, run, ctx, run_id: str) -> None:
    """Start the record of a run, or continue it if the run is resumed.

    A resumed run drops later steps from the record. The record is restarted if the run resumes at
    the record's first step, or if torchrun restarts the run before its first checkpoint.

    Args:
        directory: directory of the record.
        run: the run.
        ctx: parallel context.
        run_id: id of the run.

    Raises:
        UserError: the directory holds the record of another run, or cannot be written.
    """
    now = Recorded(
        FORMAT,
        run_id,
        [*entry(), *run.arguments],
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
    steps = []
    if (directory / RECORD).exists():
        before, steps = read_record(directory), read_steps(directory)
        goes_on = run.resuming and before.run == run_id and before.first_step <= run.first_step
        if not goes_on and not (restarts() and _began_so(before, steps, now)):
            raise UserError(
                f"--record {directory} holds the record of another run: choose another directory"
            )
        steps = [step for step in steps if step.step <= run.first_step]
        if before.first_step < run.first_step:
            before.resumed.append(Resumed(run.first_step, changes_since(before, now)))
            now = before
    lines = "".join(f"{_line(step)}\n" for step in steps)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / STEPS, lines.encode())
        write_atomically(directory / RECORD, json_bytes(asdict(now)))
    except OSError as error:
        raise UserError(f"--record {directory}: {reason_of(error)}", exit_code=1) from error


def _began_so(before: Recorded, steps: list[Step], now: Recorded) -> bool:
    """Return whether this run wrote the record before it was restarted."""
    is_same = (before.command, before.settings) == (now.command, now.settings)
    return is_same and all(step.step < now.settings["steps"] for step in steps)


def changes_since(before: Recorded, now: Recorded) -> list[str]:
    """Return a line for each change since the record began that affects the computation.

    Weights are not compared: a resumed run loads them from its checkpoint.
    """
    settings = described(with_registered(Options)).items()
    names = {name for name, s in settings if s.result and not (s.may_change or s.in_manifest)}
    old, new = ({**each.settings, "dp": each.dp} for each in (before, now))
    lines = [
        f"{name}: {_told(old.get(name))} then, {_told(new.get(name))} now"
        for name in sorted(names | {"dp"})
        if old.get(name) != new.get(name)
    ]
    lines += different("config", before.config, now.config)
    lines += different("version", before.versions, now.versions)
    lines += different("machine", before.machine, now.machine)
    files = ([file for file in each.files if file.kind != "weights"] for each in (before, now))
    return lines + changed_files(*files)


def different(what: str, then: dict, now: dict) -> list[str]:
    """Return a line for each name in both whose values differ. what: kind of the names."""
    return [
        f"{what} {name}: {_told(then[name])} then, {_told(now[name])} now"
        for name in sorted(then.keys() & now.keys())
        if then[name] != now[name]
    ]


def _told(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:12]
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def record_step(directory: Path, step: Step) -> None:
    """Append a line to steps.jsonl. Raises OSError if it cannot be written."""
    append_line(directory / STEPS, f"{_line(step)}\n".encode())


def _line(step: Step) -> str:
    values = {key: value for key, value in asdict(step).items() if value is not None}
    return json.dumps({key: value for key, value in values.items() if math.isfinite(value)})


def read_record(directory: Path) -> Recorded:
    """Return the contents of record.json. Raises UserError if it is missing or invalid."""
    path = directory / RECORD
    if not path.is_file():
        raise UserError(f"{directory} is not the record of a run: it has no {RECORD}")
    return convert(json_object(path, read_bytes(path)), Recorded, str(path))


def read_steps(directory: Path) -> list[Step]:
    """Return the lines of steps.jsonl. Raises UserError if it is missing or a line is invalid."""
    path, steps = directory / STEPS, []
    if not path.is_file():
        raise UserError(f"{directory} is not the record of a run: it has no {STEPS}")
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        name = Path(f"{path}, line {number}")
        steps.append(convert(json_object(name, line), Step, str(name)))
    return steps
