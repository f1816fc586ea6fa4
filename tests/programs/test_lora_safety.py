"""What adapters must not do: write over their base, or be computed otherwise than PEFT would."""

import contextlib
import itertools
import json
import re
import shutil

import pytest
from peft import PeftModel
from safetensors.torch import load_file

import megazoo
from megazoo import pretrain
from megazoo.errors import UserError
from megazoo.lora.manifest import check_base_on_disk
from megazoo.lora.source import SavedAdapters
from megazoo.models.pretrained import open_source
from megazoo.parallel.context import ParallelContext
from megazoo.programs import evaluate, generate
from tests.support.inference import run_main
from tests.support.peft_oracle import base_model, edit_config, settings_for, with_adapters
from tests.support.pretraining import name_base
from tests.support.scripts import merge_shards

TRAIN = (
    "--vocab-size 257 --tokenizer byte --seq-length 16 --global-batch-size 2 --micro-batch-size 2 "
    "--eval-steps 0 --steps"
)


def train(steps, *arguments):
    pretrain.main(["--model", "gpt2", *TRAIN.split(), str(steps), *map(str, arguments)])


def test_a_run_does_not_write_over_its_base(tmp_path, rows):
    run = tmp_path / "run"
    train(2, "--save", run)
    before = {file.name: file.read_bytes() for file in (run / "step_00000002").iterdir()}
    more = ["--num-labels", "2", "--data", rows, "--split", "100,0"]
    for flags in (["--lora-rank", "2"], more, ["--lora-rank", "2", "--load-weights-only"]):
        with pytest.raises(UserError, match="contains the weights that this run starts from"):
            train(3, "--load", run, "--save", run, *flags)
    with pytest.raises(UserError, match="contains the weights that this run starts from"):
        train(3, "--load", run / "step_00000002", "--save", run, "--lora-rank", "2")
    assert before == {file.name: file.read_bytes() for file in (run / "step_00000002").iterdir()}
    adapters = tmp_path / "adapters"
    train(2, "--load", run, "--save", adapters, "--lora-rank", "2")
    train(3, "--load", adapters, "--save", adapters)  # the same run goes on
    assert (adapters / "step_00000003").is_dir()
    above = tmp_path / "above"  # a directory in which a base lies, but not as one of its steps
    shutil.copytree(run / "step_00000002", above / "base")
    train(1, "--load", above / "base", "--save", above, "--lora-rank", "2")
    assert (above / "step_00000001").is_dir()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base, a run with adapters on it, and PEFT's files of these."""
    root = tmp_path_factory.mktemp("runs")
    train(1, "--save", root / "base")
    train(1, "--load", root / "base", "--lora-rank", "2", "--save", root / "lora")
    model = megazoo.from_pretrained(root / "base")
    megazoo.lora.save(megazoo.lora.load(model, root / "lora"), root / "peft")
    megazoo.from_pretrained(root / "base").save_parallelized(root / "hf", merge_checkpoints=True)
    megazoo.from_pretrained(root / "base").save_parallelized(root / "shards")
    return root


OVER_THE_BASE = [
    "--load {base} --lora-load {peft} --save {base}",
    "--load {base} --lora-load {lora} --save {base}",
    "--load {lora} --save {base}",
    "--load {lora} --load-weights-only --save {lora}",
    "--load {shards} --lora-rank 2 --save {shards}",
]


def test_neither_adapters_of_peft_nor_a_run_that_goes_on_replace_a_base(runs):
    """The directory above a base may take the run: only the directories of steps are replaced."""
    names = {name: runs / name for name in ("base", "lora", "peft", "shards")}
    for words in OVER_THE_BASE:
        arguments = ["--model", "gpt2", *TRAIN.split(), "3", *words.format(**names).split()]
        with pytest.raises(UserError, match="contains the weights that this run starts from"):
            pretrain.prepare(arguments)
    for base in ("hf", "shards"):
        arguments = ["--model", "gpt2", *TRAIN.split(), "1", "--lora-rank", "2", "--lr", "1e-3"]
        pretrain.prepare([*arguments, "--load", str(runs / base), "--save", str(runs)])


@pytest.fixture
def rows(tmp_path):
    """A file of rows with two labels."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n' * 8)
    return file


def test_a_new_head_is_trained_or_refused(runs, rows):
    words = ["--model", "gpt2", *TRAIN.split(), "1", "--load", str(runs / "base")]
    words += ["--num-labels", "2", "--data", str(rows), "--split", "100,0"]
    for adapters in (["--lora-rank", "2"], ["--lora-load", str(runs / "peft")]):
        with pytest.raises(UserError, match="the new head: use a pattern that also"):
            pretrain.prepare([*words, *adapters, "--train-only", "lora"])
        pretrain.prepare([*words, *adapters, "--train-only", "lora|score"])


@pytest.fixture(scope="module")
def other_norms(runs):
    """The base with another config: the same weights, which compute something else."""
    path = shutil.copytree(runs / "hf", runs / "other_norms")
    config = json.loads((path / "config.json").read_text())
    assert config["layer_norm_epsilon"] == 1e-5
    (path / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 0.5}))
    return path


def test_tools_refuse_a_base_of_another_config(runs, other_norms, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    (tmp_path / "a.txt").write_text("abc")
    for tool, more in {
        evaluate: ["--text", tmp_path / "a.txt", "--output", output, "--tokenizer", "byte"],
        generate: ["--prompt", "a", "--tokenizer", "byte"],
        merge_shards: [output],
    }.items():
        words = [other_norms, *more, "--adapter", runs / "lora"]
        code, _, error = run_main(tool, monkeypatch, capsys, *words)
        assert (code, error.count("\n")) == (2, 1), error
        step = runs / "lora" / "step_00000001"
        assert f"norm_epsilon is 0.5 in {other_norms}, but 1e-05 in {step}: they" in error
        assert not output.exists()


def test_python_refuses_a_base_of_another_config(runs, other_norms):
    megazoo.lora.load(megazoo.from_pretrained(runs / "hf"), runs / "lora")
    model = megazoo.from_pretrained(other_norms)
    with pytest.raises(UserError, match=r"norm_epsilon is 0.5 in the model, but 1e-05 in "):
        megazoo.lora.load(model, runs / "lora")


def test_a_base_without_a_weight_that_the_adapters_leave_out_is_refused(runs):
    """As a classifier's frozen head would be."""
    adapters = SavedAdapters(runs / "lora")
    whole = adapters.on_meta(ParallelContext())
    check_base_on_disk(adapters, whole.entries(), open_source(runs / "hf"))
    weights = open_source(runs / "hf")
    del weights.specs["norm.weight"]
    with pytest.raises(UserError, match=r"has no norm.weight: it is not the base of"):
        check_base_on_disk(adapters, whole.entries(), weights)


