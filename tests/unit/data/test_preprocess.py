"""From text to token files: what is written reads back exactly, in every form of input, after an
interruption too."""

import gzip
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import zstandard

from megazoo.cli.prompts import read_prompts
from megazoo.data import preprocess as module
from megazoo.data.indexed import IndexedTokens
from megazoo.data.preprocess import Recipe, input_files, preprocess
from megazoo.errors import UserError
from megazoo.programs import compare_hf, evaluate, preprocess_data
from megazoo.tokenizer import ByteTokenizer
from tests.support.inference import run_main
from tests.support.sampling import marked_slow

ROOT = Path(__file__).parents[3]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of many lengths, with all kinds of characters."""
    generator = random.Random(seed)
    letters = "abc \n\t\r\u2028é☃🙂\0"
    return ["".join(generator.choices(letters, k=generator.randint(0, 60))) for _ in range(count)]


def write_jsonl(path: Path, documents: list[str], **more) -> Path:
    path.write_text(
        "".join(json.dumps({"text": text, **more}, ensure_ascii=False) + "\n" for text in documents)
    )
    return path


def read_back(prefix) -> list[str]:
    tokens = IndexedTokens(prefix)
    assert tokens.documents.tolist() == list(range(len(tokens) + 1))
    assert len(tokens.tokens) == tokens.lengths.sum()
    return [ByteTokenizer().decode(tokens[i]) for i in range(len(tokens))]


def run(monkeypatch, capsys, *arguments):
    """Run the tool; returns its exit code, what it printed, and its errors."""
    return run_main(preprocess_data, monkeypatch, capsys, *arguments)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1000)
    monkeypatch.setattr(module, "SAVED_EVERY", 1)


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_read_back_in_their_order(tmp_path, monkeypatch, capsys, small_chunks, workers):
    documents = texts(300)
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    arguments = ["--input", source, "--output-prefix", tmp_path / "out" / "a", "--append-eod"]
    code, told, errors = run(monkeypatch, capsys, *arguments, "--workers", workers)
    assert code == 0, errors
    kept = [text for text in documents if text]
    assert read_back(tmp_path / "out" / "a_text_document") == kept
    tokens = IndexedTokens(tmp_path / "out" / "a_text_document")
    assert all(tokens[i][-1] == 256 for i in range(len(tokens)))
    assert (
        f"{len(kept):,} documents, {sum(len(text.encode()) + 1 for text in kept):,} tokens (uint16)"
        in told
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "a_text_document.bin",
        "a_text_document.idx",
    ]


def test_every_form_of_input(tmp_path, small_chunks):
    parts = [texts(80, seed) for seed in range(4)]
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [write_jsonl(tmp_path / "lines", part).read_bytes() for part in parts]
    (folder / "0.jsonl").write_bytes(lines[0].rstrip(b"\n"))  # no end of the last line
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(lines[1]))
    half = lines[2].index(b"\n", len(lines[2]) // 2) + 1
    (folder / "2.json.zst").write_bytes(
        b"".join(map(zstandard.compress, (lines[2][:half], lines[2][half:])))
    )
    (folder / "deeper").mkdir()
    (folder / "deeper" / "3.txt").write_text("one document\n\nof two lines")
    recipe = Recipe(input_files([folder, write_jsonl(tmp_path / "4.jsonl", parts[3])]), "byte")
    done = preprocess(recipe, tmp_path / "out", 2)
    expected = [text for text in [*parts[0], *parts[1], *parts[2]] if text]
    expected += ["one document\n\nof two lines", *filter(None, parts[3])]
    assert read_back(tmp_path / "out_text_document") == expected
    assert (done.documents, done.bad) == (4 * 80 + 1, 0)


def test_each_key_makes_files_of_its_own(tmp_path, monkeypatch, capsys):
    lines = [{"title": f"title {i}", "text": f"text {i}"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "a"]
    assert run(monkeypatch, capsys, *arguments, "--json-keys", "text", "title")[0] == 0
    for key in ("text", "title"):
        assert read_back(tmp_path / f"a_{key}_document") == [line[key] for line in lines]


def test_token_files_in_a_folder_are_no_text(tmp_path):
    """They would read as text: bytes as uint16 are UTF-8 with zeros in between."""
    write_jsonl(tmp_path / "a.JSONL", ["a", "b"])
    (tmp_path / "a.JSONL.tokens").mkdir()
    preprocess(Recipe(input_files([tmp_path]), "byte"), tmp_path / "a.JSONL.tokens" / "0123", 0)
    for _ in range(2):
        preprocess(Recipe(input_files([tmp_path]), "byte"), tmp_path / "out", 0)
        assert read_back(tmp_path / "out_text_document") == ["a", "b"]


def test_a_worker_that_dies_is_told_in_one_line(tmp_path, monkeypatch):
    def die(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(ProcessPoolExecutor, "submit", die)
    source = write_jsonl(tmp_path / "a.jsonl", texts(10))
    with pytest.raises(UserError, match="a worker process died"):
        preprocess(Recipe((str(source),), "byte"), tmp_path / "out", 1)


def test_two_runs_do_not_write_the_same_files(tmp_path):
    recipe = Recipe((str(write_jsonl(tmp_path / "a.jsonl", ["a"])),), "byte")

    def again(_):
        with pytest.raises(
            UserError, match=r"out_text_document\.bin\.partial: another run is writing it"
        ):
            preprocess(recipe, tmp_path / "out", 0)

    preprocess(recipe, tmp_path / "out", 0, progress=again)
    assert read_back(tmp_path / "out_text_document") == ["a"]


class Interrupted(Exception):
    pass


def stopping():
    """Return a function that ends a run at its third sign of progress."""
    seen = []

    def progress(_):
        seen.append(1)
        if len(seen) == 3:
            raise Interrupted

    return progress


PACKED = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}


@pytest.mark.parametrize(
    ("suffix", "workers"),
    marked_slow(
        [(suffix, workers) for workers in (0, 1) for suffix in PACKED],
        lambda _, case: case[1] == 1,
    ),
)
def test_what_was_interrupted_goes_on_where_it_stood(tmp_path, small_chunks, suffix, workers):
    files = []
    for number in range(2):
        data = write_jsonl(tmp_path / "lines", texts(200, seed=number)).read_bytes()
        files.append(tmp_path / f"{number}.{suffix}")
        files[-1].write_bytes(PACKED[suffix](data))
    recipe = Recipe(input_files(files), "byte", append_eod=True)
    runs, chunks, done = 0, [], None
    while done is None:
        stop = stopping()

        def progress(part, stop=stop):
            chunks.append(1)
            stop(part)

        try:
            done = preprocess(recipe, tmp_path / "out", workers, progress=progress)
        except Interrupted:
            runs += 1
            assert not (tmp_path / "out_text_document.bin").exists()
            with open(tmp_path / "out_text_document.bin.partial", "ab") as file:
                file.write(b"half a document")  # what a kill leaves behind the last save
    assert runs > 3
    assert done.documents == 400
    preprocess(recipe, tmp_path / "straight", workers)
    for ending in ("bin", "idx"):
        again, straight = (
            tmp_path / f"{name}_text_document.{ending}" for name in ("out", "straight")
        )
        assert again.read_bytes() == straight.read_bytes()
    assert len(chunks) < 3 * runs + 2 * (tmp_path / "lines").stat().st_size / 1000 + 10


def test_progress_without_its_files_or_of_another_recipe_starts_anew(tmp_path, small_chunks):
    """Zeros must never stand for what is gone."""
    source, kept = write_jsonl(tmp_path / "a.jsonl", texts(200)), [*filter(None, texts(200))]
    recipe = Recipe((str(source),), "byte")
    partial = tmp_path / "out_text_document.bin.partial"
    for lost, again in ((True, recipe), (False, Recipe((str(source),), "byte", append_eod=True))):
        with pytest.raises(Interrupted):
            preprocess(recipe, tmp_path / "out", 1, progress=stopping())
        assert partial.exists()
        if lost:
            partial.unlink()
        preprocess(again, tmp_path / "out", 1)
        assert read_back(tmp_path / "out_text_document") == kept
        assert (IndexedTokens(tmp_path / "out_text_document")[0][-1] == 256) != lost
        for ending in ("bin", "idx"):
            (tmp_path / f"out_text_document.{ending}").unlink()


def test_bad_lines_are_counted_and_told_with_their_numbers(
    tmp_path, monkeypatch, capsys, small_chunks
):
    lines = [json.dumps({"text": f"document {i} " + "x" * 200}) for i in range(40)]
    lines[3], lines[17], lines[29] = "{", '{"other": 1}', '{"text": "\\ud800"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    arguments = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "a", "--workers", 2]
    code, told, errors = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "skipped 3 lines without text" in told
    for number, reason in {
        4: "Expecting property name",
        18: "no text under 'text'",
        30: "not Unicode",
    }.items():
        assert f"a.jsonl, line {number}: " in errors + told
        assert reason in errors + told
    assert len(read_back(tmp_path / "a_text_document")) == 37
    code, _, errors = run(monkeypatch, capsys, *arguments, "--overwrite", "--strict")
    assert (code, errors.count("\n")) == (1, 1)
    assert "a.jsonl, line 4: " in errors


def test_the_tool_and_its_workers_do_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    source = write_jsonl(tmp_path / "a.jsonl", texts(50))
    command = [sys.executable, "tools/preprocess_data.py", "--input", source]
    command += ["--output-prefix", tmp_path / "a"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert read_back(tmp_path / "a_text_document") == [text for text in texts(50) if text]


def test_mistakes_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-20])
    (tmp_path / "broken.jsonl.zst").write_bytes(b"nonsense")
    (tmp_path / "cut.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "a"}\n' * 99)[:-1])
    (tmp_path / "folder").mkdir()
    (tmp_path / "there_text_document.bin").write_bytes(b"")
    out, there = tmp_path / "out", tmp_path / "there"
    for output, data, more, code, message in [
        (out, tmp_path / "none", [], 2, "none: no such file"),
        (out, tmp_path / "folder", [], 2, "folder has no text files"),
        (out, source, ["--tokenizer", "bpe"], 2, "unknown tokenizer 'bpe'"),
        (out, source, ["--workers", 0], 2, "--workers 0 must be at least 1"),
        (out, source, ["--json-keys", "a", "a"], 2, "json-keys must be one or more different"),
        (there, source, [], 2, "use --overwrite to replace them"),
        (out, tmp_path / "broken.jsonl.gz", [], 1, "broken.jsonl.gz can't be read: "),
        (out, tmp_path / "broken.jsonl.zst", [], 1, "broken.jsonl.zst can't be read: "),
        (out, tmp_path / "cut.jsonl.zst", [], 1, "cut.jsonl.zst can't be read: Compressed file en"),
        (source / "out", source, [], 1, "a.jsonl can't be written: File exists"),
    ]:
        arguments = ["--input", data, "--output-prefix", output, *more]
        got, _, told = run(monkeypatch, capsys, *arguments)
        assert (got, told.count("\n"), message in told) == (code, 1, True), told
    code, _, told = run(monkeypatch, capsys)
    assert (code, told.count("\n")) == (2, 1)
    assert "--input and --output-prefix are required" in told


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Some editors write one before UTF-8, in a text and in the first line of JSONL."""
    marked, line = tmp_path / "a.txt", tmp_path / "a.jsonl"
    marked.write_text("a text\n", encoding="utf-8-sig")
    line.write_text('{"text": "a line"}\n', encoding="utf-8-sig")
    preprocess(Recipe((str(marked), str(line)), "byte"), tmp_path / "out", 0)
    assert read_back(tmp_path / "out_text_document") == ["a text\n", "a line"]
    assert evaluate.read_texts(marked, "text") == [compare_hf.read_text(marked)] == [b"a text\n"]
    assert [prompt.text for prompt in read_prompts(marked)] == ["a text"]
