"""Sequence classifiers against transformers: logits, losses, training in any layout, import and
export."""

import json
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, GPT2LMHeadModel

import megazoo
from megazoo.errors import UserError
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.formats.resharding import write_shards
from megazoo.models.pretrained import open_source
from tests.support.classification import LABELS, PAD, batches, labels_for
from tests.support.sampling import marked_slow
from tests.support.training import (
    context,
    layout_name,
    make_batch,
    randomized_,
    replica_rows,
    run_in_layout,
    tiny_config,
    world,
)
from tests.support.transformers_models import config_of

FAMILIES = ["gpt2", "llama", "mpt"]
PROBLEMS = {
    "single_label_classification": LABELS,
    "multi_label_classification": LABELS,
    "regression": 1,
}
LAYOUTS = [
    {},
    dict(tp=2),
    dict(pp=2),
    dict(tp=2, pp=2),
    dict(tp=2, sp=True),
    dict(tp=2, pp=2, sp=True),
]


def hugging_face_classifier(family: str, **fields):
    config = config_of(family, 4, **{"num_labels": LABELS, "pad_token_id": PAD, **fields})
    torch.manual_seed(0)
    return randomized_(AutoModelForSequenceClassification.from_config(config))


def outputs(paths, problem, layout):
    ctx, results = context(**layout), {}
    for family, path in paths.items():
        model = megazoo.from_pretrained(path, ctx).eval()
        for kind, (ids, mask) in batches().items():
            out = model(ids, attention_mask=mask, labels=labels_for(problem), return_logits=True)
            results[family, kind] = (
                out.loss.detach(),
                None if out.logits is None else out.logits.detach(),
            )
    return results


@pytest.mark.parametrize(
    ("problem", "layout"),
    marked_slow(
        [
            (problem, layout)
            for problem, layout in product(PROBLEMS, LAYOUTS)
            # the losses differ on the last stage only
            if problem == "single_label_classification" or layout in (LAYOUTS[0], LAYOUTS[-1])
        ],
        lambda _, case: (
            (list(PROBLEMS).index(case[0]), LAYOUTS.index(case[1])) not in [(0, 0), (1, 0), (2, 5)]
        ),
        name=lambda case: f"{case[0]}-{layout_name(case[1])}",
    ),
)
def test_logits_and_loss_equal_transformers(ranks, tmp_path, layout, problem):
    expected, paths = {}, {}
    for family in FAMILIES:
        hf = hugging_face_classifier(family, num_labels=PROBLEMS[problem])
        paths[family] = tmp_path / family
        hf.save_pretrained(paths[family])
        for kind, (ids, mask) in batches().items():
            with torch.no_grad():
                expected[family, kind] = hf(ids, attention_mask=mask, labels=labels_for(problem))
    for results in run_in_layout(ranks, outputs, layout, paths, problem):
        for case, (loss, logits) in results.items():
            assert abs(loss - expected[case].loss) < 1e-5 * max(1, expected[case].loss), case
            assert logits is None or (logits - expected[case].logits).abs().max() < 5e-5, case
    assert results["gpt2", "right"][1].shape == (4, PROBLEMS[problem])


def fine_tune(path, layout, steps=4, schedule="1f1b"):
    """Losses, and gradient norms, of a classifier made of a language model."""
    ctx = context(**layout)
    model = megazoo.from_pretrained(path, ctx, num_labels=LABELS, seed=5)
    optimizer = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=1.0)
    history = []
    for step in range(steps):
        ids, _ = make_batch(step, vocab=60)
        ids[:, 10:] = torch.where(torch.arange(8)[:, None] % 2 == 0, PAD, ids[:, 10:])
        labels = (ids[:, 0] % LABELS).masked_fill(torch.arange(8) == step, -100)
        rows = [replica_rows(tensor, ctx) for tensor in (ids, labels)]
        loss = model.train_batch(
            rows[0], labels=rows[1], num_microbatches=len(rows[0]) // 2, schedule=schedule
        )
        history.append((loss.item(), optimizer.step().item()))
    with torch.no_grad():
        history.append((model.eval_batch(rows[0], labels=rows[1], num_microbatches=2).item(), 0.0))
    return history


