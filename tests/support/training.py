"""What several tests share: tiny models, batches with unevenly masked labels, and a training run in
any layout."""

import ctypes
import math
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

import megazoo
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.testing import GROUP_TIMEOUT, RankPool

# Five layers so that stages are uneven; 61 tokens so that neither 2 nor 4 divides the vocabulary.
TINY = dict(vocab_size=61, max_positions=16, hidden_size=32, layers=5, heads=4)
NO_DROPOUT = dict(embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
GLOBAL_BATCH = 8
CLIP = 0.2


def tiny_config(tied: bool = True, dropout: float = 0.0, **overrides) -> GPT2Config:
    rates = dict.fromkeys(NO_DROPOUT, dropout)
    return GPT2Config(**{**TINY, **rates, "tie_embeddings": tied, **overrides})


MODELS = {
    "gpt2": tiny_config(),
    "llama": LlamaConfig(
        **TINY, kv_heads=2, ffn_size=48, attention_bias=True, mlp_bias=True, tie_embeddings=True
    ),
    "llama, one KV head": LlamaConfig(**TINY, kv_heads=1, ffn_size=48),
    "mpt": MPTConfig(**TINY, qk_norm=True, bias=True, kv_heads=2, clip_qkv=0.5),
    "mpt, learned positions": MPTConfig(**TINY, alibi=False, logit_scale=0.5, tie_embeddings=False),
}


def make_batch(step: int, batch: int = GLOBAL_BATCH, sequence: int = 16, vocab: int = 61):
    """Token ids and targets; row r keeps roughly r + 1 of every 8 labels, so that micro-batches
    differ widely."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (batch, sequence + 1), generator=generator)
    keep = (
        torch.rand(batch, sequence, generator=generator)
        < torch.arange(1, batch + 1)[:, None] / batch
    )
    return tokens[:, :-1], tokens[:, 1:].masked_fill(~keep, -100)


def replica_rows(tensor, ctx):
    """The rows of a global batch that belong to this rank's replica."""
    return tensor.chunk(ctx.dp_size)[ctx.dp_rank]


def context(
    tp=1,
    pp=1,
    dp=1,
    sp=False,
    v=1,
    stage_layers="balanced",
    cp=1,
    method="allgather",
    placement="loop",
    folded=None,
    zero=0,
    zero_gather="microbatch",
):
    how = {
        "zero": zero,
        "zero_gather": zero_gather,
        "placement": placement,
        "sequence_parallel": sp,
        "virtual_pipeline_size": v,
        "stage_layers": stage_layers,
        "folded": folded,
    }
    how |= {"context_parallel_size": cp, "context_parallel_method": method}
    ctx = megazoo.ParallelContext.from_torch(tp, pp, dp, **how, device="cpu", timeout=GROUP_TIMEOUT)
    torch.set_num_threads(1)  # bits may depend on the number of threads
    return ctx


def randomize(model, seed=7):
    """Give biases and norms random values too, the same in every layout, so that zeros hide
    nothing."""
    from dataclasses import replace

    from megazoo.parallel.module import initialize
    from megazoo.parallel.random import derive_seed
    from megazoo.parallel.storage import in_memory

    for entry in in_memory(model, model.entries(), write=True):
        if entry.spec.std == 0:
            initialize(
                entry.parameter,
                replace(entry.spec, std=0.1),
                model.ctx,
                derive_seed(seed, entry.name),
            )
    return model


def randomized_(hf):
    """Random values for every parameter of a transformers model: ones and zeros would hide a
    mix-up."""
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return hf.eval()


class Case(NamedTuple):
    """A model, given by its config and global tensors, with inputs and what an oracle gives for
    each."""

    name: str
    config: object
    weights: dict
    inputs: dict  # name -> the arguments of a model's forward
    expected: dict  # name -> (loss or None, logits)


def inputs_for(length: int, position_ids: bool = True) -> dict:
    """Without padding, with padding on each side, and one token. position_ids: with them, too."""
    ids = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(5))
    inputs = {
        "no padding": {"input_ids": ids, "labels": ids},
        "one token": {"input_ids": ids[:, :1]},
    }
    place = torch.arange(length - 1)
    for side, tokens in (("right", place < length - 6), ("left", place >= 6)):
        # an odd length, and one row with padding
        mask = torch.stack([torch.ones_like(tokens), tokens]).long()
        loses = mask.bool() & mask.roll(1, 1).bool()  # nothing is predicted from padding
        labels = ids[:, :-1].masked_fill(~loses, -100)
        inputs[f"{side} padding"] = {
            "input_ids": ids[:, :-1],
            "attention_mask": mask,
            "labels": labels,
        }
        if position_ids:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            inputs[f"{side} padding, positions"] = {
                **inputs[f"{side} padding"],
                "position_ids": positions,
            }
    return inputs


