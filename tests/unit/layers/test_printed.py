"""What print(model) shows: sizes, and which shard of each weight this rank has."""

import pytest

from megazoo.families.registry import FAMILIES
from megazoo.layers import ColumnParallelLinear, LayerNorm, RMSNorm
from megazoo.models.registry import find_config
from megazoo.parallel import ParallelContext, ParameterSpec, Shard, ShardedModule


def printed(family: str, **layout) -> dict[str, str]:
    config = find_config(f"{family}-tiny")
    model = FAMILIES[family].on_meta(config, ParallelContext.virtual(**layout))
    return {name: module.extra_repr() for name, module in model.named_modules()}


def test_a_whole_model_shows_its_sizes():
    text = printed("gpt2")
    assert text["embedding"] == "weight=[257, 128]"
    assert text["layers.0.attention"] == "heads=4 of 4, kv_heads=4 of 4, head_size=32"
    assert text["layers.0.attention.qkv"] == "in_features=128, out_features=384, bias=True"
    assert text["layers.0.mlp_norm"] == "weight=[128], bias=[128], eps=1e-05"
    assert text["layers.0.mlp_dropout"] == "probability=0.0"
    assert text["head"] == "tied to weight=[257, 128]"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_shows_its_shards(rank):
    text, shard = printed("llama", tp=2, rank=rank), f"shard {rank + 1} of 2"
    assert text["embedding"] == text["head"] == f"weight=[257, 128] {shard} (dim 0)"
    layer = "layers.3"
    assert text[f"{layer}.attention"] == "heads=2 of 4, kv_heads=1 of 2, head_size=32"
    sizes = "in_features=128, out_features=256, bias=False"
    assert text[f"{layer}.attention.qkv"] == f"{sizes}, {shard} (dim 0)"
    sizes = "in_features=384, out_features=128, bias=False"
    assert text[f"{layer}.mlp.down"] == f"{sizes}, {shard} (dim 1)"
    assert text["norm"] == "weight=[128], eps=1e-06"


def test_other_modules_show_theirs():
    ctx = ParallelContext.virtual(tp=2, dp=2, folded={"ep": 2})
    assert RMSNorm(8, parallel=True, ctx=ctx).extra_repr() == "weight=[8], eps=1e-06", "not cut"
    assert str(LayerNorm(8, bias=False, ctx=ctx)) == "LayerNorm(weight=[8], eps=1e-05)"
    experts = ShardedModule(ctx)
    experts.add_parameter(
        "up", ParameterSpec((4, 6, 8), (Shard(0, (4,), axis="ep"), Shard(1, (6,))))
    )
    assert experts.extra_repr() == "up=[4, 6, 8] ep shard 1 of 2 (dim 0), shard 1 of 2 (dim 1)"
    linear = ColumnParallelLinear(8, (3, 5), ctx=ParallelContext.virtual(tp=3, rank=2))
    assert str(linear).endswith("(in_features=8, out_features=8, bias=True, shard 3 of 3 (dim 0))")
