"""The programs with experts: --ep shares them among replicas, and padding is not counted."""

from dataclasses import replace

import pytest

import megazoo
from megazoo import pretrain
from megazoo.cli import inference
from megazoo.models.registry import find_config
from megazoo.programs import evaluate, generate
from tests.support.data import write_lines
from tests.support.inference import assert_same_output, output_of, run_main
from tests.support.pretraining import SMALL, records


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
        expected = output_of(tool.main, [*common, *arguments])
        found, *others = ranks(output_of, 4, tool.main, [*common, *arguments, *layout.split()])
        assert_same_output(found, expected)
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


@pytest.mark.parametrize(
    ("sizes", "started"), [((2, 1, 1, 2), 2), ((1, 1, 3, 2), 2), ((1, 2, 4, 2), 1)]
)
def test_the_command_starts_the_replicas_that_ep_needs(saved, monkeypatch, sizes, started):
    """sizes: tp, pp, cp and ep. started: dp."""

    class Started(Exception):
        pass

    def start(work, *sizes, **_):
        raise Started(sizes)

    monkeypatch.setattr(inference, "start_missing_ranks", start)
    flags = [f"--{name}={size}" for name, size in zip(("tp", "pp", "cp", "ep"), sizes, strict=True)]
    with pytest.raises(Started) as caught:
        generate.main([str(saved / "mixtral-tiny"), "--tokenizer", "byte", "--prompt", "a", *flags])
    assert caught.value.args[0] == (*sizes[:3], started)


def test_too_few_replicas_for_ep_are_refused(ranks, saved):
    arguments = [str(saved / "mixtral-tiny"), "--tokenizer", "byte", "--prompt", "a"]
    (message,) = set(ranks(error_of, 2, [*arguments, "--tp", "2", "--ep", "2"]))
    expected = "--ep 2 must divide the number of replicas, and the launcher started 1: use torchrun"
    assert message.startswith(f"{expected} --nproc-per-node 4 ")


def error_of(arguments):
    with pytest.raises(megazoo.UserError) as caught:
        generate.main(arguments)
    return str(caught.value)


def test_a_schedule_that_can_not_run_a_joint_loss_is_refused_at_the_start(monkeypatch, capsys):
    arguments = [*SMALL, "--model", "mixtral", "--router-balance", "batch", "--dry-run"]
    code, _, error = run_main(pretrain, monkeypatch, capsys, *arguments)
    assert code == 2
    assert "use schedule gpipe, or one micro-batch" in error
    assert run_main(pretrain, monkeypatch, capsys, *arguments, "--schedule", "gpipe")[0] == 0


def rows_of_text(path):
    """Prompts and completions. The longest row of each replica has another length."""
    rows = ({"prompt": "ab" * (n % 13), "completion": " c" + "d" * (n % 5)} for n in range(60))
    return ["--data", str(write_lines(path, *rows)), "--split", "80,20,0"]


def rows_of_a_classifier(path):
    rows = ({"text": "ab" * (1 + n % 13), "label": n % 2} for n in range(60))
    return ["--data", str(write_lines(path, *rows)), "--split", "80,20,0", "--num-labels", "2"]


@pytest.mark.parametrize(
    "rows", [rows_of_text, pytest.param(rows_of_a_classifier, marks=pytest.mark.slow)]
)
def test_padding_chooses_no_expert(ranks, tmp_path, rows):
    """Otherwise the auxiliary loss would depend on the longest row of a replica."""
    mixture = ["--model", "mixtral", "--experts", "4", "--tokenizer", "byte", "--steps", "2"]
    common = [*SMALL, *mixture, *rows(tmp_path / "rows.jsonl")]
    pretrain.main([*common, "--metrics", str(tmp_path / "one")])
    layout = ["--tp", "2", "--ep", "2", "--sequence-parallel"]
    ranks(pretrain.main, 4, [*common, *layout, "--metrics", str(tmp_path / "ep2")])
    one, several = (
        [record for record in records(tmp_path / name) if "loss" in record]
        for name in ("one", "ep2")
    )
    assert len(one) == len(several) == 2
    tokens = 0
    for single, sharded in zip(one, several, strict=True):
        for loads in single["expert_tokens"].values():
            assert sum(loads) == 2 * (single["consumed_tokens"] - tokens)  # top 2
        tokens = single["consumed_tokens"]
        assert sharded["expert_tokens"] == single["expert_tokens"]
        for name in ("loss", "auxiliary_router_balance", "grad_norm"):
            assert sharded[name] == pytest.approx(single[name], rel=1e-5)
