"""A layout: its name, its checks, and a field that a user adds, which all that describes a layout
has."""

import ast
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
import tyro

from megazoo.cli.flags import parse_flags
from megazoo.errors import UserError
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout, size, switch, switches
from megazoo.planning import PlannedRun, Planner
from megazoo.trainer.options import ParallelOptions, layout_settings, parallel_options
from tests.support.training import tiny_config

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class OwnLayout(Layout):
    """A layout with one more size and one more switch."""

    toys: int = size("t")
    """Number of toys."""
    colour: str = switch("red", lambda: {"blue": "blue", "green": "green"})
    """Colour of the toys."""


def test_a_field_of_a_subclass_is_in_its_name():
    name = "tp2pp2t3+sp+blue"
    layout = OwnLayout.named(name)
    assert layout == OwnLayout(tp=2, pp=2, toys=3, sequence_parallel=True, colour="blue")
    assert str(layout) == name
    assert switches(OwnLayout) == switches() + ", +blue, +green"
    with pytest.raises(UserError, match="unknown layout 'tp2t3'"):
        Layout.named("tp2t3")


def test_it_has_a_flag_with_its_help(capsys):
    own = parallel_options(OwnLayout)

    @dataclass
    class Options:
        parallel: tyro.conf.OmitArgPrefixes[own] = field(default_factory=own)

    words = "--toys 3 --colour green --tp 2 --schedule zb-h1"
    parsed = parse_flags(Options, words.split(), "")
    wanted = OwnLayout(tp=2, dp=4, toys=3, colour="green", schedule="zb-h1")
    assert parsed.parallel.layout(4) == replace(wanted, sequence_parallel=None)
    with pytest.raises(SystemExit):
        parse_flags(Options, ["--help"], "")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Number of toys." in printed
    assert "number of ranks that each layer is sharded" in printed


def test_it_is_in_records_and_plans():
    assert {*layout_settings(OwnLayout)} - {*layout_settings()} == {"toys", "colour"}
    run = PlannedRun(global_batch_size=2, micro_batch_size=1, seq_length=8)
    plan = Planner(tiny_config()).plan(OwnLayout(toys=3), run)
    assert (plan.layout["toys"], plan.layout["colour"], plan.layout["tp"]) == (3, "red", 1)


def test_the_settings_of_a_layout_are_flags():
    assert {*layout_settings()} < {f.name for f in fields(ParallelOptions)}


def test_a_schedule_sets_the_stages_that_it_needs():
    layout = Layout(pp=2, schedule="zb-v")
    assert (layout.virtual_pp, layout.placement.name, str(layout)) == (2, "v", "pp2v2+zb-v")
    assert ParallelContext.virtual(pp=2, placement="v").layout.schedule == "zb-v"
    for wrong, message in {
        "zb-v": "schedule zb-v needs a pipeline: use pp 2 or more",
        "pp2v3+zb-v": "placement v has two stages per rank, not 3: use virtual-pp 2",
        "v2": "virtual-pp 2 needs a pipeline: use pp 2 or more",
        "dp2ep4": "^dp2ep4: dp x cp = 2 is not divisible by the folded axis ep 4",
    }.items():
        with pytest.raises(UserError, match=message):
            Layout.named(wrong if wrong[0] in "pvd" else f"tp1+{wrong}")


def test_layouts_are_passed_and_not_copied():
    """Outside of parallel/, no code makes a virtual context from single sizes."""
    copies = []
    for file in (ROOT / "megazoo").rglob("*.py"):
        if "parallel" in file.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and "ParallelContext.virtual" in ast.unparse(node):
                copies.append(f"{file.name}:{node.lineno}")
    assert copies == []
