"""The training program as users start it: launchers, files, resuming, and one line for each
mistake."""

import gzip
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from programs import python

import megazoo
import pretrain_gpt
from megazoo.checkpoint import Checkpoint, save
from megazoo.cli.flags import settings_of
from megazoo.cli.launch import run_program
from megazoo.cli.options import Options
from megazoo.cli.parsing import each_once
from megazoo.errors import UserError
from megazoo.models.counts import flops_per_token
from megazoo.models.gpt2 import GPT2
from megazoo.models.llama import Llama
from megazoo.parallel.schedule import zb_h1
from megazoo.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent.parent
# Small enough for seconds; five layers for uneven stages.
SMALL = (
    "--hidden-size 32 --heads 4 --layers 5 --max-positions 32 --seq-length 32 --device cpu".split()
)
SMALL += "--global-batch-size 8 --micro-batch-size 2 --warmup-steps 2 --log-interval 1 --eval-steps 1".split()
sys.path.insert(0, str(ROOT / "tools"))

import preprocess_data  # noqa: E402

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def start(launcher, *arguments, executable=None, timeout=240):
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    command = [executable or python(), *launcher, "pretrain_gpt.py", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path):
    return {record["step"]: record["loss"] for record in records(path) if "loss" in record}


def close(a, b):
    return a.keys() == b.keys() and all(abs(a[step] / b[step] - 1) < 1e-5 for step in a)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps in one process, in this one: what every other start must equal."""
    path = tmp_path_factory.mktemp("straight") / "metrics.jsonl"
    pretrain_gpt.main([*SMALL, "--steps", "4", "--metrics", str(path)])
    return losses(path)


@pytest.mark.parametrize(
    "launcher",
    [[*TORCHRUN, "--nproc-per-node", "8"], [*TORCHRUN, "--nproc-per-node", "1"], []],
    ids=["torchrun with 8 ranks", "torchrun with 1 rank", "python"],
)
def test_every_way_to_start_trains_at_tp2_pp4(launcher, straight, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    # the one that is as users start it, without the server
    executable = sys.executable if "8" in launcher else None
    job = [*SMALL, "--tp", 2, "--pp", 4, "--steps", 4, "--metrics", metrics]
    done = start(launcher, *job, executable=executable)
    assert done.returncode == 0, done.stderr
    assert ("starting 8 ranks here" in done.stdout) == ("8" not in launcher)
    assert close(losses(metrics), straight)


def test_a_world_that_does_not_fit_gets_one_line_with_the_right_command():
    done = start([*TORCHRUN, "--nproc-per-node", "6"], "--tp", 2, "--pp", 4)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "pretrain_gpt.py: error:" in line]
    assert lines == [
        "pretrain_gpt.py: error: a world of 6 ranks does not fit tp 2 x pp 4 = 8: "
        "use torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 4"
    ]
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
    ranks(pretrain_gpt.main, 4, [*SMALL, *common, *layout])
    pretrain_gpt.main([*common, "--load", str(saved), "--steps", "4"])
    assert close(losses(metrics), straight)
    steps = [record for record in records(metrics) if "loss" in record]
    assert [record["consumed_samples"] for record in steps] == [8, 16, 24, 32]
    assert [record["consumed_tokens"] for record in steps] == [256, 512, 768, 1024]
    assert Checkpoint(saved).trainer["step"] == 4


def test_token_files_train_like_their_text(ranks, tmp_path):
    """Text to token files to training, with its tokenizer, at tp 2 x pp 2 as in one process."""
    (tmp_path / "text.txt").write_bytes(Path(__file__).read_bytes())
    (tmp_path / "more.txt").write_bytes(Path(megazoo.__file__).read_bytes() * 3)
    source = [
        "--input",
        str(tmp_path / "text.txt"),
        str(tmp_path / "more.txt"),
        "--output-prefix",
        str(tmp_path / "a"),
    ]
    preprocess_data.main([*source, "--append-eod", "--workers", "1"])
    data = ["--data", str(tmp_path / "a_text_document"), "--split", "1,1", "--steps", "2"]
    for name, layout, world in [("one", [], 1), ("four", ["--tp", "2", "--pp", "2"], 4)]:
        ranks(pretrain_gpt.main, world, [*SMALL, *data, *layout, "--metrics", str(tmp_path / name)])
    assert close(losses(tmp_path / "four"), losses(tmp_path / "one"))


def test_a_longer_run_goes_on_at_the_rate_where_it_stood(tmp_path):
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "run"
    common = [
        "--metrics",
        str(metrics),
        "--save",
        str(saved),
        "--device",
        "cpu",
        "--eval-steps",
        "0",
    ]
    pretrain_gpt.main([*SMALL, *common, "--steps", "3"])
    pretrain_gpt.main([*common, "--steps", "5", "--load", str(saved)])
    rates = [record["lr"] for record in records(metrics)]
    assert rates[2:] == [5e-4] * 3


def test_sequence_parallel_and_separate_documents(ranks, tmp_path):
    """Two ranks train like one process, and a resumed run keeps the setting."""
    runs = {"one": [], "two": ["--tp", "2", "--sequence-parallel"]}
    for name, flags in runs.items():
        files = ["--metrics", str(tmp_path / name), "--save", str(tmp_path / f"{name}-saved")]
        arguments = [*SMALL, "--separate-documents", "--steps", "2", *flags, *files]
        ranks(pretrain_gpt.main, 2 if name == "two" else 1, arguments)
    assert close(losses(tmp_path / "two"), losses(tmp_path / "one"))
    assert Checkpoint(tmp_path / "two-saved").trainer["settings"]["separate_documents"] is True
    again = [
        "--load",
        str(tmp_path / "two-saved"),
        "--metrics",
        str(tmp_path / "two"),
        "--device",
        "cpu",
    ]
    pretrain_gpt.main([*again, "--steps", "3", "--eval-steps", "0"])
    straight = [
        "--steps",
        "3",
        "--lr-decay-steps",
        "2",
        "--separate-documents",
        "--metrics",
        str(tmp_path / "straight"),
    ]
    pretrain_gpt.main([*SMALL, *straight])
    assert close(losses(tmp_path / "two"), losses(tmp_path / "straight"))


def test_float16_tells_its_loss_scale_and_the_steps_that_it_skips(tmp_path, capsys):
    metrics = tmp_path / "metrics"
    scale = ["--initial-loss-scale", str(2.0**40), "--hysteresis", "1"]
    pretrain_gpt.main(
        [*SMALL, *scale, "--dtype", "float16", "--steps", "3", "--metrics", str(metrics)]
    )
    first, *_, last = [record for record in records(metrics) if "loss" in record]
    assert (first["skipped"], first["grad_norm"], first["loss_scale"]) == (True, None, 2.0**39)
    assert last["step"] == 3
    assert (
        "step 1: the gradients overflowed, step skipped; loss scale 5.49756e+11"
        in capsys.readouterr().out
    )


def test_metrics_evaluation_and_summary(tmp_path, capsys):
    metrics = tmp_path / "new" / "metrics.jsonl"
    arguments = [
        "--steps",
        "3",
        "--eval-interval",
        "2",
        "--metrics",
        str(metrics),
        "--save",
        str(tmp_path / "run"),
    ]
    pretrain_gpt.main([*SMALL, *arguments])
    steps = [record for record in records(metrics) if "loss" in record]
    keys = "step loss grad_norm lr tokens_per_second tflops step_time consumed_samples consumed_tokens peak_memory"
    parts = {
        f"{part}_time" for part in ("data", "forward", "backward", "communication", "optimizer")
    }
    assert [set(record) for record in steps] == [set(keys.split()) | parts] * 3
    assert all(0 < sum(record[part] for part in parts) <= record["step_time"] for record in steps)
    assert steps[2]["consumed_tokens"] == 3 * 8 * 32
    evaluations = [record for record in records(metrics) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [2, 3]
    assert set(evaluations[0]) == {"step", "eval_loss", "eval_perplexity"}
    out = capsys.readouterr().out
    assert re.search(r"step 2/3  loss \d\.\d{4}  grad norm .* tokens/s  \d+:\d\d left", out)
    for words in (
        "validation loss",
        "step_00000003",
        f"--load {tmp_path}/run --steps 6",
        "plot_metrics.py",
    ):
        assert words in out


def test_the_line_that_goes_on_goes_on(tmp_path, capsys):
    """A run with other weights, then what it prints, then what that prints: each flag is named
    once."""
    weights, saved, metrics = tmp_path / "weights", tmp_path / "run", tmp_path / "metrics"
    config = pretrain_gpt.model_config(pretrain_gpt.parse_options(SMALL, "").model)
    megazoo.from_config(config).save_parallelized(weights)
    kept = [*SMALL, "--save", str(saved), "--metrics", str(metrics)]
    words = [*kept, "--load", str(weights), "--load-weights-only", "--steps=2"]
    for steps in (4, 8):
        pretrain_gpt.main(words)
        (line,) = re.findall(r"^  go on +(.*)$", capsys.readouterr().out, re.MULTILINE)
        words = shlex.split(line)[2:]
        assert words == [
            *kept,
            "--no-load-weights-only",
            "--load",
            str(saved),
            "--steps",
            str(steps),
        ]
    assert list(losses(metrics)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("given", "once"),
    [
        ("--steps=3 --load a --steps 6", "--load a --steps 6"),
        (
            "--log_interval 1 --data 0.7 a 0.3 b --log-interval 2 --data c",
            "--log-interval 2 --data c",
        ),
        ("--compile --no-compile --sequence-parallel", "--no-compile --sequence-parallel"),
    ],
)
def test_of_a_flag_the_last_value_remains(given, once):
    assert each_once(given.split()) == once.split()


def test_tensorboard_and_mfu(tmp_path, capsys):
    """TensorBoard's reader finds what the metrics file says, a resumed run in place of what came
    after its start."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, board = tmp_path / "metrics.jsonl", tmp_path / "board"
    arguments = [
        "--metrics",
        str(metrics),
        "--tensorboard",
        str(board),
        "--peak-tflops",
        "0.5",
        "--save",
    ]
    pretrain_gpt.main(
        [*SMALL, *arguments, str(tmp_path / "a"), "--steps", "3", "--save-interval", "2"]
    )
    resumed = ["--load", str(tmp_path / "a" / "step_00000002"), "--steps", "4", "--device", "cpu"]
    pretrain_gpt.main([*arguments, str(tmp_path / "b"), *resumed])
    told = EventAccumulator(str(board)).Reload()
    steps = {record["step"]: record for record in records(metrics) if "loss" in record}
    for key in ("loss", "mfu", "forward_time"):
        points = {event.step: event.value for event in told.Scalars(f"train/{key}")}
        assert points == pytest.approx(
            {step: record[key] for step, record in steps.items()}, rel=1e-6
        )
    assert [event.step for event in told.Scalars("eval/loss")] == [4]
    flops = flops_per_token(Checkpoint(tmp_path / "b").config, 32)
    for record in steps.values():
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 0.5e12)
        assert record["tflops"] == pytest.approx(record["mfu"] / 2)
    assert re.search(r"tokens/s  mfu \d+\.\d%  ", capsys.readouterr().out)


