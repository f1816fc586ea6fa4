"""Tokenizers: the ids of `tokenizers` and sentencepiece for every kind of file, and what the files
say of them."""

import base64
import json
import random
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from programs import python
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megazoo.checkpoint.places import MANIFEST
from megazoo.cli.launch import run_program
from megazoo.data.corpus import standard_library
from megazoo.data.dataset import _stream
from megazoo.errors import UserError
from megazoo.tokenizer import ByteTokenizer, open_tokenizer
from megazoo.tokenizer.byte_bpe import LLAMA3_PATTERN
from megazoo.tokenizer.ranks import special_tokens

ROOT = Path(__file__).parent.parent
FORMS = "gpt2 gpt2_strings gpt2_files neox llama3 llama3_ranks llama2".split()
SPECIAL = "<|endoftext|> <|padding|> <|begin_of_text|> <|eot_id|> <s> </s> <unk> <pad>".split()
NATURAL = (
    "naïve déjà vu; Здравствуй, мир! Ξένη γλώσσα. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया। สวัสดีชาวโลก 你好世界。 "
    "こんにちは世界。안녕하세요 세계! 🙂👩‍👩‍👧 👍🏽 e\u0301 I'll it's WE'VE 1234567 ½²"
)  # fmt: skip
# As in the published tokenizer.json of LLaMA 3.1, where they start at 128000.
LLAMA3_SPECIAL = [f"<|reserved_special_token_{i}|>" for i in range(248)]
for place, name in {
    0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id",
    8: "eom_id", 9: "eot_id", 10: "python_tag",
}.items():  # fmt: skip
    LLAMA3_SPECIAL.insert(place, f"<|{name}|>")
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
TOKENS = {"gpt2": 900, "neox": 1000, "llama3": 1100, "llama2": 1200}


def corpus():
    return [
        ROOT.joinpath("README.md").read_text(),
        NATURAL * 20,
        *(t.decode() for t in standard_library()[:8]),
    ]


