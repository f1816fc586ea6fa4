"""Context parallelism trains like one process: losses, norms and every gradient, for rotary and
learned positions and ALiBi, packed documents, padding and lengths that don't divide; and a token
changes only what one process changes."""

import random
from functools import cache
from itertools import product

import pytest
import torch

from megazoo.testing import Layout
from tests.support.context_parallel import (
    CHANGED,
    KINDS,
    LENGTHS,
    MODELS,
    UNEVEN,
    logits_of_both,
    named_run,
    one_process,
    positions_that_differ,
    worst_difference,
)

PLAIN = ["cp2", "cp4", "tp2cp2", "tp2cp2+sp", "cp2pp2v2", "cp2pp2+zb-h1", "cp2+zero"]
OF_HEADS = [f"{name}+ulysses" for name in PLAIN]
ALL_CASES = list(product(PLAIN + OF_HEADS, MODELS, KINDS))
# tp 2 can't cut three heads of keys
NOT_BY_TP = ("tp2cp2+sp+ulysses", "llama, 6 heads")
UNEVEN_CASES = [
    case
    for case in product(["cp2+ulysses", "cp4+ulysses", "tp2cp2+sp+ulysses"], UNEVEN, KINDS)
    if case[:2] != NOT_BY_TP
]


def sample() -> list[tuple[str, str, str]]:
    """A case of every layout, with each model and each kind of batch in some."""
    draw = random.Random(1)
    models, kinds = ([], [])
    for chosen, values in ((models, MODELS), (kinds, KINDS)):
        while len(chosen) < len(PLAIN + OF_HEADS):
            chosen += draw.sample(list(values), len(values))
    return list(zip(PLAIN + OF_HEADS, models, kinds, strict=False))


def check(ranks, layout: str, model: str, kind: str):
    layout = Layout.named(layout)
    results = ranks(named_run, layout.ranks, model, layout, kind)
    assert all(history == results[0][0] for history, _ in results), "ranks disagree"
    worst, what = worst_difference(results, one_process(model, kind))
    assert worst < 1e-5, what


@pytest.mark.parametrize(("layout", "model", "kind"), sample())
def test_training_equals_one_process(ranks, layout, model, kind):
    check(ranks, layout, model, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model", "kind"), ALL_CASES)
def test_training_equals_one_process_in_all_cases(ranks, layout, model, kind):
    check(ranks, layout, model, kind)


@pytest.mark.parametrize(("layout", "model", "kind"), random.Random(6).sample(UNEVEN_CASES, 4))
def test_heads_need_not_divide(ranks, layout, model, kind):
    """Ranks with more heads than others train as one process, too."""
    check(ranks, layout, model, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model", "kind"), UNEVEN_CASES)
def test_heads_need_not_divide_in_all_cases(ranks, layout, model, kind):
    check(ranks, layout, model, kind)


@cache
def logits_of_one_process() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return logits_of_both(Layout())


@pytest.mark.parametrize("layout", ["cp2", "cp4", "cp2+ulysses", "cp4+ulysses", "tp2cp2+sp"])
def test_a_token_changes_only_its_documents_later_positions(ranks, layout):
    """To the bit: what a token may not see has a weight of zero."""
    layout = Layout.named(layout)
    for outputs in ranks(logits_of_both, layout.ranks, layout):
        for name, (before, after) in outputs.items():
            expected = logits_of_one_process()[name]
            torch.testing.assert_close(before, expected[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(after, expected[1], atol=1e-5, rtol=1e-5)
            later = list(range(CHANGED, LENGTHS[0]))
            assert positions_that_differ(*expected) == later, name
            assert positions_that_differ(before, after) == later, name
