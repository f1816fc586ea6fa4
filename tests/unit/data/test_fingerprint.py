"""A checkpoint keeps a fingerprint of each source of data, and a resumed run tells which have
changed."""

import json
import os
import zlib

import numpy as np
import pytest

from megazoo import pretrain
from megazoo.data.checksums import sampled_checksum
from megazoo.data.conversations import CHATML
from megazoo.data.fingerprint import changes, fingerprints, positions_in
from megazoo.data.indexed import write_index
from megazoo.data.preprocess import Recipe, preprocess
from tests.support.data import write_lines
from tests.support.inference import run_main

SMALL = (
    "--device cpu --layers 2 --hidden-size 32 --heads 4 --seq-length 16 --global-batch-size 2 "
    "--micro-batch-size 2 --eval-steps 0 --split 100,0"
).split()


def corpus(path, count=300):
    return write_lines(path, *({"text": f"line {number}"} for number in range(count)))


def of(*names) -> list[dict]:
    return fingerprints(map(str, names), "byte", CHATML)


def test_a_fingerprint_says_what_a_source_is(tmp_path):
    path = corpus(tmp_path / "a.jsonl")
    (found,) = of(path)
    assert found == {
        "source": str(path),
        "bytes": path.stat().st_size,
        "documents": 300,
        "checksum": zlib.crc32(path.read_bytes()),
    }
    preprocess(Recipe((str(path),), "byte"), tmp_path / "b", 0)
    (found,) = of(tmp_path / "b_text_document")
    files = [tmp_path / f"b_text_document.{end}" for end in ("idx", "bin")]
    assert found["bytes"] == sum(file.stat().st_size for file in files)
    assert found["documents"] == 300
    assert found["checksum"] == zlib.crc32(b"".join(file.read_bytes() for file in files))
    assert of("stdlib", "mock") == of("stdlib", "mock")
    assert of("stdlib")[0]["documents"] > 100
    assert of("mock") == [{"source": "mock", "bytes": 0, "documents": 0, "checksum": 0}]


def test_a_long_file_is_read_at_even_distances(tmp_path):
    file, size = tmp_path / "long", (1 << 40) + 12345
    file.touch()
    os.truncate(file, size)
    zeros = sampled_checksum(file)  # to read all of it would take an hour
    for place, seen in ((0, True), (size - 1, True), (size - 4096, True), (size // 2, False)):
        with open(file, "r+b") as opened:
            opened.seek(place)
            opened.write(b"x")
            opened.flush()
            assert (sampled_checksum(file) != zeros) == seen
            opened.seek(place)
            opened.write(b"\0")
    assert sampled_checksum(file) == zeros


@pytest.mark.parametrize("kind", ["longer", "another word", "shorter documents"])
def test_what_has_changed_is_told_by_its_place_in_the_blend(tmp_path, kind):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        corpus(tmp_path / name / "a.jsonl")
        tokens = np.arange(100, dtype=np.uint16)
        (tmp_path / name / "b.bin").write_bytes(tokens.tobytes())
        write_index(tmp_path / name / "b.idx", np.full(10, 10), tokens.dtype)
    then = of(*((tmp_path / "first" / source) for source in ("a.jsonl", "b")))
    assert changes(then, of(*((tmp_path / "second" / source) for source in ("a.jsonl", "b")))) == []
    path, index = tmp_path / "second" / "a.jsonl", tmp_path / "second" / "b.idx"
    if kind == "longer":
        path.write_text(path.read_text() + '{"text": "more"}\n')
        told, size = path, path.stat().st_size
        difference = f"{size - 17:,} bytes then, {size:,} now"
    elif kind == "another word":
        path.write_text(path.read_text().replace("line 7", "LINE 7"))
        told, difference = path, "other contents"
    else:
        told, difference = index.with_suffix(""), "10 documents then, 9 now"
        size = index.stat().st_size
        documents = np.arange(11)[[*range(9), 10]]
        write_index(index, np.full(10, 10), tokens.dtype, documents)
        then[1]["bytes"] -= size - index.stat().st_size
    now = of(path, index.with_suffix(""))
    assert changes(then, now) == [
        f"{told} has changed since the checkpoint: {difference}: samples will not be the same"
    ]
    assert changes(then, of(index.with_suffix(""), path)) == []  # other sources are no changes
    assert changes([], now) == changes(then, []) == []


def test_a_resumed_run_tells_of_data_that_has_changed(tmp_path, monkeypatch, capsys):
    path, run = corpus(tmp_path / "a.jsonl"), tmp_path / "run"
    arguments = [*SMALL, "--data", path, "--steps", 1, "--save", run]
    code, _, errors = run_main(pretrain, monkeypatch, capsys, *arguments)
    assert (code, "warning" in errors) == (0, False)
    trainer = json.loads((run / "step_00000001" / "trainer.json").read_text())
    assert trainer["data"] == of(path)
    then = path.stat().st_size
    resume = ["--load", run, "--steps", 2, "--device", "cpu"]
    code, _, errors = run_main(pretrain, monkeypatch, capsys, *resume)
    assert (code, "warning" in errors) == (0, False)
    path.write_text(path.read_text() + '{"text": "more"}\n')
    code, _, errors = run_main(pretrain, monkeypatch, capsys, *resume)
    assert code == 0
    assert [line for line in errors.splitlines() if "warning" in line] == [
        f"warning: {path} has changed since the checkpoint: {then:,} bytes then, {then + 17:,} "
        "now: samples will not be the same"
    ]


def test_a_changed_file_among_many_that_are_streamed_is_found(tmp_path):
    for number in range(100):
        (tmp_path / f"{number}.parquet").write_bytes(bytes(20_000))
    name = f"{tmp_path}/*.parquet"
    then = fingerprints([name], "byte", "")
    (tmp_path / "7.parquet").write_bytes(bytes(19_999) + b"1")
    assert changes(then, fingerprints([name], "byte", "")) == [
        f"{name} has changed since the checkpoint: other contents: samples will not be the same"
    ]


def test_a_position_belongs_to_its_source():
    place = {"sample": 3}
    for then, now, same in [
        ("a/x.parquet", "b/x.parquet", True),
        ("a/x.parquet", "a/y.parquet", False),
        ("hf://datasets/o/a/x.parquet", "hf://datasets/o/a/x.parquet", True),
        ("hf://datasets/o/a/x.parquet", "hf://datasets/o/b/x.parquet", False),
        ("a/x.jsonl", "a/x.jsonl", False),
    ]:
        found = positions_in([{"source": then, "position": place}], [now])
        assert found == [place if same else None]
    assert positions_in([{"source": "a.parquet"}], ["a.parquet", "b.parquet"]) == [None, None]