def train(kind):
    """A tokenizer of the `tokenizers` library, as the published tokenizer.json of this kind
    describes it."""
    bpe = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"gpt2": ["<|endoftext|>"], "neox": ["<|endoftext|>", "<|padding|>"], "llama3": []}[
        kind
    ]
    if kind == "neox":
        bpe.normalizer = normalizers.NFC()
    if kind == "llama3":
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS[kind],
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(), trainer)
    if kind == "neox":
        bpe.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    if kind == "llama3":
        bpe.add_special_tokens(LLAMA3_SPECIAL)
        template = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", TOKENS[kind])]
        )
        bpe.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), template]
        )
    return bpe


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory for each form in FORMS, without any other JSON file."""
    root = tmp_path_factory.mktemp("tokenizers")
    for kind in ("gpt2", "neox", "llama3"):
        (root / kind).mkdir()
        train(kind).save(str(root / kind / "tokenizer.json"))
    for form in ("gpt2_strings", "gpt2_files", "llama3_ranks", "llama2"):
        (root / form).mkdir()
    data = json.loads((root / "llama3" / "tokenizer.json").read_text())
    model, vocab = data["model"], data["model"]["vocab"]
    # as published: all the ways to make a token
    made = ["".join(merge) for merge in model["merges"]]
    ways = [[token[:i], token[i:]] for token in made for i in range(1, len(token))]
    model["merges"] = [[left, right] for left, right in ways if left in vocab and right in vocab]
    assert len(model["merges"]) > 1.1 * len(made)
    (root / "llama3" / "tokenizer.json").write_text(json.dumps(data))
    spelled = {rank: bytes(BYTE_OF[c] for c in token) for token, rank in vocab.items()}
    lines = [f"{base64.b64encode(spelled[rank]).decode()} {rank}\n" for rank in sorted(spelled)]
    (root / "llama3_ranks" / "tokenizer.model").write_text("".join(lines))
    data = json.loads((root / "gpt2" / "tokenizer.json").read_text())
    model = data["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    data["model"] = model | {"merges": merges}
    (root / "gpt2_strings" / "tokenizer.json").write_text(json.dumps(data))
    (root / "gpt2_files" / "vocab.json").write_text(json.dumps(model["vocab"]))
    (root / "gpt2_files" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    text = root / "text"
    text.write_text("\n".join(corpus()))
    done = run_tool("--input", text, "--output", root / "llama2", "--vocab-size", TOKENS["llama2"])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return root


def run_tool(*arguments):
    command = [python(), "tools/train_tokenizer.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


class SentencePieceOracle:
    """sentencepiece itself, for the text between special tokens."""

    def __init__(self, path):
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def __call__(self, text, parse_special):
        ids = {"<unk>": [0], "<s>": [1], "</s>": [2]} if parse_special else {}
        parts = re.split("(<unk>|<s>|</s>)", text) if parse_special else [text]
        return [1, *(token for part in parts for token in ids.get(part) or self.model.encode(part))]


def oracle_of(directory, form):
    """A function (text, parse_special) to ids."""
    if form == "llama2":
        return SentencePieceOracle(directory / form / "tokenizer.model")
    bpe = Tokenizer.from_file(str(directory / form.split("_")[0] / "tokenizer.json"))

    def encode(text, parse_special):
        bpe.encode_special_tokens = not parse_special
        return bpe.encode(text).ids

    return encode


@pytest.fixture(scope="module")
def texts():
    """5,000 texts of all sorts of pieces."""
    draw = random.Random(0)
    letters = [
        *range(0x3400),
        *range(0x4E00, 0x5200),
        *range(0xAC00, 0xB000),
        *range(0xF900, 0x10600),
    ]
    letters += [*range(0x1D400, 0x1D800), *range(0x1F300, 0x1FAFF), *range(0x20000, 0x20100)]
    letters = [c for c in map(chr, letters) if unicodedata.category(c) not in ("Cs", "Cn")]
    letters.remove("\u2581")  # sentencepiece takes it for a space
    odd = [
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "e\u0301\u0323",
        "\u212b",
        "ﬁ",
        "İ",
        "'\u017f",
        "'S",
        "'LL",
        "\ufeff",
        "\u200d",
        "\ufffd",
    ]
    sources = corpus()

    def piece():
        kind = draw.randrange(8)
        if kind == 0:
            return "".join(draw.choices(letters, k=draw.randrange(1, 9)))
        if kind == 1:  # a block of the letters: one script, mostly
            start = draw.randrange(len(letters) - 40)
            return "".join(draw.choices(letters[start : start + 40], k=draw.randrange(1, 9)))
        if kind == 2:
            return draw.choice(" \t\n\r\xa0\u3000\x1c\x85\u2028") * draw.randrange(1, 40)
        if kind == 3:
            return "".join(draw.choices("  \t\r\n", k=draw.randrange(1, 9)))
        if kind == 4:
            return " " * draw.randrange(2) + draw.choice(SPECIAL) + " " * draw.randrange(2)
        if kind == 5:
            return str(draw.randrange(10 ** draw.randrange(1, 15)))
        if kind == 6:
            return draw.choice(odd)
        source = draw.choice(sources)
        start = draw.randrange(len(source) - 40)
        return source[start : start + draw.randrange(1, 40)]

    return ["", *("".join(piece() for _ in range(draw.randrange(1, 9))) for _ in range(4999))]


def nfc(text):
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_the_oracles_and_texts_come_back(form, directory, texts):
    tokenizer, oracle = open_tokenizer(directory / form), oracle_of(directory, form)
    # `tokenizers` knows Unicode's marks as of 2018: those that are newer, it orders otherwise
    if form == "neox":
        known = [text for text in texts if normalizers.NFC().normalize_str(text) == nfc(text)]
        assert len(known) > 0.98 * len(texts)
        texts = known
    for parse in (True, False):
        for text in texts:
            ids = tokenizer.encode(text, parse_special=parse)
            assert ids == oracle(text, parse), text
            plain = tokenizer.encode_to_numpy(text, parse_special=parse)
            assert plain.dtype == np.uint32
            assert plain.tolist() == ids[len(tokenizer.before) :]
            assert tokenizer.decode(plain) == (nfc(text) if form == "neox" else text)
            assert max(ids, default=0) < tokenizer.vocab_size


@pytest.mark.parametrize("form", ["gpt2", "neox", "llama3"])
def test_decoding_is_the_oracles_for_broken_text_too(form, directory):
    tokenizer = open_tokenizer(directory / form)
    oracle = Tokenizer.from_file(str(directory / form / "tokenizer.json"))
    draw = random.Random(1)
    for _ in range(300):
        ids = draw.choices(range(tokenizer.vocab_size + 50), k=20)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize("form", [*FORMS, "byte"])
def test_a_stream_gives_whole_characters_and_all_of_them(form, directory, texts):
    tokenizer = open_tokenizer("byte" if form == "byte" else directory / form)
    for text in (text for text in texts[:1000] if "\ufffd" not in text):
        ids = tokenizer.encode(text)
        for skip in (True, False):
            stream = tokenizer.stream(skip_special_tokens=skip)
            pieces = [*map(stream.put, ids), stream.end()]
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
            assert "\ufffd" not in "".join(pieces)
    draw = random.Random(2)
    for _ in range(300):  # broken text
        ids, stream = draw.choices(range(tokenizer.vocab_size), k=20), tokenizer.stream()
        assert "".join([*map(stream.put, ids), stream.end()]) == tokenizer.decode(torch.tensor(ids))
    stream = tokenizer.stream()
    assert [stream.put(token) for token in tokenizer.encode_to_numpy("\U0001f9ff")][-2:] == [
        "",
        "\U0001f9ff",
    ]


def test_batches_are_padded_and_cut_on_either_side(directory):
    tokenizer = open_tokenizer(directory / "llama3")
    bos, end = TOKENS["llama3"], TOKENS["llama3"] + 1  # there is no padding token: eos does
    a, b = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("hi", "hello world, and more")
    )
    assert len(b) > 5 > len(a)
    ids, mask = tokenizer.encode_batch(["hi", "hello world, and more"])
    gap = len(b) - len(a)
    assert ids.tolist() == [[bos, *a, *[end] * gap], [bos, *b]]
    assert mask.tolist() == [[1] * (1 + len(a)) + [0] * gap, [1] * (1 + len(b))]
    assert ids.dtype == mask.dtype == torch.int64
    batch = tokenizer.encode_batch(
        ["hi", "hello world, and more"], padding_side="left", max_length=5
    )
    assert batch.input_ids.tolist() == [[*[end] * (4 - len(a)), bos, *a], [bos, *b[:4]]]
    assert batch.attention_mask.tolist() == [[0] * (4 - len(a)) + [1] * (1 + len(a)), [1] * 5]
    cut = tokenizer.encode_batch(["hello world, and more"], max_length=4, truncation_side="left")
    assert cut.input_ids.tolist() == [[bos, *b[-3:]]]
    assert tokenizer.encode_batch(
        ["hello"], max_length=1, truncation_side="left"
    ).input_ids.tolist() == [[bos]]
    assert tokenizer.encode_batch(["hi"], add_special_tokens=False).input_ids.tolist() == [a]
    assert tokenizer.encode_batch([]).input_ids.shape == (0, 0)
    assert ByteTokenizer().encode_batch(["a", "bc"]).input_ids.tolist() == [[97, 256], [98, 99]]
    with pytest.raises(UserError, match="max_length 0 has no room for the 1 special"):
        tokenizer.encode_batch(["hi"], max_length=0)
    with pytest.raises(UserError, match="padding_side 'up' is neither left nor right"):
        tokenizer.encode_batch(["hi"], padding_side="up")


BOS, EOS = (
    {"bos_token": "<|begin_of_text|>"},
    {"eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"}},
)
FIRST = TOKENS["llama3"]
PAD = {
    "added_tokens_decoder": {"1200": {"content": "<pad>", "special": True}},
    "pad_token": "<pad>",
}
# form, files beside it: bos, eos, pad, and the ids around a text
SETTINGS = {
    "GPT-2's files name nothing": ("gpt2", {}, (0, 0, None, [], [])),
    "nor do vocab.json and merges.txt": ("gpt2_files", {}, (0, 0, None, [], [])),
    "NeoX": ("neox", {}, (0, 0, 1, [], [])),
    "LLaMA-3": ("llama3", {}, (FIRST, FIRST + 1, None, [FIRST], [])),
    "ranks": ("llama3_ranks", {}, (FIRST, FIRST + 1, None, [FIRST], [])),
    "sentencepiece": ("llama2", {"tokenizer_config": {}}, (1, 2, None, [1], [])),
    "sentencepiece alone": ("llama2", {}, (1, 2, None, [1], [])),
    "bos in front": ("gpt2_files", {"tokenizer_config": {"add_bos_token": True}}, (0, 0, None, [0], [])),
    "eos behind": ("llama2", {"tokenizer_config": {"add_eos_token": True}}, (1, 2, None, [1], [2])),
    "no bos": ("llama2", {"tokenizer_config": {"add_bos_token": False}}, (1, 2, None, [], [])),
    "null is none": ("gpt2", {"tokenizer_config": {"bos_token": None}}, (None, 0, None, [], [])),
    "the map": ("llama3_ranks", {"special_tokens_map": EOS}, (FIRST, FIRST + 9, None, [FIRST], [])),
    "the config wins": (
        "llama3_ranks", {"special_tokens_map": EOS, "tokenizer_config": {"eos_token": "<|eom_id|>"}},
        (FIRST, FIRST + 8, None, [FIRST], []),
    ),
    "ranks with other tokens": (
        "llama3_ranks",
        {"tokenizer_config": {"added_tokens_decoder": {"1100": {"content": "<s>"}, "1101": {"content": "</s>"}}}},
        (FIRST, FIRST + 1, None, [FIRST], []),
    ),
    "a tokenizer.json has its own template": (
        "llama3", {"tokenizer_config": {**BOS, **EOS, "add_bos_token": False, "add_eos_token": True}},
        (FIRST, FIRST + 9, None, [FIRST], []),
    ),
    "ids as a last resort": (
        "gpt2", {"config": {"pad_token_id": 5, "eos_token_id": 7}, "generation_config": {"pad_token_id": [6, 7]}},
        (0, 0, 6, [], []),
    ),
    "an id that no token has": ("gpt2", {"config": {"pad_token_id": 5000}}, (0, 0, None, [], [])),
    "a token added to sentencepiece": ("llama2", {"tokenizer_config": PAD}, (1, 2, 1200, [1], [])),
    "added_tokens.json": (
        "llama2", {"added_tokens": {"<pad>": 1200}, "special_tokens_map": {"pad_token": "<pad>"}},
        (1, 2, 1200, [1], []),
    ),
}  # fmt: skip


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


def test_files_and_checkpoints_open_as_directories_do(directory, tmp_path):
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
    assert open_tokenizer(tmp_path).encode(text) == open_tokenizer(directory / "llama3").encode(
        text
    )


def edited(directory, form, tmp_path, **changes):
    """A directory with a form's tokenizer.json, changed; model_X is a field of the model."""
    data = json.loads((directory / form / "tokenizer.json").read_text())
    for key, value in changes.items():
        target, name = (data["model"], key[6:]) if key.startswith("model_") else (data, key)
        target[name] = value(target[name]) if callable(value) else value
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    return tmp_path


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
SPLIT = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}


