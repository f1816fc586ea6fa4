"""A model of a user's own: one file, registered, named on the command line."""

import math
import sys
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import megazoo
from megazoo import from_config, pretrain, register
from megazoo.cli.inference import InferenceOptions, run_with_model
from megazoo.cli.parsing import CommandLine
from megazoo.cli.program import run_program
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES, family_of, tiny_preset
from megazoo.formats.hugging_face.export import hugging_face_config
from megazoo.formats.source import SavedModel
from megazoo.layers import MLP
from megazoo.models import Model, gpt2
from megazoo.models.counts import flops_per_token
from megazoo.models.gpt2 import GPT2, GPT2Config
from megazoo.models.qwen3 import Qwen3, Qwen3Config
from megazoo.models.registry import find_config
from megazoo.parallel import ParallelContext, ParameterSpec, ShardedModule
from megazoo.parallel.layout import Layout
from megazoo.planning import PlannedRun, Planner, note_on_mfu
from megazoo.planning.meter import forward_flops
from megazoo.programs import plan
from megazoo.trainer.rules import model_config
from megazoo.user_files import run_file

ROOT = Path(__file__).parents[3]


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
    presets = {
        "louder-tiny": LouderConfig(
            vocab_size=257, max_positions=32, hidden_size=32, layers=2, heads=2
        )
    }

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


def test_a_registered_model_trains_saves_and_resumes_from_the_command_line(
    tmp_path, capsys, monkeypatch
):
    file, saved = tmp_path / "louder.py", tmp_path / "run"
    file.write_text(MODEL)
    common = ["--import", str(file), "--device", "cpu", "--eval-steps", "0", "--save", str(saved)]
    batch = ["--seq-length", "32", "--global-batch-size", "4", "--micro-batch-size", "2"]
    pretrain.main([*common, *batch, "--model", "louder", "--steps", "2"])
    assert SavedModel(saved).manifest["family"] == "louder"
    assert SavedModel(saved).config.loudness == 2.0
    FAMILIES.pop("louder")
    pretrain.main([*common, "--load", str(saved), "--steps", "3"])
    assert SavedModel(saved).trainer["step"] == 3
    # without its file, it is refused
    FAMILIES.pop("louder")
    capsys.readouterr()
    for arguments, message in {
        f"--load {saved}": f"unknown model family 'louder'; supported: {', '.join(FAMILIES)}, "
        "and those that --import FILE registers; the run that saved "
        f"{saved / 'step_00000003'} used --import {file}",
        "--import nothing.py": "--import nothing.py: no such file",
    }.items():
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            run_program(pretrain.main)
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"pretrain_gpt.py: error: {message}\n"


def test_an_export_names_the_class_of_the_custom_family():
    """Not the class of the family that its config inherits from."""

    @dataclass(frozen=True)
    class ParConfig(Qwen3Config):
        def to_hugging_face(self):
            return super().to_hugging_face() | {"model_type": "par_block"}

    config = ParConfig(257, 256, 32, 2, 4, 2, 16, 64)

    @register("par_block")
    class Par(Qwen3):
        Config, presets = ParConfig, {"par_block-tiny": config}

    values = hugging_face_config(config)
    assert values["architectures"] == ["ParBlockForCausalLM"]
    assert find_config(values) == config
    values = hugging_face_config(replace(config, num_labels=2))
    assert values["architectures"] == ["ParBlockForSequenceClassification"]
    Par.HUGGING_FACE = Par.HUGGING_FACE._replace(class_name="PARBlock")
    values = hugging_face_config(replace(config, num_labels=2))
    assert values["architectures"] == ["PARBlockForSequenceClassification"]
    plain = hugging_face_config(find_config("qwen3-tiny"))
    assert plain["architectures"] == ["Qwen3ForCausalLM"]


def test_a_taken_name_is_refused():
    with pytest.raises(UserError, match="is taken: choose another name"):
        register("mine")(GPT2)


def test_the_config_of_another_family_is_refused():
    class Mine(GPT2):
        presets: ClassVar = {"mine-tiny": GPT2Config()}

    refused = "GPT2Config is the Config of gpt2: define another for mine"
    with pytest.raises(UserError, match=refused):
        register("mine")(Mine)

    class MineConfig(GPT2Config):
        pass

    Mine.Config = MineConfig
    refused = "the preset mine-tiny is a GPT2Config: make it a MineConfig"
    with pytest.raises(UserError, match=refused):
        register("mine")(Mine)
    assert "mine" not in FAMILIES
    Mine.presets = {"mine-tiny": MineConfig()}
    register("mine")(Mine)
    register("mine")(Mine)  # a file that is run again
    assert FAMILIES["mine"] is Mine


