"""JSONL is trained on, and its tokens are kept beside it."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megazoo.data import preprocess as preprocessing
from megazoo.data.cache import cached_tokens
from megazoo.data.conversations import CHATML
from megazoo.errors import UserError
from megazoo.tokenizer import ByteTokenizer
from tests.support.data import open_all, write_lines
from tests.support.programs import python

ROOT = Path(__file__).parents[3]


def test_texts_of_jsonl_are_trained_on_and_their_tokens_kept(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"line {n}"} for n in range(100)))
    for _ in range(2):
        train, valid, _ = open_all(path, split="90,10", seq_length=8)
        ours, held_out = (blend.datasets[0].tokens[:] for blend in (train, valid))
        assert bytes(ours[ours < 256].astype(np.uint8)).startswith(b"line 0line 1")
        assert (ours == 256).sum() == 90
        assert (held_out == 256).sum() == 10
        monkeypatch.setattr(
            "megazoo.data.cache.preprocess", lambda *_, **__: pytest.fail("made again")
        )
    monkeypatch.undo()
    # another text, of another or the same size
    for lines in ([{"text": "another"}, {"text": "now"}], [{"text": "Another"}, {"text": "now"}]):
        write_lines(path, *lines)
        os.utime(path, (1, ord(lines[0]["text"][0])))
        (tokens,) = cached_tokens(path, "byte", CHATML)
        assert ByteTokenizer().decode(tokens.tokens) == "".join(line["text"] for line in lines)


def _count_what_is_made(path, made):
    preprocess = preprocessing.preprocess

    def counted(*arguments, **settings):
        with made.get_lock():
            made.value += 1
        return preprocess(*arguments, **settings)

    sys.modules["megazoo.data.cache"].preprocess = counted
    (tokens,) = cached_tokens(path, "byte", CHATML)
    assert len(tokens) == 2000


def test_the_tokens_are_made_once_however_many_processes_start_at_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"line {n}"} for n in range(2000)))
    fork = multiprocessing.get_context("fork")
    made = fork.Value("i", 0)
    processes = [fork.Process(target=_count_what_is_made, args=(path, made)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(280)
    assert [process.exitcode for process in processes] == [0] * 6
    assert made.value == 1


WAITING = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from megazoo.parallel.startup import after_rank_zero
made, work, timeout = sys.argv[1], *map(float, sys.argv[2:])
store = after_rank_zero(lambda: (time.sleep(work), open(made, "w").close()))
assert os.path.exists(made)
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
dist.barrier()
"""


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param("0", id="rank 0's store"),
        pytest.param("1", id="torchrun's store", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("work", "timeout"), [("0.5", "100"), pytest.param("12", "10", marks=pytest.mark.slow)]
)
def test_ranks_wait_for_the_tokens_before_they_meet(tmp_path, agent, work, timeout):
    """Where that takes longer than they wait for each other, too."""
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    (tmp_path / "waiting.py").write_text(WAITING)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(1 - int(agent)),
    }
    done = subprocess.run(
        [*command, tmp_path / "waiting.py", tmp_path / "made", work, timeout],
        env=environment,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr.decode()


LINES = {
    "a.jsonl, line 3: no text under 'text'": [{"text": "a"}, {"text": "b"}, {"txt": "c"}],
    "a.jsonl, line 2: it needs text, or .*; its keys are: 'prompt'": [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a"},
    ],
    "a.jsonl, line 1: it needs text, or prompt and completion, or messages": [{"txt": "a"}],
    "a.jsonl, item 1: not a JSON object": [["text"]],
    "a.jsonl, line 2: messages is not a list": [
        {"messages": [dict(role="assistant", content="b")]},
        {"messages": 3},
    ],
}


def test_a_line_without_its_key_is_told_with_its_number(tmp_path):
    for message, lines in LINES.items():
        path = write_lines(tmp_path / "a.jsonl", *lines)
        with pytest.raises(UserError, match=message):
            open_all(path, chat_template="chatml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_can_not_be_written_is_told(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "a"})
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"can't be written to .*: Permission denied; use"):
        open_all(path)


def test_a_file_where_the_tokens_should_be_is_told(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "a.jsonl.tokens").touch()
    with pytest.raises(UserError, match="can't be written to"):
        open_all(path)


def test_links_are_never_written_through(tmp_path, monkeypatch):
    """Whoever can write beside the data can put a link where its tokens are about to be written."""
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"line {n}"} for n in range(9)))
    made, victim = tmp_path / "made.jsonl", tmp_path / "thesis.txt"
    made.write_bytes(path.read_bytes())
    os.utime(made, ns=(os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns))
    cached_tokens(made, "byte", CHATML)
    (lock,) = Path(f"{made}.tokens").glob("*.lock")
    monkeypatch.setattr(preprocessing, "SAVED_EVERY", 1)
    directory = Path(f"{path}.tokens")
    directory.mkdir()
    for end in (".lock", *(end for end in preprocessing.WRITTEN if "partial" in end)):
        end = end if end[0] == "." else f"_text{end}"
        link = directory / f"{lock.stem}{end}"
        victim.write_text("years of work")
        link.symlink_to(victim)
        with pytest.raises(UserError) as caught:
            cached_tokens(path, "byte", CHATML)
        problem = "is a symbolic link, and writing to it would overwrite another file"
        assert str(caught.value) == f"{link} {problem}: remove the link"
        assert victim.read_text() == "years of work"
        link.unlink()
    (directory / lock.name).unlink()
    os.mkfifo(directory / lock.name)
    with pytest.raises(UserError, match=f"{lock.name} is not a file: remove it"):
        cached_tokens(path, "byte", CHATML)
    (directory / lock.name).unlink()
    (tokens,) = cached_tokens(path, "byte", CHATML)
    assert len(tokens) == 9
