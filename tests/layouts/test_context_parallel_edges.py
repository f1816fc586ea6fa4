"""Context parallelism where its ranks do different things: classifiers, float16's overflow,
dropout, and a rank that fails alone."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo.layers import Dropout
from megazoo.layers import attention as attention_module
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel import failure
from tests.support.context_parallel import (
    TOKENS,
    assert_gradients_equal,
    batch_of,
    cp_name,
    model_in,
    parts_of_gradients,
    rows_of_replica,
)
from tests.support.training import MODELS, context, tiny_config, world

GPT2 = tiny_config(layers=2)
LLAMA = replace(MODELS["llama"], layers=2)
CP2, CP3, ULYSSES = dict(cp=2), dict(cp=3), dict(cp=2, method="ulysses")
TP, PP, DP = dict(tp=2, cp=2, sp=True), dict(pp=2, cp=2), dict(dp=2, cp=2)

PAD = 60
PROBLEMS = {  # labels of four rows; sixteen labels are as many as the padded sequence has tokens
    "single_label_classification": (3, torch.tensor([2, -100, 0, 1])),
    "multi_label_classification": (16, (torch.arange(64) % 3 == 1).float().view(4, 16)),
    "regression": (1, torch.tensor([0.5, -2.0, 1.0, 3.0])),
}


def classified(problem: str, layout: dict, loss_fn=None):
    """Loss, count, logits and gradients of a classifier whose rows end on either cp rank: at
    tokens 12 and 3 on the first of two, 6 and 8 on the second."""
    number, labels = PROBLEMS[problem]
    ctx = context(**layout)
    config = replace(LLAMA, num_labels=number, pad_token_id=PAD, problem_type=problem)
    model = model_in(config, ctx)
    ids = batch_of(0)["input_ids"].clamp(max=PAD - 1)
    ends = torch.tensor([[13], [7], [4], [9]])
    ids = ids.masked_fill(torch.arange(TOKENS) >= ends, PAD)
    batch = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}
    batch = rows_of_replica(batch, ctx)
    logits = model(**batch).logits
    logits = None if logits is None else logits.detach()
    count = 1 if ctx.dp_size > 1 else 2
    loss = model.train_batch(**batch, num_microbatches=count, loss_fn=loss_fn)
    gradients = parts_of_gradients(model)
    evaluated, counted = model.eval_batch(**batch, return_count=True)
    return (loss.item(), evaluated.item(), counted.item()), (model.has_last, logits), gradients


def own_loss(logits, labels):
    return (logits.squeeze(-1) - 2 * labels).abs().mean()


@pytest.mark.parametrize("layout", [CP2, CP3, ULYSSES, TP, PP, DP], ids=cp_name)
@pytest.mark.parametrize(
    ("problem", "loss_fn"), [*((problem, None) for problem in PROBLEMS), ("regression", own_loss)]
)
def test_a_classifier_is_trained_as_in_one_process(ranks, problem, loss_fn, layout):
    numbers, (_, logits), gradients = classified(problem, {}, loss_fn)
    results = ranks(classified, world(layout), problem, layout, loss_fn)
    size = len(logits) // layout.get("dp", 1)
    for rank, (ours, (has_last, theirs), _) in enumerate(results):
        assert ours == pytest.approx(numbers, rel=1e-5)
        assert (theirs is not None) == has_last
        if has_last:
            replica = rank // 2 if "dp" in layout else 0
            mine = logits[replica * size : (replica + 1) * size]
            torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=1e-5)
    assert_gradients_equal([parts for *_, parts in results], gradients)


def overflow_on_one_rank(layout: dict, broken: int, zero: int):
    """Three steps in float16; in the second one rank's gradient overflows."""
    ctx = context(**layout)
    model = model_in(GPT2, ctx, dtype=torch.float16)
    optimizer = megazoo.optim.AdamW(model, loss_scale=LossScale(256.0, hysteresis=1), zero=zero)
    layer = model.layers[str(min(map(int, model.layers)))]
    history = []
    for step in range(3):
        if step == 1 and ctx.rank == broken:
            grow = layer.register_forward_hook(lambda _, __, x: _overflowing(x))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model.train_batch(**rows_of_replica(batch_of(step), ctx))
        if step == 1 and ctx.rank == broken:
            grow.remove()
        norm = optimizer.step().item()
        changed = not all(map(torch.equal, before, model.parameters()))
        history.append((optimizer.skipped, norm, changed, optimizer.loss_scale.value))
    return history


