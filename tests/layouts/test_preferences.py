"""train_batch(loss=DPO(...)): values and gradients of double precision by hand in every layout, the
numbers of TRL, and what a loss needs of a batch."""

import copy
import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.losses import (
    DPO,
    Distillation,
    TopKDistillation,
    reference_logprobs,
    teacher_activations,
)
from megazoo.testing import Layout
from tests.support.context_parallel import rows_of_replica
from tests.support.layouts import MODELS, model_in, parts_of_gradients, short_pieces, sizes_of
from tests.support.sampling import marked_slow
from tests.support.training import context, tiny_config, worst_gradient

ROWS, TOKENS, VOCABULARY = 8, 13, 61
# Losses of TRL 0.26 with beta 0.3: DPOTrainer.dpo_loss, and CPOTrainer.cpo_loss with simpo_gamma
# 0.5, of these log-probabilities: chosen, rejected, and both under the reference.
LOGPROBS = [-3.5, -8.25, -1.0], [-4.0, -6.5, -9.0], [-3.0, -9.0, -1.5], [-4.25, -6.0, -5.0]
TRL = {
    ("sigmoid", 0.0): [0.8119620084762573, 0.5231232643127441, 0.23050858080387115],
    ("sigmoid", 0.1): [0.7894619703292847, 0.5606232285499573, 0.3655085861682892],
    ("hinge", 0.0): [1.225000023841858, 0.625, 0.0],
    ("ipo", 0.0): [5.840277194976807, 0.17361107468605042, 8.027778625488281],
    ("simpo", 0.0): [0.8833820819854736, 1.3315993547439575, 0.13938674330711365],
    ("simpo", 0.1): [0.8483820557594299, 1.2290992736816406, 0.32938674092292786],
}
VARIANTS = [DPO(), DPO(variant="ipo", beta=0.4), DPO(variant="simpo", beta=2.0, gamma=0.3)]


def batch_of(kind: str) -> dict:
    """Four pairs: rows of uneven answers after a prompt. The third pair has no labels.

    packed: the same answers as documents of fewer rows.
    """
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    place = torch.arange(TOKENS).expand(ROWS, TOKENS)
    ends = torch.tensor([13, 9, 7, 12, 5, 5, 8, 11])[:, None]
    labels = ids.masked_fill((place < 3) | (place >= ends), -100)
    labels[4:6] = -100
    batch = {"input_ids": ids, "labels": labels}
    if "padding" in kind:
        batch["attention_mask"] = (place < ends).long()
    reference = torch.randn(ROWS, generator=generator) - 20
    if kind == "packed":
        return packed(ids, labels, ends[:, 0].tolist(), reference)
    return {**batch, "reference": reference}


def packed(ids, labels, ends: list[int], reference) -> dict:
    """The same rows as documents, without their padding: two pairs in the second row, one in the
    first and third. The last row has only padding."""
    rows = [[0, 1], [4, 5, 6, 7], [2, 3]]
    length = max(sum(ends[number] for number in row) for row in rows) + 1
    batch = {"input_ids": 0, "labels": -100, "document_ids": -1, "position_ids": 0}
    batch = {name: torch.full((len(rows) + 1, length), fill) for name, fill in batch.items()}
    before = torch.zeros(len(rows) + 1, 4)
    for row, numbers in enumerate(rows):
        start = 0
        for place, number in enumerate(numbers):
            here = slice(start, start + ends[number])
            batch["input_ids"][row, here] = ids[number, : ends[number]]
            batch["labels"][row, here] = labels[number, : ends[number]]
            batch["document_ids"][row, here] = place
            batch["position_ids"][row, here] = torch.arange(ends[number])
            before[row, place], start = reference[number], here.stop
    batch["document_ids"][-1] = 0  # a row of padding
    batch["document_ids"][-1, 9:] = 1
    return {**batch, "reference": before}


def by_hand(model, batch: dict, loss: DPO) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean loss and its metrics, in double precision, from all logits."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "reference")}
    logprobs = model(**inputs).logits.double().log_softmax(-1)[:, :-1]
    labels = batch["labels"][:, 1:]
    found = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    sums, counts = found.sum(1), (labels != -100).sum(1)
    values, before = sums, batch["reference"].double()
    if loss.variant in ("ipo", "simpo"):
        values, before = values / counts.clamp(min=1), before / counts.clamp(min=1)
    if loss.variant != "simpo":
        values = values - before
    difference = values[::2] - values[1::2]
    losses = {
        "sigmoid": lambda: -F.logsigmoid(loss.beta * difference),
        "ipo": lambda: (difference - 1 / (2 * loss.beta)) ** 2,
        "simpo": lambda: -F.logsigmoid(loss.beta * difference - loss.gamma),
    }[loss.variant]()
    real = torch.tensor([0, 1, 3])
    shown = {
        "margin": loss.beta * difference, "accuracy": (difference > 0).double(),
        "chosen_reward": loss.beta * values[::2], "rejected_reward": loss.beta * values[1::2],
        "chosen_logprob": sums[::2], "rejected_logprob": sums[1::2],
    }  # fmt: skip
    return losses[real].mean(), {name: each[real].mean().item() for name, each in shown.items()}


