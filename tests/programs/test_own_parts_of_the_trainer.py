"""An output and a learning-rate schedule of a user: one file of --import each, no other line."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import tyro

from megazoo import pretrain
from megazoo.cli.parsing import CommandLine
from megazoo.errors import UserError
from megazoo.optim.learning_rate import LR_SCHEDULES
from megazoo.programs import check_run
from megazoo.settings import Setting, about, described
from megazoo.trainer.callbacks import CALLBACKS, Metrics
from megazoo.trainer.options import LoggingOptions, Options, TrainingOptions
from megazoo.trainer.outputs import OUTPUTS
from megazoo.trainer.run import agreed, notes_on_changes
from megazoo.trainer.state import settings_to_resume
from tests.support.pretraining import SMALL, losses, records

OUTPUT = '''


from megazoo.trainer import Output, register_output


@register_output("loss_table")
class LossTable(Output):
    """CSV file to append the loss of each step to."""

    metavar = "FILE"

    def open(self, value, *, run_id, settings, step):
        self.run_id = run_id or f"table-{settings['seed']}"
        self.file = value.open("a")
        print(f"run {self.run_id} after step {step}", file=self.file)

    def write(self, step, values):
        if "loss" in values:
            print(f"{step},{values['loss']}", file=self.file)

    def close(self, failed):
        print("failed" if failed else "done", file=self.file)
        self.file.close()
'''
SCHEDULE = '''
import math
from dataclasses import dataclass
from typing import Annotated

from megazoo.optim import LRSchedule, register_lr_schedule
from megazoo.settings import about


@register_lr_schedule("inverse-sqrt")
@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(LRSchedule):
    """The rate falls with the square root of the step."""

    lr_timescale: Annotated[int, about(least=1)] = 2
    """Steps after which the rate has fallen to 1 / sqrt(2)."""

    def after_warmup(self, step):
        return self.lr / math.sqrt(1 + (step - self.warmup_steps) / self.lr_timescale)
'''
RUN = [*SMALL, "--data", "mock", "--layers", "1"]


@pytest.fixture
def imported(tmp_path):
    """The flag --import with a file of this text. What the file registers is removed at the end."""
    before = dict(OUTPUTS), dict(LR_SCHEDULES)

    def write(text):
        file = tmp_path / "own_part.py"
        file.write_text(text)
        return ["--import", str(file)]

    yield write
    for registry, names in zip((OUTPUTS, LR_SCHEDULES), before, strict=True):
        for name in registry.keys() - names.keys():
            del registry[name]
    CALLBACKS.clear()


def test_an_output_of_a_user(imported, tmp_path, capsys):
    words, table, run = imported(OUTPUT), tmp_path / "loss.csv", tmp_path / "run"
    job = [*RUN, *words, "--loss-table", str(table), "--steps", "2", "--save", str(run)]
    pretrain.main([*job, "--metrics", str(tmp_path / "metrics")])
    expected = [f"{step},{loss}" for step, loss in losses(tmp_path / "metrics").items()]
    first = ["run table-1234 after step 0", *expected, "done"]
    assert table.read_text().splitlines() == first
    pretrain.main(["--load", str(run), *words, "--loss-table", str(table), "--steps", "3"])
    start, _, end = table.read_text().splitlines()[len(first) :]
    assert (start, end) == ("run table-1234 after step 2", "done")
    trainer = json.loads((run / "step_00000002" / "trainer.json").read_text())
    assert trainer["callbacks"] == {"outputs": {"loss_table": "table-1234"}}
    assert "loss_table" not in trainer["settings"]
    with pytest.raises(UserError, match=r"trainer.json, outputs\[...\] has a wrong value"):
        Metrics(SimpleNamespace()).load_state_dict({"loss_table": "../x"})
    with pytest.raises(UserError, match="the loss is nan"):
        pretrain.main([*job, "--lr", "1e30", "--min-lr", "1", "--warmup-steps", "1"])
    assert table.read_text().endswith("failed\n")
    with pytest.raises(SystemExit):
        pretrain.main([*words, "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--loss-table FILE CSV file to append the loss of each step to." in shown
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--loss-table: .*file is not a directory"):
        pretrain.prepare([*job, "--loss-table", str(tmp_path / "file" / "x.csv")])
    del OUTPUTS["loss_table"]
    with pytest.raises(UserError, match="unknown flag --loss-table"):
        pretrain.prepare([*RUN, "--loss-table", "x"])


def test_a_learning_rate_schedule_of_a_user(imported, tmp_path, capsys):
    words, run, record = imported(SCHEDULE), tmp_path / "run", tmp_path / "record"
    rates = [0.5, 1.0, *(1 / math.sqrt(1 + n / 5) for n in (1, 2))]
    how = [*words, "--lr", "1e-3", "--lr-schedule", "inverse-sqrt", "--lr-timescale", "5"]
    job = [*RUN, *how, "--steps", "4", "--save", str(run), "--save-interval", "2"]
    pretrain.main([*job, "--metrics", str(tmp_path / "whole"), "--record", str(record)])
    whole = [line for line in records(tmp_path / "whole") if "lr" in line]
    assert [line["lr"] for line in whole] == pytest.approx([1e-3 * rate for rate in rates])
    rest = ["--load", str(run / "step_00000002"), *words, "--steps", "4"]
    pretrain.main([*rest, "--metrics", str(tmp_path / "rest")])
    resumed = [(line["loss"], line["lr"]) for line in records(tmp_path / "rest") if "lr" in line]
    assert resumed == [(line["loss"], line["lr"]) for line in whole[2:]]
    del LR_SCHEDULES["inverse-sqrt"]
    match = "settings has lr_timescale, which a checkpoint must not contain; its run used --import"
    with pytest.raises(UserError, match=match):
        pretrain.prepare([*rest[:2], "--steps", "4"])
    assert json.loads((record / "record.json").read_text())["settings"]["lr_timescale"] == 5
    check_run.main([str(record), *words, "--steps", "2"])
    assert "2 steps are bitwise identical" in capsys.readouterr().out
    for words, line in {
        "--lr-timescale 0": "--lr-timescale 0 must be at least 1",
        "--lr-schedule cosine": "--lr-timescale cannot be used with --lr-schedule cosine: remove",
        "--lr-schedule inverse": "--lr-schedule is 'inverse': use one of cosine, linear, const",
    }.items():
        with pytest.raises(UserError, match=line):
            pretrain.prepare([*RUN, *how, *words.split()])
    with pytest.raises(SystemExit):
        pretrain.main([*how[:2], "--help-all"])
    assert "--lr-timescale INT" in capsys.readouterr().out
    pretrain.prepare([*rest, "--lr-schedule", "cosine"])  # its option is not that of the checkpoint


CALLBACK = """
import megazoo


