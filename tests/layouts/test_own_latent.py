"""Multi-head latent attention that a user adds from outside of the package computes what that of
transformers computes, in any layout."""

from functools import cache

import pytest
import torch

from megazoo.layers import KVCache, Rotary
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.sequence import SequenceCut
from tests.support.layers import parameters_of
from tests.support.own_latent import LatentAttention
from tests.support.training import context, layout_name, run_in_layout

HIDDEN, HEADS, TOKENS, PROMPT = 24, 3, 16, 5
# Ranks of the compressions; sizes of the features without positions, the rotary ones, a value.
SIZES = (14, 10, 8, 4, 10)
LARGE_VALUES = (14, 10, 8, 4, 18)
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 8}


@cache
def expected(sizes) -> dict:
    """The weights, input, output, and gradients of DeepseekV3Attention."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=32,
        rope_parameters={**YARN, "rope_theta": 100.0},
        attn_implementation="sdpa",
        **dict(zip(names, sizes, strict=True)),
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        attention = deepseek.DeepseekV3Attention(config, layer_idx=0)
        for parameter in attention.parameters():
            parameter.data = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
        x, grad = torch.randn(2, 2, TOKENS, HIDDEN)
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    y, _ = attention(x.requires_grad_(), rotary, None)
    y.backward(grad)
    weights = {name: each.detach() for name, each in attention.named_parameters()}
    gradients = {name: each.grad for name, each in attention.named_parameters()}
    given = {"x": x.detach(), "grad": grad, "scale": attention.scaling, "sizes": sizes}
    return {
        "given": {**given, "weights": weights},
        "results": {"y": y.detach(), "x": x.grad, **gradients},
    }


def latent_attention(given, ctx) -> LatentAttention:
    layer = LatentAttention(HIDDEN, HEADS, *given["sizes"], scale=given["scale"], ctx=ctx)
    for prefix, key, module, spec in parameters_of(layer):
        for piece in spec.pieces(ctx.place):
            box = tuple(slice(*bounds) for bounds in piece.box)
            getattr(module, key).data[piece.index()] = given["weights"][f"{prefix}.{key}"][box]
    return layer


def rotary_at(positions, given):
    rotary = Rotary(given["sizes"][3], theta=100.0, max_positions=32, scaling=YARN)
    return rotary(positions, torch.float32)


def results(given, recompute, layout) -> tuple[dict, int]:
    """The output and gradients of all ranks, gathered; and how often the layer attended."""
    ctx, runs = context(**layout), []
    layer = latent_attention(given, ctx)
    layer.recompute = recompute
    layer.attend.register_forward_hook(lambda *_: runs.append(1))
    cut = SequenceCut.of(TOKENS, ctx)
    seen = own = torch.arange(TOKENS) if cut is None else cut.positions(torch.device("cpu"))
    if ctx.sequence_parallel:
        own = seen.chunk(ctx.tp_size)[ctx.tp_rank]
    x = given["x"][:, own].requires_grad_()
    y = layer(x, rotary=rotary_at(seen, given))
    y.backward(given["grad"][:, own])
    found, of_sequence = {}, [ctx.cp, *([ctx.tp] if ctx.sequence_parallel else [])]
    for name, part in (("y", y.detach()), ("x", x.grad)):
        found[name] = torch.zeros(given["x"].shape)
        found[name][:, own] = part
        all_reduce_over(found[name], of_sequence)
    for prefix, key, module, spec in parameters_of(layer):
        gradient = getattr(module, key).grad
        whole = found[f"{prefix}.{key}"] = torch.zeros(spec.shape)
        for piece in spec.pieces(ctx.place):
            whole[tuple(slice(*bounds) for bounds in piece.box)] = gradient[piece.index()]
        all_reduce_over(whole, [ctx.cp, ctx.tp] if spec.shard else [ctx.cp])
    return found, len(runs)


def generated(given, layout):
    """The output for the prompt, followed by that for each further token."""
    layer, memory = latent_attention(given, context(**layout)), KVCache(TOKENS)
    outputs = []
    for part in torch.arange(TOKENS).split([PROMPT, *[1] * (TOKENS - PROMPT)]):
        with torch.no_grad():
            rotary = rotary_at(part, given)
            outputs.append(layer(given["x"][:, part], rotary=rotary, cache=memory))
        memory.advance(len(part))
    return torch.cat(outputs, dim=1)


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() < 1e-5, name


LAYOUTS = [
    {},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"cp": 2},
    {"cp": 2, "method": "ulysses"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("recompute", [False, True])
def test_its_output_and_gradients_are_those_of_transformers(ranks, layout, recompute):
    case = expected(SIZES)
    for found, runs in run_in_layout(ranks, results, layout, case["given"], recompute):
        assert_close(found, case["results"])
        assert runs == 1 + recompute


def test_values_may_be_larger_than_keys():
    case = expected(LARGE_VALUES)
    assert_close(results(case["given"], False, {})[0], case["results"])


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=layout_name)
def test_token_by_token_its_output_is_that_of_the_whole_sequence(ranks, layout):
    case = expected(SIZES)
    for y in run_in_layout(ranks, generated, layout, case["given"]):
        assert_close({"y": y}, {"y": case["results"]["y"]})
