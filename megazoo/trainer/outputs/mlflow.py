"""Metrics for MLflow."""

from importlib import import_module
from typing import Any

from megazoo.errors import UserError
from megazoo.trainer.outputs.base import Output, grouped, register_output


@register_output("mlflow")
class MLflow(Output):
    """MLflow experiment for the same metrics. MLFLOW_TRACKING_URI names the server; by default,
    MLflow stores them on this machine."""

    metavar = "EXPERIMENT"
    package = "mlflow"

    def open(self, value: str, *, run_id: str | None, settings: dict, step: int) -> None:
        self.mlflow: Any = import_module("mlflow")
        try:
            self.mlflow.set_experiment(value)
            self.run_id = self.mlflow.start_run(run_id=run_id).info.run_id
            if run_id is None:  # a parameter can't change
                self.mlflow.log_params({name: str(each)[:500] for name, each in settings.items()})
        except Exception as error:  # of MLflow, or of the connection to its server
            raise UserError(f"--mlflow {value}: {error}", exit_code=1) from error

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.mlflow.log_metrics(grouped(values), step=step)

    def close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")
