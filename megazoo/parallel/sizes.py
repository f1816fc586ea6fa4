"""Checks of the sizes of a layout, and of how they fit the number of ranks."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any

from megazoo.environment import local_world_size, world_size
from megazoo.errors import UserError

LONGEST_TIMEOUT = timedelta(days=365)


def check_sizes(tp: Any, pp: Any, cp: Any, virtual: Any, dp: Any) -> None:
    """Raise UserError for sizes of `ParallelContext.from_torch` that are not integers above 0. dp
    may be None."""
    _check_size("tensor_parallel_size", tp)
    _check_size("pipeline_parallel_size", pp)
    _check_size("virtual_pipeline_size", virtual)
    _check_size("context_parallel_size", cp)
    _check_size("data_parallel_size", 1 if dp is None else dp)


def _check_size(name: str, size) -> None:
    """Raise UserError unless size is an integer above 0; text, 2.0 and True are invalid."""
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
        raise UserError(f"{name} must be a whole number of at least 1, not {size!r}")


def check_folded(folded: Mapping[str, int], dp: int, cp: int, taken: Sequence[str]) -> None:
    """Raise UserError for axes that can't be folded into dp x cp. taken: names of other axes."""
    for name, size in folded.items():
        if not re.fullmatch("[a-z]{1,16}", name) or name in taken:
            raise UserError(
                f"an axis can't be called {name!r}: use 1 to 16 lower-case letters, and none of "
                "the names " + " or ".join(taken)
            )
        _check_size(name, size)
        if dp * cp % size:
            raise UserError(
                f"dp x cp = {dp * cp} is not divisible by the folded axis {name} {size}"
            )


def check_timeout(timeout: Any) -> None:
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise UserError(f"timeout must be a timedelta above 0, not {timeout!r}")
    if timeout > LONGEST_TIMEOUT:
        raise UserError(f"timeout must be at most {LONGEST_TIMEOUT.days} days, not {timeout}")


def data_parallel_size_for(world: int, tp: int, pp: int, dp: int | None = None, cp: int = 1) -> int:
    """Return the data-parallel size for `world` ranks; UserError if tp x pp x cp (x dp) does not
    fit."""
    if min(tp, pp, cp) < 1:
        sizes = product_of(tp, pp, cp=cp).replace(" x ", " and ")
        raise UserError(f"{sizes} must each be at least 1")
    replica = tp * pp * cp
    if world % replica or (dp is not None and world != replica * dp):
        multiple = "" if dp else "a multiple of "
        asked, enough = product_of(tp, pp, dp, cp), ranks_that_fit(world, tp, pp, dp, cp)
        given = {"tp": tp, "pp": pp, "cp": cp, "dp": dp or 1}
        sizes = "".join(f", {name}={size}" for name, size in given.items() if size > 1)
        launch = f"use megazoo.launch(function{sizes}), or " if world == 1 else ""
        raise UserError(
            f"{world} ranks were started, but {asked} needs "
            f"{multiple}{replica * (dp or 1)}: {launch}start {enough}{_with_torchrun(enough)}"
        )
    return world // replica


def _with_torchrun(ranks: int) -> str:
    """Return how to start ranks of the running Python script, or of code without a script; "" on
    several machines."""
    if local_world_size() < world_size():
        return ""
    command = f"torchrun --nproc-per-node {ranks}"
    is_script = "IPython" not in sys.modules  # in a notebook, argv is that of the kernel
    if is_script and os.path.isfile(sys.argv[0]):
        return f" with {command} {shlex.join(sys.argv)}"
    return f" with the code in a file: {command} FILE.py"


def ranks_that_fit(world: int, tp: int, pp: int, dp: int | None = None, cp: int = 1) -> int:
    """Return the number of ranks to start for a layout instead of `world`."""
    replica = tp * pp * cp
    return replica * (dp or -(-world // replica))


def product_of(tp: int, pp: int, dp: int | None = None, cp: int = 1) -> str:
    """Return the sizes of a layout as text; cp and dp only if set."""
    sizes = {"tp": tp, "pp": pp, "cp": None if cp == 1 else cp, "dp": dp}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