@torch.no_grad()
def transformers_case(name: str, config, hf, weights: dict, inputs: dict) -> Case:
    """The case whose oracle is a transformers model."""
    outputs = {kind: hf(**arguments) for kind, arguments in inputs.items()}
    return Case(
        name,
        config,
        weights,
        inputs,
        {kind: (out.get("loss"), out.logits) for kind, out in outputs.items()},
    )


def outputs_of_copied_weights(cases: list[Case], layout: dict) -> list:
    """Loss and logits of every case's inputs, in any layout."""
    outputs, ctx = [], context(**layout)
    for case in cases:
        model = megazoo.from_config(case.config, ctx).eval()
        with torch.no_grad():
            for entry in model.entries():
                for piece in entry.spec.pieces(model.ctx.place):
                    box = tuple(slice(*bounds) for bounds in piece.box)
                    entry.parameter[piece.index()] = case.weights[entry.name][box]
            runs = {
                kind: model(**arguments, return_logits=True)
                for kind, arguments in case.inputs.items()
            }
        outputs.append({kind: (out.loss, out.logits) for kind, out in runs.items()})
    return outputs


INFERENCE_LAYOUTS = [
    dict(), dict(tp=2), dict(tp=4), dict(pp=2), dict(tp=2, pp=2), dict(tp=4, pp=2),
    dict(tp=2, sp=True), dict(tp=4, sp=True), dict(tp=2, pp=2, sp=True),
]  # fmt: skip


def assert_outputs_equal(ranks, cases: list[Case], layout: dict):
    """The loss within 1e-5 on every rank, the logits of all tokens within 5e-5 on the ranks of the
    last stage."""
    for results in run_in_layout(ranks, outputs_of_copied_weights, layout, cases):
        for case, outputs in zip(cases, results, strict=True):
            for kind, (loss, logits) in outputs.items():
                where = f"{case.name}, {kind}"
                expected_loss, expected_logits = case.expected[kind]
                if expected_loss is not None:
                    assert abs(loss - expected_loss) < 1e-5, where
                if logits is not None:
                    mask = case.inputs[kind].get("attention_mask")
                    mask = torch.ones(logits.shape[:2]) if mask is None else mask
                    difference = (logits - expected_logits)[mask.bool()].abs().max()
                    assert difference < 5e-5, f"{where}: {difference}"
    assert any(logits is not None for _, logits in results[0].values()), (
        "the last rank has the logits"
    )


def layout_name(layout: dict) -> str:
    words = {"sp": "sp", "method": layout.get("method")}
    sizes = (words.get(axis) or f"{axis}{size}" for axis, size in layout.items())
    return "".join(sizes) or "one process"


def world(layout: dict) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))


def run_in_layout(ranks, function, layout: dict, *args, **kwargs) -> list:
    """function(*args, layout, **kwargs) on every rank of a layout; in this process, if it is only
    one."""
    if world(layout) == 1:
        return [function(*args, layout, **kwargs)]
    return ranks(function, world(layout), *args, layout, **kwargs)


def train(config, layout: dict, *args, **kwargs):
    """Train on the same global batches in any layout; returns [(loss, gradient norm)] of every
    step."""
    return [(loss, norm) for loss, norm, _ in _steps(config, layout, *args, **kwargs)]


def train_and_keep_gradients(config, layout: dict, *args, **kwargs):
    """As train; also returns every step's gradients, {name: [(box, this rank's part)]}."""
    history, gradients = [], []
    for loss, norm, model in _steps(config, layout, *args, **kwargs):
        history.append((loss, norm))
        gradients.append(gradients_of(model))
    return history, gradients


