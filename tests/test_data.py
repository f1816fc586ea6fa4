"""Data: the embedded corpus, its split, and an order of samples that no layout changes."""

import numpy as np
import pytest
import torch

from megazoo.data import Batches, PackedDataset, SampleOrder, check_data, open_datasets
from megazoo.data.corpus import standard_library
from megazoo.data.indexed import HEADER, write_index
from megazoo.errors import UserError
from megazoo.parallel import ParallelContext
from megazoo.tokenizer import ByteTokenizer, open_tokenizer


def test_the_embedded_corpus_is_the_standard_library():
    documents = standard_library()
    assert sum(map(len, documents)) > 5e6
    assert any(b"class Counter(dict)" in text for text in documents)
    assert documents == standard_library()


def test_no_document_is_in_both_splits_and_none_is_lost():
    train, valid = open_datasets("stdlib", ByteTokenizer(), "90,10", 64)
    documents = [np.frombuffer(text, np.uint8).tobytes() for text in standard_library()]
    parts = []
    for dataset in (train, valid):
        ends = np.flatnonzero(dataset.tokens == 256)
        parts.append([p[p != 256].astype(np.uint8).tobytes() for p in np.split(dataset.tokens, ends + 1)][:-1])
    assert sorted(parts[0] + parts[1]) == sorted(documents)
    assert len(parts[1]) == len(documents) - round(0.9 * len(documents))


def test_samples_overlap_by_one_token():
    dataset = PackedDataset(np.arange(100, dtype=np.uint16), 10)
    assert len(dataset) == 9
    assert dataset[0].tolist() == list(range(11))
    assert dataset[8].tolist() == list(range(80, 91))


def test_an_epoch_is_a_permutation_and_the_next_is_another():
    order = SampleOrder(50, seed=1)
    epochs = [[order(epoch * 50 + i) for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [SampleOrder(50, seed=1)(i) for i in (120, 3, 70)] == [epochs[2][20], epochs[0][3], epochs[1][20]]
    assert epochs[0] != [SampleOrder(50, seed=2)(i) for i in range(50)]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_replicas_together_see_the_same_global_batches(dp):
    dataset = PackedDataset(np.arange(2001, dtype=np.uint16), 8)
    whole = Batches(dataset, SampleOrder(len(dataset), 1), 8, 8, ParallelContext())
    contexts = [ParallelContext.virtual(dp=dp, rank=rank) for rank in range(dp)]
    replicas = [Batches(dataset, SampleOrder(len(dataset), 1), 8, 8, ctx) for ctx in contexts]
    for consumed in range(0, 400, 8):
        expected = whole(consumed)
        parts = [replica(consumed) for replica in replicas]
        for key in ("input_ids", "targets"):
            assert torch.equal(torch.cat([part[key] for part in parts]), expected[key])
        assert torch.equal(expected["input_ids"][:, 1:], expected["targets"][:, :-1])
        assert all(part["shape"] == (8 // dp, 8) for part in parts)


def test_stages_without_data_get_only_the_shape():
    assert Batches(None, None, 8, 16, ParallelContext())(0) == {"shape": (8, 16)}


def test_byte_tokens():
    tokenizer = open_tokenizer("byte")
    text = "naïve ☃\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


@pytest.mark.parametrize("split", ["95", "a,b", "0,5", "-1,2", "1,2,3"])
def test_a_split_that_is_none_is_refused(split):
    with pytest.raises(UserError, match="is not two shares such as 95,5"):
        check_data("stdlib", split)


def test_unknown_data_is_refused():
    with pytest.raises(UserError, match="unknown data 'wikitext': there is stdlib"):
        open_datasets("wikitext", ByteTokenizer(), "95,5", 64)
    with pytest.raises(UserError, match="unknown tokenizer 'bpe': there is byte"):
        open_tokenizer("bpe")


@pytest.fixture
def token_files(tmp_path):
    """Ten documents of 1 to 10 tokens, numbered on."""
    lengths = np.arange(1, 11)
    np.arange(lengths.sum(), dtype=np.uint16).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", lengths, np.dtype(np.uint16))
    return tmp_path / "a"


def test_token_files_are_split_by_document(token_files):
    train, valid = open_datasets(str(token_files), ByteTokenizer(), "60,40", 4)
    assert train.tokens.tolist() == list(range(21))  # six documents, 1 + ... + 6 tokens
    assert valid.tokens.tolist() == list(range(21, 55))
    assert train[1].tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(UserError, match="a: split 60,40 leaves no training sample of 21 tokens"):
        open_datasets(str(token_files), ByteTokenizer(), "60,40", 21)


def test_sequences_out_of_order_are_refused(token_files):
    data = bytearray(token_files.with_suffix(".idx").read_bytes())
    first = HEADER.size + 4 * 10  # offsets
    data[first + 8 : first + 16], data[first + 16 : first + 24] = (
        data[first + 16 : first + 24],
        data[first + 8 : first + 16],
    )
    token_files.with_suffix(".idx").write_bytes(data)
    with pytest.raises(UserError, match="the sequences don't lie end to end"):
        open_datasets(str(token_files), ByteTokenizer(), "60,40", 4)


def test_batches_number_the_documents_if_they_are_to_be_separate():
    eod = 99
    tokens = np.array([1, 2, eod, 3, 4, 5, eod, eod, 6, 7, 8, 9, 1], np.uint16)
    arguments = PackedDataset(tokens, 6), lambda i: i, 2, 6, ParallelContext()
    batch = Batches(*arguments, eod=eod)(0)
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 2, 2, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 3]]
    assert batch["targets"].tolist() == [[2, eod, 3, 4, 5, eod], [eod, 6, 7, 8, 9, 1]]
    assert "document_ids" not in Batches(*arguments)(0)
