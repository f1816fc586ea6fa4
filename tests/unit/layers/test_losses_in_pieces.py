"""The loss of a long micro-batch, whose logits are made in pieces, against all logits at once. Here
each micro-batch is long, and five tokens make a piece."""

from contextlib import nullcontext
from types import MethodType

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo.engine.batch import Batch
from megazoo.errors import Advice, UserError
from megazoo.layers import VocabParallelHead
from megazoo.models.gpt2 import GPT2
from megazoo.models.llama import Llama
from megazoo.models.outputs import LanguageModelHead
from tests.support.layouts import STEPS, case_name, one_process, short_pieces
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    gradients_of,
    layout_name,
    make_batch,
    randomize,
    train_and_keep_gradients,
    world,
    worst_gradient,
    worst_relative,
)


def train_in_pieces(*args, **kwargs):
    with short_pieces() as count:
        return *train_and_keep_gradients(*args, **kwargs), count.call_count


PIECES = [
    ("gpt2", dict(), "1f1b"), ("llama", dict(tp=2, sp=True), "1f1b"), ("gpt2", dict(tp=2), "1f1b"),
    ("llama", dict(pp=2, v=2), "1f1b"), ("gpt2", dict(dp=2), "1f1b"), ("gpt2", dict(pp=2), "zb-h1"),
    # slow
    ("mpt, learned positions", dict(pp=2), "1f1b"), ("llama, one KV head", dict(pp=2, v=2), "1f1b"),
    ("mpt", dict(tp=2, dp=2), "1f1b"), ("gpt2", dict(pp=2, tp=2), "1f1b"),
    ("llama", dict(pp=2), "gpipe"), ("llama", dict(pp=2), "zb-h1"),
]  # fmt: skip
CASES = marked_slow(
    PIECES,
    lambda number, _: number not in (1, 3, 5),
    name=lambda case: "-".join(map(case_name, case)),
)


@pytest.mark.parametrize(("model", "layout", "schedule"), CASES)
def test_losses_in_pieces_have_the_gradients_of_one_process(ranks, model, layout, schedule):
    """Only where backward comes at once: else the pieces' gradients would have to wait."""
    history, gradients = one_process(MODELS[model])
    results = ranks(train_in_pieces, world(layout), MODELS[model], layout, STEPS, schedule=schedule)
    assert worst_relative(results[-1][0], history) < 1e-5
    for step, expected in enumerate(gradients):
        distance, name = worst_gradient([ours[step] for _, ours, _ in results], expected)
        assert distance < 1e-5, f"{name} at step {step + 1}"
    micro_batches = 8 // 2 if layout.get("pp") else 2  # of two rows each, or half a replica's
    assert results[-1][2] == (STEPS * micro_batches if schedule == "1f1b" else 0)


def losses_by_other_ways(layout):
    """An evaluation's loss, and those of a loop's micro-batches: the first counts nothing, the
    second twice."""
    model = randomize(megazoo.from_config(MODELS["llama"], context(**layout), seed=3))
    ids, targets = make_batch(0)
    evaluated = model.eval_batch(ids, targets=targets, num_microbatches=2)
    outputs = model.microbatches(ids, targets=targets, num_microbatches=2)
    losses = []
    for weight, out in zip((0.0, 2.0), outputs, strict=True):
        (weight * out.loss).backward()
        losses.append(out.loss.item())
    return evaluated, losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def losses_by_other_ways_in_pieces(layout):
    with short_pieces() as count:
        return *losses_by_other_ways(layout), count.call_count


@pytest.mark.parametrize("layout", [dict(), dict(tp=2, pp=2)], ids=layout_name)
def test_evaluation_and_a_loop_of_ones_own_make_losses_in_pieces(ranks, layout):
    whole = ranks(losses_by_other_ways, world(layout), layout)
    pieces = ranks(losses_by_other_ways_in_pieces, world(layout), layout)
    for (evaluated, losses, gradients), (*ours, _) in zip(whole, pieces, strict=True):
        torch.testing.assert_close(ours[0], evaluated, rtol=1e-5, atol=0)
        assert ours[1] == pytest.approx(losses, rel=1e-5)
        for name, gradient in ours[2].items():
            assert (gradient - gradients[name]).abs().max() <= 1e-5 * gradients[name].abs().max(), (
                name
            )
    assert pieces[-1][-1] == 4, "two evaluated, two of the loop"


