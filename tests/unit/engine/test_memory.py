"""A pipeline's peak of memory does not grow with the number of micro-batches."""

import sys

import pytest
import torch

import megazoo
from megazoo.models.llama import LlamaConfig
from tests.support.training import PeakMemory, context, give_back_freed_memory, in_fresh_processes

CONFIG = LlamaConfig(
    vocab_size=61, max_positions=256, hidden_size=128, layers=8, heads=4, ffn_size=512
)


def peaks(schedule, virtual, counts):
    """Of steps with so many micro-batches, above the level after building model and optimizer."""
    give_back_freed_memory()
    model = megazoo.from_config(CONFIG, context(pp=2, v=virtual))
    optimizer = megazoo.optim.AdamW(model)
    with PeakMemory() as built:
        pass
    found = []
    for count in counts:
        ids = torch.randint(0, 61, (2 * count, 256))
        with PeakMemory() as peak:
            model.train_batch(ids, labels=ids, num_microbatches=count, schedule=schedule)
            optimizer.step()
        found.append(peak.peak - built.start)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("1f1b", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("1f1b", 2), ("zb-h1", 1), ("gpipe", 1)]
        ),
    ],
)
def test_32_micro_batches_need_what_8_do(schedule, virtual):
    for few, many in in_fresh_processes(peaks, schedule, virtual, (8, 32), processes=2):
        assert few > 20e6
        assert (many < 1.05 * few) == (schedule != "gpipe")
