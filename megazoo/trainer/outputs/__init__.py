"""Outputs of metrics: one file for each. A file of --import registers further ones."""

from megazoo.trainer.outputs import jsonl, mlflow, tensorboard, trackio, wandb  # noqa: F401
from megazoo.trainer.outputs.base import OUTPUTS, Output, register_output

__all__ = ["OUTPUTS", "Output", "register_output"]
