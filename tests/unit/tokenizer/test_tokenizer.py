"""Tokenizers: ids are those of `tokenizers` and sentencepiece for every kind of file, and texts
come back."""

import random

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, normalizers

from megazoo.data.corpus import _stream
from megazoo.errors import UserError
from megazoo.tokenizer import ByteTokenizer, open_tokenizer
from tests.support.sampling import marked_slow
from tests.support.tokenizer_files import (
    FORMS,
    SPECIAL,
    TOKENS,
    edited,
    nfc,
    oracle_of,
    split,
    texts_of_all_sorts,
)


@pytest.fixture(scope="module")
def texts():
    return texts_of_all_sorts()


@pytest.mark.parametrize(
    ("form", "count"),
    marked_slow([(form, n) for n in (800, 5000) for form in FORMS], lambda _, case: case[1] > 800),
)
def test_ids_are_the_oracles_and_texts_come_back(form, count, directory, texts):
    texts = texts[:count]
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


def test_decoding_is_the_oracles_for_broken_text_too(directory):
    for form in ("gpt2", "neox", "llama3"):
        tokenizer = open_tokenizer(directory / form)
        oracle = Tokenizer.from_file(str(directory / form / "tokenizer.json"))
        draw = random.Random(1)
        for _ in range(300):
            ids = draw.choices(range(tokenizer.vocab_size + 50), k=20)
            for skip in (True, False):
                expected = oracle.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected, form


# of the forms, those that decode in another way: by bytes, by pieces of sentencepiece, at all
@pytest.mark.parametrize(
    "form", marked_slow([*FORMS, "byte"], lambda _, form: form not in ("neox", "llama2", "byte"))
)
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
    tokenizer = open_tokenizer(directory / "llama3_ranks")
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


@pytest.mark.parametrize("count", [2000, pytest.param(5000, marks=pytest.mark.slow)])
def test_what_a_pattern_leaves_out_and_spaces_around_added_tokens_are_as_in_tokenizers(
    directory, tmp_path, texts, count
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
    assert len(texts) >= count
    for text in texts[:count]:
        assert tokenizer.encode(text) == bpe.encode(text).ids, text


UNBROKEN = ["gpt2", "neox", "llama3", "llama2"]


@pytest.mark.parametrize(
    ("form", "length"),
    marked_slow(
        [(form, length) for length in (100_000, 1_000_000) for form in UNBROKEN],
        lambda _, case: case[1] > 100_000,
    ),
)
def test_a_megabyte_without_a_break_is_a_text_like_any_other(form, length, directory):
    tokenizer, oracle = open_tokenizer(directory / form), oracle_of(directory, form)
    repeated = [piece * length for piece in ("a", "\u00e9", "\0")]
    for text in (*repeated, " " * length + "x", "\t " * (length // 2)):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for blank in (255, 256, 257, 511, 512, 513, 1000):  # white space goes by blocks of 256
        spaces, tabs, wide = " " * blank, " \t" * blank, "\u3000" * blank
        for text in (f"{spaces}x", f"x{tabs}x", spaces, f"\n{wide}1"):
            assert tokenizer.encode(text) == oracle(text, True)


def test_what_is_no_unicode_is_refused(directory):
    for tokenizer in map(open_tokenizer, [directory / "gpt2", directory / "llama2", "byte"]):
        with pytest.raises(UserError, match=r"lone surrogate U\+D83D at character 3"):
            tokenizer.encode("abc\ud83d")
        assert tokenizer.encode(b"na\xc3\xafve") == tokenizer.encode("na\u00efve")
    assert ByteTokenizer().encode(b"\xff") == [255]
    with pytest.raises(UserError, match="the text is not UTF-8: byte 0xff at 1"):
        open_tokenizer(directory / "gpt2").encode_to_numpy(b"a\xff")


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
