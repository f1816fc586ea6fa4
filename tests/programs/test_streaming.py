"""Training on streamed files: the same in every layout, and from wherever it is resumed."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megazoo import pretrain
from megazoo.checkpoint import Checkpoint
from megazoo.data import streaming
from megazoo.errors import UserError
from tests.support.data import write_lines
from tests.support.pretraining import SMALL, close, losses

TEXTS = [f"{number} is a number; " * (number % 9 + 1) for number in range(60)]


def with_small_blocks(job: list[str]) -> None:
    """Train with blocks of 3 samples: of less than a global batch."""
    usual, streaming.BLOCK_TOKENS = streaming.BLOCK_TOKENS, 3 * 32
    try:
        pretrain.main(job)
    finally:
        streaming.BLOCK_TOKENS = usual


@pytest.fixture
def data(tmp_path) -> list[str]:
    """A blend of a streamed .parquet file and streamed JSONL."""
    table = pa.Table.from_pylist([{"text": text} for text in TEXTS])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8)
    write_lines(tmp_path / "b.jsonl", *({"text": text.upper()} for text in TEXTS))
    return ["--data", "0.4", f"{tmp_path}/a.parquet", "0.6", f"stream:{tmp_path}/b.jsonl"]


def test_streamed_training_is_the_same_in_every_layout_and_after_a_stop(
    ranks, data, tmp_path, capsys, monkeypatch
):
    straight, saved, metrics = tmp_path / "straight", tmp_path / "run", tmp_path / "metrics"
    common = ["--metrics", str(metrics), "--save", str(saved), "--device", "cpu"]
    schedule = ["--lr-decay-steps", "9", "--split", "80,20"]
    with_small_blocks([*SMALL, *data, *schedule, "--steps", "9", "--metrics", str(straight)])
    assert "a.parquet: streamed, shuffled within blocks of 3 samples" in capsys.readouterr().out
    ranks(with_small_blocks, 2, [*SMALL, *data, *schedule, *common, "--pp", "2", "--steps", "3"])
    resumed = [*common, "--load", str(saved)]
    ranks(with_small_blocks, 2, [*resumed, "--dp", "2", "--data-workers", "0", "--steps", "6"])
    positions = [source["position"] for source in Checkpoint(saved).trainer["data"]]
    # 48 samples of the blend are 19 and 29 of the sources. Rank 0 has read its own half of them.
    assert 19 - 8 < positions[0]["sample"] <= 19
    assert 29 - 8 < positions[1]["sample"] <= 29
    read_from = []
    read = streaming.StreamedTexts._read_blocks
    monkeypatch.setattr(
        streaming.StreamedTexts,
        "_read_blocks",
        lambda dataset, start: read_from.append(start.sample) or read(dataset, start),
    )
    with_small_blocks([*resumed, "--data-workers", "3", "--steps", "9"])
    assert read_from[:2] == [position["sample"] for position in positions]
    assert close(losses(metrics), losses(straight))


def test_epochs_of_a_stream_are_refused(data):
    with pytest.raises(UserError, match=r"the number of samples of .*a\.parquet is"):
        pretrain.main([*SMALL, *data, "--epochs", "2"])


def test_changed_files_are_warned_of(data, tmp_path, capsys):
    saved = tmp_path / "run"
    with_small_blocks([*SMALL, *data, "--steps", "2", "--save", str(saved)])
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with_small_blocks(["--load", str(saved), "--device", "cpu", "--steps", "3"])
    assert "b.jsonl has changed since the checkpoint" in capsys.readouterr().err
