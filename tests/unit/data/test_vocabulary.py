"""A tokenizer with a token more than the model has rows: only data with this token is refused."""

import re
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken

from megazoo import pretrain
from megazoo.data import check_data, open_datasets, streaming
from megazoo.data.labels import Labels
from megazoo.errors import UserError
from megazoo.tokenizer import open_tokenizer
from tests.support.data import write_lines
from tests.support.harness_files import tokenizer_of
from tests.support.transformers_models import deep_llama

TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TEXT = {"prompt": "a", "completion": "b"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A LLaMA whose tokenizer has one more token, <picture>; as in Gemma 3."""
    path = tmp_path_factory.mktemp("llama")
    tokenizer = tokenizer_of("llama")
    deep_llama(vocab_size=len(tokenizer), kv_heads=2, max_positions=64).save_pretrained(path)
    tokenizer.add_tokens([AddedToken("<picture>", special=False)])
    tokenizer.save_pretrained(path)
    return SimpleNamespace(path=path, rows=len(tokenizer) - 1)


def opened(name, llama, rows, **settings):
    """The training samples of a source, and those of its validation part."""
    sources = check_data([str(name)], "50,50")
    tokenizer = open_tokenizer(llama.path)
    assert tokenizer.vocab_size == llama.rows + 1
    parts = open_datasets(sources, tokenizer, seq_length=8, vocab_size=rows, seed=0, **settings)
    return parts.training.datasets[0], parts.validation.datasets[0]


def test_a_token_without_a_row_is_refused_where_it_occurs(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_TOKENS", 64)
    rows, picture = llama.rows, "see <picture>"
    labels = {"labels": Labels(2, "single_label_classification")}
    talk = {"messages": [{"role": "user", "content": picture}, TALK["messages"][1]]}
    template = {"chat_template": "{content}"}
    # By file: its lines, settings, and the place in the error.
    cases = {
        "talks.jsonl": ([TALK, TALK, TALK, talk], template, "in conversation 4"),
        "packed.jsonl": ([TALK, TALK, talk, talk], {**template, "packing": True}, "conversation 3"),
        "prompts.jsonl": ([TEXT, TEXT, TEXT, {**TEXT, "prompt": picture}], {}, "conversation 4"),
        "labels.jsonl": (
            [{"text": "a", "label": 0}] * 3 + [{"text": picture, "label": 1}], labels, "in row 4",
        ),
        "texts.jsonl": ([{"text": "a " * 20}, {"text": picture * 9}], {}, "at position 25"),
        "stream:s.jsonl": ([{"text": "a " * 20}, {"text": picture * 9}], {}, "in document 2"),
    }  # fmt: skip
    for name, (lines, settings, place) in cases.items():
        file = write_lines(tmp_path / name.removeprefix("stream:"), *lines)
        source = f"stream:{file}" if "stream:" in name else file
        training, validation = opened(source, llama, rows, **settings)
        assert len(training[0].input_ids)
        told = rf"{file.name}\S*: token {rows} .*{place}.* is outside the vocabulary of {rows}, "
        told += re.escape("the number of rows of the model; its text is '<picture>'")
        with pytest.raises(UserError, match=told) as caught:
            list(map(validation.__getitem__, range(4)))
        assert "\n" not in str(caught.value)
        _, validation = opened(source, llama, rows + 1, **settings)
        assert rows in validation[0].input_ids or rows in validation[1].input_ids


def test_a_loaded_model_trains_with_it(tmp_path, llama):
    data = write_lines(tmp_path / "a.jsonl", *[TALK, TEXT] * 4)
    words = "--device cpu --steps 2 --global-batch-size 2 --seq-length 32 --eval-steps 0".split()
    words += ["--split", "1,0"]
    words += ["--tokenizer", str(llama.path), "--data", str(data)]
    pretrain.main([*words, "--load", str(llama.path), "--save", str(tmp_path / "run")])
    pretrain.main(["--device", "cpu", "--steps", "3", "--load", str(tmp_path / "run")])
    told = f"--vocab-size {llama.rows} is smaller than the vocabulary of the tokenizer"
    with pytest.raises(UserError, match=told):
        pretrain.main([*words, "--vocab-size", str(llama.rows)])
