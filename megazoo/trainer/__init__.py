"""The trainer: a run, its loop, and what it records. The command line is megazoo.cli.

A file of --import registers parts of it: outputs of metrics and callbacks here, data sources in
megazoo.data, and learning-rate schedules in megazoo.optim.
"""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.trainer.callbacks import Callback, register_callback
    from megazoo.trainer.outputs import Output, register_output

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Callback": "megazoo.trainer.callbacks",
        "Output": "megazoo.trainer.outputs",
        "register_callback": "megazoo.trainer.callbacks",
        "register_output": "megazoo.trainer.outputs",
    },
)

__all__ = ["Callback", "Output", "register_callback", "register_output"]
