"""Compare a pipeline of two stages with the schedule's ideal time, zb-h1 with 1F1B, and small
micro-batches with their computation."""

import time
from collections.abc import Iterator

import torch
from benchmarks.results import Result, Setup
from benchmarks.turns import on_ranks

VOCABULARY = 8192


def cases(setup: Setup) -> Iterator[Result]:
    steps, ideal = on_ranks(steps_and_ideal, 2, 8, setup.pairs)[0]
    name = "pp 2, 1f1b, 8 micro-batches: a step, against the schedule with each stage's compute"
    yield Result(name, steps, ideal)
    ours, reference = on_ranks(steps_of_both, 2, 4, setup.pairs)[0]
    yield Result("pp 2, 4 micro-batches: a step of zb-h1, against 1f1b", ours, reference)
    ours, reference = on_ranks(of_a_micro_batch, 2, 32, setup.pairs)[0]
    name = "pp 2, hidden 32: a micro-batch of 32, against its compute alone"
    yield Result(name, ours, reference, unit="ms")


def build():
    """Build a GPT-2 with two stages of about equal time.

    The second stage has two layers fewer, and the head.
    """
    import megazoo
    from megazoo.models.gpt2 import GPT2Config

    config = GPT2Config(
        vocab_size=VOCABULARY,
        max_positions=256,
        hidden_size=512,
        heads=8,
        layers=16,
        embedding_dropout=0.0,
        attention_dropout=0.0,
        residual_dropout=0.0,
    )
    ctx = megazoo.ParallelContext.from_torch(1, 2, device="cpu", stage_layers=(9, 7))
    return megazoo.from_config(config, ctx)


def step(model, microbatches: int, schedule: str):
    """Run a training step that starts simultaneously on all ranks, and return its Stopwatch."""
    return step_of(model, torch.randint(0, VOCABULARY, (microbatches, 256)), schedule)


def step_of(model, ids: torch.Tensor, schedule: str = "1f1b"):
    """Run a training step of the given rows, each a micro-batch, and return its Stopwatch."""
    import torch.distributed as dist

    from megazoo.parallel.timing import Stopwatch

    dist.barrier()
    with Stopwatch(model.ctx.device) as watch:
        model.train_batch(ids, labels=ids, num_microbatches=len(ids), schedule=schedule)
    return watch


def steps_and_ideal(microbatches: int, pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds per step, and the ideal seconds of its schedule: each action takes its
    rank's mean time, and transfers take no time."""
    from megazoo.parallel.collectives import all_gather_objects
    from megazoo.parallel.schedule import one_f_one_b, timeline

    model, steps, ideal = build(), [], []
    tables = [one_f_one_b(rank, 2, 1, microbatches) for rank in range(2)]
    for _ in range(pairs + 1):
        watch = step(model, microbatches, "1f1b")
        times = watch.times()
        ranks = all_gather_objects((watch.seconds, times["forward"], times["backward"]), model.ctx)
        cost = {("F", stage): forward / microbatches for stage, (_, forward, _) in enumerate(ranks)}
        cost |= {
            ("B", stage): backward / microbatches for stage, (_, _, backward) in enumerate(ranks)
        }
        steps.append(max(seconds for seconds, _, _ in ranks))
        ideal.append(max(span.end for span in timeline(tables, cost).values()))
    return steps[1:], ideal[1:]


def steps_of_both(microbatches: int, pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds per step with zb-h1, and with 1F1B."""
    model = build()
    runs = [
        [step(model, microbatches, schedule).seconds for schedule in ("zb-h1", "1f1b")]
        for _ in range(pairs + 1)
    ]
    ours, reference = zip(*runs[1:], strict=True)
    return list(ours), list(reference)


def of_a_micro_batch(microbatches: int, pairs: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds per micro-batch in a step, and in a plain loop of a stage's forward
    and backward passes. The loop's time is that of the slower stage, plus one micro-batch for the
    bubble."""
    import megazoo
    from megazoo.engine.batch import Batch
    from megazoo.models.gpt2 import GPT2Config
    from megazoo.parallel.collectives import all_gather_objects

    ctx = megazoo.ParallelContext.from_torch(1, 2, device="cpu")
    config = GPT2Config(
        vocab_size=256,
        max_positions=32,
        hidden_size=32,
        layers=4,
        heads=4,
        embedding_dropout=0.0,
        attention_dropout=0.0,
        residual_dropout=0.0,
    )
    model = megazoo.from_config(config, ctx)
    ids = torch.randint(0, 256, (microbatches, 32))
    batches, (stage,) = model.engine.micro_batches(Batch(ids, ids), microbatches), model.stages

    def compute():
        for parameter in model.parameters():
            parameter.grad = None
        for batch in batches:
            x = batch.input_ids if stage.first else torch.ones(1, 32, 32, requires_grad=True)
            y = model.forward_stage(x, batch, stage)
            (model.output_head.loss(y, batch, torch.ones(())) if stage.last else y).sum().backward()

    steps, alone = [], []
    for _ in range(pairs + 1):
        steps.append(1e3 * step_of(model, ids).seconds / microbatches)
        began = time.perf_counter()
        compute()
        seconds = max(all_gather_objects(time.perf_counter() - began, ctx))
        alone.append(1e3 * seconds / microbatches * (1 + 1 / microbatches))
    return steps[1:], alone[1:]
