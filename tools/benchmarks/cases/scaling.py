"""Measure how the cost of a step grows with layers, width, sequence, micro-batches and ranks, and
how the cost of a conversion grows with the checkpoint. Each is compared with an expected law.

megazoo is not compared with another program, so the results are curves.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.cases.checkpoint import conversion
from benchmarks.cases.train import make
from benchmarks.laws import Curve, Law, Point
from benchmarks.memory import proportional
from benchmarks.results import Setup
from benchmarks.turns import CORES, TOOLS, Job, Side, alone, jobs_in_turn

VOCABULARY = 256
PARTS = (32, 16, 8, 4)  # checkpoint sizes: --gigabytes divided by these


@dataclass(frozen=True)
class Shape:
    """A step of a small GPT-2: the model, the rows of the global batch, and the layout."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    sequence: int = 256
    rows: int = 4
    micro_batches: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def config(self):
        """Return the model's configuration."""
        from megazoo.models.gpt2 import GPT2Config

        return GPT2Config(
            vocab_size=VOCABULARY,
            max_positions=self.sequence,
            hidden_size=self.hidden,
            layers=self.layers,
            heads=self.heads,
            embedding_dropout=0.0,
            attention_dropout=0.0,
            residual_dropout=0.0,
        )


@dataclass(frozen=True)
class Study:
    """A variable to vary.

    Attributes:
        name: Name of the variable.
        base: The step with default values.
        sizes: Values of the variable.
        at: Function that returns `base` with the variable set to a size.
        laws: Laws by quantity.
    """

    name: str
    base: Shape
    sizes: tuple[int, ...]
    at: Callable[[Shape, int], Shape]
    laws: dict[str, Law]


def constant(_: float) -> float:
    return 1.0


def size(x: float) -> float:
    return x


def square(x: float) -> float:
    return x * x


def of_others(ranks: float) -> float:
    """Return the fraction of a sum that a rank receives from other ranks."""
    return (ranks - 1) / ranks


