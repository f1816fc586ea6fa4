"""Where a rank stands: the mesh of all ranks, and the process groups along its axes."""

import math
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megazoo.errors import UserError
from megazoo.parallel.axes import (
    Axis,
    FoldedAxis,
    ShortNames,
    folded_into,
    groups_of_folded,
    joined,
)
from megazoo.parallel.device import choose_device
from megazoo.parallel.ending import close_at_exit
from megazoo.parallel.groups import (
    VirtualGroup,
    allow_sockets,
    group_along,
    groups_of,
    solitary_group,
    warm_up,
)
from megazoo.parallel.placement import Placement
from megazoo.parallel.sizes import (
    check_folded,
    check_sizes,
    check_timeout,
    data_parallel_size_for,
    product_of,
)
from megazoo.parallel.startup import (
    agree_on_name,
    initialize,
    rendezvous_errors,
    take,
    world_and_rank,
)

# The axes of the mesh, slowest to fastest: tp ranks are neighbours, so that they share a node.
AXES = ("pp", "dp", "cp", "tp")
# How attention looks beyond the part of a sequence that a rank of the axis cp has: see
# megazoo/layers/context_parallel.py.
CP_METHODS = ("allgather", "ulysses")
DEFAULT_TIMEOUT = timedelta(minutes=10)
NO_RANKS = "a virtual context has no ranks to talk to: it can build a model, not run it"


