"""Plans of runs, made from what tests say of a layout and of a run."""

from dataclasses import fields

from megazoo.parallel.context import ParallelContext
from megazoo.planning import Plan, PlannedRun, Planner

NAMES = {"sp": "sequence_parallel", "v": "virtual", "virtual_pp": "virtual"}
RUN = {f.name for f in fields(PlannedRun)}


def plan(config, layout: dict | None = None, *, quick=False, lora=None, **run) -> Plan:
    """The plan of a run that the planner allows. layout: of `ParallelContext.virtual`, short names
    included; it may have zero, schedule and the like, too."""
    usual = {"micro_batch_size": 2, "seq_length": 16, "global_batch_size": 8}
    values = {NAMES.get(name, name): value for name, value in (layout or {}).items()}
    run = usual | run | {name: values.pop(name) for name in RUN & values.keys()}
    context, planned = ParallelContext.virtual(**values), PlannedRun(**run)
    planner = Planner(config, quick, lora)
    planner.check(context, planned)
    return planner.plan(context, planned)
