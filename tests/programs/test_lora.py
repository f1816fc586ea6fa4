"""Adapters from the command line: new ones, those of a checkpoint, the base that they are of, and
what is refused before any work."""

import re
import shlex
import shutil

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint
from megazoo.checkpoint.shards import saved_entries
from megazoo.lora.settings import LoRASettings, is_adapter
from megazoo.lora.source import SavedAdapters
from megazoo.programs import convert, generate, inspect_checkpoint
from megazoo.trainer.loop import build
from tests.support.inference import run_main
from tests.support.pretraining import SMALL, close, losses, name_base, records
from tests.support.scripts import merge_shards

RUN = [
    *SMALL,
    *"--mock-data --eval-steps 0 --warmup-steps 0 --model llama --kv-heads 2 --layers 3".split(),
]
LORA = "--lora-rank 2 --lora-alpha 4 --lora-targets q,v,o".split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A whole model, a run with adapters on it, and what that run's four steps recorded."""
    root = tmp_path_factory.mktemp("files")
    pretrain.main([*RUN, "--steps", "1", "--save", str(root / "base")])
    new = [*RUN, *LORA, "--load", str(root / "base"), "--lr-decay-steps", "4"]
    pretrain.main([*new, "--steps", "2", "--save", str(root / "lora")])
    pretrain.main([*new, "--steps", "4", "--metrics", str(root / "straight")])
    (root / "peft").mkdir()
    (root / "peft" / "adapter_config.json").write_text("{}")
    shutil.copytree(root / "lora", root / "moved")
    name_base(root / "moved", root / "gone")
    return root


def test_a_run_says_what_it_trains_and_goes_on_in_another_layout(ranks, files, tmp_path, capsys):
    """The base is told, for only the checkpoint names it; no flag of the adapters is needed."""
    pretrain.prepare(["--load", str(files / "lora"), "--steps", "4"])
    metrics, saved = tmp_path / "metrics", tmp_path / "run"
    words = ["--metrics", metrics, "--save", saved, "--device", "cpu", "--zero", "1"]
    words += ["--async-save", "--keep-last", "1"]
    for more in (
        ["--load", files / "lora", *"--steps 3 --tp 2".split()],
        ["--lora-load", saved, *"--steps 4 --pp 2".split()],
    ):
        ranks(pretrain.main, 2, list(map(str, [*words, *more])))
    found, expected = losses(metrics), losses(files / "straight")
    assert all(record["grad_norm"] > 1e-3 for record in records(metrics) if "loss" in record)
    assert close(found, {step: expected[step] for step in (3, 4)})
    pretrain.main(
        [*map(str, [*words, "--load", saved]), "--steps", "5", "--global-batch-size", "2"]
    )
    out = capsys.readouterr().out.splitlines()
    base = Checkpoint(files / "base").path
    # of each of 3 layers: A of q, v, o [2, 32]; B of q and o [32, 2], of v [2 heads x 8, 2]
    count = 3 * (3 * 2 * 32 + 2 * 32 * 2 + 16 * 2)
    whole = sum(p.numel() for p in megazoo.from_pretrained(base).parameters())
    assert f"base: {base}, from the checkpoint" in out
    assert any(
        line.startswith(f"llama, {whole:,} parameters + {count:,} of adapters, on") for line in out
    )
    assert f"training {count:,} of them: adapters of rank 2 on q, v, o" in out
    (line,) = [line for line in out if line.startswith("  generate")]
    assert f"tools/generate.py {saved} --prompt" in line
    assert [path.name for path in saved.glob("step_*")] == ["step_00000005"]
    held = SavedAdapters(saved)
    assert held.settings == LoRASettings(2, 4.0, 0.0, ("q", "v", "o"))
    assert sum(torch.Size(spec.shape).numel() for spec in held.specs.values()) == count