@cache
def expected(number: int, kind: str):
    model = copy.deepcopy(model_in(MODELS["llama"], context())).double()
    unpacked = "padding" if kind == "packed" else kind
    loss, metrics = by_hand(model, batch_of(unpacked), VARIANTS[number])
    loss.backward()
    return loss.item(), metrics, parts_of_gradients(model)


def found_in(layout: Layout, kind: str):
    ctx, results = context(**sizes_of(layout)), []
    for loss in VARIANTS:
        model = model_in(MODELS["llama"], ctx)
        batch = rows_of_replica(batch_of(kind), ctx)
        if loss.variant == "simpo":
            del batch["reference"]
        with short_pieces():
            how = {"num_microbatches": 4 // ctx.dp_size, "schedule": layout.schedule}
            value = model.train_batch(**batch, loss=loss, **how)
        metrics, gradients = model.engine.loss_metrics, parts_of_gradients(model)
        evaluated = model.eval_batch(**batch, loss=loss, num_microbatches=2)
        results.append((value.item(), evaluated.item(), metrics, gradients))
        assert model.engine.loss_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    return results


LAYOUTS = ["tp1", "cp2", "tp2pp2+sp", "dp2", "tp2", "pp2+zb-h1", "cp2+ulysses", "pp2v2+zb-v"]


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
@pytest.mark.parametrize("layout", marked_slow(LAYOUTS, lambda number, _: number > 3))
def test_values_and_gradients_are_those_of_double_precision(ranks, layout, kind):
    place = Layout.named(layout)
    results = ranks(found_in, place.ranks, place, kind)
    for number in range(len(VARIANTS)):
        loss, metrics, gradients = expected(number, kind)
        of_ranks = [of_rank[number] for of_rank in results]
        for value, evaluated, shown, _ in of_ranks:
            assert [value, evaluated] == pytest.approx([loss, loss], rel=1e-5)
            assert shown == pytest.approx(metrics, rel=1e-5, abs=1e-5)
        distance, name = worst_gradient([parts for *_, parts in of_ranks], gradients)
        assert distance < 1e-5, name


@pytest.mark.parametrize(("variant", "smoothing"), TRL)
def test_the_losses_are_those_of_trl(variant, smoothing):
    loss = DPO(beta=0.3, variant=variant, label_smoothing=smoothing)
    chosen, rejected, *before = map(torch.tensor, LOGPROBS)
    if variant != "simpo":
        chosen, rejected = chosen - before[0], rejected - before[1]
    found = loss._losses(chosen - rejected)
    torch.testing.assert_close(found, torch.tensor(TRL[variant, smoothing]))


def test_what_a_loss_needs_is_checked():
    model, batch = megazoo.from_config(MODELS["gpt2"]), batch_of("plain")
    reference = batch.pop("reference")
    for more, line in {
        (): "the loss needs the tensors reference, and was given none",
        (("reference", reference), ("other", reference)): "was given reference, other",
        (("reference", reference[:2]),): r"reference has the shape \[2\]: it must begin with \[8\]",
        (("reference", reference), ("num_microbatches", 8)): "has 1 rows, but the loss needs a mul",
    }.items():
        with pytest.raises(UserError, match=line):
            model.train_batch(**batch, loss=DPO(), **dict(more))
    with pytest.raises(UserError, match="needs the tensors none, and was given lables"):
        model.train_batch(**batch, lables=batch["labels"])
    with pytest.raises(UserError, match=r"label_smoothing 0\.5 must be below 0\.5"):
        DPO(label_smoothing=0.5)


def test_packed_rows_hold_whole_pairs():
    model, batch = megazoo.from_config(MODELS["gpt2"]), batch_of("packed")
    batch["document_ids"][0, 25:] = 7
    with pytest.raises(UserError, match="a row has 3 documents, but the loss needs a mul"):
        model.train_batch(**batch, loss=DPO())
    batch = batch_of("packed")
    batch["reference"] = batch["reference"][:, :2]
    with pytest.raises(UserError, match=r"reference has the shape \[4, 2\]: it must begin w"):
        model.train_batch(**batch, loss=DPO())


def test_a_reference_has_no_dropout():
    model, batch = megazoo.from_config(tiny_config(dropout=0.3)).train(), batch_of("padding")
    del batch["reference"]
    found = reference_logprobs(model, num_microbatches=2, **batch)["reference"]
    assert model.training
    expected = reference_logprobs(model.eval(), **batch)["reference"]
    torch.testing.assert_close(found, expected)
    batch |= {"reference": found, "loss": DPO(beta=1.0)}
    assert model.eval_batch(**batch).item() == pytest.approx(math.log(2))  # it is the model
    assert abs(model.train_batch(**batch).item() - math.log(2)) > 0.01


def test_padding_between_documents_matters_only_to_losses_of_pairs():
    batch = batch_of("packed")
    reference = batch.pop("reference")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 3] = 0  # within a document
    model = megazoo.from_config(MODELS["gpt2"])
    with pytest.raises(UserError, match="mark padding with document_ids of -1"):
        model.train_batch(**batch, reference=reference, loss=DPO())
    loss, teacher = Distillation(), teacher_activations(model, **batch)
    vars(loss)["reference_head"] = model.output_head
    model.train_batch(**batch, **teacher, loss=loss)
    assert model.engine.loss_metrics["kl"] == pytest.approx(0, abs=1e-6)


