"""Megatron-LM's token files: their bytes by hand, there and back, and what is refused."""

import struct

import numpy as np
import pytest

from megazoo.data import indexed
from megazoo.data.indexed import IndexedTokens, dtype_for, write_index
from megazoo.errors import UserError

# Three sequences of uint16: [5, 6, 7], [], [8]; two documents: the first two sequences, and the
# third.
BIN = bytes.fromhex("0500 0600 0700 0800")
IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX, 0, 0
    "0100000000000000"  # version 1
    "08"  # uint16
    "0300000000000000"  # three sequences
    "0300000000000000"  # two documents
    "03000000 00000000 01000000"  # lengths
    "0000000000000000 0600000000000000 0600000000000000"  # byte offsets
    # the documents' first sequences, and the end
    "0000000000000000 0200000000000000 0300000000000000"
)


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "a.bin").write_bytes(BIN)
    (tmp_path / "a.idx").write_bytes(IDX)
    return tmp_path / "a"


def test_files_of_megatron_are_read(prefix):
    tokens = IndexedTokens(prefix)
    assert [tokens[i].tolist() for i in range(len(tokens))] == [[5, 6, 7], [], [8]]
    assert tokens.documents.tolist() == [0, 2, 3]
    assert tokens.dtype == np.uint16


def test_files_for_megatron_are_written(prefix):
    write_index(prefix.with_suffix(".out"), [3, 0, 1], np.dtype(np.uint16), np.array([0, 2, 3]))
    assert prefix.with_suffix(".out").read_bytes() == IDX
    write_index(prefix.with_suffix(".out"), [3, 0, 1], np.dtype(np.uint16))
    assert prefix.with_suffix(".out").read_bytes()[-32:] == struct.pack("<4q", 0, 1, 2, 3)


def test_every_integer_dtype_is_read_as_its_header_says(tmp_path):
    for code, kind in enumerate((np.uint8, np.int8, np.int16, np.int32, np.int64), 1):
        values = np.arange(100, dtype=kind)
        (tmp_path / "a.bin").write_bytes(values.tobytes())
        write_index(tmp_path / "a.idx", [60, 40], np.dtype(kind))
        assert (tmp_path / "a.idx").read_bytes()[17] == code
        tokens = IndexedTokens(tmp_path / "a")
        assert np.array_equal(tokens[1], values[60:])
        assert tokens[1].dtype == kind
    found = [dtype_for(size) for size in (257, 65_499, 65_500, 128_256)]
    assert found == [np.uint16, np.uint16, np.int32, np.int32]


def test_an_empty_corpus_is_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    write_index(tmp_path / "a.idx", [], np.dtype(np.uint16))
    assert len(IndexedTokens(tmp_path / "a")) == 0


# what is broken, the file, its contents, and the message
BROKEN = [
    ("no .bin", "bin", None, "a.bin is missing"),
    ("no .idx", "idx", None, "a.idx is missing"),
    ("a truncated .bin", "bin", BIN[:-2], "a.bin has 6 bytes: it must have at least the 8 bytes"),
    ("half a token", "bin", BIN + b"\0", "a.bin has 9 bytes"),
    ("a truncated .idx", "idx", IDX[:-1], "a.idx has 93 bytes, but its header needs 94"),
    ("a header cut short", "idx", IDX[:20], "a.idx has 20 bytes, fewer than its header"),
    ("another file", "idx", b"PK" + IDX[2:], "a.idx is not an index of version 1"),
    ("another version", "idx", IDX[:9] + b"\2" + IDX[10:], "a.idx is not an index of version 1"),
    (
        "floats",
        "idx",
        IDX[:17] + b"\7" + IDX[18:],
        "dtype code 7 stands for floating-point numbers",
    ),
    (
        "gpt-neox's floats",
        "idx",
        IDX[:17] + b"\6" + IDX[18:],
        "dtype code 6 stands for floating-point numbers",
    ),
    ("an unknown dtype", "idx", IDX[:17] + b"\11" + IDX[18:], "dtype code 9 stands for an unknown"),
    ("a lying number of sequences", "idx", IDX[:18] + b"\377" * 8 + IDX[26:], "its header needs"),
    (
        "a negative length",
        "idx",
        IDX[:34] + b"\377" * 4 + IDX[38:],
        "sequence 0 is out of range: -1 tokens at byte 0 of 8",
    ),
    (
        "a length past the end",
        "idx",
        IDX[:34] + b"\11" + IDX[35:],
        "sequence 0 is out of range: 9 tokens at byte 0 of 8",
    ),
    (
        "an odd offset",
        "idx",
        IDX[:54] + b"\1" + IDX[55:],
        "sequence 1 is out of range: 0 tokens at byte 1 of 8",
    ),
    (
        "an offset past the end",
        "idx",
        IDX[:54] + b"\20" + IDX[55:],
        "sequence 1 is out of range: 0 tokens at byte 16 of 8",
    ),
    (
        "an offset that overflows",
        "idx",
        IDX[:46] + struct.pack("<q", 2**63 - 2) + IDX[54:],
        "at byte 9223372",
    ),
    (
        "documents that don't end",
        "idx",
        IDX[:-8] + struct.pack("<q", 2),
        "boundaries of its documents must run from 0 to 3",
    ),
    (
        "documents out of order",
        "idx",
        IDX[:-16] + struct.pack("<2q", 4, 3),
        "boundaries are not in order",
    ),
]


def read_all(prefix):
    tokens = IndexedTokens(prefix)
    for index in range(len(tokens)):
        tokens[index]
    tokens.stream(0, 1)


def test_broken_files_are_refused_by_name(prefix):
    for name, ending, data, message in BROKEN:
        prefix.with_suffix(".bin").write_bytes(BIN)
        prefix.with_suffix(".idx").write_bytes(IDX)
        path = prefix.with_suffix(f".{ending}")
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(UserError, match=message) as refusal:
            read_all(prefix)
        assert "\n" not in str(refusal.value), name


@pytest.mark.parametrize("block", [1024, 4, 1])
def test_a_slice_of_a_stream_is_what_the_sequences_hold_or_is_refused(tmp_path, monkeypatch, block):
    """Against all runs of sequences that lie end to end, in an index with empty ones and one wrong
    number; however many are looked at together."""
    monkeypatch.setattr(indexed, "BLOCK", block)
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 4, 20)
    np.arange(lengths.sum(), dtype=np.uint16).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", lengths, np.dtype(np.uint16))
    refused = 0
    for trial in range(100):
        tokens = IndexedTokens(tmp_path / "a")
        tokens.lengths, tokens.offsets = tokens.lengths.copy(), tokens.offsets.copy()
        if trial:  # first of all, as it was written
            array, changes = [(tokens.lengths, [-1, 1]), (tokens.offsets, [-2, 2, 20])][trial % 2]
            array[generator.integers(1, 19)] += generator.choice(changes)
        ends = tokens.offsets // 2 + tokens.lengths
        runs = [
            (tokens.offsets[first] // 2, ends[last])
            for first in range(2, 20)
            for last in range(first, 20)
            if (tokens.lengths[first : last + 1] >= 0).all()
            and (tokens.offsets[first + 1 : last + 1] // 2 == ends[first:last]).all()
        ]
        stream = tokens.stream(2, 20)
        for start in range(len(stream)):
            stop = int(generator.integers(start + 1, len(stream) + 1))
            try:
                part = stream[start:stop].tolist()
            except UserError:
                refused += 1
                if trial == 0:
                    raise
                continue
            assert part == list(range(stream.start + start, stream.start + stop))
            assert any(first <= part[0] and part[-1] < last for first, last in runs)
    assert refused > 100
