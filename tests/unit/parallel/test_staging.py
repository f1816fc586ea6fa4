"""Pinned buffers between a GPU's tensors and this process, with stand-ins for both: a device that
makes each copy at the last moment, when somebody waits for it."""

import weakref
from collections import deque
from typing import ClassVar

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, copies, load, save, saving
from megazoo.checkpoint.copies import Copies
from megazoo.checkpoint.writing import write_safetensors
from megazoo.models.gpt2 import GPT2Config
from megazoo.parallel import ParallelContext, Shard, staging
from megazoo.parallel.module import TILE, initialize
from megazoo.parallel.shard import ParameterSpec
from megazoo.parallel.staging import Upload

CONFIG = GPT2Config(vocab_size=61, max_positions=24, hidden_size=32, layers=2, heads=4)


class Late(torch.Tensor):
    """A tensor of the CPU that says it is a GPU's: a copy that nobody waits for is only queued."""

    is_cuda = True
    queue: ClassVar[deque] = deque()  # (number, destination, values) of the copies not yet made
    queued = waits = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.copy_:
            destination, values = (tensor.as_subclass(torch.Tensor) for tensor in args[:2])
            if kwargs.get("non_blocking"):
                Late.queued += 1
                cls.queue.append((Late.queued, destination, values))
                return args[0]
            cls.make(Late.queued)
            destination.copy_(values)
            return args[0]
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def make(cls, last: int) -> None:
        """Make the copies up to number `last`."""
        while cls.queue and cls.queue[0][0] <= last:
            _, destination, values = cls.queue.popleft()
            destination.copy_(values)


class Event:
    """An event, or a stream, of that device."""

    def __init__(self, last: int | None = None):
        self.last = last

    def record(self, _) -> None:
        self.last = Late.queued

    def synchronize(self) -> None:
        Late.waits += 1
        Late.make(self.last)


class Pinned:
    """Hands out memory full of nonsense; `sizes` of all of it, and `alive`, the bytes in use."""

    def __init__(self):
        self.sizes, self.alive = [], 0

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.sizes.append(nbytes)
        self.alive += nbytes
        memory = torch.full((nbytes,), 0x7F, dtype=torch.uint8)
        weakref.finalize(memory, self._gone, nbytes)
        return memory

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


@pytest.fixture
def memory(monkeypatch):
    Late.queue.clear()
    Late.queued = Late.waits = 0
    memory = Pinned()
    monkeypatch.setattr(staging, "pinned", memory)
    monkeypatch.setattr(copies, "pinned", memory)
    monkeypatch.setattr("megazoo.checkpoint.writing.pinned", memory)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 512)
    monkeypatch.setattr(copies, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Event(Late.queued))
    return memory


def on_device(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype).as_subclass(Late)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The values that a tensor has when the device has done all its work."""
    Late.make(Late.queued)
    return tensor.as_subclass(torch.Tensor)


# Towards the device


@pytest.mark.parametrize(
    ("shape", "unit", "first", "dtype"),
    [
        ((100, 16), 1, 0, torch.float32),
        ((100, 16), 4, 3, torch.bfloat16),
        ((2000,), 1, 0, torch.bfloat16),
        ((3, 500), 1, 0, torch.float32),  # a row is longer than a buffer
        ((40, 500), 7, 5, torch.float32),
        ((0, 16), 1, 0, torch.float32),
        ((5, 0), 1, 0, torch.float32),
    ],
    ids=str,
)
def test_a_buffer_is_filled_again_only_after_its_copy(memory, shape, unit, first, dtype):
    values = torch.randn(shape).to(dtype)
    upload, destination, seen = Upload(), on_device(*shape, dtype=dtype), 0
    for start, rows in upload.rows(destination, unit, first):
        assert start == seen
        assert not start or (first + start) % unit == 0
        assert len(rows) <= unit or rows.nbytes <= staging.BUFFER_BYTES
        rows.copy_(values[start : start + len(rows)])
        seen += len(rows)
    assert seen == shape[0]
    assert torch.equal(arrived(destination), values)
    assert len(memory.sizes) <= 2


def test_columns_of_several_tensors_go_through_the_same_two_buffers(memory):
    upload = Upload()
    wholes = [on_device(50, 40), on_device(9, 40, dtype=torch.bfloat16), on_device(70, 40)]
    values = [torch.randn(len(whole), 10).to(whole.dtype) for whole in wholes]
    for whole, mine in zip(wholes, values, strict=True):
        for start, rows in upload.rows(whole[:, 20:30]):
            rows.copy_(mine[start : start + len(rows)])
    for whole, mine in zip(wholes, values, strict=True):
        assert torch.equal(arrived(whole)[:, 20:30], mine)
        assert not arrived(whole)[:, :20].any()
    assert memory.sizes == [staging.BUFFER_BYTES] * 2


def test_a_tensor_of_the_cpu_is_filled_in_place(memory):
    tensor = torch.zeros(4, 8)
    ((start, rows),) = Upload().rows(tensor[:, 2:4], unit=3, first=1)
    rows.fill_(1)
    assert start == 0
    assert tensor[:, 2:4].all()
    assert not memory.sizes


@pytest.mark.parametrize(
    ("shape", "shard", "dtype"),
    [
        ((700, 300), None, torch.bfloat16),
        ((700, 300), Shard(0, (700,)), torch.float32),
        ((300, 700), Shard(1, (700,)), torch.bfloat16),
        ((900, 130), Shard(0, (500, 200, 200), (100, 100, 100)), torch.float32),
        ((701,), Shard(0, (701,)), torch.bfloat16),
    ],
    ids=str,
)
def test_initial_values_of_a_gpu_are_those_of_the_cpu(memory, monkeypatch, shape, shard, dtype):
    monkeypatch.setattr(staging, "BUFFER_BYTES", TILE * shape[-1] * 4)
    spec, upload = ParameterSpec(shape, shard, mean=0.5, std=0.02), Upload()
    for rank in range(2):
        ctx = ParallelContext.virtual(tp=2, rank=rank)
        local = spec.local_shape(ctx.place)
        ours, theirs = torch.zeros(local, dtype=dtype), on_device(*local, dtype=dtype)
        initialize(ours, spec, ctx, 3)
        initialize(theirs, spec, ctx, 3, upload)
        assert torch.equal(arrived(theirs), ours)
    assert len(memory.sizes) == 2


@pytest.fixture
def step(tmp_path):
    """A checkpoint of a model and its optimizer after a step."""
    model = megazoo.from_config(CONFIG, seed=3)
    optimizer = megazoo.optim.AdamW(model)
    ids = torch.randint(0, 61, (2, 16))
    model.train_batch(ids, labels=ids)
    optimizer.step()
    return save(tmp_path, 1, model, optimizer)


def test_what_is_read_arrives_on_the_device(memory, step):
    checkpoint, model = Checkpoint(step), megazoo.from_config(CONFIG)
    load(checkpoint, model)
    for tp in (1, 2):
        ctx = ParallelContext.virtual(tp=tp, rank=tp - 1)
        memory.sizes.clear()
        checkpoint = Checkpoint(step)
        for entry in model.entries():
            shape = entry.spec.local_shape(ctx.place)
            ours, theirs = torch.zeros(shape), on_device(*shape)
            checkpoint.read_into(entry.name, ours, entry.spec, ctx)
            checkpoint.read_into(entry.name, theirs, entry.spec, ctx)
            assert ours.any() or entry.name.endswith("bias")
            assert torch.equal(arrived(theirs), ours)
        assert memory.sizes == [512, 512]


def test_a_range_of_a_state_arrives_on_the_device(memory, step):
    checkpoint, model = Checkpoint(step), megazoo.from_config(CONFIG)
    entry = next(entry for entry in model.entries() if entry.name == "embedding.weight")
    name, whole = "embedding.weight.exp_avg", torch.zeros(61, 32)
    checkpoint.read_into(name, whole, entry.spec, model.ctx)
    for first, last in ((0, 61 * 32), (5 * 32, 9 * 32), (7, 7), (64, 64), (64, 1007), (33, 96)):
        ours, theirs = torch.zeros(last - first), on_device(last - first)
        for part in (ours, theirs):
            checkpoint.read_range(name, part, (first, last), entry, model.ctx)
        assert torch.equal(ours, whole.view(-1)[first:last]), (first, last)
        assert torch.equal(arrived(theirs), ours), (first, last)


# From the device


def some_tensors() -> dict[str, torch.Tensor]:
    """Of several dtypes and shapes: shorter and longer than a block, and of no elements."""
    return {
        "half": torch.randn(7, 3).to(torch.bfloat16),  # so that what follows is out of line
        "long": torch.randn(60, 33),
        "vector": torch.randn(1500),
        "none": torch.zeros(0, 5),
        "columns": torch.randn(20, 30)[:, 10:15],
    }


def test_a_file_of_a_gpus_tensors_is_that_of_the_cpus(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("megazoo.checkpoint.writing.PIECE_BYTES", 8192)
    tensors = some_tensors()
    theirs = {name: tensor.as_subclass(Late) for name, tensor in tensors.items()}
    assert write_safetensors(tmp_path / "cpu", tensors) == write_safetensors(
        tmp_path / "gpu", theirs
    )
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "gpu").read_bytes()
    assert memory.sizes == [8192]


def contents_of(tensors: dict[str, torch.Tensor]) -> saving.StepContents:
    files = {"file": {name: (None, tensor) for name, tensor in tensors.items()}}
    return saving.StepContents(ParallelContext(), "gpt2", CONFIG, files, {}, {}, {}, {}, set())


@pytest.mark.parametrize("piece", [300, 8192])  # shorter and longer than a block
def test_a_copied_step_is_waited_for_once_and_its_memory_used_again(
    memory, tmp_path, monkeypatch, piece
):
    monkeypatch.setattr("megazoo.checkpoint.writing.PIECE_BYTES", piece)
    pool = Copies()
    for number in range(3):
        tensors = {**some_tensors(), "of the CPU": torch.randn(9)}
        theirs = {name: tensor.as_subclass(Late) for name, tensor in tensors.items()}
        theirs["of the CPU"] = tensors["of the CPU"].clone()
        expected = write_safetensors(tmp_path / "cpu", tensors)
        Late.waits = 0
        pool.forget()
        copied = contents_of(theirs).copied(pool)
        assert Late.waits == 1
        for tensor in theirs.values():  # training goes on
            tensor.as_subclass(torch.Tensor).fill_(number)
        assert not Late.queue
        values = {name: tensor for name, (_, tensor) in copied.files["file"].items()}
        assert write_safetensors(tmp_path / "gpu", values) == expected
    total = sum(tensor.nbytes for tensor in some_tensors().values())
    assert memory.sizes == [1024] * -(-total // 1024)
    del copied, values, pool
    assert not memory.alive


def test_a_step_of_the_cpu_is_copied_without_a_device(memory):
    tensors = some_tensors()
    copied = contents_of(tensors).copied(Copies())
    for name, (_, copy) in copied.files["file"].items():
        assert torch.equal(copy, tensors[name])
        assert not copy.numel() or copy.data_ptr() != tensors[name].data_ptr()
    assert not memory.sizes
    assert not Late.waits
