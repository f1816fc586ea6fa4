"""Estimate what a run needs on each rank, without starting it: memory, FLOPs, communication and
pipeline bubble.

$ megazoo plan --preset gpt3-175b --tp 8 --pp 16 --dp 8 --json plan.json
$ megazoo plan --preset llama3-8b --tp 2 --pp 4 --plot memory.png
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
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar, Literal

import tyro

from megazoo.cli.parsing import each_once
from megazoo.cli.parsing import without as without_flags
from megazoo.cli.picture import check_picture, save_picture
from megazoo.cli.plan_picture import memory_figure
from megazoo.cli.plan_report import adapters_of, plan_lines, plan_of, planned_run
from megazoo.cli.settings import resolve
from megazoo.cli.text import size, table, without
from megazoo.commands import torchrun_line
from megazoo.errors import UserError
from megazoo.files import write_text
from megazoo.formats.hugging_face.export import parse_size
from megazoo.models.counts import flops_per_token
from megazoo.parallel.layout import Layout
from megazoo.parallel.schedule import placement_named_by
from megazoo.planning import (
    GPUS,
    FoundLayout,
    Planner,
    fastest_layouts,
    find_layouts,
    most_layouts,
    note_on_mfu,
)
from megazoo.planning.search import SEARCHED
from megazoo.planning.step_time import NODE
from megazoo.settings import File, flag_of, settings_of, unset
from megazoo.terminal import count_bar
from megazoo.trainer.options import (
    DataOptions,
    EvaluationOptions,
    LoggingOptions,
    ParallelOptions,
)
from megazoo.trainer.options import Options as TrainingProgram

DEFAULT_MEMORY = "80GB"
LISTED = 20  # layouts that a search prints
PROGRESS_SECONDS = 5.0  # between the lines of progress of a search
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
    "tokens/s/GPU",
    "MFU",
]
# Settings that a search selects. A run of the layout needs their flags.
SELECTED = (*SEARCHED, "recompute")


@dataclass(frozen=True, kw_only=True)
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
    plot: File = None
    """Picture (.png or .svg) to draw the memory of each rank to, with matplotlib. --memory adds a
    line."""
    search: bool = False
    """List layouts that fit into memory, instead of planning one layout."""
    gpus: int = 8
    """Number of GPUs, for --search."""
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    """GPU for the estimated step times of --search, eight per node."""
    memory: Annotated[str | None, unset("SIZE", "80GB")] = None
    """Memory per GPU, for --search and --plot."""

    @property
    def memory_limit(self) -> int:
        return parse_size(self.memory or DEFAULT_MEMORY)

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
        options.parallel = replace(options.parallel, device="cuda")
    limit = options.memory_limit
    if options.plot:
        check_picture("--plot", options.plot)
        if options.search:
            raise UserError("--plot draws a single layout: remove --plot or --search")
    if settings.config.num_labels:
        raise UserError(
            "planning a classifier is not supported: plan the language model, which needs a little "
            "more memory, for its logits"
        )
    planner = Planner(settings.config, quick=options.search, attached=adapters_of(settings))
    if options.search:
        values, lines = searched(planner, options, limit, arguments)
    else:
        plan = plan_of(planner, options, options.parallel.dp or 1, options.parallel.device)
        values, lines = plan.as_dict(), plan_lines(plan)
        if options.model.import_:
            note = note_on_mfu(planner.config, plan.batch["seq_length"])
            lines += [note] if note else []
        if options.plot:
            figure = memory_figure(plan, limit if options.memory else None)
            with redirect_stdout(sys.stderr):  # stdout may be JSON
                save_picture(figure, options.plot)
    text = json.dumps(values, indent=1)
    if str(options.json) == "-":
        print(text)
        return
    print("\n".join(lines))
    if options.json:
        write_text("--json", options.json, text + "\n")


def searched(
    planner: Planner, options: Options, memory: int, arguments: list[str]
) -> tuple[list[dict], list[str]]:
    """Return the best layouts that fit, as values for JSON and as lines to print. memory: bytes
    per GPU. arguments: words of the command line."""
    parallel = options.parallel
    pp = 1 if placement_named_by(parallel.schedule) == "loop" else 2  # replaced by the search
    layout = Layout(pp=pp, schedule=parallel.schedule, cp_method=parallel.cp_method)
    run, gpus, gpu = planned_run(options, options.parallel.device), options.gpus, GPUS[options.gpu]
    most = most_layouts(planner.config, gpus, run.seq_length)
    with count_bar(most, "search", "layouts", PROGRESS_SECONDS) as bar:
        found = find_layouts(
            planner, gpus, memory, run, gpu, layout, lambda done: bar.update(done - bar.n)
        )
        layouts = fastest_layouts(found)[:LISTED]
    if not layouts:
        raise UserError(
            f"no layout of {gpus} GPUs fits into {options.memory or DEFAULT_MEMORY}", exit_code=1
        )
    flops = flops_per_token(planner.config, run.seq_length, run.train_only, planner.attached)
    speeds = [run.global_batch_size * run.seq_length / each.time / gpus for each in layouts]
    mfus = [speed * flops / gpu.flops for speed in speeds]
    values = [
        {**layout.as_dict(), "tokens_per_second_per_gpu": speed, "mfu": mfu}
        for layout, speed, mfu in zip(layouts, speeds, mfus, strict=True)
    ]
    batch = f"global batch {run.global_batch_size} x {run.seq_length} tokens"
    command = run_command(layouts[0], options, arguments)
    return values, [*search_lines(layouts, speeds, mfus, options.gpu), batch, command]


def run_command(layout: FoundLayout, options: Options, arguments: list[str]) -> str:
    """Return the line with the command that trains in a layout. arguments: words of the search."""
    ranks = options.gpus
    nodes = next(n for n in range(-(-ranks // NODE), ranks + 1) if ranks % n == 0)
    of_plan = {f.name for f in fields(Options)} - {f.name for f in fields(TrainingProgram)}
    words = without_flags(each_once(arguments), {*of_plan, *SELECTED})
    usual, given = settings_of(TrainingProgram), options.values
    for name in SELECTED:
        value = layout.recompute if name == "recompute" else getattr(layout.layout, name)
        if name == "dp":  # follows from the number of ranks
            needed = given[name] not in (None, value)
        elif name == "sequence_parallel":
            needed = value or given[name]
        else:
            needed = value not in (usual[name], given[name]) or given[name] != usual[name]
        if needed:
            flag = flag_of(name)
            is_switch = isinstance(value, bool)
            off = flag.replace("--", "--no-", 1)
            words += [flag if value else off] if is_switch else [flag, str(value)]
    for name in ("global_batch_size", "micro_batch_size"):  # their defaults depend on dp
        if name not in {flag_of(word)[2:].replace("-", "_") for word in words}:
            words += [flag_of(name), str(getattr(options.training, name))]
    where = f"on each of {nodes} nodes" if nodes > 1 else "start it with"
    return f"{where}: {torchrun_line(ranks, words, 'pretrain', nodes)}"


def search_lines(
    layouts: list[FoundLayout], speeds: list[float], mfus: list[float], gpu: str
) -> list[str]:
    """Return the table of a search. speeds: tokens per second and GPU. gpu: the GPU of the
    estimated times."""
    rows = [SEARCH_COLUMNS]
    for layout, speed, mfu in zip(layouts, speeds, mfus, strict=True):
        chosen = layout.layout
        row = [
            chosen.tp,
            chosen.pp,
            chosen.cp,
            chosen.dp,
            chosen.ep,
            chosen.virtual_pp,
            layout.recompute,
            "yes" if chosen.sequence_parallel else "no",
            chosen.zero,
            size(layout.total),
            f"{layout.bubble:.2%}",
            size(layout.sent_tp),
            size(layout.sent_pp),
            size(layout.sent_cp),
            size(layout.sent_dp),
            f"{layout.exposed:.1%}",
            f"{layout.time / layouts[0].time:.3f}",
            f"{speed:,.0f}",
            f"{mfu:.1%}",
        ]
        rows.append([str(cell) for cell in row])
    no_ep = all(each.layout.ep == 1 for each in layouts)
    if all(each.layout.cp == 1 for each in layouts):
        rows = without(rows, "cp", *(["sent cp"] if no_ep else []))
    if no_ep:
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
