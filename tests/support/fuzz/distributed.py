"""Kind of the fuzzer: checkpoints of torch.distributed.checkpoint, their metadata and chunks."""

import copy
import pickle
import random
import shutil
import sys
from pathlib import Path

import torch

from megazoo.formats.dcp.source import DistributedCheckpoint
from megazoo.parallel.context import ParallelContext
from tests.support.dcp import small_llama, write
from tests.support.fuzz.cases import damaged, hostile, refusal, tweaked

SECRET = "secret.distcp"
opened: list[str] = []  # paths that this process has opened


class Distributed:
    """Forged metadata opens nothing outside of the directory, and damaged chunks give numbers or a
    refusal."""

    def __init__(self, directory: Path):
        hf = small_llama(num_hidden_layers=1)
        state = {"model": hf.state_dict(), "optimizer": {"state": {}}}
        for name, value in hf.state_dict().items():
            moments = {"exp_avg": value * 2, "exp_avg_sq": value * 3, "step": torch.tensor(4.0)}
            state["optimizer"]["state"][name] = moments
        flat = {f"model.{name}": value for name, value in hf.state_dict().items()}
        one = write(directory / "one", state, hf.config)
        self.bases = [one, write(directory / "several", flat, hf.config, pieces=2)]
        self.hooked = False

    def __call__(self, chance: random.Random, directory: Path) -> None:
        if not self.hooked:  # once in each child
            sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
            self.hooked = True
        base, place = chance.choice(self.bases), directory / "dcp"
        shutil.copytree(base, place)
        shutil.copy(next(base.glob("*.distcp")), directory / SECRET)
        for file in place.glob("*.distcp") if chance.random() < 0.3 else ():
            file.write_bytes(damaged(file.read_bytes(), chance))
        file = place / ".metadata"
        if chance.random() < 0.15:
            file.write_bytes(damaged(file.read_bytes(), chance))
        else:
            metadata = pickle.loads(file.read_bytes())
            for _ in range(chance.choice((1, 1, 2, 4))):
                self.forge(metadata, chance, directory)
            file.write_bytes(pickle.dumps(metadata))
        opened.clear()
        source, _ = refusal(DistributedCheckpoint, place)
        if source is not None:
            refusal(self.read_all, source)
        assert not any(SECRET in path for path in opened), opened

    def forge(self, metadata, chance: random.Random, directory: Path) -> None:
        """Change one value of the metadata."""
        names, places = metadata.state_dict_metadata, metadata.storage_data
        name, index = chance.choice(list(names)), chance.choice(list(places))
        kind = chance.choice(["place", "place", "chunk", "chunk", "size", "path", "name", "drop"])
        if kind == "place":
            self.change(places[index], chance)
        elif kind == "chunk" and getattr(names[name], "chunks", None):
            self.change(chance.choice(names[name].chunks), chance)
        elif kind == "size":
            self.change(names[name], chance)
        elif kind == "path":
            paths = [f"../{SECRET}", str(directory / SECRET), f"./../{SECRET}", "config.json"]
            places[index].relative_path = chance.choice(paths)
        elif kind == "name":
            new = chance.choice([str(hostile(chance)), 7, None, f"{name}x", f"{name}"[1:]])
            names[new] = names.pop(name)
        elif kind == "drop":
            chance.choice([names, places]).popitem()

    def change(self, part, chance: random.Random) -> None:
        values = vars(part)
        key = chance.choice(list(values))
        value = list(values[key]) if isinstance(values[key], torch.Size) else values[key]
        new = hostile(chance) if chance.random() < 0.4 else tweaked(copy.deepcopy(value), chance)
        values[key] = new

    def read_all(self, source: DistributedCheckpoint) -> None:
        for name, spec in source.specs.items():
            for tensor in (name, *(f"{name}.{state}" for state in source.states_of(name))):
                source.read_into(tensor, torch.empty(spec.shape), spec, ParallelContext())
        assert isinstance(source.trainer, dict)
