"""Flags of other trainers, and short names of dtypes."""

import re

import pytest

from megazoo import UserError
from megazoo.cli.elsewhere import KNOWN, MEGATRON, OTHER, REASONS, TORCHTITAN, TRAINER
from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ConversionOptions
from megazoo.cli.parsing import CommandLine
from megazoo.programs import generate, plan
from megazoo.settings import flag_of, settings_of
from megazoo.trainer.options import Options

FLAGS = {flag_of(name) for name in settings_of(Options)}


def test_every_flag_of_another_trainer_names_one_of_ours():
    assert len(KNOWN) == sum(map(len, (MEGATRON, TRAINER, TORCHTITAN, OTHER))) >= 40
    for theirs, ours in KNOWN.items():
        assert flag_of(theirs) not in FLAGS, theirs
        words = ours.split()
        assert words[0] in FLAGS, ours
        if len(words) == 2:  # with a value that it takes
            parse_flags(Options, words, "")
        with pytest.raises(UserError, match=f"unknown flag --{theirs}; write {words[0]}"):
            parse_flags(Options, [f"--{theirs.replace('-', '_')}", "1"], "")


def test_what_needs_no_flag_is_said_with_its_reason():
    assert not REASONS.keys() & KNOWN.keys()
    for theirs, reason in REASONS.items():
        assert flag_of(theirs) not in FLAGS, theirs
        mentioned = set(re.findall(r"--[a-z][a-z-]+", reason))
        assert mentioned <= FLAGS, theirs
        with pytest.raises(UserError) as error:
            parse_flags(Options, [f"--{theirs}"], "")
        assert f"unknown flag --{theirs}; omit it: {reason}" in str(error.value)


def test_all_unknown_flags_of_a_line_are_named_at_once(tmp_path):
    line = "--tensor-model-parallel-size 2 --swiglu --hiden-size 64 --xqzw --train_iters=5 --tp 2"
    with pytest.raises(UserError) as error:
        parse_flags(Options, line.split(), "")
    assert str(error.value) == "5 unknown flags (--help-all lists all)"
    first, needless, *others = error.value.details
    assert first == "--tensor-model-parallel-size: write --tp instead"
    assert needless.startswith("--swiglu: omit it: --model or --preset")
    assert others == [
        "--hiden-size: did you mean --hidden-size?",
        "--xqzw",
        "--train-iters: write --steps instead",
    ]
    (tmp_path / "run.toml").write_text("train_iters = 5\nhiden_size = 4\n")
    with pytest.raises(
        UserError, match=r"run\.toml: unknown keys: train_iters: write .*; hiden_size"
    ):
        CommandLine.read(["--config", f"{tmp_path}/run.toml"], "")


@pytest.mark.parametrize(
    ("words", "use"),
    [
        ("--train_iters=5 --no-rope-fusion --lr 1e-3", "--steps 5 --lr 1e-3"),
        ("--num-layers 2 --bf16 True --attention-backend flash", "--layers 2 --dtype bfloat16"),
        ("--data-path 0.5 a 0.5 b --finetune", "--data 0.5 a 0.5 b --load-weights-only"),
        ("--model llama --swiglu --train-iters 5", "--model llama --steps 5"),
        ("--swiglu --train-iters 5", "--model NAME --steps 5"),  # not the default model
        ("--load a --finetune --no-load-optim", "--load a --load-weights-only"),
        ("--load a --no-load-optim --train-iters 5", None),  # it would load the optimizer
        ("--max-steps -1 --num-train-epochs 3", None),
        ("--train-iters 5 --use-flash-attn --fsdp full_shard", None),  # no direct equivalent
        ("--train-iters 5 --use-flash-attn --hiden-size 4", None),
        ("--train-iters 5 --bf16 False", None),
        ("--train-iters 5 --optim adamw_torch", None),  # not a value of --optimizer
        ("--train-iters 5 --log-params-norm", None),  # needs a file
    ],
)
def test_the_error_has_the_command_if_every_flag_is_translated(words, use):
    with pytest.raises(UserError) as error:
        parse_flags(Options, words.split(), "")
    commands = [line for line in error.value.details if line.startswith("use: ")]
    assert len(commands) == (use is not None)
    assert all(line.endswith(f" {use}") for line in commands)


def test_flags_of_frameworks_without_an_equivalent_are_explained():
    for flag, hint in {
        "--ranks": "write --dp (replicas; the number of ranks is tp x pp x cp x dp), or --gpus",
        "--batch-size": "write --micro-batch-size (per forward pass) or --global-batch-size",
        "--fsdp": "write --zero 3 (it shards parameters, gradients and the optimizer state",
    }.items():
        with pytest.raises(UserError) as error:
            parse_flags(Options, [flag, "4"], "")
        assert str(error.value).startswith(f"unknown flag {flag}; {hint}")


def test_a_program_suggests_only_what_it_has():
    with pytest.raises(UserError, match="unknown flag --num-layers; write --layers instead"):
        parse_flags(plan.Options, ["--num-layers", "2"], "")
    with pytest.raises(UserError) as error:
        parse_flags(generate.Options, ["--logging-steps", "2"], "")
    assert "write" not in str(error.value)


@pytest.mark.parametrize(
    ("short", "full"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_short_names_of_dtypes_are_taken(short, full, tmp_path):
    (tmp_path / "run.toml").write_text(f'dtype = "{short}"\n')
    for words in (["--dtype", short], [f"--dtype={short}"], ["--config", f"{tmp_path}/run.toml"]):
        assert CommandLine.read(words, "").options().training.dtype == full
    # what is no dtype stays as it is, also after one
    for words in (["--dtype", short, short, "out"], [f"--dtype={short}", short, "out"]):
        options = parse_flags(ConversionOptions, words, "")
        assert (options.source.name, options.output.name, options.dtype) == (short, "out", full)
    assert parse_flags(Options, ["--save", short], "").checkpoint.save.name == short


def test_fsdp_is_zero_3():
    for words in (["--fsdp"], ["--fsdp", "--steps", "3"], ["--zero", "3"]):
        assert CommandLine.read(words, "").options().parallel.zero == 3
    with pytest.raises(UserError, match="unknown flag --fsdp; write --zero 3"):
        CommandLine.read(["--fsdp", "full_shard"], "")
