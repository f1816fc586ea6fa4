"""The check of layouts finds every mistake of its gallery, and names it; and each of its parts is
needed for one of them."""

import random
import re
from unittest import mock

import pytest

from megazoo.errors import UserError
from megazoo.programs import check_parallel as tool
from megazoo.testing import check_parallel, gallery
from megazoo.testing.causes import Comparison
from megazoo.testing.gallery import BUGS
from tests.docs import refresh_docs
from tests.support.sampling import marked_slow, sampled

BY_NUMBER = {bug.number: bug for bug in BUGS if bug.number}
# A part of the check, and a bug that only it finds, or names.
PARTS = {
    "_parameters": "25a",
    "_activations": "10",
    "_logits": "9a",
    "_dropout": "16a",
    "_labels": "5a",
    "_loss": "3",
    "_auxiliary": "E9",
    "_gradients": "6",
    "_norm": "19",
    "_weights": "24a",
    "_optimizer": "20b",
    "_overflow": "21b",
}


def drawn_third() -> set[str]:
    """The titles of a third of the gallery: the bugs of PARTS, so that each part of the check is
    used, and others."""
    of_parts = [bug for bug in BUGS if bug.number in PARTS.values()]
    others = [bug for bug in BUGS if bug not in of_parts]
    drawn = random.Random(27).sample(others, len(BUGS) // 3 - len(of_parts))
    return {bug.title for bug in of_parts + drawn}


THIRD = drawn_third()


def outcome_of(bug):
    (outcome,) = gallery.self_test([bug])
    return outcome


def title_of(bug) -> str:
    return bug.title


@pytest.mark.parametrize(
    "bug", marked_slow(BUGS, lambda _, bug: bug.title not in THIRD, name=title_of)
)
def test_a_planted_bug_is_found_and_named(bug):
    outcome = outcome_of(bug)
    assert outcome.found, outcome.cause
    assert outcome.usual or bug.layout == "transformers"


@pytest.mark.parametrize("part", sampled(PARTS, 2, seed=1))
def test_without_a_part_of_the_check_a_bug_is_missed(part):
    with mock.patch.object(Comparison, part, return_value=()):
        outcome = outcome_of(BY_NUMBER[PARTS[part]])
    assert not outcome.found, outcome.cause


def test_all_published_mistakes_are_there():
    """Thirty of dense models, those of 2026 that the check finds, and nine of mixtures of
    experts."""
    new = [*range(1, 5), *range(6, 14), 15, 16, 19, 20, 23, 32, 39, *range(41, 45), 46, 47]
    expected = {str(n) for n in range(1, 31)} | {f"E{n}" for n in range(1, 10)}
    expected |= {f"N{n}" for n in new}
    assert {number.rstrip("abc") for number in BY_NUMBER} == expected
    assert len({bug.title for bug in BUGS}) == len(BUGS)
    assert all(bug.link.startswith("https://") for bug in BY_NUMBER.values())


def test_the_page_has_what_the_self_test_prints():
    """But for how long it took."""
    rows = refresh_docs.gallery_rows()
    assert len(rows) == len(BUGS), "python -m tests.docs.refresh_docs --self-test"
    for row, bug in zip(rows, BUGS, strict=True):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert cells[:2] == [bug.number, bug.title]
        assert cells[2] == (f"[{bug.source}]({bug.link})" if bug.link else "")
        assert cells[4] == "yes"
        assert re.match(bug.told, cells[5])


@pytest.mark.parametrize(
    "bug", sampled([bug for bug in BUGS if bug.layout != "transformers"], 2, seed=1, name=title_of)
)
def test_a_layout_without_the_bug_passes(bug):
    """So what is told of a planted one comes from it."""
    (verdict,) = check_parallel(
        bug.config, [bug.layout], lora_rank=bug.lora_rank, optimizer=bug.optimizer
    )
    assert verdict.passed, verdict.cause


def test_the_self_test_takes_no_other_flags():
    with pytest.raises(UserError, match=r"^--self-test uses fixed models"):
        tool.main(["--self-test", "--model", "gpt2"])
