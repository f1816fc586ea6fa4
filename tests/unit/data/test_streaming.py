"""Streamed text: samples are the documents end to end, and reading resumes anywhere."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megazoo.data import check_data, streaming
from megazoo.data.order import Blend
from megazoo.data.streaming import Position, StreamedTexts
from megazoo.errors import UserError
from megazoo.tokenizer import ByteTokenizer
from tests.support.data import open_all, write_lines
from tests.support.hub_server import Hub, serving

ROOT = Path(__file__).parents[3]
LENGTH, BLOCK = 16, 10  # of a sample, in tokens; of a block, in samples
TEXTS = [f"{number} " * (number % 23) + "end" for number in range(60)]
EOD = ByteTokenizer().eod


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_TOKENS", LENGTH * BLOCK)


@pytest.fixture(params=["parquet", "jsonl"])
def source(request, tmp_path):
    """TEXTS in files of that kind, beside a column that is not read."""
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    if request.param == "jsonl":
        return f"stream:{write_lines(tmp_path / 'a.jsonl', *rows)}"
    for number, part in enumerate((rows[:25], rows[25:])):
        table = pa.Table.from_pylist(part)
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=7)
    return f"{tmp_path}/*.parquet"


def tokens_of(texts) -> np.ndarray:
    return np.array([token for text in texts for token in (*text.encode(), EOD)])


def opened(name, **settings) -> StreamedTexts:
    return StreamedTexts(name, ByteTokenizer(), [1.0], 0, LENGTH, **settings)


def rows_of(dataset, first: int, last: int) -> list[list[int]]:
    return [[*s.input_ids, s.targets[-1]] for s in dataset.__getitems__(list(range(first, last)))]


def test_samples_are_the_documents_end_to_end_again_and_again(source):
    flat = tokens_of(TEXTS * 3)
    expected = [
        flat[start : start + LENGTH + 1].tolist() for start in range(0, len(flat) - LENGTH, LENGTH)
    ]
    dataset = opened(source, eod=EOD)
    assert rows_of(dataset, 0, len(expected)) == expected
    assert rows_of(dataset, 2, 5) == expected[2:5]  # long gone from memory
    sample = dataset[len(expected) - 1]
    ends = np.flatnonzero(np.diff(sample.documents)) + 1
    assert (sample.input_ids[ends - 1] == EOD).all()
    assert len(ends) == (sample.input_ids[:-1] == EOD).sum()


def test_shuffling_stays_within_blocks(source):
    plain, shuffled = (rows_of(opened(source, seed=seed), 0, 10 * BLOCK) for seed in (None, 1))
    for first in range(0, len(plain), BLOCK):
        block = slice(first, first + BLOCK)
        assert sorted(plain[block]) == sorted(shuffled[block])
        assert plain[block] != shuffled[block]
    assert rows_of(opened(source, seed=2), 0, BLOCK) != shuffled[:BLOCK]


def test_reading_resumes_after_any_sample_of_any_pass(source):
    straight = opened(source, seed=1)
    count = 3 * len(tokens_of(TEXTS)) // LENGTH
    rows = rows_of(straight, 0, count)
    epochs = set()
    for sample in range(0, count - 57, 23):
        position = json.loads(json.dumps(straight.position_before(sample)))
        assert position["sample"] == sample // BLOCK * BLOCK  # no more than a block is read again
        epochs.add(position["epoch"])
        resumed = opened(source, seed=1, position=Position.of(position))
        assert rows_of(resumed, sample, sample + 50) == rows[sample : sample + 50]
        assert resumed.position_before(sample) == position
        again = opened(source, seed=1, position=Position.of(resumed.position_before(sample + 50)))
        assert rows_of(again, sample + 50, sample + 57) == rows[sample + 50 : sample + 57]
    assert epochs == {0, 1, 2}


def test_a_position_of_another_version_of_datasets_is_found_by_counting(source):
    straight = opened(source, seed=1)
    rows = rows_of(straight, 0, 100)
    position = straight.position_before(77)
    assert position["document"] > 0
    for other in ({"version": "0.1", "state": {"unknown": 1}}, {"state": None}, {"more": 1}):
        resumed = opened(source, seed=1, position=Position.of(position | other))
        assert rows_of(resumed, 77, 100) == rows[77:]


def test_other_columns_may_differ_and_names_may_have_brackets(tmp_path):
    folder = tmp_path / "data[1]"
    folder.mkdir()
    others = [{"id": 1}, {"id": "x", "url": None}, {"url": {"a": 1}}, {"more": [1]}]
    rows = [{"text": f"{number}.", **other} for number, other in enumerate(others)]
    for number, row in enumerate(rows):
        pq.write_table(pa.Table.from_pylist([row]), folder / f"{number}.parquet")
    write_lines(folder / "a.jsonl", *rows)
    expected = tokens_of(["0.", "1.", "2.", "3."] * 2)[:LENGTH].tolist()
    for name in (f"{tmp_path}/data?1?/*.parquet", f"stream:{folder}/a.jsonl"):
        assert opened(name)[0].input_ids.tolist() == expected


def test_a_blend_resumes_each_source_where_it_stood(source, tmp_path):
    other = write_lines(tmp_path / "other.jsonl", *({"text": "other " * 30} for _ in range(40)))
    words = [0.3, source, 0.7, f"stream:{other}"]
    settings = {"split": "100,0", "seq_length": LENGTH}
    straight = open_all(*words, **settings).training
    samples = straight.samples(0, 220)
    positions = straight.positions(200)
    assert [position["sample"] for position in positions] == [60, 140]
    resumed = open_all(*words, **settings, positions=positions).training
    for ours, theirs in zip(resumed.samples(200, 20), samples[200:], strict=True):
        assert np.array_equal(ours.input_ids, theirs.input_ids)
    # A position further on than the first sample that is asked for is of another blend.
    other_weights = open_all(0.1, *words[1:], **settings, positions=positions).training
    assert len(other_weights.samples(200, 20)) == 20


def test_parts_hold_different_documents_and_together_all(tmp_path):
    texts = [f"{number:03}" for number in range(400)]
    file = write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    blends = open_all(f"stream:{file}", split="80,15,5", seq_length=4)
    documents = [
        {bytes(row.tolist()).decode() for row in rows_without_ends(blend, size)}
        for blend, size in zip(blends, (320, 60, 20), strict=True)
    ]
    assert sorted(document for part in documents for document in part) == texts


def rows_without_ends(blend: Blend, size: int) -> list[np.ndarray]:
    """Each sample has one document here, of three bytes and its end."""
    return [sample.input_ids[sample.input_ids != EOD] for sample in blend.samples(0, size)]


def test_documents_without_text_are_skipped_with_a_warning(tmp_path, capsys):
    rows = [{"text": text} for text in ("one", None, "", "four")]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    dataset = opened(str(tmp_path / "a.parquet"))
    flat = tokens_of(["one", "four"] * 3)
    assert dataset[0].input_ids.tolist() == flat[:LENGTH].tolist()
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/a.parquet: document 2 has no text; such documents are skipped\n"
    )


def test_what_cannot_be_streamed_gets_one_line(tmp_path, monkeypatch):
    table = pa.Table.from_pylist([{"content": "a", "id": 1}])
    pq.write_table(table, tmp_path / "other.parquet")
    (tmp_path / "broken.parquet").write_text("no parquet")
    (tmp_path / "a.txt").write_text("text")
    write_lines(tmp_path / "few.jsonl", *({"text": "a"} for _ in range(5)))
    write_lines(tmp_path / "other.jsonl", {"content": "a", "id": 1})
    for name in (tmp_path / "other.parquet", f"stream:{tmp_path}/other.jsonl"):
        with pytest.raises(UserError, match=r"no column 'text'; its columns are: content, id"):
            open_all(name, split="1,0").training.samples(0, 1)
    for value in (5, True, ["a"]):
        write_lines(tmp_path / "odd.jsonl", {"text": "a"}, {"text": value})
        with pytest.raises(UserError, match=r"odd\.jsonl', document 2: its text is not a string"):
            open_all(f"stream:{tmp_path}/odd.jsonl", split="1,0").training.samples(0, 1)
    pq.write_table(pa.Table.from_pylist([{"text": 5}]), tmp_path / "odd.parquet")
    with pytest.raises(UserError, match=r"odd\.parquet', document 1: its text is not a string: 5"):
        open_all(f"{tmp_path}/odd.parquet", split="1,0").training.samples(0, 1)
    (tmp_path / "odd.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    with pytest.raises(UserError, match=r"odd\.jsonl', document 2: Expecting"):
        open_all(f"stream:{tmp_path}/odd.jsonl", split="1,0").training.samples(0, 1)
    with pytest.raises(UserError, match=r"broken\.parquet' can't be read: "):
        open_all(tmp_path / "broken.parquet", split="1,0").training.samples(0, 1)
    with pytest.raises(UserError, match=r"must end in \.parquet or \.jsonl"):
        check_data([f"stream:{tmp_path}/a.txt"], "95,5")
    with pytest.raises(UserError, match=r"no-\*\.parquet': no such file"):
        check_data([f"{tmp_path}/no-*.parquet"], "95,5")
    with pytest.raises(UserError, match=r"no documents for this part of --split"):
        open_all(f"stream:{tmp_path}/few.jsonl", split="95,5").validation.samples(0, 1)
    monkeypatch.setattr(streaming, "is_installed", lambda name: False)
    with pytest.raises(
        UserError, match=r"needs the package datasets; .*: pip install -e '\.\[datasets\]'"
    ):
        check_data([f"{tmp_path}/other.parquet"], "95,5")


def test_a_position_is_what_a_checkpoint_keeps():
    from megazoo.trainer.state import StreamPosition

    assert asdict(StreamPosition(**asdict(Position()))) == asdict(Position())


FROM_THE_HUB = """
import sys
from megazoo.data.streaming import StreamedTexts
from megazoo.tokenizer import ByteTokenizer

for name in sys.argv[1:]:
    try:
        dataset = StreamedTexts(name, ByteTokenizer(), [1.0], 0, 16)
        print(bytes(dataset[0].input_ids.tolist()).decode())
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_files_on_the_hugging_face_hub_are_streamed(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"text": "A document on the hub. " * 100_000})
    hub = Hub({"org/name": {"data/a.jsonl": file.read_bytes(), "README.md": b"# data"}})
    names = ["org/name@v1/data/*.jsonl", "org/name/data/a.jsonl", "org/other/a.jsonl"]
    with serving(hub) as address:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", FROM_THE_HUB, *(f"stream:hf://datasets/{n}" for n in names)],
            env=kept | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    one, two, missing = done.stdout.splitlines()
    assert one == two == "A document on th"
    assert re.match(r"UserError data 'stream:hf://datasets/org/other/a.jsonl' can't be", missing)
