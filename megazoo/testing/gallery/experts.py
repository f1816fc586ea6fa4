"""Bugs in mixtures of experts: routers, auxiliary losses, and the exchange of tokens."""

import torch

from megazoo.engine import auxiliary
from megazoo.engine.microbatch import MicroBatch
from megazoo.layers.auxiliary import AuxiliaryLosses
from megazoo.layers.dispatch import Dispatch
from megazoo.layers.grouped import grouped_linear
from megazoo.layers.router import Router
from megazoo.lora.layers import ExpertAdapters
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.regions import reduce_from_tensor_parallel
from megazoo.testing.gallery.planting import BUGS, Bug, then

SMALL = {"layers": 2}
BALANCED = {**SMALL, "router_aux_loss_coef": 0.1}


def divided_by_tp(with_losses, self, weights, logits, probabilities, chosen, is_token):
    """The ranks of tp have the same tokens, and each takes a part of the gradient."""
    part = probabilities / self.ctx.tp_size
    scaled = part + (probabilities - part).detach()
    return with_losses(self, weights, logits, scaled, chosen, is_token)


def over_own_rows(attach, self, x, name, total, over):
    """The auxiliary loss is divided by the rows of the rank instead of those of the global
    batch."""
    if over == "rows" and not hasattr(self, "divided"):
        self.counts["rows"] = self.counts["rows"] / self.axes[-2].size
        self.divided = True
    return attach(self, x, name, total, over)


def sort_by_own_counts(dispatch):
    """The order of the received rows is computed with the counts of this rank for every rank."""
    if dispatch.axis is not None:
        order = dispatch.by_expert
        dispatch.by_expert = torch.arange(len(order), device=order.device)
        dispatch.by_rank = dispatch.by_expert


def chosen_in_order(forward, self, x, is_token=None):
    """The chosen experts are sorted by number, and their weights by size."""
    weights, chosen = forward(self, x, is_token)
    return weights, chosen.sort(-1).values


def softmax_twice(forward, self, x, is_token=None):
    """The weights of the chosen experts are normalised by a second softmax."""
    weights, chosen = forward(self, x, is_token)
    return weights.softmax(-1), chosen


def every_place(_, self, ctx):
    """Padding counts as tokens, and a layout adds padding so that ranks can split a sequence."""
    parts = ctx.tp_size if ctx.sequence_parallel else 1
    shape = self.shape[0], self.shape[1] // parts
    return torch.ones(shape, dtype=torch.bool, device=ctx.device)


def adapter_summed_twice(forward, self, x, weight, counts, **how):
    """The output of an adapter on the down matrices is summed over tp before it is added to the
    experts' output, and again together with it."""
    y = forward(self, x, weight, counts, **how)
    (adapter,) = self.values()
    if not adapter.dropout.parallel:
        return y
    plain = grouped_linear(x, weight, counts, **how)
    return plain + reduce_from_tensor_parallel(y - plain, adapter.ctx)


BUGS += [
    Bug("E1", "Gradient of the auxiliary loss divided by tp",
        r"gradient of layers\.\d\.moe\.router\.weight: differs at step 1 ",
        Router, "_with_losses", divided_by_tp, layout="tp2", model="mixtral", settings=BALANCED,
        source="Megatron-LM #5047", link="https://github.com/NVIDIA/Megatron-LM/issues/5047"),
    Bug("E2", "Auxiliary loss as the mean of this rank's rows",
        r"auxiliary loss router_balance: .* instead of ",
        AuxiliaryLosses, "attach", over_own_rows,
        layout="dp2", model="mixtral", settings=BALANCED,
        source="NeMo Automodel #3359",
        link="https://github.com/NVIDIA-NeMo/Automodel/issues/3359"),
    # The gradient norm counts only the experts of the first rank along ep.
    Bug("E3", "Gradient norm without the experts of other ranks",
        r"gradient norm: .* instead of .* at step 1, though no gradient differs",
        NamedParameter, "is_first_replica",
        lambda is_first, self, ctx: is_first(self, ctx) and ctx.token_axis.rank == 0,
        layout="ep2", model="mixtral", settings=SMALL,
        source="Megatron-LM #5916", link="https://github.com/NVIDIA/Megatron-LM/issues/5916"),
    Bug("E4", "Received rows sorted as if each rank had sent equally many",
        r"module layers\.0\.moe: its output differs on ranks 0 ",
        Dispatch, "__init__", then(sort_by_own_counts),
        layout="ep2", model="mixtral", settings=SMALL,
        source="torchtitan #3604", link="https://github.com/pytorch/torchtitan/issues/3604"),
    Bug("E5", "Weights paired with other experts",
        r"layer 1, attention_norm \(model\.layers\.1\.input_layernorm\): its input differs",
        Router, "forward", chosen_in_order,
        layout="transformers", model="mixtral", settings=SMALL,
        source="transformers #45473",
        link="https://github.com/huggingface/transformers/issues/45473"),
    Bug("E6", "Softmax applied twice",
        r"layer 1, attention_norm \(model\.layers\.1\.input_layernorm\): its input differs",
        Router, "forward", softmax_twice, layout="transformers", model="mixtral", settings=SMALL,
        source="VeOmni #715", link="https://github.com/ByteDance-Seed/VeOmni/issues/715"),
    # Under sequence parallelism the counts of tokens are not summed over tp.
    Bug("E7", "Bias of the router moved by the counts of one tp rank",
        r"weights of layers\.\d\.moe\.router\.bias: differ after step \d ",
        AuxiliaryLosses, "pass_counts", lambda passed, self, axes: passed(self, list(axes)[1:]),
        layout="tp2+sp", model="mixtral",
        settings={**SMALL, "router_balance": "bias", "router_bias_rate": 0.1, "experts": 8},
        source="torchtitan #4154", link="https://github.com/pytorch/torchtitan/issues/4154"),
    Bug("E8", "Padding counted by the router",
        r"auxiliary loss router_balance: .* instead of ",
        MicroBatch, "is_token", every_place, layout="cp2", model="mixtral", settings=BALANCED,
        source="Megatron-LM #7452", link="https://github.com/NVIDIA/Megatron-LM/issues/7452"),
    # The printed loss is summed over all ranks, of which those of tp have the same tokens.
    Bug("E9", "Auxiliary loss printed times the ranks of tp",
        r"auxiliary loss router_balance: .* instead of ",
        auxiliary, "_axes_of_means", lambda axes_of, ctx, axis: [ctx.tp, *axes_of(ctx, axis)],
        layout="tp2ep2", model="mixtral", settings=BALANCED,
        source="transformers #45994",
        link="https://github.com/huggingface/transformers/issues/45994"),
    Bug("E10", "Expert adapter's inner activations summed over tp, and its output again",
        r"module layers\.0\.moe: its output differs ",
        ExpertAdapters, "forward", adapter_summed_twice,
        layout="tp2", model="mixtral", settings=SMALL, lora_rank=2,
        source="Megatron-Bridge #5634",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634"),
]  # fmt: skip
