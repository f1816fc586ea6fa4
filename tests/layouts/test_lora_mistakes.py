"""Mistakes that others have published of LoRA in parallel, each planted once: a check that passes
without it finds it."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.engine import stage
from megazoo.layers import Dropout
from megazoo.lora import layers, settings
from megazoo.lora.layers import Adapter, Adapters
from megazoo.models.registry import find_config
from megazoo.optim import adamw
from megazoo.parallel.module import NamedParameter, initialize
from megazoo.parallel.random import derive_seed
from megazoo.parallel.regions import reduce_from_tensor_parallel
from megazoo.parallel.shard import ParameterSpec
from megazoo.testing import RankError, check_parallel, shrink
from tests.support.lora import assert_alike, one_process, train
from tests.support.lora_peft import assert_as_in_peft, by_peft, by_us
from tests.support.sampling import sampled
from tests.support.training import MODELS, context, make_batch, randomize, world


def specs_with(change):
    """Adapters whose specs are changed: change(spec)."""
    return mock.patch.object(
        layers, "ParameterSpec", lambda *a, **kw: change(ParameterSpec(*a, **kw))
    )


def spread_by_local_inputs():
    """A of row-parallel layers is drawn by the inputs that one of two tp ranks has."""
    return specs_with(lambda s: replace(s, bound=s.bound * 2**0.5) if s.shard else s)


def factor_not_summed():
    return specs_with(lambda spec: replace(spec, partial=False))


def no_sums():
    return mock.patch("megazoo.engine.gradients.sum_over_copies")


def copies_of_heads_not_summed():
    partial = ParameterSpec.has_partial_gradient

    def of_wholes_alone(self, ctx):
        return not self.shard and partial(self, ctx)

    return mock.patch.object(ParameterSpec, "has_partial_gradient", of_wholes_alone)


def summed_twice():
    """In a row-parallel layer what is between the factors is summed, and its output, too."""
    widened = Adapter.project_up

    def summed(self, inner):
        inner = reduce_from_tensor_parallel(inner, self.ctx) if self.dropout.parallel else inner
        return widened(self, inner)

    return mock.patch.object(Adapter, "project_up", summed)


def other_masks_on_each_rank():
    draw = Dropout.draw

    def drawn(self, seed, device):
        self.parallel = True
        return draw(self, seed, device)

    return mock.patch.object(Dropout, "draw", drawn)


def backward_of_all_stages():
    """As a pipeline has it in which every stage is trained."""

    def backward(self, action, factor=1.0):
        received, output = self.graphs.pop((action.stage, action.microbatch))
        gradient = self.transport.take(action)
        if gradient is None:
            gradient = torch.full_like(output, self.loss_scale * factor)
        stage.run_backward(output, gradient)
        if received is not None:
            self.transport.pass_on(action._replace(stage=action.stage - 1), received.grad)

    return mock.patch.object(stage.StageRun, "backward", backward)


def copies_in_the_norm():
    def all_pieces(self, ctx):
        return self.spec.pieces(ctx.place)

    return mock.patch.object(NamedParameter, "counted_pieces", all_pieces)


def decay_of_what_is_frozen():
    step = adamw.AdamW.step

    def decaying(self):
        norm = step(self)
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(1 - self.lr * 0.1)
        return norm

    return mock.patch.object(adamw.AdamW, "step", decaying)


def frozen_in_the_norm():
    """The norm is of the gradients and of the frozen weights' decay."""
    step, norm_of = adamw.AdamW.step, adamw.global_norm

    def stepping(self):
        frozen = [p.detach() for p in self.model.parameters() if not p.requires_grad]
        decay = torch.stack([0.1 * parameter.norm() for parameter in frozen]).norm()

        def norm(entries, buckets):
            return torch.hypot(norm_of(entries, buckets), decay)

        with mock.patch.object(adamw, "global_norm", norm):
            return step(self)

    return mock.patch.object(adamw.AdamW, "step", stepping)


def by_rank_alone():
    return mock.patch.object(settings.math, "sqrt", lambda rank: rank)


def other_order_of_parts():
    """k's change is added to v, and v's to k: they are as large."""
    added = Adapters._added

    def swapped(self, y, inner):
        if "k" not in self.sizes:
            return added(self, y, inner)
        q, k, v = y.split(list(self.sizes.values()), dim=-1)
        q, v, k = added(self, torch.cat([q, v, k], -1), inner).split(list(self.sizes.values()), -1)
        return torch.cat([q, k, v], -1)

    return mock.patch.object(Adapters, "_added", swapped)


def merged_in_other_order():
    merge_into = Adapters.merge_into

    def swapped(self, weight):
        if "k" not in self.sizes:
            merge_into(self, weight)
            return
        q, k, v = weight.split(list(self.sizes.values()))
        other = torch.cat([q, v, k])
        merge_into(self, other)
        q, v, k = other.split(list(self.sizes.values()))
        weight.copy_(torch.cat([q, k, v]))

    return mock.patch.object(Adapters, "merge_into", swapped)


def merged_tp_times():
    """Every rank adds the changes of all, as if the weights were whole."""
    change = Adapter.change
    return mock.patch.object(
        Adapter, "change", lambda self: reduce_from_tensor_parallel(change(self), self.ctx)
    )