# the layouts of a classifier are the same for all families
@pytest.mark.parametrize("family", marked_slow(FAMILIES, lambda _, name: name != "llama"))
def test_a_fine_tune_follows_one_process(ranks, tmp_path, family):
    language_model = megazoo.from_config(
        megazoo.models.config_from_hugging_face(config_of(family, 4).to_dict()), seed=1
    )
    language_model.generation = {"pad_token_id": PAD}
    language_model.sidecar_files = {
        "generation_config.json": json.dumps({"pad_token_id": PAD}).encode()
    }
    language_model.save_parallelized(tmp_path / "lm")
    expected = torch.tensor(fine_tune(tmp_path / "lm", {}))
    layouts = (
        [dict(tp=2, pp=2), dict(tp=2, dp=2, sp=True)] if family == "llama" else [dict(tp=2, pp=2)]
    )
    for layout in layouts:
        for history in ranks(fine_tune, world(layout), tmp_path / "lm", layout):
            assert ((torch.tensor(history) - expected).abs() < 1e-5 * expected.clamp(min=1)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_give_every_tensor_back(tmp_path, family):
    hf = hugging_face_classifier(family, problem_type="multi_label_classification")
    hf.save_pretrained(tmp_path / "hf")
    write_shards(open_source(tmp_path / "hf"), tmp_path / "shards", tp=2, pp=2)
    write_hugging_face(open_source(tmp_path / "shards"), tmp_path / "back")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert again.state_dict().keys() == hf.state_dict().keys()
    assert all(
        torch.equal(tensor, again.state_dict()[name]) for name, tensor in hf.state_dict().items()
    )
    for field in ("num_labels", "problem_type", "pad_token_id", "architectures"):
        assert getattr(again.config, field) == getattr(hf.config, field) or field == "architectures"
    assert again.config.architectures == [type(hf).__name__]


def test_two_labels_are_the_default_and_ours_come_back(tmp_path):
    hugging_face_classifier("gpt2", num_labels=2).save_pretrained(tmp_path)
    assert open_source(tmp_path).config.num_labels == 2
    config = tiny_config(num_labels=5, problem_type="regression", pad_token_id=3)
    megazoo.from_config(config).save_parallelized(tmp_path / "ours")
    assert open_source(tmp_path / "ours").config == config


def test_labels_and_rows_that_cannot_be_are_refused(tmp_path):
    ids = torch.randint(0, 60, (2, 5))
    model = megazoo.from_config(tiny_config(num_labels=3))
    with pytest.raises(UserError, match="needs pad_token_id in its config"):
        model(ids)
    assert model(ids[:1]).logits.shape == (1, 3)
    model = megazoo.from_config(tiny_config(num_labels=3, pad_token_id=60))
    for labels, message in {
        (1, 3): "label 3 is outside the range 0 to 2",
        (1, 2, 0): r"labels have the shape \[3\]; single_label_classification needs \[2\]",
        (0.5, 1.0): r"labels have the shape \[2\]; multi_label_classification needs \[2, 3\]",
    }.items():
        with pytest.raises(UserError, match=message):
            model(ids, labels=torch.tensor(labels))
    with pytest.raises(UserError, match="classifier takes labels, not targets"):
        model.train_batch(ids, targets=ids)
    model.save_parallelized(tmp_path / "three")
    with pytest.raises(UserError, match="is a classifier with 3 labels, not 4"):
        megazoo.from_pretrained(tmp_path / "three", num_labels=4)
    with pytest.raises(UserError, match="classifier"):
        model.generate(ids)
    with pytest.raises(
        UserError, match="problem_type 'regresion' is not supported; supported: regression"
    ):
        megazoo.from_config(tiny_config(num_labels=3, problem_type="regresion"))
    with pytest.raises(UserError, match="loss_fn must return one number"):
        megazoo.from_config(tiny_config()).train_batch(
            ids, labels=ids, loss_fn=lambda logits, labels: logits
        )


def test_the_config_says_what_pads(tmp_path):
    hf = GPT2LMHeadModel(config_of("gpt2", pad_token_id=5))
    hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert megazoo.from_pretrained(tmp_path, num_labels=2).config.pad_token_id == 5
    assert megazoo.from_pretrained(tmp_path, num_labels=2, pad_token_id=7).config.pad_token_id == 7


# A loss of one's own.


def shifted_cross_entropy(logits, labels):
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
    )


