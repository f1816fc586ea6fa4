"""Data: the embedded corpus, token files, splits, who opens what, and what is refused."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from megazoo import pretrain
from megazoo.data import PackedDataset, check_data, open_datasets
from megazoo.data.cache import cached_tokens
from megazoo.data.conversations import CHATML
from megazoo.data.corpus import standard_library
from megazoo.data.fingerprint import fingerprints
from megazoo.data.indexed import HEADER, IndexedTokens, write_index
from megazoo.data.preprocess import Recipe, preprocess
from megazoo.data.samples import MockDataset
from megazoo.errors import UserError
from megazoo.tokenizer import open_tokenizer
from tests.support.data import open_all, write_lines


def test_the_embedded_corpus_is_the_standard_library():
    documents = standard_library()
    assert sum(map(len, documents)) > 5e6
    assert any(b"class Counter(dict)" in text for text in documents)
    assert documents == standard_library()


def test_no_document_is_in_two_splits_and_none_is_lost():
    documents = [np.frombuffer(text, np.uint8).tobytes() for text in standard_library()]
    parts = []
    for blend in open_all("stdlib", split="80,15,5"):
        (dataset,) = blend.datasets
        ends = np.flatnonzero(dataset.tokens == 256)
        parts.append(
            [p[p != 256].astype(np.uint8).tobytes() for p in np.split(dataset.tokens, ends + 1)][
                :-1
            ]
        )
    assert sorted(text for part in parts for text in part) == sorted(documents)
    assert [len(part) / len(documents) for part in parts] == pytest.approx(
        [0.8, 0.15, 0.05], abs=2 / len(documents)
    )


def test_samples_overlap_by_one_token():
    dataset = PackedDataset(np.arange(100, dtype=np.uint16), 10)
    assert len(dataset) == 9
    assert dataset[0].input_ids.tolist() == list(range(10))
    assert dataset[8].input_ids.tolist() == list(range(80, 90))
    assert dataset[8].targets.tolist() == list(range(81, 91))


def test_mock_data_is_random_and_the_same_again():
    dataset = MockDataset(1000, 512)
    samples = [dataset[index].input_ids for index in range(20)]
    assert all(
        np.array_equal(sample, dataset[index].input_ids) for index, sample in enumerate(samples)
    )
    counts = np.bincount(np.concatenate(samples), minlength=1000)
    assert len(counts) == 1000
    assert (counts > 0).mean() > 0.99
    assert np.array_equal(dataset[3].input_ids[1:], dataset[3].targets[:-1])


def test_byte_tokens():
    tokenizer = open_tokenizer("byte")
    text = "naïve ☃\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


def test_weights_and_sources_are_told_apart_and_what_is_neither_is_refused():
    assert check_data(["stdlib"], "95,5") == (("stdlib",), (1.0,), (0.95, 0.05, 0.0))
    assert check_data("3 stdlib 1 mock".split(), "98,1,1") == (
        ("stdlib", "mock"),
        (3.0, 1.0),
        (0.98, 0.01, 0.01),
    )
    for words in (["stdlib", "mock"], ["1", "stdlib", "2"], [], ["stdlib", "1", "mock", "2"]):
        with pytest.raises(UserError, match="use one source, or alternating weights and sources"):
            check_data(words, "95,5")
    for split in ["95", "a,b", "0,5", "-1,2", "1,2,3,4", "nan,1", "1,inf"]:
        with pytest.raises(UserError, match="is not valid: use two or three proportions"):
            check_data(["stdlib"], split)
    with pytest.raises(UserError, match="the weights of a blend must be above 0: 1, -2"):
        check_data("1 stdlib -2 mock".split(), "95,5")
    with pytest.raises(UserError, match="--data 'wikitext' is not found"):
        check_data("1 stdlib 2 wikitext".split(), "95,5")
    with pytest.raises(UserError, match="unknown tokenizer 'bpe': use byte"):
        open_tokenizer("bpe")


@pytest.fixture
def token_files(tmp_path):
    """Ten documents of 1 to 10 tokens, numbered on."""
    lengths = np.arange(1, 11)
    np.arange(lengths.sum(), dtype=np.uint16).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", lengths, np.dtype(np.uint16))
    return tmp_path / "a"


def test_token_files_are_split_by_document(token_files):
    train, valid, test = (
        blend.datasets[0] for blend in open_all(token_files, split="60,20,20", seq_length=4)
    )
    assert train.tokens[:].tolist() == list(range(21))  # six documents, 1 + ... + 6 tokens
    assert valid.tokens[:].tolist() == list(range(21, 36))
    assert test.tokens[:].tolist() == list(range(36, 55))
    assert [part.first for part in (train, valid, test)] == [0, 21, 36]
    assert train[1].input_ids.tolist() == [4, 5, 6, 7]


def test_a_blend_takes_from_all_its_sources_in_every_part(token_files):
    train, valid, test = open_all(
        "0.7", token_files, "0.3", "stdlib", split="60,20,20", seq_length=4
    )
    for blend in (train, valid, test):
        places = [source for source, _ in blend.places(0, 1000)]
        assert abs(places.count(0) - 700) <= 1
    assert len(train) == len(train.datasets[0]) + len(train.datasets[1])
    assert len(valid.datasets[0]) == 3


def test_a_part_without_samples_is_refused(token_files, tmp_path):
    for split, seq_length, message in (
        ("60,40", 21, "--split 0.6,0.4,0 leaves no training sample of 21 tokens"),
        ("1,99", 4, "--split 0.01,0.99,0 leaves no training sample of 4 tokens"),
        ("98,1,1", 4, "--split 0.98,0.01,0.01 leaves no validation sample of 4 tokens"),
    ):
        with pytest.raises(UserError, match=f"{token_files}: {message}"):
            open_all(token_files, split=split, seq_length=seq_length)
    training, *held_out = open_all(token_files, split="98,1,1", seq_length=4, evaluates=False)
    assert len(training)
    assert held_out == [None, None]
    (tmp_path / "empty.bin").touch()
    write_index(tmp_path / "empty.idx", np.array([], int), np.dtype(np.uint16))
    with pytest.raises(UserError, match=f"{tmp_path}/empty has no tokens"):
        open_all(tmp_path / "empty")
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/b.jsonl has no lines"):
        open_all(tmp_path / "b.jsonl")


def test_tokens_beyond_the_vocabulary_are_told_with_their_position(token_files):
    train, _, _ = open_all(token_files, split="60,40", seq_length=4, vocab_size=11)
    assert train.datasets[0][1].targets.tolist() == [5, 6, 7, 8]
    with pytest.raises(
        UserError,
        match=f"{token_files}.bin: token 11 at position 11 is outside the vocabulary of 11",
    ):
        train.datasets[0][2]
    np.arange(-30, 25, dtype=np.int32).tofile(token_files.with_suffix(".bin"))
    write_index(token_files.with_suffix(".idx"), np.arange(1, 11), np.dtype(np.int32))
    _, valid, _ = open_all(token_files, split="60,40", seq_length=4, vocab_size=11)
    with pytest.raises(
        UserError,
        match=f"{token_files}.bin: token -9 at position 21 is outside the vocabulary of 11",
    ):
        valid.datasets[0][0]


def test_documents_without_an_end_can_not_be_told_apart(token_files):
    open_all(token_files, split="60,40", seq_length=4)
    with pytest.raises(
        UserError,
        match=f"{token_files}.bin: its first document doesn't end with the tokenizer's 256",
    ):
        open_all(token_files, split="60,40", seq_length=4, separate_documents=True)


def test_sequences_out_of_order_are_refused(token_files):
    data = bytearray(token_files.with_suffix(".idx").read_bytes())
    first = HEADER.size + 4 * 10  # offsets
    data[first + 8 : first + 16], data[first + 16 : first + 24] = (
        data[first + 16 : first + 24],
        data[first + 8 : first + 16],
    )
    token_files.with_suffix(".idx").write_bytes(data)
    train, valid, _ = open_all(token_files, split="60,40", seq_length=4)
    with pytest.raises(
        UserError,
        match=f"{token_files}.idx: sequences . to . do not follow one another in the .bin",
    ):
        train.datasets[0][0]
    valid.datasets[0][0]
    data[first : first + 80] = np.arange(90, -10, -10).astype("<i8").tobytes()
    token_files.with_suffix(".idx").write_bytes(data)
    with pytest.raises(
        UserError,
        match=f"{token_files}.idx: sequences 0 to . do not follow one another in the .bin",
    ):
        open_all(token_files, split="60,40", seq_length=4)


# Who opens what.

_opened: list[str] = []


def _note(event, arguments):
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        _opened.append(os.fspath(arguments[0]))


def opened_while_training(directory, arguments) -> set[str]:
    """The files in a directory that this rank opens."""
    if _note not in getattr(sys, "_megazoo_hooks", []):
        sys.addaudithook(_note)
        sys._megazoo_hooks = [_note]
    _opened.clear()
    pretrain.main(arguments)
    return {Path(name).name for name in _opened if str(directory) in name}


def test_stages_between_the_first_and_the_last_open_no_data(ranks, token_files):
    """Told by the interpreter's own audit events, of every file that is opened, memory maps
    included."""
    directory = token_files.parent
    np.arange(55 * 20, dtype=np.uint16).__mod__(200).astype(np.uint16).tofile(
        token_files.with_suffix(".bin")
    )
    write_index(token_files.with_suffix(".idx"), np.full(20, 55), np.dtype(np.uint16))
    write_lines(
        directory / "b.jsonl",
        *({"prompt": "a" * number, "completion": "b"} for number in range(1, 15)),
    )
    sizes = "--hidden-size 16 --heads 2 --layers 4 --max-positions 16 --seq-length 16".split()
    sizes += "--device cpu --pp 4 --global-batch-size 4 --micro-batch-size 1 --steps 2".split()
    sizes += "--eval-steps 1 --split 80,10,10".split()
    data = ["--data", "0.5", str(token_files), "0.5", str(directory / "b.jsonl")]
    first, *between, last = ranks(opened_while_training, 4, directory, [*sizes, *data])
    assert {"a.bin", "a.idx", "b.jsonl"} <= first & last
    assert sum(name.endswith("document.bin") for name in last) == 2
    assert between == [set(), set()]


def test_an_index_of_many_documents_reads_back(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 50, 100_000)
    np.zeros(lengths.sum(), np.uint16).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", lengths, np.dtype(np.uint16))
    tokens = IndexedTokens(tmp_path / "a")
    stream = tokens.stream(10, 99_990)
    assert stream.start == lengths[:10].sum()
    assert len(stream) == lengths[10:99_990].sum()


def test_plain_text_is_a_document_per_paragraph(tmp_path):
    file, tokenizer = tmp_path / "book.txt", open_tokenizer("byte")
    paragraphs = ["One,\nand so on.", "Two é.", "  Three."]
    for between in ("\n\n", "\n \t\n\n", "\r\n\r\n"):
        file.write_bytes(between.join(["", *paragraphs, "", ""]).encode())
        (tokens,) = cached_tokens(file, "byte", CHATML)
        count = len(tokens.documents) - 1
        documents = [tokens[n].tolist() for n in range(count)]
        assert documents == [[*tokenizer.encode(text), 256] for text in paragraphs]
    said = []
    sources = check_data((str(file),), "50,50")
    settings = dict(seq_length=4, vocab_size=257, seed=1, report=said.append)
    open_datasets(sources, tokenizer, **settings)
    file.write_text("One line.\nAnother, without a blank one between them.")
    open_datasets(check_data((str(file),), "1,0"), tokenizer, **settings)
    assert said == [f"{file}: 3 documents, a paragraph each", f"{file}: one document"]
    file.write_bytes(b"One.\n\nTwo \xff.\n")
    with pytest.raises(UserError, match=r"book\.txt, paragraph 2: .* can't decode byte 0xff"):
        open_datasets(sources, tokenizer, **settings)
    file.write_text("\n \n")
    with pytest.raises(UserError, match=r"book\.txt has no tokens"):
        open_datasets(sources, tokenizer, **settings)


def test_token_files_come_before_a_text_of_that_name(tmp_path):
    prefix, tokenizer = tmp_path / "book.txt", open_tokenizer("byte")
    prefix.write_text("a\n\nb")
    preprocess(Recipe((str(prefix),), "byte"), tmp_path / "out", 0)
    for end in (".bin", ".idx"):
        (tmp_path / f"out_text_document{end}").rename(f"{prefix}{end}")
    said = []
    sources = check_data((str(prefix),), "1,0")
    open_datasets(sources, tokenizer, seq_length=2, vocab_size=257, seed=1, report=said.append)
    assert not said
    assert fingerprints([str(prefix)], "byte", CHATML)[0]["documents"] == 1
