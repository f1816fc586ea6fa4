"""Adapters through all doors at once: trained by the program, also of a classifier, then loaded,
run, merged and handed to PEFT and transformers from the run's own checkpoint."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import megazoo
from megazoo import pretrain
from megazoo.checkpoint.ownership import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megazoo.lora.source import SavedAdapters
from megazoo.programs import convert, evaluate, generate
from tests.support.classifiers import (
    LENGTH,
    PROGRAM,
    batch_of,
    read_rows,
    write_language_models,
    write_rows,
)
from tests.support.inference import run_main
from tests.support.peft_oracle import IDS, in_peft
from tests.support.pretraining import losses
from tests.support.sampling import marked_slow
from tests.support.scripts import merge_shards

LORA = "--lora-rank 3 --lora-alpha 6 --lora-targets all-linear --lr 1e-2".split()
FAMILIES = ("gpt2", "llama", "mpt")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return write_language_models(tmp_path_factory.mktemp("bases"))


def train(directory, *words):
    pretrain.main([*PROGRAM, *LORA, "--load", str(directory), *map(str, words)])


def assert_converts_alike(run, directory, monkeypatch, capsys):
    """`convert --to peft` writes what megazoo.lora.save wrote, and the directory of the base."""
    words = [run, directory / "converted", "--to", "peft"]
    code, out, err = run_main(convert, monkeypatch, capsys, *words)
    assert (code, "PeftModel.from_pretrained" in out) == (0, True), err
    saved, converted = (directory / name for name in ("adapter", "converted"))
    assert sorted(path.name for path in converted.iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    assert (converted / ADAPTER_WEIGHTS).read_bytes() == (saved / ADAPTER_WEIGHTS).read_bytes()
    base = {"base_model_name_or_path": str(SavedAdapters(run).base_path)}
    configs = [json.loads((path / ADAPTER_CONFIG).read_text()) for path in (saved, converted)]
    assert configs[0] | base == configs[1]


# fast: of each family one of the two
@pytest.mark.parametrize("family", marked_slow(list(FAMILIES), lambda _, name: name != "gpt2"))
def test_a_classifier_with_adapters(bases, tmp_path, monkeypatch, capsys, family):
    """The head is trained beside the adapters, and held with them; the base is a language model."""
    file, run, base = write_rows(tmp_path / "a.jsonl", "2 labels"), tmp_path / "run", bases / family
    labelled = ["--num-labels", 2, "--data", file]
    train(base, *labelled, "--save", run, "--steps", 4)
    train(base, *labelled, "--metrics", tmp_path / "straight", "--steps", 6)
    again = ["--lora-load", run, "--steps", 6, "--metrics", tmp_path / "again", "--save", run]
    pretrain.main([*map(str, ["--load", base, "--device", "cpu", "--data", file, *again])])
    straight = losses(tmp_path / "straight")
    assert losses(tmp_path / "again") == {step: straight[step] for step in (5, 6)}
    held = set(SavedAdapters(run).specs)
    assert "score.weight" in held
    assert all(".lora." in name for name in held - {"score.weight"})

    output, rows = tmp_path / "predictions.jsonl", read_rows(file)
    words = [base, "--adapter", run, "--labels", file, "--output", output, "--seq-length", LENGTH]
    code, out, err = run_main(evaluate, monkeypatch, capsys, *words, "--tokenizer", "byte")
    assert (code, "accuracy" in out) == (0, True), err
    scores = torch.tensor([line["scores"] for line in read_rows(output)])

    code, out, err = run_main(
        merge_shards, monkeypatch, capsys, base, tmp_path / "hf", "--adapter", run
    )
    assert (code, "AutoModelForSequenceClassification.from_pretrained" in out) == (0, True), err
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    pad = theirs.config.pad_token_id
    with torch.no_grad():
        expected = theirs(batch_of(rows, pad)[0]).logits
    assert (scores - expected).abs().max() < 1e-5

    model = megazoo.from_pretrained(base, num_labels=2, pad_token_id=pad, seed=99)
    megazoo.lora.load(model, run)
    megazoo.lora.save(model, tmp_path / "adapter")
    assert_converts_alike(run, tmp_path, monkeypatch, capsys)
    hf = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2, pad_token_id=pad)
    with torch.no_grad():
        assert (
            in_peft(hf, tmp_path / "adapter")(batch_of(rows, pad)[0]).logits - expected
        ).abs().max() < 1e-5

    words = [base, "--adapter", tmp_path / "adapter", *words[3:], "--tokenizer", "byte"]
    code, _, err = run_main(evaluate, monkeypatch, capsys, *words)
    assert code == 0, err
    again = torch.tensor([line["scores"] for line in read_rows(output)])
    assert (again - scores).abs().max() < 1e-5


@pytest.mark.parametrize("family", marked_slow(list(FAMILIES), lambda _, name: name != "mpt"))
def test_a_language_model_with_adapters(bases, tmp_path, monkeypatch, capsys, family):
    """A run from PEFT's directory begins where that stands; its checkpoint runs and merges."""
    base, run = bases / family, tmp_path / "run"
    train(base, "--save", run, "--steps", 3)
    model = megazoo.lora.load(megazoo.from_pretrained(base), run)
    megazoo.lora.save(model, tmp_path / "adapter")
    shutil.move(base, gone := tmp_path / "gone")  # the base is not read
    assert_converts_alike(run, tmp_path, monkeypatch, capsys)
    shutil.move(gone, base)
    hf = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        expected = in_peft(hf, tmp_path / "adapter")(IDS).logits
        assert (hf(IDS).logits - expected).abs().max() > 1e-3  # the adapters do something
        assert (model.eval()(IDS).logits - expected).abs().max() < 1e-5
        converted = in_peft(hf, tmp_path / "converted")(IDS).logits
    assert (converted - expected).abs().max() < 1e-5
    merged = ["--adapter", run]
    code, _, err = run_main(merge_shards, monkeypatch, capsys, base, tmp_path / "hf", *merged)
    assert code == 0, err
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(IDS).logits
    assert (found - expected).abs().max() < 1e-5

    words = [base, *merged, "--tokenizer", "byte", "--prompt", "def ", "--max-new-tokens", 8]
    texts = []
    for words[2] in (run, tmp_path / "adapter"):
        code, out, err = run_main(generate, monkeypatch, capsys, *words)
        assert code == 0, err
        texts.append(out.splitlines()[0])
    assert texts[0] == texts[1]

    peft = [*PROGRAM, "--load", base, "--lora-load", tmp_path / "adapter", "--steps", 1]
    pretrain.main(list(map(str, [*peft, "--lr", 0, "--min-lr", 0, "--metrics", tmp_path / "m"])))
    begun = ["--load", base, "--lora-load", run, "--load-weights-only", "--steps", 1, "--lr", 0]
    pretrain.main([*PROGRAM, *map(str, [*begun, "--min-lr", 0, "--metrics", tmp_path / "n"])])
    assert abs(losses(tmp_path / "m")[1] - losses(tmp_path / "n")[1]) < 1e-6


