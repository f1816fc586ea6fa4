"""Read pickles of Megatron-LM and torch.distributed.checkpoint without calling anything.

Only containers, numbers, strings and the locations of tensors are needed. Objects of other known
classes become placeholders that keep the pickled state; nothing is imported for them. A pickle that
names anything else, which could be called, raises an error.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import torch

from megazoo.errors import UserError

CONTAINERS = (dict, frozenset, list, set, tuple)
BUILTINS = ("builtins", "__builtin__")  # the names in Python 3 and in older pickles
PLAIN = {(module, kind.__name__): kind for kind in CONTAINERS for module in BUILTINS}
PLAIN |= {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): tuple}
# Packages and modules whose objects may occur, and become placeholders.
STOOD_FOR = (
    """
    megatron transformer_engine apex numpy argparse datetime enum functools pathlib signal types
    _codecs _io collections torch.distributed.checkpoint torch.torch_version torch.nn.functional
    torch.nn.init torch._C._nn
    """
).split()
# Single names from other modules, for the same purpose.
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
    """A placeholder for an object of a class that is not imported. state: the pickled state, or
    None."""

    def __new__(cls, *_, **__):
        made = super().__new__(cls)
        made.state = None
        return made

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, _key, _value):  # for classes that are containers
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass


class Storage(NamedTuple):
    """The elements of one or more tensors in a file: the byte offset of the first element, and
    their number."""

    start: int
    dtype: torch.dtype
    count: int


class StoredTensor(NamedTuple):
    """A tensor in a file that has not been read: the byte offset of its first element. The others
    follow in row-major order."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def unpickle(
    file: IO[bytes], path: Path, storage: Callable[[str, torch.dtype, int], Storage] | None = None
) -> Any:
    """Return the contents of a pickle, with a StoredTensor for each tensor. Raises UserError, with
    the path, if it would call anything.

    storage: returns the Storage for a name, a dtype and a number of elements; None: tensors raise
    an error.
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
            # new for each pickle, because a pickle can set attributes of any object
            return lambda *given: function(*given)
        if (module, name) in STOOD_FOR_NAMES or any(
            module == known or module.startswith(f"{known}.") for known in STOOD_FOR
        ):
            return self.kinds.setdefault((module, name), type(name, (StandIn,), {}))
        raise UserError(
            f"{self.path} is not safe to load: it would call {module}.{name}, which no "
            "checkpoint needs"
        )

    def persistent_load(self, reference):
        """Return the location of the elements of a tensor."""
        kind, dtype, name, _device, count = reference
        if kind != "storage" or not isinstance(dtype, torch.dtype) or self.storage is None:
            raise ValueError("it refers to an object that it does not contain")
        return self.storage(name, dtype, count)

    def tensor(self, storage: Storage, offset: int, shape, strides, *_):
        """Replace torch's function that makes a tensor from a storage."""
        shape, expected = tuple(shape), 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size > 1 and stride != expected:
                return StandIn()  # not contiguous, so not a weight of a model
            expected *= size
        if min(offset, *shape, 0) < 0 or offset + expected > storage.count:
            raise ValueError("a tensor reaches beyond its elements")
        start = storage.start + offset * storage.dtype.itemsize
        return StoredTensor(start, shape, storage.dtype)

    def tensor_of_bytes(self, storage: Storage, offset, shape, strides, grad, hooks, dtype, *_):
        """Replace torch's function that makes a tensor of a dtype without a storage class."""
        count = storage.count // dtype.itemsize
        return self.tensor(Storage(storage.start, dtype, count), offset, shape, strides)

    def parameter(self, tensor, *_):
        """Replace torch's function that makes a parameter from a tensor."""
        return tensor
