"""The recipes in configs/: each plans as it is, and trains two steps of a tiny model of its family
in its layout, or in a smaller one with the same axes."""

import json
import math
import re
import shlex
import sys
import tomllib
from dataclasses import replace

import pytest

import megazoo
from megazoo import pretrain
from megazoo.errors import UserError
from megazoo.models.registry import find_config
from megazoo.programs import plan, recipes
from tests.support.pretraining import losses
from tests.support.sampling import marked_slow

# By recipe: the preset whose tiny copy replaces the published model, the number of ranks, and the
# flags of a layout with at most four of them.
RUNS = {
    "lora_smollm2": ("llama-tiny", 1, ""),
    "full_fine_tuning": ("qwen3-tiny", 1, ""),
    "llama3_8b_8gpus": ("llama-tiny", 4, "--no-compile"),
    "mixture": ("olmoe-tiny", 2, "--ep 2"),
    "long_context": ("llama-tiny", 2, "--cp 2"),
    "continued_pretraining": ("llama-tiny", 1, ""),
}
FAST = ("lora_smollm2", "mixture")
SIZES = dict(layers=2, hidden_size=32, heads=4, kv_heads=2, ffn_size=64)
TALK = [("user", "how many?"), ("assistant", "one " * 9)]
PLANNED = ("llama3_8b_8gpus", "mixture", "long_context")


def settings_of(name: str) -> dict:
    return tomllib.loads(recipes.text_of(name))


def replaced(name: str, tmp_path) -> list[str]:
    """The arguments that start a recipe with a tiny model and a small file."""
    settings, (preset, _, _) = settings_of(name), RUNS[name]
    words = ["--config", str(recipes.RECIPES / f"{name}.toml"), "--tokenizer", "byte"]
    if "load" in settings:
        config = replace(find_config(preset), **SIZES)
        megazoo.from_config(config, seed=1).save_pretrained(tmp_path / "hf")
        words += ["--load", str(tmp_path / "hf")]
    else:
        sizes = SIZES | dict(vocab_size=257)
        words += [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
    (source,) = settings["data"]
    file = tmp_path / source
    if source == "talks.jsonl":
        line = {"messages": [{"role": role, "content": text} for role, text in TALK]}
        words += ["--chat-template", "chatml"]
    else:
        line = {"text": "some words of a text " * 20}
    document = line["text"] + "\n" if file.suffix == ".txt" else json.dumps(line)
    file.write_text((document + "\n") * 40)
    return [*words, "--data", str(file)]


def test_the_list_has_every_recipe_with_its_purpose(capsys):
    recipes.main([])
    out = capsys.readouterr().out
    assert {*RUNS, "gpt2_tiny"} == {line.split()[0] for line in out.split("\n\n")[0].splitlines()}
    assert re.search(r"^lora_smollm2 +LoRA adapters of a small chat model", out, re.MULTILINE)


def test_a_copy_is_the_file_and_its_command_names_it(tmp_path, capsys):
    folder = tmp_path / "a b"
    recipes.main(["llama3_8b_8gpus", str(folder)])
    copy = folder / "llama3_8b_8gpus.toml"
    assert copy.read_bytes() == (recipes.RECIPES / copy.name).read_bytes()
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    start = "torchrun --nproc-per-node 8 -m megazoo pretrain --config"
    assert command == [*start.split(), str(copy)]
    with pytest.raises(UserError, match="exists: use another directory, or remove it"):
        recipes.main(["llama3_8b_8gpus", str(folder)])
    with pytest.raises(UserError, match="unknown recipe 'mixtur'; did you mean mixture"):
        recipes.main(["mixtur", str(folder)])
    with pytest.raises(UserError, match="name the directory to copy to"):
        recipes.main(["mixture"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_the_memory_in_the_comments_is_that_of_the_planner(name, monkeypatch, capsys):
    text = " ".join(line.lstrip("# ") for line in recipes.text_of(name).splitlines())
    command, gigabytes = re.search(
        r"`megazoo plan (.*?)` estimates (\d+) GB per GPU", text
    ).groups()
    monkeypatch.chdir(recipes.RECIPES)
    plan.main([*command.split(), "--json", "-"])
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert round(rank["total"] / 1e9) == int(gigabytes)
    settings = settings_of(name)
    flags = dict(zip(*[iter(command.split())] * 2, strict=True))
    for flag in flags.keys() - {"--config", "--dp", "--preset"}:
        assert flags[flag] == str(settings[flag.strip("-").replace("-", "_")])


@pytest.mark.parametrize("name", marked_slow(RUNS, lambda _, name: name not in FAST))
def test_a_recipe_plans_and_trains_two_steps(name, ranks, tmp_path, monkeypatch, capsys):
    _, count, layout = RUNS[name]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    words = [*replaced(name, tmp_path), *"--device cpu --dtype float32 --seq-length 64".split()]
    words += ["--save", str(tmp_path / "run"), "--metrics", str(tmp_path / "metrics")]
    settings, command = settings_of(name), recipes.command_of(name, recipes.text_of(name))
    if started := re.search(r"--nproc-per-node (\d+)", command):
        replica = math.prod(settings.get(axis, 1) for axis in ("tp", "pp", "cp"))
        pretrain.main([*words, "--dry-run", "--dp", str(int(started[1]) // replica)])
    else:
        pretrain.main([*words, "--dry-run"])
    assert "memory and traffic in bytes" in capsys.readouterr().out
    steps = "--steps 2 --global-batch-size 4 --eval-steps 0 --warmup-steps 0"
    words += [*steps.split(), *layout.split()]
    if count > 1:
        ranks(pretrain.main, count, words)
    else:
        pretrain.main(words)
    assert len(losses(tmp_path / "metrics")) == 2
    assert (tmp_path / "run" / "latest").read_text().strip() == "step_00000002"
