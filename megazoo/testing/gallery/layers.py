"""Bugs in layers: sharding, sums and gathers of tensor parallelism; positions and adapters."""

import torch
import torch.nn.functional as F

from megazoo.layers import CausalSelfAttention, RowParallelLinear, linear, norm
from megazoo.layers.rotary import rotate as rotate_by_halves
from megazoo.lora.layers import Adapter
from megazoo.models.gpt2 import GPT2
from megazoo.models.outputs import LanguageModelHead
from megazoo.parallel import regions
from megazoo.parallel.regions import reduce_from_tensor_parallel
from megazoo.parallel.shard import Cut, ParameterSpec, Shard
from megazoo.testing.gallery.planting import BUGS, EVERYWHERE, Bug, then, without_call


def padded_logits(token_losses, self, outputs, batch):
    """The vocabulary is padded to a multiple of tp, and the padding's logits (0) are not masked."""
    ctx, vocabulary = self.ctx, self.vocab_size
    last = ctx.tp_rank == ctx.tp_size - 1
    outputs = F.pad(outputs, (0, -vocabulary % ctx.tp_size if last else 0))
    return token_losses(self, outputs, batch)


def with_bias_of_each_rank(forward, self, *given, **options):
    y = forward(self, *given, **options)
    return y if self.bias is None else y + (self.ctx.tp_size - 1) * self.bias


def cut_as_one_block(parts: int):
    """Return a wrapper: a rank's shard of a fused weight of so many parts is one contiguous
    block."""

    def wrapper(cuts, self, tp_size, tp_rank):
        if tp_size == 1 or len(self.parts) != parts:
            return cuts(self, tp_size, tp_rank)
        each, first = self.parts[0] // tp_size, tp_rank * sum(self.parts) // tp_size
        return [Cut(first + part * each, part * each, each, True) for part in range(parts)]

    return wrapper


def rotated_by_pairs(split_heads, qkv, parts, head_size, rotary=None):
    """RoPE rotates features 2 i and 2 i + 1 together, instead of i and i + size / 2."""

    def by_pairs(x, cos, sin):
        halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        turned = rotate_by_halves(halves, cos, sin)
        return torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)

    q, k, v = split_heads(qkv, parts, head_size)
    return (by_pairs(q, *rotary), by_pairs(k, *rotary), v) if rotary else (q, k, v)


def slopes_in_one_series(_, heads, bias_max=8.0):
    """ALiBi slopes are powers of 2^(-8 / heads) for any number of heads."""
    return 2.0 ** (-torch.arange(1, heads + 1, dtype=torch.float32) * bias_max / heads)


def scale_by_local_layer(model):
    for index, layer in enumerate(model.layers.values()):
        layer.attention.attend.scale /= index + 1


def spread_by_local_layer(model):
    for index, layer in enumerate(model.layers.values()):
        specs = layer.mlp.down.specs
        spec = specs["weight"]
        specs["weight"] = ParameterSpec(spec.shape, spec.shard, std=spec.std / (index + 1))


def adapter_summed(project_up, self, inner):
    """The output of a row-parallel layer's adapter is summed over tp, and again together with the
    layer's output."""
    inner = reduce_from_tensor_parallel(inner, self.ctx) if self.dropout.parallel else inner
    return project_up(self, inner)


