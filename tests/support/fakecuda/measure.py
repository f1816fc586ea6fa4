"""What a process with the fake device runs: a model's micro-batch, a step of its optimizer, or its
generation, watched."""

import contextlib
import copy
import dataclasses

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megazoo.families.registry import FAMILIES, family_of
from megazoo.layers import ALiBi, CausalSelfAttention, Packed, segment_mask
from megazoo.layers.masks import additive
from megazoo.models.registry import find_config
from megazoo.optim import AdamW
from megazoo.parallel.context import AXES, ParallelContext
from megazoo.torch_internals import takes_pages
from tests.support.fakecuda import groups
from tests.support.fakecuda.attention import Chooser
from tests.support.fakecuda.audit import CUDA, Audit, Pinning, Watcher, audit, told

NO_DROPOUT = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0)


@contextlib.contextmanager
def watched():
    """Within this block tensors are fake, and what is done with them is noted in `audit`."""
    with FakeTensorMode(allow_non_fake_inputs=True), Watcher(), Chooser(), Pinning():
        audit.clear()
        yield audit


def context(tp: int = 1, pp: int = 1, dp: int = 1, rank: int = 0, **options) -> ParallelContext:
    """Return a rank's context on the fake device. options: those of ParallelContext.virtual."""
    ctx = ParallelContext.virtual(tp, pp, dp, rank=rank, **options)
    of_axes = {name: groups.Group(ctx.axis(name).size, ctx.axis(name).rank, name) for name in AXES}
    mesh = groups.Mesh(of_axes, torch.arange(ctx.world_size).view(ctx.layout.sizes))
    joint = groups.Group(ctx.token_axis.size, ctx.token_axis.rank, "dp and cp")
    return dataclasses.replace(ctx, device=CUDA, mesh=mesh, joint_group=joint)


def build(preset, ctx: ParallelContext, dtype=torch.bfloat16, *, initialized=False, **changes):
    """Build a rank's model. preset: its name, or a config. changes: of the config."""
    config = find_config(preset) if isinstance(preset, str) else preset
    config = dataclasses.replace(config, **changes)
    family = FAMILIES[family_of(config)]
    return (family.build if initialized else family.empty)(config, ctx, dtype=dtype)


def seen() -> Audit:
    """Return a copy of what was noted since the last call, and forget it."""
    noted = copy.deepcopy(audit)
    audit.clear()
    return noted


def training(
    preset,
    rows: int = 4,
    length: int = 16,
    *,
    layout: dict | None = None,
    dtype: torch.dtype = torch.bfloat16,
    microbatches: int = 1,
    schedule: str = "1f1b",
    recompute: str = "none",
    padding: bool = False,
    documents: bool = False,
    on_host: bool = False,
    batches: int = 1,
    capability: tuple[int, int] = (9, 0),
    train_only: str | None = None,
    own_loop: bool = False,
    optimizer: dict | None = None,
    **changes,
) -> tuple[Audit, Audit]:
    """Train a batch, then step; returns what was seen of each.

    layout: the arguments of `context`. padding, documents: the batch has some. on_host: it is on
    the CPU. batches: so many are trained, and the last is seen. capability: of the device: (9, 0),
    Hopper, or (8, 0), Ampere. train_only: all other parameters are frozen. own_loop: backward is
    called in a loop over micro-batches. optimizer: options of AdamW. changes: of the config.
    """
    with watched():
        model = build(preset, context(**(layout or {})), dtype, **changes).recompute(recompute)
        if train_only:
            model.train_only(train_only)
        adamw = AdamW(model, **(optimizer or {}))
        batch = batch_of(model, rows, length, padding, documents)
        message = list(told)
        if on_host:
            batch = {name: torch.zeros_like(x, device="cpu") for name, x in batch.items()}
        torch.cuda.get_device_capability = lambda device=None: capability
        seen()
        if own_loop:
            for output in model.microbatches(**batch, num_microbatches=microbatches):
                output.loss.backward()
        else:
            for _ in range(batches):
                told.clear()
                told.extend(message)
                seen()
                model.train_batch(**batch, num_microbatches=microbatches, schedule=schedule)
        trained = seen()
        adamw.step()
        return trained, seen()


