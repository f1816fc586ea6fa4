"""Imported last by the processes that run tests and that fork ranks and programs: it fills caches,
and excludes what was imported before from garbage collections."""

import functools
import gc
import importlib
import inspect

from megazoo.cli.parsing import CommandLine
from megazoo.families.registry import FAMILIES

find_source = inspect.findsource
find_source_of_class = functools.cache(find_source)


def found_source(what):
    """inspect.findsource, which parses the file of a class only once. tyro calls it for the options
    of each command line."""
    return find_source_of_class(what) if isinstance(what, type) else find_source(what)


inspect.findsource = found_source
# imported when they are first used: here once, not in each process that is forked
importlib.import_module("megazoo.models.pretrained")
importlib.import_module("megazoo.generate.generate")
list(FAMILIES.values())
CommandLine.read([])  # fills the caches of tyro
gc.collect()
gc.freeze()
