"""Imported last by the servers that fork ranks and programs: the forked processes share what it
fills and freezes."""

import gc

from megazoo.cli.parsing import CommandLine

CommandLine.read([])  # tyro reads the source of the options once
gc.collect()
gc.freeze()
