"""Generation from random GPT-2s of transformers, against its own generate, in one process on the
same weights."""

import tempfile
import time
from collections.abc import Iterator

import torch
from benchmarks.common import CORES, Result, Setup, alone


def cases(setup: Setup) -> Iterator[Result]:
    new = 128
    for size, hidden, rows, beams in [
        ("30M", 512, 1, 1),
        ("30M", 512, 1, 3),
        ("30M", 512, 8, 1),
        ("5M", 192, 1, 1),
    ]:
        how = f"beam {beams}" if beams > 1 else "greedy"
        name = f"generate {new} tokens, {size}, {how}, batch {rows}, against transformers"
        yield Result(name, *alone(seconds_of_both, hidden, rows, beams, new, setup.pairs))


def seconds_of_both(hidden: int, rows: int, beams: int, new: int, pairs: int) -> list[list[float]]:
    """Of each run, ours and transformers'."""
    import transformers

    import megazoo

    torch.set_num_threads(CORES)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8192, n_positions=512, n_embd=hidden, n_layer=8, n_head=8
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        ours = megazoo.from_pretrained(directory)
    ids = torch.randint(4, 8000, (rows, 16))
    how = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "num_beams": beams,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    sides = [
        lambda: ours.generate(ids, **how),
        lambda: theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **how),
    ]
    seconds = [[], []]
    for _ in range(pairs + 1):
        outputs = []
        for side, run in zip(seconds, sides, strict=True):
            began = time.perf_counter()
            outputs.append(run())
            side.append(time.perf_counter() - began)
        assert torch.equal(*outputs), "they differ"
    return [side[1:] for side in seconds]
