"""Tensor files are read by several threads."""

import threading
from pathlib import Path

from megazoo.checkpoint.tensor_files import TensorFiles


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
