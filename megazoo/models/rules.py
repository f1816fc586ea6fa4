"""Checks of the parallel layout and the batches of a run, for the model that it trains."""

from typing import Any

from megazoo.errors import UserError
from megazoo.models.base import Model
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.schedule import check_schedule


def check_layout(family: type[Model], config: Any, layout: Layout) -> None:
    """Raise UserError if the model can't be sharded in a layout, or its schedule does not support
    it."""
    family.check(config, layout.tp, layout.pp, layout.virtual_pp)
    # Each of these calls raises UserError for an invalid layout.
    check_schedule(layout.schedule, layout.pp, layout.virtual_pp)
    family.all_stages(config, ParallelContext(layout))
    if layout.folded_sizes:  # each of its ranks needs equally many experts
        family.on_meta(config, ParallelContext(layout))
    if layout.cp > 1 and layout.cp_method == "ulysses":  # each rank needs a head
        family.on_meta(config, ParallelContext(layout.with_replicas(1).without_stages()))


def check_batch(global_batch_size: int, micro_batch_size: int, dp: int) -> None:
    """Raise UserError unless each of `dp` replicas gets the same whole number of micro-batches."""
    rows, unit = global_batch_size, micro_batch_size * dp
    if rows % unit:
        below, above = rows // unit * unit, -(-rows // unit) * unit
        raise UserError(
            f"global-batch-size {rows} is not a multiple of micro-batch-size "
            f"{micro_batch_size} x dp {dp} = {unit}: "
            f"use {f'{below} or ' if below else ''}{above}"
        )


def check_sequence(family: type[Model], config: Any, length: int) -> None:
    """Raise UserError if a sequence of `length` tokens is too long for the model."""
    longest = family.longest_sequence(config)
    if length > longest:
        scaled = f", extended to {longest} by its rotary scaling"
        raise UserError(
            f"seq-length {length} exceeds the model's max-positions "
            f"{config.max_positions}{scaled if longest > config.max_positions else ''}: use "
            "a smaller --seq-length, or a larger --max-positions"
        )


def check_offload(optimizer: str, offloaded: bool) -> None:
    """Raise UserError if the state of this optimizer can't be kept on the CPU."""
    if optimizer == "muon" and offloaded:
        raise UserError(
            "--offload-optimizer cannot be used with --optimizer muon, because it offloads "
            "only AdamW's state: remove one of them"
        )
