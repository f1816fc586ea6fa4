"""Process groups without processes: collectives that check what NCCL would, and send nothing."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.support.fakecuda.audit import audit

DTYPES = {
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
}


class Group:
    """A group along an axis of the mesh."""

    def __init__(self, size: int, rank: int, name: str):
        self._size, self._rank, self.name = size, rank, name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Mesh:
    """What a ParallelContext asks of a mesh."""

    def __init__(self, groups: dict[str, Group], ranks: torch.Tensor):
        self._groups, self.mesh = groups, ranks

    @staticmethod
    def from_group(groups, device_type, mesh, *, mesh_dim_names) -> "Mesh":
        return Mesh(dict(zip(mesh_dim_names, groups, strict=True)), mesh)

    def get_group(self, axis: str) -> Group:
        return self._groups[axis]


class Work:
    def wait(self, *_) -> bool:
        return True


def _check(kind: str, group, *tensors: torch.Tensor) -> None:
    name = getattr(group, "name", "world")
    devices = {tensor.device.type for tensor in tensors}
    audit.collectives[f"{kind} over {name}" + (", by gloo" if devices == {"cpu"} else "")] += 1
    if len(devices) > 1:
        audit.fault(f"{kind} of tensors on several devices")
    for tensor in tensors:
        if not tensor.is_contiguous():
            audit.fault(f"{kind} of a tensor that is not contiguous, {list(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            audit.fault(f"{kind} of {tensor.dtype}")


def all_reduce(tensor, op=None, group=None, async_op=False):
    _check("all_reduce", group, tensor)
    return Work() if async_op else None


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    _check("broadcast", group, tensor)
    return Work() if async_op else None


def all_gather_single(output, input, group=None, async_op=False):
    _check("all_gather", group, output, input)
    if output.numel() != input.numel() * group.size():
        audit.fault("all_gather of wrong sizes")
    return Work() if async_op else None


def reduce_scatter_single(output, input, op=None, group=None, async_op=False):
    _check("reduce_scatter", group, output, input)
    if input.numel() != output.numel() * group.size():
        audit.fault("reduce_scatter of wrong sizes")
    return Work() if async_op else None


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    _check("all_to_all", group, output, input)
    for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes)):
        if len(sizes) != group.size() or sum(sizes) != len(tensor):
            audit.fault("all_to_all of wrong sizes")
    return Work() if async_op else None


def isend(tensor, dst=None, group=None, **_):
    _check("isend, by a communicator of two ranks,", group, tensor)
    return Work()


def irecv(tensor, src=None, group=None, **_):
    _check("irecv, by a communicator of two ranks,", group, tensor)
    return Work()


def recv(tensor, src=None, group=None, **_):
    _check("recv, by a communicator of two ranks,", group, tensor)


class P2POp:
    def __init__(self, op, tensor, peer=None, group=None, tag=0, group_peer=None):
        self.op, self.tensor, self.group = op, tensor, group


def batch_isend_irecv(ops):
    _check(f"a batch of {len(ops)}", ops[0].group, *[op.tensor for op in ops])
    return [Work()]


def all_gather_object(values, value, group=None):
    audit.collectives["all_gather_object"] += 1
    values[:] = [value] * len(values)


def install() -> None:
    """Put these in the place of torch.distributed's: before megazoo is imported, which looks some
    of them up."""
    replaced = (
        all_reduce,
        broadcast,
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
        isend,
        irecv,
        recv,
        P2POp,
        batch_isend_irecv,
        all_gather_object,
    )
    for function in replaced:
        setattr(dist, function.__name__, function)
    dist.all_gather_into_tensor = all_gather_single
    dist.reduce_scatter_tensor = reduce_scatter_single
    DeviceMesh.from_group = Mesh.from_group
