"""The files of a tokenizer: where they are found, and which of them are refused."""

import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from megazoo.checkpoint.places import MANIFEST
from megazoo.cli.tokenizer import find_tokenizer
from megazoo.errors import UserError
from megazoo.programs import train_tokenizer
from megazoo.tokenizer import open_tokenizer
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


PREFIX = {"add_prefix_space": True}


def sequence(field, *steps) -> dict:
    """Return a change of a field to a sequence of steps."""
    name = "normalizers" if field == "normalizer" else "processors"
    return {field: {"type": "Sequence", name: [*steps]}}


def added(**settings) -> dict:
    return {"added_tokens": [{"content": "x", **settings}]}


# the message, and what of gpt2's tokenizer.json is changed
REFUSED = {
    "model.type 'WordPiece'": {"model_type": "WordPiece"},
    "model.dropout 0.1": {"model_dropout": 0.1},
    "model.byte_fallback True": {"model_byte_fallback": True},
    "model.continuing_subword_prefix '##'": {"model_continuing_subword_prefix": "##"},
    "model.end_of_word_suffix '</w>'": {"model_end_of_word_suffix": "</w>"},
    "model.ignore_merges true with the token 'zzzz'": dict(
        model_ignore_merges=True, model_vocab=lambda vocab: vocab | {"zzzz": 5000}
    ),
    "normalizer 'Lowercase'": sequence("normalizer", {"type": "Lowercase"}),
    "pre_tokenizer None": {"pre_tokenizer": None},
    "pre_tokenizer Metaspace": {"pre_tokenizer": {"type": "Metaspace"}},
    "pre_tokenizer.add_prefix_space True": {"pre_tokenizer": BYTE_LEVEL | PREFIX},
    "pre_tokenizer.use_regex False": {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}},
    "pre_tokenizer.behavior 'Removed'": split(behavior="Removed"),
    "pre_tokenizer.invert True": split(invert=True),
    "pre_tokenizer.pattern ['String']": split(pattern={"String": " "}),
    "it has a $": split(pattern={"Regex": "a$"}),
    "the pattern '(a' is not one that tiktoken can use": split(pattern={"Regex": "(a"}),
    "post_processor 'RobertaProcessing'": {"post_processor": {"type": "RobertaProcessing"}},
    "several TemplateProcessing": sequence("post_processor", TEMPLATE, TEMPLATE),
    "added token 'x': single_word": added(id=1, single_word=True),
    "added token 'x': lstrip is 'yes', not true or false": added(id=1, lstrip="yes"),
    "token 'x' has the id -1": added(id=-1),
    "merge 'q' 'zq': 'zq' is not in the vocabulary": {"model_merges": [["q", "zq"]]},
    "merge 'a' 'q': 'aq' is not in the vocabulary": {"model_merges": ["a q"]},
    "malformed: ValueError not enough values": {"model_merges": [["q"]]},
    "malformed: KeyError 'merges'": {"model": {"type": "BPE", "vocab": {}}},
    "malformed: AttributeError": {"model_vocab": ["a"]},
    "token 'a' has the id 'b'": {"model_vocab": {"a": "b"}},
    "two tokens of the vocabulary have the same id": dict(
        model_vocab={"a": 1, "b": 1}, model_merges=[]
    ),
}


def test_a_tokenizer_json_of_another_kind_is_refused_by_name(directory, tmp_path):
    for message, changes in REFUSED.items():
        with pytest.raises(UserError, match=re.escape(message)) as error:
            open_tokenizer(edited(directory, "gpt2", tmp_path, **changes))
        assert str(error.value).startswith(f"{tmp_path}/tokenizer.json")
        assert "\n" not in str(error.value)


def test_llama2s_tokenizer_json_gives_way_to_its_model(directory, tmp_path):
    edited(directory, "gpt2", tmp_path, model_byte_fallback=True)
    shutil.copy(directory / "llama2" / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    expected = open_tokenizer(directory / "llama2").encode("hi")
    assert open_tokenizer(tmp_path).encode("hi") == expected
    shutil.copy(directory / "gpt2" / "tokenizer.json", tmp_path)
    told = r"tokenizer_config\.json: add_prefix_space True is not supported"
    with pytest.raises(UserError, match=told):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_tokenizer(tmp_path).encode("hi") == open_tokenizer(directory / "gpt2").encode("hi")


JSON, MODEL, VOCABULARY = "tokenizer.json", "tokenizer.model", {"vocab.json": '{"a": 0}'}
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
RANKS = {MODEL: "YQ== 0\n"}
# files of a directory, and the error, after its path
MALFORMED = [
    ({}, " has no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json"),
    ({JSON: '{"version": "1.0"}'}, "/tokenizer.json is malformed: KeyError 'model'"),
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
        ([], 2, "name the --output directory (--help says how)"),
        (["--output", out, "--input", none], 2, f"--input {none}: No such file or directory"),
        (["--output", out, "--input", picture], 2, f"--input {picture} is not UTF-8"),
        (
            ["--output", out, "--vocab-size", 259],
            2,
            "vocab-size 259 must be more than 259: the bytes and special tokens",
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
