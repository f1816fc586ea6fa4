"""The check of layouts finds every mistake of its gallery, and names it; and each of its parts is
needed for one of them."""

import re
from unittest import mock

import pytest

from megazoo.errors import UserError
from megazoo.programs import check_parallel as tool
from megazoo.testing import check, gallery, resume
from megazoo.testing.causes import Comparison
from megazoo.testing.gallery import BUGS, named
from megazoo.testing.gallery.table import verdict_on
from megazoo.testing.resume import ResumeComparison
from tests.docs import refresh_docs
from tests.support.sampling import sampled

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
OF_RESUME = {
    "_progress": "Number of updates that is not loaded",
    "_loaded": "N27",
    "_samples": "N36",
    "_rates": "N28",
    "_dropout": "N35",
    "_losses": "A value of the config that is lost when a run is resumed",
    "_scale": "Loss scale that is not loaded",
    "_states": "Moments that begin again at the first step after resuming",
}
ALL_PARTS = [
    *((Comparison, part, bug) for part, bug in PARTS.items()),
    *((ResumeComparison, part, bug) for part, bug in OF_RESUME.items()),
    (check, "differences", "N22"),
    (resume, "samples_are_continued", "Samples skipped if the batch size changes"),
]


def title_of(bug) -> str:
    return bug.title


def outcome_of(bug):
    (outcome,) = gallery.self_test([bug])
    return outcome


@pytest.mark.parametrize("bug", sampled(BUGS, len(BUGS) // 10, seed=27, name=title_of))
def test_a_planted_bug_is_found_and_named(bug):
    outcome = outcome_of(bug)
    assert outcome.found, outcome.cause
    is_error = str(outcome.cause).startswith("it ends with")  # it has no usual cause
    assert outcome.usual or is_error or bug.layout == "transformers"


@pytest.mark.parametrize(("owner", "part", "bug"), sampled(ALL_PARTS, 2, seed=1))
def test_without_a_part_of_the_check_a_bug_is_missed(owner, part, bug):
    with mock.patch.object(owner, part, return_value=iter(())):
        outcome = outcome_of(named(bug))
    assert not outcome.found, outcome.cause


def test_every_bug_can_be_planted():
    for bug in gallery.BUGS:
        with bug.plant():
            pass


def test_all_published_mistakes_are_there():
    """Thirty of dense models, those of 2026 that can be planted, ten of mixtures of experts,
    five of losses, and eight of ZeRO-2 and 3."""
    unplanted = {5, 14, 17, 18, 24, 25, 38, 48, 49}
    new = sorted(set(range(1, 50)) - unplanted)
    expected = {str(n) for n in range(1, 31)} | {f"E{n}" for n in range(1, 11)}
    expected |= {f"N{n}" for n in new} | {f"P{n}" for n in range(1, 6)}
    expected |= {f"Z{n}" for n in range(1, 9)}
    assert {number.rstrip("abc") for number in BY_NUMBER} == expected
    assert len({bug.title for bug in BUGS}) == len(BUGS)
    assert all(bug.link.startswith("https://") for bug in BY_NUMBER.values())


def test_the_readme_has_the_number_of_bugs():
    assert f"plants {len(BUGS)} such bugs" in refresh_docs.README.read_text()


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
    "bug", sampled([bug for bug in BUGS if bug.layout != "transformers"], 1, seed=1, name=title_of)
)
def test_a_layout_without_the_bug_passes(bug):
    """So what is told of a planted one comes from it."""
    verdict = verdict_on(bug)
    assert verdict.passed, verdict.cause


def test_the_self_test_takes_no_other_flags():
    with pytest.raises(UserError, match=r"^--self-test uses fixed models"):
        tool.main(["--self-test", "--model", "gpt2"])
