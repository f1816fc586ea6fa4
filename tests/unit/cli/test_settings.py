"""Settings of the training program: flags, TOML files, sizes; and one line for each mistake."""

import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.cli import settings
from megazoo.cli.flags import parse_flags
from megazoo.cli.parsing import CommandLine, each_once
from megazoo.cli.settings import resolve
from megazoo.errors import UserError
from megazoo.models.gpt2 import GPT2
from megazoo.models.llama import Llama
from megazoo.programs.convert import Options as ConversionOptions
from megazoo.settings import described, group_of, settings_of
from megazoo.tokenizer import ByteTokenizer
from megazoo.trainer.options import Options
from megazoo.trainer.rules import check_run, model_config
from megazoo.trainer.run import notes_on_changes
from megazoo.trainer.state import settings_to_resume
from tests.support.inference import run_main
from tests.support.pretraining import ROOT, start


def test_of_a_flag_the_last_value_remains():
    for given, once in {
        "--steps=3 --load a --steps 6": "--load a --steps 6",
        "--log_interval 1 --data 0.7 a 0.3 b --log-interval 2 --data c": (
            "--log-interval 2 --data c"
        ),
        "--compile --no-compile --sequence-parallel": "--no-compile --sequence-parallel",
    }.items():
        assert each_once(given.split()) == once.split()


def test_of_each_group_of_settings_it_is_said_whether_a_run_keeps_it():
    """docs/hybrid.md has the table; a new group belongs there, and here."""
    groups = {f.name: group for f in dataclasses.fields(Options) if (group := group_of(f))}
    kept = {name for name, kind in groups.items() if any(s.kept for s in described(kind).values())}
    assert kept == {"training", "optimizer", "data", "evaluation", "loss"}
    assert groups.keys() - kept == {"parallel", "checkpoint", "logging", "model", "lora"}
    of_kept = {name: s for group in kept for name, s in described(groups[group]).items()}
    # a path, and tasks, which may run Python
    assert {name for name, s in of_kept.items() if not s.kept} == {"reference", "eval_tasks"}