def test_profile_names_the_actions(ranks, tmp_path):
    layout = ["--pp", "2", "--schedule", "zb-h1", "--steps", "3"]
    ranks(
        pretrain_gpt.main,
        2,
        [*SMALL, *layout, "--profile", str(tmp_path), "--profile-steps", "2", "3"],
    )
    for rank in (0, 1):
        with gzip.open(tmp_path / f"rank_{rank}.json.gz") as file:
            events = [
                event
                for event in json.load(file)["traceEvents"]
                if event.get("cat") == "user_annotation"
            ]
        names = Counter(event["name"] for event in events)
        actions = [str(action) for action in zb_h1(rank, 2, 1, 4)]
        assert {name: names[name] for name in actions} == dict.fromkeys(actions, 2)  # of two steps
        assert names["exchange"]
        assert names["optimizer"] == names["data"] == 2


def test_toml_file_and_command_line(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(
        'preset = "gpt2-tiny"\nlayers = 3\nsteps = 7\ntie_embeddings = false\nlr = 1e-4\nmin_lr = 0\n'
    )
    options = pretrain_gpt.parse_options(["--config", str(config), "--steps", "9"], "")
    assert (options.training.steps, options.model.layers, options.optimizer.lr) == (9, 3, 1e-4)
    model = pretrain_gpt.model_config(options.model)
    assert (model.layers, model.hidden_size, model.tie_embeddings) == (3, 128, False)


def test_steps_and_epochs_replace_each_other(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text('epochs = 3\ndata = [0.7, "a", 0.3, "b"]\n')
    options = pretrain_gpt.parse_options(["--config", str(config)], "")
    assert (options.training.epochs, options.data.data) == (3, ("0.7", "a", "0.3", "b"))
    options = pretrain_gpt.parse_options(
        ["--config", str(config), "--steps", "5", "--data", "c"], ""
    )
    assert (options.training.epochs, options.training.steps, options.data.data) == (None, 5, ("c",))
    saved = {"epochs": 3, "steps": 70, "lr_decay_steps": 70}
    for arguments, epochs, steps in [
        ([], 3, 400),
        (["--steps=90"], None, 90),
        (["--epochs", "4"], 4, 400),
    ]:
        options = pretrain_gpt.parse_options(arguments, "", resumed=saved)
        assert (options.training.epochs, options.training.steps) == (epochs, steps)
        assert options.optimizer.lr_decay_steps == 70
    # of a run on random tokens
    for arguments, data in [([], ("mock",)), (["--data", "c"], ("c",))]:
        options = pretrain_gpt.parse_options(
            arguments, "", resumed={"data": ["mock"], "mock_data": True}
        )
        assert options.data.data == data
    config.write_text("mock_data = true\n")
    assert pretrain_gpt.parse_options(["--config", str(config), "--data", "c"], "").data.data == (
        "c",
    )
    with pytest.raises(megazoo.UserError, match="give data or mock-data, not both"):
        pretrain_gpt.parse_options(["--mock-data", "--data", "c"], "")
    config.write_text("epochs = 3\nsteps = 5\n")
    with pytest.raises(megazoo.UserError, match="give steps or epochs, not both"):
        pretrain_gpt.parse_options(["--config", str(config)], "")


def test_epochs_are_counted_in_samples_and_a_test_ends_them(ranks, tmp_path, capsys, monkeypatch):
    """Two epochs at pp 3, whose middle stage has no data; then one more in one process."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "word " * 20}) + "\n" for _ in range(50))
    )
    metrics = tmp_path / "metrics"
    common = ["--metrics", str(metrics), "--save", str(tmp_path / "run"), "--device", "cpu"]
    data = ["--data", str(tmp_path / "a.jsonl"), "--split", "80,10,10"]
    ranks(pretrain_gpt.main, 3, [*SMALL, *common, *data, "--pp", "3", "--epochs", "2"])
    samples = (40 * 101 - 1) // 32
    steps = -(-2 * samples // 8)
    assert [record["step"] for record in records(metrics) if "loss" in record] == list(
        range(1, steps + 1)
    )
    assert set(records(metrics)[-1]) == {"step", "test_loss", "test_perplexity"}
    pretrain_gpt.main([*common, "--load", str(tmp_path / "run"), "--epochs", "3"])
    assert records(metrics)[-1]["step"] == -(-3 * samples // 8)
    out = capsys.readouterr().out
    assert re.search(
        r"training loss \d\.\d{4}, validation loss \d\.\d{4}, test loss \d\.\d{4} nats a token", out
    )
    assert re.search(r"go on .*--epochs 6$", out, re.MULTILINE)
    assert "--epochs 3 " not in out
    with pytest.raises(
        megazoo.UserError, match=f"--epochs 3, {-(-3 * samples // 8)} steps, leaves nothing to do"
    ):
        pretrain_gpt.main([*common, "--load", str(tmp_path / "run")])
    with monkeypatch.context() as restarted:
        restarted.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        pretrain_gpt.main(common)  # nothing remains
    before = -(-3 * samples // 8)
    larger = ["--global-batch-size", "32", "--load", str(tmp_path / "run"), "--epochs", "4"]
    pretrain_gpt.main([*common, *larger])
    record = [record for record in records(metrics) if "loss" in record][-1]
    assert record["step"] == before - (8 * before - 4 * samples) // 32
    assert 0 <= record["consumed_samples"] - 4 * samples < 32


def test_mock_data_needs_neither_files_nor_a_tokenizer_that_fits(tmp_path):
    metrics = tmp_path / "metrics"
    pretrain_gpt.main(
        [*SMALL, "--mock-data", "--vocab-size", "50", "--steps", "2", "--metrics", str(metrics)]
    )
    assert abs(records(metrics)[0]["loss"] - math.log(50)) < 0.2


def test_dropout_and_sizes_over_a_preset():
    options = pretrain_gpt.parse_options(
        ["--preset", "gpt2-124m", "--hidden-size", "1536", "--dropout", "0.2"], ""
    )
    model = pretrain_gpt.model_config(options.model)
    assert (model.ffn_size, model.layers, model.vocab_size) == (6144, 12, 50257)
    assert model.embedding_dropout == model.attention_dropout == model.residual_dropout == 0.2


def test_the_shipped_configs_are_valid():
    for path in (ROOT / "configs").glob("*.toml"):
        options = pretrain_gpt.parse_options(["--config", str(path)], "")
        config = pretrain_gpt.model_config(options.model)
        pretrain_gpt.check_run(options, GPT2, config, ByteTokenizer(), dp=1)


def test_rotary_scaling_takes_seq_length_past_max_positions(tmp_path):
    file = tmp_path / "config.json"
    sizes = '"model": "llama", "vocab_size": 257, "max_positions": 64, "hidden_size": 32, "layers": 1, "heads": 2'
    file.write_text(f'{{{sizes}, "rope_scaling": {{"rope_type": "linear", "factor": 4.0}}}}')
    for length in (256, 257):
        options = pretrain_gpt.parse_options(
            ["--preset", str(file), "--seq-length", str(length)], ""
        )
        config = pretrain_gpt.model_config(options.model)
        if length == 256:
            pretrain_gpt.check_run(options, Llama, config, ByteTokenizer(), dp=1)
            continue
        with pytest.raises(UserError) as refused:
            pretrain_gpt.check_run(options, Llama, config, ByteTokenizer(), dp=1)
    what = (
        "seq-length 257 exceeds the model's max-positions 64, which its rotary scaling takes to 256"
    )
    assert str(refused.value) == f"{what}: use at most that, or a larger --max-positions"


BAD_INPUT = {
    "--tp 3": "tp 3 doesn't divide heads 4: use tp 1, 2 or 4",
    "--tp 8": "tp 8 doesn't divide heads 4: use tp 1, 2 or 4",
    "--tp 0": "tp 0 must be at least 1",
    "--pp 5": "layers 4 don't fill pp 5 stages: use pp of at most 4",
    "--heads 3": "heads 3 don't divide hidden-size 128: use heads 1, 2, 4, 8, 16, 32, 64 or 128",
    "--layers 0": "layers 0 must be at least 1",
    "--global-batch-size 10 --micro-batch-size 4": "global-batch-size 10 is not a multiple of micro-batch-size 4 "
    "x dp 1 = 4: use 8 or 12",
    "--micro-batch-size 64 --global-batch-size 32": "global-batch-size 32 is not a multiple of micro-batch-size 64 "
    "x dp 1 = 64: use 64",
    "--micro-batch-size 0": "micro-batch-size 0 must be at least 1",
    "--seq-length 512": "seq-length 512 exceeds the model's max-positions 256: use at most that, or a larger "
    "--max-positions",
    "--vocab-size 100": "vocab-size 100 is smaller than the 257 of the tokenizer byte",
    "--hiden-size 64": "unknown flag --hiden-size; did you mean --hidden-size? (--help lists all)",
    "--preset gpt2-xll": "unknown model or preset 'gpt2-xll'; did you mean gpt2-xl?",
    "--model bert": "unknown model or preset 'bert'; there are",
    "--tp two": "Error parsing --tp: invalid literal for int() with base 10: 'two'",
    "--lr nan": "lr nan must be 0 or more",
    "--lr 1e-4 --min-lr 1e-3": "min-lr 0.001 exceeds lr 0.0001: give both",
    "--warmup-steps 500": "warmup-steps 500 exceeds the 400 steps of the schedule: use less",
    "--dropout 1": "dropout 1.0 must be below 1",
    "--schedule 2f2b": "unknown schedule '2f2b': there are gpipe, 1f1b, zb-h1",
    "--steps": "Missing value for argument '--steps'.",
    "stray": "Unrecognized options: stray",
    "--data wikitext": "unknown data 'wikitext': there is stdlib",
    "--split 1": "split '1' is not two or three shares such as 95,5 or 98,1,1",
    "--tokenizer bpe": "unknown tokenizer 'bpe': there is byte",
    "--load /nowhere": "/nowhere is not a directory",
    "--load tests": "tests is not a checkpoint: it has neither latest nor megazoo.json, nor config.json",
    "--config none.toml": "--config none.toml: No such file or directory",
    "--config LICENSE": "--config LICENSE is not TOML:",
    "--config tests/bad_key.toml": "tests/bad_key.toml: unknown key warm_up_steps; did you mean warmup_steps?",
    "--save README.md": "--save: README.md is not a directory",
    "--save LICENSE/run": f"--save: {ROOT}/LICENSE is not a directory",
    "--metrics LICENSE/run": "--metrics: LICENSE is not a directory",
    "--config docs/loss.png": "--config docs/loss.png is not TOML:",
    "--split nan,5": "split 'nan,5' is not two or three shares such as 95,5",
    "--metrics tests": "--metrics tests is a directory",
    "--data 0.5 stdlib 0.5": "data '0.5 stdlib 0.5' is neither one source nor weights and sources in turn",
    "--data 0 stdlib 1 stdlib": "the weights of a blend must be above 0: 0, 1",
    "--epochs 2 --steps 3": "give steps or epochs, not both",
    "--epochs 0": "epochs 0 must be at least 1",
    "--data-workers -1": "data-workers -1 must be 0 or more",
    "--chat-template hello": "chat-template 'hello' must have {content} once, and may have {role}",
}


@pytest.mark.parametrize("arguments", BAD_INPUT)
def test_bad_input_ends_with_one_line_and_exit_code_2(arguments, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments.split()])
    monkeypatch.setattr(
        pretrain_gpt.megazoo, "from_config", lambda *_, **__: pytest.fail("a model was built")
    )
    with pytest.raises(SystemExit) as stop:
        run_program(pretrain_gpt.main)
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert err.count("\n") == 1, err
    assert err.startswith("pretrain_gpt.py: error: " + BAD_INPUT[arguments])
    assert not out


def test_a_checkpoint_of_another_shape_is_refused(tmp_path, capsys, monkeypatch):
    saved = str(tmp_path)
    pretrain_gpt.main([*SMALL, "--steps", "2", "--eval-steps", "0", "--save", saved])
    capsys.readouterr()
    for arguments, message in {
        "--layers 6": f"layers is 6, but 5 in the checkpoint {saved}/step_00000002",
        "--steps 2": f"--load {saved} is at step 2 already: --steps 2 leaves nothing to do",
    }.items():
        options = ["--model", "gpt2", "--load", saved, *arguments.split()]
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *options])
        with pytest.raises(SystemExit) as stop:
            run_program(pretrain_gpt.main)
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"pretrain_gpt.py: error: {message}\n"


def test_a_mistake_ends_the_program_itself_with_2_and_no_traceback():
    done = start([], "--tp", 3, executable=sys.executable)
    assert done.returncode == 2
    assert done.stderr == "pretrain_gpt.py: error: tp 3 doesn't divide heads 4: use tp 1, 2 or 4\n"
    assert done.stdout == ""


def test_help_names_every_setting():
    done = start([], "--help", executable=sys.executable)
    assert done.returncode == 0
    for setting in settings_of(Options):
        assert re.search(rf"--{setting.replace('_', '-')}[ ,]", done.stdout), setting


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA devices")
def test_more_ranks_than_cuda_devices_are_refused_before_they_start():
    done = start([], "--device", "cuda", "--tp", 2)
    message = "cuda: 2 ranks here but 0 CUDA devices: use fewer, or --device cpu"
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        f"pretrain_gpt.py: error: {message}\n",
    )


def test_a_run_that_diverges_stops_before_it_saves(tmp_path, capsys, monkeypatch):
    arguments = [*SMALL, "--lr", "1e30", "--clip-grad", "0", "--steps", "5", "--save-interval", "1"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments, "--save", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        run_program(pretrain_gpt.main)
    assert stop.value.code == 1
    assert re.search(r"gradient norm \S+ at step \d: try a smaller --lr", capsys.readouterr().err)
    kept = [path.name for path in tmp_path.glob("step_*")]
    assert len(kept) < 5


def test_a_checkpoint_that_is_not_of_a_run_is_refused(tmp_path, capsys, monkeypatch):
    path = save(tmp_path, 1, megazoo.from_config("gpt2-tiny"))
    whole = (path / "trainer.json").read_text()
    for text, message, code in [
        (whole, "is not of a training run: trainer.json has no consumed_samples", 2),
        ("{", f"trainer.json has 1 bytes, the manifest says {len(whole)}", 1),
    ]:
        (path / "trainer.json").write_text(text)
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--load", str(tmp_path)])
        with pytest.raises(SystemExit) as stop:
            run_program(pretrain_gpt.main)
        error = capsys.readouterr().err
        assert (stop.value.code, error.count("\n"), message in error) == (code, 1, True), error
