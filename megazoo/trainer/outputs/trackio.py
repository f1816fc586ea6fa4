"""Metrics for trackio."""

from importlib import import_module
from typing import Any

from megazoo.errors import UserError
from megazoo.trainer.outputs.base import Output, grouped, register_output


@register_output("trackio")
class Trackio(Output):
    """trackio project for the same metrics; `trackio show` plots them. They stay on this machine,
    unless TRACKIO_SPACE_ID names a Space on the Hugging Face hub."""

    package = "trackio"

    def open(self, value: str, *, run_id: str | None, settings: dict, step: int) -> None:
        self.trackio: Any = import_module("trackio")
        how = {"name": run_id, "resume": "allow", "config": settings, "embed": False}
        try:
            self.run = self.trackio.init(value, **how)
        except Exception as error:  # errors of trackio and of the Hugging Face hub
            raise UserError(f"--trackio {value}: {error}", exit_code=1) from error
        self.run_id = self.run.name

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.run.log(grouped(values), step=step)

    def close(self, failed: bool) -> None:
        self.trackio.finish()  # after run.finish(), the exit would finish it again
