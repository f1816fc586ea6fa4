"""What the files beside a tokenizer say: which tokens are special, and which go around a text."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from megazoo.tokenizer import open_tokenizer
from megazoo.tokenizer.ranks import special_tokens
from tests.support.tokenizer_files import LLAMA3_SPECIAL, TOKENS, write_tokenizers

BOS, EOS = (
    {"bos_token": "<|begin_of_text|>"},
    {"eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"}},
)
FIRST = TOKENS["llama3"]
PAD = {
    "added_tokens_decoder": {"1200": {"content": "<pad>", "special": True}},
    "pad_token": "<pad>",
}
OTHERS = {"1100": {"content": "<s>"}, "1101": {"content": "</s>"}}
# form, files beside it: bos, eos, pad, and the ids around a text
SETTINGS = {
    "GPT-2's files name nothing": ("gpt2", {}, (0, 0, None, [], [])),
    "nor do vocab.json and merges.txt": ("gpt2_files", {}, (0, 0, None, [], [])),
    "NeoX": ("neox", {}, (0, 0, 1, [], [])),
    "LLaMA-3": ("llama3", {}, (FIRST, FIRST + 1, None, [FIRST], [])),
    "ranks": ("llama3_ranks", {}, (FIRST, FIRST + 1, None, [FIRST], [])),
    "sentencepiece": ("llama2", {"tokenizer_config": {}}, (1, 2, None, [1], [])),
    "sentencepiece alone": ("llama2", {}, (1, 2, None, [1], [])),
    "bos in front": (
        "gpt2_files",
        {"tokenizer_config": {"add_bos_token": True}},
        (0, 0, None, [0], []),
    ),
    "eos behind": ("llama2", {"tokenizer_config": {"add_eos_token": True}}, (1, 2, None, [1], [2])),
    "no bos": ("llama2", {"tokenizer_config": {"add_bos_token": False}}, (1, 2, None, [], [])),
    "null is none": ("gpt2", {"tokenizer_config": {"bos_token": None}}, (None, 0, None, [], [])),
    "the map": ("llama3_ranks", {"special_tokens_map": EOS}, (FIRST, FIRST + 9, None, [FIRST], [])),
    "the config wins": (
        "llama3_ranks",
        {"special_tokens_map": EOS, "tokenizer_config": {"eos_token": "<|eom_id|>"}},
        (FIRST, FIRST + 8, None, [FIRST], []),
    ),
    "ranks with other tokens": (
        "llama3_ranks",
        {"tokenizer_config": {"added_tokens_decoder": OTHERS}},
        (FIRST, FIRST + 1, None, [FIRST], []),
    ),
    "a tokenizer.json has its own template": (
        "llama3",
        {"tokenizer_config": {**BOS, **EOS, "add_bos_token": False, "add_eos_token": True}},
        (FIRST, FIRST + 9, None, [FIRST], []),
    ),
    "ids as a last resort": (
        "gpt2",
        {
            "config": {"pad_token_id": 5, "eos_token_id": 7},
            "generation_config": {"pad_token_id": [6, 7]},
        },
        (0, 0, 6, [], []),
    ),
    "an id that no token has": ("gpt2", {"config": {"pad_token_id": 5000}}, (0, 0, None, [], [])),
    "a token added to sentencepiece": ("llama2", {"tokenizer_config": PAD}, (1, 2, 1200, [1], [])),
    "added_tokens.json": (
        "llama2",
        {"added_tokens": {"<pad>": 1200}, "special_tokens_map": {"pad_token": "<pad>"}},
        (1, 2, 1200, [1], []),
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def with_files(directory, form, files, tmp_path):
    """A copy of a form's directory with JSON files in it."""
    shutil.copytree(directory / form, tmp_path / "copy")
    for path in (tmp_path / "copy").glob("tokenizer_config.json"):
        path.unlink()
    for name, content in files.items():
        (tmp_path / "copy" / f"{name}.json").write_text(json.dumps(content))
    return tmp_path / "copy"


@pytest.mark.parametrize("case", SETTINGS)
def test_special_tokens_are_those_of_the_files(case, directory, tmp_path):
    form, files, expected = SETTINGS[case]
    tokenizer = open_tokenizer(with_files(directory, form, files, tmp_path))
    plain = tokenizer.encode("hi there", add_special_tokens=False)
    bos, eos, pad, before, after = expected
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        bos,
        eos,
        pad,
    )
    assert tokenizer.encode("hi there") == [*before, *plain, *after]
    assert tokenizer.eod == eos
    if case == "ranks with other tokens":
        assert tokenizer.vocab_size == FIRST + 2
    if pad == 1200:
        assert tokenizer.vocab_size == 1201
        parts = (tokenizer.encode(text, add_special_tokens=False) for text in ("hi", " there"))
        assert tokenizer.encode("hi<pad> there") == [1, *next(parts), 1200, *next(parts)]
        assert tokenizer.decode([*plain, 1200, 2], skip_special_tokens=True) == "hi there"


@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer"}),
        ("gpt2_files", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}),
        ("neox", {"tokenizer_class": "GPTNeoXTokenizer", "add_eos_token": True}),
        ("llama3", {"tokenizer_class": "PreTrainedTokenizerFast", **BOS, **EOS}),
        (
            "llama3",
            {"tokenizer_class": "PreTrainedTokenizerFast", **BOS, **EOS, "add_bos_token": False},
        ),
        ("llama2", None),
    ],
)
def test_transformers_sees_the_same(form, config, directory, tmp_path):
    if form == "llama2":
        pytest.importorskip(
            "google.protobuf", reason="transformers reads sentencepiece models by protobuf"
        )
        config = json.loads((directory / form / "tokenizer_config.json").read_text())
    path = with_files(directory, form, {"tokenizer_config": config}, tmp_path)
    ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    for text in ("hello  world\n", "née \u2603 123", ""):
        assert ours.encode(text) == theirs.encode(text)


def test_llama3s_special_tokens_have_their_published_ids():
    assert len(LLAMA3_SPECIAL) == 256
    tokens = {token.content: token.id for token in special_tokens(128000)}
    assert tokens == {content: 128000 + place for place, content in enumerate(LLAMA3_SPECIAL)}
    assert (tokens["<|start_header_id|>"], tokens["<|eot_id|>"]) == (128006, 128009)
