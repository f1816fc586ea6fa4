"""The types of tensors on the axes of a layout, and how operators and collectives change them.

The terms are those of shard_map in JAX and of the package spmd_types:

    replicated   equal on all ranks of the axis
    varying      different on the ranks: a shard, or a part of the sequence
    partial      a part of a sum over the ranks; only over tp

The type of an operator's result depends on the types of its arguments. Collectives change types: a
sum makes a partial or varying tensor replicated.
"""

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from megazoo.parallel.context import ParallelContext
from megazoo.torch_internals import (
    TorchDispatchMode,
    results_are_new,
    storage_key,
    tensors_in,
)


class Type(Enum):
    """The type of a tensor on one axis."""

    REPLICATED = "replicated"
    VARYING = "varying"
    PARTIAL = "partial"
    # varying, and the parts that several ranks hold have been summed over these ranks
    COMPLETED = "completed"


R, V, P, C = Type
Types = dict[str, Type]  # by axis

ENTERS = "a tensor-parallel region gets a tensor that differs on the tp ranks: a sum is missing"
# Operators whose result has no values of their arguments.
NEW = ("empty", "new_empty", "zeros", "new_zeros", "ones", "new_ones", "full", "new_full", "rand")
# Operators that are linear in a first argument: with a part of a sum they give a part of the sum.
LINEAR = {
    "_reshape_copy",
    "_to_copy",
    "_unsafe_view",
    "clone",
    "constant_pad_nd",
    "copy",
    "cumsum",
    "embedding_dense_backward",
    "flip",
    "gather",
    "index",
    "index_add",
    "index_put",
    "index_select",
    "masked_fill",
    "mean",
    "native_dropout",
    "native_dropout_backward",
    "neg",
    "repeat",
    "roll",
    "scatter_add",
    "select_backward",
    "slice_backward",
    "split_with_sizes_copy",
    "sum",
    "unfold_backward",
}
ADDITIONS = {"add", "sub", "rsub"}
JOINS = {"cat", "stack"}
PRODUCTS = {"mm", "mv", "linear", "addmm", "addmv", "dot"}  # of matrices
OTHER_PRODUCTS = {"mul", "div", "bmm", "baddbmm", "matmul"}


def joined(old: Type | None, new: Type) -> Type:
    """Return the type of memory of which one part has the type `old`, and another `new`. None: the
    memory is empty."""
    if old in (None, new):
        return new
    both = {old, new}
    for other in (P, C):
        if both == {R, other}:
            return other
    return V


