"""Check a layout statically: the type of every tensor on each axis, without ranks or values.

Stages run forward and backward on the meta device. Every tensor has a type per axis. The terms are
those of shard_map in JAX and of the package spmd_types:

    replicated   equal on all ranks of the axis
    varying      different on the ranks: a shard, or a part of the sequence
    partial      a part of a sum over the ranks; only over tp

Parameters and inputs have the types of their shards. The type of an operator's result depends on
the types of its arguments. Collectives change types: a sum makes a partial or varying tensor
replicated. Gradients have types too, because backward runs. After it, the gradient of a replicated
parameter must be replicated.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megazoo.engine.auxiliary import declared_losses
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.layers import matmul
from megazoo.layers.auxiliary import AuxiliaryLosses, collecting
from megazoo.models.attachment import Attachment
from megazoo.models.base import Model
from megazoo.models.outputs import LanguageModelHead
from megazoo.models.registry import find_config, tiny_preset
from megazoo.parallel import collectives, regions
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import NamedParameter, ShardedModule
from megazoo.parallel.sequence import SequenceCut, padded_length
from megazoo.parallel.stages import Stage
from megazoo.planning.meter import META, DeviceKernels
from megazoo.planning.ranks import Builder, place_in, stage_keys
from megazoo.testing.layouts import Layout
from megazoo.torch_internals import (
    TorchDispatchMode,
    results_are_new,
    run_backward,
    storage_key,
    tensors_in,
)

ROWS, TOKENS = 2, 16  # of the micro-batch; tokens are at least this many


class Type(Enum):
    """The type of a tensor on one axis."""

    REPLICATED = "replicated"
    VARYING = "varying"
    PARTIAL = "partial"
    # varying, and the parts that several ranks hold have been summed over these ranks
    COMPLETED = "completed"


R, V, P, C = Type
Types = dict[str, Type]  # by axis

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


ENTERS = "a tensor-parallel region gets a tensor that differs on the tp ranks: a sum is missing"
SHARDS = "a tensor is sharded that differs on the tp ranks already"


@contextmanager
def _observed(mode: TypeMode, model: Model) -> Iterator[None]:
    """Within this block, the collectives and the modules of a model report to the mode."""
    run = collectives._run
    entering = [
        (regions._CopyToTensorParallel, 0, ENTERS),
        (matmul._EnteredLinears, 3, ENTERS),
        (regions._ScatterToTensorParallel, 0, SHARDS),
    ]
    parts = [
        (regions._ScatterToTensorParallel, "forward", "tp"),
        (regions._GatherFromTensorParallel, "backward", "tp"),
        (regions._GatherFromContext, "backward", "cp"),
    ]

    def communicated(*arguments, **options):
        return mode.communicate(run, *arguments, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(collectives, "_run", communicated))
        for cls, number, what in entering:
            entered = staticmethod(mode.enter(cls.forward, number, what))
            stack.enter_context(mock.patch.object(cls, "forward", entered))
        for cls, name, axis in parts:
            taken = staticmethod(mode.own_part(getattr(cls, name), axis))
            stack.enter_context(mock.patch.object(cls, name, taken))
        for name, module in model.named_modules():
            for handle in _hooks(mode, name, module):
                stack.callback(handle.remove)
        yield


def _hooks(mode: TypeMode, name: str, module: nn.Module) -> Iterator[Any]:
    """Add hooks to a module, and yield their handles."""
    needs_equal = _needs_equal_inputs(module)

    def before(module, arguments, options):
        mode.modules.append(name)
        for tensor in tensors_in(arguments, options) if needs_equal and mode.in_forward else ():
            mode.expect(
                tensor,
                "tp",
                "its input differs on the tp ranks, and its parameters are replicated: a sum "
                "over tp is missing before it",
            )

    def after(module, arguments, output):
        mode.modules.pop()

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after, always_call=True)


def _needs_equal_inputs(module: nn.Module) -> bool:
    """Return whether all parameters of a module are replicated, with gradients that are complete on
    each tp rank."""
    if not isinstance(module, ShardedModule):
        return False
    specs = module.specs.values()
    return bool(specs) and not any(
        spec.shard or spec.has_partial_gradient(module.ctx) for spec in specs
    )


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


@contextmanager
def _run_as(gpu: bool) -> Iterator[None]:
    """Within this block, stages run as on GPUs: products overlap with communication, and the loss
    is computed in pieces. gpu: if False, they run as on CPUs."""

    def hides(x: torch.Tensor) -> bool:
        return gpu and torch.is_grad_enabled()

    def saves(self, tokens: int, differentiated: bool) -> bool:
        return gpu

    products = mock.patch.object(matmul, "hides_communication", hides)
    with products, mock.patch.object(LanguageModelHead, "pieces_save_memory", saves):
        yield


def check_types(
    model: Any,
    layout: Layout | str,
    *,
    attached: Attachment | None = None,
) -> list[str]:
    """Check the types of all tensors of a model in a layout, without processes.

    Each kind of stage runs on the meta device, on the first and on the last tp rank. Layouts may be
    larger than this machine. Missing and doubled sums are found; values, order and scale are not
    checked: see docs/proof.md.

    Args:
        model: A config object, or a name as in `from_config`. The name of a family selects its tiny
            preset.
        layout: A layout or its name.
        attached: Adapters of the model, or None.

    Returns:
        What is wrong, in the order of the computation; empty if nothing is found.

    Raises:
        UserError: The layout is invalid.

    Example:
        check_types("llama-7b", "tp8pp16cp4dp64")  # []
    """
    config = find_config(tiny_preset(model)) if isinstance(model, str) else model
    layout = Layout.named(layout) if isinstance(layout, str) else layout
    layout.check(config)
    whole, builder = layout.virtual_context(), Builder(config, attached)
    findings: list[str] = []
    done: set[tuple] = set()
    for pp_rank in range(layout.pp):
        ranks = [builder.build(place_in(whole, pp_rank))]
        keys = dict(zip(ranks[0].stages, stage_keys(ranks[0]), strict=True))
        todo = [stage for stage, key in keys.items() if key not in done]
        done.update(keys.values())
        if todo and layout.tp > 1:
            ranks.append(builder.build(place_in(whole, pp_rank, layout.tp - 1)))
        for stage, gpu in product(todo, (False, True)):
            modes = [TypeMode(rank.ctx) for rank in ranks]
            with _run_as(gpu):
                for mode, rank in zip(modes, ranks, strict=True):
                    _walk(mode, rank, stage)
                    findings += mode.findings
            if not any(mode.findings for mode in modes) and modes[0].calls != modes[-1].calls:
                findings.append(
                    f"stage {stage.index}: tp ranks 0 and {layout.tp - 1} call different "
                    "collectives, and would wait for each other"
                )
    return _once_per_kind(findings)


def _once_per_kind(findings: list[str]) -> list[str]:
    """Return the first of the findings that differ only in the numbers of layers and other
    parameters, and how many layers have the same."""
    kinds: dict[str, list[str]] = {}
    for text in findings:
        kind = re.sub(r"layers\.\d+\.", "", re.sub(r" \(and of \d+ more\)", "", text))
        kinds.setdefault(kind, []).append(text)
    texts = []
    for first, *others in (list(dict.fromkeys(found)) for found in kinds.values()):
        named = [text for text in others if text.startswith("module ")]
        texts.append(f"{first} (and in {len(named)} more layers)" if named else first)
    return texts


def _few_layers(model: Model, stage: Stage) -> Stage:
    """Return a stage with only its first layers: those until each kind of layer occurs twice, if
    there are two of the kind."""
    kinds = [
        (repr(layer), tuple(p.requires_grad for p in layer.parameters()))
        for layer in (model.layers[str(index)] for index in stage.layers)
    ]
    needed = [index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < 2]
    return replace(stage, layers=stage.layers[: max(needed, default=0) + 1])


def _walk(mode: TypeMode, model: Model, stage: Stage) -> None:
    """Run a stage forward and backward, and add what is wrong to the findings of the mode."""
    ctx, sequence = model.ctx, V if model.ctx.sequence_parallel else R
    for entry in model.entries():
        entry.parameter.grad = None
        mode.name(entry.parameter, entry.name)
        is_cut = entry.spec.shard is not None
        folded = any(s.axis in ctx.folded for s in entry.spec.shards_in(ctx))
        mode.set_type(entry.parameter, tp=V if is_cut else R, cp=V if folded else R)
    batch = _micro_batch(model)
    for tensor in tensors_in(list(vars(batch).values())):
        mode.set_type(tensor, tp=R, cp=V)
    received = None
    if not stage.first:
        parts = ctx.cp_size * (ctx.tp_size if ctx.sequence_parallel else 1)
        shape = (ROWS, _length(ctx) // parts, model.config.hidden_size)
        received = torch.empty(shape, dtype=model.dtype, device=META)
        received.requires_grad_(stage.index > model.engine.first_trained_stage)
        mode.set_type(received, tp=sequence, cp=V)
    x = batch.input_ids if received is None else received
    assert x is not None  # batch.input_ids is set
    losses = _auxiliary_losses(model)
    try:
        with _observed(mode, model), collecting(losses), DeviceKernels(), mode:
            output = model.forward_stage(x, batch, _few_layers(model, stage))
            if stage.last:
                mode.modules.append("head")
                output = model.output_head.loss(output, batch, torch.ones((), device=META))
                mode.modules.pop()
                mode.expect(output, "tp", "its loss differs on the tp ranks: a sum is missing")
            elif not ctx.sequence_parallel:
                mode.expect(
                    output, "tp", f"the output of stage {stage.index} differs on the tp ranks"
                )
            elif mode.type_of(output, "tp") is P:
                mode.find(f"the output of stage {stage.index} is a part of a sum over tp")
            if not output.requires_grad:
                return
            gradient = torch.ones_like(output)
            mode.set_type(gradient, tp=R if stage.last else sequence, cp=R if stage.last else V)
            mode.in_forward = False
            run_backward(output, gradient)
    except UserError:
        raise
    except Exception as error:
        mode.find(f"the run on meta ends with {type(error).__name__}: {error}")
        return
    _check_gradients(mode, model, received)


def _auxiliary_losses(model: Model) -> AuxiliaryLosses | None:
    """Return the object that collects the auxiliary losses of a forward, without sums over the
    ranks; None if no layer has any."""
    names = declared_losses(model)
    if names is None:
        return None
    counts = {what: torch.ones((), device=META) for what in ("labels", "tokens", "rows")}
    losses = AuxiliaryLosses(names, counts, model.ctx.axes)
    for loss in losses.joint.values():
        loss.is_summed = True
    return losses


def _length(ctx: ParallelContext) -> int:
    """Return the number of tokens of a sequence, which all ranks can split."""
    return padded_length(max(TOKENS, 2 * ctx.tp_size * ctx.cp_size), ctx)


def _micro_batch(model: Model) -> MicroBatch:
    """Return a micro-batch of a rank, on the meta device."""
    ctx, length = model.ctx, _length(model.ctx)
    shape = (ROWS, length // ctx.cp_size)
    ids = torch.empty(shape, dtype=torch.int64, device=META)
    batch = MicroBatch(
        shape, ids, ids, length=length, longest=length, cut=SequenceCut.of(length, ctx)
    )
    if not model.config.num_labels:
        return batch
    rows = torch.empty(ROWS, dtype=torch.int64, device=META)
    return replace(batch, targets=rows, scored=rows)


def _check_gradients(mode: TypeMode, model: Model, received: torch.Tensor | None) -> None:
    """Add findings for gradients of the wrong type, after a backward."""
    wrong: dict[str, list[str]] = {}
    for entry in model.entries():
        if entry.parameter.grad is not None and (text := _wrong_gradient(mode, entry, model.ctx)):
            wrong.setdefault(text, []).append(entry.name)
    for text, names in wrong.items():
        more = f" (and of {len(names) - 1} more)" if len(names) > 1 else ""
        mode.findings.append(f"gradient of {names[-1]}{more}: {text}")
    if received is None or received.grad is None or wrong or "tp" not in mode.axes:
        return
    kind = mode.type_of(received.grad, "tp")
    if kind is P or (kind is not R and not model.ctx.sequence_parallel):
        mode.findings.append(
            "gradient of a stage's input: each tp rank has only a part of it: a sum over tp is "
            "missing where a region is entered"
        )


def _wrong_gradient(mode: TypeMode, entry: NamedParameter, ctx: ParallelContext) -> str | None:
    """Return what is wrong with the gradient of a parameter, or None."""
    spec, gradient = entry.spec, entry.gradient
    if "tp" in mode.axes:
        kind = mode.type_of(gradient, "tp")
        if spec.shard is None:
            sums_later = spec.plain and spec.has_partial_gradient(ctx)
            if kind is not R and not sums_later:
                return (
                    "each tp rank has only a part of it, and the parameter is replicated: enter a "
                    "region, or use synced_parameter"
                )
        elif any(spec.shard.replicated(ctx.tp_size)) and kind not in (R, C):
            return "several tp ranks hold the same units, and their parts are never summed"
    if "cp" in mode.axes and mode.type_of(gradient, "cp") is R and not spec.shards_in(ctx)[1:]:
        return "it is equal on all cp ranks, and is summed over them after backward: it is doubled"
    return None
