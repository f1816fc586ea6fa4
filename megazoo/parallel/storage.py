"""Parameters that rest as ranges over the replicas, and are gathered for each use (ZeRO-3)."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from megazoo.errors import UserError
from megazoo.parallel.axes import Axis
from megazoo.parallel.buckets import ALIGNMENT, aligned, range_within
from megazoo.parallel.collectives import all_gather_shards, gather_ranges
from megazoo.parallel.module import NamedParameter, ShardedModule
from megazoo.parallel.timing import spent

KEPT = 2  # units that are gathered at the same time


class Flat:
    """Parameters of one dtype and with the same replicas, one after the other in one tensor.

    At rest, this replica has only its range of the tensor, 1 / replicas of it.

    Attributes:
        members: the parameters, with the place of the first element of each.
        size: number of elements, with padding.
        axis: the axis of the replicas.
        late: whether gradients are complete only after the last backward: see `GradientBuckets`.
        own: this replica's range, [size / replicas].
    """

    def __init__(self, parameters: list[nn.Parameter], axis: Axis, late: bool):
        self.members, self.axis, self.late, end = [], axis, late, 0
        for parameter in parameters:
            self.members.append((parameter, end))
            end += aligned(parameter.numel(), ALIGNMENT)
        self.size = aligned(end, ALIGNMENT * axis.size)
        first = parameters[0]
        self.own = torch.zeros(self.size // axis.size, dtype=first.dtype, device=first.device)
        self._whole = torch.empty(self.size, dtype=first.dtype, device=first.device)
        self._views = [
            self._whole[start : start + parameter.numel()].view(parameter.shape)
            for parameter, start in self.members
        ]
        self._versions: list[int] = []  # when the parameters were gathered or stored
        self._arrival: dist.Work | None = None  # of a gather that has started
        self._nan = torch.full((), torch.nan, dtype=first.dtype, device=first.device)
        self.free()

    def free(self) -> None:
        """Free the memory of the parameters. Who reads them nevertheless gets NaN. UserError if
        they were written, and not stored."""
        if self._versions not in ([], self._current()):
            raise UserError(
                "parameters were written, which is lost with zero 3: write them within `for entry "
                "in megazoo.parallel.storage.in_memory(model, model.entries(), write=True)`"
            )
        self._wait()
        self._versions = []
        for parameter, _ in self.members:
            parameter.data = self._nan.expand(parameter.shape)
        self._whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def start(self) -> None:
        """Start to gather the ranges of all replicas."""
        # Autograd may hold views of this memory, so it is the same each time.
        self._whole.untyped_storage().resize_(self._whole.nbytes)
        self._mine().copy_(self.own)
        self._arrival = all_gather_shards(self._whole, self.axis.group, async_op=True)

    def finish(self) -> None:
        """Wait for what `start` started, and fill the parameters."""
        self._wait()
        for (parameter, _), view in zip(self.members, self._views, strict=True):
            parameter.data = view
        self._versions = self._current()

    def _wait(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival:
            with spent("communication", "wait"):
                arrival.wait()

    @torch.no_grad()
    def store(self) -> None:
        """Store this replica's range of the parameters, which were written."""
        self.own.copy_(self._mine())
        self._versions = self._current()

    def _current(self) -> list[int]:
        """Return the number of writes to each parameter."""
        return [parameter._version for parameter, _ in self.members]

    def _mine(self) -> torch.Tensor:
        return self._whole.chunk(self.axis.size)[self.axis.rank]

    def range_of(self, number: int, rank: int) -> tuple[int, int]:
        """Return which elements of a member a replica has: first and last + 1."""
        parameter, start = self.members[number]
        return range_within(len(self.own), rank, start, parameter.numel())


