"""A first fine-tune: thirty conversations, and no setting but the files."""

import json
import re
from dataclasses import replace

import pytest

import megazoo
from megazoo import pretrain
from megazoo.models.registry import find_config
from tests.support.pretraining import records


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The words that load a tiny Llama and thirty conversations of different lengths."""
    directory = tmp_path_factory.mktemp("fine_tuning")
    sizes = dict(layers=2, hidden_size=32, heads=2, kv_heads=2, ffn_size=64)
    config = replace(find_config("llama-tiny"), **sizes)
    megazoo.from_config(config, seed=1).save_pretrained(directory / "hf")
    talks = directory / "talks.jsonl"
    with talks.open("w") as file:
        for number in range(30):
            turns = [("user", f"number {number}?"), ("assistant", "one " * (number % 7 + 1))]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    words = ["--load", str(directory / "hf"), "--data", str(talks), "--chat-template", "chatml"]
    return [*words, "--device", "cpu", "--lr", "1e-2", "--seq-length", "64"]


def losses(metrics, key="loss"):
    return {each["step"]: each[key] for each in records(metrics) if key in each}


@pytest.mark.parametrize("layout", ["--pp", pytest.param("--dp", marks=pytest.mark.slow)])
def test_thirty_conversations_train_and_validate(layout, files, ranks, tmp_path, capsys):
    """The validation rows are fewer than a batch, and not a multiple of the replicas."""
    one, two = tmp_path / "one", tmp_path / "two"
    words = [*files, "--split", "0.9,0.1,0.0"]
    pretrain.main([*words, "--metrics", str(one)])
    start = capsys.readouterr().out
    assert "defaults for 27 training rows: --epochs 3, --global-batch-size 8, so 11" in start
    saved = ["--save", str(tmp_path / "run"), "--metrics", str(two)]
    ranks(pretrain.main, 2, [*words, *saved, layout, "2"])
    trained, validated = losses(one), losses(one, "eval_loss")
    assert list(trained) == [*range(1, 12)]
    assert trained[11] < trained[1]
    assert losses(two) == pytest.approx(trained, rel=1e-5)
    assert losses(two, "eval_loss") == pytest.approx(validated, rel=1e-5)
    assert (tmp_path / "run" / "latest").read_text().strip() == "step_00000011"


def test_a_resumed_run_keeps_the_batch_that_followed_from_the_rows(files, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    outputs = ["--save", str(tmp_path / "run"), "--save-interval", "5", "--metrics"]
    pretrain.main([*files, *outputs, str(whole)])
    at = str(tmp_path / "run" / "step_00000005")
    pretrain.main(["--load", at, "--device", "cpu", "--metrics", str(resumed)])
    expected = losses(whole)
    assert losses(resumed) == {step: expected[step] for step in range(6, max(expected) + 1)}


def test_the_start_prints_what_would_be_lost(files, capsys):
    few = ["--epochs", "1", "--global-batch-size", "8", "--eval-steps", "0"]
    pretrain.main([*files, *few])
    printed = capsys.readouterr()
    assert "nothing will be saved: use --save DIR" in printed.out.partition("step 1/")[0]
    assert printed.err.count("\n") == 1
    warning = (
        r"warning: (\d+) rows in batches of 8 are only \d steps? \(--epochs 1\): use (.*) for 10"
    )
    rows, advice = re.search(warning, printed.err).groups()
    for way in advice.split(" or "):  # each of them gives ten steps
        given = dict(zip(*[iter(few + way.split())] * 2, strict=True))
        steps = int(rows) * int(given["--epochs"]) / int(given["--global-batch-size"])
        assert steps > 9
    pretrain.main(["--lora-rank", "2", "--steps", "1", "--mock-data", *SMALLEST])
    assert "the adapters change random weights" in capsys.readouterr().err


SMALLEST = "--layers 1 --seq-length 8 --global-batch-size 1 --eval-steps 0 --device cpu".split()