def other_beta(rank_one: bool):
    ctx = context(tp=2)
    model = model_in(MODELS["gpt2"], ctx)
    with pytest.raises(UserError, match="loss"):
        model.train_batch(**batch_of("plain"), loss=DPO(beta=0.1 + 0.1 * ctx.tp_rank))


def test_ranks_agree_on_the_loss(ranks):
    ranks(other_beta, 2, True)


KL = [Distillation(temperature=0.1), Distillation(temperature=0.05, lm_weight=0.25)]


@cache
def expected_kl(number: int):
    """The mean loss, the divergence by torch's kl_div and the gradients, in double precision."""
    loss, batch = KL[number], batch_of("padding")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    student = copy.deepcopy(model_in(MODELS["llama"], context())).double()
    teacher = copy.deepcopy(model_in(MODELS["gpt2"], context())).double()
    labels = batch["labels"][:, 1:]
    counted = labels != -100
    with torch.no_grad():
        wanted = (teacher(**inputs).logits[:, :-1] / loss.temperature).log_softmax(-1)
    logits = student(**inputs).logits[:, :-1]
    found = (logits / loss.temperature).log_softmax(-1)
    kl = F.kl_div(found[counted], wanted[counted], log_target=True, reduction="sum")
    kl = loss.temperature**2 * kl / counted.sum()
    lm = F.cross_entropy(logits[counted], labels[counted])
    value = (1 - loss.lm_weight) * kl + loss.lm_weight * lm
    value.backward()
    return value.item(), {"kl": kl.item(), "lm_loss": lm.item()}, parts_of_gradients(student)


def distilled_in(layout: Layout):
    ctx, results = context(**sizes_of(layout)), []
    for loss in KL:
        model, teacher = (model_in(MODELS[name], ctx) for name in ("llama", "gpt2"))
        batch = rows_of_replica(batch_of("padding"), ctx)
        del batch["reference"]
        count = 4 // ctx.dp_size
        needed = teacher_activations(teacher, num_microbatches=count, **batch)
        if teacher.has_last:
            vars(loss)["reference_head"] = teacher.output_head
        how = {"num_microbatches": count, "schedule": layout.schedule}
        value = model.train_batch(**batch, **needed, loss=loss, **how)
        metrics, gradients = model.engine.loss_metrics, parts_of_gradients(model)
        assert all(parameter.grad is None for parameter in teacher.parameters())
        results.append((value.item(), metrics, gradients))
    return results


@pytest.mark.parametrize("layout", marked_slow(LAYOUTS, lambda number, _: number > 3))
def test_distillation_is_that_of_double_precision(ranks, layout):
    place = Layout.named(layout)
    results = ranks(distilled_in, place.ranks, place)
    for number in range(len(KL)):
        loss, metrics, gradients = expected_kl(number)
        for value, shown, _ in (of_rank[number] for of_rank in results):
            assert value == pytest.approx(loss, rel=1e-5)
            assert shown == pytest.approx(metrics, rel=1e-5)
        parts = [of_rank[number][-1] for of_rank in results]
        distance, name = worst_gradient(parts, gradients)
        assert distance < 1e-5, name


TOP = [(TopKDistillation(), 4), (TopKDistillation(lm_weight=0.25), VOCABULARY)]


def top_of(count: int) -> dict[str, torch.Tensor]:
    """The most likely tokens of a teacher, which is almost certain in the first row."""
    logits = 3 * torch.randn(ROWS, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(3))
    logits[0] *= 30
    values, ids = logits.log_softmax(-1).topk(count)
    return {"teacher_ids": ids, "teacher_logprobs": values}