def batch_of(model, rows: int, length: int, padding: bool, documents: bool) -> dict:
    """Return a batch on the device, as a loader that works ahead gives it."""
    ids = torch.zeros(rows, length, dtype=torch.int64, device=CUDA)
    batch = {"input_ids": ids, "labels": ids[:, 0] if model.config.num_labels else ids}
    if padding:
        batch["attention_mask"] = torch.ones_like(ids)
    if documents:
        batch["document_ids"] = torch.zeros_like(ids)
    told.clear()
    told.extend([rows, length, 0, int(padding or documents)])
    return batch


def attention(
    q: tuple, k: tuple, dtype: torch.dtype, mask: str, capability: tuple[int, int]
) -> Audit:
    """Run the attention of heads q and k, shapes [batch, heads, tokens, features]; returns what was
    seen. mask: "none", "segments", "documents" or "ALiBi"."""
    torch.cuda.get_device_capability = lambda device=None: capability
    with watched():
        layer = CausalSelfAttention(q[1] * q[3], q[1], k[1], ctx=context())
        given = attention_mask(mask, q, k, dtype, CUDA)
        q, k = (torch.empty(shape, dtype=dtype, device=CUDA) for shape in (q, k))
        seen()
        if isinstance(given, Packed):
            layer.attend._in_documents(q, k, k, given)
        else:
            layer.attend._scaled_dot_product(q, k, k, given)
        return seen()


def attention_mask(mask: str, q: tuple, k: tuple, dtype: torch.dtype, device: torch.device):
    """Return a mask of one of these kinds, as the models make it."""
    (batch, heads, queries, _), keys = q, k[2]
    if mask == "none":
        return None
    if mask == "ALiBi":
        return ALiBi(heads, range(heads))(queries, keys, dtype, device)
    if mask == "documents" and device == CUDA:
        return Packed(torch.zeros(4, dtype=torch.int32, device=device), keys)
    segments = torch.zeros(batch, keys, dtype=torch.int64, device=device)
    return additive(segment_mask(segments, queries), dtype)


def evaluation(
    preset,
    rows: int = 4,
    length: int = 16,
    *,
    layout: dict | None = None,
    dtype: torch.dtype = torch.bfloat16,
    forward: bool = False,
    **changes,
) -> Audit:
    """Evaluate a batch, or call the model as a function; returns what was seen."""
    with watched():
        model = build(preset, context(**(layout or {})), dtype, **changes)
        batch = batch_of(model, rows, length, padding=False, documents=False)
        seen()
        if forward:
            with torch.no_grad():
                model(**batch)
        else:
            model.eval_batch(**batch)
        return seen()


def generation(
    preset,
    rows: int = 2,
    prompt: int = 16,
    new: int = 4,
    *,
    layout: dict | None = None,
    dtype: torch.dtype = torch.bfloat16,
    padding: bool = False,
    settings: dict | None = None,
    **changes,
) -> Audit:
    """Generate some tokens; returns what was seen."""
    with watched():
        model = build(preset, context(**(layout or {})), dtype, **changes)
        ids = torch.zeros(rows, prompt, dtype=torch.int64)
        mask = torch.ones_like(ids) if padding else None
        takes_pages(CUDA, dtype)  # a trial, once per process
        seen()
        model.generate(ids, mask, max_new_tokens=new, **(settings or {}))
        return seen()


def whole_model(measure, layers: int, **options) -> dict[str, float]:
    """Return the FLOPs, elementwise bytes and launches of a model of so many layers, from those of
    one layer and of two. measure(layers=...) returns an Audit."""
    one, two = measure(layers=1, **options), measure(layers=2, **options)
    return {
        name: getattr(one, name) + (layers - 1) * (getattr(two, name) - getattr(one, name))
        for name in ("flops", "bytes", "launches")
    }
