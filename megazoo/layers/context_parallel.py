"""Attention over a sequence that is split over the context-parallel ranks.

Each rank has the queries, keys and values of two chunks of the sequence (megazoo/parallel/
sequence.py), and computes the attention output of its tokens.

    allgather   Every rank gathers the keys and values of all ranks and attends with its own
                queries: each chunk to the keys up to its end, as in the training of Llama 3 (Dubey
                et al. 2024). For b rows of s tokens with keys of d_kv features, the forward of a
                layer sends 2 b s d_kv (cp - 1) / cp elements. Backward gathers them again, because
                saving them would need as much memory as without cp. It also sends the same number
                of gradients in fp32.
    ulysses     Every rank gets the full sequence for some of the heads, and computes their
                attention (DeepSpeed-Ulysses: Jacobs et al. 2023). It sends 1 / cp of its part of q,
                k, v and the output to each other rank. With many ranks this is less traffic.
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
from megazoo.parallel.regions import exchange, gather_context, gathered_in_order
from megazoo.parallel.sequence import SequenceCut, in_order, in_parts
from megazoo.parallel.shares import share_of
from megazoo.torch_internals import storage_key

# kernel(q, k, v, mask): attention for queries that are the last of the keys
Kernel = Callable[..., torch.Tensor]


def check_heads(heads: int, ctx: ParallelContext) -> None:
    """Raise UserError if there are fewer heads than ulysses ranks. heads: the smallest number of
    heads on a tp rank."""
    if ctx.layout.cp_method == "ulysses" and heads < ctx.cp_size:
        raise UserError(
            f"cp-method ulysses can't split the {heads} heads of a tensor-parallel rank "
            f"over cp {ctx.cp_size}: use cp of at most {heads}, or cp-method allgather"
        )


def check_layers(layers: Mapping[str, nn.Module], ctx: ParallelContext) -> None:
    """Raise UserError if a layer does not declare context_parallel, under context parallelism.

    Otherwise its attention would silently be limited to this rank's part of the sequence. layers:
    by index.
    """
    if ctx.cp_size == 1:
        return
    for index, layer in layers.items():
        attentions = list(attentions_of(layer))
        if not attentions or not all(declared(each, "context_parallel") for each in attentions):
            raise UserError(
                f"layer {index}, a {type(layer).__name__}, does not declare context_parallel: at "
                f"cp {ctx.cp_size} it would attend only within its part of the sequence. Use "
                "CausalSelfAttention, or cp 1. If it attends across ranks, set context_parallel = "
                "True (see megazoo.layers.Layer)"
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
    """Return the attention output of this rank's tokens over the full sequence, in the shape of q.

    Args:
        kernel: kernel(q, k, v, mask), the attention on one rank.
        q: [batch, heads, this rank's part, head_size].
        k, v: of the same tokens; they may have fewer heads.
        masks: one for each of `SequenceCut.queries`.
        ctx: parallel context.
        keep: whether to save the gathered keys and values for a backward that follows immediately,
            instead of gathering them again.
    """
    if ctx.layout.cp_method == "ulysses":
        return _with_some_heads(kernel, q, k, v, masks, ctx)
    return _with_all_keys(kernel, q, k, v, masks, ctx, keep)


def _with_all_keys(kernel: Kernel, q, k, v, masks: MaskPerChunk, ctx: ParallelContext, keep: bool):
    cut = SequenceCut.of(q.shape[2] * ctx.cp_size, ctx)
    assert cut  # there are several ranks
    seen, own = [], torch.stack([k, v])
    gathered = gather_context(own, [chunk.stop for chunk in cut.chunks], ctx)
    again = _GatheredAgain(own.detach(), gathered[0][0], ctx)
    q = q.contiguous()  # a view would keep the memory of k and v, which have been copied
    with nullcontext() if keep else saved_tensors_hooks(again.pack, again.unpack):
        for part, (keys, values), mask in zip(
            q.chunk(2, dim=2), gathered, masks.masks, strict=True
        ):
            # transposed: the memory order of the kernels
            seen.append(kernel(part, keys, values, mask).transpose(1, 2))
    seen = torch.cat(seen, dim=1)
    return (seen if keep else _GatherBeforeBackward.apply(seen, again)).transpose(1, 2)


class _GatheredAgain:
    """Save this rank's keys and values for backward instead of those of all ranks, and gather again
    in backward.

    own: those of this rank, [2, ..., part, size]. gathered: any tensor that `gather_context`
    returned for them.
    """

    def __init__(self, own: torch.Tensor, gathered: torch.Tensor, ctx: ParallelContext):
        self.own, self.ctx = own, ctx
        self.storage = storage_key(gathered.untyped_storage())
        self.packed = self.missing = 0  # tensors in that storage; those that backward still needs
        self.again: torch.Tensor | None = None

    def gather(self) -> None:
        """Gather again. All ranks take part, including one whose kernels have copied all that they
        need, as some kernels do with a mask."""
        assert self.ctx.cp_group  # there are several ranks
        gathered = gathered_in_order(self.own, self.ctx.cp_group)
        self.again, self.missing = gathered if self.packed else None, self.packed

    def pack(self, tensor: torch.Tensor):
        """Return the location of a tensor in the gathered storage, or the tensor itself if it is
        not in it."""
        if storage_key(tensor.untyped_storage()) != self.storage:
            return tensor
        self.packed += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed) -> torch.Tensor:
        """Return the tensor for a result of `pack`."""
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
    heads = []  # per rank, those of q, k and v that it needs: each [batch, part, head_size]
    for of_queries, of_keys in zip(queries, keys, strict=True):
        heads += [*(q[i] for i in of_queries), *(k[i] for i in of_keys), *(v[i] for i in of_keys)]
    sizes = [len(queries[mine]), len(keys[mine]), len(keys[mine])]
    sends = [len(a) + 2 * len(b) for a, b in zip(queries, keys, strict=True)]
    received = exchange(torch.stack(heads), ctx.cp, sends, [sum(sizes)] * ranks)
    whole = in_order(received.unflatten(0, (ranks, -1)))  # [heads, batch, sequence, head_size]
    q, k, v = whole.transpose(0, 1).split(sizes, dim=1)
    (mask,) = masks.masks
    seen = in_parts(kernel(q, k, v, mask).transpose(0, 1), ranks).flatten(0, 1)
    receives = [len(heads) for heads in queries]
    return exchange(seen, ctx.cp, [sizes[0]] * ranks, receives).transpose(0, 1)


def _keys_of(queries: range, group: int) -> list[int]:
    """Return the key heads for some query heads, if each key head is shared by `group` query heads.

    Each key head is listed once; or once per query head, if they are not used equally often.
    """
    used = [query // group for query in queries]
    once = sorted(set(used))
    even = all(used.count(head) * len(once) == len(used) for head in once)
    return once if even else used