BUGS += [
    Bug("1", "Padding of the vocabulary in the softmax",
        r"loss: .* though no module's output differs",
        LanguageModelHead, "token_losses", padded_logits, layout="tp2",
        source="Megatron-LM 37498c3",
        link="https://github.com/NVIDIA/Megatron-LM/commit/37498c3efe29cae48eebd8bb11802585aa9f20cb"),
    Bug("6", "Gradients of replicated KV heads not summed",
        r"gradient of layers\.\d\.attention\.qkv\.weight: differs at step 1 on ranks 0",
        ParameterSpec, "has_partial_gradient",
        lambda is_partial, self, ctx: not self.shard and is_partial(self, ctx),
        layout="tp4", model="llama", settings={"kv_heads": 2},
        source="bigcode Megatron-LM #37",
        link="https://github.com/bigcode-project/Megatron-LM/pull/37"),
    Bug("7", "Norms' gradients not summed under sequence parallelism",
        r"gradient of norm\.weight: .*: the tp ranks' add up to what it should be",
        EVERYWHERE, "sum_over_copies", without_call, layout="tp2+sp", model="llama",
        source="GPT-NeoX #1257", link="https://github.com/EleutherAI/gpt-neox/pull/1257"),
    Bug("30", "Adapter's replicated factor whose gradient is never summed",
        r"gradient of layers\.\d\.mlp\.down\.lora\.down\.B: .*: the tp ranks' add up to what it "
        r"should be",
        EVERYWHERE, "sum_over_copies", without_call, layout="tp2", model="llama", lora_rank=2,
        source="mcore-bridge #173", link="https://github.com/modelscope/mcore-bridge/pull/173"),
    Bug("8", "Bias added before the sum, tp times",
        r"module layers\.0\.attention\.output: its output differs on rank.*: by the same "
        r"features at every token",
        RowParallelLinear, "forward", with_bias_of_each_rank, layout="tp2",
        source="Paddle #35186", link="https://github.com/PaddlePaddle/Paddle/pull/35186"),
    Bug("9a", "Columns gathered in the wrong order of ranks",
        r"logits: they differ on ranks 0",
        regions._GatherFromTensorParallel, "forward",
        lambda forward, ctx, x, group, sizes: torch.cat(
            forward(ctx, x, group, sizes).split(sizes, dim=-1)[::-1], dim=-1
        ),
        layout="tp2",
        source="NCCL #1906", link="https://github.com/NVIDIA/nccl/issues/1906"),
    Bug("9b", "Parts of the sequence gathered in the wrong order",
        r"module layers\.0\.attention\.output: its input differs on rank",
        regions, "all_gather_sequence",
        lambda gather, x, group: torch.cat(
            gather(x, group).chunk(group.size(), dim=-2)[::-1], dim=-2
        ),
        layout="tp2+sp",
        source="NCCL #1906", link="https://github.com/NVIDIA/nccl/issues/1906"),
    Bug("10", "Fused QKV cut as one block",
        r"module layers\.0\.attention\.output: its input differs on rank",
        Shard, "cuts", cut_as_one_block(3), layout="tp2",
        source="tt-metal #52818", link="https://github.com/tenstorrent/tt-metal/pull/52818"),
    Bug("11", "Gate and up cut as one block",
        r"module layers\.0\.mlp\.down: its input differs on rank",
        Shard, "cuts", cut_as_one_block(2), layout="tp2", model="llama",
        source="tt-metal #52818", link="https://github.com/tenstorrent/tt-metal/pull/52818"),
    Bug("12", "Rotary positions by pairs instead of halves",
        r"layer 0, attention\.output \(model\.layers\.0\.self_attn\.o_proj\): its input differs",
        EVERYWHERE, "split_heads", rotated_by_pairs, layout="transformers", model="llama",
        source="TinyLlama #24", link="https://github.com/jzhang38/TinyLlama/issues/24"),
    # Every rank uses the ALiBi slopes of heads 0, 1, ...
    Bug("13a", "ALiBi slopes of local heads",
        r"module layers\.0\.attention\.output: its input differs on rank 1 ",
        CausalSelfAttention, "heads", lambda heads, self: range(len(heads(self))),
        layout="tp2", model="mpt",
        source="Megatron-DeepSpeed #227",
        link="https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/227"),
    Bug("13b", "ALiBi slopes for a number of heads that is no power of two",
        r"layer 0, attention\.output \(transformer\.blocks\.0\.attn\.out_proj\): its input "
        r"differs",
        EVERYWHERE, "alibi_slopes", slopes_in_one_series, layout="transformers", model="mpt",
        settings={"heads": 6, "kv_heads": 6, "hidden_size": 48, "ffn_size": 192},
        source="mlx #3071", link="https://github.com/ml-explore/mlx/pull/3071"),
    Bug("", "A row-parallel layer's missing sum",
        r"module layers\.0\.attention\.output: its output differs on rank.*: the tp ranks' add "
        r"up to what it should be",
        linear, "leave_tensor_parallel", lambda _, x, ctx: x, layout="tp2"),
    # The gradient of the input of a tensor-parallel region is not summed.
    Bug("", "A column-parallel layer's missing sum in backward",
        r"gradient of norm\.bias: .*: the tp ranks' add up to what it should be",
        EVERYWHERE, "enter_tensor_parallel", lambda _, x, ctx: x, layout="tp2"),
    Bug("", "A norm of queries with the moments of a rank's own heads",
        r"module layers\.0\.attention\.q_norm: its output differs on ranks 0 ",
        norm, "reduce_from_tensor_parallel", lambda _, x, ctx: x * ctx.tp_size,
        layout="tp2", model="mpt", settings={"qk_norm": True}),
    Bug("25b", "Attention scaled by the layer's number within the stage",
        r"module layers\.\d\.attention\.output: its input differs on rank 1 ",
        GPT2, "__init__", then(scale_by_local_layer), layout="pp2",
        source="Megatron-LM 0504e97",
        link="https://github.com/NVIDIA/Megatron-LM/commit/0504e973d88a9b20d7f7104e1ddd33ee00af5d1f"),
    Bug("25a", "Initial spread by the layer's number within the stage",
        r"parameter layers\.\d\.mlp\.down\.weight: another initial value on rank 1 ",
        GPT2, "__init__", then(spread_by_local_layer), layout="pp2",
        source="rule: torchtitan's depth_scaled_std",
        link="https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/common/param_init.py"),
    Bug("29", "Adapter's output summed with the layer's and before it",
        r"module layers\.0\.attention\.output: its output differs on rank",
        Adapter, "project_up", adapter_summed, layout="tp2", model="llama", lora_rank=2,
        source="Megatron-Bridge #5634",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634"),
]  # fmt: skip
