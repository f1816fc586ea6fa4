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
from megazoo.testing.gallery.planting import bug, replaced, replaced_everywhere


@bug(
    "1",
    "Padding of the vocabulary in the softmax",
    r"loss: .* though no module's output differs",
    layout="tp2",
    source="Megatron-LM 37498c3",
    link="https://github.com/NVIDIA/Megatron-LM/commit/37498c3efe29cae48eebd8bb11802585aa9f20cb",
)
def padding_in_the_softmax():
    """The vocabulary is padded to a multiple of tp, and the padding's logits (0) are not masked."""

    def make(token_losses):
        def padded(self, outputs, batch):
            ctx, vocabulary = self.ctx, self.vocab_size
            last = ctx.tp_rank == ctx.tp_size - 1
            outputs = F.pad(outputs, (0, -vocabulary % ctx.tp_size if last else 0))
            return token_losses(self, outputs, batch)

        return padded

    return replaced(LanguageModelHead, "token_losses", make)


@bug(
    "6",
    "Gradients of replicated KV heads not summed",
    r"gradient of layers\.\d\.attention\.qkv\.weight: differs at step 1 on ranks 0",
    layout="tp4",
    model="llama",
    settings={"kv_heads": 2},
    source="bigcode Megatron-LM #37",
    link="https://github.com/bigcode-project/Megatron-LM/pull/37",
)
def copies_of_heads_not_summed():
    """The partial gradients of replicated KV heads are not summed."""

    def make(has_partial_gradient):
        return lambda self, ctx: not self.shard and has_partial_gradient(self, ctx)

    return replaced(ParameterSpec, "has_partial_gradient", make)


@bug(
    "7",
    "Norms' gradients not summed under sequence parallelism",
    r"gradient of norm\.weight: .*: the tp ranks' add up to what it should be",
    layout="tp2+sp",
    model="llama",
    source="GPT-NeoX #1257",
    link="https://github.com/EleutherAI/gpt-neox/pull/1257",
)
@bug(
    "30",
    "Adapter's replicated factor whose gradient is never summed",
    r"gradient of layers\.\d\.mlp\.down\.lora\.down\.B: .*: the tp ranks' add up to what it "
    r"should be",
    layout="tp2",
    model="llama",
    lora_rank=2,
    source="mcore-bridge #173",
    link="https://github.com/modelscope/mcore-bridge/pull/173",
)
def gradients_of_copies_not_summed():
    """Partial gradients are never summed over tp ranks."""
    return replaced_everywhere("sum_over_copies", lambda _: lambda *_: None)


@bug(
    "8",
    "Bias added before the sum, tp times",
    r"module layers\.0\.attention\.output: its output differs on rank.*: by the same "
    r"features at every token",
    layout="tp2",
    source="Paddle #35186",
    link="https://github.com/PaddlePaddle/Paddle/pull/35186",
)
def bias_before_the_sum():
    """Every rank adds the bias before the sum."""

    def make(forward):
        def biased(self, *arguments, **options):
            y = forward(self, *arguments, **options)
            return y if self.bias is None else y + (self.ctx.tp_size - 1) * self.bias

        return biased

    return replaced(RowParallelLinear, "forward", make)


@bug(
    "9a",
    "Columns gathered in the wrong order of ranks",
    r"logits: they differ on ranks 0",
    layout="tp2",
    source="NCCL #1906",
    link="https://github.com/NVIDIA/nccl/issues/1906",
)
def columns_in_another_order():
    """Features are gathered in the reverse order of ranks."""

    def make(forward):
        def turned(ctx, x, group, sizes):
            parts = forward(ctx, x, group, sizes).split(sizes, dim=-1)
            return torch.cat(parts[::-1], dim=-1)

        return staticmethod(turned)

    gather = regions._GatherFromTensorParallel
    return replaced(gather, "forward", lambda method: make(method.__func__))


@bug(
    "9b",
    "Parts of the sequence gathered in the wrong order",
    r"module layers\.0\.attention\.output: its input differs on rank",
    layout="tp2+sp",
    source="NCCL #1906",
    link="https://github.com/NVIDIA/nccl/issues/1906",
)
def sequence_in_another_order():
    """Parts of the sequence are gathered in the reverse order of ranks."""

    def make(gather):
        def turned(x, group):
            return torch.cat(gather(x, group).chunk(group.size(), dim=-2)[::-1], dim=-2)

        return turned

    return replaced(regions, "all_gather_sequence", make)


def _cut_as_one_block(parts: int):
    def make(cuts):
        def contiguous(self, tp_size, tp_rank):
            if tp_size == 1 or len(self.parts) != parts:
                return cuts(self, tp_size, tp_rank)
            each, first = self.parts[0] // tp_size, tp_rank * sum(self.parts) // tp_size
            return [Cut(first + part * each, part * each, each, True) for part in range(parts)]

        return contiguous

    return replaced(Shard, "cuts", make)


@bug(
    "10",
    "Fused QKV cut as one block",
    r"module layers\.0\.attention\.output: its input differs on rank",
    layout="tp2",
    source="tt-metal #52818",
    link="https://github.com/tenstorrent/tt-metal/pull/52818",
)
def qkv_as_one_block():
    """A rank's shard of the fused QKV weight is one contiguous block."""
    return _cut_as_one_block(3)


@bug(
    "11",
    "Gate and up cut as one block",
    r"module layers\.0\.mlp\.down: its input differs on rank",
    layout="tp2",
    model="llama",
    source="tt-metal #52818",
    link="https://github.com/tenstorrent/tt-metal/pull/52818",
)
def gate_up_as_one_block():
    """A rank's shard of the fused gate and up weight is one contiguous block."""
    return _cut_as_one_block(2)


