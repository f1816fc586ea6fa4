"""Bugs in mixtures of experts: routers, auxiliary losses, and the exchange of tokens."""

import torch

from megazoo.engine import auxiliary
from megazoo.engine.microbatch import MicroBatch
from megazoo.layers.auxiliary import AuxiliaryLosses
from megazoo.layers.dispatch import Dispatch
from megazoo.layers.grouped import grouped_linear
from megazoo.layers.router import Router
from megazoo.lora.layers import ExpertAdapters
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.regions import reduce_from_tensor_parallel
from megazoo.testing.gallery.planting import bug, replaced

SMALL = {"layers": 2}
BALANCED = {**SMALL, "router_aux_loss_coef": 0.1}


@bug(
    "E1",
    "Gradient of the auxiliary loss divided by tp",
    r"gradient of layers\.\d\.moe\.router\.weight: differs at step 1 ",
    layout="tp2",
    model="mixtral",
    settings=BALANCED,
    source="Megatron-LM #5047",
    link="https://github.com/NVIDIA/Megatron-LM/issues/5047",
)
def auxiliary_gradient_divided_by_tp():
    """The ranks of tp have the same tokens, and each takes a part of the gradient."""

    def make(forward):
        def with_losses(self, weights, logits, probabilities, chosen, is_token):
            part = probabilities / self.ctx.tp_size
            scaled = part + (probabilities - part).detach()
            return forward(self, weights, logits, scaled, chosen, is_token)

        return with_losses

    return replaced(Router, "_with_losses", make)


@bug(
    "E2",
    "Auxiliary loss as the mean of this rank's rows",
    r"auxiliary loss router_balance: .* instead of ",
    layout="dp2",
    model="mixtral",
    settings=BALANCED,
    source="NeMo Automodel #3359",
    link="https://github.com/NVIDIA-NeMo/Automodel/issues/3359",
)
def auxiliary_mean_of_own_rows():
    """The auxiliary loss is divided by the rows of the rank instead of those of the global
    batch."""

    def make(attach):
        def attached(self, x, name, total, over):
            if over == "rows" and not hasattr(self, "divided"):
                self.counts["rows"] = self.counts["rows"] / self.axes[-2].size
                self.divided = True
            return attach(self, x, name, total, over)

        return attached

    return replaced(AuxiliaryLosses, "attach", make)


@bug(
    "E3",
    "Gradient norm without the experts of other ranks",
    r"gradient norm: .* instead of .* at step 1, though no gradient differs",
    layout="ep2",
    model="mixtral",
    settings=SMALL,
    source="Megatron-LM #5916",
    link="https://github.com/NVIDIA/Megatron-LM/issues/5916",
)
def norm_without_other_experts():
    """The gradient norm counts only the experts of the first rank along ep."""

    def make(is_first):
        def first(self, ctx: ParallelContext):
            return is_first(self, ctx) and ctx.token_axis.rank == 0

        return first

    return replaced(NamedParameter, "is_first_replica", make)


@bug(
    "E4",
    "Received rows sorted as if each rank had sent equally many",
    r"module layers\.0\.moe: its output differs on ranks 0 ",
    layout="ep2",
    model="mixtral",
    settings=SMALL,
    source="torchtitan #3604",
    link="https://github.com/pytorch/torchtitan/issues/3604",
)
def rows_sorted_by_one_offset():
    """The order of the received rows is computed with the counts of this rank for every rank."""

    def make(init):
        def initialised(self, chosen, experts, ctx):
            init(self, chosen, experts, ctx)
            if self.axis is not None:
                self.by_expert = torch.arange(len(self.by_expert), device=chosen.device)
                self.by_rank = self.by_expert

        return initialised

    return replaced(Dispatch, "__init__", make)


