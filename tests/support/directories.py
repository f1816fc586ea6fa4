"""Small models, the names in a directory, and children that die, for tests of what is written."""

import multiprocessing

import megazoo
from tests.support.training import tiny_config

FORK = multiprocessing.get_context("fork")
PROGRAM = (
    "--eval-steps 0 --device cpu --seq-length 32 --hidden-size 32 --heads 2 --layers 1 "
    "--global-batch-size 2 --micro-batch-size 2 --warmup-steps 0"
).split()


def tiny_model(value: float | None = None):
    model = megazoo.from_config(tiny_config(layers=1), seed=3)
    for parameter in model.parameters() if value is not None else ():
        parameter.data.fill_(value)
    return model


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def in_child(work, *arguments) -> int:
    """Call a function in a process of its own; returns its exit code."""
    child = FORK.Process(target=work, args=arguments)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode
