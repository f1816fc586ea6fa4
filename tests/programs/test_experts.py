"""The programs with --ep: replicas share the experts of a model."""

from dataclasses import replace

import pytest

import megazoo
from megazoo.models.registry import find_config
from megazoo.programs import evaluate, generate
from tests.support.inference import output_of, run_main


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of a mixture and of a dense model, with random weights."""
    path = tmp_path_factory.mktemp("saved")
    for preset in ("mixtral-tiny", "gpt2-tiny"):
        config = replace(find_config(preset), layers=2)
        megazoo.from_config(config).save_parallelized(path / preset)
    return path


def test_generation_and_scores_are_those_of_one_process(saved, ranks, tmp_path):
    """Also with a prompt for one replica only, and none for the others."""
    text, prompts = tmp_path / "text.txt", tmp_path / "prompts.txt"
    text.write_text("def f(x):\n    return x\n" * 9)
    prompts.write_text("def\nreturn a\nx\n")
    common = [str(saved / "mixtral-tiny"), "--tokenizer", "byte", "--device", "cpu"]
    drawn = ["--prompts", str(prompts), "--batch-size", "2", "--temperature", "0.9"]
    for tool, arguments, layout in (
        (evaluate, ["--text", str(text), "--seq-length", "17"], "--pp 2 --ep 2"),
        (generate, [*drawn, "--max-new-tokens", "4"], "--ep 4"),
        (generate, ["--prompt", "def ", "--max-new-tokens", "4"], "--tp 2 --cp 2 --ep 2"),
    ):
        alone = output_of(tool.main, [*common, *arguments])
        together, *others = ranks(output_of, 4, tool.main, [*common, *arguments, *layout.split()])
        assert together == alone != ""
        assert others == [""] * 3


@pytest.mark.parametrize(
    ("preset", "ep", "message"),
    [
        ("mixtral-tiny", 0, "--ep 0 must be at least 1"),
        ("mixtral-tiny", 3, "4 experts can't be split evenly over ep 3: use ep 1, 2 or 4"),
        ("gpt2-tiny", 2, "--ep 2 cannot be used with gpt2, which has no experts: use --ep 1"),
    ],
)
def test_an_ep_that_does_not_fit_is_refused(saved, monkeypatch, capsys, preset, ep, message):
    arguments = ["--tokenizer", "byte", "--prompt", "a", "--ep", ep]
    code, _, error = run_main(generate, monkeypatch, capsys, saved / preset, *arguments)
    assert (code, error) == (2, f"generate.py: error: {message}\n")