def test_adapters_of_another_base_are_not_merged_nor_run(bases, tmp_path, monkeypatch, capsys):
    """One number of one weight is another: by a bit."""
    run, other = tmp_path / "run", tmp_path / "other"
    train(bases / "llama", "--save", run, "--steps", 1)
    hf = AutoModelForCausalLM.from_pretrained(bases / "llama")
    weight = hf.model.layers[2].mlp.down_proj.weight.data
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    hf.save_pretrained(other)
    capsys.readouterr()
    for tool, words in {
        merge_shards: [other, tmp_path / "hf", "--adapter", run],
        generate: [other, "--adapter", run, "--tokenizer", "byte", "--prompt", "a"],
    }.items():
        code, _, err = run_main(tool, monkeypatch, capsys, *words)
        assert code in (1, 2)
        assert "belong to another base" in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "hf").exists()


def test_what_was_trained_beside_adapters_is_trained_again(bases, tmp_path, monkeypatch, capsys):
    """So that megazoo.lora.save and `convert --to peft`, which would lose it, refuse."""
    run = tmp_path / "run"
    train(bases / "llama", "--save", run, "--steps", 1, "--train-only", "lora|^norm")
    model = megazoo.lora.load(megazoo.from_pretrained(bases / "llama"), run)
    trained = {entry.name for entry in model.trained_entries()}
    assert trained == set(SavedAdapters(run).specs)
    assert "norm.weight" in trained
    with pytest.raises(megazoo.UserError, match="norm"):
        megazoo.lora.save(model, tmp_path / "adapter")
    code, _, err = run_main(convert, monkeypatch, capsys, run, tmp_path / "adapter", "--to", "peft")
    assert (code, "norm.weight, trained in addition" in err, err.count("\n")) == (2, True, 1), err
    assert not (tmp_path / "adapter").exists()


def test_a_model_of_another_base_stays_as_it_was(bases, tmp_path):
    train(bases / "llama", "--save", tmp_path / "run", "--steps", 1)
    model = megazoo.from_pretrained(bases / "llama")
    with torch.no_grad():
        model.norm.weight[3] += 1
    with pytest.raises(megazoo.UserError, match="belong to another base"):
        megazoo.lora.load(model, tmp_path / "run")
    assert model.attached is None
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_settings_that_make_no_adapter_are_refused():
    model = megazoo.from_config("llama-tiny")
    for settings, told in (
        ({"alpha": 0}, "alpha 0 would disable"),
        ({"targets": 5}, "targets must be names"),
        ({"targets": ()}, "targets is empty"),
        ({"rank": 0}, "rank 0 must be 1 or more"),
        ({"dropout": 1}, "dropout 1 must be below 1"),
    ):
        with pytest.raises(megazoo.UserError, match=told):
            megazoo.lora.add(model, **settings)
        assert model.attached is None, settings
