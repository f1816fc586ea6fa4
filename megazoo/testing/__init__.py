"""Tools for tests: ranks on this machine, a check that a model trains the same in every parallel
layout as in one process, a check of types without ranks, and a comparison with another library's
model."""

from megazoo.parallel.layout import Layout
from megazoo.testing.check import Verdict, check_parallel
from megazoo.testing.compare import Agreement, compare
from megazoo.testing.layouts import all_layouts
from megazoo.testing.ranks import GROUP_TIMEOUT, RankError, RankPool
from megazoo.testing.resume import ResumeVerdict, check_resume, pairs_of
from megazoo.testing.shrink import shrink
from megazoo.testing.types import check_types

__all__ = [
    "GROUP_TIMEOUT",
    "Agreement",
    "Layout",
    "RankError",
    "RankPool",
    "ResumeVerdict",
    "Verdict",
    "all_layouts",
    "check_parallel",
    "check_resume",
    "check_types",
    "compare",
    "pairs_of",
    "shrink",
]
