"""Tokenizers in GGUF files: the ids are those of the files that they came from, and those of
transformers."""

import json
import random
import tempfile
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoModelForCausalLM, AutoTokenizer

from megazoo.errors import UserError
from megazoo.formats.gguf.export import write_gguf
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.gguf_file import read_gguf
from megazoo.models.pretrained import open_source
from megazoo.tokenizer import open_tokenizer
from megazoo.tokenizer.gguf import _name_of_words, metadata_of, tokenizer_files_of
from tests.support.tokenizer_files import NATURAL
from tests.support.transformers_models import config_of

GPT2 = {"eos_token": "<|endoftext|>"}
NAMES_OF = {"llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}}


@pytest.mark.parametrize("form", ["gpt2", "llama3", "qwen2", "smollm", "llama2"])
def test_a_tokenizer_travels_both_ways(form, directory, tmp_path):
    files = directory / form
    if form in ("qwen2", "smollm"):
        files = tmp_path / form
        files.mkdir()
        (files / "tokenizer.json").write_text(json.dumps(of_other_words(directory, form)))
    theirs = tmp_path / "hf"
    AutoModelForCausalLM.from_config(config_of("qwen3", vocab_size=1400)).save_pretrained(theirs)
    for path in files.iterdir():
        (theirs / path.name).write_bytes(path.read_bytes())
    if form != "llama2":
        (theirs / "tokenizer_config.json").write_text(json.dumps(NAMES_OF.get(form, GPT2)))
    (theirs / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    file = tmp_path / "model.gguf"
    assert write_gguf(open_source(theirs), file) == ""
    before, after = open_tokenizer(theirs), open_tokenizer(file)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    choice = random.Random(0)
    pieces = [*NATURAL.split(), " ", "  ", "\n", "\t", "a1b2", "\u00e9", "<s>", "'s", "12"]
    texts = [" ".join(choice.choices(pieces, k=9)) for _ in range(200)]
    for text in [NATURAL, "", " x", *texts]:
        expected = before.encode(text)
        assert after.encode(text) == expected, text
        # transformers treats spaces around LLaMA 2's special tokens otherwise, splits no digits
        # for SmolLM, and does not normalize for Qwen 2
        text = unicodedata.normalize("NFC", text)
        if form not in ("llama2", "smollm"):
            assert oracle(text, add_special_tokens=False)["input_ids"] == before.encode(
                text, add_special_tokens=False
            ), text
    write_hugging_face(open_source(file), tmp_path / "again")
    write_gguf(open_source(tmp_path / "again"), tmp_path / "again.gguf")
    first, second = (dict(read_gguf(path).metadata) for path in (file, tmp_path / "again.gguf"))
    for key in ("general.name", "tokenizer.ggml.scores"):  # of scores, their order counts
        first.pop(key, None), second.pop(key, None)
    assert first == second
    assert (after.before, after.after) == (before.before, before.after)
    assert after.eos_token_id == before.eos_token_id
    assert after.apply_chat_template([{"role": "user", "content": "x"}]) == "x"
    before.chat_templates = {"tool_use": "tools", "default": "x"}
    written = metadata_of(before, {path.name: path.read_bytes() for path in files.iterdir()}, 1400)
    assert tokenizer_files_of(written)["additional_chat_templates/tool_use.jinja"] == b"tools"


def of_other_words(directory, form):
    """A tokenizer.json that splits words as Qwen 2's and SmolLM's published ones do."""
    whole = json.loads((directory / "gpt2" / "tokenizer.json").read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps = [{"type": "Digits", "individual_digits": True}, byte_level | {"use_regex": True}]
    if form == "qwen2":
        whole["normalizer"] = {"type": "NFC"}
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = {"type": "Split", "pattern": {"Regex": pattern}}
        steps = [
            split | {"behavior": "Isolated", "invert": False},
            byte_level | {"use_regex": False},
        ]
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return whole


def left_out(tokenizer_json, files=()):
    """Why a tokenizer is left out of a GGUF file."""
    data = {"tokenizer.json": json.dumps(tokenizer_json).encode()} if tokenizer_json else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {**data, **dict(files)}.items():
            Path(folder, name).write_bytes(content)
        with pytest.raises(UserError) as raised:
            metadata_of(open_tokenizer(folder), data | dict(files), 1400)
    return str(raised.value)


def test_what_would_change_ids_is_left_out(directory):
    for change, reason in [
        (lambda w: w["added_tokens"][0].update(lstrip=True), "has lstrip, rstrip or single_word"),
        (lambda w: w["added_tokens"][0].update(single_word=True), "has lstrip, rstrip or single"),
        (lambda w: w.update(normalizer={"type": "NFKC"}), "can't represent how its tokenizer.json"),
        (lambda w: w["model"].update(ignore_merges=True), "can't represent how its tokenizer.json"),
    ]:
        whole = json.loads((directory / "gpt2" / "tokenizer.json").read_text())
        change(whole)
        assert reason in left_out(whole)
    assert "can't represent how" in left_out(
        of_other_words(directory, "qwen2") | {"normalizer": None}
    )
    whole = json.loads((directory / "gpt2" / "tokenizer.json").read_text())
    extra = {"id": 2000, "content": "<more>", "special": True}
    assert "more than the model's 1400" in left_out(
        whole | {"added_tokens": [*whole["added_tokens"], extra]}
    )


def test_a_byte_level_step_splits_words_unless_it_says_otherwise(directory):
    whole = json.loads((directory / "gpt2" / "tokenizer.json").read_text())
    whole["pre_tokenizer"].pop("use_regex")
    assert _name_of_words(whole) == "gpt-2"
    assert (
        _name_of_words(whole | {"normalizer": {"type": "Sequence", "normalizers": []}}) == "gpt-2"
    )


def test_models_of_sentencepiece_that_change_text_are_left_out(tmp_path):
    (tmp_path / "text").write_text(f"{NATURAL}\n" * 20)
    plain = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    for number, (settings, reason) in enumerate(
        [
            ({"normalization_rule_name": "nmt_nfkc"}, "that normalizes text"),
            ({"remove_extra_whitespaces": True}, "that normalizes text"),
            ({"user_defined_symbols": ["<sep>"]}, "with user-defined symbols"),
            ({}, None),
            ({"add_dummy_prefix": False}, None),
        ]
    ):
        sentencepiece.SentencePieceTrainer.train(
            input=tmp_path / "text", model_prefix=tmp_path / str(number), vocab_size=450,
            model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
            **{**plain, **settings},
        )  # fmt: skip
        files = {"tokenizer.model": (tmp_path / f"{number}.model").read_bytes()}
        if reason:
            assert reason in left_out(None, files), settings
            continue
        (tmp_path / "tokenizer.model").write_bytes(files["tokenizer.model"])
        before = open_tokenizer(tmp_path)
        written = metadata_of(before, files, 500)
        for name, content in tokenizer_files_of(written).items():
            (tmp_path / "again").mkdir(exist_ok=True)
            (tmp_path / "again" / name).write_bytes(content)
        after = open_tokenizer(tmp_path / "again")
        for text in (NATURAL, " two  spaces ", "\ufb01 \uff21 e\u0301", "", " "):
            assert after.encode(text) == before.encode(text), (settings, text)


FORGED = {
    "tokens": 5,
    "token_type": ["a"],
    "scores": [0.5],
    "merges": [1],
    "model": ["gpt2"],
    "pre": ["gpt-2"],
    "bos_token_id": -1,
    "eos_token_id": 99,
    "padding_token_id": "x",
    "add_bos_token": "yes",
}


@pytest.mark.parametrize("key", FORGED)
def test_forged_metadata_is_named(key):
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "token_type": [1, 1]}
    whole = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    assert "tokenizer.json" in tokenizer_files_of(whole)
    with pytest.raises(UserError, match=r"tokenizer\.ggml\."):
        tokenizer_files_of(whole | {f"tokenizer.ggml.{key}": FORGED[key]})
    named = {"tokenizer.chat_templates": ["a", "../b"], "tokenizer.chat_template.a": "x"}
    files = tokenizer_files_of(whole | named)
    assert [name for name in files if "/" in name] == ["additional_chat_templates/a.jinja"]
    with pytest.raises(UserError, match=r"tokenizer\.chat_template\.a is 5: it must be a string"):
        tokenizer_files_of(whole | named | {"tokenizer.chat_template.a": 5})
    with pytest.raises(UserError, match=r"tokenizer\.chat_template is 5: it must be a string"):
        tokenizer_files_of(whole | {"tokenizer.chat_template": 5})
