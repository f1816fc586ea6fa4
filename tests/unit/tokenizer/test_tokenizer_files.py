"""The files of a tokenizer: where they are found, and which of them are refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from megazoo.checkpoint.places import MANIFEST
from megazoo.errors import UserError
from megazoo.programs import train_tokenizer
from megazoo.tokenizer import open_tokenizer
from megazoo.tokenizer.pipeline import PipelineTokenizer
from megazoo.trainer.tokenizer import find_tokenizer
from tests.support.inference import run_main
from tests.support.tokenizer_files import (
    BYTE_LEVEL,
    ROOT,
    TEMPLATE,
    edited,
    run_tool,
    split,
)


def test_files_and_checkpoints_open_as_directories_do(directory, tmp_path, monkeypatch):
    text = "it's <|endoftext|> here"
    for form, name in (
        ("gpt2", "tokenizer.json"),
        ("gpt2_files", "vocab.json"),
        ("llama2", "tokenizer.model"),
    ):
        file, whole = open_tokenizer(str(directory / form / name)), open_tokenizer(directory / form)
        assert file.encode(text) == whole.encode(text)
    step = tmp_path / "step_00000001"
    shutil.copytree(directory / "llama3_ranks", step)
    (step / MANIFEST).write_text("{}")
    found = open_tokenizer(find_tokenizer(tmp_path))
    assert found.encode(text) == open_tokenizer(directory / "llama3").encode(text)
    for where in ("byte", str(tmp_path / "none"), str(directory / "gpt2"), str(step)):
        assert find_tokenizer(where) == where
    monkeypatch.chdir(tmp_path)
    Path("byte").mkdir()  # a checkpoint of this name does not hide the tokenizer
    step.rename(Path("byte", step.name))
    assert find_tokenizer("byte") == "byte"


JSON, MODEL, VOCABULARY = "tokenizer.json", "tokenizer.model", {"vocab.json": '{"a": 0}'}
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
PREFIX = {"add_prefix_space": True}


def sequence(field, *steps) -> dict:
    """Return a change of a field to a sequence of steps."""
    name = "normalizers" if field == "normalizer" else "processors"
    return {field: {"type": "Sequence", name: [*steps]}}


def added(**settings) -> dict:
    return {"added_tokens": [{"content": "x", **settings}]}


# what of gpt2's tokenizer.json is changed, which tiktoken can't be equal to
LEFT_TO_TOKENIZERS = [
    {"model_end_of_word_suffix": "</w>"},
    dict(model_ignore_merges=True, model_vocab=lambda vocab: vocab | {"wwww": 5000}),
    sequence("normalizer", {"type": "Lowercase"}),
    {"pre_tokenizer": None},
    {"pre_tokenizer": BYTE_LEVEL | PREFIX},
    {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}},
    split(behavior="Removed"),
    split(invert=True),
    split(pattern={"String": " "}),
    split(pattern={"Regex": "t$"}),
    sequence("post_processor", TEMPLATE, TEMPLATE),
    added(id=1, single_word=True, special=False, normalized=False, lstrip=False, rstrip=False),
    # the words of a run of unknown bytes are fused
    dict(
        model_fuse_unk=True,
        model_unk_token="!",
        model_vocab=lambda vocab: {t: i for t, i in vocab.items() if t != "w"},
        model_merges=lambda merges: [m for m in merges if "w" not in "".join(m)],
    ),
]


def test_what_tiktoken_cannot_do_is_left_to_tokenizers(directory, tmp_path):
    usual, differ = open_tokenizer(directory / "gpt2"), 0
    for changes in LEFT_TO_TOKENIZERS:
        edited(directory, "gpt2", tmp_path, **changes)
        oracle, tokenizer = Tokenizer.from_file(str(tmp_path / JSON)), open_tokenizer(tmp_path)
        assert isinstance(tokenizer, PipelineTokenizer), changes
        texts = ("x import x.xx\n World\n", "wwww for a tow", "The start\nof it")
        assert all(tokenizer.encode(text) == oracle.encode(text).ids for text in texts), changes
        differ += any(tokenizer.encode(text) != usual.encode(text) for text in texts)
    assert differ == len(LEFT_TO_TOKENIZERS) - 3  # a suffix, no regex and two templates do nothing


def test_a_prefix_space_is_as_in_transformers(directory, tmp_path):
    for prefix in (True, False):
        for before in (True, False):
            change = {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": before}}
            edited(directory, "gpt2", tmp_path, **change)
            config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": prefix}
            (tmp_path / CONFIG).write_text(json.dumps(config))
            ours, theirs = open_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
            assert ours.encode("it is") == theirs.encode("it is")


# the message, and what of gpt2's tokenizer.json is changed
REFUSED = {
    "model.dropout 0.1 would draw other ids for the same text": {"model_dropout": 0.1},
    "can't be read: Cannot instantiate Tokenizer from buffer": {"model_type": "Syllables"},
    "can't be read: slice index": {"model_continuing_subword_prefix": "##"},
    "unmatched parenthesis": split(pattern={"Regex": "(a"}),
    "invalid type: string": added(id=1, lstrip="yes"),
    "invalid value: integer": added(id=-1),
    "Token `zq` out of vocabulary": {"model_merges": [["q", "zq"]]},
}


def test_a_tokenizer_json_that_tokenizers_cannot_read_is_refused(directory, tmp_path):
    for message, changes in REFUSED.items():
        with pytest.raises(UserError, match=re.escape(message)) as error:
            open_tokenizer(edited(directory, "gpt2", tmp_path, **changes))
        assert str(error.value).startswith(f"{tmp_path}/tokenizer.json")
        assert "\n" not in str(error.value)


RANKS = {MODEL: "YQ== 0\n"}
# files of a directory, and the error, after its path
MALFORMED = [
    ({}, " has no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json"),
    ({JSON: '{"version": "1.0"}'}, "/tokenizer.json can't be read: Cannot instantiate"),
    ({JSON: "{"}, "/tokenizer.json can't be read: Expecting"),
    ({JSON: " [1]"}, "/tokenizer.json is neither a sentencepiece model nor lines of base64"),
    (VOCABULARY, "/merges.txt: No such file or directory"),
    ({**VOCABULARY, "merges.txt": "#version: 1\na a a"}, "/vocab.json is malformed"),
    ({**VOCABULARY, "merges.txt": b"\xff"}, "/merges.txt is malformed: Unicode"),
    ({MODEL: ""}, "/tokenizer.model is neither a sentencepiece model"),
    ({MODEL: b"\n\x0e\n\x05<unk>"}, "/tokenizer.model is neither a sentencepiece model"),
    ({MODEL: "YQ== 0\nYg== 2\n"}, "/tokenizer.model is malformed: its ranks are not"),
    ({MODEL: "YQ== 0\nYQ== 1\n"}, "/tokenizer.model is malformed: its ranks are not"),
    ({MODEL: "YQ== 0\nYg==\n"}, "/tokenizer.model is malformed: ValueError"),
    ({**RANKS, CONFIG: '{"eos_token": "<end>"}'}, ": eos_token '<end>' is not in the vocabulary"),
    ({**RANKS, MAP: '{"eos_token": 5}'}, f"/{MAP}: eos_token 5 is not a token"),
    (
        {**VOCABULARY, CONFIG: '{"tokenizer_class": "CLIPTokenizer"}'},
        f"/{CONFIG}: tokenizer_class 'CLIPTokenizer' is not supported",
    ),
    (
        {**VOCABULARY, CONFIG: '{"add_prefix_space": true}'},
        f"/{CONFIG}: add_prefix_space True is not supported",
    ),
    (
        {**RANKS, CONFIG: '{"added_tokens_decoder": {"x": {"content": "a"}}}'},
        f"/{CONFIG} is malformed: ValueError",
    ),
]


def test_missing_and_malformed_files_are_named(tmp_path):
    for number, (files, message) in enumerate(MALFORMED):
        place = tmp_path / str(number)
        place.mkdir()
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (place / name).write_bytes(data)
        with pytest.raises(UserError, match=f"^{re.escape(f'{place}{message}')}") as error:
            open_tokenizer(place)
        assert "\n" not in str(error.value)


def test_bytes_without_a_token_are_unk_or_refused(tmp_path):
    text, trainer = (
        ["hello there", "hold"] * 5,
        trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False),
    )
    for unk in ("<unk>", None):
        bpe = Tokenizer(models.BPE(unk_token=unk))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.train_from_iterator(text, trainer)
        bpe.save(str(tmp_path / "tokenizer.json"))
        tokenizer = open_tokenizer(tmp_path)
        assert tokenizer.encode("hold there") == bpe.encode("hold there").ids
        if unk:
            assert tokenizer.encode("hold \u2603qq there") == bpe.encode("hold \u2603qq there").ids
        else:
            with pytest.raises(UserError, match="no token for the byte 0x71, which the text has"):
                tokenizer.encode("hold qq there")


def test_a_tokenizer_without_special_tokens_ends_no_document(directory, tmp_path):
    tokenizer = open_tokenizer(
        edited(directory, "llama3", tmp_path, added_tokens=[], post_processor=None)
    )
    with pytest.raises(UserError, match="no token that could end a document"):
        _ = tokenizer.eod


def test_the_training_tool_tells_mistakes_in_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "short").write_text("hello")
    out, short, none = tmp_path / "out", tmp_path / "short", tmp_path / "none"
    picture, text = ROOT / "docs" / "loss.png", ROOT / "README.md"
    for arguments, code, message in [
        ([], 2, "--output is required: the directory to write"),
        (["--output", out, "--input", none], 2, f"--input {none}: No such file or directory"),
        (["--output", out, "--input", picture], 2, f"--input {picture} is not UTF-8"),
        (
            ["--output", out, "--vocab-size", 259],
            2,
            "--vocab-size 259 must be more than 259, the number of byte and special tokens",
        ),
        (
            ["--output", out, "--input", short],
            1,
            "can't train a tokenizer on this input: Vocabulary size",
        ),
        (["--output", short / "x", "--input", text, "--vocab-size", 500], 1, "can't write"),
    ]:
        got, _, error = run_main(train_tokenizer, monkeypatch, capsys, *arguments)
        assert got == code
        assert error.startswith(f"train_tokenizer.py: error: {message}")
        assert error.count("\n") == 1
    assert "--vocab-size" in run_tool("--help").stdout
