"""Check a layout statically: the type of every tensor on each axis, without ranks or values.

Stages run forward and backward on the meta device. Every tensor has a type per axis, which
operators and collectives change: see type_mode.py. Parameters and inputs have the types of their
shards. Gradients have types too, because backward runs. After it, the gradient of a replicated
parameter must be replicated.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import nn

from megazoo.engine.auxiliary import losses_on_meta
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.stage import StageRun
from megazoo.engine.transport import MetaTransport
from megazoo.errors import UserError
from megazoo.families.registry import tiny_preset
from megazoo.layers import matmul
from megazoo.models.attachment import Attachment
from megazoo.models.base import Model
from megazoo.models.outputs import LanguageModelHead
from megazoo.models.registry import find_config
from megazoo.parallel import collectives, regions
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.module import NamedParameter, ShardedModule
from megazoo.parallel.schedule import Action
from megazoo.parallel.sequence import SequenceCut, padded_length
from megazoo.parallel.stages import Stage
from megazoo.planning.meter import META, DeviceKernels
from megazoo.planning.ranks import Builder, place_in, stage_keys
from megazoo.testing.layouts import check_model
from megazoo.testing.type_mode import ENTERS, C, P, R, TypeMode, V
from megazoo.torch_internals import tensors_in

ROWS, TOKENS = 2, 16  # of the micro-batch; tokens are at least this many


HEAD = "head"  # name of the head's loss in findings
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
        if model.has_last:
            head = model.output_head
            loss = mock.patch.object(head, "loss", _named(mode, HEAD, head.loss))
            stack.enter_context(loss)
        for name, module in model.named_modules():
            for handle in _hooks(mode, name, module):
                stack.callback(handle.remove)
        yield


def _named(mode: TypeMode, name: str, function: Callable) -> Callable:
    """Return a function whose findings have the name of a module."""

    def named(*arguments, **options):
        mode.modules.append(name)
        result = function(*arguments, **options)
        mode.modules.pop()  # an error keeps the name, and ends the run
        return result

    return named


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
        UserError: The layout is invalid, or a stage returns activations that the next one does not
            accept.

    Example:
        check_types("llama-7b", "tp8pp16cp4dp64")  # []
    """
    config = find_config(tiny_preset(model)) if isinstance(model, str) else model
    layout = Layout.named(layout) if isinstance(layout, str) else layout
    check_model(layout, config)
    whole, builder = layout, Builder(config, attached)
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
    ctx = model.ctx
    for entry in model.entries():
        entry.parameter.grad = None
        mode.name(entry.parameter, entry.name)
        is_cut = entry.spec.shard is not None
        folded = any(s.axis in ctx.folded for s in entry.spec.shards_in(ctx))
        mode.set_type(entry.parameter, tp=V if is_cut else R, cp=V if folded else R)
    batch = _micro_batch(model)
    for tensor in tensors_in(list(vars(batch).values())):
        mode.set_type(tensor, tp=R, cp=V)
    forward = Action("F", stage.index, 0)
    run = StageRun(
        model,
        [batch],
        torch.ones((), device=META),
        TypedTransport(mode, model, batch),
        stages=[_few_layers(model, stage)],
        auxiliary=losses_on_meta(model),
    )
    try:
        with _observed(mode, model), DeviceKernels(), mode:
            run.forward(forward, train=True)
            received, output = run.graphs[stage.index, 0]
            if stage.last:
                mode.expect(
                    output, "tp", "its loss differs on the tp ranks: a sum is missing", HEAD
                )
            if not output.requires_grad:
                return
            mode.in_forward = False
            run.backward(forward._replace(kind="B"))
    except UserError:
        raise
    except Exception as error:
        mode.find(f"the run on meta ends with {type(error).__name__}: {error}")
        return
    _check_gradients(mode, model, received)


class TypedTransport(MetaTransport):
    """Brings a stage tensors with the types that other stages send, and checks those of its
    outputs."""

    def __init__(self, mode: TypeMode, model: Model, batch: MicroBatch):
        super().__init__(model, batch)
        self.mode, self.sequence_parallel = mode, model.ctx.sequence_parallel

    def take(self, action: Action) -> torch.Tensor | None:
        """Return an empty tensor, or ones as the gradient of the loss. None for the forward of the
        first stage."""
        tensor = super().take(action)
        if tensor is not None:
            self.mode.set_type(tensor, tp=V if self.sequence_parallel else R, cp=V)
        elif action.kind != "F":
            tensor = torch.ones((), device=META)
            self.mode.set_type(tensor, tp=R, cp=R)
        return tensor

    def pass_on(self, consumer: Action, tensor: torch.Tensor) -> bool:
        """Add a finding if the output of a forward has the wrong type."""
        output = f"the output of stage {consumer.stage - 1}"
        if consumer.kind == "F" and not self.sequence_parallel:
            self.mode.expect(tensor, "tp", f"{output} differs on the tp ranks")
        elif consumer.kind == "F" and self.mode.type_of(tensor, "tp") is P:
            self.mode.find(f"{output} is a part of a sum over tp")
        return True


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
                    "region, or use self.use(name)"
                )
        elif any(spec.shard.replicated(ctx.tp_size)) and kind not in (R, C):
            return "several tp ranks hold the same units, and their parts are never summed"
    if "cp" in mode.axes and mode.type_of(gradient, "cp") is R and not spec.shards_in(ctx)[1:]:
        return "it is equal on all cp ranks, and is summed over them after backward: it is doubled"
    return None
