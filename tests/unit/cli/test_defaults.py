"""Defaults that follow the model, what prints them, and the plan of the same flags."""

import json
import sys
import tomllib

import pytest

import megazoo
from megazoo import pretrain
from megazoo.cli.settings import resolve
from megazoo.families.published import GPT3, pretraining_defaults
from megazoo.families.registry import FAMILIES, presets
from megazoo.programs import models, plan
from megazoo.trainer.defaults import fit_to_rows
from tests.support.inference import run_main
from tests.support.sampling import marked_slow


def settings(*words):
    return resolve(list(map(str, words)), "")


def defaults(*words) -> tuple:
    options = settings(*words).options
    training, optimizer = options.training, options.optimizer
    duration = ("steps", training.steps) if training.steps else ("epochs", training.epochs)
    batch = (training.micro_batch_size, training.global_batch_size)
    return training.seq_length, *batch, optimizer.lr, duration, optimizer.warmup_steps


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A Hugging Face directory of a tiny GPT-2."""
    directory = tmp_path_factory.mktemp("hf")
    megazoo.from_config("gpt2-tiny", seed=1).save_pretrained(directory)
    return directory


DEMO = (128, 16, 32, 1e-3, ("steps", 600), 60)
OF_RANDOM_WEIGHTS = {
    "": DEMO,
    "--model llama": DEMO,
    "--preset qwen3-tiny --mock-data": DEMO,
    "--steps 40": (*DEMO[:4], ("steps", 40), 4),
    # Brown et al. 2020, table 2.1: 125M, 6e-4; batch of Radford et al. 2019: 512 sequences
    "--preset gpt2-124m": (1024, 1, 512, 6e-4, ("epochs", 1), None),
    "--preset gpt2-124m --dropout 0.1": (1024, 1, 512, 6e-4, ("epochs", 1), None),
    "--preset gpt2-124m --mock-data": (1024, 1, 512, 6e-4, ("steps", 600), 18),
    "--preset gpt2-124m --steps 100000": (1024, 1, 512, 6e-4, ("steps", 100_000), 2000),
    # Biderman et al. 2023, table 1: 1e-3, 2M tokens; half of the model is another model
    "--preset pythia-70m": (2048, 1, 1024, 1e-3, ("epochs", 1), None),
    "--preset pythia-70m --max-positions 4096": (4096, 1, 512, 1e-3, ("epochs", 1), None),
    "--preset pythia-70m --layers 3": (2048, 1, 256, 6e-4, ("epochs", 1), None),
    # Touvron et al. 2023, table 2: 3e-4, 4M tokens
    "--preset llama-7b": (2048, 1, 2048, 3e-4, ("epochs", 1), None),
    # a tiny preset of 57 million parameters is no demo
    "--hidden-size 768 --layers 8": (256, 1, 2048, 6e-4, ("epochs", 1), None),
}


def test_defaults_from_random_weights_are_the_demos_or_the_published_ones():
    found = {words: defaults(*words.split()) for words in OF_RANDOM_WEIGHTS}
    assert found == OF_RANDOM_WEIGHTS


def test_defaults_of_fine_tuning_do_no_harm(weights):
    whole = (256, 1, 32, 1e-5, ("epochs", 1), None)  # the model has 256 positions
    assert defaults("--load", weights) == whole
    assert defaults("--load", weights, "--lora-rank", 4) == (*whole[:3], 2e-4, *whole[4:])
    assert defaults("--load", weights, "--steps", 1000)[4:] == (("steps", 1000), 30)
    assert "--lr 1e-05 (for fine-tuning, all weights)" in settings("--load", weights).filled
    given = ("--seq-length", 64, "--lr", 0.5, "--micro-batch-size", 2, "--global-batch-size", 6)
    assert defaults("--load", weights, *given)[:4] == (64, 2, 6, 0.5)


def test_the_batch_and_the_epochs_of_fine_tuning_follow_from_the_rows(weights):
    def fitted(rows, *words) -> tuple[int, int]:
        found = settings("--load", weights, *words)
        fit_to_rows(found.options, found.of_rows, rows)
        return found.options.training.global_batch_size, found.options.training.epochs

    expected = {3: (1, 3), 28: (8, 3), 300: (32, 3), 2000: (32, 2), 5000: (32, 1)}
    assert {rows: fitted(rows) for rows in expected} == expected
    assert fitted(28, "--epochs", 1) == (2, 1)
    assert fitted(28, "--global-batch-size", 4) == (4, 3)
    assert fitted(28, "--dp", 3) == (9, 3)
    assert not settings("--load", weights, "--steps", 5).of_rows
    assert not settings().of_rows


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_short_run_reaches_the_peak_rate(weights, steps):
    optimizer = settings("--load", weights, "--steps", steps).options.optimizer
    assert optimizer.warmup_steps == 1


def test_the_default_batch_fits_any_number_of_replicas():
    for dp, batch in {1: (16, 32), 2: (16, 32), 4: (8, 32), 3: (11, 33), 64: (1, 64)}.items():
        assert defaults("--dp", dp)[1:3] == batch
    assert defaults("--dp", 4, "--micro-batch-size", 16)[1:3] == (16, 64)
    assert defaults("--dp", 2, "--global-batch-size", 12)[1:3] == (6, 12)


def test_muon_on_loaded_weights_needs_a_rate(weights, monkeypatch, capsys):
    words = ("--load", weights, "--optimizer", "muon", "--steps", 1)
    code, _, error = run_main(pretrain, monkeypatch, capsys, *words)
    assert code == 2
    assert "fine-tuning with Muon needs --muon-lr: the default for random weights, 2e-2" in error
    assert run_main(plan, monkeypatch, capsys, *words)[0] == 0
    assert settings(*words, "--muon-lr", 1e-3).options.optimizer.muon_lr == 1e-3
    assert settings("--optimizer", "muon").options.optimizer.muon_lr == 2e-2


def test_the_table_of_gpt3_is_that_of_the_paper():
    """Each model is its own nearest; sizes between take the nearer by ratio."""
    for size, lr, tokens in GPT3:
        found = pretraining_defaults(size * 1_000_000, None, 2048)
        assert found.lr == lr
        assert 0.7 < found.global_batch_size * 2048 / (tokens * 1e6) < 1.42
    assert [row[1] for row in GPT3] == sorted((row[1] for row in GPT3), reverse=True)
    assert pretraining_defaults(200_000_000, None, 2048).lr == 6e-4
    assert pretraining_defaults(220_000_000, None, 2048).lr == 3e-4
    assert (
        pretraining_defaults(200_000, "unknown", 128).source == "of GPT-3 125M, the nearest in size"
    )


# Numbers of parameters, as the files on the hub have them.
ON_THE_HUB = {
    "gpt2-124m": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mpt-7b": 6_649_286_656,
    "pythia-70m": 70_426_624,
    "pythia-12b": 11_846_072_320,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


def test_models_are_listed_with_the_sizes_of_their_files(monkeypatch, capsys):
    code, out, _ = run_main(models, monkeypatch, capsys, "--json", "-")
    rows = {row["preset"]: row for row in json.loads(out)}
    assert code == 0
    assert {name: rows[name]["parameters"] for name in ON_THE_HUB} == ON_THE_HUB
    named = {
        name for family in FAMILIES.values() for name in sys.modules[family.__module__].PUBLISHED
    }
    assert named <= presets().keys()
    _, out, _ = run_main(models, monkeypatch, capsys, "llama")
    assert "llama3-8b" in out
    assert "qwen" not in out
    _, out, _ = run_main(models, monkeypatch, capsys, "qwen3-8b")
    assert "megazoo pretrain --load Qwen/Qwen3-8B" in out
    code, _, error = run_main(models, monkeypatch, capsys, "qwen3-8")
    assert (code, error.count("\n")) == (2, 1)
    assert "did you mean qwen3-8b?" in error


RUNS = [
    "",
    "--preset gpt2-124m --layers 2 --tp 2 --pp 2 --dp 2 --zero 1 --dtype bf16 --recompute full",
    "--model llama --pp 4 --schedule gpipe --micro-batch-size 2 --seq-length 64 --steps 7",
    "--data x.jsonl --eval-steps 3 --metrics m.jsonl --timeout 5 --lora-rank 2",
]


@pytest.mark.parametrize("words", marked_slow(RUNS, lambda number, _: number % 2 == 0))
def test_plan_and_pretrain_describe_the_same_run(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "a text"}\n')
    given = [*words.split(), "--device", "cpu"]
    code, dry, error = run_main(pretrain, monkeypatch, capsys, *given, "--dry-run")
    assert (code, error) == (0, "")
    planned, _, printed = dry.partition("on cpu:\n")[2].partition("\n# settings for --config\n")
    assert planned == run_main(plan, monkeypatch, capsys, *given)[1]
    # the printed settings are those of the run
    (tmp_path / "c.toml").write_text(printed)
    _, out, _ = run_main(plan, monkeypatch, capsys, "--config", tmp_path / "c.toml")
    assert out == planned


def test_printed_settings_are_read_again_and_leave_open_what_follows(
    weights, monkeypatch, capsys, tmp_path
):
    file = tmp_path / "c.toml"
    template = "{role}\U0001f600\x7f\\{content}"
    words = ["--load", weights, "--chat-template", template, "--no-verify", "--lora-rank", 2]
    _, out, _ = run_main(pretrain, monkeypatch, capsys, *words, "--print-config")
    file.write_text(out)
    assert tomllib.loads(out)["chat_template"] == template
    assert run_main(pretrain, monkeypatch, capsys, "--config", file, "--print-config")[1] == out
    assert not {"lr_decay_steps", "warmup_steps", "min_lr", "dtype"} & tomllib.loads(out).keys()
    again = settings("--config", file, "--lr", 1e-6, "--steps", 1000).options.optimizer
    assert (again.min_lr, again.warmup_steps, again.lr_decay_steps) == (1e-7, 30, 1000)


def test_a_plan_knows_the_adapters_of_a_peft_directory(weights, monkeypatch, capsys, tmp_path):
    model = megazoo.lora.add(megazoo.from_pretrained(weights), rank=4, targets="q,v,output")
    megazoo.lora.save(model, tmp_path / "adapter")
    of_flags = ("--lora-rank", 4, "--lora-targets", "q,v,output")
    found = [
        run_main(plan, monkeypatch, capsys, "--load", weights, *words)[1]
        for words in (of_flags, ("--lora-load", tmp_path / "adapter"))
    ]
    assert found[0] == found[1]
    assert "of them trained" in found[0]


def test_a_dry_run_prints_what_follows_from_other_settings(weights, monkeypatch, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("a text\n" * 9)
    words = ["--load", weights, "--data", tmp_path / "a.txt", "--lora-rank", 4, "--device", "cpu"]
    words += "--global-batch-size 2 --micro-batch-size 1 --seq-length 8 --lr 1e-3 --dry-run".split()
    derived = "--lr-schedule cosine --min-lr 0.0001 --dtype float32 "
    derived += "--lora-rank 4 --lora-alpha 16 --lora-targets q,v"
    derived = derived.replace(" --", ", --")
    _, out, _ = run_main(pretrain, monkeypatch, capsys, *words, "--steps", 100)
    assert "defaults: " not in out
    assert f"derived: --warmup-steps 3, --lr-decay-steps 100, {derived}\n" in out
    _, out, _ = run_main(pretrain, monkeypatch, capsys, *words)
    later = "from the size of the data: --epochs, --steps, --warmup-steps, --lr-decay-steps"
    assert "defaults: " not in out
    assert f"derived: {derived}; {later}\n" in out


def test_a_dry_run_of_a_classifier_says_that_it_has_no_plan(monkeypatch, capsys, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a", "label": 1}\n')
    words = ("--num-labels", 2, "--data", tmp_path / "c.jsonl", "--dry-run")
    code, out, _ = run_main(pretrain, monkeypatch, capsys, *words)
    planned, _, printed = out.partition("\n# settings for --config\n")
    assert (code, planned.splitlines()[-1]) == (0, "no plan: classifiers are not supported")
    assert tomllib.loads(printed)["num_labels"] == 2