def gradients_of(model) -> dict:
    """A model's gradients, {name: [(box, this rank's part)]}."""
    return {
        entry.name: [
            (piece.box, entry.parameter.grad[piece.index()].clone())
            for piece in entry.spec.pieces(model.ctx.place)
        ]
        for entry in model.entries()
    }


def _steps(
    config,
    layout: dict,
    steps: int = 20,
    micro_batch: int = 0,
    schedule: str = "1f1b",
    recompute=("none",),
    rows: int = GLOBAL_BATCH,
    **optimizer,
):
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3)).recompute(*recompute)
    opt = megazoo.optim.AdamW(model, **{"lr": 1e-3, "clip_grad": CLIP, **optimizer})
    # at least two micro-batches
    micro_batch = micro_batch or (2 if ctx.pp_size > 1 else rows // 2 // ctx.dp_size)
    for step in range(steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step, rows))
        loss = model.train_batch(
            ids,
            targets=targets,
            num_microbatches=len(ids) // micro_batch,
            schedule=schedule,
            step=step,
        )
        yield loss.item(), opt.step().item(), model


def _assembled(pieces: list) -> torch.Tensor:
    """The tensor of which these are all pieces, [(box, part)]."""
    ends = zip(*(box for box, _ in pieces), strict=True)
    whole = pieces[0][1].new_empty([max(stop for _, stop in each) for each in ends])
    for box, part in pieces:
        whole[tuple(slice(*bounds) for bounds in box)] = part
    return whole


def worst_gradient(ranks_gradients: list[dict], expected: dict) -> tuple[float, str]:
    """The largest distance of a gathered gradient from the one process's, over the size that it is
    measured by.

    That is the larger of its norm and a thousandth of the global norm. Where ranks hold copies, the
    worst one counts.
    """
    whole = {name: _assembled(pieces) for name, pieces in expected.items()}
    scale = 1e-3 * sum(gradient.double().square().sum() for gradient in whole.values()).sqrt()
    squares: dict[str, dict] = {name: {} for name in whole}
    for gradients in ranks_gradients:
        for name, pieces in gradients.items():
            for box, part in pieces:
                there = whole[name][tuple(slice(*bounds) for bounds in box)]
                square = (part.double() - there.double()).square().sum().item()
                squares[name][box] = max(square, squares[name].get(box, 0.0))
    worst = 0.0, ""
    for name, boxes in squares.items():
        assert boxes, f"no rank has a gradient of {name}"
        distance = sum(boxes.values()) ** 0.5 / max(whole[name].double().norm(), scale)
        worst = max(worst, (distance.item(), name))
    return worst


def worst_relative(a, b) -> float:
    """The largest |x - y| / |y| over two nested lists of numbers."""
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return ((a - b).abs() / b.abs()).max().item()


class PeakMemory:
    """Within this block: `above`, the peak of this process's anonymous memory above the level at
    its start, bytes.

    The kernel keeps the peak of all resident pages. What files and shared memory grew by is taken
    off; a thread watches how much that was. On a busy machine the thread may miss a peak, but not
    the kernel.
    """

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        self._status = self._read()
        self.start = self._status["RssAnon"]
        self._others, self._sampled, self._done = 0, self.start, False
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_):
        self._done = True
        self._watcher.join()
        status = self._look()
        self.peak = max(
            self._sampled, self.start + status["VmHWM"] - self._status["VmRSS"] - self._others
        )
        self.above = self.peak - self.start

    def _watch(self):
        while not self._done:
            self._look()
            time.sleep(0.001)

    def _look(self) -> dict[str, int]:
        status = self._read()
        grown = sum(status[kind] - self._status[kind] for kind in ("RssFile", "RssShmem"))
        self._others, self._sampled = (
            max(self._others, grown),
            max(self._sampled, status["RssAnon"]),
        )
        return status

    @staticmethod
    def _read() -> dict[str, int]:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def give_back_freed_memory() -> None:
    """To the system, at once, what is 64 KB or more: as the environment's
    MALLOC_MMAP_THRESHOLD_=65536."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)


def in_fresh_processes(function, *args, processes: int = 1, timeout: float = 120) -> list:
    """What a function returns in each of some processes that have done nothing before, for
    measurements of memory."""
    pool = RankPool()
    try:
        return pool.run(function, processes, *args, timeout=timeout)
    finally:
        pool.close()