@dataclass(frozen=True, eq=False)
class ParallelContext(ShortNames):
    """One rank's place in the mesh of all ranks, and the groups through which it talks.

    tp, pp, cp, dp: the axes of the mesh. ctx.tp.size is the number of ranks along one, ctx.tp.rank
    the place of this rank, ctx.tp.group their process group; tp_size, tp_rank and tp_group are
    short for these.

    A context is an explicit value: layers take the ambient one when they are built (`with ctx:`)
    and keep it. The default is a world of one, which needs no process group. A virtual context has
    sizes and ranks but only VirtualGroups: enough to build any rank of any world, and to run it on
    the meta device, without values.
    """

    sizes: tuple[int, ...] = (1,) * len(AXES)  # along each of AXES
    rank: int = 0  # in the world
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = field(default=None, repr=False)
    # of the ranks along dp and cp together, where both are above 1
    joint_group: dist.ProcessGroup | None = field(default=None, repr=False)
    folded_sizes: tuple[tuple[str, int], ...] = ()  # names and sizes of the axes in `folded`
    # along each of these axes, and of its replicas
    folded_groups: tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...] = field(
        default=(), repr=False
    )
    # between tensor-parallel regions each tp rank has its part of the sequence
    sequence_parallel: bool = False
    cp_method: str = "allgather"  # one of CP_METHODS
    # which rank of the pipeline has which stage
    placement: Placement = field(default_factory=Placement)
    stage_layers: str | tuple[int, ...] = "balanced"  # or "uniform", or the layers of each stage
    name: str = field(default="", repr=False)  # the same on all ranks, and of no other context
    calls: dict[str, int] = field(default_factory=dict, repr=False)  # made together: see failure.py
    timeout: timedelta = field(default=DEFAULT_TIMEOUT, repr=False)  # of every wait on every group
    tp: Axis = field(init=False, repr=False)
    pp: Axis = field(init=False, repr=False)
    cp: Axis = field(init=False, repr=False)
    dp: Axis = field(init=False, repr=False)
    # The ranks that have different tokens and the same parameters: dp and cp as one axis. The loss,
    # the count of its labels and the gradients are summed over it, ZeRO-1 shards the optimizer over
    # it, and each of its ranks draws its own dropout masks.
    token_axis: Axis = field(init=False, repr=False)
    # The axes that are folded into the token axis, by name: parameters may be cut over them.
    folded: dict[str, FoldedAxis] = field(init=False, repr=False)

    def __post_init__(self):
        place = self.place_of(self.rank)
        axes = {
            name: Axis(size, place[name], self._group_along(name, size, place[name]))
            for name, size in zip(AXES, self.sizes, strict=True)
        }
        axes["token_axis"] = joined(axes["dp"], axes["cp"], self.joint_group)
        for name, axis in axes.items():
            object.__setattr__(self, name, axis)  # of a frozen dataclass
        folded = folded_into(self.token_axis, self.folded_sizes, self.folded_groups)
        object.__setattr__(self, "folded", folded)
        if self.tp.size == 1:
            object.__setattr__(self, "sequence_parallel", False)

    @classmethod
    def from_torch(
        cls,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        *,
        context_parallel_size: int = 1,
        context_parallel_method: str = "allgather",
        sequence_parallel: bool | None = False,
        virtual_pipeline_size: int = 1,
        placement: str = "loop",
        stage_layers: str | Sequence[int] = "balanced",
        folded: Mapping[str, int] | None = None,
        device: str | torch.device = "auto",
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> "ParallelContext":
        """Return the context of this rank, from torchrun's environment or an initialised
        torch.distributed.

        data_parallel_size follows from the world when it is None. device: "cpu", "cuda" or "auto"
        (the default), which is CUDA where this machine has a device for each of its ranks. timeout
        bounds every wait on every group.
        context_parallel_size: ranks that share each sequence. context_parallel_method: "allgather"
        gives each the keys and values of all, "ulysses" (Jacobs et al. 2023) some heads of the
        whole sequence.
        sequence_parallel: between tensor-parallel regions cut the activations along the sequence
        (Korthikanti et al. 2022): norms, dropouts and residuals then take 1 / tp of the memory;
        in return backward gathers once more what a column-parallel layer takes. None: on CUDA.
        virtual_pipeline_size: stages of a rank; above 1, 1f1b is the interleaved schedule.
        placement: which rank has which stage: "loop", in turn; or "v", for schedules that name it
        (see megazoo/parallel/placement.py).
        stage_layers: where the stages are cut: "balanced" by cost, the embedding's and the head's
        included; "uniform" by layers; or the number of layers of each.
        folded: names and sizes of axes that are folded into dp x cp, {"ep": 2}, for parameters that
        are cut over them: ctx.axis("ep"). The size divides dp x cp.
        In a plain process (no launcher) with all sizes 1, nothing is initialised. What is
        initialised here ends with the process, for which its ranks wait for each other a moment.
        UserError if a size is no whole number above 0, or the sizes don't multiply to the world.
        """
        check_timeout(timeout)
        tp, pp, cp = tensor_parallel_size, pipeline_parallel_size, context_parallel_size
        check_sizes(tp, pp, cp, virtual_pipeline_size, data_parallel_size)
        world, rank = world_and_rank()
        dp = data_parallel_size_for(world, tp, pp, data_parallel_size, cp)
        here = cls.virtual(
            tp,
            pp,
            dp,
            cp=cp,
            cp_method=context_parallel_method,
            rank=rank,
            sequence_parallel=sequence_parallel,
            virtual=virtual_pipeline_size,
            placement=placement,
            stage_layers=stage_layers,
            folded=folded,
        )
        device = choose_device(device)
        if sequence_parallel is None:
            here = replace(here, sequence_parallel=device.type == "cuda")
        return here._started(device, timeout)

    def _started(self, device: torch.device, timeout: timedelta) -> "ParallelContext":
        """Return this context on a device, with torch.distributed started where it is not, and
        closed at the end of the process."""
        take(device)
        allow_sockets(self.world_size)
        if initialized := not dist.is_initialized():
            if "WORLD_SIZE" not in os.environ:
                return replace(self, device=device)
            with rendezvous_errors():
                initialize(device, self.world_size, timeout)
        context = self._connected(device, timeout)
        groups = [context.joint_group, *(axis.group for axis in context.axes)]
        groups += chain.from_iterable(context.folded_groups)
        close_at_exit(context.name, initialized, [group for group in groups if group])
        return context

    def _connected(self, device: torch.device, timeout: timedelta) -> "ParallelContext":
        """Return this context on a device, with the groups through which its ranks talk. Every rank
        calls it."""
        ranks = torch.arange(self.world_size).view(self.sizes)
        groups, joint = groups_of(ranks, device, timeout), None
        if self.dp_size > 1 and self.cp_size > 1:
            dim = AXES.index("dp")
            joint = group_along(dim, ranks.flatten(dim, dim + 1), device, timeout)
        flat = ranks.view(self.pp_size, self.token_axis.size, self.tp_size)
        folded = tuple(
            groups_of_folded(flat, size, device, timeout) for _, size in self.folded_sizes
        )
        if device.type == "cuda":
            others = [*([joint] if joint else []), *chain.from_iterable(folded)]
            warm_up([*groups, *others], groups[AXES.index("pp")], device)
        mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=AXES)
        name = agree_on_name(self.rank, device)
        return replace(
            self,
            device=device,
            mesh=mesh,
            joint_group=joint,
            folded_groups=folded,
            name=name,
            timeout=timeout,
        )

    @classmethod
    def virtual(
        cls,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        *,
        cp: int = 1,
        cp_method: str = "allgather",
        rank: int = 0,
        sequence_parallel: bool | None = False,
        virtual: int = 1,
        placement: str = "loop",
        stage_layers: str | Sequence[int] = "balanced",
        folded: Mapping[str, int] | None = None,
    ) -> "ParallelContext":
        """Return the context of rank `rank` of a world that need not exist.

        virtual: the stages of a rank. placement: which rank has which: "loop" or "v". folded: as in
        `from_torch`. UserError if the world has no such rank, or can't have such stages or axes.
        """
        size = {"tp": tp, "pp": pp, "dp": dp, "cp": cp}
        sizes = tuple(size[axis] for axis in AXES)
        if not 0 <= rank < math.prod(sizes):
            world = f"{product_of(tp, pp, dp, cp)} = {math.prod(sizes)} ranks"
            raise UserError(f"rank {rank} is not in a world of {world}")
        if cp_method not in CP_METHODS:
            known = " and ".join(CP_METHODS)
            raise UserError(f"unknown cp-method {cp_method!r}: there are {known}")
        check_folded(folded or {}, dp, cp, (*AXES, "token_axis"))
        if virtual > 1 and pp == 1:
            raise UserError(f"virtual-pp {virtual} cuts the stages of a pipeline: use pp 2 or more")
        return cls(
            sizes,
            rank,
            sequence_parallel=bool(sequence_parallel),
            cp_method=cp_method,
            placement=Placement(placement, pp, virtual),
            stage_layers=stage_layers if isinstance(stage_layers, str) else tuple(stage_layers),
            folded_sizes=tuple((folded or {}).items()),
        )

    def axis(self, name: str) -> Axis:
        """Return the axis of that name, one of AXES or of those that are folded."""
        return self.folded[name] if name in self.folded else getattr(self, name)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, in the order of AXES: what is reduced over each of them is over the world."""
        return tuple(getattr(self, name) for name in AXES)

    @cached_property
    def cp_as_dp(self) -> "ParallelContext":
        """The same ranks with those along cp counted along dp, each with whole sequences of its
        own: for generation, whose sequences grow by a token at a time."""
        if self.cp_size == 1:
            return self
        size = dict(zip(AXES, self.sizes, strict=True)) | {"dp": self.token_axis.size, "cp": 1}
        sizes, mesh = tuple(size[name] for name in AXES), None
        if self.mesh is not None:
            groups = [axis.group for axis in self.axes if axis.size == 1]
            alone = groups[0] if groups else solitary_group(self.timeout)
            group_of = {
                "pp": self.pp_group,
                "dp": self.token_axis.group,
                "cp": alone,
                "tp": self.tp_group,
            }
            mesh = DeviceMesh.from_group(
                [group for name in AXES if (group := group_of[name])],
                self.device.type,
                mesh=self.mesh.mesh.view(sizes),
                mesh_dim_names=AXES,
            )
        return replace(self, sizes=sizes, mesh=mesh, joint_group=None)

    def new_cpu_group(self, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """Make a group of all ranks for CPU tensors, for a thread of its own; every rank calls it.
        None for one rank. timeout: the context's by default."""
        if self.world_size == 1:
            return None
        group = dist.new_group(backend="gloo", timeout=timeout or self.timeout)
        assert isinstance(group, dist.ProcessGroup)  # of which this rank is
        return group

    def require_ranks(self) -> None:
        """Raise UserError in a virtual context: without its other ranks a model would give wrong
        numbers."""
        if self.world_size > 1 and self.mesh is None:
            raise UserError(NO_RANKS)

    def require_no_folded(self, what: str) -> None:
        """Raise UserError if axes are folded into dp x cp: in `what`, replicas with such an axis
        between them would not run layers equally often."""
        if names := [name for name, axis in self.folded.items() if axis.size > 1]:
            raise UserError(
                f"{what} does not take axes that are folded into dp x cp, here {', '.join(names)}: "
                "save the model, and load it in a context without them"
            )

    @property
    def stage_count(self) -> int:
        """The stages of the whole pipeline."""
        return self.placement.count

    @property
    def virtual_size(self) -> int:
        """The stages of a rank."""
        return self.placement.virtual

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def place(self) -> dict[str, tuple[int, int]]:
        """Where this rank lies along the axes over which parameters may be cut: (size, rank)."""
        axes = {"tp": self.tp, **self.folded}
        return {name: (axis.size, axis.rank) for name, axis in axes.items()}

    def rank_at(self, **ranks: int) -> int:
        """Return the rank in the world of the one that has the given ranks along the axes named,
        rank_at(pp=3), and this rank's along all others."""
        here = 0
        for name, axis in zip(AXES, self.axes, strict=True):
            here = here * axis.size + ranks.get(name, axis.rank)
        return here

    def place_of(self, rank: int) -> dict[str, int]:
        """Return where a rank of the world lies along each axis."""
        place = {}
        for name, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, place[name] = divmod(rank, size)
        return place

    def _group_along(
        self, name: str, size: int, rank: int
    ) -> dist.ProcessGroup | VirtualGroup | None:
        if self.mesh is None:
            return VirtualGroup(size, rank) if size > 1 else None
        return self.mesh.get_group(name)

    def __enter__(self) -> "ParallelContext":
        _ambient.set((*_ambient.get(), self))
        return self

    def __exit__(self, *_) -> None:
        _ambient.set(_ambient.get()[:-1])

    def __reduce_ex__(self, protocol):
        if self.mesh is not None:
            raise UserError(
                "a model and its context can't be pickled on several ranks: save the model by "
                "model.save_parallelized(DIRECTORY), a run by megazoo.checkpoint.save, or the "
                "tensors of model.state_dict()"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo) -> "ParallelContext":
        return self  # process groups are places, not data: a copied model stays where it is


_ambient: ContextVar[tuple[ParallelContext, ...]] = ContextVar(
    "parallel context", default=(ParallelContext(),)
)


def current_context() -> ParallelContext:
    """Return the context of the innermost `with ctx:`, or the world of one."""
    return _ambient.get()[-1]
