"""Stands in for what torch.cuda has of its own where it is built without CUDA: streams, events and
generators, which do nothing here."""

import contextlib
from collections import Counter

import torch

from tests.support.fakecuda.audit import audit


class Generator:
    def get_state(self):
        return None

    def set_state(self, state) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"{seed} is no seed")


class Stream:
    """A stream, or an event: nothing waits for it, but a host that does is counted."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        self.device = torch.device("cuda", 0)

    def record(self, *_) -> None:
        pass

    def wait(self, *_) -> None:
        pass

    wait_stream = wait_event = wait

    def query(self) -> bool:
        return True

    def elapsed_time(self, _) -> float:
        return 0.0

    def synchronize(self) -> None:
        audit.sync("a stream is waited for")


def _register_kernels() -> torch.library.Library:
    """Tell torch of operators that CUDA has a kernel of its own for, forward and backward, and that
    torch would otherwise take apart into others. (Shapes come from the fake tensors.)"""
    library = torch.library.Library("aten", "IMPL")
    for name in ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward"):
        library.impl(name, lambda *_: None, "CUDA")
    return library


class Graph:
    """A CUDA graph: what is captured launches what it launches; a replay is one launch. A capture
    in which the host waits is refused."""

    def replay(self) -> None:
        audit.launches_of["a graph"] += 1


@contextlib.contextmanager
def capture(graph: Graph, stream: Stream, capture_error_mode: str):
    audit.launches_of, before = Counter(), audit.launches_of
    syncs, bytes_before = audit.syncs.total(), audit.all_bytes()
    yield
    audit.captured.append(audit.launches)
    audit.captured_bytes.append(audit.all_bytes() - bytes_before)
    audit.launches_of = before
    if audit.syncs.total() > syncs:
        audit.fault("the host waits while a graph is captured")


def install() -> None:
    """Put these into torch.cuda."""
    global kernels  # as long as the library lives, they are known
    kernels = _register_kernels()
    torch.cuda.default_generators = (Generator(),)
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda device=None: audit.sync("the device is waited for")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = lambda tensor, stream: None
    # In inference mode torch.tensor(..., device="cuda") fails on fake tensors.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()
