"""What is special to context parallelism: what a token may change, every call of a model on a part
of the sequence, what differs between ranks, modules of one's own, and what is refused."""

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megazoo
from megazoo.errors import UserError
from megazoo.layers import (
    CausalSelfAttention,
    Dropout,
    QKVParallelLinear,
    Rotary,
    RowParallelLinear,
    segment_mask,
)
from megazoo.layers import attend as attend_module
from megazoo.models.llama import Block, Llama
from megazoo.parallel import failure
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut, padded_length
from megazoo.testing import Layout
from tests.support.context_parallel import (
    CHANGED,
    LENGTHS,
    ROWS,
    TOKENS,
    batch_of,
    positions_that_differ,
    rows_of_replica,
)
from tests.support.layouts import (
    assert_gradients_equal,
    in_layout,
    logits_of_both,
    model_in,
    parts_of_gradients,
)
from tests.support.sampling import marked_slow
from tests.support.training import MODELS, context, tiny_config, worst_relative

GPT2 = tiny_config(layers=2)
LLAMA = replace(MODELS["llama"], layers=2)
CP2, CP3, ULYSSES = "cp2", "cp3", "cp2+ulysses"
TP, PP, DP = "tp2cp2+sp", "cp2pp2", "cp2dp2"


@cache
def logits_of_one_process() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return logits_of_both(Layout())


