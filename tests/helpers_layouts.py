"""What the tests of layouts share: the run of one process that layouts are compared with."""

from functools import cache

from helpers import layout_name, train_and_keep_gradients

STEPS = 4


@cache
def one_process(config):
    return train_and_keep_gradients(config, {}, STEPS, micro_batch=8)


def case_name(part) -> str:
    if isinstance(part, dict):
        return layout_name(part)
    return part if isinstance(part, str) else " ".join(map(str, part))