def test_a_base_of_too_long_a_name_is_told(runs, tmp_path):
    run = shutil.copytree(runs / "lora", tmp_path / "lora")
    name_base(run, "/" + "a" * 4000)
    with pytest.raises(
        UserError, match=r"^the base of .* can't be read from '/aaa.*: File name too long"
    ) as error:
        pretrain.prepare(["--load", str(run), "--steps", "2"])
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


def test_what_is_evaluated_is_not_written_over(rows, monkeypatch, capsys):
    before, link = rows.read_bytes(), rows.with_name("link")
    link.symlink_to(rows)
    for flag, output in itertools.product(("--text", "--choices", "--labels"), (rows, link)):
        words = ("x", flag, rows, "--output", output)
        code, _, error = run_main(evaluate, monkeypatch, capsys, *words)
        assert (code, rows.read_bytes()) == (2, before)
        assert error.endswith(f"--output: {output} is the input file: use another name\n")
    mistakes = {
        ("--text", rows, "--logprobs", link): f"--logprobs: {link} is the input file: use another",
        ("--text", rows, "--logprobs", "a", "--output", "a"): "a is the file of --output: use",
        ("--choices", rows, "--logprobs", "a"): "--logprobs needs --text",
        ("--text", rows, "--top-k", 3): "--top-k needs --logprobs",
        ("--text", rows, "--logprobs", "a", "--top-k", -1): "--top-k -1 must be 0 or more",
    }
    for words, expected in mistakes.items():
        code, _, error = run_main(evaluate, monkeypatch, capsys, "x", *words)
        assert (code, rows.read_bytes()) == (2, before)
        assert expected in error


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The directories of a LLaMA and of PEFT's adapters on its q and v."""
    root, hf = tmp_path_factory.mktemp("adapted"), base_model("llama")
    hf.save_pretrained(root / "base")
    with_adapters(hf, **settings_for("llama", "q and v")).save_pretrained(root / "adapter")
    return root / "base", root / "adapter"


FIRST_Q = "model.layers.0.self_attn.q_proj"
TAKEN = [
    {"target_modules": r".*\.[qv]_proj"},
    {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"},
    {"layers_to_transform": list(range(9))},
    {"layers_to_transform": []},
    {"layers_to_transform": [0, 1, 2], "layers_pattern": "layers"},
    {"layers_to_transform": [0, 1, 2], "layers_pattern": ["h", "layers"]},
    {"layers_to_transform": [1, 2], "target_modules": ["v_proj", "q_proj", FIRST_Q,
     "model.layers.0.self_attn.v_proj"]},
    {"exclude_modules": ["k_proj"]},
    {"exclude_modules": r"q_proj"},
]  # fmt: skip
DENIED = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["foo", "bar"]},
    {"target_modules": []},
    {"target_modules": ["roj"]},
    {"target_modules": r".*\.q_proj"},
    {"target_modules": r"[qv]_proj"},
    {"target_modules": "(q_proj"},
    {"layers_to_transform": [0]},
    {"layers_to_transform": 0},
    {"layers_to_transform": [0, 1, 2], "layers_pattern": "h"},
    {"layers_to_transform": [0, 1, 2], "target_modules": r".*\.[qv]_proj"},
    {"layers_to_transform": [0, 1, 2], "target_modules": "all-linear"},
    {"exclude_modules": ["v_proj"]},
    {"exclude_modules": [FIRST_Q]},
    {"exclude_modules": r".*1\.self_attn\.v_proj"},
    {"exclude_modules": ["q_proj"], "target_modules": "all-linear"},
]


def test_tensors_are_taken_where_peft_has_a_place_for_each(adapted, tmp_path):
    base, cases = adapted[0], [(each, True) for each in TAKEN] + [(each, False) for each in DENIED]
    for number, (changes, is_taken) in enumerate(cases):
        path = shutil.copytree(adapted[1], tmp_path / str(number))
        edit_config(path, **changes)
        tensors = load_file(path / "adapter_model.safetensors")
        held = {name.removesuffix(".weight") for name in tensors}
        try:
            theirs = PeftModel.from_pretrained(base_model("llama"), path).state_dict()
        except (ValueError, re.error):  # PEFT refuses the config
            theirs = {}
        used = {name.removesuffix(".default.weight") for name in theirs if "lora_" in name}
        assert (held <= used) == is_taken, f"{changes} is not what PEFT does"
        refused = pytest.raises(UserError, match=re.escape(str(path)))
        with contextlib.nullcontext() if is_taken else refused:
            megazoo.lora.load(megazoo.from_pretrained(base), path)
