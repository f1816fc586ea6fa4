"""Tell what each rank of a run needs, before there is one: memory, FLOPs, traffic, and the
pipeline's bubble.

$ megazoo plan --preset gpt3-175b --tp 8 --pp 16 --dp 8 --json plan.json
$ megazoo plan --preset gpt3-175b --search --gpus 1024 --gpu h100 --memory 80GB
$ megazoo plan --preset llama-7b --lora-rank 8 --lora-targets q,v

--search ranks the layouts that fit by the estimated time of a step, shortest first. It has what is
computed, bubble and recomputation included, and what of the communication nothing hides. Hidden are
sums of gradients over replicas as far as the last micro-batch's backward lasts, what tp sends
beside products of the backward, and transfers between stages that come in time. Exposed are the
rest of tp's traffic, cp's, and ZeRO-1's gathers of the updated parameters. tp, pp, dp, virtual-pp,
recompute, sequence-parallel and zero are searched, and cp for long sequences that don't fit without
recomputation; the rest is as given. Of layouts that differ in virtual-pp only the fastest is told.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Literal

import tyro

from megazoo.cli.flags import File, flag_of, optional, parse_flags
from megazoo.cli.options import LoRAOptions, ModelOptions, ParallelOptions
from megazoo.cli.parsing import run_file
from megazoo.cli.rules import check_value, model_config, parse_stage_layers
from megazoo.errors import UserError
from megazoo.files import write_text
from megazoo.models.hugging_face.export import parse_size
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.schedule import placement_named_by
from megazoo.parallel.sizes import product_of
from megazoo.planning import (
    GPUS,
    FoundLayout,
    Plan,
    PlannedRun,
    Planner,
    fastest_layouts,
    find_layouts,
    note_on_mfu,
)

LISTED = 20  # layouts that a search tells
USUAL_LENGTH = 4096
PLAN_COLUMNS = [
    "pp",
    "tp",
    "layers",
    "parameters",
    "trainable",
    "weights",
    "gradients",
    "optimizer",
    "on host",
    "activations",
    "total",
    "in flight",
    "FLOPs",
    "sent tp",
    "sent pp",
    "sent cp",
    "sent dp",
]
SEARCH_COLUMNS = [
    "tp",
    "pp",
    "cp",
    "dp",
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
    """How ranks share the work."""

    dp: int = 1
    """Data-parallel size: replicas."""
    device: tyro.conf.Suppress[str] = "cpu"


@dataclass
class PlanModelOptions(ModelOptions):
    """What is planned. Sizes that are left out are the preset's."""

    num_labels: optional(int, "INT", "no classifier") = None
    """Refused: plan the language model, which takes a little more memory, for its logits."""


@dataclass
class BatchOptions:
    """What a step is of."""

    micro_batch_size: int = 1
    """Sequences that a pipeline stage handles at once."""
    global_batch_size: optional(int, "INT", "as many micro-batches as ranks") = None
    """Sequences a step, over all replicas and micro-batches."""
    seq_length: optional(int, "INT", f"the model's longest, {USUAL_LENGTH} at most") = None
    """Tokens of a sequence."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights and activations."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Run parts again in backward instead of keeping their activations: attention and the MLPs'
    activations, or all."""
    recompute_interval: int = 1
    """Layers that are recomputed as one unit under full."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon keeps one moment of matrices, and takes FLOPs and traffic to orthogonalise them."""
    train_only: optional(str, "PATTERN", "everything") = None
    """Regular expression: parameters in whose name it is not found stay frozen: they get no
    gradient and no optimizer state."""


@dataclass
class PlanLoRAOptions(LoRAOptions):
    """Low-rank adapters: with them the weights stay as they are, and a small change of some
    matrices is trained."""

    lora_load: tyro.conf.Suppress[File] = None