def test_a_base_from_the_seed_needs_no_directory(tmp_path, capsys):
    """The line that goes on does, with the adapters' flags on it."""
    words = [*RUN, *LORA, "--save", str(tmp_path), "--steps", "1", "--seed", "7"]
    pretrain.main(words)
    out = capsys.readouterr().out
    assert "  generate" not in out
    (line,) = re.findall(r"^  resume +(.*)$", out, re.MULTILINE)
    words = shlex.split(line)[2:]
    assert "--lora-load" in words
    pretrain.main(words)
    assert SavedAdapters(tmp_path).trainer["step"] == 2
    pretrain.main(["--load", str(tmp_path), "--steps", "3", "--device", "cpu"])
    drawn = r"its checksum is \w+ \(drawn from --seed\), that of the model's weights is \w+$"
    with pytest.raises(megazoo.UserError, match=drawn):
        pretrain.main([*"--steps 4 --device cpu --seed 8 --load".split(), str(tmp_path)])


def test_the_line_that_goes_on_is_short_and_right(files, tmp_path, capsys):
    """The checkpoint holds all other settings. The schedule of the run is over, which is told."""
    new = [*RUN, *LORA, "--load", str(files / "base"), "--seed", "7", "--lr", "3e-3"]
    pretrain.main([*new, "--steps", "2", "--save", str(tmp_path / "run")])
    out = capsys.readouterr().out
    assert "stays at" not in out
    (line,) = re.findall(r"^  resume +(.*)$", out, re.MULTILINE)
    short, run = shlex.split(line)[2:], str(tmp_path / "run")
    flags = {word for word in short if word.startswith("--")}
    assert flags == {"--device", "--log-interval", "--save", "--load", "--steps"}
    assert short[-4:] == ["--load", run, "--steps", "4"]
    long = [*new, "--lora-load", run, "--steps", "4"]
    pretrain.main([*long, "--metrics", str(tmp_path / "long")])
    pretrain.main([*short, "--metrics", str(tmp_path / "short")])
    note = "the learning rate stays at --min-lr 0.0003: --lr-decay-steps 4 extends the decay\n"
    assert capsys.readouterr().out.count(note) == 2
    assert losses(tmp_path / "short") == losses(tmp_path / "long")
    rates = [record["lr"] for record in records(tmp_path / "short") if "lr" in record]
    assert rates == pytest.approx([3e-4, 3e-4])
    pretrain.main([*short, "--steps", "5", "--lr-decay-steps", "5"])
    assert "stays at" not in capsys.readouterr().out


def test_rank_0_is_no_adapters():
    run = pretrain.prepare([*RUN, "--lora-rank", "0", "--steps", "1"])
    assert run.weights.settings is None


def test_the_base_may_be_a_hugging_face_directory(tmp_path, monkeypatch):
    theirs, saved = tmp_path / "hf", tmp_path / "run"
    model = megazoo.from_config("llama-tiny", dtype=torch.float32)
    model.save_parallelized(theirs, merge_checkpoints=True)
    words = "--mock-data --eval-steps 0 --global-batch-size 2 --micro-batch-size 2 --device cpu"
    words = [*words.split(), "--seq-length", "32", "--dtype", "bfloat16", "--save", str(saved)]
    words += ["--lr", "1e-3"]
    pretrain.main([*words, "--load", str(theirs), "--lora-rank", "4", "--steps", "1"])
    assert SavedAdapters(saved).base_path == theirs
    pretrain.main([*words, "--load", str(saved), "--steps", "2"])
    shutil.move(theirs, tmp_path / "there")
    named = ["--load", str(tmp_path / "there"), "--lora-load", str(saved)]
    pretrain.main([*words, *named, "--steps", "3"])
    assert SavedAdapters(saved).base_path == tmp_path / "there"


def test_adapters_alone_begin_a_new_run(files):
    run = pretrain.prepare([*RUN, "--load", str(files / "lora"), "--load-weights-only"])
    assert (run.first_step, run.resuming) == (0, False)
    model, optimizer = build(run, pretrain.start_rank(run))
    held = SavedAdapters(files / "lora")
    for entry in saved_entries(model):
        values = torch.empty(entry.spec.shape)
        held.read_into(entry.name, values, entry.spec, model.ctx)
        assert torch.equal(entry.parameter, values)
        assert is_adapter(entry.name)
    assert optimizer.steps == 0


