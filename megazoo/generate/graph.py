"""A step of generation as one CUDA graph, so that a GPU does not wait for kernel launches."""

from collections.abc import Callable

import torch

from megazoo.errors import advise


class StepGraph:
    """Runs a function that reads and writes the same memory at each call, and returns a tensor.

    The key stands for all shapes and addresses. The first call with a key runs normally, so that
    libraries can initialise. The second is captured as a CUDA graph, which it and all later calls
    replay; they return the same tensor. A function that can't be captured runs normally, with a
    warning.
    """

    def __init__(self, device: torch.device):
        # one stream for all runs: libraries initialise it before the capture
        self.stream = torch.cuda.Stream(device)
        self.key: int | None = None
        self.fails = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: torch.Tensor | None = None

    def __call__(self, function: Callable[[], torch.Tensor], key: int) -> torch.Tensor:
        if key != self.key:
            self.key, self.graph, self.result = key, None, None
            return self._run(function)
        if self.graph is None and not self.fails:
            self._capture(function)
        if self.graph is None or self.result is None:
            return self._run(function)
        self.graph.replay()
        return self.result

    def _run(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def _capture(self, function: Callable[[], torch.Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use CUDA meanwhile, such as NCCL's
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                result = function()
        except RuntimeError as error:
            self.fails = True
            reason = str(error).partition("\n")[0]
            advise(f"generation continues without CUDA graphs: a step can't be captured: {reason}")
            return
        self.graph, self.result = graph, result
