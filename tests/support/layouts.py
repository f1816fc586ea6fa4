"""The table of layouts, models and batches that tests of layouts draw from, and a training run in
any of them that is compared with one process."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from unittest import mock

import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.errors import UserError
from megazoo.layers import embedding
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.parallel.schedule import placement_named_by
from megazoo.parallel.storage import in_memory
from megazoo.testing import Layout
from megazoo.testing.layouts import check_model
from tests.support import training
from tests.support.context_parallel import (
    KINDS,
    MICRO_BATCHES,
    batch_of,
    long_batch_of,
    rows_of_replica,
    rows_of_the_probe,
)
from tests.support.training import (
    CLIP,
    NO_DROPOUT,
    TINY,
    context,
    layout_name,
    randomize,
    train_and_keep_gradients,
    worst_gradient,
    worst_relative,
)

# Every way to cut a model and to run it, each alone and with others: what trains, generates, saves
# or loads in any layout is tested in rows of this table.
LAYOUTS = [
    "tp2", "tp4", "tp2+sp", "tp4+sp", "pp2", "pp4", "pp2+gpipe", "pp2+zb-h1", "pp4+zb-h1", "pp2v2",
    "dp2", "dp4+zero", "tp2pp2", "tp2pp2+sp", "tp2dp2", "tp2dp2+sp+zero", "pp2dp2", "pp2dp2+zero",
    "tp2pp2dp2", "tp2pp2dp2+sp",
    "cp2", "cp3", "cp4", "tp2cp2", "tp2cp2+sp", "cp2pp2", "cp2pp2v2", "cp2pp2+zb-h1", "cp2dp2",
    "cp2+zero", "cp2dp2+zero", "dp2+zero2", "pp2dp2+zero2", "tp2cp2+sp+zero2",
    "cp2+ulysses", "cp3+ulysses", "cp4+ulysses", "tp2cp2+ulysses", "tp2cp2+sp+ulysses",
    "cp2pp2+ulysses", "cp2pp2v2+ulysses", "cp2pp2+ulysses+zb-h1", "cp2dp2+ulysses",
    "cp2+ulysses+zero",
    "pp2v2+zb-v", "tp2pp2v2+sp+v-half", "pp2dp2v2+zero+v-min", "cp2pp2v2+dualpipe-v",
    "pp2dp2v2+zero2+v-min", "dp2+zero3", "pp2dp2+zero3", "tp2cp2+sp+zero3", "pp2dp2v2+zero3+zb-v",
]  # fmt: skip

# Five layers, so that stages are uneven; vocabularies that neither 2 nor 4 divides.
LONG = {**TINY, "max_positions": 32}
LLAMA = LlamaConfig(
    **LONG, kv_heads=2, ffn_size=48, attention_bias=True, mlp_bias=True, tie_embeddings=True
)
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GROUPED = LlamaConfig(**LONG, kv_heads=2, ffn_size=48)
MODELS = {
    "gpt2": GPT2Config(**LONG, **NO_DROPOUT),
    "gpt2, untied": GPT2Config(**LONG, **NO_DROPOUT, tie_embeddings=False),
    "llama": LLAMA,
    "llama, one KV head": LlamaConfig(**LONG, kv_heads=1, ffn_size=48),
    # for more tokens than its 8
    "llama, dynamic": replace(GROUPED, max_positions=8, rope_scaling=DYNAMIC),
    "llama, llama3": replace(GROUPED, rope_scaling=LLAMA3),
    "llama, yarn": replace(GROUPED, rope_scaling=YARN),
    "mpt": MPTConfig(**LONG, qk_norm=True, bias=True, kv_heads=2, clip_qkv=0.5),
    "mpt, 12 heads": MPTConfig(**{**LONG, "hidden_size": 48, "heads": 12}),
    "mpt, learned positions": MPTConfig(**LONG, alibi=False, logit_scale=0.5, tie_embeddings=False),
    # heads that no layout divides; and six, of which two share one of keys: cp 2 cuts a pair
    "gpt2, 5 heads": GPT2Config(**{**LONG, "hidden_size": 40, "heads": 5}, **NO_DROPOUT),
    "llama, 6 heads": replace(GROUPED, hidden_size=48, heads=6, kv_heads=3),
    "mpt, 5 heads": MPTConfig(**{**LONG, "hidden_size": 40, "heads": 5}),
}


def possible(layout: str, model: str) -> bool:
    """Whether the model can be cut so."""
    try:
        check_model(Layout.named(layout), MODELS[model])
    except UserError:
        return False
    return True


def sizes_of(layout: Layout | str) -> dict:
    """A layout as `training.context` takes it."""
    layout = Layout.named(layout) if isinstance(layout, str) else layout
    return {
        "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp,
        "sp": layout.sequence_parallel, "v": layout.virtual_pp, "method": layout.cp_method,
        "placement": placement_named_by(layout.schedule),
        "folded": {"ep": layout.ep} if layout.ep > 1 else {},
        "zero": layout.zero if layout.zero == 3 else 0,  # the model must know
    }  # fmt: skip


def in_layout(ranks, function, layout: str, *args, **kwargs) -> list:
    """function(*args, the layout's sizes, **kwargs) on every rank of a layout."""
    sizes = sizes_of(layout)
    return training.run_in_layout(ranks, function, sizes, *args, **kwargs)


def model_in(config, ctx, *, train: str | None = None, recompute=("none",), **how):
    """A model with random biases. train: a pattern of the names that are trained."""
    model = randomize(megazoo.from_config(config, ctx, seed=3, **how))
    return (model.train_only(train) if train else model).recompute(*recompute)


def trained(config, batches: list, layout: dict, *, count=MICRO_BATCHES, model=None, start=None,
            saved=None, schedule="1f1b", kind="AdamW", **optimizer):  # fmt: skip
    """Train a step on each global batch; returns [(loss, norm)], and what is to be compared by
    parameter: every step's gradients, and last the weights, each as {name: [(box, this rank's
    part)]}. ZeRO-1 has no whole gradients.

    count: micro-batches, of all replicas together. model: more for `model_in`. start: a checkpoint
    to go on from, whose steps are not made again. saved: where to save in the end. kind: of the
    optimizer.
    """
    ctx = context(**layout)
    model = model_in(config, ctx, **(model or {}))
    # eps: so that a rounding of a small gradient is not a step of its own
    eps = {} if kind == "Muon" else {"eps": 1e-3}
    optimizer = {"lr": 1e-3, **eps, "clip_grad": CLIP, **optimizer}
    opt, history, kept = getattr(megazoo.optim, kind)(model, **optimizer), [], []
    first = load(Checkpoint(start), model, opt)["step"] if start else 0
    for step, batch in list(enumerate(batches))[first:]:
        loss = model.train_batch(
            **rows_of_replica(batch, ctx),
            num_microbatches=count // ctx.dp_size,
            schedule=schedule,
            step=step,
        )
        if not optimizer.get("zero"):
            kept.append(parts_of_gradients(model))
        auxiliary = [mean.item() for mean in model.engine.auxiliary_losses.values()]
        history.append((loss.item(), opt.step().item(), *auxiliary))
    if saved:
        save(saved, len(batches), model, opt)
    kept.append(parts_of(model, lambda parameter: parameter.detach()))
    return history, kept


def parts_of_gradients(model) -> dict:
    """Of each parameter that has one: {name: [(box, this rank's part)]}."""
    return parts_of(model, lambda parameter: parameter.grad)


def parts_of(model, tensor_of) -> dict:
    return {
        entry.name: [
            (piece.box, tensor_of(entry.parameter)[piece.index()].clone())
            for piece in entry.spec.pieces(model.ctx.place)
        ]
        for entry in in_memory(model, model.entries())
        if tensor_of(entry.parameter) is not None
    }


def batches_of(kind: str, steps: int) -> list[dict]:
    """Global batches, of 29 tokens or more if it is one of KINDS, else of 13."""
    make = long_batch_of if kind in KINDS else batch_of
    return [make(step, kind) for step in range(steps)]


def named_run(model: str, layout: Layout, kind: str, steps: int = 2, **how):
    """Train one of the models; of three layers where one rank has all. how: of `trained`, and of
    `model_in`."""
    of_model = {name: how.pop(name) for name in ("train", "recompute") if name in how}
    how = {"schedule": layout.schedule, "zero": layout.zero, "count": micro_batches(layout), **how}
    config = MODELS[model] if layout.pp > 1 else replace(MODELS[model], layers=3)
    return trained(config, batches_of(kind, steps), sizes_of(layout), model=of_model, **how)


def micro_batches(layout: Layout) -> int:
    return 4 if layout.pp * layout.dp > 1 else 2


@cache
def one_process_of(model: str, kind: str, steps: int, train: str | None, deep: bool, count: int):
    config = MODELS[model] if deep else replace(MODELS[model], layers=3)
    return trained(config, batches_of(kind, steps), {}, count=count, model={"train": train})


def one_process_beside(layout: Layout, model: str, kind: str, steps=2, train=None, count=None):
    """What `named_run` of a layout is compared with: the same micro-batches in one process."""
    count = count or micro_batches(layout)
    return one_process_of(model, kind, steps, train, layout.pp > 1, count)


def check_training(ranks, layout: str, model: str, kind: str, how: dict, steps: int = 2) -> None:
    """Losses, norms, every gradient and the weights of every rank are those of one process."""
    place = Layout.named(layout)
    results = ranks(named_run, place.ranks, model, place, kind, steps, **how)
    assert all(history == results[0][0] for history, _ in results), "ranks disagree"
    of_both = {name: how[name] for name in ("train", "count") if name in how}
    expected = one_process_beside(place, model, kind, steps, **of_both)
    worst, what = worst_difference(results, expected)
    assert worst < 1e-5, what


def worst_difference(results: list, expected) -> tuple[float, str]:
    """How far the ranks of a layout are from one process, relatively, and in what: the largest
    difference of a loss, a norm, a gradient or a weight; nan counts as infinite."""
    (history, kept), found = expected, []
    for theirs, _ in results:
        found.append((worst_relative(theirs, history), "losses and norms"))
    of_ranks = [parts for _, parts in results]
    skipped = len(kept) - len(of_ranks[0])  # the gradients, under ZeRO-1
    for number, whole in enumerate(kept[skipped:]):
        found.append(worst_gradient([parts[number] for parts in of_ranks], whole))
    found = [(float("inf") if value != value else value, what) for value, what in found]
    return max(found)


def assert_gradients_equal(results: list[dict], expected: dict) -> None:
    """Each rank's gradients are those of one process, none is missing and none too many."""
    assert set().union(*results) == set(expected)
    distance, name = worst_gradient(results, expected)
    assert distance < 1e-5, f"{name}: {distance}"


PROBED = ("gpt2", "llama, dynamic", "llama, llama3", "llama, yarn", "mpt, 12 heads",
          "mpt, learned positions")  # fmt: skip


def logits_of_both(layout: Layout) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each model, the logits of the probe's row before and after the change."""
    *rows, given = rows_of_the_probe()
    logits, ctx = {}, context(**sizes_of(layout))
    for name in PROBED:
        model = model_in(MODELS[name], ctx).eval()
        with torch.no_grad():
            logits[name] = tuple(model(row, return_logits=True, **given).logits for row in rows)
    return logits


# The run of one process that some tests of layers compare layouts with.
STEPS = 4


@cache
def one_process(config):
    return train_and_keep_gradients(config, {}, STEPS, micro_batch=8)


def case_name(part) -> str:
    """The name of a layout, or of another parameter of a test."""
    if isinstance(part, dict):
        return layout_name(part)
    return part if isinstance(part, str) else " ".join(map(str, part))


def assembled(parts):
    """Global gradients from every rank's pieces."""
    whole = {name: torch.full(shape, torch.nan) for name, (shape, _) in parts[0].items()}
    for part in parts:
        for name, (_, pieces) in part.items():
            for piece, values in pieces:
                whole[name][tuple(slice(*bounds) for bounds in piece.box)] = values
    return whole


@contextmanager
def short_pieces():
    """Yields what counts the losses that are made in pieces."""
    module, head = "megazoo.layers.cross_entropy", embedding.VocabParallelHead
    counted = mock.patch.object(
        head, "loss_in_pieces", autospec=True, side_effect=head.loss_in_pieces
    )
    always = mock.patch.object(head, "pieces_save_memory", return_value=True)
    pieces = (
        mock.patch.dict(f"{module}.PIECE_ELEMENTS", cpu=0),
        mock.patch(f"{module}.PIECE_ROWS", 5),
    )
    with pieces[0], pieces[1], always, counted as count:
        yield count
