"""Building: initial weights that don't depend on the layout, and memory for no more than the rank's
own shard."""

import copy
import sys

import pytest
import torch

import megazoo
from megazoo.families.registry import FAMILIES
from megazoo.models.gpt2 import GPT2, GPT2Config
from megazoo.models.plain import check_stages
from megazoo.models.registry import find_config
from megazoo.parallel import ParallelContext
from tests.support.training import PeakMemory, give_back_freed_memory, in_fresh_processes

CONFIG = GPT2Config(
    vocab_size=301, max_positions=24, hidden_size=160, layers=3, heads=4, tie_embeddings=False
)


def built(tp=1, pp=1, rank=0, seed=5):
    return GPT2.build(CONFIG, ParallelContext.virtual(tp, pp, rank=rank), seed=seed)


def test_initial_weights_are_the_same_in_every_layout():
    whole = {entry.name: entry.parameter for entry in built().entries()}
    for tp, pp in ((2, 1), (4, 1), (1, 3), (2, 3)):
        covered = {name: torch.zeros_like(parameter) for name, parameter in whole.items()}
        for rank in range(tp * pp):
            model = built(tp, pp, rank)
            for entry in model.entries():
                name = entry.name
                for piece in entry.spec.pieces(model.ctx.place):
                    box = tuple(slice(*bounds) for bounds in piece.box)
                    ours = entry.parameter[piece.index()]
                    assert torch.equal(ours, whole[name][box]), (tp, pp, name)
                    covered[name][box] = 1
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


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_the_families_share_only_tied_parameters(family):
    """Custom models are checked when they are built."""
    config = find_config(f"{family}-tiny")

    def elsewhere(rank):
        layout = {"pp": 2, "virtual": 2, "rank": rank} if rank is not None else {}
        return FAMILIES[family].on_meta(config, ParallelContext.virtual(**layout))

    check_stages(elsewhere(0), elsewhere)


def test_residual_projections_start_smaller_by_depth():
    """GPT-2's rule (Radford et al. 2019), which the families share: 0.02 / sqrt(2 layers)."""
    sizes = {"vocab_size": 61, "max_positions": 16, "hidden_size": 256, "layers": 3, "heads": 4}
    for family in ("gpt2", "llama", "mpt"):
        model = megazoo.from_config(FAMILIES[family].Config(**sizes), seed=5)
        parameters = dict(model.named_parameters())
        for name, times in (
            ("attention.output", 6**-0.5),
            ("mlp.down", 6**-0.5),
            ("attention.qkv", 1),
        ):
            std = parameters[f"layers.1.{name}.weight"].std().item()
            assert std == pytest.approx(0.02 * times, rel=0.02), (family, name)


def build(preset, tp, pp, rank, dtype) -> tuple[int, int]:
    """The peak of memory while a rank's part is built, and the bytes of its parameters."""
    give_back_freed_memory()
    ctx = ParallelContext.virtual(tp=tp, pp=pp, rank=rank)
    with PeakMemory() as peak:
        model = megazoo.from_config(preset, ctx, dtype=getattr(torch, dtype))
    return peak.above, sum(p.nbytes for p in model.parameters())


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize(
    ("preset", "tp", "pp", "rank", "dtype"),
    [
        pytest.param("gpt2-xl", 2, 4, 0, "float32", marks=pytest.mark.slow),
        pytest.param("gpt2-xl", 2, 4, 7, "float32", marks=pytest.mark.slow),
        ("llama-7b", 8, 8, 0, "bfloat16"),
        ("llama-7b", 8, 8, 63, "bfloat16"),
    ],
)
def test_building_a_rank_takes_the_memory_of_its_shard(preset, tp, pp, rank, dtype):
    ((peak, shard),) = in_fresh_processes(build, preset, tp, pp, rank, dtype)
    assert shard > 180e6
    assert peak <= 1.1 * shard + 64e6, f"{peak / 1e6:.0f} MB for a shard of {shard / 1e6:.0f} MB"


def test_a_model_survives_deepcopy_and_a_change_of_dtype():
    model = GPT2.build(CONFIG, ParallelContext(), seed=5)
    twin = copy.deepcopy(model).to(torch.bfloat16)
    for ours, theirs in zip(model.entries(), twin.entries(), strict=True):
        assert (ours.name, ours.spec) == (theirs.name, theirs.spec)
        assert theirs.parameter.dtype == torch.bfloat16
        assert ours.parameter.dtype == torch.float32


@pytest.mark.slow
def test_every_preset_builds_on_meta():
    for family in FAMILIES.values():
        for preset in family.presets:
            assert next(family.on_meta(find_config(preset), ParallelContext()).parameters()).is_meta
