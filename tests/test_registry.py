"""A model of a user's own: one file, registered, named on the command line."""

import sys

import pytest

import pretrain_gpt
from megazoo import register
from megazoo.checkpoint import Checkpoint
from megazoo.errors import UserError
from megazoo.launch import run_program
from megazoo.models import FAMILIES
from megazoo.models.gpt2 import GPT2

MODEL = """
from dataclasses import dataclass

import megazoo
from megazoo.models.gpt2 import GPT2, GPT2Config


@dataclass(frozen=True)
class LouderConfig(GPT2Config):
    loudness: float = 2.0


@megazoo.register("louder")
class Louder(GPT2):
    Config = LouderConfig
    presets = {"louder-tiny": LouderConfig(vocab_size=257, max_positions=32, hidden_size=32, layers=2, heads=2)}

    def forward_stage(self, x, batch, stage):
        x = super().forward_stage(x, batch, stage)
        return x * self.config.loudness if stage.last else x
"""


@pytest.fixture(autouse=True)
def _forget():
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def test_a_registered_model_trains_saves_and_resumes_from_the_command_line(tmp_path):
    file, saved = tmp_path / "louder.py", tmp_path / "run"
    file.write_text(MODEL)
    common = ["--import", str(file), "--device", "cpu", "--eval-steps", "0", "--save", str(saved)]
    batch = ["--seq-length", "32", "--global-batch-size", "4", "--micro-batch-size", "2"]
    pretrain_gpt.main([*common, *batch, "--model", "louder", "--steps", "2"])
    assert Checkpoint(saved).manifest["family"] == "louder"
    assert Checkpoint(saved).config.loudness == 2.0
    FAMILIES.pop("louder")
    pretrain_gpt.main([*common, "--load", str(saved), "--steps", "3"])
    assert Checkpoint(saved).trainer["step"] == 3


def test_a_checkpoint_of_an_unknown_family_is_refused(tmp_path, capsys, monkeypatch):
    test_a_registered_model_trains_saves_and_resumes_from_the_command_line(tmp_path)
    FAMILIES.pop("louder")
    capsys.readouterr()
    for arguments, message in {
        f"--load {tmp_path}/run": "unknown model family 'louder'; there are gpt2, llama, mpt",
        "--import nothing.py": "--import nothing.py: no such file",
    }.items():
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            run_program(pretrain_gpt.main)
        assert (stop.value.code, capsys.readouterr().err) == (2, f"pretrain_gpt.py: error: {message}\n")


def test_a_taken_name_is_refused():
    with pytest.raises(UserError, match="is taken: choose another name"):
        register("mine")(GPT2)
