"""A tokenizer.json of every usual kind, trained by the `tokenizers` library on a few texts."""

import json
import random
from pathlib import Path

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

from megazoo.tokenizer.byte_bpe import LLAMA3_PATTERN
from tests.support.tokenizer_files import corpus

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BLOOM_PATTERN = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
ADDED = [
    AddedToken("<|left|>", lstrip=True, special=True),
    AddedToken("<|right|>", rstrip=True, normalized=False),
    AddedToken("the", single_word=True),
    AddedToken("The End", normalized=True, lstrip=True, rstrip=True),
    AddedToken("  ", normalized=False),
]
METASPACE = pre_tokenizers.Metaspace(prepend_scheme="first")


def byte_level(pre_tokenizer):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, vocab_size=700)
    return bpe, trainer


def gpt2():
    return byte_level(BYTE_LEVEL)


def roberta():
    bpe, trainer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    return bpe, trainer


def llama3():
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    bpe, trainer = byte_level(pre_tokenizers.Sequence([split, BYTES_ONLY]))
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return bpe, trainer


def bloom():
    split = pre_tokenizers.Split(Regex(BLOOM_PATTERN), "isolated")
    return byte_level(pre_tokenizers.Sequence([split, BYTES_ONLY]))


def falcon():
    steps = [
        pre_tokenizers.Punctuation("contiguous"),
        BYTE_LEVEL,
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    return byte_level(pre_tokenizers.Sequence(steps))


def byte_fallback():
    """A BPE of characters, with the bytes of those that it does not know."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.pre_tokenizer = METASPACE
    names = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    return bpe, trainers.BpeTrainer(special_tokens=names, vocab_size=800, limit_alphabet=80)


def llama2():
    bpe, trainer = byte_fallback()
    bpe.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return bpe, trainer


def gemma():
    bpe, trainer = byte_fallback()
    bpe.normalizer = normalizers.Replace(" ", "\u2581")
    bpe.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence(steps)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return bpe, trainer


def metaspace():
    bpe, trainer = byte_fallback()
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return bpe, trainer


def unigram():
    model = Tokenizer(models.Unigram())
    model.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\t", " ")])
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return model, trainers.UnigramTrainer(
        special_tokens=SPECIAL, unk_token="<unk>", vocab_size=400, max_piece_length=8
    )


def bert():
    pieces = Tokenizer(models.WordPiece(unk_token="<unk>"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    pieces.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return pieces, trainers.WordPieceTrainer(special_tokens=SPECIAL, vocab_size=600)


def words():
    """Without a decoder."""
    model = Tokenizer(models.WordLevel(unk_token="<unk>"))
    model.normalizer, model.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    return model, trainers.WordLevelTrainer(special_tokens=SPECIAL, vocab_size=600)


MAKERS = (gpt2, llama3, bloom, falcon, roberta, llama2, gemma, metaspace, unigram, bert, words)
KINDS = {make.__name__: make for make in MAKERS}
READ_BY_TIKTOKEN = ("gpt2", "llama3", "bloom")  # without the tokens of ADDED


def write_pipelines(root: Path) -> Path:
    """Write a directory for each of KINDS, and another, named kind_added, with the tokens of
    ADDED."""
    lines = [line for text in corpus() for line in text.splitlines() if line][:2000]
    for kind, make in KINDS.items():
        pipeline, trainer = make()
        trainer.show_progress = False
        pipeline.train_from_iterator(lines, trainer)
        if kind == "llama2":  # the texts were cut at spaces for training only
            pipeline.pre_tokenizer = None
        for name, added in ((kind, []), (f"{kind}_added", ADDED)):
            pipeline.add_tokens(added)
            data = json.loads(pipeline.to_str())
            # bytes are tokens of the model
            data["added_tokens"] = [
                token for token in data["added_tokens"] if not token["content"].startswith("<0x")
            ]
            (root / name).mkdir()
            (root / name / "tokenizer.json").write_text(json.dumps(data))
            names = {"pad_token": "<pad>", "eos_token": "</s>"}
            (root / name / "tokenizer_config.json").write_text(json.dumps(names))
    return root


def with_added_tokens(texts: list[str]) -> list[str]:
    """Return texts with the names of added and special tokens somewhere in most of them."""
    draw = random.Random(5)
    names = [*SPECIAL, *(token.content for token in ADDED), "other", "<0x41>"]
    mixed = []
    for text in texts:
        for _ in range(draw.randrange(3)):
            place = draw.randrange(len(text) + 1)
            before, after = (" " * draw.randrange(3) for _ in range(2))
            text = f"{text[:place]}{before}{draw.choice(names)}{after}{text[place:]}"
        mixed.append(text)
    return mixed
