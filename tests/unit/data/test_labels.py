"""Rows of a classifier's data: their tokens, how they are cut and padded, their labels, and lines
that can't be."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizer

from megazoo.data import Batches, check_data
from megazoo.data.cache import cached_tokens
from megazoo.data.labels import Labels, encode_texts, kept_tokens, labels_in, labels_of
from megazoo.errors import UserError
from megazoo.parallel import ParallelContext
from megazoo.tokenizer import ByteTokenizer
from tests.support.data import open_all, write_lines

EOD, PAD = 256, 300
TWO = Labels(2, "single_label_classification")
ANY = Labels(3, "multi_label_classification")
NUMBER = Labels(1, "regression")
NUMBERS = Labels(2, "regression")


class WithBos(ByteTokenizer):
    """Bytes, with 301 before each text."""

    before = (301,)


class Plain(PreTrainedTokenizer):
    """As little of a tokenizer of transformers as it takes to cut two lists of ids."""

    vocab_size = 1

    def get_vocab(self):
        return {}


def rows_of(count=20):
    """Rows of many lengths, every third with a second text, every fifth with an empty one."""
    rows = [{"text": "abcdefg"[: n % 7] + "h", "label": n % 2} for n in range(count)]
    for n, row in enumerate(rows):
        if n % 3 == 0:
            row["text_pair"] = "" if n % 5 == 0 else "z" * n
    return rows


def expected_ids(row, seq_length, before=()):
    """The ids of a row, by hand: one after the other is taken from the end of the longer text."""
    texts = [list(row["text"].encode()), list(row.get("text_pair", "").encode())]
    between = [EOD] if "text_pair" in row else []
    while sum(map(len, texts)) + len(before) + len(between) > seq_length:
        texts[0 if len(texts[0]) > len(texts[1]) else 1].pop()
    return [*before, *texts[0], *between, *texts[1]]


def test_texts_are_encoded_as_text_with_the_end_of_a_document_between_two():
    assert encode_texts(ByteTokenizer(), {"text": "ab"}) == ([97, 98], [])
    pair = {"text": "a", "text_pair": "b"}
    assert encode_texts(WithBos(), pair) == ([301, 97], [EOD, 98])
    assert encode_texts(WithBos(), {"text": ""}) == ([301], [])
    alone = {"text": "ab", "text_pair": None}  # as data frames write it
    assert encode_texts(ByteTokenizer(), alone) == ([97, 98], [])
    assert encode_texts(ByteTokenizer(), {"text": "", "text_pair": ""}) == ([], [EOD])


def test_rows_are_cut_as_transformers_cuts_the_longest_first():
    plain = Plain()
    for seq_length, first, second in product(range(6, 14), range(12), range(12)):
        ids, pair = list(range(first)), list(range(second))
        remove = max(0, first + second + 2 - seq_length)
        left, right, _ = plain.truncate_sequences(
            ids, pair, num_tokens_to_remove=remove, truncation_strategy="longest_first"
        )
        kept = kept_tokens(np.array([first + 1]), np.array([second + 1]), 1, seq_length)
        found = (kept[0].item(), kept[1].item())
        assert found == (len(left) + 1, len(right) + 1), (seq_length, first, second)
        alone = kept_tokens(first + 1, 0, 1, seq_length)
        assert tuple(map(int, alone)) == (min(first + 1, seq_length), 0)
    # the smallest rows keep what fits
    for first, second, before, length in [(1, 3, 1, 1), (1, 3, 1, 2), (4, 0, 1, 1), (0, 3, 0, 1)]:
        kept = kept_tokens(first, second, before, length)
        assert min(kept) >= 0
        assert 1 <= sum(kept) <= length


@pytest.mark.parametrize("seq_length", [4, 9, 64])
def test_batches_are_padded_with_the_pad_token_and_replicas_have_their_rows(tmp_path, seq_length):
    rows, said = rows_of(), []
    path = write_lines(tmp_path / "a.jsonl", *rows)
    settings = {"split": "50,50", "seq_length": seq_length, "labels": TWO, "report": said.append}
    blend = open_all(path, **settings).validation
    wanted = [expected_ids(row, seq_length) for row in rows[10:]]
    for layout in ({}, {"dp": 2}, {"cp": 2}, {"dp": 2, "cp": 2}):
        dp = layout.get("dp", 1)
        for rank in range(dp):
            ctx = ParallelContext.virtual(rank=rank * layout.get("cp", 1), **layout)
            batch = Batches(blend, 10, ctx, PAD)(0)
            mine = slice(rank * 10 // dp, (rank + 1) * 10 // dp)
            longest = max(map(len, wanted[mine]))
            padded = [ids + [PAD] * (longest - len(ids)) for ids in wanted[mine]]
            assert set(batch) == {"input_ids", "labels"}
            assert batch["input_ids"].tolist() == padded
            assert batch["labels"].tolist() == [row["label"] for row in rows[10:][mine]]
            assert batch["labels"].dtype == batch["input_ids"].dtype == torch.int64
            marked = Batches(blend, 10, ctx, PAD, mark_padding=True)(0)["document_ids"]
            assert [row.count(0) for row in marked.tolist()] == [len(ids) for ids in wanted[mine]]
            assert Batches(blend, 10, ctx, PAD).tokens(0) == sum(map(len, wanted))
    cut = sum(len(expected_ids(row, 999)) > seq_length for row in rows)
    told = f"{path}: {cut} rows are longer than --seq-length {seq_length} and are truncated"
    assert said == ([told] if cut else [])
    with pytest.raises(UserError, match="rows need a pad_token_id"):
        Batches(blend, 10, ParallelContext())(0)


@pytest.mark.parametrize("tokenizer", ["uint16", "int32"])
def test_labels_come_back(tmp_path, monkeypatch, tokenizer):
    if tokenizer == "int32":
        monkeypatch.setattr(ByteTokenizer, "vocab_size", 100_000)
    for labels, values, dtype in [
        (TWO, [1, 0, 1], torch.int64),
        (Labels(1 << 20, TWO.problem), [(1 << 20) - 1, 0, 65536], torch.int64),
        (NUMBER, [0.1, -100, 1e30], torch.float32),
        (NUMBERS, [[0.1, 3], [-1, 2.5], [0, 0]], torch.float32),
        (ANY, [[0, 1, 1], [0, 0, 0], [1.0, 1, 0]], torch.float32),
    ]:
        rows = [{"text": "a" * n, "label": value} for n, value in enumerate(values, 1)]
        path = write_lines(tmp_path / f"{labels}.jsonl", *rows)
        blend = open_all(path, split="100,0", labels=labels)
        batch = Batches(blend.training, 3, ParallelContext(), PAD)(0)
        found = batch["labels"]
        order = (batch["input_ids"] != PAD).sum(1) - 1  # a row is as long as its number
        wanted = torch.tensor(values, dtype=dtype)[order]
        assert found.dtype == dtype
        assert torch.equal(found, wanted.view(found.shape)), labels
        assert found.dim() == (1 if labels.problem == TWO.problem else 2)


BAD = {
    "no JSON": (TWO, "nonsense", "Expecting value"),
    "a list": (TWO, "[1]", "not a JSON object"),
    "no label": (TWO, '{"text": "a"}', "it has no label"),
    "no text": (TWO, '{"label": 1}', "no text under 'text'"),
    "a text that is a number": (TWO, '{"text": 3, "label": 1}', "no text under 'text'"),
    "a number for a pair": (TWO, '{"text": "a", "text_pair": 3, "label": 1}', "under 'text_pair'"),
    "null for a text": (TWO, '{"text": null, "label": 1}', "no text under 'text'"),
    "empty": (TWO, '{"text": "", "label": 1}', "its text has no tokens"),
    "a surrogate": (TWO, '{"text": "\\ud800", "label": 1}', "the text is not Unicode"),
    "too large": (TWO, '{"text": "a", "label": 2}', "label 2 is not a whole number from 0 to 1"),
    "below 0": (TWO, '{"text": "a", "label": -1}', "label -1 is not a whole number"),
    "ignored": (TWO, '{"text": "a", "label": -100}', "label -100 is not a whole number"),
    "a fraction": (
        TWO,
        '{"text": "a", "label": 1.0}',
        "label 1.0 is not an integer from 0 to 1 (as 1, not 1.0)",
    ),
    "half": (TWO, '{"text": "a", "label": 0.5}', "label 0.5 is not a whole number from 0 to 1"),
    "a truth": (TWO, '{"text": "a", "label": true}', "label true is not a whole number"),
    "a word": (TWO, '{"text": "a", "label": "good"}', 'label "good" is not a whole number'),
    "a list for one": (TWO, '{"text": "a", "label": [1]}', "label [1] is not a whole number"),
    "nothing": (NUMBER, '{"text": "a", "label": null}', "label null is not a number"),
    "not a number": (NUMBER, '{"text": "a", "label": NaN}', "label NaN is not a number"),
    "infinite": (NUMBER, '{"text": "a", "label": 1e999}', "label Infinity is not a number"),
    "huge": (NUMBER, '{"text": "a", "label": 1' + "0" * 400 + "}", "000... is not a number"),
    "a list of one": (NUMBER, '{"text": "a", "label": [1]}', "label [1] is not a number"),
    "one of two": (NUMBERS, '{"text": "a", "label": [1]}', "is not a list of 2 numbers"),
    "two of three": (ANY, '{"text": "a", "label": [1, 0]}', "label [1, 0] is not a list of 3"),
    "neither": (ANY, '{"text": "a", "label": [1, 0, 2]}', "is not a list of 3 numbers, each 0 or"),
    "truths": (ANY, '{"text": "a", "label": [true, false, true]}', "is not a list of 3 numbers"),
    "one index": (ANY, '{"text": "a", "label": 1}', "label 1 is not a list of 3 numbers"),
}
GOOD = {TWO: 0, NUMBER: 0.5, NUMBERS: [1, 2], ANY: [0, 1, 0]}


def test_a_bad_line_is_named(tmp_path):
    for name, (labels, line, message) in BAD.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"text": "a", "label": GOOD[labels]}) + "\n\n" + line + "\n")
        with pytest.raises(UserError, match=f"^{re.escape(f'{path}, line 3: ')}") as error:
            cached_tokens(path, "byte", "", labels)
        assert message in str(error.value), name
        assert "\n" not in str(error.value)


def test_tokens_are_kept_under_a_name_of_the_labels(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *({"text": "a", "label": 0} for _ in range(3)))
    for labels in (TWO, Labels(3, TWO.problem), NUMBER, TWO, None):
        cached_tokens(path, "byte", "", labels)
    names = {file.name[:16] for file in Path(f"{path}.tokens").glob("*.idx")}
    assert len(names) == 4


def test_the_first_label_says_what_the_problem_is_as_in_transformers(tmp_path):
    assert labels_of(1, None) == NUMBER
    assert labels_of(3, None, [0, 1, 1]) == ANY
    assert labels_of(2, None, 1) == labels_of(2, None) == TWO
    assert labels_of(2, "regression", 1) == NUMBERS
    one = write_lines(tmp_path / "a.jsonl", {"text": "a", "label": [0, 1, 1]})
    assert labels_in(["mock", str(one)], 3, None) == ANY
    assert labels_in(["mock"], 2, None) == TWO


def test_data_without_labels_is_refused_for_a_classifier(tmp_path):
    chats = write_lines(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"})
    texts = write_lines(tmp_path / "b.jsonl", {"text": "a"})
    wanted = "a classifier of 2 labels needs JSONL with text and label in each line"
    for name, where in {
        "stdlib": "data stdlib",
        "out/a_text_document": "data out/a_text_document",
        str(chats): f"{chats}, line 1",
        str(texts): f"{texts}, line 1",
    }.items():
        with pytest.raises(UserError) as error:
            labels_in([name], 2, None)
        assert str(error.value) == f"{where}: {wanted}"


def test_labels_are_ignored_by_a_language_model(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *({"text": "ab", "label": 1} for _ in range(9)))
    assert open_all(path, split="100,0", seq_length=3).training.samples(0, 1)[0].targets is not None


def test_sources_are_blended_and_random_rows_are_drawn(tmp_path):
    a = write_lines(tmp_path / "a.jsonl", *({"text": "a", "label": 0} for _ in range(8)))
    b = write_lines(tmp_path / "b.jsonl", *({"text": "b", "label": 1} for _ in range(8)))
    parts = open_all(0.75, a, 0.25, b, split="50,25,25", labels=TWO)
    rows = list(parts.training.samples(0, 40))
    assert sum(int(row.label) for row in rows) == 10
    assert all(chr(row.input_ids[0]) == "ab"[row.label] for row in rows)
    assert [len(part) for part in parts] == [8, 4, 4]
    for labels in (TWO, ANY, NUMBER):
        mock = open_all("mock", split="50,50", seq_length=8, labels=labels)
        batch = Batches(mock.training, 32, ParallelContext(), PAD)(0)
        drawn = batch["labels"]
        assert batch["input_ids"].shape == (32, 8)
        assert drawn.shape == ((32,) if labels is TWO else (32, labels.num_labels))
        assert len(drawn.unique()) == (32 if labels is NUMBER else 2)


def test_a_part_without_rows_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "a", "label": 0})
    assert check_data([str(path)], "95,5")
    with pytest.raises(UserError, match="leaves no validation sample"):
        open_all(path, labels=TWO)
