"""Exclude functions from torch.compile: collectives and seeded draws."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable

import torch

from megazoo.errors import UserError
from megazoo.torch_internals import allow_recompilations

_untraced: list[Callable] = []


def untraced(function: Callable) -> Callable:
    """Mark a function that torch.compile must call between its graphs, without tracing it.

    torch.compiler.disable would import torch._dynamo immediately (0.7 s); here the import is
    delayed until `prepare_to_compile`. It replaces the function in its class, or in every module
    that has imported it.
    """
    _untraced.append(function)
    return function


def prepare_to_compile(device: torch.device) -> None:
    """Prepare for torch.compile. Raises UserError if the machine lacks a compiler for `device`."""
    check_compiler(device.type)
    # A layer is compiled again for training, evaluation, masks, and scales that vary by index.
    allow_recompilations(128)
    functions = {}
    while _untraced:
        function = _untraced.pop()
        owner, (*classes, name) = sys.modules[function.__module__], function.__qualname__.split(".")
        for class_name in classes:
            owner = getattr(owner, class_name)
        functions[id(function)] = torch.compiler.disable(function)
        setattr(owner, name, functions[id(function)])
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in functions:
                setattr(module, name, functions[id(value)])


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