@dataclass
class Options:
    """What is planned."""

    model: tyro.conf.OmitArgPrefixes[PlanModelOptions] = field(default_factory=PlanModelOptions)
    parallel: tyro.conf.OmitArgPrefixes[PlanParallelOptions] = field(
        default_factory=PlanParallelOptions
    )
    batch: tyro.conf.OmitArgPrefixes[BatchOptions] = field(default_factory=BatchOptions)
    lora: tyro.conf.OmitArgPrefixes[PlanLoRAOptions] = field(default_factory=PlanLoRAOptions)
    json: Annotated[File, tyro.conf.arg(metavar="PATH")] = None
    """File for the same as JSON; - is stdout, without the table."""
    search: bool = False
    """List layouts that fit instead of planning one."""
    gpus: int = 8
    """Ranks, of a search."""
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    """Kind of GPU whose time a search estimates, eight to a node."""
    memory: str = "80GB"
    """Of a device, of a search."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    check_sizes(options)
    if options.model.import_:
        run_file(options.model.import_)
    config = model_config(options.model)
    if config.num_labels:
        raise UserError(
            "classifiers are not planned: plan the language model, which takes a little more "
            "memory, for its logits"
        )
    run = run_of(options, config)
    for group in (options.parallel, run):
        for f in fields(group):
            check_value(f.name, getattr(group, f.name))
    planner = Planner(config, quick=options.search, attached=options.lora.settings)
    values, lines = (searched if options.search else planned)(planner, options, run)
    text = json.dumps(values, indent=1)
    if str(options.json) == "-":
        print(text)
        return
    print("\n".join(lines))
    if options.json:
        write_text("--json", options.json, text + "\n")


def check_sizes(options: Options) -> None:
    """Raise UserError for a size below 1, those that the other mode has no use for included."""
    parallel, batch = options.parallel, options.batch
    for name, value in {
        "gpus": options.gpus,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "dp": parallel.dp,
        "virtual-pp": parallel.virtual_pp,
        "cp": parallel.cp,
        "micro-batch-size": batch.micro_batch_size,
        "global-batch-size": batch.global_batch_size,
    }.items():
        if value is not None and value < 1:
            raise UserError(f"{name} {value} must be at least 1")
    parse_size(options.memory)
    if options.lora.given and not options.lora.lora_rank:
        flag = flag_of(next(iter(options.lora.given))).removeprefix("--")
        raise UserError(f"{flag} without adapters: give --lora-rank R")


def run_of(options: Options, config) -> PlannedRun:
    """Return the run that is planned, with what was left out."""
    batch, parallel = options.batch, options.parallel
    global_batch_size, seq_length = batch.global_batch_size, batch.seq_length
    if global_batch_size is None:
        sizes = parallel.tp, parallel.pp, parallel.cp, parallel.dp
        ranks = options.gpus if options.search else math.prod(sizes)
        global_batch_size = max(1, ranks) * batch.micro_batch_size
    if seq_length is None:
        seq_length = min(config.max_positions, USUAL_LENGTH)
    return PlannedRun(
        micro_batch_size=batch.micro_batch_size,
        global_batch_size=global_batch_size,
        seq_length=seq_length,
        dtype=batch.dtype,
        schedule=parallel.schedule,
        zero=parallel.zero,
        offload_optimizer=parallel.offload_optimizer,
        recompute=batch.recompute,
        recompute_interval=batch.recompute_interval,
        optimizer=batch.optimizer,
        train_only=batch.train_only,
    )


def searched(planner: Planner, options: Options, run: PlannedRun) -> tuple[list[dict], list[str]]:
    """Return the best layouts that fit, as values for JSON and as lines to print."""
    memory, cp_method = parse_size(options.memory), options.parallel.cp_method
    found = find_layouts(planner, options.gpus, memory, run, GPUS[options.gpu], cp_method)
    layouts = fastest_layouts(found)[:LISTED]
    if not layouts:
        raise UserError(f"no layout of {options.gpus} GPUs fits into {options.memory}", exit_code=1)
    return [asdict(layout) for layout in layouts], search_lines(layouts, options.gpu)


def planned(planner: Planner, options: Options, run: PlannedRun) -> tuple[dict, list[str]]:
    """Return the plan of one layout, as values for JSON and as lines to print."""
    parallel = options.parallel
    layout = ParallelContext.virtual(
        parallel.tp,
        parallel.pp,
        parallel.dp,
        cp=parallel.cp,
        cp_method=parallel.cp_method,
        sequence_parallel=bool(parallel.sequence_parallel),
        virtual=parallel.virtual_pp,
        placement=placement_named_by(parallel.schedule),
        stage_layers=parse_stage_layers(parallel.stage_layers),
    )
    planner.check(layout, run)
    plan = planner.plan(layout, run)
    lines = plan_lines(plan)
    if options.model.import_:
        note = note_on_mfu(planner.config, run.seq_length)
        lines += [note] if note else []
    return plan.as_dict(), lines


def plan_lines(plan: Plan) -> list[str]:
    """Write a plan as a table, a line for ranks that are alike."""
    layout, batch = plan.layout, plan.batch
    sizes = product_of(layout["tp"], layout["pp"], layout["dp"], layout["cp"])
    rows = [PLAN_COLUMNS]
    for rank in plan.ranks:
        row = [
            rank.pp,
            ranges(rank.tp),
            rank.layers,
            f"{rank.parameters:,}",
            f"{rank.trainable_parameters:,}",
            size(rank.weights),
            size(rank.gradients),
            size(rank.optimizer),
            size(rank.optimizer_host),
            size(rank.activations),
            size(rank.total),
            rank.in_flight,
            f"{rank.flops:.4g}",
            size(rank.sent_tp),
            size(rank.sent_pp),
            size(rank.sent_cp),
            size(rank.sent_dp),
        ]
        rows.append([str(cell) for cell in row])
    if layout["cp"] == 1:
        rows = without(rows, "sent cp")
    trained = ""
    if plan.trainable_parameters < plan.parameters:
        trained = f", {plan.trainable_parameters:,} of them trained"
    else:
        rows = without(rows, "trainable")
    return [
        f"{plan.model}, {plan.parameters:,} parameters{trained}, on {sizes}",
        f"  {plan.microbatches} micro-batches of {batch['micro_batch_size']} x "
        f"{batch['seq_length']} tokens a replica, {batch['dtype']}, recompute {batch['recompute']}",
        f"  bubble {plan.bubble:.2%} of the work, "
        f"{plan.bubble_of_stages:.2%} with what each stage really has to do",
        f"  {plan.model_flops_per_token:.4g} model FLOPs a token, nothing twice",
        *table(rows),
        "bytes; FLOPs and bytes sent are a step's; "
        "each line stands for its tp ranks in every replica"
        + (", and all along cp" if layout["cp"] > 1 else ""),
    ]


def search_lines(layouts: list[FoundLayout], gpu: str) -> list[str]:
    """Write what a search found as a table. gpu: whose time was estimated."""
    rows = [SEARCH_COLUMNS]
    for layout in layouts:
        row = [
            layout.tp,
            layout.pp,
            layout.cp,
            layout.dp,
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
        rows = without(rows, "cp", "sent cp")
    return [
        *table(rows),
        "memory, bubble and bytes sent a step: of the rank that has most; "
        f"time: over the first one's, which is some {layouts[0].time:.3g} s on {gpu}",
        "exposed: communication that nothing hides, of the step: tp's (but for what goes on beside "
        "products), cp's,",
        "ZeRO-1's gathers, and what lasts longer than the work beside it: sums over replicas, "
        "sends over pp",
    ]


def without(rows: list[list[str]], *names: str) -> list[list[str]]:
    """Return the rows of a table without some of its columns; the first row has their names."""
    kept = [index for index, name in enumerate(rows[0]) if name not in names]
    return [[row[index] for index in kept] for row in rows]


def table(rows: list[list[str]]) -> list[str]:
    """Align cells to the right, in columns as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def ranges(numbers: list[int]) -> str:
    """Write numbers in order as ranges: 0-3,6 for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def size(count: float) -> str:
    """Write bytes to four digits: 12.34GB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 999.95 or unit == "TB":
            return f"{count:.4g}{unit}"
        count /= 1000
    raise AssertionError
