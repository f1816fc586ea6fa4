"""The benchmark of growth: its laws by hand-made numbers, and every curve of it on tiny sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.sampling import marked_slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")


def line(first=0):
    from benchmarks.laws import Law

    return Law("a + b x", (lambda _: 1.0, lambda x: x), first)


def test_a_law_is_fitted_to_all_points_but_the_last():
    """7 + 3 x, and at the last point 10 % more than its 37."""
    law, sizes, values = line(), [1, 2, 4, 10], [10, 13, 19, 40.7]
    assert law.fit(sizes, values)(100) == pytest.approx(307)
    assert law.departure(sizes, values) == pytest.approx(0.1)


def test_a_law_may_be_fitted_to_fewer_points():
    """1 + x through two points says 5 at 4, of which 4 is 80 %."""
    assert line(2).departure([1, 2, 3, 4], [2, 3, 100, 4]) == pytest.approx(-0.2)


def test_relative_errors_count_and_points_of_zero_do_not():
    """Of a constant that should be 1 and 2 the errors a - 1 and a / 2 - 1 have their least squares
    at 1.2; the middle of 1 and 2 is not it."""
    from benchmarks.laws import Law

    law = Law("a", (lambda _: 1.0,))
    assert law.fit([1, 2, 3], [1, 2, 9])(3) == pytest.approx(1.2)
    assert law.fit([1, 2, 3], [0, 2, 9])(3) == pytest.approx(2)


def test_no_factor_is_below_zero():
    """Through 3 at 1 and 1 at 2 goes 5 - 2 x. A constant comes nearest of what is not below 0:
    (1 / 3 + 1) / (1 / 9 + 1) = 1.2."""
    law = line()
    assert [law.fit([1, 2, 9], [3, 1, 1])(x) for x in (1, 9)] == pytest.approx([1.2, 1.2])


def test_a_curve_is_told_in_two_tables_and_drawn(tmp_path):
    from benchmarks.laws import Curve, Point

    points = [Point(n, [s, 2 * s, 1.5 * s], 600, 1e6 * n, 2e6, 5e5) for n, s in ((1, 2), (2, 4))]
    curve = Curve("layers", points, {"time": line(1)._replace(terms=(lambda x: x,))})
    assert curve.rows() == [
        "| layers | 1 | 3 (2 to 4) | 200 tokens/s | 1 MB | 2 MB | 0.50 MB |",
        "| layers | 2 | 6 (4 to 8) | 100 tokens/s | 2 MB | 2 MB | 0.50 MB |",
    ]
    told = "| layers | time | a + b x | the first 1 | 6 s | 6 s | +0% |"
    assert curve.law_rows() == [told]
    assert curve.as_dict()["laws"] == {"time": {"law": "a + b x", "departure": pytest.approx(0)}}
    pytest.importorskip("matplotlib")
    from benchmarks import picture

    picture.draw([curve], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def tiny(study):
    base = replace(study.base, hidden=64, layers=2, sequence=16, heads=2)
    return replace(study, base=base, sizes=study.sizes[:2])


def test_every_size_of_a_study_can_be_planned():
    from benchmarks.cases import scaling

    for study in scaling.STUDIES:
        totals = [scaling.plan(study.at(tiny(study).base, each)).total for each in study.sizes[:2]]
        assert len(set(totals)) == (1 if study.name.startswith("ranks of dp") else 2), study.name


# one of one process, one of several
@pytest.mark.parametrize("number", marked_slow(range(6), lambda number, _: number not in (2, 5)))
def test_a_study_measures_a_tiny_model(number):
    from benchmarks.cases import scaling

    study = tiny(scaling.STUDIES[number])
    curve = scaling.measured(study, 1)
    first, second = curve.points
    assert [first.size, second.size] == list(study.sizes)
    assert all(len(point.seconds) == 1 and point.memory > 0 for point in curve.points)
    assert first.planned > 0
    assert second.sent > 0
    assert len(curve.rows()) == 2
    assert len(curve.law_rows()) == 3


def test_bytes_of_replicas_are_those_of_a_ring():
    """2 (n - 1) / n of the gradients, 4 bytes a parameter."""
    from benchmarks.cases import scaling

    from megazoo.models.counts import parameter_count

    shape = scaling.Shape(dp=4, rows=4, hidden=64, layers=2, sequence=16)
    gradients = 4 * parameter_count(shape.config())
    assert scaling.plan(shape).sent_dp == pytest.approx(gradients * 2 * 3 / 4, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_conversions_are_measured_and_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks import picture
    from benchmarks.cases import scaling
    from benchmarks.results import Setup

    setup = Setup(1, 0.2, tmp_path)
    found = list(scaling.converted(setup, (2, 1)))
    assert [curve.name for curve in found] == ["convert_hf, GB", "reshard, GB"]
    for curve in found:
        sizes, _ = curve.of("time")
        assert sizes == pytest.approx([0.1, 0.2], rel=0.1)
        assert all(point.memory > 10e6 for point in curve.points)
    assert json.loads(json.dumps([curve.as_dict() for curve in found]))
    assert list(tmp_path.iterdir()) == []
    picture.draw(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_of_scaling_only():
    import benchmark

    from megazoo.errors import UserError

    with pytest.raises(
        UserError, match="--picture draws the curves of the case scaling: pass that case"
    ):
        benchmark.main(["train", "--picture", "curves.png"])