def gradients_in_half(dtype):
    model = randomize(megazoo.from_config(MODELS["gpt2"], context(), dtype=dtype, seed=3))
    megazoo.optim.AdamW(model, lr=1e-3)  # it brings float16's loss scale
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets, num_microbatches=2)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_losses_in_pieces_have_the_gradients_of_whole_ones_in_16_bits():
    for dtype in (torch.bfloat16, torch.float16):
        whole = gradients_in_half(dtype)
        with short_pieces() as count:
            pieces = gradients_in_half(dtype)
        assert count.call_count == 2
        for name, gradient in pieces.items():
            assert gradient.dtype == torch.float32
            assert (gradient - whole[name]).abs().max() <= 2e-2 * whole[name].abs().max(), name


def test_float16_whose_scale_comes_with_the_gradient_waits_for_it():
    """A user's own loss scaler: nothing may be rounded before."""
    model = megazoo.from_config(MODELS["gpt2"], context(), dtype=torch.float16)
    ids, targets = make_batch(0)
    for scaled_by_us in (False, True):
        if scaled_by_us:
            megazoo.optim.AdamW(model, lr=1e-3)
        with short_pieces() as count:
            for out in model.microbatches(ids, targets=targets, num_microbatches=2):
                out.loss.backward()
        assert count.called == scaled_by_us


class CappedHead(LanguageModelHead):
    """Has logits of its own."""

    def outputs(self, x, batch):
        return 5 * torch.tanh(LanguageModelHead.outputs(self, x, batch) / 5)


class Capped(GPT2):
    def add_head(self):
        super().add_head(CappedHead)


def test_logits_of_ones_own_are_made_together():
    ids, targets = make_batch(0)
    of_a_class, of_one = (build.build(MODELS["gpt2"], context()) for build in (Capped, GPT2))
    of_one.head.outputs = MethodType(CappedHead.outputs, of_one.head)
    expected = torch.nn.functional.cross_entropy(
        of_a_class(ids).logits.flatten(0, 1), targets.flatten()
    )
    for model in (of_a_class, of_one):
        with short_pieces() as count:
            assert model.train_batch(ids, targets=targets).item() == pytest.approx(
                expected.item(), rel=1e-5
            )
        assert not count.called


def test_overrides_of_the_model_that_nobody_would_call_are_refused():
    with pytest.raises(
        UserError, match=r"Own\.token_losses would have no effect: .*LanguageModelHead"
    ):
        type("Own", (GPT2,), {"token_losses": lambda self, outputs, batch: 0})
    model = megazoo.from_config(MODELS["gpt2"], context())
    with pytest.raises(UserError, match="the outputs that is set on a model would have no effect"):
        model.outputs = print