class ShardedParameters:
    """Keeps the parameters of a model as ranges over the replicas.

    A unit is a layer, the embedding, the norm or the head. Its parameters are gathered when the
    first of them is used, in forward or in backward; then units that were used least recently are
    freed, so that at most `kept` are in memory. One of them is the next unit, whose gather runs
    under the products of this one: the unit that followed the last time that the same two were
    used. Parameters keep their shapes and identities. All replicas use the units in the same order.

    Parameters of plain modules, states, and those without other replicas, stay in memory.

    Args:
        entries: the parameters.
        unit_of: returns the unit of a parameter, by its name.
        late: the parameters whose gradients are reduced last: see `GradientBuckets`.
        kept: number of units in memory; None: all that were used, until `release`.

    Attributes:
        flats: the tensors of each unit.
        place: the unit of each parameter, its tensor, and its number there.
        pinned: whether no unit is freed.
    """

    def __init__(
        self,
        entries: Sequence[NamedParameter],
        ctx,
        unit_of: Callable[[str], Hashable],
        late: set[nn.Parameter],
        kept: int | None = KEPT,
    ):
        self.kept, self.pinned = kept, False
        self.flats: dict[Hashable, list[Flat]] = {}
        self.place: dict[nn.Parameter, tuple[Hashable, Flat, int]] = {}
        # units in memory, in the order of their last uses; whether their parameters are filled
        self._there: dict[Hashable, bool] = {}
        self._last: tuple[Hashable, Hashable] = (None, None)  # units that were used
        self._next: dict[tuple[Hashable, Hashable], Hashable] = {}  # which unit followed two others
        # of each module that is running: the units that it has used, and the nodes of the graph
        # that made its inputs
        self._running: list[tuple[dict[Hashable, None], set[Node]]] = []
        groups: dict[tuple, list[nn.Parameter]] = {}
        for entry in entries:
            p, axis = entry.parameter, entry.spec.replicas(ctx)
            if entry.spec.plain or entry.spec.is_state or axis.size == 1:
                continue
            groups.setdefault((unit_of(entry.name), p.dtype, axis, p in late), []).append(p)
        for (unit, _, axis, is_late), parameters in groups.items():
            flat = Flat(parameters, axis, is_late)
            self.flats.setdefault(unit, []).append(flat)
            for number, parameter in enumerate(parameters):
                self.place[parameter] = unit, flat, number

    def use(self, module: ShardedModule, name: str) -> torch.Tensor | None:
        """Return a parameter for one use in forward, gathered."""
        parameter = getattr(module, name)
        if parameter in self.place:
            unit = self.place[parameter][0]
            for used, _ in self._running:
                used[unit] = None
            self.gather(unit)
        return parameter

    def gather(self, *units: Hashable) -> None:
        """Bring units into memory for a use, free those that were used least recently, and start to
        gather the unit that is expected next."""
        if self.pinned or not units:
            return
        for unit in units:
            if unit != self._last[1]:
                self._next[self._last] = unit
                self._last = self._last[1], unit
        expected = self._next.get(self._last, unit)
        needed = dict.fromkeys([expected, *units])
        if self.kept is not None:
            others = [unit for unit in self._there if unit not in needed]
            for unit in others[: max(0, len(others) + len(needed) - self.kept)]:
                self._free(unit)
        for unit in units:
            self.bring(unit)
        if expected not in self._there:
            self._start(expected)
        for unit in needed:
            self._there[unit] = self._there.pop(unit)

    def bring(self, unit: Hashable) -> None:
        """Bring a unit into memory."""
        if unit not in self._there:
            self._start(unit)
        if not self._there[unit]:
            for flat in self.flats[unit]:
                flat.finish()
            self._there[unit] = True

    def _start(self, unit: Hashable) -> None:
        """Start to gather a unit."""
        self._there[unit] = False
        for flat in self.flats[unit]:
            flat.start()

    def watch(self, module: nn.Module) -> None:
        """Gather what a module has used again, before its backward."""
        module.register_forward_pre_hook(lambda _module, inputs: self._begin(inputs))
        module.register_forward_hook(lambda _module, _inputs, output: self._end(output))

    def run(self, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return function(*arguments); what it uses is gathered again before its backward."""
        self._begin(arguments)
        output = function(*arguments)
        self._end(output)
        return output

    def _begin(self, inputs: tuple) -> None:
        """Note that a module, or a function, starts with these inputs. After an error, `release`
        forgets it."""
        self._running.append(({}, _grad_fns(inputs)))

    def _end(self, output: Any) -> None:
        """Let the backward of the module that has returned gather first what it used. An input that
        it returns is not a result of it."""
        units, inputs = self._running.pop()
        for node in _grad_fns(output) - inputs:
            node.register_prehook(lambda _: self.gather(*units))

    def every_flat(self) -> list[Flat]:
        """Return the tensors of all units, in the order of the forward."""
        return [flat for flats in self.flats.values() for flat in flats]

    def release(self) -> None:
        """Free all units: after their ranges have changed, and after a batch."""
        self._running.clear()
        for unit in list(self._there):
            self._free(unit)

    def leave(self, unit: Hashable | None, write: bool) -> None:
        """Store a unit whose parameters were written, and free it. None: no unit."""
        if unit is not None and write:
            for flat in self.flats[unit]:
                flat.store()
        if unit in self._there:
            self._free(unit)

    def _free(self, unit: Hashable) -> None:
        if not self.pinned:
            del self._there[unit]
            for flat in self.flats[unit]:
                flat.free()

    @contextmanager
    def all_in_memory(self) -> Iterator[None]:
        """Within this block, all parameters are in memory, and no replica waits for another."""
        self.pinned = True
        try:
            for unit in self.flats:
                self.bring(unit)
            yield
        finally:
            self.pinned = False
            self.release()

    def range_of(self, parameter: nn.Parameter, rank: int) -> tuple[int, int]:
        """Return which elements of a parameter a replica has: first and last + 1."""
        _, flat, number = self.place[parameter]
        return flat.range_of(number, rank)

    def own(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this replica's elements of a parameter, flat. Writes change the parameter."""
        _, flat, number = self.place[parameter]
        first, last = flat.range_of(number, flat.axis.rank)
        start = flat.members[number][1] - len(flat.own) * flat.axis.rank
        return flat.own[start + first : start + last] if first < last else flat.own[:0]

    def whole(self, parameter: nn.Parameter, writer: int) -> torch.Tensor:
        """Return all values of a parameter on the replica `writer`. All replicas call it."""
        _, flat, number = self.place[parameter]
        ranges = [flat.range_of(number, rank) for rank in range(flat.axis.size)]
        values = flat.own.new_empty(parameter.numel())
        values[slice(*ranges[flat.axis.rank])] = self.own(parameter)
        if flat.axis.group is not None:
            gather_ranges(values, ranges, writer, flat.axis.group)
        return values.view(parameter.shape)


def _grad_fns(tree: Any) -> set[Node]:
    """Return the nodes of the graph that made the tensors of a tree."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def storage_of(model: Any) -> ShardedParameters | None:
    """Return what keeps the parameters of a model as ranges; None if they are always in memory."""
    return getattr(model, "_storage", None)


def in_memory(
    model: Any, entries: Iterable[NamedParameter], write: bool = False
) -> Iterator[NamedParameter]:
    """Yield parameters of a model, each while its values are in memory. All replicas call it.

    write: whether the values are changed.
    """
    storage, unit = storage_of(model), None
    if storage is None:
        yield from entries
        return
    try:
        for entry in entries:
            found = storage.place.get(entry.parameter)
            if found and found[0] != unit:
                storage.leave(unit, write)
                unit = found[0]
                storage.bring(unit)
            yield entry
    finally:
        storage.leave(unit, write)
