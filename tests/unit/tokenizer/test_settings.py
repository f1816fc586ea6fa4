"""What the files beside a tokenizer say: which tokens are special, and which go around a text."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from megazoo.data.cache import cached_tokens
from megazoo.programs.train_tokenizer import CONFIG
from megazoo.tokenizer import open_tokenizer, sidecar_files_in, tokenizer_files
from megazoo.tokenizer.ranks import special_tokens
from tests.support.tokenizer_files import LLAMA3_SPECIAL, TOKENS

BOS = {"bos_token": "<|begin_of_text|>"}
EOS = {"eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"}}
FIRST = TOKENS["llama3"]
PAD = {
    "added_tokens_decoder": {"1200": {"content": "<pad>", "special": True}},
    "pad_token": "<pad>",
}
PARTS = ["hi", " there"]
OTHERS = {"1100": {"content": "<s>"}, "1101": {"content": "</s>"}}
LLAMA3 = (FIRST, FIRST + 1, None, [FIRST], [])
LLAMA3_EOT, LLAMA3_EOM = (FIRST, FIRST + 9, *LLAMA3[2:]), (FIRST, FIRST + 8, *LLAMA3[2:])
GPT2, LLAMA2, PADDED = (0, 0, None, [], []), (1, 2, None, [1], []), (1, 2, 1200, [1], [])
NONE = (None, None, None, [], [])


def config(**settings) -> dict:
    return {"tokenizer_config": settings}


# form, files beside it: bos, eos, pad, and the ids around a text
SETTINGS = {
    "a tokenizer.json names nothing": ("gpt2", {}, NONE),
    "vocab.json and merges.txt are GPT-2's": ("gpt2_files", {}, GPT2),
    "a model names the class": ("gpt2", {"config": {"model_type": "gpt2"}}, GPT2),
    "NeoX": ("neox", {"config": {"model_type": "gpt_neox"}}, (0, 0, 1, [], [])),
    "LLaMA-3": ("llama3", {}, (None, None, None, [FIRST], [])),
    "ranks": ("llama3_ranks", {}, LLAMA3),
    "sentencepiece": ("llama2", config(), LLAMA2),
    "sentencepiece alone": ("llama2", {}, LLAMA2),
    "bos in front": ("gpt2_files", config(add_bos_token=True), (0, 0, None, [0], [])),
    "eos behind": ("llama2", config(add_eos_token=True), (1, 2, None, [1], [2])),
    "no bos": ("llama2", config(add_bos_token=False), (1, 2, None, [], [])),
    "null is none": ("gpt2_files", config(bos_token=None), (None, 0, None, [], [])),
    "the map": ("llama3_ranks", {"special_tokens_map": EOS}, LLAMA3_EOT),
    "the map wins": (
        "llama3_ranks",
        {"special_tokens_map": EOS, **config(eos_token="<|eom_id|>")},
        LLAMA3_EOT,
    ),
    "unless the config has the added tokens": (
        "llama3",
        {"special_tokens_map": EOS, **config(eos_token="<|eom_id|>", added_tokens_decoder={})},
        (None, *LLAMA3_EOM[1:]),
    ),
    "ranks with other tokens": (
        "llama3_ranks",
        config(added_tokens_decoder=OTHERS, bos_token="<s>", eos_token="</s>"),
        LLAMA3,
    ),
    "a tokenizer.json has its own template": (
        "llama3",
        config(**BOS, **EOS, add_bos_token=False, add_eos_token=True),
        LLAMA3_EOT,
    ),
    "ids if there is no name": (
        "gpt2",
        {
            "config": {"pad_token_id": 5, "eos_token_id": 7, "bos_token_id": True},
            "generation_config": {"pad_token_id": [6, 7]},
        },
        (None, 7, 6, [], []),
    ),
    "a class before ids": ("gpt2_files", {"config": {"eos_token_id": 7}}, GPT2),
    "an id that no token has": ("gpt2", {"config": {"pad_token_id": 5000}}, NONE),
    "a token added to sentencepiece": ("llama2", config(**PAD), PADDED),
    "added_tokens.json": (
        "llama2",
        {"added_tokens": {"<pad>": 1200}, "special_tokens_map": {"pad_token": "<pad>"}},
        PADDED,
    ),
}


def with_files(directory, form, files, tmp_path):
    """A copy of a form's directory with JSON files in it."""
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    shutil.copytree(directory / form, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer_config.json").unlink(missing_ok=True)
    for name, content in files.items():
        (tmp_path / "copy" / f"{name}.json").write_text(json.dumps(content))
    return tmp_path / "copy"


def test_special_tokens_are_those_of_the_files(directory, tmp_path):
    for case, (form, files, (bos, eos, pad, before, after)) in SETTINGS.items():
        tokenizer = open_tokenizer(with_files(directory, form, files, tmp_path))
        found = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert found == (bos, eos, pad), case
        plain = tokenizer.encode("hi there", add_special_tokens=False)
        assert tokenizer.encode("hi there") == [*before, *plain, *after], case
        ends = [token for token in (eos, bos, pad, *after, *before, 0) if token is not None]
        assert tokenizer.eod == ends[0], case
        if case == "ranks with other tokens":
            assert tokenizer.vocab_size == FIRST + 2
        if pad == 1200:
            assert tokenizer.vocab_size == 1201
            hi, there = (tokenizer.encode(text, add_special_tokens=False) for text in PARTS)
            assert tokenizer.encode("hi<pad> there") == [1, *hi, 1200, *there], case
            assert tokenizer.decode([*plain, 1200, 2], skip_special_tokens=True) == "hi there"


FAST = {"tokenizer_class": "PreTrainedTokenizerFast", **BOS, **EOS}
CONFIGS = [
    ("gpt2", {"tokenizer_class": "GPT2Tokenizer"}),
    ("gpt2_files", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}),
    ("neox", {"tokenizer_class": "GPTNeoXTokenizer", "add_eos_token": True}),
    ("llama3", FAST),
    ("llama3", {**FAST, "add_bos_token": False}),
]


