"""Attention over a sequence that is cut over the context-parallel ranks.

Each rank comes with the queries, keys and values of its own two chunks (megazoo/parallel/
sequence.py), and goes on with what its own tokens have seen.

    allgather   Every rank gets the keys and values of all, and computes the attention of its own
                tokens: each chunk from the keys up to its end. Llama 3 was trained so (Dubey et al.
                2024). Of b rows of s tokens, whose keys have d_kv features, a layer's forward sends
                2 b s d_kv (cp - 1) / cp elements. Backward gathers them again: kept, they would
                take as much memory on cp ranks as on one. Then it sends as many gradients, in fp32.
    ulysses     Every rank gets the whole sequence of some of the heads, and computes their
                attention (DeepSpeed-Ulysses: Jacobs et al. 2023). It sends 1 / cp of its part of q,
                k, v and the result to each other rank, which with many ranks is less.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megazoo.errors import UserError
from megazoo.layers.layer import attentions_of, declared
from megazoo.layers.masks import MaskPerChunk
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import exchange_in_context, gather_context, gathered_in_order
from megazoo.parallel.sequence import SequenceCut, in_order, in_parts
from megazoo.parallel.shares import share_of
from megazoo.torch_internals import storage_key

# kernel(q, k, v, mask): the attention of some queries, which are the last of the keys
Kernel = Callable[..., torch.Tensor]


def check_heads(heads: int, ctx: ParallelContext) -> None:
    """Raise UserError if context-parallel ranks can't have a head each. heads: the fewest of a
    tp rank."""
    if ctx.cp_method == "ulysses" and heads < ctx.cp_size:
        raise UserError(
            f"cp-method ulysses cuts the {heads} heads of a tp rank over cp {ctx.cp_size}: use cp "
            f"{heads} at most, or cp-method allgather"
        )


def check_layers(layers: Mapping[str, nn.Module], ctx: ParallelContext) -> None:
    """Raise UserError if one of a model's layers does not say that it is right with a part of the
    sequence: its attention would see nothing beyond, without a word. layers: by their index."""
    if ctx.cp_size == 1:
        return
    for index, layer in layers.items():
        attentions = list(attentions_of(layer))
        if not attentions or not all(declared(each, "context_parallel") for each in attentions):
            raise UserError(
                f"layer {index}, a {type(layer).__name__}, would not look beyond its part of the "
                f"sequence at cp {ctx.cp_size}: use CausalSelfAttention, or cp 1; a module that "
                "does look declares context_parallel = True (see megazoo.layers.Layer)"
            )


def attend_across_ranks(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: MaskPerChunk,
    ctx: ParallelContext,
    *,
    keep: bool = False,
) -> torch.Tensor:
    """Return what this rank's tokens have seen, in the shape of q: [batch, heads, this rank's part,
    head_size].

    k, v: of the same tokens; they may have fewer heads. masks: one for each of
    `SequenceCut.queries`. keep: backward follows at once, so what was gathered is kept for it
    instead of gathered again.
    """
    if ctx.cp_method == "ulysses":
        return _with_some_heads(kernel, q, k, v, masks, ctx)
    return _with_all_keys(kernel, q, k, v, masks, ctx, keep)


def _with_all_keys(kernel: Kernel, q, k, v, masks: MaskPerChunk, ctx: ParallelContext, keep: bool):
    cut = SequenceCut.of(q.shape[2] * ctx.cp_size, ctx)
    assert cut  # there are several ranks
    seen, own = [], torch.stack([k, v])
    gathered = gather_context(own, [chunk.stop for chunk in cut.chunks], ctx)
    again = _GatheredAgain(own.detach(), gathered[0][0], ctx)
    q = q.contiguous()  # a view would keep k and v, too, of which there is a copy by now
    with nullcontext() if keep else saved_tensors_hooks(again.pack, again.unpack):
        for part, (keys, values), mask in zip(
            q.chunk(2, dim=2), gathered, masks.masks, strict=True
        ):
            # transposed: the order in which kernels write it
            seen.append(kernel(part, keys, values, mask).transpose(1, 2))
    seen = torch.cat(seen, dim=1)
    return (seen if keep else _GatherBeforeBackward.apply(seen, again)).transpose(1, 2)


class _GatheredAgain:
    """Keep this rank's keys and values for backward instead of those of all ranks, which are
    gathered again there.

    own: this rank's, [2, ..., part, size]. gathered: any of what `gather_context` made of them.
    """

    def __init__(self, own: torch.Tensor, gathered: torch.Tensor, ctx: ParallelContext):
        self.own, self.ctx = own, ctx
        self.storage = storage_key(gathered.untyped_storage())
        self.packed = self.missing = 0  # tensors of that storage, and those backward still needs
        self.again: torch.Tensor | None = None

    def gather(self) -> None:
        """Gather again: all ranks at once, also one whose kernels have copied what they need, as
        some do where there is a mask."""
        assert self.ctx.cp_group  # there are several ranks
        gathered = gathered_in_order(self.own, self.ctx.cp_group)
        self.again, self.missing = gathered if self.packed else None, self.packed

    def pack(self, tensor: torch.Tensor):
        """Return what is kept of a tensor: where it lies in what is gathered, if it does."""
        if storage_key(tensor.untyped_storage()) != self.storage:
            return tensor
        self.packed += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed) -> torch.Tensor:
        """Return the tensor of which `pack` has kept this."""
        if isinstance(packed, torch.Tensor):
            return packed
        assert self.again is not None  # backward has called `gather`
        tensor = self.again.as_strided(*packed)
        self.missing -= 1
        if not self.missing:
            self.again = None
        return tensor


class _GatherBeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, again: _GatheredAgain):
        ctx.again = again
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.again.gather()
        return grad, None


def _with_some_heads(kernel: Kernel, q, k, v, masks: MaskPerChunk, ctx: ParallelContext):
    ranks, mine = ctx.cp_size, ctx.cp_rank
    queries = [share_of(range(q.shape[1]), ranks, rank) for rank in range(ranks)]
    keys = [_keys_of(heads, q.shape[1] // k.shape[1]) for heads in queries]
    q, k, v = q.unbind(1), k.unbind(1), v.unbind(1)
    heads = []  # rank by rank, those of q, k and v that it needs: each [batch, part, head_size]
    for of_queries, of_keys in zip(queries, keys, strict=True):
        heads += [*(q[i] for i in of_queries), *(k[i] for i in of_keys), *(v[i] for i in of_keys)]
    sizes = [len(queries[mine]), len(keys[mine]), len(keys[mine])]
    sends = [len(a) + 2 * len(b) for a, b in zip(queries, keys, strict=True)]
    received = exchange_in_context(torch.stack(heads), ctx, sends, [sum(sizes)] * ranks)
    whole = in_order(received.unflatten(0, (ranks, -1)))  # [heads, batch, sequence, head_size]
    q, k, v = whole.transpose(0, 1).split(sizes, dim=1)
    (mask,) = masks.masks
    seen = in_parts(kernel(q, k, v, mask).transpose(0, 1), ranks).flatten(0, 1)
    receives = [len(heads) for heads in queries]
    return exchange_in_context(seen, ctx, [sizes[0]] * ranks, receives).transpose(0, 1)


def _keys_of(queries: range, group: int) -> list[int]:
    """Return the heads of keys that some heads of queries use, `group` of which share one: each
    once; or, if they don't use all equally often, one for each query."""
    used = [query // group for query in queries]
    once = sorted(set(used))
    even = all(used.count(head) * len(once) == len(used) for head in once)
    return once if even else used
