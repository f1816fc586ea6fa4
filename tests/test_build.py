"""Building: initial weights that don't depend on the layout, and memory for no more than the rank's own shard."""

import subprocess
import sys

import pytest
import torch

from megazoo.models import FAMILIES, find_config
from megazoo.models.gpt2 import GPT2, GPT2Config
from megazoo.parallel import ParallelContext

CONFIG = GPT2Config(vocab_size=301, max_positions=24, hidden_size=160, layers=3, heads=4, tie_embeddings=False)


def built(tp=1, pp=1, rank=0, seed=5):
    return GPT2.build(CONFIG, ParallelContext.virtual(tp, pp, rank=rank), seed=seed)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_initial_weights_are_the_same_in_every_layout(tp, pp):
    whole = {entry.name: entry.parameter for entry in built().entries()}
    covered = {name: torch.zeros_like(parameter) for name, parameter in whole.items()}
    for rank in range(tp * pp):
        model = built(tp, pp, rank)
        for entry in model.entries():
            for piece in entry.spec.pieces(tp, model.ctx.tp_rank):
                box = tuple(slice(*bounds) for bounds in piece.box)
                assert torch.equal(entry.parameter[piece.index()], whole[entry.name][box]), entry.name
                covered[entry.name][box] = 1
    assert all(cover.all() for cover in covered.values())


def test_initial_weights_follow_their_distribution_and_the_seed():
    parameters = {entry.name: entry.parameter for entry in built().entries()}
    weight = parameters["layers.1.mlp.up.weight"]
    assert abs(weight.std() - 0.02) < 2e-4
    assert abs(weight.mean()) < 2e-4
    assert abs(parameters["layers.1.mlp.down.weight"].std() - 0.02 / 6**0.5) < 2e-4
    assert parameters["norm.weight"].eq(1).all()
    assert parameters["norm.bias"].eq(0).all()
    assert not torch.equal(weight, parameters["layers.2.mlp.up.weight"])
    tiles = weight.detach()[:512, :128].split(128)
    assert not any(torch.equal(tiles[0], tile) for tile in tiles[1:])
    other = {entry.name: entry.parameter for entry in built(seed=6).entries()}
    assert not torch.equal(weight, other["layers.1.mlp.up.weight"])


MEASURE = """
import threading, time
import megazoo
from megazoo.models.gpt2 import GPT2
from megazoo.parallel import ParallelContext

def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)

ctx = ParallelContext.virtual(tp=2, pp=4, rank={rank})
before = resident()
watcher = threading.Thread(target=watch)
watcher.start()
try:
    model = megazoo.from_config("gpt2-xl", ctx)
finally:
    done = True
    watcher.join()
print(max(peak, resident()) - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize("rank", [0, 7])
def test_building_a_rank_of_gpt2_xl_takes_the_memory_of_its_shard(rank):
    script = [sys.executable, "-c", MEASURE.format(rank=rank)]
    peak, shard = map(
        int, subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout.split()
    )
    assert shard > 600e6
    assert peak <= 1.1 * shard + 64e6, f"{peak / 1e6:.0f} MB for a shard of {shard / 1e6:.0f} MB"


def test_a_model_survives_deepcopy_and_a_change_of_dtype():
    import copy

    model = GPT2.build(CONFIG, ParallelContext(), seed=5)
    twin = copy.deepcopy(model).to(torch.bfloat16)
    for ours, theirs in zip(model.entries(), twin.entries(), strict=True):
        assert (ours.name, ours.spec) == (theirs.name, theirs.spec)
        assert theirs.parameter.dtype == torch.bfloat16
        assert ours.parameter.dtype == torch.float32


def test_every_preset_builds_on_meta():
    for family in FAMILIES.values():
        for preset in family.presets:
            assert next(family.on_meta(find_config(preset), ParallelContext()).parameters()).is_meta
