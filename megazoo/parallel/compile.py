"""Exclude functions from torch.compile: collectives and seeded draws."""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable

import torch

from megazoo.errors import UserError
from megazoo.torch_internals import allow_recompilations, skip_frames

# each function that `untraced` has returned, and the list with its target
_untraced: list[tuple[Callable, list[Callable]]] = []


def untraced(function: Callable) -> Callable:
    """Mark a function that torch.compile must call between its graphs, without tracing it.

    torch.compiler.disable would import torch._dynamo immediately (0.7 s). So this returns a
    function that calls a target, and `prepare_to_compile` replaces the target.
    """
    target = [function]

    @functools.wraps(function)
    def call(*arguments, **options):
        return target[0](*arguments, **options)

    _untraced.append((call, target))
    return call


def prepare_to_compile(device: torch.device) -> None:
    """Prepare for torch.compile. Raises UserError if the machine lacks a compiler for `device`."""
    check_compiler(device.type)
    # A layer is compiled again for training, evaluation, masks, and scales that vary by index.
    allow_recompilations(128)
    while _untraced:
        call, target = _untraced.pop()
        target[0] = torch.compiler.disable(target[0])
        skip_frames(call)


def check_compiler(device: str) -> None:
    """Raise UserError if torch.compile can't work: it needs a C++ compiler for the CPU and Triton
    for CUDA."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("--compile needs Triton for CUDA: install triton, or remove --compile")
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and not (shutil.which(compiler) or shutil.which("clang++")):
        raise UserError(
            f"--compile needs a C++ compiler, but there is no {compiler}: install one, or "
            "remove --compile"
        )
