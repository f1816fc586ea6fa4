"""Metrics for Weights & Biases."""

from importlib import import_module
from typing import Any

from megazoo.errors import UserError
from megazoo.trainer.outputs.base import Output, grouped, register_output


@register_output("wandb")
class WeightsAndBiases(Output):
    """Weights & Biases project for the same metrics. WANDB_MODE=offline stores them locally."""

    package = "wandb"
    megatron = "wandb-project"

    def open(self, value: str, *, run_id: str | None, settings: dict, step: int) -> None:
        wandb: Any = import_module("wandb")
        try:
            self.run = wandb.init(project=value, id=run_id, resume="allow", config=settings)
        except wandb.Error as error:  # for example, no login or no connection
            raise UserError(
                f"--wandb {value}: {error}; WANDB_MODE=offline needs no connection", exit_code=1
            ) from error
        # The built-in step of wandb cannot return to the step of a checkpoint.
        self.run.define_metric("*", step_metric="step")
        self.run_id = self.run.id

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.run.log({"step": step, **grouped(values)})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