class TypeMode(TorchDispatchMode):
    """Give each tensor a type per axis, by the operators that run within `with mode:`.

    All tensors in one storage have the same type. Tensors without a known type are replicated.

    Args:
        ctx: the virtual context of the model.

    Attributes:
        axes: names of the axes with several ranks: tp, cp.
        findings: what is wrong, in the order of the computation.
        calls: the collectives over these axes, with the axis and the number of elements.
        modules: names of the modules that run, the innermost last.
        in_forward: whether the forward runs; backward otherwise.
    """

    def __init__(self, ctx: ParallelContext):
        super().__init__()
        axes = {"tp": ctx.tp, "cp": ctx.cp}
        self.ctx = ctx
        self.axes = {name: axis for name, axis in axes.items() if axis.size > 1}
        self.findings: list[str] = []
        self.calls: list[tuple] = []
        self.modules: list[str] = []
        self.in_forward = True
        # by storage key, with the storage, so that the key stays unique
        self._types: dict[int, tuple[torch.UntypedStorage, dict[str, Type | None]]] = {}
        self._names: dict[int, str] = {}  # of parameters
        self._sums: set[int] = set()  # storages of results of sums over tp
        self._found_in = ""  # the module of the last finding

    # Types of tensors.

    def type_of(self, tensor: torch.Tensor, axis: str) -> Type:
        """Return the type of a tensor on an axis."""
        known = self._types.get(storage_key(tensor.untyped_storage()))
        return (known[1].get(axis) if known else None) or R

    def set_type(self, tensor: torch.Tensor, **types: Type | None) -> None:
        """Set the types of a tensor's storage on some axes. None: it is empty."""
        storage = tensor.untyped_storage()
        known = self._types.setdefault(storage_key(storage), (storage, {}))[1]
        known.update({axis: kind for axis, kind in types.items() if axis in self.axes})

    def name(self, parameter: torch.Tensor, name: str) -> None:
        """Set the name of a parameter in findings."""
        self._names[storage_key(parameter.untyped_storage())] = name

    def find(self, text: str, module: str | None = None) -> None:
        """Add a finding. module: its name; by default that of the module that runs."""
        module = module or (self.modules[-1] if self.modules else "")
        if self._found_in.startswith(f"{module}."):
            return  # a consequence within the same module
        self._found_in = module
        where = f"module {module}: " if module else ""
        where += "" if self.in_forward else "in backward, "
        if where + text not in self.findings:
            self.findings.append(where + text)

    def expect(self, tensor: torch.Tensor, axis: str, text: str, module: str | None = None) -> None:
        """Add a finding if a tensor is not replicated over an axis. The tensor is then taken as
        replicated, so that each mistake is found once."""
        if axis in self.axes and self.type_of(tensor, axis) is not R:
            self.find(text, module)
            self.set_type(tensor, **{axis: R})

    # Operators.

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        name = function.overloadpacket.__name__
        if name.startswith("_foreach_"):
            self._each(function, name, arguments)
            return result
        targets, sources = _written_and_read(function, name, arguments, options)
        results = result if isinstance(result, tuple | list) else (result,)
        are_new = zip(results, _all_new(function, results), strict=False)
        made = [tensor for tensor, is_new in are_new if is_new and isinstance(tensor, torch.Tensor)]
        if not targets and not made:  # a view
            return result
        found = {axis: self._result(name.rstrip("_"), sources, axis) for axis in self.axes}
        for target in targets:
            self._write(target, found, sources)
        for tensor in made:
            self.set_type(tensor, **dict.fromkeys(found) if "empty" in name else found)
        return result

    def _each(self, function, name: str, arguments: tuple) -> None:
        """Set the types that an operator on lists of tensors writes."""
        if name == "_foreach_copy_":
            for target, source in zip(*arguments[:2], strict=True):
                found = {axis: self.type_of(source, axis) for axis in self.axes}
                self._write(target, found, [source])

    def _write(self, target: torch.Tensor, found: Types, sources: Sequence[torch.Tensor]) -> None:
        """Set the types of a tensor that an operator has written."""
        storage = target.untyped_storage()
        is_whole = target.numel() * target.element_size() == storage.nbytes()
        summed = any(storage_key(s.untyped_storage()) in self._sums for s in sources)
        known = self._types.get(storage_key(storage), (None, {}))[1]
        for axis, kind in found.items():
            old = known.get(axis, R)
            if not is_whole:
                kind = C if summed and kind is R and old in (V, P) else joined(old, kind)
            self.set_type(target, **{axis: kind})

    def _result(self, name: str, sources: list[torch.Tensor], axis: str) -> Type:
        """Return the type of the result of an operator on an axis."""
        if name.startswith(NEW) or not sources:
            return R
        kinds = [self.type_of(source, axis) for source in sources]
        if P in kinds:
            return self._result_of_parts(name, sources, kinds, axis)
        if axis == "tp" and name in PRODUCTS and len(kinds) > 1:
            *added, one, other = kinds
            if R not in (one, other):  # both are sharded over the inner dimension
                return self._sum_of(P, added[0], sources[0]) if added else P
        if C in kinds and len(kinds) == 1:
            return C
        return V if V in kinds or C in kinds else R

    def _result_of_parts(
        self,
        name: str,
        sources: list[torch.Tensor],
        kinds: list[Type],
        axis: str,
    ) -> Type:
        """Return the type of the result of an operator with an argument that is partial."""
        others = [kind for kind in kinds if kind is not P]
        if name in ADDITIONS:
            if len(kinds) == 1:  # a number
                return self._used(name, axis)
            index = 1 - kinds.index(P)
            return self._sum_of(P, kinds[index], sources[index])
        if name in JOINS:
            return P if not others else V
        if name in LINEAR and kinds[0] is P:
            return P if V not in others else V
        if name == "div" and kinds[0] is not P:
            return self._used(name, axis)
        if name in PRODUCTS | OTHER_PRODUCTS:
            if name.startswith(("addm", "baddb")):
                *added, one, other = kinds
                product = P if {one, other} == {P, R} else None
                if product is None and P in (one, other):
                    return self._used(name, axis)
                return self._sum_of(product or R, added[0], sources[0])
            if len(others) == len(kinds) - 1 and all(kind is R for kind in others):
                return P
        return self._used(name, axis)

    def _sum_of(self, one: Type, other: Type, tensor: torch.Tensor) -> Type:
        """Return the type of the sum of a partial tensor and another one."""
        if R not in (one, other):
            return P
        if one is other:
            return R
        if self.in_forward:
            named = self._names.get(storage_key(tensor.untyped_storage()), "a tensor")
            self.find(
                f"a part of a sum over tp is added to {named}, which is equal on all tp ranks: a "
                "sum over tp is missing before it"
            )
            return R
        return V

    def _used(self, name: str, axis: str) -> Type:
        """Return the type of a result that depends on a partial tensor in another way."""
        if not self.in_forward:
            return V
        self.find(f"{name} gets a part of a sum over {axis}: the sum is missing before it")
        return R

    # Collectives.

    def communicate(self, run: Callable, collective: Callable, *tensors, group, **options) -> Any:
        """Call a collective, with the arguments of `collectives._run`, and set the types of its
        result."""
        axis = next((name for name, each in self.axes.items() if each.group is group), None)
        source = tensors[1] if len(tensors) > 1 else tensors[0]
        before = {name: self.type_of(source, name) for name in self.axes}
        result = run(collective, *tensors, group=group, **options)
        kind, after = collective.__name__, dict(before)
        is_sum = kind.startswith(("all_reduce", "reduce_scatter"))
        if axis:
            # over other axes, tp ranks may send different numbers of elements
            count = options["whole"].numel() if axis == "tp" else 0
            self.calls.append((kind, axis, count))
            if is_sum and options.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
                if before[axis] is R:
                    self.find(
                        f"a tensor is summed over {axis}, and is equal on all {axis} ranks "
                        f"already: the sum is {self.axes[axis].size} x what it should be"
                    )
                if axis == "tp":
                    self._sums.add(storage_key(tensors[0].untyped_storage()))
            if kind.startswith("all_gather") and before[axis] is P:
                self.find(f"parts of a sum over {axis} are gathered: a sum is missing")
            after[axis] = R if kind.startswith(("all_reduce", "all_gather")) else V
        elif "cp" in self.axes and not is_sum:
            after["cp"] = V  # an axis that is folded into dp x cp
        self._write(tensors[0], after, ())
        return result

    # Regions.

    def enter(self, forward: Callable, number: int, what: str) -> Callable:
        """Return the forward of an autograd function that needs a replicated tensor, its argument
        `number`, unless the activations are parts of the sequence."""

        def entered(ctx, *arguments):
            if not self.ctx.sequence_parallel or what != ENTERS:
                self.expect(arguments[number], "tp", what)
            return forward(ctx, *arguments)

        return entered

    def own_part(self, function: Callable, axis: str) -> Callable:
        """Return a function of an autograd function whose result is this rank's part."""

        def taken(ctx, *arguments):
            result = function(ctx, *arguments)
            part = result[0] if isinstance(result, tuple) else result
            self.set_type(part, **{axis: V})
            return result

        return taken


@functools.cache
def _arguments_of(function: Any) -> list[tuple[str, bool, bool]]:
    """Return, for each argument of an operator, its name, whether it is written, and whether it
    needs its keyword."""
    return [
        (each.name, each.alias_info is not None and each.alias_info.is_write, each.kwarg_only)
        for each in function._schema.arguments
    ]


def _written_and_read(
    function: Any, name: str, arguments: tuple, options: dict
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator writes, and those that it reads."""
    written, read = [], []
    for number, (key, writes, needs_keyword) in enumerate(_arguments_of(function)):
        value = options.get(key) if needs_keyword or key in options else arguments[number:][:1]
        if value is None or isinstance(value, bool | int | float):
            continue
        tensors = tensors_in(value)
        if writes:
            written += tensors
        if not writes or not (needs_keyword or name in ("copy_", "zero_", "fill_")):
            read += tensors
    return written, read


def _all_new(function: Any, results: Sequence) -> list[bool]:
    """Return, for each result of an operator, whether it is new memory."""
    are_new = results_are_new(function)
    if len(are_new) == 1:  # also a list of tensors
        return are_new * len(results)
    return are_new
