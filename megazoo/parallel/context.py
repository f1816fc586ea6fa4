"""The mesh of all ranks, the place of a rank in it, and the process groups along its axes."""

import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import chain
from typing import Literal

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
from megazoo.parallel.layout import AXES, ONE_RANK, CPMethod, Layout, schedule_placed
from megazoo.parallel.placement import Placement
from megazoo.parallel.sizes import (
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

DEFAULT_TIMEOUT = timedelta(minutes=10)
NO_RANKS = "a virtual context has no other ranks: it can build a model, but not run it"


@dataclass(frozen=True, eq=False)
class ParallelContext(ShortNames):
    """Describe the place of one rank in the mesh of all ranks, and its process groups.

    Create it with `from_torch`, and pass it to models and layers: as an argument `ctx=`, or with a
    block `with ctx:` around their construction. They keep it. The default context has one rank and
    no process group. A virtual context has sizes and ranks, but only VirtualGroups. It can build
    any rank of any world, and run it on the meta device, without values.

    Ranks are ordered with tp fastest, then cp, dp and pp, as in Megatron-LM.

    Attributes:
        tp, pp, cp, dp: the axes of the mesh. For each, e.g. tp: ctx.tp.size is the number of ranks
            along it, ctx.tp.rank this rank's index, ctx.tp.group their process group. Short names:
            tp_size, tp_rank, tp_group.
        token_axis: dp and cp as one axis: the ranks with different tokens and the same parameters.
        rank: this rank's index in the world.
        world_size: number of ranks.
        device: device of this rank.
        sequence_parallel: whether sequence parallelism is on.

    Example:
        ctx = ParallelContext.from_torch(tensor_parallel_size=2)  # torchrun --nproc-per-node 4 ...
        model = megazoo.from_config("gpt2-tiny", ctx)  # tp 2, dp 2
    """

    layout: Layout = ONE_RANK
    rank: int = 0  # in the world
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = field(default=None, repr=False)
    # group of the ranks along dp and cp, if both are above 1
    joint_group: dist.ProcessGroup | None = field(default=None, repr=False)
    # groups along each of the folded axes, and of its replicas
    folded_groups: tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...] = field(
        default=(), repr=False
    )
    name: str = field(default="", repr=False)  # unique, the same on all ranks
    calls: dict[str, int] = field(
        default_factory=dict, repr=False
    )  # counts of collective calls: see failure.py
    timeout: timedelta = field(
        default=DEFAULT_TIMEOUT, repr=False
    )  # limit of every wait on every group
    tp: Axis = field(init=False, repr=False)
    pp: Axis = field(init=False, repr=False)
    cp: Axis = field(init=False, repr=False)
    dp: Axis = field(init=False, repr=False)
    # The ranks with different tokens and the same parameters: dp and cp as one axis. The loss, the
    # number of labels and the gradients are summed over it. ZeRO-1 shards the optimizer over it.
    # Each of its ranks draws different dropout masks.
    token_axis: Axis = field(init=False, repr=False)
    # The axes folded into the token axis, by their names: parameters may be sharded over them.
    folded: dict[str, FoldedAxis] = field(init=False, repr=False)

    def __post_init__(self):
        layout = self.layout
        if not 0 <= self.rank < layout.ranks:
            sizes = product_of(layout.tp, layout.pp, layout.dp, layout.cp)
            raise UserError(f"rank {self.rank} is not in a world of {sizes} = {layout.ranks} ranks")
        object.__setattr__(self, "layout", layout.settled(self.device.type))  # it is frozen
        place = self.place_of(self.rank)
        axes = {
            name: Axis(size, place[name], self._group_along(name, size, place[name]))
            for name, size in zip(AXES, layout.sizes, strict=True)
        }
        axes["token_axis"] = joined(axes["dp"], axes["cp"], self.joint_group)
        for name, axis in axes.items():
            object.__setattr__(self, name, axis)
        folded = folded_into(self.token_axis, layout.folded_sizes, self.folded_groups)
        object.__setattr__(self, "folded", folded)

    @classmethod
    def from_torch(
        cls,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        *,
        context_parallel_size: int = 1,
        context_parallel_method: CPMethod = "allgather",
        sequence_parallel: bool | None = False,
        virtual_pipeline_size: int = 1,
        schedule: str | None = None,
        placement: str | None = None,
        stage_layers: str | Sequence[int] = "balanced",
        folded: Mapping[str, int] | None = None,
        zero: Literal[0, 1, 2, 3] = 0,
        zero_gather: Literal["microbatch", "step"] = "microbatch",
        device: str | torch.device = "auto",
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> "ParallelContext":
        """Return the context of this rank, from the environment of torchrun or an initialised
        torch.distributed.

        In a single process (no launcher) with all sizes 1, torch.distributed is not initialised. If
        this function initialises it, it is closed at the end of the process, where the ranks wait
        for each other for a few seconds.

        Args:
            tensor_parallel_size: number of ranks (tp) that split each layer.
            pipeline_parallel_size: number of ranks (pp) that split the layers into stages.
            data_parallel_size: number of replicas (dp); default: world size / (tp x pp x cp).
            context_parallel_size: number of ranks (cp) that split each sequence.
            context_parallel_method: "allgather" gathers the keys and values of all cp ranks;
                "ulysses" (Jacobs et al. 2023) exchanges heads, so that each rank attends over the
                full sequence.
            sequence_parallel: whether to split activations along the sequence between
                tensor-parallel regions (Korthikanti et al. 2022). Norms, dropouts and residuals
                then need 1 / tp of the memory, and backward gathers the inputs of column-parallel
                layers again. None: on CUDA only.
            virtual_pipeline_size: number of stages per rank; above 1, 1f1b is the interleaved
                schedule.
            schedule: pipeline schedule of train_batch, unless it gets another one; default: "1f1b",
                or "zb-v" with placement "v". It determines which rank has which stage.
            placement: which rank has which stage, if `schedule` is not given: "loop", round-robin;
                or "v", for schedules that require it (see megazoo/parallel/placement.py).
            stage_layers: how layers are divided into stages: "balanced" by cost, including
                embedding and head; "uniform" by number of layers; or the number of layers of each
                stage.
            folded: names and sizes of axes that are folded into dp x cp, e.g. {"ep": 2}, for
                parameters that are sharded over them: ctx.axis("ep"). Each size must divide dp x
                cp.
            zero: stage of ZeRO of the models and, by default, of their optimizers: what is sharded
                over the replicas. 1: the state of the optimizer; 2: also gradients; 3: also
                parameters.
            zero_gather: how often ZeRO-2 and 3 reduce gradients and gather parameters.
            device: "cpu", "cuda", or "auto": CUDA if this machine has a device for each of its
                ranks.
            timeout: limit of every wait on every group.

        Raises:
            UserError: A size is not an integer above 0, or the sizes do not multiply to the world
                size.

        Example:
            # torchrun --nproc-per-node 8 train.py: tp 2, pp 2, dp 2
            ctx = ParallelContext.from_torch(tensor_parallel_size=2, pipeline_parallel_size=2)
        """
        tp, pp, cp = tensor_parallel_size, pipeline_parallel_size, context_parallel_size
        check_sizes(tp, pp, cp, virtual_pipeline_size, data_parallel_size)
        world, _ = world_and_rank()
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=data_parallel_size_for(world, tp, pp, data_parallel_size, cp),
            cp=cp,
            cp_method=context_parallel_method,
            sequence_parallel=sequence_parallel,
            virtual_pp=virtual_pipeline_size,
            schedule=schedule_placed(placement, schedule),
            stage_layers=stage_layers if isinstance(stage_layers, str) else tuple(stage_layers),
            folded=tuple((folded or {}).items()),
            zero=zero,
            zero_gather=zero_gather,
        )
        return cls.of_layout(layout, device, timeout)

    @classmethod
    def of_layout(
        cls,
        layout: Layout,
        device: str | torch.device = "auto",
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> "ParallelContext":
        """Return the context of this rank in a layout of all ranks, as `from_torch` does."""
        check_timeout(timeout)
        world, rank = world_and_rank()
        data_parallel_size_for(world, layout.tp, layout.pp, layout.dp, layout.cp)
        device = choose_device(device)
        return cls(layout.settled(device.type), rank)._started(device, timeout)

    def _started(self, device: torch.device, timeout: timedelta) -> "ParallelContext":
        """Return this context on a device; start torch.distributed if needed, and close it at the
        end of the process."""
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
        """Return this context on a device, with its process groups. Every rank calls it."""
        ranks = torch.arange(self.world_size).view(self.layout.sizes)
        groups, joint = groups_of(ranks, device, timeout), None
        if self.dp_size > 1 and self.cp_size > 1:
            dim = AXES.index("dp")
            joint = group_along(dim, ranks.flatten(dim, dim + 1), device, timeout)
        flat = ranks.view(self.pp_size, self.token_axis.size, self.tp_size)
        folded = tuple(
            groups_of_folded(flat, size, device, timeout) for _, size in self.layout.folded_sizes
        )
        if device.type == "cuda":
            others = [*([joint] if joint else []), *chain.from_iterable(folded)]
            warm_up([*groups, *others], groups[AXES.index("pp")], device)
        mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=AXES)
        name = agree_on_name(device)
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
        cp_method: CPMethod = "allgather",
        rank: int = 0,
        sequence_parallel: bool | None = False,
        virtual: int = 1,
        placement: str = "loop",
        stage_layers: str | Sequence[int] = "balanced",
        folded: Mapping[str, int] | None = None,
    ) -> "ParallelContext":
        """Return the context of one rank of a world that need not exist, without starting
        processes.

        Args:
            tp: tensor-parallel size.
            pp: pipeline-parallel size.
            dp: data-parallel size.
            cp: context-parallel size.
            cp_method: the context_parallel_method of `from_torch`.
            rank: the rank.
            sequence_parallel: as in `from_torch`.
            virtual: number of stages per rank.
            placement: as in `from_torch`.
            stage_layers: as in `from_torch`.
            folded: as in `from_torch`.

        Raises:
            UserError: The world has no such rank, or stages or axes are invalid.

        Example:
            ctx = ParallelContext.virtual(tp=2, rank=1)
            ColumnParallelLinear(8, 6, ctx=ctx).weight.shape  # [3, 8]
        """
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            cp_method=cp_method,
            sequence_parallel=bool(sequence_parallel),
            virtual_pp=virtual,
            schedule=schedule_placed(placement),
            stage_layers=stage_layers if isinstance(stage_layers, str) else tuple(stage_layers),
            folded=tuple((folded or {}).items()),
        )
        return cls(layout, rank)

    def axis(self, name: str) -> Axis:
        """Return the axis with this name: one of AXES, token_axis, or a folded one."""
        return self.folded[name] if name in self.folded else getattr(self, name)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, in the order of AXES. A reduction over all of them is over the world."""
        return tuple(getattr(self, name) for name in AXES)

    @cached_property
    def cp_as_dp(self) -> "ParallelContext":
        """The same ranks, with cp as part of dp, so that each rank has full sequences: for
        generation, where sequences grow token by token."""
        if self.cp_size == 1:
            return self
        layout, mesh = replace(self.layout, dp=self.token_axis.size, cp=1), None
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
                mesh=self.mesh.mesh.view(layout.sizes),
                mesh_dim_names=AXES,
            )
        return replace(self, layout=layout, mesh=mesh, joint_group=None)

    def new_cpu_group(self, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """Create a group of all ranks for CPU tensors, for use in a separate thread; every rank
        calls it. None for one rank. timeout: default: that of the context."""
        if self.world_size == 1:
            return None
        group = dist.new_group(backend="gloo", timeout=timeout or self.timeout)
        assert isinstance(group, dist.ProcessGroup)  # this rank is in it
        return group

    def require_ranks(self) -> None:
        """Raise UserError in a virtual context, where a model would give wrong numbers without the
        other ranks."""
        if self.world_size > 1 and self.mesh is None:
            raise UserError(NO_RANKS)

    @property
    def placement(self) -> Placement:
        """Which rank of the pipeline has which stage."""
        return self.layout.placement

    @property
    def sequence_parallel(self) -> bool:
        """Whether each tp rank has its part of the sequence between tensor-parallel regions."""
        return bool(self.layout.sequence_parallel)

    @property
    def stage_count(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.placement.count

    @property
    def virtual_size(self) -> int:
        """The number of stages per rank."""
        return self.placement.virtual

    @property
    def world_size(self) -> int:
        return self.layout.ranks

    @property
    def place(self) -> dict[str, tuple[int, int]]:
        """The (size, rank) of this rank along each axis over which parameters may be sharded."""
        axes = {"tp": self.tp, **self.folded}
        return {name: (axis.size, axis.rank) for name, axis in axes.items()}

    def rank_at(self, **ranks: int) -> int:
        """Return the world rank with the given ranks along the named axes, e.g. rank_at(pp=3), and
        this rank's along the others."""
        here = 0
        for name, axis in zip(AXES, self.axes, strict=True):
            here = here * axis.size + ranks.get(name, axis.rank)
        return here

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the rank of a world rank along each axis."""
        place = {}
        for name, size in zip(reversed(AXES), reversed(self.layout.sizes), strict=True):
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
                "a model and its context can't be pickled on several ranks: save the model with "
                "model.save_parallelized(DIRECTORY), a run with megazoo.checkpoint.save, or the "
                "tensors of model.state_dict()"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo) -> "ParallelContext":
        return self  # process groups can't be copied: a copied model uses the same


_ambient: ContextVar[tuple[ParallelContext, ...]] = ContextVar(
    "parallel context", default=(ParallelContext(),)
)


def current_context() -> ParallelContext:
    """Return the context of the innermost `with ctx:` block, or the default one with one rank."""
    return _ambient.get()[-1]