@bug(
    "E5",
    "Weights paired with other experts",
    r"layer 1, attention_norm \(model\.layers\.1\.input_layernorm\): its input differs",
    layout="transformers",
    model="mixtral",
    settings=SMALL,
    source="transformers #45473",
    link="https://github.com/huggingface/transformers/issues/45473",
)
def weights_of_other_experts():
    """The chosen experts are sorted by number, and their weights by size."""

    def make(forward):
        def chosen_in_order(self, x, is_token=None):
            weights, chosen = forward(self, x, is_token)
            return weights, chosen.sort(-1).values

        return chosen_in_order

    return replaced(Router, "forward", make)


@bug(
    "E6",
    "Softmax applied twice",
    r"layer 1, attention_norm \(model\.layers\.1\.input_layernorm\): its input differs",
    layout="transformers",
    model="mixtral",
    settings=SMALL,
    source="VeOmni #715",
    link="https://github.com/ByteDance-Seed/VeOmni/issues/715",
)
def softmax_twice():
    """The weights of the chosen experts are normalised by a second softmax."""

    def make(forward):
        def twice(self, x, is_token=None):
            weights, chosen = forward(self, x, is_token)
            return weights.softmax(-1), chosen

        return twice

    return replaced(Router, "forward", make)


@bug(
    "E7",
    "Bias of the router moved by the counts of one tp rank",
    r"weights of layers\.\d\.moe\.router\.bias: differ after step \d ",
    layout="tp2+sp",
    model="mixtral",
    settings={**SMALL, "router_balance": "bias", "router_bias_rate": 0.1, "experts": 8},
    source="torchtitan #4154",
    link="https://github.com/pytorch/torchtitan/issues/4154",
)
def counts_of_one_tp_rank():
    """Under sequence parallelism the counts of tokens are not summed over tp."""

    def make(pass_counts):
        def passed(self, axes):
            return pass_counts(self, list(axes)[1:])

        return passed

    return replaced(AuxiliaryLosses, "pass_counts", make)


@bug(
    "E8",
    "Padding counted by the router",
    r"auxiliary loss router_balance: .* instead of ",
    layout="cp2",
    model="mixtral",
    settings=BALANCED,
    source="Megatron-LM #7452",
    link="https://github.com/NVIDIA/Megatron-LM/issues/7452",
)
def padding_counted():
    """Padding counts as tokens, and a layout adds padding so that ranks can split a sequence."""

    def make(_):
        def every_place(self, ctx):
            parts = ctx.tp_size if ctx.sequence_parallel else 1
            shape = self.shape[0], self.shape[1] // parts
            return torch.ones(shape, dtype=torch.bool, device=ctx.device)

        return every_place

    return replaced(MicroBatch, "is_token", make)


@bug(
    "E9",
    "Auxiliary loss printed times the ranks of tp",
    r"auxiliary loss router_balance: .* instead of ",
    layout="tp2ep2",
    model="mixtral",
    settings=BALANCED,
    source="transformers #45994",
    link="https://github.com/huggingface/transformers/issues/45994",
)
def printed_times_tp():
    """The printed auxiliary loss is summed over all ranks, of which those of tp have the same
    tokens."""

    def make(axes_of):
        return lambda ctx, axis: [ctx.tp, *axes_of(ctx, axis)]

    return replaced(auxiliary, "_axes_of_means", make)


@bug(
    "E10",
    "Expert adapter's inner activations summed over tp, and its output again",
    r"module layers\.0\.moe: its output differs ",
    layout="tp2",
    model="mixtral",
    settings=SMALL,
    lora_rank=2,
    source="Megatron-Bridge #5634",
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634",
)
def expert_adapter_summed_twice():
    """The output of an adapter on the down matrices is summed over tp before it is added to the
    experts' output, and again together with it."""

    def make(forward):
        def summed(self, x, weight, counts, **how):
            y = forward(self, x, weight, counts, **how)
            (adapter,) = self.values()
            if not adapter.dropout.parallel:
                return y
            plain = grouped_linear(x, weight, counts, **how)
            return plain + reduce_from_tensor_parallel(y - plain, adapter.ctx)

        return summed

    return replaced(ExpertAdapters, "forward", make)
