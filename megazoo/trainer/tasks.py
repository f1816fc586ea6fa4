"""Evaluate the model of a run on tasks of lm-evaluation-harness while it trains."""

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from megazoo.trainer.callbacks import Callback

if TYPE_CHECKING:
    from megazoo.trainer.recorder import Recorder

BATCH_SIZE = 8  # requests, as in `megazoo evaluate`


class Tasks(Callback):
    """Answers --eval-tasks at each evaluation, as `megazoo evaluate --tasks` does."""

    def __init__(self, trainer: "Recorder"):
        super().__init__(trainer)
        self.tasks, names = None, trainer.run.options.evaluation.eval_tasks
        if names:
            from megazoo.evaluation.tasks import find_tasks  # slow, and an optional package

            self.tasks = find_tasks(names, "--eval-tasks")

    def evaluate(self, step: int) -> dict[str, float]:
        if not self.tasks:
            return {}
        from megazoo.evaluation.tasks import run_tasks

        model, tokenizer = self.trainer.model, self.trainer.run.tokenizer
        was_training, states = model.training, (random.getstate(), np.random.get_state())
        how = {"batch_size": BATCH_SIZE, "before_batch": self.trainer.check_stop}
        model.eval()
        try:
            with torch.random.fork_rng(devices=[]):  # the harness seeds all generators
                results = run_tasks(model, tokenizer, self.tasks, **how)
        finally:
            model.train(was_training)
            random.setstate(states[0])
            np.random.set_state(states[1])
        return metrics_of(results) if results else {}


def metrics_of(results: dict) -> dict[str, float]:
    """Return the metrics of the harness's results by names such as eval_arc_easy_acc. A filter of
    the harness other than none is a part of the name."""
    found = {}
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            name, _, filtered = key.partition(",")
            if isinstance(value, int | float) and not name.endswith("_stderr") and filtered:
                suffix = "" if filtered == "none" else f"_{filtered}"
                found[f"eval_{task}_{name}{suffix}"] = value
    return found
