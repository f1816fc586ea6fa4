"""Models and modules of a user's own under context parallelism, and what is refused in one line."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import megazoo
from megazoo.errors import UserError
from megazoo.layers import (
    CausalSelfAttention,
    QKVParallelLinear,
    Rotary,
    RowParallelLinear,
    segment_mask,
)
from megazoo.models.llama import Block, Llama
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut
from tests.support.context_parallel import TOKENS, batch_of, cp_name, model_in
from tests.support.training import MODELS, context, tiny_config, world, worst_relative

CP2, ULYSSES, TP = dict(cp=2), dict(cp=2, method="ulysses"), dict(tp=2, cp=2, sp=True)
LLAMA, GPT2 = replace(MODELS["llama"], layers=2), tiny_config(layers=2)


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
    """Losses and norms of three steps."""
    if name == "qwen":
        from tests.support.own_family import Qwen  # known to this process from now on

        family, config = Qwen, replace(Qwen.presets["qwen-tiny"], layers=2)
    else:
        family, config = FAMILIES[name], LLAMA
    model = family.build(config, context(**layout), seed=3)
    optimizer, batch = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=0.2), batch_of(0, kind)
    steps = range(3)
    return [(model.train_batch(**batch).item(), optimizer.step().item()) for _ in steps]


@pytest.mark.parametrize("layout", [CP2, ULYSSES, TP], ids=cp_name)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen", "documents, padding"),
        ("own mask", "plain"),  # of one segment it makes none
        ("no mask", "plain"),
        ("tokenwise", "documents"),
    ],
)
def test_a_family_of_ones_own_trains_as_in_one_process(ranks, family, kind, layout):
    (expected,) = ranks(trained_by, 1, family, kind, {})
    for history in ranks(trained_by, world(layout), family, kind, layout):
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


OF_WHOLE = "labels go with whole sequences: give targets, shifted before they were cut, or no "
WHOLE_MASK = "under context parallelism a rank has a part of the sequence, and an attention mask"
WORDS = {
    "own mask": WHOLE_MASK,
    "mask": WHOLE_MASK,
    "classifier": OF_WHOLE,
    "labels": OF_WHOLE,
    "width": "input_ids has the shape [4, 13], not [batch, 8], a rank's part of 16 tokens",
    "targets' width": "targets has the shape [4, 7], not [batch, 8]",
    "length": "sequence_length 0 must be 1 or more",
}


@pytest.mark.parametrize("kind", WORDS)
def test_calls_are_refused_in_one_line(ranks, kind):
    for line in ranks(refused_call, 2, kind, CP2):
        assert line.startswith(WORDS[kind])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ParallelContext.virtual(cp=2, cp_method="ring"), "unknown cp-method 'ring'"),
        (lambda: ParallelContext.virtual(cp=2, rank=2), "rank 2 is not in a world of tp 1 x pp 1"),
        (
            lambda: ParallelContext.from_torch(context_parallel_size=2),
            "a world of 1 ranks does not fit tp 1 x pp 1 x cp 2: start 2",
        ),
        (
            lambda: ParallelContext.from_torch(context_parallel_size=2.0),
            "context_parallel_size must be a whole number of at least 1, not 2.0",
        ),
    ],
)
def test_contexts_that_cannot_be_are_refused(make, error):
    assert refused(make).startswith(error)


def test_ulysses_needs_a_head_for_each_rank():
    for tp, cp, heads in [(1, 5, 4), (2, 3, 2)]:
        ctx = ParallelContext.virtual(tp, cp=cp, cp_method="ulysses")
        line = refused(lambda ctx=ctx: Llama.on_meta(LLAMA, ctx))
        assert f"the {heads} heads of a tp rank over cp {cp}: use cp {heads} at most" in line
    # of five heads the second tp rank has two
    ctx = ParallelContext.virtual(2, cp=3, cp_method="ulysses")
    five = tiny_config(hidden_size=40, heads=5)
    assert "the 2 heads" in refused(lambda: megazoo.models.gpt2.GPT2.on_meta(five, ctx))


def test_a_virtual_context_runs_nothing():
    model = Llama.on_meta(LLAMA, ParallelContext.virtual(cp=2))
    assert "has no ranks to talk to" in refused(lambda: model.train_batch(**batch_of(0)))


BLIND = {
    "own forward": with_attention(lambda c: OwnForward(c.hidden_size, c.heads, c.kv_heads)),
    "own attention": with_attention(OwnAttention),
    "no attention": with_layers(Tokenwise),
}


@pytest.mark.parametrize("name", BLIND)
def test_a_layer_that_cannot_look_across_ranks_is_refused_when_the_model_is_built(name):
    """Its tokens would see those of their own rank alone, and nothing would say so."""
    line = refused(lambda: BLIND[name].on_meta(LLAMA, ParallelContext.virtual(cp=2)))
    assert line.startswith("layer 1, a ")
    BLIND[name].on_meta(LLAMA, ParallelContext.virtual(tp=2))  # at cp 1 it may be


def alone(layout: dict, copied: str = "never"):
    """An attention in a user's own module: what its tokens see, and the gradients, of the whole.
    copied: where its kernel keeps copies of the keys and values for backward."""
    ctx = context(**layout)
    with ctx:
        torch.manual_seed(1)
        attention = CausalSelfAttention(32, 4, 2)
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=0.3)
    if copied != "never":
        attend = attention._attend_here
        attention._attend_here = lambda q, k, v, mask, dropout: (
            attend(q, k.clone(), v.clone(), mask, dropout)
            if copied == "always" or mask is not None
            else attend(q, k, v, mask, dropout)
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


@pytest.mark.parametrize("copied", ["never", "where there is a mask", "always"])
@pytest.mark.parametrize("layout", [CP2, ULYSSES], ids=cp_name)
def test_an_attention_alone_sees_the_whole_sequence(ranks, layout, copied):
    """Kernels may copy keys that have a mask, which the first chunk of all has not: a rank that
    then keeps none gathers them again with the others."""
    y, dx, gradients = alone({})
    for rank, (theirs, their_dx, their_gradients) in enumerate(ranks(alone, 2, layout, copied)):
        own = SequenceCut(16, 2, rank, "allgather").own
        torch.testing.assert_close(theirs, own(y), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(their_dx, own(dx), atol=1e-4, rtol=1e-5)
        for ours, expected in zip(their_gradients, gradients, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
