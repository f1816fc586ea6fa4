"""Tokenizers of every kind of file, trained by `tokenizers` and sentencepiece, and oracles."""

import base64
import json
import random
import re
import subprocess
import unicodedata
from pathlib import Path

import sentencepiece
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
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megazoo.data.corpus import standard_library
from megazoo.tokenizer.byte_bpe import LLAMA3_PATTERN
from tests.support.programs import python

ROOT = Path(__file__).parents[2]
FORMS = "gpt2 gpt2_strings gpt2_files neox llama3 llama3_ranks llama2".split()
SPECIAL = "<|endoftext|> <|padding|> <|begin_of_text|> <|eot_id|> <s> </s> <unk> <pad>".split()
NATURAL = (
    "naïve déjà vu; Здравствуй, мир! Ξένη γλώσσα. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया। "
    "สวัสดีชาวโลก 你好世界。 こんにちは世界。안녕하세요 세계! "
    "🙂👩‍👩‍👧 👍🏽 e\u0301 I'll it's WE'VE 1234567 ½²"
)
# As in the published tokenizer.json of LLaMA 3.1, where they start at 128000.
LLAMA3_SPECIAL = [f"<|reserved_special_token_{i}|>" for i in range(248)]
for place, name in {
    0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id",
    7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag",
}.items():  # fmt: skip
    LLAMA3_SPECIAL.insert(place, f"<|{name}|>")
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
TOKENS = {"gpt2": 900, "neox": 1000, "llama3": 1100, "llama2": 1200}


def corpus():
    texts = [ROOT.joinpath("README.md").read_text(), NATURAL * 20]
    return [*texts, *(t.decode() for t in standard_library()[:8])]


def train(kind):
    """A tokenizer of the `tokenizers` library, as the published tokenizer.json of this kind
    describes it."""
    bpe = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"gpt2": SPECIAL[:1], "neox": SPECIAL[:2], "llama3": []}[kind]
    if kind == "neox":
        bpe.normalizer = normalizers.NFC()
    if kind == "llama3":
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS[kind],
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
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


def write_tokenizers(root):
    """Write a directory for each form in FORMS, without any other JSON file; returns their
    root."""
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
    # its class has rules of its own for spaces: without it, sentencepiece's hold
    (root / "llama2" / "tokenizer_config.json").unlink()
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


def texts_of_all_sorts():
    """5,000 texts of all sorts of pieces."""
    draw = random.Random(0)
    letters = [
        *range(0x3400), *range(0x4E00, 0x5200), *range(0xAC00, 0xB000), *range(0xF900, 0x10600),
        *range(0x1D400, 0x1D800), *range(0x1F300, 0x1FAFF), *range(0x20000, 0x20100),
    ]  # fmt: skip
    letters = [c for c in map(chr, letters) if unicodedata.category(c) not in ("Cs", "Cn")]
    letters.remove("\u2581")  # sentencepiece takes it for a space
    odd = [
        "👩‍👩‍👧‍👦", "🏳️‍🌈", "e\u0301\u0323", "\u212b", "ﬁ", "İ", "'\u017f", "'S", "'LL", "\ufeff",
        "\u200d", "\ufffd",
    ]  # fmt: skip
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


def edited(directory, form, tmp_path, **changes):
    """A directory with a form's tokenizer.json, changed; model_X is a field of the model."""
    data = json.loads((directory / form / "tokenizer.json").read_text())
    for key, value in changes.items():
        target, name = (data["model"], key[6:]) if key.startswith("model_") else (data, key)
        target[name] = value(target[name]) if callable(value) else value
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    return tmp_path


BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
SPLIT = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
PAIR = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]
TEMPLATE = {"type": "TemplateProcessing", "single": [TEXT], "pair": PAIR, "special_tokens": {}}


def split(**changes):
    steps = [SPLIT | changes, BYTE_LEVEL | {"use_regex": False}]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