def divergence(logits: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The divergence of each token, in double precision; of all tokens by torch's kl_div."""
    found, wanted = logits.double().log_softmax(-1), wanted.double()
    if ids.shape[-1] == logits.shape[-1]:
        return F.kl_div(found.gather(-1, ids), wanted, log_target=True, reduction="none").sum(-1)
    rest = (1 - wanted.exp().sum(-1)).clamp(min=0)
    others = found.scatter(-1, ids, -torch.inf).logsumexp(-1)
    top = (wanted.exp() * (wanted - found.gather(-1, ids))).sum(-1)
    return top + torch.xlogy(rest, rest) - rest * others


@cache
def expected_top(number: int):
    (loss, count), batch = TOP[number], batch_of("padding")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    model = copy.deepcopy(model_in(MODELS["llama"], context())).double()
    logits, labels = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
    counted, top = labels != -100, (each[:, :-1] for each in top_of(count).values())
    kl = divergence(logits, *top)[counted].mean()
    lm = F.cross_entropy(logits[counted], labels[counted])
    value = (1 - loss.lm_weight) * kl + loss.lm_weight * lm
    value.backward()
    return value.item(), {"kl": kl.item(), "lm_loss": lm.item()}, parts_of_gradients(model)


def distilled_from_top_in(layout: Layout):
    ctx, results = context(**sizes_of(layout)), []
    for loss, count in TOP:
        model = model_in(MODELS["llama"], ctx)
        batch = rows_of_replica(batch_of("padding") | top_of(count), ctx)
        del batch["reference"]
        how = {"num_microbatches": 4 // ctx.dp_size, "schedule": layout.schedule}
        value = model.train_batch(**batch, loss=loss, **how)
        results.append((value.item(), model.engine.loss_metrics, parts_of_gradients(model)))
    return results


@pytest.mark.parametrize("layout", marked_slow(LAYOUTS, lambda number, _: number > 3))
def test_distillation_from_the_most_likely_tokens_is_that_of_double_precision(ranks, layout):
    place = Layout.named(layout)
    results = ranks(distilled_from_top_in, place.ranks, place)
    for number in range(len(TOP)):
        loss, metrics, gradients = expected_top(number)
        for value, shown, _ in (of_rank[number] for of_rank in results):
            assert value == pytest.approx(loss, rel=1e-5)
            assert shown == pytest.approx(metrics, rel=1e-5)
        parts = [of_rank[number][-1] for of_rank in results]
        distance, name = worst_gradient(parts, gradients)
        assert distance < 1e-5, name


@pytest.mark.parametrize("certain", [0.0, 30.0, 300.0])
@pytest.mark.parametrize(
    "chances", [(0.5, 0.3), (0.7, 0.3), (0.6, 0.4000002), (1.0, 1e-9), (0.9, *[0.012] * 8)]
)
def test_the_rest_is_exact_if_the_student_is_certain(certain, chances):
    logits = torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(1))
    logits[..., 2:4] += certain
    ids = torch.arange(2, 2 + len(chances)).view(1, 1, -1) % 9
    wanted = torch.tensor(chances).log().view(1, 1, -1)
    head = torch.nn.Identity()
    head.ctx, head.task, head.start = context(), SimpleNamespace(vocab_size=9), 0
    named = {"teacher_ids": ids, "teacher_logprobs": wanted}
    found = []
    for compute in (
        lambda x: TopKDistillation().bound(head)._divergences(x, MicroBatch((1, 1), named=named)),
        lambda x: divergence(x, ids, wanted),
    ):
        x = logits.clone().requires_grad_()
        value = compute(x).sum()
        value.backward()
        found.append((value.double().detach(), x.grad))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_what_is_wrong_with_the_most_likely_tokens_is_told():
    model, batch = megazoo.from_config(MODELS["gpt2"]), batch_of("plain")
    del batch["reference"]
    top = top_of(4)
    for changed, line in {
        "teacher_logprobs": r"\[8, 13, 4\], and teacher_logprobs has \[8, 13, 3\]",
        "teacher_ids": f"teacher_ids {VOCABULARY} is outside the vocabulary of {VOCABULARY}",
    }.items():
        other = top["teacher_ids"] + VOCABULARY - top["teacher_ids"].max()
        values = {"teacher_logprobs": top["teacher_logprobs"][..., :3], "teacher_ids": other}
        given = top | {changed: values[changed]}
        with pytest.raises(UserError, match=line):
            model.train_batch(**batch, **given, loss=TopKDistillation())
    with pytest.raises(UserError, match="temperature 2 must be 1 with the most likely tokens"):
        TopKDistillation(temperature=2)
