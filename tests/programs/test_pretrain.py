"""The training program as users start it: launchers, files, resuming, how it ends."""

import json
import math
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint, save
from megazoo.cli.parsing import CommandLine
from megazoo.programs import preprocess_data
from megazoo.trainer.rules import model_config
from tests.support.inference import run_main
from tests.support.pretraining import SMALL, TORCHRUN, close, losses, records, start


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps in one process, in this one: what every other start must equal."""
    path = tmp_path_factory.mktemp("straight") / "metrics.jsonl"
    pretrain.main([*SMALL, "--steps", "4", "--metrics", str(path)])
    return losses(path)


@pytest.mark.parametrize(
    ("launcher", "layout"),
    [
        pytest.param([*TORCHRUN, "--nproc-per-node", "2"], "--pp 2", marks=pytest.mark.slow),
        # the one that is as users start it, without the server
        pytest.param([*TORCHRUN, "--nproc-per-node", "8"], "--tp 2 --pp 4", marks=pytest.mark.slow),
        ([*TORCHRUN, "--nproc-per-node", "1"], "--tp 2"),
        pytest.param([], "--tp 2 --pp 2", marks=pytest.mark.slow),
        pytest.param([], "--tp 2 --pp 4", marks=pytest.mark.slow),
    ],
)
def test_every_way_to_start_trains_the_same(launcher, layout, straight, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    executable = sys.executable if "8" in launcher else None
    job = [*SMALL, *layout.split(), "--steps", 4, "--metrics", metrics]
    done = start(launcher, *job, executable=executable)
    assert done.returncode == 0, done.stderr
    started_here = not launcher or launcher[-1] == "1"
    assert bool(re.search("starting [248] ranks here", done.stdout)) == started_here
    assert close(losses(metrics), straight)


def with_settings_of_its_own(job):
    try:
        pretrain.main([*job, "--weight-decay", str(0.1 * (1 + int(os.environ["RANK"])))])
    except megazoo.UserError as error:
        return str(error)
    return "nothing is refused"


def test_ranks_with_other_settings_are_named(ranks):
    for text in ranks(with_settings_of_its_own, 2, [*SMALL, "--tp", "2", "--steps", "2"]):
        assert text.startswith(
            "ranks disagree in megazoo pretrain: --weight-decay is 0.1 on rank 0 (tp 0), 0.2 on "
            "rank 1 (tp 1)"
        )


def test_a_world_that_does_not_fit_gets_one_line_with_the_right_command(monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    for world, right, sizes, words in [
        ("6", 8, "tp 2 x pp 4 needs a multiple of 8", "--tp 2 --pp 4"),
        ("3", 4, "tp 1 x pp 1 x cp 2 needs a multiple of 2", "--tp 1 --cp 2"),
    ]:
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", world)
        code, _, error = run_main(pretrain, monkeypatch, capsys, *words.split())
        use = f"use torchrun --nproc-per-node {right} pretrain_gpt.py {words}"
        told = f"the launcher started {world} ranks, but {sizes}: {use}"
        assert (code, error) == (2, f"pretrain_gpt.py: error: {told}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "right", "sizes", "words"),
    [
        (6, 8, "tp 2 x pp 4 needs a multiple of 8", "--tp 2 --pp 4"),
        (3, 4, "tp 1 x pp 1 x cp 2 needs a multiple of 2", "--tp 1 --cp 2"),
    ],
)
def test_of_a_world_that_does_not_fit_one_rank_tells(world, right, sizes, words):
    done = start([*TORCHRUN, "--nproc-per-node", str(world)], *words.split())
    assert done.returncode != 0
    use = f"use torchrun --nproc-per-node {right} pretrain_gpt.py {words}"
    told = f"pretrain_gpt.py: error: the launcher started {world} ranks, but {sizes}: {use}"
    lines = [line for line in done.stderr.splitlines() if "pretrain_gpt.py: error:" in line]
    assert lines == [told, f"  traceback : {told}"]  # torchrun's report ends with the line
    # no traceback of ours; torchrun's own report is its own
    assert "in run_program" not in done.stderr


def test_stop_and_resume_in_another_layout(ranks, straight, tmp_path):
    """Two steps at tp 2 x pp 2, two more in one process: the same losses as four at once, without a
    jump.

    The second start names no setting of the first: batch, seed and learning rate come from the
    checkpoint.
    """
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "run"
    common = ["--metrics", str(metrics), "--save", str(saved), "--device", "cpu"]
    layout = ["--tp", "2", "--pp", "2", "--steps", "2", "--lr-decay-steps", "4"]
    ranks(pretrain.main, 4, [*SMALL, *common, *layout])
    pretrain.main([*common, "--load", str(saved), "--steps", "4"])
    assert close(losses(metrics), straight)
    steps = [record for record in records(metrics) if "loss" in record]
    assert [record["consumed_samples"] for record in steps] == [8, 16, 24, 32]
    assert [record["consumed_tokens"] for record in steps] == [256, 512, 768, 1024]
    assert Checkpoint(saved).trainer["step"] == 4


def test_token_files_train_like_their_text(ranks, tmp_path):
    """Text to token files to training, with its tokenizer, at tp 2 x pp 2 as in one process."""
    (tmp_path / "text.txt").write_bytes(Path(__file__).read_bytes())
    (tmp_path / "more.txt").write_bytes(Path(megazoo.__file__).read_bytes() * 3)
    source = ["--input", str(tmp_path / "text.txt"), str(tmp_path / "more.txt")]
    words = ["--output-prefix", str(tmp_path / "a"), "--append-eod", "--workers", "1"]
    preprocess_data.main([*source, *words])
    data = ["--data", str(tmp_path / "a_text_document"), "--split", "1,1", "--steps", "2"]
    for name, layout, world in [("one", [], 1), ("four", ["--tp", "2", "--pp", "2"], 4)]:
        ranks(pretrain.main, world, [*SMALL, *data, *layout, "--metrics", str(tmp_path / name)])
    assert close(losses(tmp_path / "four"), losses(tmp_path / "one"))


def test_a_longer_run_goes_on_at_the_rate_where_it_stood(tmp_path):
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "run"
    common = ["--metrics", str(metrics), "--save", str(saved)]
    common += "--device cpu --eval-steps 0".split()
    pretrain.main([*SMALL, *common, "--steps", "3", "--lr", "2e-3"])
    pretrain.main([*common, "--steps", "5", "--load", str(saved)])
    rates = [record["lr"] for record in records(metrics)]
    assert rates[2:] == [2e-4] * 3


def test_sequence_parallel_and_separate_documents(ranks, tmp_path):
    """Two ranks train like one process, and a resumed run keeps the setting."""
    runs = {"one": [], "two": ["--tp", "2", "--sequence-parallel"]}
    for name, flags in runs.items():
        files = ["--metrics", str(tmp_path / name), "--save", str(tmp_path / f"{name}-saved")]
        arguments = [*SMALL, "--separate-documents", "--steps", "2", *flags, *files]
        ranks(pretrain.main, 2 if name == "two" else 1, arguments)
    assert close(losses(tmp_path / "two"), losses(tmp_path / "one"))
    assert Checkpoint(tmp_path / "two-saved").trainer["settings"]["separate_documents"] is True
    again = ["--load", str(tmp_path / "two-saved"), "--metrics", str(tmp_path / "two")]
    pretrain.main([*again, *"--device cpu --steps 3 --eval-steps 0".split()])
    straight = "--steps 3 --lr-decay-steps 2 --separate-documents".split()
    pretrain.main([*SMALL, *straight, "--metrics", str(tmp_path / "straight")])
    assert close(losses(tmp_path / "two"), losses(tmp_path / "straight"))


def test_the_line_that_goes_on_goes_on(tmp_path, capsys):
    """A run with other weights, then what it prints, then what that prints: each flag is named
    once."""
    weights, saved, metrics = tmp_path / "weights", tmp_path / "run", tmp_path / "metrics"
    config = model_config(CommandLine.read(SMALL).options().model)
    megazoo.from_config(config).save_parallelized(weights)
    kept = [*SMALL, "--lr", "1e-3", "--save", str(saved), "--metrics", str(metrics)]
    words = [*kept, "--load", str(weights), "--load-weights-only", "--steps=2"]
    for steps in (4, 8):
        pretrain.main(words)
        (line,) = re.findall(r"^  resume +(.*)$", capsys.readouterr().out, re.MULTILINE)
        words = shlex.split(line)[2:]
        more = ["--no-load-weights-only", "--load", str(saved), "--steps", str(steps)]
        assert words == [*kept, *more]
    assert list(losses(metrics)) == [1, 2, 3, 4]


def test_epochs_are_counted_in_samples_and_a_test_ends_them(ranks, tmp_path, capsys, monkeypatch):
    """Two epochs at pp 3, whose middle stage has no data; then one more in one process."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "word " * 20}) + "\n" for _ in range(30))
    )
    metrics = tmp_path / "metrics"
    common = ["--metrics", str(metrics), "--save", str(tmp_path / "run"), "--device", "cpu"]
    data = ["--data", str(tmp_path / "a.jsonl"), "--split", "80,10,10"]
    ranks(pretrain.main, 3, [*SMALL, *common, *data, "--pp", "3", "--epochs", "2"])
    samples = (24 * 101 - 1) // 32
    steps = -(-2 * samples // 8)
    assert [record["step"] for record in records(metrics) if "loss" in record] == list(
        range(1, steps + 1)
    )
    assert set(records(metrics)[-1]) == {"step", "test_loss", "test_perplexity"}
    pretrain.main([*common, "--load", str(tmp_path / "run"), "--epochs", "3"])
    assert records(metrics)[-1]["step"] == -(-3 * samples // 8)
    out = capsys.readouterr().out
    assert re.search(
        r"training loss \d\.\d{4}, validation loss \d\.\d{4}, test loss \d\.\d{4} nats per token",
        out,
    )
    assert re.search(r"resume .*--epochs 6$", out, re.MULTILINE)
    assert "--epochs 3 " not in out
    with pytest.raises(
        megazoo.UserError, match=rf"for --epochs 3 \({-(-3 * samples // 8)} steps\): use a larger"
    ):
        pretrain.main([*common, "--load", str(tmp_path / "run")])
    with monkeypatch.context() as restarted:
        restarted.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        pretrain.main(common)  # nothing remains
    before = -(-3 * samples // 8)
    larger = ["--global-batch-size", "32", "--load", str(tmp_path / "run"), "--epochs", "4"]
    pretrain.main([*common, *larger])
    record = [record for record in records(metrics) if "loss" in record][-1]
    assert record["step"] == before - (8 * before - 4 * samples) // 32
    assert 0 <= record["consumed_samples"] - 4 * samples < 32


def test_mock_data_needs_neither_files_nor_a_tokenizer_that_fits(tmp_path):
    metrics = tmp_path / "metrics"
    pretrain.main(
        [*SMALL, "--mock-data", "--vocab-size", "50", "--steps", "2", "--metrics", str(metrics)]
    )
    assert abs(records(metrics)[0]["loss"] - math.log(50)) < 0.2


def test_a_checkpoint_of_another_shape_is_refused(tmp_path, capsys, monkeypatch):
    pretrain.main([*SMALL, "--steps", "2", "--eval-steps", "0", "--save", str(tmp_path)])
    capsys.readouterr()
    for words, message in {
        "--layers 6": (
            f"--layers is 6, but layers is 5 in the checkpoint {tmp_path}/step_00000002: remove "
            "the flag or preset that changes it"
        ),
        "--steps 2": (
            f"--load {tmp_path} is already at step 2, so nothing is left to do for "
            "--steps 2: use a larger value"
        ),
    }.items():
        words = ["--model", "gpt2", "--load", tmp_path, *words.split()]
        code, _, error = run_main(pretrain, monkeypatch, capsys, *words)
        assert (code, error) == (2, f"pretrain_gpt.py: error: {message}\n")


def test_a_run_that_diverges_stops_before_it_saves(tmp_path, capsys, monkeypatch):
    words = [*SMALL, *"--lr 1e30 --clip-grad 0 --steps 5 --save-interval 1".split()]
    code, _, error = run_main(pretrain, monkeypatch, capsys, *words, "--save", tmp_path)
    assert code == 1
    assert re.search(r"gradient norm \S+ at step \d: try a smaller --lr", error)
    assert len(list(tmp_path.glob("step_*"))) < 5


def test_a_checkpoint_that_is_not_of_a_run_is_refused(tmp_path, capsys, monkeypatch):
    path = save(tmp_path, 1, megazoo.from_config("gpt2-tiny"))
    whole = (path / "trainer.json").read_text()
    for text, message, expected in [
        (whole, "is not from a training run: trainer.json has no consumed_samples", 2),
        ("{", f"trainer.json has 1 bytes, but megazoo.json has {len(whole)}", 1),
    ]:
        (path / "trainer.json").write_text(text)
        code, _, error = run_main(pretrain, monkeypatch, capsys, "--load", tmp_path)
        assert (code, error.count("\n"), message in error) == (expected, 1, True), error


def test_a_restart_goes_on_from_a_step_that_latest_does_not_name_yet(tmp_path, monkeypatch):
    run = [*SMALL, "--eval-steps", "0", "--save", str(tmp_path / "run")]
    pretrain.main([*run, "--steps", "2"])
    (tmp_path / "run" / "latest").unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert pretrain.prepare([*run, "--steps", "3"]).first_step == 2


def test_a_mistake_of_all_ranks_is_told_once(tmp_path):
    done = start(
        [*TORCHRUN, "--nproc-per-node=2"],
        *SMALL,
        *"--layers 1 --eval-steps 0 --steps 2 --data mock".split(),
        "--tp",
        2,
        "--metrics",
        tmp_path / ("a" * 300),
    )
    assert done.returncode == 1
    assert "in run_program" not in done.stderr  # torchrun's own report is its own
    first, again = (line for line in done.stderr.splitlines() if "pretrain_gpt.py: error: " in line)
    assert "File name too long" in first
    assert again == f"  traceback : {first}"  # the last line of torchrun's report


def test_a_restart_goes_on_from_its_own_checkpoint_whatever_the_file_loads(tmp_path, monkeypatch):
    """As torchrun starts the program again after a rank has died."""
    for name, seed in (("first", 1), ("own", 2)):
        words = f"--steps 2 --eval-steps 0 --seed {seed} --save".split()
        pretrain.main([*SMALL, *words, str(tmp_path / name)])
    file = tmp_path / "c.toml"
    settings = [f'load = "{tmp_path / "first"}"', "load_weights_only = true"]
    file.write_text("\n".join([*settings, "steps = 9", "lr = 1", "seq_length = 32"]))
    arguments = ["--config", str(file), "--save", str(tmp_path / "own")]
    begun = pretrain.prepare(arguments)
    assert (begun.resuming, begun.first_step, begun.source.path.parent.name) == (False, 0, "first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = pretrain.prepare(arguments)
    assert (run.resuming, run.first_step, run.source.path.parent.name) == (True, 2, "own")
    assert (run.options.training.steps, run.options.training.seed) == (9, 2)
