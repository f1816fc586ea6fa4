"""Estimate what a run needs on each rank, without starting it: memory, FLOPs, communication and
pipeline bubble.

$ megazoo plan --preset gpt3-175b --tp 8 --pp 16 --dp 8 --json plan.json
$ megazoo plan --preset gpt3-175b --search --gpus 1024 --gpu h100 --memory 80GB
$ megazoo plan --preset llama-7b --lora-rank 8 --lora-targets q,v

--search lists the parallel layouts that fit into memory, the shortest estimated step time first.
The step time is the computation, with bubble and recomputation, plus exposed communication.
Treated as overlapped: gradient all-reduces during the last backward pass, tensor-parallel
communication during matrix products of the backward pass, and pipeline transfers that arrive before
they are needed. Treated as exposed: all other tensor-parallel communication, context-parallel
communication, and the all-gather of the updated parameters in ZeRO-1. The search varies tp, pp, dp,
virtual-pp, recompute, sequence-parallel and zero, and cp for long sequences that do not fit without
recomputation. Other settings are used as given. Of layouts that differ only in virtual-pp, only the
fastest is listed.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, ClassVar, Literal

import tyro

from megazoo.cli.flags import File, unset
from megazoo.cli.options import (
    DataOptions,
    EvaluationOptions,
    LoggingOptions,
    ParallelOptions,
)
from megazoo.cli.options import Options as TrainingProgram
from megazoo.cli.plan_report import adapters_of, plan_lines, plan_of, planned_run
from megazoo.cli.settings import resolve
from megazoo.cli.text import size, table, without
from megazoo.errors import UserError
from megazoo.files import write_text
from megazoo.models.hugging_face.export import parse_size
from megazoo.planning import (
    GPUS,
    FoundLayout,
    Planner,
    fastest_layouts,
    find_layouts,
    note_on_mfu,
)

LISTED = 20  # layouts that a search prints
SEARCH_COLUMNS = [
    "tp",
    "pp",
    "cp",
    "dp",
    "ep",
    "virtual-pp",
    "recompute",
    "seq.-par.",
    "zero",
    "memory",
    "bubble",
    "sent tp",
    "sent pp",
    "sent cp",
    "sent dp",
    "exposed",
    "time",
]


@dataclass
class PlanParallelOptions(ParallelOptions):
    """Parallel layout: how the work is divided among ranks."""

    dp: Annotated[int | None, unset("INT", "1")] = None
    """Data-parallel size: number of replicas."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. The defaults of --dtype and --sequence-parallel depend on it. auto:
    cuda, even if this machine has no GPU."""


@dataclass
class Options(TrainingProgram):
    """Run to plan: the settings of the training program, and those below."""

    FIRST: ClassVar[tuple[str, ...]] = ()
    parallel: tyro.conf.OmitArgPrefixes[PlanParallelOptions] = field(
        default_factory=PlanParallelOptions
    )
    json: File = None
    """JSON file to write the plan to. -: write JSON to stdout instead of the table."""
    search: bool = False
    """List layouts that fit into memory, instead of planning one layout."""
    gpus: int = 8
    """Number of GPUs, for --search."""
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    """GPU for the estimated step times of --search, eight per node."""
    memory: str = "80GB"
    """Memory per GPU, for --search."""

    @property
    def replicas(self) -> int:
        return max(1, self.gpus) if self.search else self.parallel.dp or 1


@dataclass
class ShownOptions(Options):
    """Run to plan: the settings of the training program, and those below."""

    data: tyro.conf.Suppress[tyro.conf.OmitArgPrefixes[DataOptions]] = field(
        default_factory=DataOptions
    )
    evaluation: tyro.conf.Suppress[tyro.conf.OmitArgPrefixes[EvaluationOptions]] = field(
        default_factory=EvaluationOptions
    )
    logging: tyro.conf.Suppress[tyro.conf.OmitArgPrefixes[LoggingOptions]] = field(
        default_factory=LoggingOptions
    )
    dry_run: tyro.conf.Suppress[bool] = False
    print_config: tyro.conf.Suppress[bool] = False


def main(arguments: list[str]) -> None:
    # The help omits the groups that no plan depends on; their flags are accepted as in training.
    is_help = {"--help", "-h"} & set(arguments)
    settings = resolve(arguments, __doc__, ShownOptions if is_help else Options)
    options = settings.options
    assert isinstance(options, Options)
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus} must be at least 1")
    if options.parallel.device == "auto":
        options.parallel.device = "cuda"
    parse_size(options.memory)
    if settings.config.num_labels:
        raise UserError(
            "planning a classifier is not supported: plan the language model, which needs a little "
            "more memory, for its logits"
        )
    planner = Planner(settings.config, quick=options.search, attached=adapters_of(settings))
    values, lines = (searched if options.search else planned)(planner, options)
    text = json.dumps(values, indent=1)
    if str(options.json) == "-":
        print(text)
        return
    print("\n".join(lines))
    if options.json:
        write_text("--json", options.json, text + "\n")


def searched(planner: Planner, options: Options) -> tuple[list[dict], list[str]]:
    """Return the best layouts that fit, as values for JSON and as lines to print."""
    memory, cp_method = parse_size(options.memory), options.parallel.cp_method
    run = planned_run(options, options.parallel.device)
    found = find_layouts(planner, options.gpus, memory, run, GPUS[options.gpu], cp_method)
    layouts = fastest_layouts(found)[:LISTED]
    if not layouts:
        raise UserError(f"no layout of {options.gpus} GPUs fits into {options.memory}", exit_code=1)
    batch = f"global batch {run.global_batch_size} x {run.seq_length} tokens"
    return [asdict(layout) for layout in layouts], [*search_lines(layouts, options.gpu), batch]


def planned(planner: Planner, options: Options) -> tuple[dict, list[str]]:
    """Return the plan of one layout, as values for JSON and as lines to print."""
    plan = plan_of(planner, options, options.parallel.dp or 1, options.parallel.device)
    lines = plan_lines(plan)
    if options.model.import_:
        note = note_on_mfu(planner.config, plan.batch["seq_length"])
        lines += [note] if note else []
    return plan.as_dict(), lines


def search_lines(layouts: list[FoundLayout], gpu: str) -> list[str]:
    """Return the table of a search. gpu: the GPU of the estimated times."""
    rows = [SEARCH_COLUMNS]
    for layout in layouts:
        row = [
            layout.tp,
            layout.pp,
            layout.cp,
            layout.dp,
            layout.ep,
            layout.virtual_pp,
            layout.recompute,
            "yes" if layout.sequence_parallel else "no",
            layout.zero,
            size(layout.total),
            f"{layout.bubble:.2%}",
            size(layout.sent_tp),
            size(layout.sent_pp),
            size(layout.sent_cp),
            size(layout.sent_dp),
            f"{layout.exposed:.1%}",
            f"{layout.time / layouts[0].time:.3f}",
        ]
        rows.append([str(cell) for cell in row])
    if all(layout.cp == 1 for layout in layouts):
        rows = without(rows, "cp", *(["sent cp"] if all(each.ep == 1 for each in layouts) else []))
    if all(layout.ep == 1 for layout in layouts):
        rows = without(rows, "ep")
    return [
        *table(rows),
        "memory, bubble and bytes sent per step: maximum over the ranks; "
        f"time: relative to the first layout, which needs about {layouts[0].time:.3g} s on {gpu}",
        "exposed: fraction of the step for communication without overlap: tp (except during "
        "backward products), cp,",
        "ZeRO-1 all-gathers, and the part of gradient all-reduces and pp transfers that lasts "
        "longer than the overlapped computation",
    ]