@bug(
    "12",
    "Rotary positions by pairs instead of halves",
    r"layer 0, attention\.output \(model\.layers\.0\.self_attn\.o_proj\): its input differs",
    layout="transformers",
    model="llama",
    source="TinyLlama #24",
    link="https://github.com/jzhang38/TinyLlama/issues/24",
)
def rotary_by_pairs():
    """RoPE rotates features 2 i and 2 i + 1 together, instead of i and i + size / 2."""

    def by_pairs(x, cos, sin):
        halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        turned = rotate_by_halves(halves, cos, sin)
        return torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)

    def make(split_heads):
        def split(qkv, parts, head_size, rotary=None):
            q, k, v = split_heads(qkv, parts, head_size)
            return (by_pairs(q, *rotary), by_pairs(k, *rotary), v) if rotary else (q, k, v)

        return split

    return replaced_everywhere("split_heads", make)


@bug(
    "13a",
    "ALiBi slopes of local heads",
    r"module layers\.0\.attention\.output: its input differs on rank 1 ",
    layout="tp2",
    model="mpt",
    source="Megatron-DeepSpeed #227",
    link="https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/227",
)
def slopes_of_local_heads():
    """Every rank uses the ALiBi slopes of heads 0, 1, ..."""
    return replaced(
        CausalSelfAttention, "heads", lambda heads: lambda self: range(len(heads(self)))
    )


@bug(
    "13b",
    "ALiBi slopes for a number of heads that is no power of two",
    r"layer 0, attention\.output \(transformer\.blocks\.0\.attn\.out_proj\): its input "
    r"differs",
    layout="transformers",
    model="mpt",
    settings={"heads": 6, "kv_heads": 6, "hidden_size": 48, "ffn_size": 192},
    source="mlx #3071",
    link="https://github.com/ml-explore/mlx/pull/3071",
)
def slopes_in_one_series():
    """ALiBi slopes are powers of 2^(-8 / heads) for any number of heads."""

    def series(heads, bias_max=8.0):
        return 2.0 ** (-torch.arange(1, heads + 1, dtype=torch.float32) * bias_max / heads)

    return replaced_everywhere("alibi_slopes", lambda _: series)


@bug(
    "",
    "A row-parallel layer's missing sum",
    r"module layers\.0\.attention\.output: its output differs on rank.*: the tp ranks' add "
    r"up to what it should be",
    layout="tp2",
)
def missing_all_reduce():
    """A row-parallel layer returns its partial sum."""
    return replaced(linear, "leave_tensor_parallel", lambda _: lambda x, ctx: x)


@bug(
    "",
    "A column-parallel layer's missing sum in backward",
    r"gradient of norm\.bias: .*: the tp ranks' add up to what it should be",
    layout="tp2",
)
def missing_all_reduce_in_backward():
    """The gradient of the input of a tensor-parallel region is not summed."""
    return replaced_everywhere("enter_tensor_parallel", lambda _: lambda x, ctx: x)


@bug(
    "",
    "A norm of queries with the moments of a rank's own heads",
    r"module layers\.0\.attention\.q_norm: its output differs on ranks 0 ",
    layout="tp2",
    model="mpt",
    settings={"qk_norm": True},
)
def moments_of_own_heads():
    """A norm over all heads uses the moments of the rank's own heads."""
    return replaced(norm, "reduce_from_tensor_parallel", lambda _: lambda x, ctx: x * ctx.tp_size)


@bug(
    "25b",
    "Attention scaled by the layer's number within the stage",
    r"module layers\.\d\.attention\.output: its input differs on rank 1 ",
    layout="pp2",
    source="Megatron-LM 0504e97",
    link="https://github.com/NVIDIA/Megatron-LM/commit/0504e973d88a9b20d7f7104e1ddd33ee00af5d1f",
)
def scale_by_local_layer():
    """Attention is scaled by the layer's number within the stage."""

    def make(init):
        def scaled(self, *arguments):
            init(self, *arguments)
            for index, layer in enumerate(self.layers.values()):
                layer.attention.attend.scale /= index + 1

        return scaled

    return replaced(GPT2, "__init__", make)


@bug(
    "25a",
    "Initial spread by the layer's number within the stage",
    r"parameter layers\.\d\.mlp\.down\.weight: another initial value on rank 1 ",
    layout="pp2",
    source="rule: torchtitan's depth_scaled_std",
    link="https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/common/param_init.py",
)
def spread_by_local_layer():
    """The standard deviation of initial weights depends on the layer's number within the stage."""

    def make(init):
        def scaled(self, *arguments):
            init(self, *arguments)
            for index, layer in enumerate(self.layers.values()):
                down = layer.mlp.down
                spec = down.specs["weight"]
                spread = {"std": spec.std / (index + 1)}
                down.specs["weight"] = ParameterSpec(spec.shape, spec.shard, **spread)

        return scaled

    return replaced(GPT2, "__init__", make)


@bug(
    "29",
    "Adapter's output summed with the layer's and before it",
    r"module layers\.0\.attention\.output: its output differs on rank",
    layout="tp2",
    model="llama",
    lora_rank=2,
    source="Megatron-Bridge #5634",
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634",
)
def adapter_after_the_sum():
    """The output of a row-parallel layer's adapter is summed over tp, and again together with the
    layer's output."""

    def make(widened):
        def summed(self, inner):
            inner = reduce_from_tensor_parallel(inner, self.ctx) if self.dropout.parallel else inner
            return widened(self, inner)

        return summed

    return replaced(Adapter, "project_up", make)
