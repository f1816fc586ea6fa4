"""Kinds of the fuzzer: command lines of all programs, and TOML files."""

import importlib
import math
import os
import random
import tomllib
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path

from megazoo import pretrain
from megazoo.cli.flags import parse_flags
from megazoo.cli.parsing import CommandLine, required
from megazoo.commands import COMMANDS
from megazoo.models.registry import find_config
from megazoo.settings import flag_of, settings_of
from megazoo.trainer.options import Options
from tests.support.fuzz.cases import damaged, files_under, hostile, refusal

PROGRAMS = sorted({command.module for command in COMMANDS} - {"megazoo.pretrain"})
# What follows from other settings, where it is not given.
DERIVED = {"lr_decay_steps", "warmup_steps", "min_lr", "steps", "epochs", "data", "mock_data"}


STRANGE_FLAGS = ["--help", "-h", "--", "-", "--\ud800", "--x\ny", "--=", "--no-", "---"]
INTEGERS = [0, -1, 1, 2, 3, 4, 5, 8, 16, 64, 10**6, 10**9, 2**31, 2**63, 10**23, 10**400]
FLOATS = [0.1, 0.5, 1.0, 1.5, -0.5, 1e-4, 1e-320, 1e23, 1e308, "1e400", "nan", "inf", "-inf", "1_0"]
WORDS = (
    "gpt2 llama mpt gpt2-tiny gpt3-175b llama-65b stdlib mock byte 95,5 balanced uniform 1,1 2,2 "
    "5,6,6,5 zb-h1 gpipe float16 cpu full wsd head|norm ((( [ (a*)*b {content} 1,nan 1e308,1e308"
).split()


def with_garbage(directory: Path) -> None:
    """Put files into a directory that hostile values name."""
    (directory / "d").mkdir()
    (directory / "x").write_bytes(b"\0\xff not Python, (nor TOML")
    (directory / "0").write_text("raise RuntimeError('of an imported file')")


