"""Steps of fixed shapes on a CPU, as CUDA would run them, for tests."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazoo.generate import group as groups
from megazoo.generate.graph import StepGraph

aten = torch.ops.aten
READS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2)


class OnTheHost(AssertionError):
    """A step has read a tensor on the host."""


class Trace(TorchDispatchMode):
    """Notes every operator with its arguments: numbers as they are, and of tensors that were there
    before where they lie. Raises OnTheHost where one is read on the host."""

    def __init__(self):
        super().__init__()
        self.operators, self.new, self.places = [], [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet, kwargs = function._overloadpacket, kwargs or {}
        masks = packet is aten.index and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if packet in READS or masks:
            raise OnTheHost(str(packet))
        result = function(*args, **kwargs)
        leaves = tree_leaves([args, kwargs])
        self.operators.append((str(function), *map(self.name_of, leaves)))
        given = {storage_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and storage_of(made) not in given - self.places:
                self.new.append(made)  # it stays, so that its address is given to no other
                self.places.add(storage_of(made))
        return result

    def name_of(self, leaf):
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        place = None if storage_of(leaf) in self.places else leaf.data_ptr()
        return place, tuple(leaf.shape), leaf.stride()


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Replayed(StepGraph):
    """A StepGraph with a stand-in for the CUDA graph, which replays by calling the captured
    function again, into the tensor that the capture has returned.

    The capture runs it, too, which a CUDA graph's does not; it changes nothing, as a step that runs
    twice writes the same to the same places. steps: of all graphs, in order, each as (the graph,
    its capture's number, a Trace's operators).
    """

    steps: list[tuple] = []

    def __init__(self, device):
        self.key, self.fails, self.graph, self.result, self.captures = None, False, None, None, 0

    def _run(self, function):
        return function()

    def _capture(self, function):
        self.captures += 1
        self.function, self.graph, self.result = function, self, function().clone()

    def replay(self):
        with Trace() if self.traced else nullcontext() as trace:
            self.result.copy_(self.function())
        self.steps.append((self, self.captures, trace and trace.operators))


@contextmanager
def static_steps(graphs: bool = False, traced: bool = False):
    """Within this block generation takes steps of fixed shapes, graphs: as graphs. traced: with a
    Trace of each replay. Yields what was replayed: see Replayed.steps."""
    Replayed.steps.clear()
    Replayed.traced = traced
    others = {"takes_static_steps": lambda model: True}
    if graphs:
        others |= {"takes_graphs": lambda ctx: True, "StepGraph": Replayed}
    with mock.patch.multiple(groups, **others):
        yield Replayed.steps
