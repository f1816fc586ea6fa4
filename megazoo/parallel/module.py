"""Modules with sharded parameters, and the operations that depend on the shards: initial values,
sums of gradients over replicated parameters, and the elements that count in sums over the whole
model."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from megazoo.errors import UserError
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import AXES, ParallelContext, current_context
from megazoo.parallel.deferred import AtOnce, WeightQueue
from megazoo.parallel.random import derive_seed
from megazoo.parallel.shard import Box, ParameterSpec, Piece
from megazoo.parallel.staging import Upload
from megazoo.torch_internals import copy_each

ROUNDED = (torch.int8, torch.uint8)  # dtypes of weights that are rounded to 8 bits
TILE = 128  # rows and columns of the blocks in which initial values are drawn


_without_memory: ContextVar[bool] = ContextVar("cut parameters without memory", default=False)


@contextmanager
def without_memory() -> Iterator[None]:
    """Within this block, ShardedModules create their parameters on the meta device; other tensors
    are created as usual."""
    token = _without_memory.set(True)
    try:
        yield
    finally:
        _without_memory.reset(token)


class Storage(Protocol):
    """Keeps the values of parameters in another form, for example as ranges over the replicas."""

    def use(self, module: "ShardedModule", name: str) -> torch.Tensor | None:
        """Return this rank's shard of a parameter for one use in forward, or None for a missing
        bias. Backward through it gives the gradient of what is kept. All ranks of a replica call it
        in the same order, and in train_batch and eval_batch all ranks of the token axis."""


class ShardedModule(nn.Module):
    """A module with sharded parameters: `specs` has the ParameterSpec of each, by its name.

    A forward reads a parameter only by `self.use(name)`. The shards are kept by deepcopy, to() and
    to_empty().

    Args:
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Attributes:
        sums_later: whether the caller of backward sums partial gradients, once for many backwards,
            as train_batch does (`sum_over_copies`).
        weight_queue: adds the gradients of weights that multiply tokens, in train_batch and
            microbatches; None in a custom backward.
        multiplied: names of the parameters that are matrices which multiply every token.
            `flops_per_token` counts them, and Muon trains them.
        storage: what keeps the values of the parameters; None: the parameters.
        shown: names of attributes that print(module) shows after the parameters.
    """

    multiplied: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[tuple[str, ...]] = ()
    storage: Storage | None = None
    sums_later = False
    weight_queue: WeightQueue | AtOnce | None = None

    def __init__(self, ctx: ParallelContext | None = None):
        super().__init__()
        self.ctx = ctx or current_context()
        self.specs: dict[str, ParameterSpec] = {}
        # parameters of which backward on this rank gives only a part of the gradient
        self._partial: set[str] = set()

    def use(self, name: str) -> torch.Tensor | Any:
        """Return a parameter for a use in forward: this rank's shard, or None for a missing bias.

        It is the parameter itself, or what the storage returns. If the backward of each tp rank
        gives a partial gradient, as for replicated KV heads and for norms under sequence
        parallelism, the parts are summed, here or at the end of train_batch.
        """
        parameter = (
            self.storage.use(self, name) if self.storage is not None else getattr(self, name)
        )
        if name not in self._partial or self.sums_later:
            return parameter
        return _summed_over_copies(parameter, self.specs[name], self.ctx)

    def add_parameter(self, name: str, spec: ParameterSpec) -> None:
        """Register this rank's shard of a parameter, with initial values unless it is on the meta
        device.

        The values depend on a seed from the default generator of torch, which must be seeded
        equally on all ranks. A model built by `from_config` draws them again, from the global name
        of the parameter.

        Args:
            name: name of the parameter.
            spec: its global shape, shards and initial distribution.
        """
        _check_folded_cuts(name, spec, self.ctx)
        self.specs[name] = spec
        device = "meta" if _without_memory.get() else None
        shape = spec.local_shape(self.ctx.place)
        parameter = nn.Parameter(torch.empty(shape, device=device), not spec.is_state)
        self.register_parameter(name, parameter)
        if spec.has_partial_gradient(self.ctx) and not spec.is_state:
            self._partial.add(name)
        if not parameter.is_meta:
            initialize(parameter, spec, self.ctx, derive_seed(int(torch.randint(1 << 62, ()))))

    def _apply(self, fn, recurse: bool = True) -> "ShardedModule":
        """Convert the module, as half() and to() do. A parameter that `is_state` stays fp32."""
        states = [getattr(self, name) for name, spec in self.specs.items() if spec.is_state]
        values = [parameter.data for parameter in states]
        super()._apply(fn, recurse)
        for parameter, before in zip(states, values, strict=True):
            if parameter.dtype != before.dtype:
                parameter.data = before.to(parameter.device)
        return self

    def extra_repr(self) -> str:
        """Describe the parameters by their global shapes and this rank's shards."""
        parts = [
            f"{name}={list(spec.shape)} {spec.shard_text(self.ctx.place)}".rstrip()
            for name, spec in self.specs.items()
        ]
        values = ((name, getattr(self, name)) for name in self.shown)
        return ", ".join(parts + [f"{name}={value}" for name, value in values if value is not None])

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest) -> None:
        """Raise UserError for weights that are rounded to 8 bits, in the model or the state: a
        state does not contain their scales."""
        for name, parameter in self._parameters.items():
            given = state_dict.get(prefix + name)
            for tensor, where in ((parameter, "the model"), (given, "the given state")):
                if tensor is not None and tensor.dtype in ROUNDED:
                    raise UserError(
                        f"{prefix}{name} is rounded to 8 bits in {where}: load the weights first, "
                        "then round them"
                    )
                if tensor is not None and tensor.is_mkldnn:
                    raise UserError(
                        f"{prefix}{name} has oneDNN's layout in {where}: load the weights first, "
                        "then call pack_weights"
                    )
        super()._load_from_state_dict(state_dict, prefix, *rest)


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of this rank under its global name.

    pp_ranks: the pipeline ranks that hold it, several if it is tied; the first is its owner.
    """

    name: str
    parameter: nn.Parameter
    spec: ParameterSpec
    pp_ranks: tuple[int, ...]

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the parameter, which must have one."""
        assert self.parameter.grad is not None
        return self.parameter.grad

    def counted_pieces(self, ctx: ParallelContext) -> list[Piece]:
        """Return this rank's pieces that count in sums over the model, in which copies, over tp or
        between stages, count once."""
        if ctx.pp_rank != self.pp_ranks[0]:
            return []
        return [piece for piece in self.spec.pieces(ctx.place) if piece.owned]

    def is_first_replica(self, ctx: ParallelContext) -> bool:
        """Return whether this rank's part counts in sums over the token axis, too, in which that of
        each replica would be counted again."""
        return self.spec.replicas(ctx).rank == 0