def test_toml_file_and_command_line(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(
        'preset = "gpt2-tiny"\nlayers = 3\nsteps = 7\ntie_embeddings = false\n'
        "lr = 1e-4\nmin_lr = 0\n"
    )
    options = CommandLine.read(["--config", str(config), "--steps", "9"]).options()
    assert (options.training.steps, options.model.layers, options.optimizer.lr) == (9, 3, 1e-4)
    model = model_config(options.model)
    assert (model.layers, model.hidden_size, model.tie_embeddings) == (3, 128, False)


def test_steps_and_epochs_replace_each_other(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text('epochs = 3\ndata = [0.7, "a", 0.3, "b"]\n')
    options = CommandLine.read(["--config", str(config)]).options()
    assert (options.training.epochs, options.data.data) == (3, ("0.7", "a", "0.3", "b"))
    options = CommandLine.read(["--config", str(config), "--steps", "5", "--data", "c"]).options()
    assert (options.training.epochs, options.training.steps, options.data.data) == (None, 5, ("c",))
    saved = {"epochs": 3, "steps": 70, "lr_decay_steps": 70}
    for arguments, epochs, steps in [
        ([], 3, None),
        (["--steps=90"], None, 90),
        (["--epochs", "4"], 4, None),
    ]:
        options = CommandLine.read(arguments).options(saved)
        assert (options.training.epochs, options.training.steps) == (epochs, steps)
        assert options.optimizer.lr_decay_steps == 70
    # of a run on random tokens
    for arguments, data in [([], ("mock",)), (["--data", "c"], ("c",))]:
        options = CommandLine.read(arguments).options({"data": ["mock"], "mock_data": True})
        assert options.data.data == data
    config.write_text("mock_data = true\n")
    assert CommandLine.read(["--config", str(config), "--data", "c"]).options().data.data == ("c",)
    with pytest.raises(megazoo.UserError, match="--data and --mock-data exclude each other"):
        CommandLine.read(["--mock-data", "--data", "c"]).options()
    line = CommandLine.read(["--no-mock-data", "--data", "c"])
    assert line.options({"data": ["mock"], "mock_data": True}).data.data == ("c",)
    config.write_text("epochs = 3\nsteps = 5\n")
    with pytest.raises(
        megazoo.UserError, match="--steps and --epochs exclude each other: use one of them"
    ):
        CommandLine.read(["--config", str(config)]).options()


def test_dropout_and_sizes_over_a_preset():
    options = CommandLine.read(
        ["--preset", "gpt2-124m", "--hidden-size", "1536", "--dropout", "0.2"]
    ).options()
    model = model_config(options.model)
    assert (model.ffn_size, model.layers, model.vocab_size) == (6144, 12, 50257)
    assert model.embedding_dropout == model.attention_dropout == model.residual_dropout == 0.2


def test_the_default_example_is_valid():
    """tests/programs/test_recipes.py runs the other files of configs/."""
    settings = resolve(["--config", str(ROOT / "configs" / "gpt2_tiny.toml")], "")
    check_run(settings.options, GPT2, settings.config, ByteTokenizer(), dp=1)


def test_rotary_scaling_takes_seq_length_past_max_positions(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(
        '{"model": "llama", "vocab_size": 257, "max_positions": 64, "hidden_size": 32, '
        '"layers": 1, "heads": 2, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}'
    )
    for length in (256, 257):
        settings = resolve(["--preset", str(file), "--seq-length", str(length)], "")
        given = (settings.options, Llama, settings.config, ByteTokenizer())
        if length == 256:
            check_run(*given, dp=1)
            continue
        with pytest.raises(UserError) as refused:
            check_run(*given, dp=1)
    what = (
        "seq-length 257 exceeds the model's max-positions 64, extended to 256 by its rotary scaling"
    )
    assert str(refused.value) == f"{what}: use a smaller --seq-length, or a larger --max-positions"


BAD_INPUT = {
    "--tp 3": "heads 4 can't be sharded over tp 3: use tp 1, 2 or 4",
    "--tp 8": "heads 4 can't be sharded over tp 8: use tp 1, 2 or 4",
    "--tp 0": "--tp 0 must be at least 1",
    "--pp 5": "layers 4 are too few for pp 5 stages: use pp of at most 4",
    "--heads 3": "hidden-size 128 is not divisible by heads 3: use heads 1, 2, 4, 8, 16, 32, 64 or",
    "--layers 0": "--layers 0 must be at least 1",
    "--global-batch-size 10 --micro-batch-size 4": (
        "global-batch-size 10 is not a multiple of micro-batch-size 4 x dp 1 = 4: use 8 or 12"
    ),
    "--micro-batch-size 64 --global-batch-size 32": (
        "global-batch-size 32 is not a multiple of micro-batch-size 64 x dp 1 = 64: use 64"
    ),
    "--micro-batch-size 0": "--micro-batch-size 0 must be at least 1",
    "--seq-length 512": (
        "seq-length 512 exceeds the model's max-positions 256: "
        "use a smaller --seq-length, or a larger --max-positions"
    ),
    "--vocab-size 100": (
        "--vocab-size 100 is smaller than the vocabulary of the tokenizer byte, 257 tokens: use"
    ),
    "--hiden-size 64": (
        "unknown flag --hiden-size; did you mean --hidden-size? (--help-all lists all)"
    ),
    "--preset gpt2-xll": "unknown model or preset 'gpt2-xll'; did you mean gpt2-xl?",
    "--model bert": "unknown model or preset 'bert'; `megazoo models` lists the presets of bloom",
    "--tp two": "--tp is 'two': it must be an int",
    "--lr x": "--lr is 'x': it must be a number",
    "--dtype float8": "--dtype is 'float8': use one of float32, bfloat16, float16",
    "--zero 4": "--zero is '4': use one of 0, 1",
    "--sequence-parallel=maybe": "--sequence-parallel is 'maybe': use one of True, False",
    "--profile-steps 1": "--profile-steps needs 2 values",
    "--lr nan": "--lr nan must be 0 or more",
    "--lr 1e-4 --min-lr 1e-3": "--min-lr 0.001 exceeds --lr 0.0001: use a smaller --min-lr",
    "--warmup-steps 900": "--warmup-steps 900 exceeds the 600 steps of the learning-rate "
    "schedule: use fewer",
    "--dropout 1": "--dropout 1.0 must be below 1",
    "--schedule 2f2b": "unknown schedule '2f2b': use one of gpipe, 1f1b, zb-h1",
    "--steps": "--steps needs a value",
    "stray": "unexpected argument stray: it does not belong to a flag (see --help)",
    "--compile x": "unexpected argument x: it does not belong to a flag (see --help)",
    "--profile-steps a b": "--profile-steps is ['a', 'b']: all values must be whole numbers",
    "--preset Qwen/Qwen3-1B": "unknown model or preset 'Qwen/Qwen3-1B'; to load a model of "
    "the Hugging Face hub with its weights, use --load Qwen/Qwen3-1B or megazoo.from_pretrained(",
    "--load Qwen/Qwen3-1B": "Qwen/Qwen3-1B is not a directory, and no model of that name is in the",
    "--data wikitext": "--data 'wikitext' is not found, or not supported: use stdlib",
    "--split 1": "--split '1' is not valid: use two or three proportions",
    "--tokenizer bpe": "unknown tokenizer 'bpe': use byte",
    "--load /nowhere": "/nowhere is not a directory",
    "--load tests": (
        "tests is not a checkpoint: it has neither latest nor megazoo.json, nor config.json"
    ),
    "--config none.toml": "--config none.toml: No such file or directory",
    "--config LICENSE": "--config LICENSE is not TOML:",
    "--config tests/bad_key.toml": (
        "tests/bad_key.toml: unknown key warm_up_steps; did you mean warmup_steps?"
    ),
    "--save README.md": "--save: README.md is not a directory",
    "--save LICENSE/run": f"--save: {ROOT}/LICENSE is not a directory",
    "--metrics LICENSE/run": "--metrics: LICENSE is not a directory",
    "--config docs/loss.png": "--config docs/loss.png is not TOML:",
    "--split nan,5": "--split 'nan,5' is not valid",
    "--metrics tests": "--metrics tests is a directory",
    "--data 0.5 stdlib 0.5": (
        "--data '0.5 stdlib 0.5' is not valid: use one source, or alternating weights and sources"
    ),
    "--data 0 stdlib 1 stdlib": "the weights of a blend must be above 0: 0, 1",
    "--epochs 2 --steps 3": "--steps and --epochs exclude each other: use one of them",
    "--epochs 0": "--epochs 0 must be at least 1",
    "--data-workers -1": "--data-workers -1 must be 0 or more",
    "--save=": "--save is empty: pass a directory",
    "--load=": "--load is empty: pass a directory",
    "--config=": "--config is empty: pass a directory",
    "--import=": "--import is empty: pass a directory",
    "--metrics=": "--metrics is empty: pass a directory",
    "--tokenizer=": "--tokenizer is empty: pass a name",
    "--data=": "--data is empty: pass a directory",
    "--save a\udc80b": "--save is 'a\\udc80b': it must be text in UTF-8, without NUL",
    "--save a\0b": "--save is 'a\\x00b': it must be text in UTF-8, without NUL",
    "--steps 1e23": "--steps is '1e23': it must be an int",
    f"--steps {10**30}": f"--steps is {10**30}: it must be below 2**63",
    f"--steps {10**13}": "--steps 10000000000000 must be at most 1,000,000,000,000",
    "--lr 1e308": "--lr 1e+308 must be at most 1e+100",
    "--timeout 1e308": "--timeout 1e+308 must be at most 31,536,000",
    f"--vocab-size {10**18}": f"vocab_size {10**18} must be at most {2**40}",
    f"--layers {10**9}": "layers 1000000000 must be at most 10000",
    f"--heads {10**9}": "heads 1000000000 must be at most 65536",
    f"--hidden-size {10**9}": "hidden_size 1000000000 must be at most 1048576",
    f"--ffn-size {10**9}": "ffn_size 1000000000 must be at most 16777216",
    f"--tp {10**9}": "--tp 1000000000 must be at most 65,536",
    "--data-workers 100000": "--data-workers 100000 must be at most 1,000",
    "--chat-template hello": "chat template 'hello' is not valid: use Jinja",
}


def test_bad_input_ends_with_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(megazoo, "from_config", lambda *_, **__: pytest.fail("a model was built"))
    wrong = {}
    for arguments, line in BAD_INPUT.items():
        code, out, err = run_main(pretrain, monkeypatch, capsys, *arguments.split())
        is_right = err.startswith("pretrain_gpt.py: error: " + line) and err.count("\n") == 1
        if not is_right or code != 2 or out:
            wrong[arguments] = (code, out, err)
    assert not wrong


def test_an_empty_word_after_a_flag_is_refused_and_so_is_an_empty_argument():
    with pytest.raises(UserError, match=r"^--save is empty: pass a directory"):
        CommandLine.read(["--save", "", "--steps", "3"]).options()
    with pytest.raises(UserError, match=r"^--data is empty"):
        CommandLine.read(["--data", "0.5", "a", "0.5", ""]).options()
    for words in (["", "b"], ["a", ""], ["a", "--overwrite", ""], ["--tp", "2", "a", ""]):
        with pytest.raises(UserError, match=r"^an argument is empty: pass a directory or file"):
            parse_flags(ConversionOptions, words, "")


TOML = {
    'save = ""': "save is empty: pass a directory",
    'data = ["a", ""]': "data is empty: pass a directory",
    "save = 5": "save is 5: it must be a path",
    'tp = "two"': "tp is 'two': it must be an int",
    "tp = 2.0": "tp is 2.0: it must be an int",
    "tp = true": "tp is True: it must be an int",
    "lr = false": "lr is False: it must be a number",
    'compile = "yes"': "compile is 'yes': it must be true or false",
    "tie_embeddings = 1": "tie_embeddings is 1: it must be true or false",
    'dtype = "float8"': "dtype is 'float8': use one of float32, bfloat16, float16",
    "zero = 4": "zero is 4: use one of 0, 1",
    "stage_layers = 5": "stage_layers is 5: it must be a string",
    "profile_steps = [1]": "profile_steps is a list",
    "steps = [1]": "steps must be a single value",
    'lora_targets = ["q", "v"]': "lora_targets must be a single value, such as 'q,v'",
    "data = [[1]]": "data[0] is a list: it must be a string",
    "metrics = 1979-05-27": "metrics is datetime.date(1979, 5, 27): it must be a path",
    "model = { a = 1 }": "model must be a single value",
    'metrics = "a\\u0000b"': "metrics is 'a\\x00b': it must be text in UTF-8, without NUL",
    "steps = " + "9" * 5000: "is not TOML: ",
    "steps = 0x" + "f" * 5000: "steps is a huge number: it must be",
    "data = " + "[" * 10_000 + "]" * 10_000: "is not TOML: ",
}


def test_a_wrong_value_in_a_toml_file_is_one_line_that_names_the_file(tmp_path):
    file = tmp_path / "c.toml"
    for text, message in TOML.items():
        file.write_text(text)
        with pytest.raises(UserError) as refused:
            CommandLine.read(["--config", str(file)]).options()
        assert str(file) in str(refused.value), text[:100]
        assert message in str(refused.value), text[:100]


def test_text_in_a_toml_file_is_never_a_flag(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('data = "--metrics=x"\nwandb = "--save"\nsplit = "--load"\n')
    options = CommandLine.read(["--config", str(file)]).options()
    assert (options.data.data, options.logging.wandb) == (("--metrics=x",), "--save")
    assert options.data.split == "--load"
    assert (options.logging.metrics, options.checkpoint.save) == (None, None)


def test_values_of_a_toml_file_have_the_types_of_the_settings(tmp_path):
    file, imported = tmp_path / "c.toml", tmp_path / "b.py"
    imported.touch()
    file.write_text(
        f'lr = 1\nmin_lr = 0\nsave = "a"\nprofile_steps = [2, 4]\nzero = 1\nimport = "{imported}"\n'
        'data = "a.jsonl"\ncompile = true\ntie_embeddings = false\nmodel = "llama"\n'
    )
    options = CommandLine.read(["--config", str(file), "--no-compile"]).options()
    assert repr((options.optimizer.lr, options.optimizer.min_lr)) == "(1.0, 0.0)"
    assert (options.checkpoint.save, options.model.import_) == (Path("a"), imported)
    assert (options.logging.profile_steps, options.parallel.zero) == ((2, 4), 1)
    assert (options.data.data, options.training.compile) == (("a.jsonl",), False)
    assert (options.model.tie_embeddings, options.model.model) == (False, "llama")


def test_a_text_in_a_toml_file_may_stand_for_a_number_but_not_in_a_checkpoint(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        'steps = "7"\nlr = "1e-4"\nzero = "1"\nprofile_steps = ["2", "4"]\nseed = "1"\n'
    )
    options = CommandLine.read(["--config", str(file)]).options()
    assert (options.training.steps, options.optimizer.lr, options.parallel.zero) == (7, 1e-4, 1)
    assert (options.logging.profile_steps, options.training.seed) == ((2, 4), 1)
    with pytest.raises(UserError, match="steps is '7': it must be an int"):
        CommandLine.read([]).options({"steps": "7"})


def test_a_resumed_run_evaluates_as_before():
    settings = settings_to_resume(CommandLine.read("--eval-interval 7".split()).options())
    options = CommandLine.read(["--eval-steps", "3"]).options(settings)
    assert (options.evaluation.eval_interval, options.evaluation.eval_steps) == (7, 3)


def test_what_has_changed_of_the_samples_is_told():
    begun = settings_to_resume(CommandLine.read([]).options())
    for given, notes in {
        "": [],
        "--split 90,10 --lr 1": ["split: 90,10; the checkpoint's run had 95,5"],
        "--seed 5 --separate-documents": [
            "separate-documents: True; the checkpoint's run had False",
            "seed: 5; the checkpoint's run had 1234",
        ],
    }.items():
        options = CommandLine.read(given.split()).options(begun)
        run = SimpleNamespace(options=options, state={"settings": begun})
        assert notes_on_changes(run) == notes, given


def test_data_that_a_checkpoint_names_is_told():
    for before, given, note in [
        ("stdlib", [], None),
        ("a.jsonl", [], "data: a.jsonl, from the checkpoint"),
        ("a.jsonl", ["--data", "b"], "data: b; the checkpoint's run had a.jsonl"),
        ("stdlib", ["--data", "b"], "data: b; the checkpoint's run had stdlib"),
        ("a.jsonl", ["--mock-data"], "data: mock; the checkpoint's run had a.jsonl"),
    ]:
        options = CommandLine.read(given).options({"data": (before,)})
        state = {"settings": {"data": (before,)}}
        found = notes_on_changes(SimpleNamespace(options=options, state=state))
        assert found == ([note] if note else []), given


def test_a_mistake_ends_the_program_itself_with_2_and_no_traceback():
    done = start([], "--tp", 3)
    assert done.returncode == 2
    assert (
        done.stderr
        == "pretrain_gpt.py: error: heads 4 can't be sharded over tp 3: use tp 1, 2 or 4, "
        "or use --pp 3\n"
    )
    assert done.stdout == ""


@pytest.fixture
def no_torch(tmp_path, monkeypatch):
    """An import of torch in a started program fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_help_all_names_every_setting_and_needs_no_torch(no_torch):
    done = start([], "--help-all", executable=sys.executable)
    assert done.returncode == 0
    for setting in settings_of(Options):
        assert re.search(rf"--{setting.replace('_', '-')}[ ,]", done.stdout), setting
    assert done.stdout.index("--data ") < done.stdout.index("--router-z-loss-coef ")


def test_help_fits_on_a_page_and_names_the_topics(no_torch, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = start([], "--help", executable=sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    box, _, topics = done.stdout.partition("╰")
    flags = re.findall(r"^│ --(\S+)", box, re.MULTILINE)
    assert flags == [name.replace("_", "-") for name in Options.FIRST]
    assert done.stdout.count("\n") <= 64
    assert "(default: that of the model of" in box
    assert f"--help-all describes all {len(settings_of(Options))} options" in topics
    groups = [f for f in dataclasses.fields(Options) if dataclasses.is_dataclass(f.default_factory)]
    assert all(group.name in topics for group in groups)


def test_help_after_other_flags_is_the_same(capsys):
    for words in (["--zero", "1", "--help"], ["-h"]):
        with pytest.raises(SystemExit) as stop:
            CommandLine.read(words)
        assert (stop.value.code, "--help-all describes" in capsys.readouterr().out) == (0, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA devices")
def test_more_ranks_than_cuda_devices_are_refused_before_they_start():
    done = start([], "--device", "cuda", "--tp", 2)
    message = "cuda: 2 ranks here but 0 CUDA devices: use fewer, or --device cpu"
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        f"pretrain_gpt.py: error: {message}\n",
    )


def test_what_is_given_is_checked_with_what_the_resumed_run_has(monkeypatch, tmp_path):
    """More steps of warm-up than a new run has steps, and fewer than this one."""
    kept = settings_to_resume(CommandLine.read(["--steps", "2000"]).options())
    state = {"step": 1, "consumed_samples": 8, "consumed_tokens": 64, "settings": kept}
    resumed = SimpleNamespace(path=tmp_path, trainer=state)
    opened = SimpleNamespace(resumed=lambda options: resumed, described=None)
    monkeypatch.setattr(settings, "open_weights", lambda options: opened)
    given = ["--load", str(tmp_path), "--warmup-steps", "500"]
    assert settings.resolve(given, "").options.training.steps == 2000
    with pytest.raises(UserError, match="--warmup-steps 2500 exceeds the 2000 steps"):
        settings.resolve([*given[:-1], "2500"], "")
