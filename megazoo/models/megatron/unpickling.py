"""Pickles of Megatron-LM and of torch.distributed.checkpoint, of which nothing is called.

What is needed of them are containers, numbers, texts and where tensors lie. Of other classes there
are stand-ins that keep what the pickle says of an object; nothing is imported for them. A pickle
that names anything else, which could be called, is refused.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import torch

from megazoo.errors import UserError

CONTAINERS = (dict, frozenset, list, set, tuple)
BUILTINS = ("builtins", "__builtin__")  # as Python 3 calls them, and as older pickles do
PLAIN = {(module, kind.__name__): kind for kind in CONTAINERS for module in BUILTINS}
PLAIN |= {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): tuple}
# Packages and modules whose objects may be there, and get stand-ins.
STOOD_FOR = (
    """
    megatron transformer_engine apex numpy argparse datetime enum functools pathlib signal types
    _codecs _io collections torch.distributed.checkpoint torch.torch_version torch.nn.functional
    torch.nn.init torch._C._nn
    """
).split()
# And single names of others.
STOOD_FOR_NAMES = {
    *((module, name) for module in BUILTINS for name in ("bytearray", "bytes", "complex")),
    ("torch", "device"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.serialization", "_get_layout"),
}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


class StandIn:
    """Stands for an object of a class that is not imported. state: what the pickle says of it; None
    if it says nothing."""

    def __new__(cls, *_, **__):
        made = super().__new__(cls)
        made.state = None
        return made

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, _key, _value):  # of a class that is a container, too
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass


class Storage(NamedTuple):
    """The elements of a tensor, or of several, in a file: where the first one lies, and how many
    there are."""

    start: int
    dtype: torch.dtype
    count: int


class StoredTensor(NamedTuple):
    """A tensor in a file, of which nothing has been read: where its first element lies. The others
    follow it, row by row."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def unpickle(
    file: IO[bytes], path: Path, storage: Callable[[str, torch.dtype, int], Storage] | None = None
) -> Any:
    """Return what a pickle holds, with a StoredTensor for each tensor. UserError, naming the path,
    if it would call anything.

    storage: finds the elements of tensors, by their name, dtype and number; None: there are none.
    """
    return _Unpickler(file, path, storage).load()


class _Unpickler(pickle.Unpickler):
    REBUILD: ClassVar = {
        "_rebuild_tensor_v2": "tensor",
        "_rebuild_tensor_v3": "tensor_of_bytes",
        "_rebuild_parameter": "parameter",
    }

    def __init__(self, file, path, storage):
        super().__init__(file, encoding="utf-8", errors="replace")
        self.path, self.storage, self.kinds = path, storage, {}

    def find_class(self, module: str, name: str):
        if found := PLAIN.get((module, name)):
            return found
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch._utils" and name in self.REBUILD:
            function = getattr(self, self.REBUILD[name])
            # new for each pickle, which can give it attributes, as it can any object
            return lambda *given: function(*given)
        if (module, name) in STOOD_FOR_NAMES or any(
            module == known or module.startswith(f"{known}.") for known in STOOD_FOR
        ):
            return self.kinds.setdefault((module, name), type(name, (StandIn,), {}))
        raise UserError(
            f"{self.path} is refused: it would call {module}.{name}, and no checkpoint needs that"
        )

    def persistent_load(self, reference):
        """Return where the elements of a tensor lie."""
        kind, dtype, name, _device, count = reference
        if kind != "storage" or not isinstance(dtype, torch.dtype) or self.storage is None:
            raise ValueError("it refers to what is not in it")
        return self.storage(name, dtype, count)

    def tensor(self, storage: Storage, offset: int, shape, strides, *_):
        """Stand for torch's function that makes a tensor of a storage."""
        shape, expected = tuple(shape), 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size > 1 and stride != expected:
                return StandIn()  # its rows don't follow one another: none of a model's weights
            expected *= size
        if min(offset, *shape, 0) < 0 or offset + expected > storage.count:
            raise ValueError("a tensor reaches beyond its elements")
        start = storage.start + offset * storage.dtype.itemsize
        return StoredTensor(start, shape, storage.dtype)

    def tensor_of_bytes(self, storage: Storage, offset, shape, strides, grad, hooks, dtype, *_):
        """Stand for torch's function that makes a tensor of a dtype that has no storage of its
        own."""
        count = storage.count // dtype.itemsize
        return self.tensor(Storage(storage.start, dtype, count), offset, shape, strides)

    def parameter(self, tensor, *_):
        """Stand for torch's function that makes a parameter of a tensor."""
        return tensor
