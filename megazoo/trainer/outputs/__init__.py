"""Outputs of metrics: each module here registers one. A file of --import registers further ones."""

from importlib import import_module
from pkgutil import iter_modules

from megazoo.trainer.outputs.base import OUTPUTS, Output, register_output

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["OUTPUTS", "Output", "register_output"]
