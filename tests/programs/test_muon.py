"""Muon from the command line: any layout, going on in another one, and what is refused."""

import json

import pytest

from megazoo import pretrain
from megazoo.programs import plan
from tests.support.inference import run_main
from tests.support.pretraining import SMALL, close, losses, records
from tests.support.programs import run_tool

RUN = [*SMALL, *"--optimizer muon --mock-data --eval-steps 0 --lr-decay-steps 6".split()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What six steps of one process recorded, and checkpoints after three of Muon and of AdamW."""
    root = tmp_path_factory.mktemp("files")
    pretrain.main([*RUN, "--steps", "6", "--metrics", str(root / "straight")])
    pretrain.main([*RUN, "--steps", "3", "--save", str(root / "muon")])
    pretrain.main([*RUN, "--steps", "3", "--save", str(root / "adamw"), "--optimizer", "adamw"])
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks_of"),
    [("--cp 2 --tp 2", 4), ("--pp 2 --zero 1", 4)],
)
def test_a_run_goes_on_in_another_layout(ranks, files, tmp_path, layout, ranks_of):
    """With the optimizer that its checkpoint names, and the momentum that is there."""
    words = ["--device", "cpu", "--load", str(files / "muon"), "--metrics", str(tmp_path / "lines")]
    ranks(pretrain.main, ranks_of, [*words, "--steps", "6", *layout.split()])
    expected = losses(files / "straight")
    assert close(losses(tmp_path / "lines"), {step: expected[step] for step in (4, 5, 6)})


def test_the_learning_rate_that_is_told_is_that_of_matrices(files, tmp_path):
    rates = [record["lr"] for record in records(files / "straight")]
    assert rates[:2] == pytest.approx([0.01, 0.02])
    assert rates[-1] == pytest.approx(0.002)
    pretrain.main([*RUN, *"--steps 2 --muon-lr 0.03".split(), "--metrics", str(tmp_path / "lines")])
    assert records(tmp_path / "lines")[1]["lr"] == pytest.approx(0.03)


def test_another_optimizers_checkpoint_is_refused(files, monkeypatch, capsys):
    for saved, optimizer, told in [
        ("muon", "adamw", "has momentum of layers.0.attention.qkv.weight, not the exp_avg and"),
        ("adamw", "muon", "exp_avg_sq of layers.0.attention.qkv.weight, not the momentum of Muon"),
    ]:
        words = ["--load", files / saved, *"--steps 6 --device cpu --optimizer".split(), optimizer]
        code, _, error = run_main(pretrain, monkeypatch, capsys, *words)
        assert (code, len(error.splitlines())) == (2, 1)
        assert told in error
        words += [*RUN, "--optimizer", optimizer, "--load-weights-only", "--muon-lr", "2e-2"]
        code, *_ = run_main(pretrain, monkeypatch, capsys, *words)
        assert code == 0


def test_settings_that_cant_be(monkeypatch, capsys):
    for words, told in [
        ("--offload-optimizer", "--offload-optimizer cannot be used with --optimizer muon"),
        ("--muon-lr -1", "muon-lr"),
        ("--muon-lr 0", "--muon-lr must be above 0"),
        ("--muon-momentum 1", "muon-momentum"),
        ("--ns-steps 0", "ns-steps"),
        ("--ns-dtype float16", "ns-dtype"),
    ]:
        code, _, error = run_main(pretrain, monkeypatch, capsys, *RUN, *words.split())
        assert (code, len(error.splitlines())) == (2, 1)
        assert told in error


@pytest.mark.slow
def test_the_check_of_layouts_trains_with_it():
    words = "--model llama --shrink --steps 2 --optimizer muon --layouts tp2+sp"
    done = run_tool("check_parallel.py", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass" in done.stdout


def test_the_planner_counts_half_of_the_state_and_the_products(monkeypatch, capsys):
    """A momentum of 4 bytes where AdamW has two; and of two replicas each half of the FLOPs."""
    words = "--preset gpt2-124m --layers 2 --tp 2 --json -".split()
    found = {}
    for name, more in (
        ("adamw", "--global-batch-size 1"),
        ("muon", "--global-batch-size 1 --optimizer muon"),
        ("muon, dp 2", "--global-batch-size 2 --optimizer muon --dp 2"),
    ):
        _, out, _ = run_main(plan, monkeypatch, capsys, *words, *more.split())
        found[name] = json.loads(out)["ranks"][0]
    layers = 2
    matrices = layers * 12 * 768**2 // 2  # of a tp rank
    assert found["adamw"]["optimizer"] - found["muon"]["optimizer"] == 4 * matrices
    of_muon = {name: found[name]["flops"] - found["adamw"]["flops"] for name in found}
    products = layers * 2 * 5 * (4 * 3 + 2 * 9) * 768**3
    assert of_muon["muon"] == pytest.approx(products / 2, rel=0.1)
    assert of_muon["muon, dp 2"] == pytest.approx(products / 4, rel=0.1)
    assert found["muon"]["sent_tp"] > found["adamw"]["sent_tp"]