def numbers_of(options) -> list:
    """Return the numbers of a dataclass and of those in it."""
    values = [getattr(options, f.name) for f in fields(options)]
    inner = [number for value in values if is_dataclass(value) for number in numbers_of(value)]
    return inner + [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def options_of(arguments: list[str]) -> Options:
    """The settings of a command line of the training program."""
    return CommandLine.read(arguments).options()


class Flags:
    """Command lines, checked as far as the training program and the tools do before they work."""

    def __init__(self, directory: Path):
        modules = map(importlib.import_module, PROGRAMS)
        self.kinds = [module.Options for module in modules if hasattr(module, "Options")]

    def __call__(self, chance: random.Random, directory: Path) -> None:
        with_garbage(directory)
        before = files_under(directory)
        if chance.random() < 0.6:
            run, _ = refusal(ending, pretrain.prepare, self.line(Options, chance))
        else:
            run, kind = None, chance.choice(self.kinds)
            refusal(ending, self.parse, kind, self.line(kind, chance))
        assert files_under(directory) == before, "files were written"
        if run:
            assert all(map(math.isfinite, numbers_of(run.options))), run.options
            timedelta(seconds=run.options.parallel.timeout)

    def parse(self, kind: type, line: list[str]):
        options = parse_flags(kind, line, "")
        if hasattr(options, "import_"):
            required(options)
        return options

    def line(self, kind: type, chance: random.Random) -> list[str]:
        """Return a command line of the settings of a dataclass, with a few hostile values."""
        words, settings = [], settings_of(kind)
        for _ in range(chance.choice((1, 1, 2, 3, 6))):
            name, usual = chance.choice(list(settings.items()))
            flag, kind = flag_of(name), chance.random()
            if kind < 0.03:
                flag = chance.choice(STRANGE_FLAGS)
            elif kind < 0.08:
                flag = flag + chance.choice(["x", "_", "=", "é", "\udcff", "-", " "])
            elif kind < 0.13:
                flag = flag.replace("--", chance.choice(["--no-", "---", "-", "—"]), 1)
            count = 2 if isinstance(usual, tuple) else 0 if isinstance(usual, bool) else 1
            count = chance.choice((0, 1, 2)) if chance.random() < 0.1 else count
            values = [self.value(usual, chance) for _ in range(count)]
            if values and chance.random() < 0.2:
                words.append(f"{flag}={values[0]}")
            else:
                words += [flag, *values]
        return words * chance.choice((1, 1, 1, 1, 2))

    def value(self, usual, chance: random.Random) -> str:
        """Return a value for a flag, rather one of the type of its usual value."""
        number = isinstance(usual, int | float | tuple) or (usual is None and chance.random() < 0.5)
        if number and chance.random() < 0.8:
            whole = isinstance(usual, int) or chance.random() < 0.5
            return str(chance.choice(INTEGERS if whole else FLOATS))
        if chance.random() < 0.4:
            return chance.choice(WORDS)
        value = hostile(chance)
        # The system ends an argument at a NUL, and takes surrogates for bytes that are not UTF-8.
        text = "9" * 5000 if value == 10**400 else str(value)
        return text.replace("\0", "").replace("\ud800", "\udc80")


def ending(function, *arguments):
    """Call a function; the end of the program after --help is no error."""
    try:
        return function(*arguments)
    except SystemExit as stop:
        code = stop.code
    assert not code, f"exit code {code!r}"
    assert {"--help", "-h"} & set(arguments[-1]), "it ended without a word"
    return None


LITERALS = [
    "0", "1", "-1", "3", "+7", "1_000", "0x10", "0o7", "1e23", "1e999", "nan", "inf", "-inf", "0.5",
    "3.0", "true", "false", '""', '"x"', "'x'", '"3"', '"--steps=3"', '"--save"', '"nan"', "[]",
    "[1]", '["stdlib"]', '["0.7", "stdlib", 0.3, "stdlib"]', '["stdlib", "--steps=7"]', "[[1]]",
    "{}", "{a = 1}", "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", '"""\nx\n"""', "'''x'''",
    '"\\u0000"', '"\\uD800"', '"\\U0010FFFF"', "9" * 5000, "0x" + "f" * 5000, "1." + "1" * 5000,
    "[" * 10_000 + "]" * 10_000, "{a=" * 5000 + "1" + "}" * 5000, "1e5", str(10**23), str(2**63),
    '"/dev/zero"', '"../x"', '"' + "x" * 5000 + '"', "[1, true]", '["a", ["b"]]', "", "=", "#",
]  # fmt: skip
LINES = [
    "[model]", "[[model]]", "model.layers = 3", '"layers" = 3', "'steps' = 4", "steps = 1",
    "\ufefflayers = 2", "x", "= 3", "layers = 3 layers = 4", "[a.b.c]\nd = 1", "\0", "# \0",
    "layers = 3\r", "a." * 5000 + "b = 1", "[" + "a." * 5000 + "b]", '"" = 1', "import = 'x'",
    "config = 'x'", "import_ = '0'", "lr = 1e-4", "layers-x = 1", "global-batch-size = 8",
]  # fmt: skip
SETTINGS = {
    "preset": '"gpt2-tiny"', "layers": "3", "steps": "7", "lr": "1e-4", "data": '["stdlib"]',
    "split": '"95,5"', "tie_embeddings": "false", "stage_layers": '"balanced"', "seed": "5",
    "profile_steps": "[1, 2]", "dropout": "0.1",
}  # fmt: skip
MODEL = {
    "model": '"llama"', "hidden_size": "32", "layers": "1", "heads": "2", "ffn_size": "48",
    "vocab_size": "61", "norm_epsilon": "1e-5", "tie_embeddings": "true", "activation": '"silu"',
}  # fmt: skip


class Toml:
    """TOML files of settings, and of a model's config. What is accepted is what tomllib reads."""

    def __init__(self, directory: Path):
        self.known = list(settings_of(Options))

    def __call__(self, chance: random.Random, directory: Path) -> None:
        with_garbage(directory)
        file = directory / "c.toml"
        of_model = chance.random() < 0.3
        file.write_bytes(self.text(MODEL if of_model else SETTINGS, chance))
        if of_model:
            config, told = refusal(find_config, str(file))
            if not told:
                self.check_config(config, tomllib.loads(file.read_text()))
            return
        before = files_under(directory)
        options, told = refusal(options_of, ["--config", str(file)])
        refusal(pretrain.prepare, ["--config", str(file)])
        assert files_under(directory) == before, "files were written"
        if not told:
            self.check(options, tomllib.loads(file.read_text()))

    def text(self, settings: dict, chance: random.Random) -> bytes:
        """Return the text of a TOML file, with something wrong in it."""
        settings = dict(settings)
        for name in chance.sample(list(settings), chance.randrange(len(settings))):
            del settings[name]
        kind = chance.random()
        if kind < 0.5:
            known = self.known if "model" not in settings else list(MODEL)
            settings[chance.choice([*settings, *known])] = chance.choice(LITERALS)
        lines = [f"{name} = {value}" for name, value in settings.items()]
        if kind > 0.4:
            lines.insert(chance.randrange(len(lines) + 1), chance.choice(LINES))
        data = "\n".join(lines).encode("utf-8", "surrogatepass")
        return damaged(data, chance) if kind > 0.7 else data

    def check(self, options, values: dict) -> None:
        """Compare options with what the file says, and with the defaults for what it doesn't."""
        usual = settings_of(Options)
        for name, value in options.values.items():
            if name in values:
                assert means(value, values[name]), f"{name}: {values[name]!r} became {value!r}"
            elif name not in DERIVED:
                assert value == usual[name], f"{name} became {value!r}"
        assert all(map(math.isfinite, numbers_of(options))), options

    def check_config(self, config, values: dict) -> None:
        """Compare a model's config with what the file says; its numbers must be numbers."""
        for name, value in values.items():
            if name != "model":
                ours = getattr(config, name)
                assert type(ours) is type(value), f"{name} is {ours!r}"
                assert ours == value, name
        usual = type(config)(**{n: v for n, v in DEFAULTS.items() if n in vars(config)})
        for f in fields(config):
            value, other = getattr(config, f.name), getattr(usual, f.name)
            if isinstance(other, int | float):
                kinds = (int, float) if isinstance(other, float) else type(other)
                assert isinstance(value, kinds), f"{f.name} is {value!r}"


DEFAULTS = {"vocab_size": 61, "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2}


def means(ours, theirs) -> bool:
    """Say whether an option has the value that a file says."""
    if isinstance(ours, tuple):
        several = theirs if isinstance(theirs, list) else [theirs]
        return [str(value) for value in ours] == [str(value) for value in several]
    if isinstance(ours, float):
        return ours == float(theirs)
    return ours == theirs or str(ours) == str(theirs) or os.path.normpath(str(theirs)) == str(ours)