class Weighted(torch.nn.Module):
    """A module: a mean over rows of the distance between a learned scale's logits and the
    labels."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, logits, labels):
        return (self.scale * logits[:, -1, :2].float() - labels).square().mean()


def own_loss(layout, kind):
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(), ctx, seed=3)
    ids, targets = make_batch(0, sequence=15)
    labels = torch.cat([torch.full((8, 1), -100), targets[:, :-1]], dim=1)
    loss_fn = {"built in": None, "own": shifted_cross_entropy, "module": Weighted()}[kind]
    if kind == "module":
        labels = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    ids, labels = replica_rows(ids, ctx), replica_rows(labels, ctx)
    loss = model.train_batch(ids, labels=labels, num_microbatches=len(ids) // 2, loss_fn=loss_fn)
    optimizer = megazoo.optim.AdamW(model, clip_grad=1.0)
    return loss.item(), optimizer.step().item()


@pytest.mark.parametrize(
    "layout", [{}, dict(tp=2, pp=2), dict(tp=2, dp=2, sp=True), dict(pp=2, dp=2)], ids=layout_name
)
def test_a_loss_of_ones_own(ranks, layout):
    expected = torch.tensor(own_loss({}, "built in"))
    module = torch.tensor(own_loss({}, "module"))
    for result in run_in_layout(ranks, own_loss, layout, kind="own"):
        assert (torch.tensor(result) - expected).abs().max() < 1e-5
    for result in run_in_layout(ranks, own_loss, layout, kind="module"):
        assert (torch.tensor(result) - module).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_of_ones_own_in_low_precision(dtype):
    ids = torch.randint(0, 61, (16, 600), generator=torch.Generator().manual_seed(1))
    losses = []
    for loss_fn in (None, shifted_cross_entropy):
        config = tiny_config(max_positions=600, layers=1)
        model = megazoo.from_config(config, dtype=dtype, seed=3)
        optimizer = megazoo.optim.AdamW(model)
        losses.append(
            (model.train_batch(ids, labels=ids, loss_fn=loss_fn).item(), optimizer.step().item())
        )
    assert (torch.tensor(losses[0]) - torch.tensor(losses[1])).abs().max() < 1e-3


def classifier_losses(layout):
    """Labels on the last stage only, of a loss of one's own too."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(num_labels=3, pad_token_id=60), ctx, seed=3)
    ids = make_batch(0)[0][:4]
    own = torch.tensor([0.5, -1.0, 2.0, 0.0])
    results = []
    for labels, loss_fn in (
        (torch.tensor([0, 2, 1, 0]), None),
        (own, lambda x, y: (x[:, 0] - y).square().mean()),
    ):
        given = {"input_ids": ids} if model.stages[0].first else {}
        given |= {"labels": labels} if model.stages[-1].last else {}
        results.append(model.train_batch(**given, num_microbatches=2, loss_fn=loss_fn).item())
    return results


def test_labels_on_the_last_stage_alone(ranks):
    expected = classifier_losses({})
    for results in ranks(classifier_losses, 2, dict(pp=2)):
        assert torch.allclose(torch.tensor(results), torch.tensor(expected), atol=1e-5)


def refusals(layout):
    """What each rank says of a classifier that can't find the ends of rows, and of a token that is
    not there."""
    from megazoo.evaluation.scoring import score

    said, ctx = [], context(**layout)
    ids = torch.randint(0, 60, (4, 5))
    bad = ids.clone()
    bad[0, 0] = 99
    for config, run in [
        (tiny_config(num_labels=3), lambda model: model(ids)),
        (tiny_config(), lambda model: score(model, bad, ids)),
    ]:
        with pytest.raises(UserError) as refusal:
            run(megazoo.from_config(config, ctx))
        said.append(str(refusal.value))
    return said


def test_every_rank_refuses_what_one_would(ranks):
    for said in [*ranks(refusals, 2, dict(pp=2)), *ranks(refusals, 2, dict(dp=2))]:
        assert "needs pad_token_id" in said[0]
        assert "token id 99 is outside the vocabulary" in said[1]


def test_a_label_of_minus_100_is_a_number_in_a_regression():
    model = megazoo.from_config(tiny_config(num_labels=1, pad_token_id=60), seed=3)
    ids, labels = torch.randint(0, 60, (2, 5)), torch.tensor([-100.0, 2.0])
    out = model(ids, labels=labels, return_logits=True)
    assert torch.allclose(out.loss, (out.logits[:, 0] - labels).square().mean())


def test_a_loss_of_ones_own_is_a_mean_over_the_batch():
    model, loss_fn = megazoo.from_config(tiny_config(), seed=3), Weighted()
    ids, labels = make_batch(0)[0], torch.randn(8, 2)
    loss = model.train_batch(ids, labels=labels, num_microbatches=4, loss_fn=loss_fn)
    gradient = model.layers["0"].mlp.up.weight.grad.clone()
    model.zero_grad()
    plain = loss_fn(model(ids).logits, labels)
    plain.backward()
    assert torch.allclose(loss, plain, atol=1e-6)
    assert torch.allclose(gradient, model.layers["0"].mlp.up.weight.grad, atol=1e-6)
    assert loss_fn.scale.grad is not None
