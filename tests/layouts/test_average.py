"""--ema: the moving average of the weights is that of the weights after each step, in every layout;
it resumes in another one, and convert --ema exports it."""

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.errors import UserError
from megazoo.formats.source import SavedModel
from megazoo.programs import convert
from tests.support.pretraining import SMALL

RUN = [*SMALL, "--data", "mock", "--layers", "2", "--lr-decay-steps", "4"]
DECAY = 0.75
# Layouts of the first two steps, and of the last two.
CHANGES = {
    "tp2 zero1": ("--tp 2 --dp 2 --zero 1", "--pp 2 --dp 2 --zero 3"),
    "zero3": ("--dp 4 --zero 3", "--pp 2 --tp 2"),
}


def weights_of(model) -> dict[str, torch.Tensor]:
    return {entry.name: entry.parameter.detach().double() for entry in model.entries()}


def masters_of(run) -> dict[str, torch.Tensor]:
    """The fp32 master weights in a checkpoint."""
    source, found = SavedModel(run), {}
    for name, spec in source.specs.items():
        found[name] = torch.empty(spec.shape)
        source.read_into(source.most_precise(name), found[name], spec, megazoo.ParallelContext())
    return {name: tensor.double() for name, tensor in found.items()}


def averaged(before: dict, after: list[dict]) -> dict[str, torch.Tensor]:
    """The oracle, in double precision."""
    average = before
    for weights in after:
        average = {k: DECAY * value + (1 - DECAY) * weights[k] for k, value in average.items()}
    return average


def exported(run, output) -> dict[str, torch.Tensor]:
    convert.main([str(run), str(output), "--to", "hf", "--ema"])
    return weights_of(megazoo.from_pretrained(output))


def difference(found: dict, expected: dict) -> float:
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


@pytest.fixture(scope="module", params=["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def whole(request, tmp_path_factory):
    """The optimizer, and the average after four steps in one process."""
    run = tmp_path_factory.mktemp("whole")
    words = ["--optimizer", request.param, "--ema", str(DECAY), "--save", str(run / "a")]
    pretrain.main([*RUN, *words, "--steps", "4", "--save-interval", "1"])
    saved = [run / "a" / f"step_0000000{step}" for step in range(1, 5)]
    start = weights_of(megazoo.from_config(SavedModel(saved[0]).config, seed=1234))
    steps = [weights_of(megazoo.from_parallelized(path)) for path in saved]
    assert difference(start, steps[-1]) > 1e-3
    return request.param, averaged(start, steps), saved[-1]


def test_the_average_is_that_of_the_weights_after_each_step(whole, tmp_path):
    _, expected, run = whole
    assert difference(exported(run, tmp_path / "hf"), expected) < 1e-6


@pytest.mark.parametrize("change", CHANGES)
def test_the_average_resumes_in_another_layout(change, whole, ranks, tmp_path):
    optimizer, expected, _ = whole
    (first, second), run = CHANGES[change], tmp_path / "run"
    words = ["--optimizer", optimizer, "--ema", str(DECAY), "--save", str(run), "--steps", "2"]
    ranks(pretrain.main, 4, [*RUN, *words, *first.split()])
    rest = ["--load", str(run), "--save", str(run), "--steps", "4", "--device", "cpu"]
    ranks(pretrain.main, 4, [*rest, *second.split()])
    assert difference(exported(run, tmp_path / "hf"), expected) < 1e-5


def test_an_average_begins_and_ends_at_a_resume(tmp_path, capsys):
    run, plain = tmp_path / "run", tmp_path / "plain"
    pretrain.main([*RUN, "--dtype", "bfloat16", "--steps", "2", "--save", str(plain)])
    start = masters_of(plain)
    with pytest.raises(UserError, match="has no moving average of the weights: omit --ema"):
        exported(plain, tmp_path / "none")
    words = ["--load", str(plain), "--save", str(run), "--device", "cpu"]
    pretrain.main([*words, "--steps", "3", "--ema", str(DECAY)])
    after = masters_of(run)
    convert.main([str(run), str(tmp_path / "hf"), "--to", "hf", "--ema", "--dtype", "float32"])
    found = weights_of(megazoo.from_pretrained(tmp_path / "hf"))
    assert difference(found, averaged(start, [after])) < 1e-6  # of the fp32 masters
    pretrain.main(["--load", str(run), "--save", str(plain), "--steps", "4", "--ema", "0"])
    with pytest.raises(UserError, match="has no moving average"):
        exported(plain, tmp_path / "none")
