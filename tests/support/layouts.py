"""What the tests of layouts share: the run of one process that layouts are compared with."""

from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch

from megazoo.layers import embedding
from tests.support.training import (
    layout_name,
    train_and_keep_gradients,
)

STEPS = 4


@cache
def one_process(config):
    return train_and_keep_gradients(config, {}, STEPS, micro_batch=8)


def case_name(part) -> str:
    if isinstance(part, dict):
        return layout_name(part)
    return part if isinstance(part, str) else " ".join(map(str, part))


def assembled(parts):
    """Global gradients from every rank's pieces."""
    whole = {name: torch.full(shape, torch.nan) for name, (shape, _) in parts[0].items()}
    for part in parts:
        for name, (_, pieces) in part.items():
            for piece, values in pieces:
                whole[name][tuple(slice(*bounds) for bounds in piece.box)] = values
    return whole


@contextmanager
def short_pieces():
    """Yields what counts the losses that are made in pieces."""
    module, head = "megazoo.layers.cross_entropy", embedding._VocabParallel
    counted = mock.patch.object(head, "loss_sum", autospec=True, side_effect=head.loss_sum)
    always = mock.patch.object(head, "loss_saves_memory", return_value=True)
    pieces = (
        mock.patch.dict(f"{module}.PIECE_ELEMENTS", cpu=0),
        mock.patch(f"{module}.PIECE_ROWS", 5),
    )
    with pieces[0], pieces[1], always, counted as count:
        yield count
