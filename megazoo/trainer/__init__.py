"""The trainer: a run, its loop, and what it records. The command line is megazoo.cli.

A file of --import registers parts of it: outputs of metrics here, learning-rate schedules in
megazoo.optim.
"""

from megazoo.trainer.outputs import Output, register_output

__all__ = ["Output", "register_output"]
