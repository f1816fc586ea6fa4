"""Tensor files are read by several threads, and what was read leaves memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megazoo.checkpoint import tensor_files
from megazoo.checkpoint.tensor_files import TensorFiles
from tests.support.training import give_back_freed_memory, in_fresh_processes


class SlowFile:
    """A file whose names a second thread asks for while the first one reads them."""

    def __init__(self, ask):
        self.ask = ask

    def keys(self):
        self.ask()
        return ["weight"]


def test_a_file_is_opened_by_two_threads():
    found, asked = [], threading.Event()

    def ask():
        if not asked.is_set():
            asked.set()
            second = threading.Thread(target=lambda: found.append(files.names("a")))
            second.start()
            second.join(10)

    files = TensorFiles(Path(), lambda *_: SlowFile(ask))
    assert files.names("a") == {"weight"}
    assert found == [{"weight"}]


def test_threads_read_a_file_that_is_mapped_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "MAPPED", 1000)
    tensors = {str(n): torch.arange(n, n + 300) for n in range(50)}
    save_file(tensors, tmp_path / "a.safetensors")
    files = TensorFiles(tmp_path)

    def is_equal(name: str) -> bool:
        return torch.equal(files.box("a.safetensors", name, (300,), ((0, 300),)), tensors[name])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_equal, [*tensors] * 4))


def mapped_after_reading(directory: Path) -> int:
    """The bytes of files in this process's memory that reading a file of 192 MB adds."""
    give_back_freed_memory()
    files, most = TensorFiles(directory), 0
    for name in sorted(files.names("a.safetensors")):
        files.box("a.safetensors", name, (1 << 22,), ((0, 1 << 22),)).sum()
        status = Path("/proc/self/status").read_text().split("RssFile:")[1]
        most = max(most, int(status.split()[0]) * 1024)
    return most


@pytest.mark.slow
def test_what_was_read_leaves_memory(tmp_path):
    save_file({f"{n:02}": torch.ones(1 << 22) for n in range(12)}, tmp_path / "a.safetensors")
    (most,) = in_fresh_processes(mapped_after_reading, tmp_path)
    save_file({"00": torch.ones(1 << 22)}, tmp_path / "a.safetensors")
    (least,) = in_fresh_processes(mapped_after_reading, tmp_path)
    assert most - least < 96 << 20
