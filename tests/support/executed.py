"""Print the files of megazoo in which one training step of a Llama executes lines: what a reader of
the step has to read.

    python -m tests.support.executed
"""

import sys
from pathlib import Path

import torch

import megazoo

PACKAGE = Path(megazoo.__file__).parent


def executed(function) -> dict[str, int]:
    """Return the number of different lines that a call executes, by file of the package."""
    lines: dict[str, set[int]] = {}

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if not file.startswith(str(PACKAGE)):
            return None
        if event == "line":
            lines.setdefault(file, set()).add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return {str(Path(file).relative_to(PACKAGE)): len(found) for file, found in lines.items()}


def main() -> None:
    torch.set_num_threads(1)
    model = megazoo.from_config("llama-tiny")
    optimizer = megazoo.optim.AdamW(model, lr=1e-3)
    ids = torch.randint(0, model.config.vocab_size, (2, 16))

    def step() -> None:
        model.train_batch(ids, labels=ids)
        optimizer.step()

    step()  # the first step creates buckets and states
    found = executed(step)
    for file, count in sorted(found.items()):
        print(f"{count:5} {file}")
    print(f"{sum(found.values()):5} lines in {len(found)} files")


if __name__ == "__main__":
    main()
