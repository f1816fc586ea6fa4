"""Kinds of the fuzzer: a checkpoint's manifest and its trainer.json, forged by somebody who knows
how the checksums are made."""

import json
import math
import random
import shutil
import zlib
from pathlib import Path

import torch

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import load, save
from megazoo.checkpoint.format import manifest_checksum
from megazoo.cli.parsing import CommandLine
from megazoo.formats.resharding import write_shards
from megazoo.formats.source import SavedModel
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.pretrained import load_weights
from megazoo.settings import described
from megazoo.trainer.options import Options
from megazoo.trainer.state import settings_to_resume
from tests.support.fuzz.cases import files_under, hostile, mutated, refusal
from tests.support.training import make_batch

CONFIG = GPT2Config(257, 16, 32, 2, 4, embedding_dropout=0.0, attention_dropout=0.0)
RUN = "--seq-length 16 --global-batch-size 8 --micro-batch-size 8 --lr 1e-3 --steps 400".split()


def trained(directory: Path) -> None:
    """Write a checkpoint of tp 2, with optimizer state, as a run does."""
    model = megazoo.from_config(CONFIG, seed=3)
    model.sidecar_files = {"generation_config.json": b'{"eos_token_id": 256}'}
    optimizer = megazoo.optim.AdamW(model)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    optimizer.step()
    settings = settings_to_resume(CommandLine.read(RUN).options())
    trainer = {"consumed_samples": 8, "consumed_tokens": 128, "settings": settings}
    save(directory / "run", 1, model, optimizer, trainer)
    write_shards(SavedModel(directory / "run"), directory / "cut", 2, 1)
    shutil.rmtree(directory / "run")


def nothing_but(value: float, config):
    """Return a model and its optimizer, all of whose numbers are one that no checkpoint has."""
    model = megazoo.from_config(config, seed=4)
    optimizer = megazoo.optim.AdamW(model)
    for tensor in (*model.parameters(), *_states(optimizer)):
        tensor.data.fill_(value)
    return model, optimizer


def _states(optimizer) -> list[torch.Tensor]:
    return [tensor for states in optimizer.state.values() for tensor in states.values()]


