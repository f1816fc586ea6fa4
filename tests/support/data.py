"""Data for tests: sources opened as a run opens them."""

import json

from megazoo.data import check_data, open_datasets
from megazoo.tokenizer import ByteTokenizer


def open_all(*data, split="95,5", seq_length=64, vocab_size=257, **settings):
    sources = check_data([str(word) for word in data], split)
    return open_datasets(
        sources,
        ByteTokenizer(),
        seq_length=seq_length,
        vocab_size=vocab_size,
        seed=1,
        **settings,
    )


def write_lines(path, *objects):
    path.write_text("".join(json.dumps(value) + "\n" for value in objects))
    return path
