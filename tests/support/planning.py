"""Plans of runs, made from what tests say of a layout and of a run."""

from dataclasses import fields

from megazoo.parallel.layout import Layout
from megazoo.planning import Plan, PlannedRun, Planner

NAMES = {"sp": "sequence_parallel", "v": "virtual_pp"}
RUN = {f.name for f in fields(PlannedRun)}


def plan(config, layout: dict | None = None, *, quick=False, lora=None, **run) -> Plan:
    """The plan of a run that the planner allows. layout: of `Layout`, short names
    included; it may have settings of the run, too."""
    usual = {"micro_batch_size": 2, "seq_length": 16, "global_batch_size": 8}
    values = {NAMES.get(name, name): value for name, value in (layout or {}).items()}
    run = usual | run | {name: values.pop(name) for name in RUN & values.keys()}
    wanted, planned = Layout(**values), PlannedRun(**run)
    planner = Planner(config, quick, lora)
    planner.check(wanted, planned)
    return planner.plan(wanted, planned)