LAST_LAYER = {"targets": ("layers.2.attention.qkv", "layers.2.mlp.down")}
IN_LAYOUTS = {  # the mistake, the model, the layout, and how it is trained
    "A's spread grows with the root of tp": (spread_by_local_inputs, "llama", dict(tp=2), {}),
    "the replicated factor's gradient": (factor_not_summed, "gpt2", dict(tp=2), {}),
    "the same, under sequence parallelism": (no_sums, "llama", dict(tp=2, sp=True), {}),
    "replicated KV heads' B": (copies_of_heads_not_summed, "llama", dict(tp=4), {}),
    "the output summed twice": (summed_twice, "mpt", dict(tp=2), {}),
    "masks that differ over tp": (
        other_masks_on_each_rank, "llama", dict(tp=2), {"targets": ("q", "v"), "dropout": 0.3}
    ),
    "a stage with nothing trained": (backward_of_all_stages, "llama", dict(pp=2), LAST_LAYER),
    "copies in the norm": (copies_in_the_norm, "gpt2", dict(tp=2), {}),
    "decay of what is frozen": (decay_of_what_is_frozen, "gpt2", dict(tp=2), {}),
}  # fmt: skip


def train_wrongly(mistake, config, layout, how):
    with IN_LAYOUTS[mistake][0]():
        return train(config, layout, steps=2, **how)


@pytest.mark.parametrize("mistake", sampled(IN_LAYOUTS, 4, seed=1))
def test_a_mistake_in_a_layout_is_found(ranks, mistake):
    _, model, layout, how = IN_LAYOUTS[mistake]
    config, size = replace(MODELS[model], layers=3), world(layout)
    expected = one_process(config, steps=2, **how)
    assert_alike(ranks(train, size, config, layout, steps=2, **how), expected)
    with pytest.raises((AssertionError, RankError)):
        assert_alike(ranks(train_wrongly, size, mistake, config, layout, how), expected)


@pytest.fixture(scope="module")
def in_peft(tmp_path_factory):
    """What PEFT makes of a LLaMA with rslora's scale, and where its weights are."""
    directory = tmp_path_factory.mktemp("llama")
    return directory, *by_peft("llama", "rslora", directory)


AGAINST_PEFT = {
    "alpha / r": by_rank_alone,
    "the parts in another order": other_order_of_parts,
    "frozen parameters in the norm": frozen_in_the_norm,
}


def test_a_mistake_in_any_layout_is_found_by_peft(in_peft):
    directory, expected, first, last = in_peft
    assert_as_in_peft([by_us(directory, "rslora", first)], expected, last)
    for mistake in AGAINST_PEFT.values():
        with mistake():
            found = by_us(directory, "rslora", first)
        with pytest.raises(AssertionError):
            assert_as_in_peft([found], expected, last)


IN_MERGING = {"parts in another order": merged_in_other_order, "above tp 1": merged_tp_times}


def losses_around_a_merge(mistake, layout):
    """Of a model with adapters that do something, before it is merged and after."""
    ctx, (ids, _) = context(**layout), make_batch(0)
    model = randomize(megazoo.from_config(MODELS["llama"], ctx, seed=3))
    megazoo.lora.add(model, rank=3, targets="all-linear")
    for entry in model.trained_entries():
        spec = replace(entry.spec, std=0.3, bound=0.0)
        initialize(entry.parameter, spec, ctx, derive_seed(1, entry.name))
    before = model.eval_batch(ids, labels=ids)
    if mistake:
        with IN_MERGING[mistake]():
            megazoo.lora.merge(model)
    else:
        megazoo.lora.merge(model)
    return before.item(), model.eval_batch(ids, labels=ids).item()


def test_a_mistake_in_merging_is_found(ranks):
    for mistake in (None, *IN_MERGING):
        for before, after in ranks(losses_around_a_merge, 2, mistake, dict(tp=2)):
            assert (abs(before - after) < 1e-5) == (mistake is None), mistake


NOT_SUMMED = """
from megazoo.engine import gradients
gradients.sum_over_copies = lambda *_: None
"""


LEFT_OUT = """
from megazoo.models.base import Model
train_batch = Model.train_batch
def forgetful(self, *args, **kwargs):
    loss = train_batch(self, *args, **kwargs)
    for name, parameter in self.named_parameters():
        if self.ctx.tp_size > 1 and name == "layers.1.mlp.down.lora.down.B":
            parameter.grad = None
    return loss
Model.train_batch = forgetful
"""


@pytest.mark.slow
def test_check_parallel_trains_adapters_too(tmp_path):
    """So users prove their own layout; and a mistake has its place."""
    small = shrink(find_config("llama-tiny"))
    verdicts = check_parallel(small, ["tp2+sp", "pp2"], lora_rank=2)
    assert [verdict.cause for verdict in verdicts] == [None] * 2
    (tmp_path / "bug.py").write_text(NOT_SUMMED)
    (verdict,) = check_parallel(small, ["tp2"], lora_rank=2, import_=tmp_path / "bug.py")
    assert re.match(r"gradient of layers\.\d+\.mlp\.down\.lora\.down\.B", verdict.cause)
    (tmp_path / "left_out.py").write_text(LEFT_OUT)
    (verdict,) = check_parallel(small, ["tp2"], lora_rank=2, import_=tmp_path / "left_out.py")
    assert verdict.cause.startswith("gradient of layers.1.mlp.down.lora.down.B")
