"""Seeded runs whose losses, norms, logits and generated tokens a redesign must keep bit for bit.

    python -m tests.support.seeded_runs write before.json
    python -m tests.support.seeded_runs compare before.json after.json

Numbers are hexadecimal floats. They are equal on one machine with one build of torch: compare files
of the same machine only. A change of the order of floating-point operations shows here, and is to
be explained.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import megazoo
from megazoo.families.config import ModelConfig
from megazoo.layers import round_to_int8
from megazoo.models.base import Model
from megazoo.models.falcon import FalconConfig
from megazoo.models.gemma2 import Gemma2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mistral import MistralConfig
from megazoo.models.mixtral import MixtralConfig
from megazoo.models.olmo2 import Olmo2Config
from megazoo.models.pythia import PythiaConfig
from megazoo.models.qwen2 import Qwen2Config
from megazoo.models.qwen3 import Qwen3Config
from megazoo.parallel.collectives import summed
from megazoo.parallel.cpu import products
from megazoo.testing import RankPool
from tests.support.context_parallel import long_batch_of, rows_of_replica
from tests.support.training import MODELS, TINY, context, randomize, tiny_config, world

STEPS, ROWS = 4, 4
SIZES = {**TINY, "layers": 4, "max_positions": 32}
GROUPED = {**SIZES, "kv_heads": 2, "ffn_size": 48}


@dataclass(frozen=True)
class Run:
    """A model, a layout, and what a run of it uses.

    batch: a kind of `long_batch_of`. call: the method that trains. optimizer: arguments of AdamW or
    of Muon. microbatches: of a replica; 0: two rows each. int8: whether the trained weights are
    rounded before the generation. generate: its settings.
    """

    config: ModelConfig
    layout: dict = field(default_factory=dict)
    batch: str = "plain"
    call: str = "train_batch"
    microbatches: int = 0
    schedule: str = "1f1b"
    recompute: tuple = ("none",)
    dtype: torch.dtype = torch.float32
    lora: dict | None = None
    muon: bool = False
    optimizer: dict = field(default_factory=dict)
    int8: bool = False
    generate: dict = field(default_factory=lambda: dict(num_beams=2))


GPT2 = replace(MODELS["gpt2"], layers=4, max_positions=32)
LLAMA = LlamaConfig(**GROUPED)
GEMMA2 = Gemma2Config(**GROUPED, head_size=8, window=5, query_scalar=8)
MIXTRAL = MixtralConfig(**GROUPED, experts=4, router_aux_loss_coef=0.01, router_z_loss_coef=0.001)
# Rows and weights above the limits of products.py, where a CPU's methods are chosen.
WIDE = LlamaConfig(**{**GROUPED, "layers": 2, "hidden_size": 256, "ffn_size": 2048})
SAMPLED = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9, seed=5)
RUNS = {
    "gpt2": Run(GPT2),
    "gpt2 tp2, dropout": Run(
        tiny_config(dropout=0.1, layers=4, max_positions=32), dict(tp=2), recompute=("selective",)
    ),
    "llama tp2pp2+sp": Run(LLAMA, dict(tp=2, pp=2, sp=True)),
    "mpt tp4, padding": Run(
        replace(MODELS["mpt"], layers=4, max_positions=32), dict(tp=4), "padded"
    ),
    "mistral pp2v2": Run(MistralConfig(**GROUPED, window=5), dict(pp=2, v=2)),
    "qwen2 dp2+zero": Run(Qwen2Config(**GROUPED), dict(dp=2), optimizer=dict(zero=1)),
    "qwen3 cp2": Run(Qwen3Config(**GROUPED), dict(cp=2), "odd"),
    "pythia tp2": Run(PythiaConfig(**SIZES, ffn_size=48), dict(tp=2), recompute=("full",)),
    "llama cp2 ulysses, packed": Run(LLAMA, dict(cp=2, method="ulysses"), "packed"),
    "gpt2 pp4 zb-h1": Run(GPT2, dict(pp=4), schedule="zb-h1"),
    "gpt2 pp2 gpipe, bfloat16": Run(GPT2, dict(pp=2), schedule="gpipe", dtype=torch.bfloat16),
    "llama tp2, float16": Run(LLAMA, dict(tp=2), dtype=torch.float16),
    "llama, packed": Run(LLAMA, batch="packed"),
    "llama tp2dp2+zero, offloaded": Run(
        LLAMA, dict(tp=2, dp=2), optimizer=dict(zero=1, offload=True)
    ),
    "llama tp2pp2, LoRA": Run(
        LLAMA, dict(tp=2, pp=2), lora=dict(rank=3, alpha=6, targets="all-linear", dropout=0.1)
    ),
    "llama tp2dp2, Muon": Run(LLAMA, dict(tp=2, dp=2), muon=True),
    "gpt2 tp2pp2, classifier": Run(
        replace(GPT2, num_labels=3, pad_token_id=60), dict(tp=2, pp=2), "padded"
    ),
    "mixtral dp2ep2": Run(MIXTRAL, dict(dp=2, folded={"ep": 2})),
    "mixtral tp2dp2ep2+sp, packed": Run(
        MIXTRAL, dict(tp=2, dp=2, sp=True, folded={"ep": 2}), "packed"
    ),
    "mixtral pp2cp2": Run(MIXTRAL, dict(pp=2, cp=2)),
    "mixtral, model(...)": Run(MIXTRAL, call="model"),
    "llama pp2v2 zb-v": Run(LLAMA, dict(pp=2, v=2, placement="v"), microbatches=4, schedule="zb-v"),
    "mpt tp2pp2v2 dualpipe-v": Run(
        replace(MODELS["mpt"], layers=4, max_positions=32),
        dict(tp=2, pp=2, v=2, placement="v"),
        "padded",
        microbatches=4,
        schedule="dualpipe-v",
        recompute=("selective",),
    ),
    "gemma2 tp2cp2, packed": Run(GEMMA2, dict(tp=2, cp=2), "packed"),
    "olmo2 tp2+sp, sampled": Run(Olmo2Config(**GROUPED), dict(tp=2, sp=True), generate=SAMPLED),
    "falcon tp2pp2": Run(FalconConfig(**SIZES), dict(tp=2, pp=2), "odd"),
    "gpt2, sampled": Run(GPT2, generate=SAMPLED),
    "llama tp2cp2, model(...)": Run(LLAMA, dict(tp=2, cp=2), call="model"),
    "gpt2 dp2, model(...)": Run(GPT2, dict(dp=2), "padded", call="model"),
    "mistral tp2pp2, microbatches": Run(
        MistralConfig(**GROUPED, window=5), dict(tp=2, pp=2), call="microbatches"
    ),
    "llama tp2, wide, bfloat16": Run(WIDE, dict(tp=2), microbatches=1, dtype=torch.bfloat16),
    "llama, wide": Run(WIDE, microbatches=1),
    "llama tp2, wide, bfloat16, int8": Run(
        WIDE, dict(tp=2), microbatches=1, dtype=torch.bfloat16, int8=True
    ),
}


def batch_for(config: ModelConfig, step: int, kind: str) -> dict[str, torch.Tensor]:
    """A global batch. A classifier's rows have a label each."""
    batch = long_batch_of(step, kind)
    if config.num_labels:
        batch["labels"] = batch.pop("targets").clamp(min=0).sum(1) % config.num_labels
    return batch