def _overflowing(x: torch.Tensor) -> torch.Tensor:
    """Return x, whose gradient is infinite."""
    x.register_hook(lambda gradient: gradient * torch.inf)
    return x


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("layout", "broken"), [(CP2, 1), (PP, 3), (DP, 2)], ids=cp_name)
def test_an_overflow_on_one_cp_rank_skips_the_step_on_all(ranks, layout, broken, zero):
    for history in ranks(overflow_on_one_rank, world(layout), layout, broken, zero):
        assert [skipped for skipped, *_ in history] == [False, True, False]
        assert [changed for _, _, changed, _ in history] == [True, False, True]
        assert history[1][1] == torch.inf
        assert history[1][3] == history[0][3] / 2


class _Watched:
    """Attention kernels and dropouts within this block: which generator state each draws from, and
    the masks outside of attention."""

    def __init__(self, model):
        self.model, self.attention, self.masks = model, [], {}

    def __enter__(self):
        for name, module in self.model.named_modules():
            if isinstance(module, Dropout) and not module.parallel:
                module.register_forward_hook(
                    lambda _, __, y, name=name: self.masks.setdefault(name, []).append(y == 0)
                )
        attend = F.scaled_dot_product_attention

        def watched(*tensors, dropout_p=0.0, **options):
            assert dropout_p == 0.5
            self.attention.append(torch.get_rng_state().sum(dtype=torch.int64).item())
            return attend(*tensors, dropout_p=dropout_p, **options)

        self._patch = mock.patch.object(attention_module.F, "scaled_dot_product_attention", watched)
        self._patch.__enter__()
        return self

    def __exit__(self, *_):
        self._patch.__exit__(None, None, None)


def drawn(layout: dict, recompute: tuple):
    model = model_in(tiny_config(layers=2, dropout=0.5), context(**layout), recompute=recompute)
    with _Watched(model) as watched:
        loss = model.train_batch(**batch_of(0), step=3)
    norms = [parameter.grad.norm().item() for parameter in model.parameters()]
    return watched.attention, watched.masks, (loss.item(), norms)


@pytest.mark.parametrize("layout", [CP2, ULYSSES, TP], ids=cp_name)
def test_dropout_differs_between_cp_ranks_and_chunks_and_can_be_drawn_again(ranks, layout):
    plain = ranks(drawn, world(layout), layout, ("none",))
    again = ranks(drawn, world(layout), layout, ("full", 2))
    selective = ranks(drawn, world(layout), layout, ("selective",))
    chunks = 1 if layout == ULYSSES else 2
    states = [state for attention, *_ in plain for state in attention]
    assert len(states) == world(layout) * 2 * chunks  # two layers
    assert len(set(states)) == len(states), "two draws are alike"
    other = len(plain) // 2  # of the other cp rank, and the first tp rank
    for site, masks in plain[0][1].items():
        assert not torch.equal(masks[0], plain[other][1][site][0]), site
        halves = masks[0].chunk(2, dim=1)
        assert not torch.equal(*halves), "the two chunks have one mask"
    for mine, whole, part in zip(plain, again, selective, strict=True):
        assert whole[0] == mine[0] * 2
        assert part[0] == _each_layer_twice(mine[0], chunks)
        for theirs in (whole, part):
            assert theirs[2][0] == pytest.approx(mine[2][0], rel=1e-6)
            assert theirs[2][1] == pytest.approx(mine[2][1], rel=1e-5)


def _each_layer_twice(states: list, chunks: int) -> list:
    """The states of selective recomputation: forward, then each layer again, the last one first."""
    return states + states[chunks:] + states[:chunks]


def told(layout: dict, broken: int, kind: str):
    """What a rank hears where another one fails alone."""
    ctx = context(**layout)
    model = model_in(GPT2, ctx)
    if ctx.rank == broken:
        layer = model.layers[str(min(map(int, model.layers)))]
        layer.register_forward_pre_hook(_fail)
    try:
        with mock.patch.object(failure, "PATIENCE", 0.3):
            _call(model, kind)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.distributed.destroy_process_group()
    return "nothing"


def _fail(*_):
    raise RuntimeError("a rank's own trouble")


def _call(model, kind: str) -> None:
    batch = rows_of_replica(batch_of(0), model.ctx)
    if kind == "train_batch":
        model.train_batch(**batch)
    elif kind == "forward":
        model(batch["input_ids"])
    else:
        model.generate(batch_of(0)["input_ids"][:, :5], max_new_tokens=3)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("train_batch", CP2), ("train_batch", DP), ("forward", TP), ("generate", PP)],
    ids=cp_name,
)
def test_all_hear_of_an_error_on_one_cp_rank(ranks, kind, layout):
    broken = world(layout) - 1
    for rank, answer in enumerate(ranks(told, world(layout), layout, broken, kind)):
        if rank == broken:
            assert answer == "RuntimeError: a rank's own trouble"
        else:
            assert answer == f"UserError: rank {broken} failed: RuntimeError: a rank's own trouble"
