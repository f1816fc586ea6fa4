"""Runs megazoo's CUDA path where there is no CUDA: under torch's fake tensors, which have shapes
and a device but no values, on a device whose guard is 50 lines of C++ (guard.cpp).

It sees tensors on wrong devices, host waits, kernels, bytes, FLOPs, the choice of attention kernels
and what NCCL would refuse. It can't see values, the order of streams, or real kernels.

A process that has loaded the device is spoilt for other work: `measure.py` is called in a
process of its own (see `in_own_process`).
"""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
(TORCH,) = find_spec("torch").submodule_search_locations
WHY_NOT = None if COMPILER else "needs a C++ compiler for the fake CUDA device"
if Path(TORCH, "lib", "libtorch_cuda.so").exists():
    WHY_NOT = "needs torch's build for CPUs: this build has a CUDA device of its own"


def build(directory: Path) -> Path:
    """Return the library of the device in this directory. If there is none, compile it against the
    installed torch, which is not imported."""
    library = directory / "libfakecuda.so"
    if not library.exists():
        new = directory / f"{os.getpid()}.so"
        command = [COMPILER, "-std=c++20", "-shared", "-fPIC", HERE / "guard.cpp", "-o", new]
        command += [f"-I{TORCH}/include", f"-L{TORCH}/lib", f"-Wl,-rpath,{TORCH}/lib"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        new.replace(library)
    return library


def load() -> None:
    """Give this process the device and the groups: before torch is imported, which looks for CUDA
    once."""
    shared = os.environ.get("MEGAZOO_TEST_FILES")
    with nullcontext(shared) if shared else tempfile.TemporaryDirectory() as directory:
        ctypes.CDLL(str(build(Path(directory))), mode=ctypes.RTLD_GLOBAL)
    from tests.support.fakecuda import cuda, groups

    cuda.install()
    groups.install()


@cache
def _process() -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=load)


def in_own_process(function: Callable, *args, timeout: float = 300, **options):
    """Return function(*args, **options), called in a process that has the device; the same one for
    all calls. function: importable by its name."""
    return _process().submit(function, *args, **options).result(timeout)