def split(**changes):
    steps = [SPLIT | changes, BYTE_LEVEL | {"use_regex": False}]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


REFUSED = {
    "model.type 'WordPiece'": {"model_type": "WordPiece"},
    "model.dropout 0.1": {"model_dropout": 0.1},
    "model.byte_fallback True": {"model_byte_fallback": True},
    "model.continuing_subword_prefix '##'": {"model_continuing_subword_prefix": "##"},
    "model.end_of_word_suffix '</w>'": {"model_end_of_word_suffix": "</w>"},
    "model.ignore_merges true with the token 'zzzz'": {
        "model_ignore_merges": True,
        "model_vocab": lambda vocab: vocab | {"zzzz": 5000},
    },
    "normalizer 'Lowercase'": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}
    },
    "pre_tokenizer None": {"pre_tokenizer": None},
    "pre_tokenizer Metaspace": {"pre_tokenizer": {"type": "Metaspace"}},
    "pre_tokenizer.add_prefix_space True": {
        "pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}
    },
    "pre_tokenizer.use_regex False": {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}},
    "pre_tokenizer.behavior 'Removed'": split(behavior="Removed"),
    "pre_tokenizer.invert True": split(invert=True),
    "pre_tokenizer.pattern ['String']": split(pattern={"String": " "}),
    "it has a $": split(pattern={"Regex": "a$"}),
    "the pattern '(a' is not one that tiktoken can use": split(pattern={"Regex": "(a"}),
    "post_processor 'RobertaProcessing'": {"post_processor": {"type": "RobertaProcessing"}},
    "several TemplateProcessing": {
        "post_processor": {"type": "Sequence", "processors": [TEMPLATE, TEMPLATE]}
    },
    "added token 'x': single_word": {
        "added_tokens": [{"id": 1, "content": "x", "single_word": True}]
    },
    "token 'x' has the id -1": {"added_tokens": [{"id": -1, "content": "x"}]},
    "merge 'q' 'zq': 'zq' is not in the vocabulary": {"model_merges": [["q", "zq"]]},
    "merge 'a' 'q': 'aq' is not in the vocabulary": {"model_merges": ["a q"]},
    "malformed: ValueError not enough values": {"model_merges": [["q"]]},
    "malformed: KeyError 'merges'": {"model": {"type": "BPE", "vocab": {}}},
    "malformed: AttributeError": {"model_vocab": ["a"]},
    "token 'a' has the id 'b'": {"model_vocab": {"a": "b"}},
    "two tokens of the vocabulary have the same id": {
        "model_vocab": {"a": 1, "b": 1},
        "model_merges": [],
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_tokenizer_json_of_another_kind_is_refused_by_name(message, directory, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        open_tokenizer(edited(directory, "gpt2", tmp_path, **REFUSED[message]))
    assert str(error.value).startswith(f"{tmp_path}/tokenizer.json")
    assert "\n" not in str(error.value)


def test_llama2s_tokenizer_json_gives_way_to_its_model(directory, tmp_path):
    edited(directory, "gpt2", tmp_path, model_byte_fallback=True)
    shutil.copy(directory / "llama2" / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    assert open_tokenizer(tmp_path).encode("hi") == open_tokenizer(directory / "llama2").encode(
        "hi"
    )
    shutil.copy(directory / "gpt2" / "tokenizer.json", tmp_path)
    with pytest.raises(
        UserError, match=r"tokenizer_config\.json: add_prefix_space True is not supported"
    ):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_tokenizer(tmp_path).encode("hi") == open_tokenizer(directory / "gpt2").encode("hi")


# files of a directory: the error, after its path
MALFORMED = {
    "nothing": ({}, " has no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json"),
    "no model": (
        {"tokenizer.json": '{"version": "1.0"}'},
        "/tokenizer.json is malformed: KeyError 'model'",
    ),
    "no JSON": ({"tokenizer.json": "{"}, "/tokenizer.json can't be read: Expecting"),
    "a list": (
        {"tokenizer.json": " [1]"},
        "/tokenizer.json is neither a sentencepiece model nor lines of base64",
    ),
    "no merges": ({"vocab.json": '{"a": 0}'}, "/merges.txt: No such file or directory"),
    "merges of three": (
        {"vocab.json": '{"a": 0}', "merges.txt": "#version: 1\na a a"},
        "/vocab.json is malformed",
    ),
    "binary merges": (
        {"vocab.json": '{"a": 0}', "merges.txt": b"\xff"},
        "/merges.txt is malformed: Unicode",
    ),
    "an empty model": (
        {"tokenizer.model": ""},
        "/tokenizer.model is neither a sentencepiece model",
    ),
    "a broken model": (
        {"tokenizer.model": b"\n\x0e\n\x05<unk>"},
        "/tokenizer.model is neither a sentencepiece model",
    ),
    "a rank left out": (
        {"tokenizer.model": "YQ== 0\nYg== 2\n"},
        "/tokenizer.model is malformed: its ranks are not",
    ),
    "a token twice": (
        {"tokenizer.model": "YQ== 0\nYQ== 1\n"},
        "/tokenizer.model is malformed: its ranks are not",
    ),
    "a line cut short": (
        {"tokenizer.model": "YQ== 0\nYg==\n"},
        "/tokenizer.model is malformed: ValueError",
    ),
    "no token": (
        {"tokenizer.model": "YQ== 0\n", "tokenizer_config.json": '{"eos_token": "<end>"}'},
        ": eos_token '<end>' is not in the vocabulary",
    ),
    "a number": (
        {"tokenizer.model": "YQ== 0\n", "special_tokens_map.json": '{"eos_token": 5}'},
        "/special_tokens_map.json: eos_token 5 is not a token",
    ),
    "another class": (
        {"vocab.json": '{"a": 0}', "tokenizer_config.json": '{"tokenizer_class": "CLIPTokenizer"}'},
        "/tokenizer_config.json: tokenizer_class 'CLIPTokenizer' is not supported",
    ),
    "a prefix": (
        {"vocab.json": '{"a": 0}', "tokenizer_config.json": '{"add_prefix_space": true}'},
        "/tokenizer_config.json: add_prefix_space True is not supported",
    ),
    "added to nothing": (
        {
            "tokenizer.model": "YQ== 0\n",
            "tokenizer_config.json": '{"added_tokens_decoder": {"x": {"content": "a"}}}',
        },
        "/tokenizer_config.json is malformed: ValueError",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_missing_and_malformed_files_are_named(case, tmp_path):
    files, message = MALFORMED[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        open_tokenizer(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}{message}")
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


def test_what_a_pattern_leaves_out_and_spaces_around_added_tokens_are_as_in_tokenizers(
    directory, tmp_path, texts
):
    edited(directory, "gpt2", tmp_path, **split(pattern={"Regex": r"\p{L}+|<(?=[|s])|\s(?!\s)"}))
    bpe = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    flags = [dict(lstrip=True), dict(rstrip=True), dict(lstrip=True, rstrip=True), {}]
    bpe.add_tokens(
        [AddedToken(name, **flag) for name, flag in zip(SPECIAL[1:5], flags, strict=True)]
    )
    bpe.add_tokens(["<|pad", "<|padding", "  "])
    bpe.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    for text in texts:
        assert tokenizer.encode(text) == bpe.encode(text).ids, text


@pytest.mark.parametrize("form", ["gpt2", "neox", "llama3", "llama2"])
def test_a_megabyte_without_a_break_is_a_text_like_any_other(form, directory):
    tokenizer = open_tokenizer(directory / form)
    million = 1_000_000
    for text in (
        "a" * million,
        " " * million + "x",
        "\t " * (million // 2),
        "\u00e9" * million,
        "\0" * million,
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for length in (255, 256, 257, 511, 512, 513, 1000):  # white space goes by blocks of 256
        for text in (
            " " * length + "x",
            "x" + " \t" * length + "x",
            " " * length,
            "\n" + "\u3000" * length + "1",
        ):
            assert tokenizer.encode(text) == oracle_of(directory, form)(text, True)


def test_what_is_no_unicode_is_refused(directory):
    for tokenizer in map(open_tokenizer, [directory / "gpt2", directory / "llama2", "byte"]):
        with pytest.raises(UserError, match=r"lone surrogate U\+D83D at character 3"):
            tokenizer.encode("abc\ud83d")
        assert tokenizer.encode(b"na\xc3\xafve") == tokenizer.encode("na\u00efve")
    assert ByteTokenizer().encode(b"\xff") == [255]
    with pytest.raises(UserError, match="the text is not UTF-8: byte 0xff at 1"):
        open_tokenizer(directory / "gpt2").encode_to_numpy(b"a\xff")


def test_a_tokenizer_without_special_tokens_ends_no_document(directory, tmp_path):
    tokenizer = open_tokenizer(
        edited(directory, "llama3", tmp_path, added_tokens=[], post_processor=None)
    )
    with pytest.raises(UserError, match="no token that could end a document"):
        _ = tokenizer.eod


def test_documents_become_a_stream_of_the_smallest_dtype(directory):
    for where, dtype in ((directory / "gpt2", np.uint16), ("byte", np.uint16)):
        tokenizer = open_tokenizer(where)
        stream = _stream([b"one <|endoftext|> two", b"", b"three"], tokenizer)
        assert stream.dtype == dtype
        one, three = (
            tokenizer.encode(text, parse_special=False)
            for text in ("one <|endoftext|> two", "three")
        )
        assert stream.tolist() == [*one, tokenizer.eod, tokenizer.eod, *three, tokenizer.eod]
        assert tokenizer.eod not in one
    tokenizer.vocab_size = 1 << 17
    assert _stream([b"a"], tokenizer).dtype == np.uint32


def test_the_training_tool_tells_mistakes_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import train_tokenizer

    (tmp_path / "short").write_text("hello")
    output = ["--output", tmp_path / "out"]
    for arguments, code, message in [
        ([], 2, "name the --output directory (--help says how)"),
        (
            [*output, "--input", tmp_path / "none"],
            2,
            f"--input {tmp_path}/none: No such file or directory",
        ),
        (
            [*output, "--input", ROOT / "docs" / "loss.png"],
            2,
            f"--input {ROOT}/docs/loss.png is not UTF-8",
        ),
        (
            [*output, "--vocab-size", 259],
            2,
            "vocab-size 259 must be more than 259: the bytes and special tokens",
        ),
        (
            [*output, "--input", tmp_path / "short"],
            1,
            "can't train a tokenizer on this input: Vocabulary size",
        ),
        (
            [
                "--output",
                tmp_path / "short" / "x",
                "--input",
                ROOT / "README.md",
                "--vocab-size",
                500,
            ],
            1,
            "can't write",
        ),
    ]:
        monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            run_program(train_tokenizer.main)
        error = capsys.readouterr().err
        assert stop.value.code == code
        assert error.startswith(f"train_tokenizer.py: error: {message}")
        assert error.count("\n") == 1
    assert "--vocab-size" in run_tool("--help").stdout