@dataclass(frozen=True)
class OwnConfig:
    """Of a user's own: it inherits from nothing, and has no more than it needs."""

    vocab_size: int = 61
    max_positions: int = 16
    hidden_size: int = 32
    layers: int = 2
    heads: int = 4
    ffn_size: int = 64


class OwnBlock(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.mlp = MLP(config.hidden_size, config.ffn_size, F.gelu)
        self.mix = Mix(config.hidden_size)

    def forward(self, x):
        return x + self.mix(self.mlp(x))


class Mix(ShardedModule):
    """A matrix of a user's own, of which only this class knows."""

    def __init__(self, size):
        super().__init__()
        self.add_parameter("weight", ParameterSpec((size, size), std=0.02))

    def forward(self, x):
        return F.linear(x, self.weight)


def own_model():
    class Own(Model):
        Config, Block, presets = OwnConfig, OwnBlock, {"own-tiny": OwnConfig()}

        def __init__(self, config, ctx, seed=0):
            super().__init__(config, ctx, seed)
            self.add_embedding()
            self.add_layers()
            self.add_head()

        def forward_stage(self, x, batch, stage):
            return self.run_layers(self.embedding(x) if stage.first else x, stage)

        @classmethod
        def stage_costs(cls, config):
            return 1, 0, 1

    return register("own")(Own)


def test_a_config_of_ones_own_needs_to_inherit_from_nothing():
    own_model()
    model, ids = from_config("own-tiny"), torch.zeros(2, 16, dtype=torch.int64)
    assert model.train_batch(ids, labels=ids).item() == pytest.approx(math.log(61), rel=0.05)
    assert model.generate(ids[:, :3], max_new_tokens=2, use_cache=False).shape == (2, 5)
    assert OwnConfig().num_labels == 0
    assert "num_labels" not in asdict(OwnConfig())
    with pytest.raises(UserError, match="heads 4 can't be sharded over tp 3: use tp 1, 2 or 4"):
        Model.check(OwnConfig(), 3, 1)


def test_a_model_that_nobody_registered_trains():
    sizes = [(field.name, int, field.default) for field in fields(OwnConfig)]
    bare = make_dataclass("BareConfig", sizes, frozen=True)
    model = type("Bare", (own_model(),), {"Config": bare}).build(bare(), ParallelContext())
    ids = torch.zeros(2, 16, dtype=torch.int64)
    assert model.train_batch(ids, labels=ids).item() == pytest.approx(math.log(61), rel=0.05)


def test_a_layer_of_ones_own_counts_as_it_says(monkeypatch):
    own_model()
    for says in (("weight",), ()):
        monkeypatch.setattr(Mix, "multiplied", says)
        model = from_config("own-tiny", ParallelContext(device=torch.device("meta")))
        runs = 3 * forward_flops(model, 1, 16) / 16
        assert runs - flops_per_token(OwnConfig(), 16) == (0 if says else 6 * 2 * 32 * 32)
        assert (note_on_mfu(OwnConfig(), 16) is None) == bool(says)


PLAIN_ATTENTION = """
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

import megazoo
from megazoo.layers import ColumnParallelLinear, RowParallelLinear
from megazoo.models.gpt2 import GPT2, GPT2Config


class PlainAttention(nn.Module):
    SAYS

    def __init__(self, c):
        super().__init__()
        self.size, self.recompute = c.hidden_size // c.heads, False
        self.parts = nn.ModuleList(
            ColumnParallelLinear(c.hidden_size, c.hidden_size) for _ in range(3)
        )
        self.output = RowParallelLinear(c.hidden_size, c.hidden_size)

    def forward(self, x, seed, mask, cache):
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.parts)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.output(y.transpose(1, 2).flatten(2))


class PlainConfig(GPT2Config):
    pass


@megazoo.register("plain")
class Plain(GPT2):
    Config = PlainConfig
    presets = {
        "plain-tiny": PlainConfig(
            vocab_size=257, max_positions=512, hidden_size=32, layers=2, heads=2
        )
    }

    def __init__(self, config, ctx, seed=0):
        super().__init__(config, ctx, seed)
        for block in self.layers.values():
            block.attention = PlainAttention(config)
"""


@pytest.mark.parametrize("says", ["score_features = 32", "pass"])
def test_an_attention_of_ones_own_counts_as_it_says(says, tmp_path, capsys):
    """What MFU counts is what runs on meta under the planner's meter; where it is not, the planner
    says so."""
    file = tmp_path / "plain.py"
    file.write_text(PLAIN_ATTENTION.replace("SAYS", says))
    run_file(file)
    config = find_config("plain-tiny")
    how = {"global_batch_size": 1, "micro_batch_size": 1, "seq_length": 512}
    runs = Planner(config).plan(Layout(), PlannedRun(**how)).model_flops_per_token
    scores = 12 * 2 * 32 * 512
    assert flops_per_token(config, 512) == pytest.approx(
        runs - (scores if says == "pass" else 0), rel=1e-9
    )
    plan.main(["--import", str(file), "--model", "plain"])
    assert ("note: MFU counts" in capsys.readouterr().out) == (says == "pass")


def test_an_attention_that_says_its_features_counts_once_though_its_projection_says_them_too():
    model = from_config("gpt2-tiny")
    before = flops_per_token(model.config, 256)

    class Saying(GPT2):
        def __init__(self, config, ctx, seed=0):
            super().__init__(config, ctx, seed)
            for block in self.layers.values():
                # as an attention says whose cost does not grow with the sequence
                block.attention.score_features = 0

    FAMILIES["gpt2"] = Saying
    assert before - flops_per_token(model.config, 256) == 12 * 4 * 128 * 256


def test_selective_recomputation_tells_the_modules_that_know_it(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text(PLAIN_ATTENTION.replace("SAYS", "pass"))
    run_file(file)
    parts = [f"layers.{layer}.{part}" for layer in (0, 1) for part in ("attention", "mlp")]
    for mode in ("selective", "full", "selective", "none"):
        model = from_config("plain-tiny").recompute(mode)
        told = {
            name: module.recompute
            for name, module in model.named_modules()
            if name.startswith("layers.") and isinstance(getattr(module, "recompute", None), bool)
        }
        assert told == dict.fromkeys(parts, mode == "selective")


def test_an_imported_file_runs_once_in_the_tools_that_run_a_model(tmp_path):
    file, count = tmp_path / "counts.py", tmp_path / "count"
    file.write_text(f"with open({str(count)!r}, 'a') as out:\n    out.write('x')\n")
    from_config("gpt2-tiny").save_parallelized(tmp_path / "model")
    run_with_model(
        InferenceOptions(source=tmp_path / "model", import_=file, tokenizer="byte", device="cpu"),
        lambda model, tokenizer: None,
    )
    assert count.read_text() == "x"


def test_a_family_is_no_toy_in_python():
    """gpt2 is the model that transformers calls so; on the command line it is the tiny preset."""
    ours, theirs = find_config("gpt2"), find_config(transformers.GPT2Config().to_dict())
    assert ours == theirs
    for family, model in FAMILIES.items():
        assert find_config(tiny_preset(family)) == model.presets[f"{family}-tiny"]
        if family != "gpt2":
            told = f"^{family} is a model family: choose one of its presets, {family}-tiny"
            with pytest.raises(UserError, match=told):
                from_config(family)
    assert tiny_preset("llama-7b") == "llama-7b"
    options = CommandLine.read(["--model", "gpt2"]).options()
    assert model_config(options.model) == find_config("gpt2-tiny")
    with pytest.raises(UserError, match=r"'lama'; did you mean llama\?"):
        find_config("lama")


def test_the_families_are_a_mapping_that_imports_what_is_used():
    assert FAMILIES.get("bloom") is megazoo.models.Bloom
    assert FAMILIES.get("nonesuch") is None
    assert list(FAMILIES.copy()) == list(FAMILIES)
    with mock.patch.dict(FAMILIES):
        FAMILIES["gpt2"] = Qwen3
        config = find_config("falcon-tiny")
    assert FAMILIES["gpt2"] is GPT2
    assert family_of(config) == "falcon"  # although it was imported within the block
    with pytest.raises(KeyError):
        FAMILIES["nonesuch"]


def test_a_family_may_be_replaced_by_one_with_fewer_presets():
    @dataclass(frozen=True)
    class Config(OwnConfig):
        pass

    class Own(GPT2):
        presets: ClassVar = {"mpt-tiny": Config()}

    Own.Config = Config
    register("mpt")(Own)
    with pytest.raises(UserError, match="unknown model or preset 'mpt-7b'"):
        find_config("mpt-7b")


def test_a_layer_that_reads_values_while_it_is_built_has_a_cost():
    class Block(gpt2.Block):
        def __init__(self, config, index):
            super().__init__(config, index)
            self.table = torch.ones(3).numpy()

    class Own(GPT2):
        pass

    Own.Block = Block
    config = find_config("gpt2-tiny")
    assert Own.stage_costs(config) == GPT2.stage_costs(config)