def record(run: Run) -> dict[str, list]:
    """Train, evaluate, run a forward and generate; return the numbers of this rank."""
    ctx = context(**run.layout)
    # Not by a measurement, which may differ the next time.
    products.follow(products.Methods(widened=True, by_onednn=True))
    model = randomize(megazoo.from_config(run.config, ctx, seed=3, dtype=run.dtype))
    model.recompute(*run.recompute)
    if run.lora:
        megazoo.lora.add(model, **run.lora)
    make = megazoo.optim.Muon if run.muon else megazoo.optim.AdamW
    optimizer = make(model, lr=1e-2, clip_grad=0.2, **run.optimizer)
    count = run.microbatches or ROWS // ctx.dp_size // 2 or 1
    steps = []
    for step in range(STEPS):
        batch = rows_of_replica(batch_for(run.config, step, run.batch), ctx)
        loss = loss_of(model.train(), run, batch, count, step)
        steps.append([loss.item().hex(), optimizer.step().item().hex()])
    batch = rows_of_replica(batch_for(run.config, STEPS, run.batch), ctx)
    evaluated = model.eval_batch(**batch, num_microbatches=count)
    found = {"steps": steps, "evaluation": [evaluated.item().hex()]}
    if run.config.num_labels:
        return found
    if run.int8:
        round_to_int8(model)
    prompt = long_batch_of(0)["input_ids"][:2, :7]
    with torch.no_grad():
        logits = model.eval()(prompt).logits
    if logits is not None:  # on the last stage
        found["logits"] = [hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()]
    ids = model.generate(prompt, max_new_tokens=12, **run.generate)
    return {**found, "tokens": ids.tolist()}


def loss_of(
    model: Model, run: Run, batch: dict[str, torch.Tensor], count: int, step: int
) -> torch.Tensor:
    """The loss of a step, whose backward has run."""
    if run.call == "train_batch":
        return model.train_batch(**batch, num_microbatches=count, schedule=run.schedule, step=step)
    if run.call == "microbatches":
        parts = []
        for out in model.microbatches(**batch, num_microbatches=count):
            out.loss.backward()
            parts.append(out.loss.detach())
        return torch.stack(parts).sum()
    model.zero_grad()
    batch["labels"] = batch.pop("targets").roll(1, 1)  # the shift by one is within the model
    loss = model(**batch).loss
    loss.backward()
    model.sync_gradients()
    return summed(loss.detach(), model.ctx.dp_group) if model.ctx.dp_size > 1 else loss.detach()


def record_all(runs: dict[str, Run] = RUNS) -> dict[str, dict]:
    """The numbers of all runs. The ranks of a run must agree on them."""
    pool, found = RankPool(), {}
    try:
        for name, run in runs.items():
            first, *others = pool.run(record, world(run.layout), run)
            whole = max((first, *others), key=len)  # of the last stage
            for numbers in (first, *others):
                if numbers != {kind: whole[kind] for kind in numbers}:
                    raise SystemExit(f"{name}: the ranks have different numbers")
            found[name] = whole
    finally:
        pool.close()
    return found


def differences(before: dict, after: dict) -> list[str]:
    """A line per run that differs: where it does so first."""
    lines = [f"{name}: only in one of the files" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        kinds = [kind for kind in before[name] if before[name][kind] != after[name][kind]]
        for kind in kinds:
            pairs = zip(before[name][kind], after[name][kind], strict=False)
            place = next((n for n, (a, b) in enumerate(pairs) if a != b), "the end")
            lines.append(f"{name}: {kind} differ from number {place} on")
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="run all, and write their numbers").add_argument("file")
    compare = commands.add_parser("compare", help="compare two files; exit 1 if they differ")
    compare.add_argument("before")
    compare.add_argument("after")
    options = parser.parse_args()
    if options.command == "write":
        Path(options.file).write_text(json.dumps(record_all(), indent=1) + "\n")
        return
    before, after = (json.loads(Path(f).read_text()) for f in (options.before, options.after))
    lines = differences(before, after)
    print("\n".join(lines) or f"{len(before)} runs are equal, bit for bit")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
