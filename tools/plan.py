"""Tell what each rank of a run needs, before there is one: memory, FLOPs, traffic, and the
pipeline's bubble.

$ python tools/plan.py --preset gpt3-175b --tp 8 --pp 16 --dp 8 --json plan.json
$ python tools/plan.py --preset gpt3-175b --search --gpus 1024 --memory 80GB

--search ranks the layouts that fit by the time of a step, shortest first: the FLOPs of a rank,
bubble and recomputation included, and as many more for each byte that it sends as an H100 computes
in that time: 1,000 over tp, within a node; 10,000 over pp and dp. tp, pp, dp, virtual-pp,
recompute, sequence-parallel and zero are searched, the rest is as given.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Literal

import tyro

from megazoo.cli.flags import File, optional, parse_flags
from megazoo.cli.launch import run_program
from megazoo.cli.options import ModelOptions, ParallelOptions, TrainingOptions
from megazoo.cli.parsing import run_file
from megazoo.cli.rules import model_config
from megazoo.errors import UserError
from megazoo.models.hugging_face.export import parse_size
from megazoo.planning import Planner, find_layouts, note_on_mfu

LISTED = 20  # layouts that a search tells
USUAL_LENGTH = 4096


@dataclass
class PlanParallelOptions(ParallelOptions):
    """How ranks share the work."""

    dp: int = 1
    """Data-parallel size: replicas."""
    device: tyro.conf.Suppress[str] = "cpu"


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


@dataclass
class Options:
    """What is planned."""

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)
    parallel: tyro.conf.OmitArgPrefixes[PlanParallelOptions] = field(
        default_factory=PlanParallelOptions
    )
    batch: tyro.conf.OmitArgPrefixes[BatchOptions] = field(default_factory=BatchOptions)
    json: Annotated[File, tyro.conf.arg(metavar="PATH")] = None
    """File for the same as JSON; - is stdout, without the table."""
    search: bool = False
    """List layouts that fit instead of planning one."""
    gpus: int = 8
    """Ranks, of a search."""
    memory: str = "80GB"
    """Of a device, of a search."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.model.import_:
        run_file(options.model.import_)
    config, parallel, dp = model_config(options.model), options.parallel, options.parallel.dp
    ranks = options.gpus if options.search else parallel.tp * parallel.pp * dp
    given = {f.name: getattr(options.batch, f.name) for f in fields(options.batch)}
    if given["global_batch_size"] is None:
        given["global_batch_size"] = max(1, ranks) * given["micro_batch_size"]
    if given["seq_length"] is None:
        given["seq_length"] = min(config.max_positions, USUAL_LENGTH)
    training = TrainingOptions(**given)
    planner = Planner(config, quick=options.search)
    if options.search:
        memory = parse_size(options.memory)
        found = find_layouts(planner, options.gpus, memory, parallel, training)
        layouts = sorted(found, key=lambda layout: layout.time)[:LISTED]
        if not layouts:
            raise UserError(
                f"no layout of {options.gpus} GPUs fits into {options.memory}", exit_code=1
            )
        told, lines = [asdict(layout) for layout in layouts], search_lines(layouts)
    else:
        planner.check(parallel, training, dp)
        plan = planner.plan(parallel, training, dp)
        told, lines = plan.as_dict(), plan_lines(plan)
        if options.model.import_ and (note := note_on_mfu(config, training.seq_length)):
            lines.append(note)
    text = json.dumps(told, indent=1)
    if str(options.json) == "-":
        print(text)
        return
    print("\n".join(lines))
    if options.json:
        try:
            options.json.write_text(text + "\n")
        except OSError as error:
            raise UserError(f"--json {options.json}: {error.strerror}") from error


def plan_lines(plan) -> list[str]:
    """A plan as a table, a line for ranks that are alike."""
    layout, batch = plan.layout, plan.batch
    rows = [
        "pp,tp,layers,parameters,weights,gradients,optimizer,on host,activations,total,"
        "in flight,FLOPs,sent tp,sent pp,sent dp".split(",")
    ]
    for rank in plan.ranks:
        sizes = (
            rank.weights,
            rank.gradients,
            rank.optimizer,
            rank.optimizer_host,
            rank.activations,
            rank.total,
        )
        sent = (rank.sent_tp, rank.sent_pp, rank.sent_dp)
        rows.append([
            str(rank.pp), ranges(rank.tp), str(rank.layers), f"{rank.parameters:,}", *map(size, sizes),
            str(rank.in_flight), f"{rank.flops:.4g}", *map(size, sent),
        ])  # fmt: skip
    return [
        f"{plan.model}, {plan.parameters:,} parameters, on tp {layout['tp']} x pp {layout['pp']} x dp {layout['dp']}",
        f"  {plan.microbatches} micro-batches of {batch['micro_batch_size']} x {batch['seq_length']} tokens a replica, "
        f"{batch['dtype']}, recompute {batch['recompute']}",
        f"  bubble {plan.bubble:.2%} of the work, {plan.bubble_of_stages:.2%} with what each stage really has to do",
        f"  {plan.model_flops_per_token:.4g} model FLOPs a token, nothing twice",
        *table(rows),
        "bytes; FLOPs and bytes sent are a step's; each line stands for its tp ranks in every replica",
    ]


def search_lines(layouts) -> list[str]:
    """What a search found, as a table."""
    rows = [
        "tp,pp,dp,virtual-pp,recompute,seq.-par.,zero,memory,bubble,sent tp,sent pp,sent dp,time".split(
            ","
        )
    ]
    for each in layouts:
        rows.append([
            *map(str, (each.tp, each.pp, each.dp, each.virtual_pp, each.recompute)),
            "yes" if each.sequence_parallel else "no", str(each.zero), size(each.total), f"{each.bubble:.2%}",
            *map(size, (each.sent_tp, each.sent_pp, each.sent_dp)), f"{each.time / layouts[0].time:.3f}",
        ])  # fmt: skip
    return [
        *table(rows),
        "memory, bubble and bytes sent a step: of the rank that has most; time: over the first one's",
    ]


def table(rows: list[list[str]]) -> list[str]:
    """Columns as wide as they need to be, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def ranges(numbers: list[int]) -> str:
    """0-3,6 for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def size(count: float) -> str:
    """Bytes, to four digits: 12.34GB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 999.95 or unit == "TB":
            return f"{count:.4g}{unit}"
        count /= 1000
    raise AssertionError


if __name__ == "__main__":
    run_program(main)