def test_a_pattern_says_what_is_trained_beside_adapters(tmp_path, capsys):
    words = [*RUN, *LORA, "--train-only", "lora|^norm", "--save", str(tmp_path), "--steps", "1"]
    pretrain.main(words)
    told = "of them: lora|^norm, of a model with adapters of rank 2 on q, v, o"
    assert told in capsys.readouterr().out
    assert "norm.weight" in SavedAdapters(tmp_path).specs
    pretrain.main(["--load", str(tmp_path), "--steps", "2", "--device", "cpu"])


def test_a_directory_of_pefts_is_loaded_by_megazoo_lora(files, monkeypatch):
    calls = []

    def loaded(model, directory):
        calls.append(directory)
        return megazoo.lora.add(model, rank=3)

    monkeypatch.setattr(megazoo.lora, "load", loaded, raising=False)
    monkeypatch.setattr("megazoo.cli.summary.adapters_of", lambda _: LoRASettings(rank=3))
    arguments = [*RUN, "--load", str(files / "base"), "--lora-load", str(files / "peft")]
    run = pretrain.prepare(arguments)
    assert not run.resuming
    model, _ = build(run, pretrain.start_rank(run))
    assert (calls, model.attached.rank) == ([files / "peft"], 3)


def test_a_restart_goes_on(files, tmp_path, monkeypatch):
    saved = shutil.copytree(files / "lora", tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    base = ["--load", str(files / "base")]
    for words in (
        [*base, *LORA],
        ["--load", str(files / "lora")],
        [*base, "--lora-load", str(files / "peft")],
    ):
        run = pretrain.prepare([*RUN, *words, "--save", str(saved), "--steps", "3"])
        assert (run.first_step, run.resuming) == (2, True)
        assert run.weights.adapters.path.parent == saved
        assert run.source.path == Checkpoint(files / "base").path


REFUSED = {
    "--lora-alpha 4": "--lora-alpha needs adapters: use --lora-rank R for new ones, or",
    "--lora-targets q --load {base}": "--lora-targets needs adapters",
    "--lora-rslora": "--lora-rslora needs adapters",
    "--lora-rank 0 --lora-alpha 3": "--lora-alpha needs adapters: use --lora-rank R for new ones",
    "--lora-load {file}": "--lora-load: {file} is not a directory",
    "--lora-rank 2 --lora-targets qq": "the target 'qq' is not a linear layer of the model; did",
    "--lora-rank 2 --lora-targets=": "the target '' is not a linear layer",
    "--lora-rank -1": "--lora-rank -1 must be 0 or more",
    "--lora-rank 9999999999": "--lora-rank 9999999999 must be at most",
    "--lora-rank 2 --lora-dropout 1": "--lora-dropout 1.0 must be below 1",
    "--lora-rank 2 --train-only ^norm": "--train-only ^norm trains no adapter: remove --lora-rank",
    "--train-only lora": "the pattern 'lora' matches no parameter",
    "--load {lora} --lora-rank 3": "--lora-rank is 3, but 2 in the checkpoint {lora}/step_00000002",
    "--load {lora} --lora-rank 0": "--lora-rank is 0, but 2 in the checkpoint",
    "--lora-load {lora} --lora-alpha 5": "--lora-alpha is 5.0, but 4.0 in the checkpoint",
    "--load {lora} --lora-targets q,v": "--lora-targets is q,v, but q,v,o in the checkpoint",
    "--load {lora} --lora-load {lora}": "--load {lora} contains only adapters: pass its base, or",
    "--load {lora} --layers 4": "--layers is 4, but layers is 3 in the checkpoint",
    "--load {lora} --steps 2": "--load {lora} is already at step 2",
    "--lora-load {lora} --steps 1": "--lora-load {lora} is already at step 2",
    "--load {moved}": "is not found at {gone}: pass --load BASE --lora-load {moved}/step_00000002",
    "--lora-load {base}": "--lora-load: {base}/step_00000001 has no adapters: it holds a complete",
    "--lora-load {gone}": "--lora-load: no directory {gone}",
    "--lora-load {peft} --lora-rank 4": "--lora-rank 4 cannot be used with --lora-load: ",
    "--load {other} --lora-load {lora}": "layers is 2 in {other}, but 3 in {lora}/step_00000002",
    "--load {gpt2} --lora-load {lora}": "{gpt2} is a GPT2, but {lora}/step_00000002 has adapters",
}


def test_contradictions_are_told_before_any_work(files, capsys, monkeypatch):
    names = {
        name: files / name for name in ("base", "lora", "peft", "moved", "gone", "other", "gpt2")
    }
    names["file"] = files / "peft" / "adapter_config.json"
    config = SavedAdapters(files / "lora").config
    changed = megazoo.from_config(type(config)(**{**vars(config), "layers": 2}))
    changed.save_parallelized(names["other"])
    megazoo.from_config("gpt2-tiny").save_parallelized(names["gpt2"])
    monkeypatch.setattr(pretrain, "train", None)
    wrong = {}
    for words, line in REFUSED.items():
        given = ["--device", "cpu", *words.format(**names).split()]
        given = given if "load" in words else [*RUN, *given]
        code, _, error = run_main(pretrain, monkeypatch, capsys, *given)
        if (code, error.count("\n")) != (2, 1) or line.format(**names) not in error:
            wrong[words] = (code, error)
    assert not wrong


def test_another_base_is_refused(files, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other"
    megazoo.from_config(SavedAdapters(files / "lora").config, seed=9).save_parallelized(other)
    words = ["--load", other, "--lora-load", files / "lora", "--steps", "3", "--device", "cpu"]
    code, _, error = run_main(pretrain, monkeypatch, capsys, *words)
    assert (code, error.count("\n")) == (2, 1), error
    held = Checkpoint(files / "lora")
    theirs = f"{held.manifest['base']['checksum']} ({Checkpoint(files / 'base').path})"
    assert f"belong to another base: its checksum is {theirs}, that of the model's" in error
    assert error.endswith(f" ({other})\n")


def test_tools_know_a_checkpoint_of_adapters(files, tmp_path, capsys, monkeypatch):
    code, out, _ = run_main(inspect_checkpoint, monkeypatch, capsys, files / "lora", "--verify")
    base, held = Checkpoint(files / "base").path, Checkpoint(files / "lora")
    assert code == 0
    assert "  adapters    of rank 2 on q, v, o: 1,056 parameters\n" in out
    assert f"  base        {base}, checksum {held.manifest['base']['checksum']} in F32\n" in out
    assert "  model       llama, " in out
    cut = tmp_path / "cut"
    code, out, _ = run_main(convert, monkeypatch, capsys, files / "lora", cut, "--tp", "2")
    assert (code, "adapters and optimizer state" in out) == (0, True)
    assert pretrain.prepare(["--load", str(cut), "--steps", "3"]).first_step == 2
    for words, told in {
        (base, "--to", "peft"): f"{base} holds a complete model",
        (files / "lora", "--to", "peft", "--adapter", cut): "omit it with --to peft",
    }.items():
        code, _, error = run_main(convert, monkeypatch, capsys, *words, tmp_path / "x")
        assert (code, told in error, error.count("\n")) == (2, True, 1), error
    for name, words in {"a": [files / "lora"], "b": [base, "--adapter", files / "lora"]}.items():
        assert run_main(merge_shards, monkeypatch, capsys, *words, tmp_path / name)[0] == 0
    merged = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert merged[0] == merged[1]
    both = ["--adapter", files / "lora"]
    code, _, error = run_main(
        merge_shards, monkeypatch, capsys, files / "lora", tmp_path / "x", *both
    )
    assert (code, error.count("\n")) == (2, 1)
    assert (
        "holds only adapters: pass its base as the model, and this checkpoint as --adapter" in error
    )
    assert not (tmp_path / "x").exists()
    words = ["--tokenizer", "byte", "--prompt", "a", "--max-new-tokens", "8"]
    expected = run_main(generate, monkeypatch, capsys, base, "--adapter", files / "lora", *words)
    code, out, error = run_main(generate, monkeypatch, capsys, files / "lora", *words)
    assert (code, out) == (0, expected[1])
    assert error.startswith(f"base: {base}, from the checkpoint\n")
    code, _, error = run_main(generate, monkeypatch, capsys, files / "moved", *words)
    assert (code, error.count("\n")) == (2, 1)
    assert f"is not found at {files / 'gone'}: pass BASE --adapter {files / 'moved'}" in error
