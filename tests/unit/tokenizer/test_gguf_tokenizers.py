"""Tokenizers in GGUF files: the ids are those of the files that they came from, and those of
transformers."""

import json
import random
import unicodedata

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megazoo.gguf_file import read_gguf
from megazoo.models.gguf.export import write_gguf
from megazoo.models.hugging_face.export import write_hugging_face
from megazoo.models.pretrained import open_source
from megazoo.tokenizer import open_tokenizer
from tests.support.tokenizer_files import NATURAL
from tests.support.transformers_models import config_of


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