LINE = (constant, size)
RING = Law("2 (n - 1) / n x the all-reduced bytes", (of_others,), 2)
STUDIES = (
    Study(
        "layers",
        Shape(),
        (2, 4, 8, 16),
        lambda base, n: replace(base, layers=n),
        {quantity: Law("a + b layers", LINE) for quantity in ("time", "memory", "sent")},
    ),
    Study(
        "width",
        Shape(sequence=128),
        (128, 256, 512, 1024),
        lambda base, n: replace(base, hidden=n, heads=max(1, n // 64)),
        {
            "time": Law("a + b width²", (constant, square)),
            "memory": Law("a + b width + c width²", (*LINE, square)),
            "sent": Law("a + b width", LINE),
        },
    ),
    Study(
        "sequence",
        Shape(rows=1),
        (256, 512, 1024, 2048, 4096),
        lambda base, n: replace(base, sequence=n),
        {
            "time": Law("a sequence + b sequence²", (size, square)),
            "memory": Law("a + b sequence", LINE),
            "sent": Law("b sequence", (size,)),
        },
    ),
    Study(
        "micro-batches at pp 2",
        Shape(layers=8, sequence=128, pp=2),
        (1, 2, 4, 8, 16),
        lambda base, n: replace(base, micro_batches=n, rows=n * base.rows),
        {
            "time": Law("b (m + p - 1)", (lambda m: m + 1,)),
            "memory": Law("a + b min(m, p)", (constant, lambda m: min(m, 2)), 2),
            "sent": Law("a + b m", LINE),
        },
    ),
    Study(
        "ranks of dp, 4 rows each",
        Shape(heads=16, sequence=128),
        (1, 2, 4, 8, 16),
        lambda base, n: replace(base, dp=n, rows=n * base.rows),
        {
            "time": Law("b n (two cores do n times the work)", (size,), 2),
            "memory": Law("a", (constant,), 2),
            "sent": RING,
        },
    ),
    Study(
        "ranks of tp, 16 rows in total",
        Shape(heads=16, sequence=128, rows=16),
        (1, 2, 4, 8, 16),
        lambda base, n: replace(base, tp=n),
        {
            "time": Law("a (two cores do the same work)", (constant,), 2),
            "memory": Law("a + b / n", (constant, lambda n: 1 / n), 2),
            "sent": RING,
        },
    ),
)


def curves(setup: Setup) -> Iterator[Curve]:
    for study in STUDIES:
        yield measured(study, setup.pairs)
    yield from converted(setup)


def measured(study: Study, runs: int) -> Curve:
    """Measure a study with a process per rank of each size. The sizes alternate."""
    shapes = [study.at(study.base, each) for each in study.sizes]
    jobs = [Job(shape.ranks, step_of, (shape,), "megazoo.optim") for shape in shapes]
    found = jobs_in_turn(jobs, runs)
    single = all(shape.ranks == 1 for shape in shapes)
    points = []
    for each, shape, (seconds, memory) in zip(study.sizes, shapes, found, strict=True):
        # If no size has several ranks, `sent` is computed for tp 2.
        rank = plan(replace(shape, tp=2) if single else shape)
        sent = rank.sent_tp + rank.sent_pp + rank.sent_dp
        tokens, planned = shape.rows * shape.sequence, plan(shape).total
        points.append(Point(each, seconds, tokens, memory, planned, sent))
    return Curve(study.name, points, study.laws)


def plan(shape: Shape):
    """Return the planner's RankPlan of rank 0."""
    from megazoo.parallel.layout import Layout
    from megazoo.planning import PlannedRun, Planner

    run = PlannedRun(
        micro_batch_size=shape.rows // (shape.dp * shape.micro_batches),
        global_batch_size=shape.rows,
        seq_length=shape.sequence,
        dtype="float32",
    )
    layout = Layout(tp=shape.tp, pp=shape.pp, dp=shape.dp)
    return Planner(shape.config(), quick=True).plan(layout, run).ranks[0]


def step_of(shape: Shape) -> Callable[[], object]:
    """Return a function that runs a training step on this rank. The cores are divided among the
    ranks, with at least one thread each."""
    import megazoo

    ctx = megazoo.ParallelContext.from_torch(shape.tp, shape.pp, shape.dp, device="cpu")
    torch.set_num_threads(max(1, CORES // shape.ranks))
    model = megazoo.from_config(shape.config(), ctx)
    optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (shape.rows, shape.sequence), generator=generator)
    mine = ids.chunk(shape.dp)[ctx.dp_rank]

    def step():
        model.train_batch(mine, labels=mine, num_microbatches=shape.micro_batches)
        optimizer.step()

    return step


def converted(setup: Setup, parts: tuple[int, ...] = PARTS) -> Iterator[Curve]:
    """Measure converting Hugging Face checkpoints of several sizes to shards, and resharding the
    results."""
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as name:
        sources, sizes = [], []
        for part in parts:
            source, layers = Path(name) / f"hf-{part}", llama_layers(setup.gigabytes / part)
            alone(make, "llama", source, layers)
            sources.append(source)
            sizes.append(sum(file.stat().st_size for file in source.iterdir()) / 1e9)
        shards, output = [source.with_suffix(".shards") for source in sources], Path(name) / "out"
        commands = [conversion(*each) for each in zip(sources, shards, strict=True)]
        yield of_commands("convert_hf, GB", commands, shards, sizes, setup.pairs)
        reshards = [
            [sys.executable, TOOLS / "reshard.py", source, output, "--tp", 4, "--overwrite"]
            for source in shards
        ]
        outputs = [output] * len(shards)
        yield of_commands("reshard, GB", reshards, outputs, sizes, setup.pairs)


def llama_layers(gigabytes: float) -> int:
    """Return the number of layers with which a model of `make` has this size in fp32; at least 2,
    for pp 2."""
    layer = 4 * 512**2 + 3 * 512 * 1408
    return max(2, round((gigabytes * 1e9 / 4 - 2 * 8192 * 512) / layer))


def of_commands(
    name: str, commands: list[list], outputs: list[Path], sizes: list[float], runs: int
) -> Curve:
    """Measure alternating commands: first the peak of anonymous memory in a separate run, then the
    seconds per run, including the sync to disk."""
    peaks = []
    for command, output in zip(commands, outputs, strict=True):
        shutil.rmtree(output, ignore_errors=True)
        peaks.append(proportional(command, "Pss_Anon"))
    sides = [Side([command, ["sync"]], out) for command, out in zip(commands, outputs, strict=True)]
    seconds = list(zip(*[[side.run()[0] for side in sides] for _ in range(runs)], strict=True))
    points = [
        Point(gigabytes, list(each), gigabytes * 1e3, peak)
        for gigabytes, each, peak in zip(sizes, seconds, peaks, strict=True)
    ]
    laws = {"time": Law("a + b size", LINE), "memory": Law("a", (constant,))}
    return Curve(name, points, laws, "MB/s")