TERMS = {"soft_cap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-2}


class WithTerms(Llama):
    def add_head(self):
        super().add_head(**TERMS)


class TiedWithTerms(GPT2):
    def add_head(self):
        super().add_head(**TERMS)


def train_with_terms(family, name, layout, pieces):
    model = randomize(family.build(MODELS[name], context(**layout), seed=3))
    ids, targets = make_batch(0)
    with short_pieces() if pieces else nullcontext():
        loss = model.train_batch(ids, targets=targets, num_microbatches=2)
        plain = model.eval_batch(ids, targets=targets)
    return loss.item(), plain.item(), gradients_of(model)


def torchs_loss(model, ids, targets, smoothing=0.0, z_loss=0.0):
    """The same loss of one process, by torch's functions of the logits before their cap."""
    batch, stage = model.engine.micro_batches(Batch(ids, targets=targets), 1)[0], model.stages[0]
    x = model.forward_stage(ids, batch, stage)
    logits = x @ model.head.matrix.t()
    logits = (TERMS["soft_cap"] * torch.tanh(logits / TERMS["soft_cap"])).flatten(0, 1)
    targets = targets.flatten()
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    return loss + z_loss * logits.logsumexp(-1)[targets != -100].square().mean()


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize(
    "layout",
    marked_slow(
        [dict(), dict(tp=2, pp=2), dict(tp=2)], lambda number, _: number > 1, name=layout_name
    ),
)
@pytest.mark.parametrize(("family", "name"), [(WithTerms, "llama"), (TiedWithTerms, "gpt2")])
def test_soft_cap_smoothing_and_z_loss_equal_torch(ranks, family, name, layout, pieces):
    model = randomize(family.build(MODELS[name], context(), seed=3))
    ids, targets = make_batch(0)
    loss = torchs_loss(model, ids, targets, TERMS["label_smoothing"], TERMS["z_loss"])
    loss.backward()
    plain = torchs_loss(model, ids, targets)
    results = ranks(train_with_terms, world(layout), family, name, layout, pieces)
    for ours, evaluated, _ in results:
        assert ours == pytest.approx(loss.item(), rel=1e-5)
        assert evaluated == pytest.approx(plain.item(), rel=1e-5), "without the terms"
    distance, name = worst_gradient([found for *_, found in results], gradients_of(model))
    assert distance < 1e-5, name


def smoothed_on_one_rank(layout):
    model = megazoo.from_config(MODELS["gpt2"], context(**layout))
    if model.has_last and model.ctx.rank == model.ctx.world_size - 1:
        model.head.label_smoothing = 0.1
    ids, targets = make_batch(0)
    with pytest.raises(UserError) as error:
        model.train_batch(ids, targets=targets)
    return str(error.value)


@pytest.mark.parametrize("layout", [dict(dp=2), dict(tp=2)], ids=layout_name)
def test_ranks_whose_heads_differ_are_told(ranks, layout):
    errors = ranks(smoothed_on_one_rank, world(layout), layout)
    assert any("the head's label_smoothing" in error for error in errors), errors


def test_a_loop_in_evaluation_mode_says_what_the_loss_lacks():
    model = megazoo.from_config(MODELS["llama"], context()).eval()
    model.head.z_loss = 1e-3
    ids, targets = make_batch(0)
    with pytest.warns(Advice, match="without label smoothing and z-loss"):
        next(model.microbatches(ids, targets=targets))


class Tenth:
    def forward(self, x):
        return self.logits(x) * 0.1


class Mixed(Tenth, LanguageModelHead):
    """Takes its override from a class beside it."""


class SaysSo(Mixed):
    in_pieces = True


def test_an_override_from_a_mixin_counts():
    ids, targets = make_batch(0)
    for head, pieces in ((Mixed, False), (SaysSo, True)):
        family = type(
            "Family", (GPT2,), {"add_head": lambda self, head=head: GPT2.add_head(self, head)}
        )
        model = family.build(MODELS["gpt2"], context())
        with short_pieces() as count:
            evaluated = model.eval_batch(ids, targets=targets)
        assert count.called == pieces
        logits = model(ids).logits.flatten(0, 1)
        torch.testing.assert_close(logits, model.head.logits(model_output(model, ids)) * 0.1)
        if not pieces:
            torch.testing.assert_close(evaluated, F.cross_entropy(logits, targets.flatten()))


def model_output(model, ids):
    batch = model.engine.micro_batches(Batch(ids), 1)[0]
    return model.forward_stage(ids, batch, model.stages[0]).flatten(0, 1)


@pytest.mark.parametrize(
    ("cap", "error"), [(0, "soft_cap must be a number above 0"), (-3, "must be 0 or more")]
)
def test_a_cap_that_caps_nothing_is_refused(cap, error):
    with pytest.raises(UserError, match=error):
        LanguageModelHead(MODELS["gpt2"], soft_cap=cap)


def test_a_head_of_another_kind_and_one_before_the_embedding_are_refused():
    class Bare(Llama):
        def add_head(self):
            self.head = VocabParallelHead(self.config.vocab_size, self.config.hidden_size)

    class Early(GPT2):
        def add_embedding(self):
            self.add_head()

    with pytest.raises(UserError, match="head is VocabParallelHead: it must be a Language"):
        Bare.build(MODELS["llama"], context())
    with pytest.raises(UserError, match="call add_embedding"):
        Early.build(MODELS["gpt2"], context())