class Manifest:
    """megazoo.json. What is not refused must give the numbers that were saved, to the bit."""

    def __init__(self, directory: Path):
        self.base = directory / "cut"
        trained(directory)
        self.manifest = json.loads((self.base / "megazoo.json").read_text())
        self.expected = contents(self.base)

    def __call__(self, chance: random.Random, directory: Path) -> None:
        copy = directory / "c"
        shutil.copytree(self.base, copy)
        text = json.dumps(self.forged(chance))
        if chance.random() < 0.05:  # a name that is there twice
            key = chance.choice(list(self.manifest["tensors"]))
            twice = f'"{key}": {json.dumps(hostile(chance))}, "{key}"'
            text = text.replace(f'"{key}"', twice, 1)
        manifest = json.loads(text)
        if isinstance(manifest, dict):
            sealed = f'{{"crc32": {manifest_checksum(manifest)}'
            text = sealed + (", " if len(manifest) else "") + text.lstrip()[1:]
        (copy / "megazoo.json").write_text(text)
        found, told = refusal(contents, copy)
        if told:
            return
        for part, expected in self.expected.items():
            assert same(found[part], expected), f"another {part} is loaded"

    def forged(self, chance: random.Random):
        """Return the manifest without its checksum, and with something wrong in it."""
        manifest = {key: value for key, value in self.manifest.items() if key != "crc32"}
        if chance.random() < 0.3:
            part = chance.choice(["layout", "config", "files"])
            return {**manifest, part: mutated(manifest[part], chance)}
        if chance.random() < 0.4:
            name = chance.choice(list(manifest["tensors"]))
            one = self._forged_tensor(manifest["tensors"][name], chance)
            return {**manifest, "tensors": {**manifest["tensors"], name: one}}
        return mutated(manifest, chance)

    def _forged_tensor(self, stored: dict, chance: random.Random) -> dict:
        others = list(self.manifest["tensors"].values())
        part = chance.choice(["shape", "dtype", "shard", "file"])
        if chance.random() < 0.5:
            return {**stored, part: chance.choice(others)[part]}
        size = stored["shape"][0]
        cut = {"dim": 0, "parts": [size // 2, size - size // 2], "units": []}
        cut = {**cut, "dim": chance.choice((-1, 0, 1, 2))} if chance.random() < 0.3 else cut
        return {**stored, "shard": cut} if chance.random() < 0.3 else mutated(stored, chance)


def contents(directory: Path) -> dict:
    """Return all that a checkpoint holds, as a run and as a user of the model read it.

    Of a config that differs from what was saved, its weights by name: what else follows from a
    config can't be known.
    """
    source = SavedModel(directory)
    model, optimizer = nothing_but(math.nan, CONFIG)
    found = {"trainer": load(source, model, optimizer)}
    tensors = [*model.parameters(), *_states(optimizer)]
    found["weights and states"] = [tensor.detach() for tensor in tensors]
    found["optimizer step"] = optimizer.steps.item()
    found["generation"] = source.generation
    found["dtypes"] = {name: source.dtype_of(name) for name in source.specs}
    other = source.model.empty(source.config, megazoo.ParallelContext())
    for parameter in other.parameters():
        parameter.data.fill_(math.nan)
    load_weights(source, other)
    found["weights by name"] = {e.name: e.parameter.detach() for e in other.entries()}
    return found


def same(found, expected) -> bool:
    """Say whether two values are equal, to the bit and with their types."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


class Trainer:
    """trainer.json. What is not refused may set what a run keeps, and nothing else."""

    def __init__(self, directory: Path):
        self.base = directory / "cut"
        trained(directory)
        self.manifest = json.loads((self.base / "megazoo.json").read_text())
        self.trainer = json.loads((self.base / "trainer.json").read_text())
        kept = settings_to_resume(CommandLine.read([]).options())
        # What is None is left out where it is saved.
        self.kept = {name for name, setting in described(Options).items() if setting.kept}
        assert kept.keys() <= self.kept

    def __call__(self, chance: random.Random, directory: Path) -> None:
        copy = directory / "c"
        shutil.copytree(self.base, copy)
        trainer = self.forged(chance)
        data = json.dumps(trainer).encode()
        (copy / "trainer.json").write_bytes(data)
        files = {
            **self.manifest["files"],
            "trainer.json": {"size": len(data), "crc32": zlib.crc32(data)},
        }
        manifest = {**self.manifest, "files": files}
        manifest["crc32"] = manifest_checksum(manifest)
        (copy / "megazoo.json").write_text(json.dumps(manifest))
        before = files_under(directory)
        arguments = ["--load", str(copy), "--seq-length", "16", "--steps", "9"]
        found, told = refusal(resume, arguments)
        assert files_under(directory) == before, "files were written"
        if told:
            return
        run, optimizer = found
        self.check_options(run.options, CommandLine.read(arguments).options())
        for name in ("step", "consumed_samples", "consumed_tokens"):
            assert is_count(run.state[name]), f"{name} is {run.state[name]!r}"
        steps = trainer["optimizer_steps"]
        assert is_count(steps), f"optimizer_steps is {steps!r}"
        assert optimizer.steps.item() == steps
        assert math.isfinite(run.lr_schedule.rate(run.first_step + 1))
        assert len(run.batch_starts) > 0

    def forged(self, chance: random.Random):
        """Return trainer.json's object with something wrong in it."""
        trainer, settings = self.trainer, self.trainer["settings"]
        kind = chance.random()
        if kind < 0.3:
            foreign = [name for name in Options().values if name not in self.kept]
            name, value = chance.choice(foreign), chance.choice([hostile(chance), "d", 1, "x"])
            return {**trainer, "settings": {**settings, name: value}}
        if kind < 0.7:
            name = chance.choice([*settings, *sorted(self.kept)])
            value = hostile(chance)
            if name in settings and chance.random() < 0.5:
                value = mutated(settings[name], chance, 1)
            return {**trainer, "settings": {**settings, name: value}}
        return mutated(trainer, chance)

    def check_options(self, options, usual) -> None:
        expected = usual.values
        for name, value in options.values.items():
            if name not in self.kept:
                assert value == expected[name], f"{name} became {value!r}"
            elif isinstance(value, float):
                assert math.isfinite(value), f"{name} is {value!r}"


def resume(arguments: list[str]):
    """Go as far as a run does before its ranks start, and load its checkpoint."""
    run = pretrain.prepare(arguments)
    model = megazoo.from_config(run.config, seed=4)
    optimizer = megazoo.optim.AdamW(model)
    load(run.source, model, optimizer)
    return run, optimizer


def is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