@pytest.mark.parametrize(
    "layout",
    marked_slow(["cp4", "cp4+ulysses", "cp2", "cp2+ulysses", TP], lambda number, _: number > 1),
)
def test_a_token_changes_only_its_documents_later_positions(ranks, layout):
    """To the bit: what a token may not see has a weight of zero."""
    layout = Layout.named(layout)
    for outputs in ranks(logits_of_both, layout.ranks, layout):
        for name, (before, after) in outputs.items():
            expected = logits_of_one_process()[name]
            torch.testing.assert_close(before, expected[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(after, expected[1], atol=1e-5, rtol=1e-5)
            later = list(range(CHANGED, LENGTHS[0]))
            assert positions_that_differ(*expected) == later, name
            assert positions_that_differ(before, after) == later, name


LABELS_OF_ROWS = torch.tensor([3.0, -1.0, 0.5, 2.0])
WITHOUT_LABELS = torch.full((2, TOKENS), -100)  # the first two rows, a micro-batch or a replica


def loss_of_rows(logits, labels):
    """A mean over rows, in which every token of a row has its own weight."""
    weights = torch.linspace(0.1, 1.0, logits.shape[1])
    return ((logits.logsumexp(-1) * weights).mean(1) - labels).square().mean()


def loss_of_tokens(logits, labels):
    return 1.5 * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def labels_of(kind: str) -> torch.Tensor:
    labels = batch_of(0)["input_ids"]
    labels = labels.masked_fill(torch.arange(TOKENS) % 3 == 1, -100)
    return torch.cat([WITHOUT_LABELS, labels[2:]]) if "a part without" in kind else labels


def gradients_by(how: str, config, layout: dict):
    """The loss (the micro-batches' added up), and the gradients, by one way to them."""
    ctx = context(**layout)
    model = model_in(config, ctx)
    rows = rows_of_replica(
        batch_of(0, "padding, positions") | {"labels": labels_of(how), "rows": LABELS_OF_ROWS}, ctx
    )
    labels, of_rows, targets = (rows.pop(name) for name in ("labels", "rows", "targets"))
    count = 1 if ctx.dp_size > 1 else 2
    if how == "microbatches":
        losses = []
        for out in model.microbatches(**rows, targets=targets, num_microbatches=count):
            out.loss.backward()
            losses.append(out.loss.detach())
        loss = sum(losses)
    elif "loss of tokens" in how:
        loss = model.train_batch(
            **rows, labels=labels, loss_fn=loss_of_tokens, num_microbatches=count
        )
    elif "loss of rows" in how:
        loss = model.train_batch(
            **rows, labels=of_rows, loss_fn=loss_of_rows, num_microbatches=count
        )
    elif "backward" in how:
        # each replica's mean is differentiated, then their mean taken
        loss = model(**rows, labels=labels).loss
        loss.backward()
        model.sync_gradients()
    else:
        logits = model(**rows).logits
        loss = loss_of_rows(logits, of_rows)
        loss.backward()
        model.sync_gradients()
    return loss.item(), parts_of_gradients(model)


WAYS = [  # the first layout of each in `make test`
    ("microbatches", (DP, CP3, ULYSSES, TP, PP)),
    ("loss of tokens", (TP, CP2, PP, DP)),
    ("loss of tokens, a part without", (PP, CP3, DP)),
    ("loss of rows", (ULYSSES, CP2, TP, PP, DP)),
    ("backward", (CP3, ULYSSES, TP)),
    ("logits", (TP, CP3, ULYSSES)),
]
WAYS = [(how, layout, layouts[0]) for how, layouts in WAYS for layout in layouts]


@pytest.mark.parametrize(
    ("how", "layout", "first"), marked_slow(WAYS, lambda _, case: case[1] != case[2])
)
def test_every_way_to_the_gradients_gives_those_of_one_process(ranks, how, layout, first):
    loss, gradients = gradients_by(how, LLAMA, {})
    results = in_layout(ranks, gradients_by, layout, how, LLAMA)
    for ours, _ in results:
        assert ours == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal([parts for _, parts in results], gradients)


@pytest.mark.parametrize("how", ["backward", pytest.param("logits", marks=pytest.mark.slow)])
def test_a_backward_of_ones_own_is_averaged_over_the_replicas(ranks, how):
    """As DistributedDataParallel has it: over dp alone, not over cp."""
    expected = in_layout(ranks, gradients_by, "dp2", how, LLAMA)
    results = in_layout(ranks, gradients_by, DP, how, LLAMA)
    for rank, (loss, _) in enumerate(results):
        assert loss == pytest.approx(expected[rank // 2][0], rel=1e-5)
    assert_gradients_equal([parts for _, parts in results], expected[0][1])


OUTPUTS = ("plain", "padding", "documents", "padding, positions", "documents, a part without")


def outputs_in(config, layout: dict):
    """Logits and loss of a forward, and the loss and the count of an evaluation, of each kind of
    batch."""
    ctx, found = context(**layout), {}
    model = model_in(config, ctx)
    for kind in OUTPUTS:
        batch = rows_of_replica(batch_of(1, kind), ctx)
        targets = batch.pop("targets")
        labels = labels_of(kind).chunk(ctx.dp_size)[ctx.dp_rank]
        out = model(**batch, labels=labels, return_logits=True)
        loss, count = model.eval_batch(**batch, targets=targets, return_count=True)
        logits = None if out.logits is None else out.logits.detach()
        found[kind] = logits, [out.loss.item(), loss.item(), count.item()]
    return model.has_last, found


@pytest.mark.parametrize(
    "layout", marked_slow([ULYSSES, PP, CP3, TP], lambda number, _: number > 1)
)
def test_logits_are_whole_and_in_order_and_losses_and_counts_right(ranks, layout):
    _, expected = outputs_in(GPT2, {})
    for has_last, found in in_layout(ranks, outputs_in, layout, GPT2):
        for kind, (logits, numbers) in expected.items():
            theirs, others = found[kind]
            mask = batch_of(1, kind).get("attention_mask", torch.ones(ROWS, TOKENS)).bool()
            assert others == pytest.approx(numbers, rel=1e-5), kind
            assert (theirs is not None) == has_last, kind
            if has_last:
                assert theirs.shape == logits.shape, kind
                torch.testing.assert_close(theirs[mask], logits[mask], atol=1e-5, rtol=1e-5)


def uneven_replicas(kind: str, layout: dict):
    """Loss, count and gradients where a replica has no rows, or none of its tokens a label."""
    ctx = context(**layout)
    model, batch = model_in(LLAMA, ctx), batch_of(0, "padding")
    if kind == "no labels":
        batch["targets"][:2] = -100
        batch = rows_of_replica(batch, ctx)
    elif ctx.dp_size > 1:
        batch = {name: x[: 0 if ctx.dp_rank else None] for name, x in batch.items()}
    loss = model.train_batch(**batch)
    gradients = parts_of_gradients(model)
    return (loss.item(), model.eval_batch(**batch, return_count=True)[1].item()), gradients


@pytest.mark.parametrize(
    "layout", marked_slow([DP, "cp2dp2+ulysses"], lambda number, _: number > 0)
)
def test_a_replica_may_have_nothing_to_do(ranks, layout):
    for kind in ("no labels", "no rows"):
        numbers, gradients = uneven_replicas(kind, {})
        results = in_layout(ranks, uneven_replicas, layout, kind)
        for ours, _ in results:
            assert ours == pytest.approx(numbers, rel=1e-5), kind
        assert_gradients_equal([parts for _, parts in results], gradients)


def trained_on_parts(parts: bool, layout: dict):
    """The loss where each rank is given its own chunks alone, what the others have being wrong."""
    ctx = context(**layout)
    model, batch = model_in(LLAMA, ctx), batch_of(0, "documents")
    if parts:
        padded = padded_length(TOKENS, ctx)
        cut = SequenceCut.of(padded, ctx)
        for name in ("input_ids", "targets"):
            batch[name] = cut.own(F.pad(batch[name], (0, padded - TOKENS), value=7))
        batch["sequence_length"] = TOKENS
    loss = model.train_batch(**batch, num_microbatches=2)
    gradients = parts_of_gradients(model)
    return (loss.item(), model.eval_batch(**batch).item()), gradients


@pytest.mark.parametrize(
    "layout", marked_slow([ULYSSES, PP, CP3, TP], lambda number, _: number > 1)
)
def test_a_rank_may_be_given_its_part_alone(ranks, layout):
    """What is beyond sequence_length doesn't count, whatever stands there."""
    numbers, gradients = trained_on_parts(False, {})
    results = in_layout(ranks, trained_on_parts, layout, True)
    for ours, _ in results:
        assert ours == pytest.approx(numbers, rel=1e-5)
    assert_gradients_equal([parts for _, parts in results], gradients)


# Ranks that do different things.


class _Watched:
    """Attention kernels and dropouts within this block: which generator state each draws from, and
    the masks outside of attention."""

    def __init__(self, model):
        self.model, self.attention, self.masks = model, [], {}

    def __enter__(self):
        for name, module in self.model.named_modules():
            if isinstance(module, Dropout) and not module.parallel:
                module.register_forward_hook(
                    lambda _, __, y, name=name: self.masks.setdefault(name, []).append(y == 0)
                )
        attend = F.scaled_dot_product_attention

        def watched(*tensors, dropout_p=0.0, **options):
            assert dropout_p == 0.5
            self.attention.append(torch.get_rng_state().sum(dtype=torch.int64).item())
            return attend(*tensors, dropout_p=dropout_p, **options)

        self._patch = mock.patch.object(attend_module.F, "scaled_dot_product_attention", watched)
        self._patch.__enter__()
        return self

    def __exit__(self, *_):
        self._patch.__exit__(None, None, None)


def drawn(recompute: tuple, layout: dict):
    model = model_in(tiny_config(layers=2, dropout=0.5), context(**layout), recompute=recompute)
    with _Watched(model) as watched:
        loss = model.train_batch(**batch_of(0), step=3)
    norms = [parameter.grad.norm().item() for parameter in model.parameters()]
    return watched.attention, watched.masks, (loss.item(), norms)


@pytest.mark.parametrize("layout", marked_slow([ULYSSES, TP, CP2], lambda number, _: number > 1))
def test_dropout_differs_between_cp_ranks_and_chunks_and_can_be_drawn_again(ranks, layout):
    plain = in_layout(ranks, drawn, layout, ("none",))
    again = in_layout(ranks, drawn, layout, ("full", 2))
    selective = in_layout(ranks, drawn, layout, ("selective",))
    chunks = 1 if layout == ULYSSES else 2
    states = [state for attention, *_ in plain for state in attention]
    assert len(states) == Layout.named(layout).ranks * 2 * chunks  # two layers
    assert len(set(states)) == len(states), "two draws are alike"
    other = len(plain) // 2  # of the other cp rank, and the first tp rank
    for site, masks in plain[0][1].items():
        assert not torch.equal(masks[0], plain[other][1][site][0]), site
        halves = masks[0].chunk(2, dim=1)
        assert not torch.equal(*halves), "the two chunks have one mask"
    for mine, whole, part in zip(plain, again, selective, strict=True):
        assert whole[0] == mine[0] * 2
        assert part[0] == _each_layer_twice(mine[0], chunks)
        for theirs in (whole, part):
            assert theirs[2][0] == pytest.approx(mine[2][0], rel=1e-6)
            assert theirs[2][1] == pytest.approx(mine[2][1], rel=1e-5)


def _each_layer_twice(states: list, chunks: int) -> list:
    """The states of selective recomputation: forward, then each layer again, the last one first."""
    return states + states[chunks:] + states[:chunks]


def told(broken: int, kind: str, layout: dict):
    """What a rank hears where another one fails alone."""
    ctx = context(**layout)
    model = model_in(GPT2, ctx)
    if ctx.rank == broken:
        layer = model.layers[str(min(map(int, model.layers)))]
        layer.register_forward_pre_hook(_fail)
    try:
        with mock.patch.object(failure, "PATIENCE", 0.3):
            _call(model, kind)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.distributed.destroy_process_group()
    return "nothing"


def _fail(*_):
    raise RuntimeError("a rank's own trouble")


def _call(model, kind: str) -> None:
    batch = rows_of_replica(batch_of(0), model.ctx)
    if kind == "train_batch":
        model.train_batch(**batch)
    elif kind == "forward":
        model(batch["input_ids"])
    else:
        model.generate(batch_of(0)["input_ids"][:, :5], max_new_tokens=3)


@pytest.mark.parametrize(
    ("kind", "layout"),
    marked_slow(
        [("train_batch", CP2), ("generate", PP), ("train_batch", DP), ("forward", TP)],
        lambda number, _: number > 1,
    ),
)
def test_all_hear_of_an_error_on_one_cp_rank(ranks, kind, layout):
    broken = Layout.named(layout).ranks - 1
    for rank, answer in enumerate(in_layout(ranks, told, layout, broken, kind)):
        if rank == broken:
            assert answer == "RuntimeError: a rank's own trouble"
        else:
            assert answer == f"UserError: rank {broken} failed: RuntimeError: a rank's own trouble"


# Models and modules of one's own.


class OwnMask(Llama):
    """Makes the mask of its segments itself, for the tokens that it has."""

    def forward_stage(self, x, batch, stage):
        x = self.embedding(x) if stage.first else x
        rotary = self.rotary(batch.positions(x.device), x.dtype, batch.longest)
        mask = segment_mask(batch.segments, batch.shape[1])
        x = self.run_layers(x, stage, batch, rotary, mask)
        return self.norm(x) if stage.last else x


class NoMask(Llama):
    """Looks back over all of a sequence."""

    class Block(Block):
        def forward(self, x, batch, rotary, mask):
            return super().forward(x, batch, rotary, None)


class OwnForward(CausalSelfAttention):
    """Has another forward than the one that looks across ranks."""

    def forward(self, x, *_):
        q, k, v = self.qkv(x)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).flatten(2))


class OwnAttention(nn.Module):
    """Knows nothing of other ranks."""

    def __init__(self, c):
        super().__init__()
        self.qkv = QKVParallelLinear(c.hidden_size, c.heads, c.kv_heads)
        self.output = RowParallelLinear(c.hidden_size, c.hidden_size)

    forward = OwnForward.forward


class Tokenwise(nn.Module):
    """No token looks at another."""

    def __init__(self, c, index):
        super().__init__()
        self.mlp = Block(c, index).mlp

    def forward(self, x, *_):
        return x + self.mlp(x)


def with_layers(make) -> type[Llama]:
    """A LLaMA whose second layer is another one. make(config, index): the layer."""

    class Own(Llama):
        @staticmethod
        def Block(c, index):
            return make(c, index) if index == 1 else Block(c, index)

    return Own


def with_attention(make) -> type[Llama]:
    """A LLaMA whose second layer has another attention. make(config): the attention."""

    def layer(c, index):
        block = Block(c, index)
        block.attention = make(c)
        return block

    return with_layers(layer)


class SaysSo(Tokenwise):
    context_parallel = True


FAMILIES = {"own mask": OwnMask, "no mask": NoMask, "tokenwise": with_layers(SaysSo)}


def trained_by(name: str, kind: str, layout: dict):
    """Losses and norms of two steps."""
    if name == "qwen":
        from tests.support.own_family import Qwen  # known to this process from now on

        family, config = Qwen, replace(Qwen.presets["qwen-tiny"], layers=2)
    else:
        family, config = FAMILIES[name], LLAMA
    model = family.build(config, context(**layout), seed=3)
    optimizer, batch = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=0.2), batch_of(0, kind)
    steps = range(2)
    return [(model.train_batch(**batch).item(), optimizer.step().item()) for _ in steps]


FAMILY_CASES = [  # the first of each in `make test`
    *[("qwen", "documents, padding", layout) for layout in (TP, CP2, ULYSSES)],
    *[("own mask", "plain", layout) for layout in (ULYSSES, CP2, TP)],  # of one segment: none
    *[("no mask", "plain", layout) for layout in (CP2, ULYSSES, TP)],
    *[("tokenwise", "documents", layout) for layout in (CP2, ULYSSES, TP)],
]


@pytest.mark.parametrize(
    ("family", "kind", "layout"), marked_slow(FAMILY_CASES, lambda number, _: number % 3)
)
def test_a_family_of_ones_own_trains_as_in_one_process(ranks, family, kind, layout):
    (expected,) = ranks(trained_by, 1, family, kind, {})
    for history in in_layout(ranks, trained_by, layout, family, kind):
        assert worst_relative(history, expected) < 1e-5


def refused(function, *args) -> str:
    """The one line that a call is refused with."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def refused_call(kind: str, layout: dict) -> str:
    ctx = context(**layout)
    batch = batch_of(0, "documents")
    ids, targets = batch["input_ids"], batch["targets"]
    own = dict(input_ids=ids[:, :8], targets=targets[:, :8], sequence_length=TOKENS)
    if kind == "own mask":
        model = OwnMask.build(LLAMA, ctx, seed=3)
        return refused(lambda: model.train_batch(**batch))
    if kind == "mask":
        attention = CausalSelfAttention(32, 4, ctx=ctx)
        mask = torch.ones(8, 8, dtype=torch.bool)
        return refused(lambda: attention(torch.randn(1, 8, 32), mask=mask))
    config = GPT2
    if kind == "classifier":
        config, own["labels"] = replace(GPT2, num_labels=2, pad_token_id=0), torch.ones(4)
        del own["targets"]
    elif kind == "labels":
        own["labels"] = own.pop("targets")
    elif kind == "width":
        own["input_ids"] = ids
    elif kind == "targets' width":
        own["targets"] = targets[:, :7]
    else:
        own["sequence_length"] = 0
    model = model_in(config, ctx)
    return refused(lambda: model.train_batch(**own))


OF_WHOLE = "labels cannot be combined with sequence_length, because they are shifted by one "
WHOLE_MASK = "under context parallelism, the attention mask must be a MaskPerChunk"
WORDS = {
    "own mask": WHOLE_MASK,
    "mask": WHOLE_MASK,
    "classifier": OF_WHOLE,
    "labels": OF_WHOLE,
    "width": "input_ids has the shape [4, 13], not [batch, 8], a rank's part of 16 tokens",
    "targets' width": "targets has the shape [4, 7], not [batch, 8]",
    "length": "sequence_length 0 must be 1 or more",
}


def refused_calls(layout: dict) -> dict[str, str]:
    return {kind: refused_call(kind, layout) for kind in WORDS}


def test_calls_are_refused_in_one_line(ranks):
    for lines in in_layout(ranks, refused_calls, CP2):
        for kind, line in lines.items():
            assert line.startswith(WORDS[kind]), kind


def test_contexts_that_cannot_be_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1"])
    for make, error in [
        (lambda: ParallelContext.virtual(cp=2, cp_method="ring"), "unknown cp-method 'ring'"),
        (lambda: ParallelContext.virtual(cp=2, rank=2), "rank 2 is not in a world of tp 1 x pp 1"),
        (
            lambda: ParallelContext.from_torch(context_parallel_size=2),
            "1 ranks were started, but tp 1 x pp 1 x cp 2 needs a multiple of 2: use "
            "megazoo.launch(function, cp=2), or start 2 with torchrun --nproc-per-node 2 train.py "
            "--lr 1",
        ),
        (
            lambda: ParallelContext.from_torch(context_parallel_size=2.0),
            "context_parallel_size must be a whole number of at least 1, not 2.0",
        ),
    ]:
        assert refused(make).startswith(error), error
    monkeypatch.setattr("sys.argv", ["-c"])
    line = refused(lambda: ParallelContext.from_torch(context_parallel_size=2))
    assert line.endswith("start 2 with the code in a file: torchrun --nproc-per-node 2 FILE.py")


def test_ulysses_needs_a_head_for_each_rank():
    for tp, cp, heads in [(1, 5, 4), (2, 3, 2)]:
        ctx = ParallelContext.virtual(tp, cp=cp, cp_method="ulysses")
        line = refused(lambda ctx=ctx: Llama.on_meta(LLAMA, ctx))
        assert (
            f"the {heads} heads of a tensor-parallel rank over cp {cp}: use cp of at most" in line
        )
    # of five heads the second tp rank has two
    ctx = ParallelContext.virtual(2, cp=3, cp_method="ulysses")
    five = tiny_config(hidden_size=40, heads=5)
    assert "the 2 heads" in refused(lambda: megazoo.models.gpt2.GPT2.on_meta(five, ctx))


def test_a_virtual_context_runs_nothing():
    model = Llama.on_meta(LLAMA, ParallelContext.virtual(cp=2))
    assert "has no other ranks" in refused(lambda: model.train_batch(**batch_of(0)))


BLIND = {
    "own forward": with_attention(lambda c: OwnForward(c.hidden_size, c.heads, c.kv_heads)),
    "own attention": with_attention(OwnAttention),
    "no attention": with_layers(Tokenwise),
}


def test_a_layer_that_cannot_look_across_ranks_is_refused_when_the_model_is_built():
    """Its tokens would see those of their own rank alone, and nothing would say so."""
    for name, family in BLIND.items():
        line = refused(lambda make=family: make.on_meta(LLAMA, ParallelContext.virtual(cp=2)))
        assert line.startswith("layer 1, a "), name
        family.on_meta(LLAMA, ParallelContext.virtual(tp=2))  # at cp 1 it may be


COPIED = ("never", "where there is a mask", "always")


def alone(copied: str, layout: dict):
    """An attention in a user's own module: what its tokens see, and the gradients, of the whole.
    copied: where its kernel keeps copies of the keys and values for backward."""
    ctx = context(**layout)
    with ctx:
        torch.manual_seed(1)
        attention = CausalSelfAttention(32, 4, 2)
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=0.3)
    if copied != "never":
        attend = attention.attend._here
        attention.attend._here = lambda q, k, v, mask, **how: (
            attend(q, k.clone(), v.clone(), mask, **how)
            if copied == "always" or mask is not None
            else attend(q, k, v, mask, **how)
        )
    cut = SequenceCut.of(16, ctx)
    own = (lambda x: x) if cut is None else cut.own
    x = own(torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2))).requires_grad_()
    positions = own(torch.arange(16)[None])[0]
    rotary = Rotary(8, 10000.0, 16)(positions, torch.float32)
    y = attention(x, rotary=rotary)
    (y * own(torch.linspace(-1, 1, 16)[None])[..., None]).square().sum().backward()
    for parameter in attention.parameters():
        if cut is not None:  # as a user's own DistributedDataParallel would
            torch.distributed.all_reduce(parameter.grad, group=ctx.cp_group)
    grads = [parameter.grad for parameter in attention.parameters()]
    return y.detach(), x.grad, grads


def alone_each_way(layout: dict) -> dict:
    return {copied: alone(copied, layout) for copied in COPIED}


@pytest.mark.parametrize("layout", [CP2, ULYSSES])
def test_an_attention_alone_sees_the_whole_sequence(ranks, layout):
    """Kernels may copy keys that have a mask, which the first chunk of all has not: a rank that
    then keeps none gathers them again with the others."""
    y, dx, gradients = alone("never", {})
    for rank, found in enumerate(in_layout(ranks, alone_each_way, layout)):
        own = SequenceCut(16, 2, rank, "allgather").own
        for theirs, their_dx, their_gradients in found.values():
            torch.testing.assert_close(theirs, own(y), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(their_dx, own(dx), atol=1e-4, rtol=1e-5)
            for ours, expected in zip(their_gradients, gradients, strict=True):
                torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