def _check_folded_cuts(name: str, spec: ParameterSpec, ctx: ParallelContext) -> None:
    """Raise UserError unless the ranks of each folded axis have equal shards of a parameter:
    otherwise their gradient buckets would differ in size and order."""
    for shard in spec.shards:
        if shard.axis in {*AXES, "token_axis"} - {"tp"}:
            raise UserError(
                f"{name} is sharded over {shard.axis}: a parameter can be sharded only over tp, "
                "or over an axis that is folded into dp x cp"
            )
    cuts = [shard for shard in spec.shards if shard.axis in ctx.folded]
    for shard in cuts:
        size = ctx.folded[shard.axis].size
        if len(set(shard.sizes_of_ranks(size))) > 1 or any(shard.replicated(size)):
            raise UserError(
                f"{name} has {spec.shape[shard.dim]} along dimension {shard.dim}, which can't be "
                f"split evenly over {shard.axis} {size}: use a size that divides them"
            )
    if sum(ctx.folded[shard.axis].size > 1 for shard in cuts) > 1:
        names = " and ".join(shard.axis for shard in cuts)
        raise UserError(
            f"{name} is sharded over {names}, which are all folded into dp x cp: use only "
            "one of them"
        )


class _SumOverCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, spec, parallel):
        ctx.spec, ctx.parallel = spec, parallel
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        sum_over_copies([(grad, ctx.spec)], ctx.parallel)
        return grad, None, None


@untraced
def _summed_over_copies(
    parameter: torch.Tensor, spec: ParameterSpec, ctx: ParallelContext
) -> torch.Tensor:
    return _SumOverCopies.apply(parameter, spec, ctx)


