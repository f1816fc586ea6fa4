"""Where `run_file` was before `megazoo.cli`; it can still be imported from here."""

from megazoo.cli.parsing import run_file

__all__ = ["run_file"]
