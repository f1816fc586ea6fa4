"""Metrics in a file of JSON lines."""

import json
import os
from pathlib import Path
from typing import Any

from megazoo.files import append_line, open_at_once
from megazoo.trainer.outputs.base import Output, register_output


@register_output("metrics")
class Lines(Output):
    """File to append metrics to, one JSON object per step."""

    metavar, errors = "FILE", OSError
    megatron = "log-params-norm FILE"

    def open(self, value: Path, *, run_id: str | None, settings: dict, step: int) -> None:
        self.path = value
        value.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_at_once(value, os.O_WRONLY | os.O_APPEND | os.O_CREAT))

    def write(self, step: int, values: dict[str, Any]) -> None:
        append_line(self.path, (json.dumps({"step": step, **values}) + "\n").encode())
