"""Gradients in contiguous fp32 buckets, which are reduced over the replicas during backward.

`GradientBuckets` sums them, shards the sums under ZeRO-1, and checks whether a step may use them.
The hook on the optimizers of torch, at the end, calls this check.
"""

import functools
import weakref
from collections import deque
from collections.abc import Container, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megazoo.errors import UserError
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_gather_shards, all_reduce, reduce_scatter_shards
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.timing import spent
from megazoo.torch_internals import copy_each, scale_each

if TYPE_CHECKING:
    from megazoo.parallel.storage import Flat

BUCKET_ELEMENTS = 1 << 23  # on CPUs: 32 MB of fp32
CUDA_BUCKET_ELEMENTS = 40_000_000  # on CUDA at least: 160 MB, as in Megatron-LM
SHARD_ELEMENTS = 1_000_000  # on CUDA at least, of each replica: 4 MB
# elements: shards start at vector boundaries of kernels, so results equal those without shards
ALIGNMENT = 64

# Why a step must not use the gradients.
UNSUMMED = (
    "the gradients of a custom backward are not summed over the ranks: call "
    "model.sync_gradients() on every rank before the step (also if you have summed them yourself: "
    "it then changes nothing)"
)
UNFINISHED = (
    "a batch is not finished: run the loop over model.microbatches() to its end; or, if you left "
    "it, train on another batch or call model.zero_grad()"
)
MIXED = (
    "a custom backward has added to gradients that train_batch sharded over the replicas "
    "(ZeRO): call model.zero_grad() before it"
)

USED_AGAIN = (
    "a parameter got more gradients than there are micro-batches, after its sum over the replicas "
    "had started: if several stages use it, call model.tie(NAME, *STAGES); if several layers use "
    "it, use --recompute none or selective"
)


def elements_for(ctx: ParallelContext) -> int:
    """Return the number of elements of a bucket.

    On CUDA the shard per replica must not be too small, because the ring has as many steps as
    replicas. So buckets grow with the number of replicas.
    """
    if ctx.device.type != "cuda":
        return BUCKET_ELEMENTS
    return max(CUDA_BUCKET_ELEMENTS, SHARD_ELEMENTS * ctx.token_axis.size)


def accumulate_in_fp32(parameter: nn.Parameter) -> None:
    """Make autograd accumulate the gradient of a parameter in fp32, the precision of the
    buckets."""
    if parameter.dtype != torch.float32:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.float32
        parameter.grad = None if gradient is None else gradient.float()


