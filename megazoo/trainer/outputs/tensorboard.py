"""Metrics for TensorBoard."""

import threading
from pathlib import Path
from typing import Any

from megazoo.trainer.outputs.base import Output, grouped, register_output


@register_output("tensorboard")
class TensorBoard(Output):
    """Directory for TensorBoard logs of the same metrics."""

    metavar, errors = "DIR", OSError
    package = "tensorboard"
    megatron = "tensorboard-dir"

    def open(self, value: Path, *, run_id: str | None, settings: dict, step: int) -> None:
        """See `Output`. Earlier values after `step` are hidden. An OSError in TensorBoard's writer
        thread is raised by the next write, and the thread prints no traceback."""
        from torch.utils.tensorboard import SummaryWriter  # the import takes seconds and memory

        usual = threading.excepthook

        def hook(failure) -> None:
            its_own = type(failure.thread).__module__.startswith("tensorboard.")
            if not its_own or not isinstance(failure.exc_value, OSError):
                usual(failure)

        threading.excepthook = hook
        self.writer = SummaryWriter(str(value), purge_step=step + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        for name, value in grouped(values).items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()
