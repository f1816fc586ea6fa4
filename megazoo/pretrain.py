"""Pretrain a language model with tensor, pipeline, context and data parallelism.

$ megazoo pretrain                                    one process, a small GPT-2
$ megazoo pretrain --tp 2 --pp 4                      eight ranks here: 2-way tensor, 4 stages
$ megazoo pretrain --load runs/a --tp 4 --steps 2000  resume in another layout
$ torchrun --nproc-per-node 8 -m megazoo.pretrain --tp 2 --pp 2   2 replicas

In a clone, pretrain_gpt.py is the same command.
"""

import sys

import torch.distributed as dist

from megazoo.cli.program import run_command
from megazoo.cli.settings import resolve
from megazoo.cli.starting import data_parallel_size, start_missing_ranks
from megazoo.cli.summary import introduce, show, summary
from megazoo.commands import command_named, started_as
from megazoo.launching.deaths import naming_dead_ranks
from megazoo.parallel.compile import check_compiler
from megazoo.parallel.context import ParallelContext
from megazoo.terminal import print_rank_0
from megazoo.trainer.loop import train
from megazoo.trainer.preparation import check, connect
from megazoo.trainer.run import Run, notes_on_changes


def main(arguments: list[str]) -> None:
    run = prepare(arguments)
    if run.finished:
        return
    parallel, device = run.options.parallel, run.device()
    if run.options.training.compile:
        check_compiler(device.type)
    start_missing_ranks(
        lambda: run_rank(run), parallel.tp, parallel.pp, parallel.cp, parallel.dp or 1
    )


def run_rank(run: Run) -> None:
    """Train on this rank."""
    ctx = start_rank(run)
    with naming_dead_ranks(ctx):
        introduce(run, ctx)
        if recorder := train(run, ctx):
            print_rank_0(summary(run, recorder))
    if dist.is_initialized():
        dist.destroy_process_group()


def prepare(arguments: list[str]) -> Run:
    """Read, complete and check the settings, before ranks start and before anything is built."""
    settings = resolve(arguments, __doc__)
    parallel = settings.options.parallel
    dp = data_parallel_size(parallel.tp, parallel.pp, parallel.cp, parallel.dp)
    run = check(settings, dp)
    if run.options.dry_run or run.options.print_config:
        show(run, dp)
        run.finished = True
    return run


def start_rank(run: Run) -> ParallelContext:
    """Print notes, wait until the data is tokenized, and connect to the other ranks."""
    for note in notes_on_changes(run):  # before a file that a checkpoint names is read
        print_rank_0(note)
    if run.weights.base_note:
        print_rank_0(run.weights.base_note)
    return connect(run)


if __name__ == "__main__":
    started_as(command_named("pretrain"))
    run_command(command_named("pretrain"), sys.argv[1:])
