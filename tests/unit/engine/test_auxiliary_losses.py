"""A layer of a user's that adds to the loss, against the same sum by autograd in one process."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megazoo import UserError
from megazoo.engine.batch import Batch
from megazoo.layers import MLP, Layer, attach_loss
from megazoo.models import gpt2, llama
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.shard import ParameterSpec
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    gradients_of,
    make_batch,
    randomize,
    replica_rows,
    world,
    worst_gradient,
)

NAMES = ("squares", "shares")


class Gate(Layer):
    """Multiplies each token by a number; its square and its share of the row are losses."""

    auxiliary_losses = NAMES

    def __init__(self, size):
        super().__init__()
        self.add_parameter("weight", ParameterSpec((size,), std=0.5))
        self.seen = None  # a list that keeps the losses, for the oracle

    def forward(self, x, batch):
        share = torch.sigmoid((x * self.use("weight")).sum(-1, keepdim=True))
        own = share.float()[..., 0].masked_fill(~batch.is_token(self.ctx), 0.0)
        squares, shares = 3 * own.square().sum(), 5 * own.sum() / (batch.length or 1)
        if self.seen is not None:
            self.seen.append((squares, shares))
        x = attach_loss(x, "squares", squares)
        return attach_loss(x * share, "shares", shares, over="rows")


class Block(llama.Block):
    def __init__(self, config, index):
        super().__init__(config, index)
        if index:  # the first layer, and so perhaps the first stage, has none
            self.gate = Gate(config.hidden_size)

    def forward(self, x, batch, *arguments):
        x = super().forward(x, batch, *arguments)
        return self.gate(x, batch) if hasattr(self, "gate") else x


class Gated(llama.Llama):
    family, Block = "llama", Block


CONFIG = MODELS["llama"]


def built(layout=None, **options):
    return randomize(Gated.build(CONFIG, context(**layout or {}), seed=3, **options))


def odd_batch():
    """Of 15 tokens, which several ranks share only with padding."""
    ids, targets = (tensor[:, :15].clone() for tensor in make_batch(0))
    targets[0, 3:9] = -100
    return ids, targets


def expected() -> tuple[float, dict[str, float], dict]:
    """The loss, the auxiliary losses, and the gradients of their sum, without the engine."""
    model, (ids, targets) = built(), odd_batch()
    batch = model.engine.micro_batches(Batch(ids, targets=targets), 1)[0]
    seen = []
    for module in model.modules():
        if isinstance(module, Gate):
            module.seen = seen
    x = model.forward_stage(ids, batch, model.stages[0])
    loss = F.cross_entropy(model.head.logits(x).flatten(0, 1), targets.flatten())
    squares = sum(each for each, _ in seen) / (targets != -100).sum()
    shares = sum(each for _, each in seen) / len(ids)
    (loss + squares + shares).backward()
    found = dict(zip(NAMES, (squares.item(), shares.item()), strict=True))
    return loss.item(), found, gradients_of(model)


def by_train_batch(model, ids, targets, schedule="1f1b"):
    count = 2 if model.ctx.pp_size > 1 else 1
    return model.train_batch(ids, targets=targets, num_microbatches=count, schedule=schedule).item()


def by_loop(model, ids, targets):
    losses = []
    for out in model.microbatches(ids, targets=targets, num_microbatches=2):
        out.loss.backward()
        losses.append(out.loss.item())
    return sum(losses)


def trained(layout, way, recompute):
    model, (ids, targets) = built(layout).recompute(recompute), odd_batch()
    ids, targets = (replica_rows(tensor, model.ctx) for tensor in (ids, targets))
    options = () if way == "loop" else (way,)
    loss = (by_loop if way == "loop" else by_train_batch)(model, ids, targets, *options)
    found = {name: value.item() for name, value in model.engine.auxiliary_losses.items()}
    return loss, found, gradients_of(model)


CASES = [
    (dict(), "1f1b", "none"),
    (dict(tp=2, sp=True), "1f1b", "full"),
    (dict(pp=2), "zb-h1", "none"),
    (dict(cp=2), "1f1b", "none"),
    (dict(dp=2), "loop", "none"),
    (dict(tp=2, pp=2), "1f1b", "full"),
    (dict(pp=2, v=2), "loop", "full"),
    (dict(tp=2), "gpipe", "none"),
    (dict(pp=2, cp=2), "1f1b", "none"),
    (dict(dp=2, pp=2), "1f1b", "selective"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "way", "recompute"),
    marked_slow(CASES, lambda number, _: number > 6),
)
def test_it_trains_in_every_layout_as_by_autograd(ranks, layout, way, recompute):
    loss, losses, gradients = expected()
    results = ranks(trained, world(layout), layout, way, recompute)
    for ours, found, _ in results:
        assert ours == pytest.approx(loss, rel=1e-5), "the loss is returned without them"
        assert found == pytest.approx(losses, rel=1e-5)
    distance, name = worst_gradient([found for *_, found in results], gradients)
    assert distance < 1e-5, name


def test_the_loss_of_a_call_goes_backward_with_them():
    ids, _ = make_batch(0)
    for recompute in ("none", "selective", "full"):
        by_batch, by_call = built().recompute(recompute).eval(), built().recompute(recompute).eval()
        loss = by_batch.train_batch(ids, labels=ids)
        found = by_call(ids, labels=ids).loss
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        (2 * found).backward()
        doubled = {
            name: [(box, 2 * part) for box, part in pieces]
            for name, pieces in gradients_of(by_batch).items()
        }
        assert worst_gradient([gradients_of(by_call)], doubled)[0] < 1e-5


def test_logits_without_labels_go_backward_without_them():
    """A custom loss of the logits: its gradient is that of the same layers without losses."""
    (ids, _), found = make_batch(0), []
    for name in ("attach_loss", None):
        with mock.patch(f"{__name__}.{name}", lambda x, *_, **__: x) if name else nullcontext():
            model = built().eval()
            model(ids).logits.square().mean().backward()
            found.append(gradients_of(model))
    assert worst_gradient([found[0]], found[1])[0] == 0


def test_a_loss_scale_scales_them():
    ids, _ = make_batch(0)
    plain, scaled = built(), built()
    scaled.engine.loss_scale = LossScale(1024.0)
    for model in (plain, scaled):
        model.train_batch(ids, labels=ids, num_microbatches=2)
    assert worst_gradient([gradients_of(scaled)], gradients_of(plain))[0] < 1e-5


def test_outside_of_training_there_are_none():
    model, (ids, _) = built(), make_batch(0)
    model.train_batch(ids, labels=ids)
    before = dict(model.engine.auxiliary_losses)
    model.eval_batch(ids, labels=ids)
    model.generate(ids[:, :4], max_new_tokens=2)
    assert model.engine.auxiliary_losses == before


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda x: attach_loss(x, "other", x.sum()), r"'other' is not declared"),
        (lambda x: attach_loss(x, "shares", x.sum(), over="steps"), "'steps': use labels, rows or"),
    ],
)
def test_an_unknown_name_or_mean_is_refused(wrong, error):
    model, (ids, _) = built(), make_batch(0)
    model.layers["1"].gate.forward = lambda x, batch: wrong(x)
    with pytest.raises(UserError, match=error):
        model.train_batch(ids, labels=ids)


class Sparse(MLP):
    """An MLP whose activations are an auxiliary loss, made in what selective runs again."""

    auxiliary_losses = ("sparsity",)

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, self.counted, **options)

    @staticmethod
    def counted(inner):
        inner = torch.tanh(inner)
        return attach_loss(inner, "sparsity", inner.float().square().sum())


class SparseBlock(gpt2.Block):
    def __init__(self, config, index):
        super().__init__(config, index)
        self.mlp = Sparse(config.hidden_size, config.ffn_size)


class OfSparse(gpt2.GPT2):
    family, Block = "gpt2", SparseBlock


def test_a_loss_within_a_recomputed_function_keeps_its_gradient():
    (ids, _), found = make_batch(0), {}
    for mode in ("none", "selective", "full"):
        model = randomize(OfSparse.build(MODELS["gpt2"], context(), seed=3)).recompute(mode)
        model.train_batch(ids, labels=ids)
        found[mode] = gradients_of(model), model.engine.auxiliary_losses["sparsity"].item()
    for mode in ("selective", "full"):
        assert worst_gradient([found[mode][0]], found["none"][0])[0] < 1e-6
        assert found[mode][1] == found["none"][1]
