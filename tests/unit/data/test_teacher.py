"""Files of a teacher's most likely tokens: their windows are those of evaluation, and bad lines are
refused."""

import gzip
import json

import numpy as np
import pytest

from megazoo.data.samples import UNCHECKED, Vocabulary
from megazoo.data.sources import source_named
from megazoo.data.teacher import TopTokens, Windows, cached_top_tokens
from megazoo.data.texts import TextFile
from megazoo.errors import UserError
from megazoo.evaluation.scoring import windows

LENGTHS, K, FIRST, LENGTH = (9, 0, 1, 4, 12, 5), 2, 99, 4


def lines() -> list[dict]:
    """Documents of these lengths. Each token and each most likely token occurs once."""
    numbers, found = iter(range(100, 1000)), []
    for length in LENGTHS:
        tokens = [next(numbers) for _ in range(length)]
        ids = [[next(numbers) for _ in range(K)] for _ in tokens]
        logprobs = [[-1 - token / 1000, -2.0] for token in tokens]
        found.append({"tokens": tokens, "top_ids": ids, "top_logprobs": logprobs})
    return found


def written(path, rows) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def source_of(name: str):
    return source_named(name).resolved()


@pytest.mark.parametrize("name", ["top.jsonl", "top.jsonl.gz"])
@pytest.mark.parametrize("part", [(0, 6), (1, 5), (1, 2)])
def test_windows_are_those_of_evaluation(name, part, tmp_path):
    source = source_of(written(tmp_path / name, lines()))
    assert type(source) is TopTokens
    for _ in "wr":  # the second call reads what the first wrote
        arrays = cached_top_tokens(source.path)
    found = Windows(arrays, *part, LENGTH, FIRST, UNCHECKED, "it")
    expected = [
        (line, ids, context)
        for line in lines()[slice(*part)]
        for ids, context in windows([FIRST, *line["tokens"]], LENGTH, LENGTH)
    ]
    assert len(found) == len(expected)
    for number, (line, ids, context) in enumerate(expected):
        sample = found[number]
        assert sample.input_ids.tolist() == ids[:-1]
        assert sample.targets.tolist() == [-100] * (context - 1) + ids[context:]
        assert found.tokens_of(number) == len(ids) - 1
        places = [line["tokens"].index(token) for token in ids[1:]]
        assert sample.named["teacher_ids"].tolist() == [line["top_ids"][at] for at in places]
        logprobs = np.float32([line["top_logprobs"][at] for at in places])
        assert np.array_equal(sample.named["teacher_logprobs"], logprobs)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("top_ids", [[1, 2], [3]], "top_ids has lists of different lengths: use the same K"),
        ("tokens", [1, 2, 3], r"tokens \[3\], top_ids \[4, 2\], top_logprobs \[4, 2\]: use \[tok"),
        ("top_logprobs", [[-1.0]] * 4, r"top_ids \[4, 2\], top_logprobs \[4, 1\]: use"),
        ("top_logprobs", [[-1.0, 0.5]] * 4, "has 0.5: it must have finite numbers of at most 0"),
        ("top_logprobs", [[-1.0, float("nan")]] * 4, "has nan: it must have finite numbers of at"),
        ("top_logprobs", [[-float("inf"), -1.0]] * 4, "has -inf: it must have finite numbers of"),
        ("top_logprobs", [[-0.1, -0.2]] * 4, "add up to 1.724: use at most 1"),
        ("top_logprobs", [["a", "b"]] * 4, "top_logprobs must be a list of numbers"),
        ("top_ids", [[7, 7]] * 4, "top_ids has the token 7 twice in place of one token"),
        ("top_ids", [[1, -1]] * 4, "top_ids has -1: token ids are from 0 to 2147483647"),
        ("top_ids", [[1, 1 << 31]] * 4, "top_ids has 2147483648: token ids are from 0"),
        ("top_ids", [[1, 2.5]] * 4, "top_ids must be a list of token ids"),
        ("tokens", None, "tokens must be a list of token ids"),
    ],
)
def test_bad_lines_are_refused(key, value, line, tmp_path):
    rows = lines()
    rows[3][key] = value
    path = tmp_path / "top.jsonl"
    with pytest.raises(UserError, match=f"top.jsonl, line 4: .*{line}"):
        cached_top_tokens(source_of(written(path, rows)).path)


def test_k_is_the_same_in_all_lines_and_there_are_tokens(tmp_path):
    rows = lines()
    rows[4] = {"tokens": [1], "top_ids": [[1, 2, 3]], "top_logprobs": [[-2.0, -2.0, -2.0]]}
    with pytest.raises(UserError, match="line 5: K is 3, but 2 in the lines before: use the same"):
        cached_top_tokens(source_of(written(tmp_path / "a.jsonl", rows)).path)
    with pytest.raises(UserError, match="has no tokens"):
        cached_top_tokens(source_of(written(tmp_path / "b.jsonl", lines()[1:2])).path)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "top_ids.bin", "top_logprobs.bin"])
@pytest.mark.parametrize("size", [None, -12, 20])
def test_damaged_arrays_are_written_again(name, size, tmp_path):
    path = source_of(written(tmp_path / "top.jsonl", lines())).path
    cached_top_tokens(path)
    (file,) = tmp_path.glob(f"top.jsonl.tokens/*_{name}")
    before = file.read_bytes()
    file.unlink() if size is None else file.write_bytes((before + bytes(20))[: len(before) + size])
    arrays, expected = cached_top_tokens(path), lines()
    assert [arrays.tokens[number].tolist() for number in range(6)] == [
        line["tokens"] for line in expected
    ]
    assert arrays.ids.tolist() == [ids for line in expected for ids in line["top_ids"]]
    top = [each for line in expected for each in line["top_logprobs"]]
    assert np.array_equal(arrays.logprobs, np.float32(top))


def test_other_files_are_read_as_before(tmp_path):
    for number, row in enumerate(({"text": "a"}, {"tokens": [1], "logprobs": [-1.0]})):
        assert type(source_of(written(tmp_path / f"{number}.jsonl", [row]))) is TextFile


@pytest.mark.parametrize("size", [110, 120])
def test_tokens_outside_the_vocabulary_are_refused(size, tmp_path):
    arrays = cached_top_tokens(source_of(written(tmp_path / "a.jsonl", lines())).path)
    found = Windows(arrays, 0, 1, LENGTH, FIRST, Vocabulary(size), "it")
    with pytest.raises(UserError, match=f"in document 1 is outside the vocabulary of {size}"):
        _ = [found[number] for number in range(len(found))]