class GradientBuckets:
    """Reduce gradients over the replicas, in buckets; each gradient becomes a view of its bucket.

    The replicas are the ranks along `ctx.token_axis`, or, for parameters that are sharded over a
    folded axis, its `replicas`. All parameters of a bucket have the same replicas. Buckets are
    filled in the reverse order of the parameters, roughly the order of backward. Each has at most
    `bucket_elements` elements (None: `elements_for(ctx)`) or one larger parameter. After
    `start(n)`, the reduction of a bucket starts when each of its parameters has the gradients of n
    backwards; `wait_for_sums` waits for all. Memory is allocated only then, while activations are
    freed. One replica needs no buckets. The sums are not divided, because the loss is
    already a part of the global mean.

    flats: of parameters that rest as ranges (ZeRO-3). Those of each flat are a bucket, in which
    they have the same places.

    late: parameters whose gradients are incomplete after n backwards, because partial gradients
    over tp or tied copies must be summed, or several stages of the rank use them. They are reduced
    in `wait_for_sums`. unsummed: parameters whose gradients are also partial over tp after a custom
    backward. axes: the replicas of parameters with others than the token axis.

    `megazoo.engine.gradients.GradientSums` calls the methods.

    zero: stage of ZeRO (Rajbhandari et al. 2020). From 1, each replica gets only its shard of every
    bucket: the elements `range_of(parameter)` of each parameter. It updates these, and `gather`
    sends them to all. From 2, it keeps only that shard: `own` returns it, and p.grad is None. With
    `per_microbatch`, a bucket then leaves in each backward, if `start` allows it, and the shards
    are added up.

    A backward outside of start and wait_for_sums is a custom one. Its gradients are only this
    rank's until `average`. `check` raises an error if a step may not use the current gradients.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        ctx: ParallelContext,
        bucket_elements: int | None = None,
        late: Container[nn.Parameter] = (),
        unsummed: Container[nn.Parameter] = (),
        axes: Mapping[nn.Parameter, Axis] | None = None,
        flats: Iterable["Flat"] = (),
    ):
        self.ctx, self.zero, self.per_microbatch = ctx, 0, True
        self.counting = False  # between start and wait_for_sums
        self.fault: str | None = None  # why a step must not take the gradients as they are
        self.shared_out = False  # the last batch left each replica its own part of the sums
        self._hooks: list = []
        self.sizes: list[int] = []  # elements of each bucket
        self.axes: list[Axis] = []  # of the replicas of each bucket
        # of each bucket, with where they begin in it
        self.members: list[list[tuple[nn.Parameter, int]]] = []
        self.place: dict[nn.Parameter, tuple[int, int]] = {}  # the bucket, and where in it
        # what a hook holds, no garbage collector sees: the model would live on
        myself = weakref.ref(self)

        def received(parameter: nn.Parameter) -> None:
            buckets = myself()
            if buckets and parameter not in buckets.deferred:
                buckets.received(parameter)

        limit = bucket_elements or elements_for(ctx)
        axis_of = dict.fromkeys(parameters[::-1], ctx.token_axis) | dict(axes or {})
        stored, self.stored = list(flats)[::-1], set()  # buckets whose parameters rest as ranges
        for is_late in (False, True):
            for flat in (each for each in stored if each.late == is_late):
                members = [(p, start) for p, start in flat.members if p in axis_of]
                for parameter, _ in members:
                    del axis_of[parameter]
                if members:
                    self.stored.add(len(self.sizes))
                    self._add(members, flat.size, flat.axis)
            own = {p: axis for p, axis in axis_of.items() if (p in late) == is_late}
            for bucket in _grouped_by_axis(own, limit):
                self._lay_out(bucket, axis_of[bucket[0]])
            if not is_late:
                self.early = len(self.sizes)  # buckets that may leave before the end
        for parameter in self.place:
            accumulate_in_fp32(parameter)
            tied = ctx.pp_size > 1 and parameter in late
            if ctx.token_axis.size > 1 or tied or parameter in unsummed:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(received))
        # backwards that each of them still waits for; empty when not counting
        self.missing: list[int] = []
        self.deferred: Container[nn.Parameter] = ()
        self.launched = 0  # buckets whose sums have started, of the current round
        self.rounds = 0  # rounds that are left, in each of which every bucket leaves
        # buckets that are on their way, with what to wait for
        self.leaving: deque[tuple[int, torch.Tensor, dist.Work | None]] = deque()
        self.shards: dict[int, torch.Tensor] = {}  # under ZeRO-2, this replica's, by bucket
        _alive.add(self)
        _check_steps()

    @property
    def sharded(self) -> bool:
        """Whether each replica gets only its shard of the sums."""
        return self.zero > 0

    def _lay_out(self, bucket: list[nn.Parameter], axis: Axis) -> None:
        """Add a bucket of these parameters, of one axis, and give each its place in it."""
        members, end = [], 0
        for parameter in bucket:
            members.append((parameter, end))
            end += aligned(parameter.numel(), ALIGNMENT)
        self._add(members, aligned(end, ALIGNMENT * axis.size), axis)

    def _add(self, members: list[tuple[nn.Parameter, int]], size: int, axis: Axis) -> None:
        """Add a bucket of parameters, with where they begin in it."""
        for parameter, start in members:
            self.place[parameter] = len(self.sizes), start
        self.members.append(members)
        self.sizes.append(size)
        self.axes.append(axis)

    def __deepcopy__(self, memo) -> None:
        return None  # a copied model makes its own

    def are_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether these are the parameters that it was made for."""
        return {id(parameter) for parameter in self.place} == {
            id(parameter) for parameter in parameters
        }

    def give_way_to(self, others: "GradientBuckets") -> None:
        """End, because the set of trained parameters has changed; pass the state of the gradients
        on."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.place.keys() - others.place.keys():
            parameter.grad = None
        others.zero, others.per_microbatch = self.zero, self.per_microbatch
        others.fault, others.shared_out = self.fault, self.shared_out
        _alive.discard(self)

    def start(
        self, backwards: int, deferred: Container[nn.Parameter] = (), often: bool = False
    ) -> None:
        """Free the gradients and expect `backwards` contributions to each before it is reduced over
        the replicas.

        deferred: parameters whose contributions are reported by `received` instead of autograd.
        often: whether buckets may leave in each backward, which `end_backward` ends.
        """
        for parameter in self.place:
            parameter.grad = None
        self.shards.clear()
        self.leaving.clear()  # of a batch that has failed
        self.deferred, self.counting, self.fault = deferred, True, UNFINISHED
        self.rounds = backwards if often and self.zero > 1 and self.per_microbatch else 1
        self._start_round(backwards // self.rounds)

    def _start_round(self, backwards: int) -> None:
        """Expect `backwards` contributions to each gradient before its bucket leaves."""
        self.missing = [len(members) * backwards for members in self.members[: self.early]]
        self.launched = 0

    def end_backward(self) -> None:
        """End the backward of a micro-batch. If buckets leave in each, those that have not left do
        now, so that all replicas reduce the same ones."""
        if self.rounds > 1:
            self.fill_missing(self.early)
            self._launch(self.early)
            self.rounds -= 1
            self._start_round(1)

    def stop(self) -> None:
        """Stop expecting backwards of the batch."""
        self.missing, self.counting, self.launched = [], False, 0

    def forget(self) -> None:
        """Note that all gradients were zeroed or freed."""
        if not self.counting:
            self.shards.clear()
            self.fault, self.shared_out = None, False

    def nbytes(self, often: bool = False) -> int:
        """Count the bytes of all gradients in the last backward of a step; often: if buckets leave
        in each backward."""
        counts = (
            size // (axis.size if often and index < self.early else 1)
            if axis.size > 1
            else sum(parameter.numel() for parameter, _ in members)
            for index, (size, axis, members) in enumerate(
                zip(self.sizes, self.axes, self.members, strict=True)
            )
        )
        return sum(counts) * torch.float32.itemsize

    def leaving_bytes(self, often: bool) -> int:
        """Count the bytes that the reduction of buckets takes during a backward, in addition to
        the gradients that stay; often: if buckets leave in each backward."""
        copies = int(self.sharded and self.ctx.device.type != "cuda")  # gloo copies what it sends
        shared = [
            size
            for size, axis in zip(self.sizes[: self.early], self.axes, strict=False)
            if axis.size > 1
        ]
        if often:  # a bucket is on its way while the gradients of the next one are computed
            together = [
                max(2 * size, (1 + copies) * size + following)
                for size, following in zip(shared, [*shared[1:], 0], strict=False)
            ]
        else:
            together = [copies * size for size in shared]
        return max(together, default=0) * torch.float32.itemsize

    def fill_missing(self, stop: int | None = None) -> None:
        """Set missing gradients to zeros, before `wait_for_sums`; in the buckets before `stop` that
        have not left."""
        for parameter, _ in chain.from_iterable(self.members[self.launched : stop]):
            if parameter.grad is None:
                parameter.grad = torch.zeros(
                    parameter.shape, dtype=torch.float32, device=parameter.device
                )

    def wait_for_sums(self, loss_scale: float = 1.0) -> None:
        """Reduce the remaining buckets, wait for all sums, and divide by the loss scale. Parameters
        without a gradient delay their bucket."""
        self._launch(len(self.members))
        self.stop()
        self.fault, self.shared_out = None, self.sharded
        while self.leaving:
            self._arrive()
        if loss_scale != 1.0:
            gradients = (parameter.grad for parameter in self.place)
            found = [grad for grad in gradients if grad is not None]
            scale_each([*found, *self.shards.values()], 1 / loss_scale)

    def received(self, parameter: nn.Parameter) -> None:
        """Note that a backward has added to the parameter's gradient."""
        if not self.counting:
            self.fault = self.fault or (MIXED if self.shared_out else UNSUMMED)
        index, _ = self.place[parameter]
        if self.missing and index < self.early:
            self.missing[index] -= 1
            if self.missing[index] < 0 < self.axes[index].size - 1:
                raise UserError(USED_AGAIN)
            if not self.missing[index]:
                self._launch(
                    next((i for i, missing in enumerate(self.missing) if missing), self.early)
                )

    def average(self) -> None:
        """Sum every gradient over dp and cp, and divide it by dp; parameters that have none count
        as zero."""
        self.fill_missing()
        for index, axis in enumerate(self.axes if self.ctx.token_axis.size > 1 else ()):
            bucket = self._filled(index)
            all_reduce(bucket, axis.group)
            bucket /= self.ctx.dp_size  # a mean over the replicas
        self.fault = None

    def check(self) -> None:
        """Raise UserError if a step would use incomplete gradients."""
        if self.fault:
            raise UserError(self.fault)

    def axis_of(self, parameter: nn.Parameter) -> Axis:
        """Return the axis of a parameter's replicas."""
        return self.axes[self.place[parameter][0]]

    def range_of(self, parameter: nn.Parameter, rank: int) -> tuple[int, int]:
        """Return the range (first, last + 1) of a parameter's elements in a replica's shard of its
        bucket. rank: of the replica, along the parameter's axis."""
        index, start = self.place[parameter]
        share = self.sizes[index] // self.axes[index].size
        return range_within(share, rank, start, parameter.numel())

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has a gradient, or this replica's shard of one."""
        return parameter.grad is not None or self.place[parameter][0] in self.shards

    def own(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this replica's elements of a parameter's gradient, which it `has`: those of
        `range_of`, or all without shards, flat."""
        index, start = self.place[parameter]
        first, last = self.range_of(parameter, self.axes[index].rank)
        if (shard := self.shards.get(index)) is not None:
            begin = len(shard) * self.axes[index].rank - start
            return shard[first - begin : last - begin] if first < last else shard[:0]
        assert parameter.grad is not None
        flat = parameter.grad.view(-1)
        return flat[first:last] if self.sharded else flat

    @torch.no_grad()
    def gather(self) -> None:
        """Send every replica the parameter elements that the others have updated, except those of
        parameters that rest as ranges.

        On CUDA a bucket is sent while the previous one is copied to its parameters; on CPUs both
        would use the same cores. On return, all parameters are complete.
        """
        ahead = 1 if self.ctx.device.type == "cuda" else 0
        shared = [
            index
            for index, axis in enumerate(self.axes)
            if axis.size > 1 and index not in self.stored
        ]
        started = deque(map(self._start_gather, shared[:ahead]))
        for number, index in enumerate(shared):
            members = self.members[index]
            started.extend(map(self._start_gather, shared[number + ahead : number + ahead + 1]))
            come, arrival = started.popleft()
            if arrival:
                with spent("communication", "wait"):
                    arrival.wait()
            copy_each(
                [parameter.view(-1) for parameter, _ in members],
                [come[start : start + parameter.numel()] for parameter, start in members],
            )

    def _start_gather(self, index: int) -> tuple[torch.Tensor, dist.Work | None]:
        """Start the gather of a bucket of parameters; returns the bucket, and the work to wait
        for."""
        members, axis, mine = self.members[index], self.axes[index], []
        flat = torch.empty(self.sizes[index], dtype=members[0][0].dtype, device=self.ctx.device)
        for parameter, start in members:
            first, last = self.range_of(parameter, axis.rank)
            if first < last:
                mine.append((flat[start + first : start + last], parameter.view(-1)[first:last]))
        copy_each([place for place, _ in mine], [part for _, part in mine])
        return flat, all_gather_shards(flat, axis.group, async_op=True)

    def _launch(self, stop: int) -> None:
        """Start the sums of the buckets before `stop`, always in the same order on all replicas."""
        reduce = reduce_scatter_shards if self.sharded else all_reduce
        for index in range(self.launched, stop):
            axis = self.axes[index]
            if axis.size > 1:
                while self.leaving and self._waits:
                    self._arrive()
                bucket = self._filled(index)
                work = reduce(bucket, axis.group, async_op=True)
                self.leaving.append((index, bucket, work))
                if self.zero > 1:
                    for parameter, _ in self.members[index]:
                        parameter.grad = None
        self.launched = max(self.launched, stop)

    @property
    def _waits(self) -> bool:
        """Whether one bucket is on its way at a time: ZeRO-2 frees its memory, and gloo a copy."""
        if self.zero > 1:
            return True
        # A rank that gets no gradient reduces late. Replicas that wait for each other within a
        # backward, in context parallelism and among experts, would then wait forever.
        apart = self.ctx.cp_size == 1 and not self.ctx.folded
        return self.ctx.device.type == "cpu" and apart

    @torch.no_grad()
    def _arrive(self) -> None:
        """Wait for the sums of the bucket that left first. Under ZeRO-2, add this replica's shard
        to those of earlier backwards; the rest of the bucket is freed."""
        index, bucket, work = self.leaving.popleft()
        if work:
            with spent("communication", "wait"):
                work.wait()
        if self.zero > 1:
            shard = bucket.chunk(self.axes[index].size)[self.axes[index].rank]
            if index in self.shards:
                self.shards[index] += shard
            else:
                self.shards[index] = shard.clone()

    @torch.no_grad()
    def _filled(self, index: int) -> torch.Tensor:
        """Make a bucket of the gradients of its parameters, which are views of it from now on."""
        bucket = torch.empty(self.sizes[index], dtype=torch.float32, device=self.ctx.device)
        views = [
            bucket[start : start + parameter.numel()].view_as(parameter)
            for parameter, start in self.members[index]
        ]
        of_members = (parameter.grad for parameter, _ in self.members[index])
        gradients = [gradient for gradient in of_members if gradient is not None]
        if len(gradients) < len(views):  # another one came twice
            raise UserError(USED_AGAIN)
        copy_each(views, gradients)
        for (parameter, _), view in zip(self.members[index], views, strict=True):
            parameter.grad = view
        return bucket


def range_within(share: int, rank: int, start: int, count: int) -> tuple[int, int]:
    """Return which of `count` elements, from `start` of a tensor, are in a rank's share of it:
    first and last + 1. share: number of elements of each rank."""
    edges = share * rank - start, share * (rank + 1) - start
    first, last = (min(max(edge, 0), count) for edge in edges)
    return first, last


def aligned(count: int, to: int) -> int:
    """Round `count` up to a multiple of `to`."""
    return -(-count // to) * to


def _grouped(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Part the parameters, in their order, into groups of at most `limit` elements, or of one."""
    groups, room = [], 0
    for parameter in parameters:
        if not groups or parameter.numel() > room:
            groups.append([])
            room = limit
        groups[-1].append(parameter)
        room -= parameter.numel()
    return groups


def _grouped_by_axis(axis_of: dict[nn.Parameter, Axis], limit: int) -> list[list[nn.Parameter]]:
    """Part the parameters of each axis, in their order, as `_grouped` does; the groups stand in the
    order of the last parameter that each has, the same on all ranks of each axis."""
    of_axes: dict[Axis, list[nn.Parameter]] = {}
    for parameter, axis in axis_of.items():
        of_axes.setdefault(axis, []).append(parameter)
    order = {parameter: number for number, parameter in enumerate(axis_of)}
    groups = [group for each in of_axes.values() for group in _grouped(each, limit)]
    return sorted(groups, key=lambda group: order[group[-1]])


_alive: "weakref.WeakSet[GradientBuckets]" = weakref.WeakSet()
# Their steps mix parameters and gradients in a way that needs one dtype.
_ADAMS = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
)


def _before_step(optimizer: torch.optim.Optimizer, *_) -> None:
    """Raise UserError for a step of a torch optimizer that would use wrong or unsupported
    gradients."""
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for buckets in _alive:
        ours = parameters & buckets.place.keys()
        if not ours:
            continue
        if buckets.stored:
            raise UserError(
                "parameters rest as ranges over the replicas with zero 3: use megazoo.optim.AdamW "
                "or Muon, or build the model with another zero"
            )
        buckets.check()
        if buckets.shared_out:
            raise UserError(
                f"gradients are sharded over the replicas because of AdamW(zero={buckets.zero}): "
                "step that optimizer, or do not create it"
            )
        lower = next((p for p in ours if p.grad is not None and p.grad.dtype != p.dtype), None)
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if lower is not None and (fused or isinstance(optimizer, _ADAMS)):
            raise UserError(
                f"torch's {'fused ' * fused}{type(optimizer).__name__} can't step {lower.dtype} "
                "parameters with fp32 gradients: use megazoo.optim.AdamW(model), which also keeps "
                "fp32 master weights"
            )


@functools.cache
def _check_steps() -> None:
    """Check the gradients before each step of a torch optimizer, from the first buckets on."""
    register_optimizer_step_pre_hook(_before_step)