@megazoo.trainer.register_callback
class Tokens(megazoo.trainer.Callback):
    name, tokens, started = "tokens", 0, 0

    def on_start(self):
        self.started = self.tokens

    def on_step(self, step, values):
        self.tokens += self.trainer.tokens

    def on_stop(self, failed):
        print("tokens", self.started, self.tokens, failed)

    def state_dict(self):
        return {"tokens": self.tokens}

    def load_state_dict(self, state):
        self.tokens = state["tokens"]
"""


def test_a_callback_of_a_user_has_a_state(imported, tmp_path, capsys):
    words, run = imported(CALLBACK), tmp_path / "run"
    pretrain.main([*RUN, *words, "--steps", "2", "--save", str(run)])
    CALLBACKS.clear()
    pretrain.main(["--load", str(run), "--steps", "3", "--save", str(run)])  # keeps the state
    pretrain.main(["--load", str(run), *words, "--steps", "5", "--save", str(run)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens")]
    assert lines == ["tokens 0 512 False", "tokens 512 1024 False"]
    trainer = json.loads((run / "step_00000005" / "trainer.json").read_text())
    assert trainer["callbacks"] == {"tokens": {"tokens": 1024}}


@dataclass
class MoreTraining(TrainingOptions):
    """As it is, with one setting more."""

    extra_rate: Annotated[float, about(below=1, samples=True)] = 0.5
    """What the help says of it."""


@dataclass
class MoreOptions(Options):
    training: tyro.conf.OmitArgPrefixes[MoreTraining] = field(default_factory=MoreTraining)


def test_a_setting_is_declared_once(tmp_path, capsys):
    """Its range, help, file, checkpoint, notes and agreement of ranks follow from its field."""
    resumed = {"extra_rate": 0.25}
    options = CommandLine.read(["--steps", "3"], kind=MoreOptions).options(resumed)
    assert options.values["extra_rate"] == settings_to_resume(options)["extra_rate"] == 0.25
    (tmp_path / "c.toml").write_text("extra_rate = 0.75\n")
    words = ["--config", str(tmp_path / "c.toml")]
    options = CommandLine.read(words, kind=MoreOptions).options(resumed)
    run = SimpleNamespace(options=options, state={"settings": resumed}, config=None)
    assert notes_on_changes(run) == ["extra-rate: 0.75; the checkpoint's run had 0.25"]
    other = CommandLine.read([], kind=MoreOptions).options(resumed)
    terms = [agreed(each)["--extra-rate"] for each in (options, other)]
    assert terms == [0.75, 0.25]
    for given, origin in (({"extra_rate": 1.0}, "trainer.json: extra_rate"), ({}, "--extra-rate")):
        line = CommandLine.read([] if given else ["--extra-rate", "1"], kind=MoreOptions)
        with pytest.raises(UserError, match=f"{origin} 1.0 must be below 1"):
            line.options(given, "trainer.json")
    with pytest.raises(SystemExit):
        CommandLine.read(["--help-all"], kind=MoreOptions)
    assert "What the help says of it." in capsys.readouterr().out


@dataclass
class Forgetful(LoggingOptions):
    file: Path | None = None
    """A path of which nothing is declared."""


def test_a_path_is_an_input_or_an_output():
    assert described(Options)["metrics"].output
    assert described(Options)["load"].input
    assert not Setting(output=True, result=True).result
    with pytest.raises(TypeError, match="file is a path: its type must be File or OutputFile"):
        described(Forgetful)


WRONG = {
    OUTPUT.replace("loss_table", "loss-table"): "the output 'loss-table' can't be a flag",
    OUTPUT.replace("loss_table", "steps"): "--import: steps is the name of another setting",
    SCHEDULE.replace(" = 2", ""): "the option lr_timescale of lr-schedule inverse-sqrt needs a def",
    SCHEDULE.replace("lr_timescale", "beta1"): "--import: beta1 is the name of another setting",
    CALLBACK.replace('"tokens", 0', '"outputs", 0'): "two callbacks have the name outputs",
}


@pytest.mark.parametrize("text", WRONG, ids=WRONG.values())
def test_a_part_that_cannot_be_registered_is_refused_in_one_line(text, imported):
    with pytest.raises(UserError, match=WRONG[text]):
        pretrain.prepare([*RUN, *imported(text)])


def test_an_evaluation_of_a_callback_returns_numbers_with_names(imported):
    more = "\n\n    def evaluate(self, step):\n        return {'accuracy': 1}\n"
    with pytest.raises(UserError, match="evaluate returned accuracy 1: it must return num"):
        pretrain.main([*RUN, *imported(CALLBACK + more), "--steps", "2"])


LONG = """
import os
import signal
import time

import megazoo


@megazoo.trainer.register_callback
class Long(megazoo.trainer.Callback):
    def evaluate(self, step):
        os.kill(os.getpid(), signal.SIGUSR1)
        while True:
            time.sleep(0.01)
            self.trainer.check_stop()
"""


def test_a_signal_ends_an_evaluation_of_a_callback_and_the_run_saves(imported, tmp_path, capsys):
    words = ["--eval-interval", "2", "--save", str(tmp_path / "run"), "--steps", "4"]
    pretrain.main([*RUN, *imported(LONG), *words])
    out = capsys.readouterr().out
    assert "an evaluation after step 2 was stopped" in out
    assert "stopped by SIGUSR1: trained steps 1 to 2" in out
    assert (tmp_path / "run" / "latest").read_text().strip() == "step_00000002"
