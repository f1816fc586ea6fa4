"""Every tokenizer.json gives transformers' ids and texts, whatever its pipeline is."""

import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from megazoo.errors import UserError
from megazoo.tokenizer import ByteTokenizer, open_tokenizer
from megazoo.tokenizer.pipeline import PipelineTokenizer
from tests.support.pipelines import KINDS, READ_BY_TIKTOKEN, with_added_tokens, write_pipelines
from tests.support.sampling import marked_slow
from tests.support.tokenizer_files import texts_of_all_sorts

NAMES = [f"{kind}{added}" for kind in KINDS for added in ("", "_added")]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    return write_pipelines(tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="module")
def texts():
    return with_added_tokens(texts_of_all_sorts())


def opened(pipelines, name):
    """Our tokenizer, and transformers'."""
    file = str(pipelines / name / "tokenizer.json")
    names = {"pad_token": "<pad>", "eos_token": "</s>"}
    ours = open_tokenizer(pipelines / name)
    assert isinstance(ours, PipelineTokenizer) == (name not in READ_BY_TIKTOKEN)
    return ours, PreTrainedTokenizerFast(tokenizer_file=file, **names)


# 22 tokenizers, 5,000 texts, and two encodings of each
@pytest.mark.parametrize(
    ("name", "count"),
    marked_slow([(n, c) for c in (50, 5000) for n in NAMES], lambda _, case: case[1] > 50),
)
def test_ids_and_texts_are_those_of_transformers(name, count, pipelines, texts):
    ours, theirs = opened(pipelines, name)
    for text in random.Random(3).sample(texts, count):
        for parse in (True, False):
            expected = theirs.encode(text, split_special_tokens=not parse)
            assert ours.encode(text, parse_special=parse) == expected, text
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_to_numpy(text).tolist() == ids, text
        check_decoding(ours, theirs, theirs.encode(text))
    draw = random.Random(1)
    for _ in range(count):  # broken text, and ids that no token has
        check_decoding(ours, theirs, draw.choices(range(ours.vocab_size + 9), k=20))
        # many bytes and special tokens
        check_decoding(ours, theirs, draw.choices(range(280), k=20))


def check_decoding(ours, theirs, ids):
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == expected, ids
        stream = ours.stream(skip_special_tokens=skip)
        assert "".join([*map(stream.put, ids), stream.end()]) == expected, ids


@pytest.mark.parametrize("name", ["llama2", "bert", "llama3"])
def test_a_stream_tells_each_word_when_it_is_there(name, pipelines):
    tokenizer = open_tokenizer(pipelines / name)
    stream = tokenizer.stream(skip_special_tokens=True)
    ids = tokenizer.encode("the return of the import")
    told = ""
    for place, token in enumerate(ids, 1):
        told += stream.put(token)
        assert told == tokenizer.decode(ids[:place], skip_special_tokens=True)
    assert len(ids) > 5


def test_a_call_gives_what_transformers_gives(pipelines):
    texts = ["hello", "the return of the import", "a\tb"]
    for name in ("bert", "llama2", "gpt2", "unigram_added"):
        ours, theirs = opened(pipelines, name)
        for settings in (
            dict(),
            dict(add_special_tokens=False),
            dict(padding=True),
            dict(padding="longest", padding_side="left", return_tensors="pt"),
            dict(truncation=True, max_length=4),
            dict(truncation=True, max_length=4, padding=True, return_tensors="pt"),
        ):
            for text in (texts, "hello there"):
                expected = theirs(text, return_token_type_ids=False, **settings)
                batch = ours(text, **settings)
                assert {**batch}.keys() == {"input_ids", "attention_mask"}
                for key, values in batch.items():
                    assert type(values) is type(expected[key])
                    same = values == expected[key]
                    assert same.all() if torch.is_tensor(same) else same, (name, settings, text)
    batch = ours("hello", return_tensors="pt").to("cpu")
    assert batch.input_ids is batch["input_ids"]
    with pytest.raises(AttributeError, match="labels"):
        _ = batch.labels


def test_a_call_refuses_what_it_does_not_do():
    for message, settings in {
        "padding 'max_length' is not supported: use one of False, True, 'longest'": dict(
            padding="max_length"
        ),
        "return_tensors 'np' is not supported: use one of None, 'pt'": dict(return_tensors="np"),
        "truncation=True and max_length need each other": dict(max_length=3),
        "texts of 1 to 2 tokens can't form one tensor: pass padding=True": dict(
            return_tensors="pt"
        ),
        "padding_side 'up' is neither": dict(padding_side="up"),
    }.items():
        with pytest.raises(UserError, match=message):
            ByteTokenizer()(["a", "bc"], **settings)
    with pytest.raises(UserError, match="text 5 is neither a string nor a list of strings"):
        ByteTokenizer()(5)


def test_the_files_beside_it_add_tokens(pipelines, tmp_path):
    shutil.copy(pipelines / "llama2" / "tokenizer.json", tmp_path)
    end = open_tokenizer(tmp_path).vocab_size
    added = {"content": "<|end|>", "special": True, "rstrip": True, "single_word": True}
    settings = {"added_tokens_decoder": {str(end): added}, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = open_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (ours.eos_token_id, ours.vocab_size) == (end, end + 1)
    for text in ("a <|end|>  b", "x<|end|>x"):
        assert ours.encode(text) == theirs.encode(text)
    settings["added_tokens_decoder"] = {str(end + 5): added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"has the id {end + 5} .* gives it {end}"):
        open_tokenizer(tmp_path)


SCRIPT = """
import multiprocessing, sys
from megazoo.tokenizer import open_tokenizer
open_tokenizer("byte").encode("a")
assert "tokenizers" not in sys.modules
tokenizer = open_tokenizer(sys.argv[1])
assert ("tokenizers" in sys.modules) == (sys.argv[2] == "True")
tokenizer(["a b", "c"], padding=True)
def encode(text):
    return tokenizer.encode(text)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(encode, ["hi", "there"]) == [encode("hi"), encode("there")]
"""


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_forked_process_encodes_without_a_warning(name, pipelines):
    command = [sys.executable, "-c", SCRIPT, str(pipelines / name), str(name != "gpt2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