def check_as_transformers(path) -> None:
    ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), path
    for text in ("hello  world\n", "née \u2603 123", ""):
        assert ours.encode(text) == theirs.encode(text), path


def test_transformers_sees_the_same(directory, tmp_path):
    for form, settings in CONFIGS:
        check_as_transformers(with_files(directory, form, config(**settings), tmp_path))


def test_transformers_sees_the_same_of_sentencepiece(directory, tmp_path):
    pytest.importorskip(
        "google.protobuf", reason="transformers reads sentencepiece models by protobuf"
    )
    check_as_transformers(with_files(directory, "llama2", config(**CONFIG), tmp_path))


def test_llama3s_special_tokens_have_their_published_ids():
    assert len(LLAMA3_SPECIAL) == 256
    tokens = {token.content: token.id for token in special_tokens(128000)}
    assert tokens == {content: 128000 + place for place, content in enumerate(LLAMA3_SPECIAL)}
    assert (tokens["<|start_header_id|>"], tokens["<|eot_id|>"]) == (128006, 128009)


def seen(tokenizer):
    """What a tokenizer takes from the files beside its vocabulary."""
    names = ["bos_token_id", "eos_token_id", "pad_token_id", "special_tokens_map", "before"]
    names += ["after", "padding_side", "truncation_side", "chat_templates"]
    ids = [tokenizer.encode(text) for text in (" a", "</s> b", "a")]
    return [ids, *(getattr(tokenizer, name) for name in names)]


CONF, GEN = "tokenizer_config", "generation_config"
WITH_CONFIG = {
    "the class of a model": ("gpt2", {"config": {"model_type": "gpt2"}}),
    "a class": ("llama2", {"config": {"tokenizer_class": "LlamaTokenizer"}}),
    "ids": ("gpt2", {"config": {"bos_token_id": 7, "eos_token_id": [5, 6], "pad_token_id": 8}}),
    "an id for a generation": (
        "neox",
        {"config": {"model_type": "gpt_neox", "eos_token_id": 4}, GEN: {"pad_token_id": 5}},
    ),
    "bos of a class without it": (
        "llama3",
        {"config": {"model_type": "qwen2", "bos_token_id": 7}, CONF: {"pad_token": None}},
    ),
    "an unknown class": (
        "gpt2",
        {CONF: {"tokenizer_class": "A"}, "config": {"model_type": "gpt2", "pad_token_id": 9}},
    ),
    "a wrong class": ("gpt2", {CONF: {"tokenizer_class": "A"}, "config": {"model_type": "qwen2"}}),
    "the generic class": (
        "llama2",
        {CONF: {"tokenizer_class": "LlamaTokenizer"}, "config": {"model_type": "mistral"}},
    ),
    "pieces of a model": ("llama2", {"config": {"model_type": "gemma", "pad_token_id": 7}}),
    "words of a model": ("gpt2_files", {"config": {"model_type": "qwen2", "bos_token_id": 9}}),
}


def test_what_only_the_config_says_is_taken_along(directory, tmp_path):
    for case, (form, files) in WITH_CONFIG.items():
        source = with_files(directory, form, files, tmp_path)
        expected, copy = seen(open_tokenizer(source)), tmp_path / "other"
        for found in (tokenizer_files(source), sidecar_files_in(source)):
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir()
            for name, data in found.items():
                (copy / name).write_bytes(data)
            assert seen(open_tokenizer(copy)) == expected, case
            assert sidecar_files_in(copy) == found, case
        if form != "llama2" and case != "words of a model":
            names = ("special_tokens_map", "padding_side", "bos_token_id", "eos_token_id")
            ours, theirs = map(AutoTokenizer.from_pretrained, (copy, source))
            for name in names:
                assert getattr(ours, name) == getattr(theirs, name), (case, name)
            # beside the config.json of another model, as after an export
            (copy / "config.json").write_text('{"model_type": "llama", "eos_token_id": 3}')
            assert seen(open_tokenizer(copy))[2] == expected[2] or expected[2] is None, case


def test_files_that_say_everything_stay_as_they_are(directory, tmp_path):
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "a", "pad_token": None}
    model = {"model_type": "gpt2", "bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5}
    path = with_files(directory, "gpt2", {CONF: config, "config": model}, tmp_path)
    assert tokenizer_files(path)["tokenizer_config.json"] == json.dumps(config).encode()
    (path / "tokenizer_config.json").write_text("{")
    assert sidecar_files_in(path)["tokenizer_config.json"] == b"{"


def test_cached_tokens_depend_on_the_config(directory, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n')
    path = with_files(directory, "gpt2", {}, tmp_path)
    names, last = set(), []
    for token in (1, 2):
        (path / "config.json").write_text(json.dumps({"eos_token_id": token}))
        (tokens,) = cached_tokens(tmp_path / "a.jsonl", str(path), None)
        names |= {file.name for file in (tmp_path / "a.jsonl.tokens").glob("*.idx")}
        last.append(int(tokens[0][-1]))
    assert (len(names), last) == (2, [1, 2])