def sum_over_copies(
    gradients: list[tuple[torch.Tensor, ParameterSpec]], ctx: ParallelContext, limit: int = 1 << 24
) -> None:
    """Complete, in place, gradients of which each tp rank has a part (`has_partial_gradient`).

    They leave together, at most `limit` elements at a time. A unit that only some ranks hold is
    summed within a tensor of its whole part, to which the other ranks add zeros.
    """
    # (this rank's share, shape of the tensor to sum, the dimension and place of the share in it)
    shares = []
    for gradient, spec in gradients:
        shard = spec.shard
        if shard is None:
            shares.append((gradient, gradient.shape, 0, 0))
            continue
        dim, first = shard.dim, 0
        cuts, replicated = shard.cuts(ctx.tp_size, ctx.tp_rank), shard.replicated(ctx.tp_size)
        for cut, part, shared in zip(cuts, shard.parts, replicated, strict=True):
            if shared:
                shape = torch.Size([*gradient.shape[:dim], part, *gradient.shape[dim + 1 :]])
                share = gradient.narrow(dim, cut.local_start, cut.length)
                shares.append((share, shape, dim, cut.global_start - first))
            first += part
    while shares:
        count = sum(
            total <= limit for total in accumulate(shape.numel() for _, shape, _, _ in shares)
        )
        together, shares = shares[: max(1, count)], shares[max(1, count) :]
        flat = together[0][0].new_zeros(sum(shape.numel() for _, shape, _, _ in together))
        wholes = flat.split([shape.numel() for _, shape, _, _ in together])
        mine = [
            whole.view(shape).narrow(dim, start, share.shape[dim])
            for whole, (share, shape, dim, start) in zip(wholes, together, strict=True)
        ]
        copy_each(mine, [share for share, *_ in together])
        all_reduce(flat, ctx.tp_group)
        copy_each([share for share, *_ in together], mine)


@torch.no_grad()
def initialize(
    parameter: torch.Tensor,
    spec: ParameterSpec,
    ctx: ParallelContext,
    seed: int,
    upload: Upload | None = None,
) -> None:
    """Fill this rank's shard of a parameter with its initial values.

    All shards are parts of one global tensor, the same in every layout. It is drawn in tiles of
    TILE x TILE, each from a generator seeded by (seed, tile). A rank draws the tiles that overlap
    its boxes, one at a time, on the CPU for every device. A tensor with three or more dimensions is
    a stack of matrices with different seeds. upload: copies values to the device; pass the same one
    for many parameters.
    """
    upload = upload or Upload()
    for piece in spec.pieces(ctx.place):
        view = parameter[piece.index()]
        if spec.std == spec.bound == 0:
            view.fill_(spec.mean)
            continue
        if view.dim() == 1:
            _draw_matrix(view[:, None], (*piece.box, (0, 1)), spec, seed, upload)
            continue
        *outer, rows, columns = piece.box
        for index in product(*(range(size) for size in view.shape[:-2])):
            place = [first + i for (first, _), i in zip(outer, index, strict=True)]
            of_matrix = derive_seed(seed, *place) if place else seed
            _draw_matrix(view[index], (rows, columns), spec, of_matrix, upload)


def _draw_matrix(
    view: torch.Tensor, box: Box, spec: ParameterSpec, seed: int, upload: Upload
) -> None:
    """Draw a box of a matrix into `view`, which has its shape."""
    (y0, _), (x0, _) = box
    for start, rows in upload.rows(view, TILE, y0):
        _draw(rows, y0 + start, x0, spec, seed)


def _draw(values: torch.Tensor, y0: int, x0: int, spec: ParameterSpec, seed: int) -> None:
    """Draw a box of a global tensor, which begins at row y0 and column x0, into `values`."""
    height, width = spec.shape[-2:] if len(spec.shape) > 1 else (spec.shape[0], 1)
    y1, x1 = y0 + values.shape[0], x0 + values.shape[1]
    generator = torch.Generator("cpu")
    for top in range(y0 // TILE * TILE, y1, TILE):
        for left in range(x0 // TILE * TILE, x1, TILE):
            tile = torch.empty(min(TILE, height - top), min(TILE, width - left), device="cpu")
            generator.manual_seed(derive_seed(seed, top, left))
            if spec.bound:
                tile.uniform_(-spec.bound, spec.bound, generator=generator)
            else:
                tile.normal_(spec.mean, spec.std, generator=generator)
            north, south = max(top, y0), min(top + TILE, y1)
            west, east = max(left, x0), min(left + TILE, x1)
            ours = tile[north - top : south - top, west - left : east - left]
            values[north - y0 : south - y0, west - x0 : east - x0] = ours
