"""Broken and malicious files: each is refused in one line that names it, and wrong numbers never go
unnoticed."""

import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megazoo
from megazoo.checkpoint import load, save
from megazoo.errors import UserError
from megazoo.formats.hugging_face.directory import HuggingFaceDirectory
from megazoo.formats.source import SavedModel
from tests.support.directories import names
from tests.support.sampling import marked_slow
from tests.support.training import make_batch, tiny_config
from tests.support.transformers_models import gpt2, llama


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training checkpoint with optimizer state and a tokenizer, and what it holds."""
    directory = tmp_path_factory.mktemp("run")
    model = megazoo.from_config(tiny_config(layers=2), seed=3)
    model.sidecar_files = {"tokenizer.json": b'{"version": "1.0"}'}
    optimizer = megazoo.optim.AdamW(model)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    optimizer.step()
    save(directory, 1, model, optimizer, {"consumed_samples": 8})
    return directory, contents(directory)


def contents(directory: Path):
    """All that a load gives: tensors, config, trainer's state, sidecar_files."""
    checkpoint = SavedModel(directory)
    checkpoint.verify()
    model = megazoo.from_config(tiny_config(layers=2), seed=4)
    optimizer = megazoo.optim.AdamW(model)
    trainer = load(checkpoint, model, optimizer)
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [tensor for states in optimizer.state.values() for tensor in states.values()]
    return tensors, (checkpoint.config, trainer, model.sidecar_files, checkpoint.layout)


def attempt(function, directory: Path):
    """What a function of a directory returns, and the line with which it refuses."""
    try:
        return function(directory), ""
    except UserError as error:
        return None, str(error)


def corrupted(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with something done to them, so that they differ."""
    place = chance.randrange(len(data))
    kind = chance.choice(
        ["flip a bit", "flip a bit", "cut", "insert", "zeros", "swap", "first bytes"]
    )
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return data[:place] + chance.randbytes(8) + data[place:]
    start, length = (0, 16) if kind == "first bytes" else (place, chance.randrange(1, 64))
    part = data[start : start + length]
    new = {
        "flip a bit": lambda: bytes([part[0] ^ 1 << chance.randrange(8)]) + part[1:],
        "zeros": lambda: bytes(len(part)),
        "swap": lambda: part[::-1],
        "first bytes": lambda: chance.randbytes(len(part)),
    }[kind]()
    changed = data[:start] + new + data[start + length :]
    return changed if changed != data else corrupted(data, chance)


def damaged_copies(original: Path, files: list, seed: int, count: int, directory: Path):
    """Yield copies of a directory in which one of the files is gone or corrupted, and the file."""
    chance = random.Random(seed)
    for number in range(count):
        copy, file = directory / str(number), chance.choice(files)
        shutil.copytree(original, copy)
        if number % 20 == 0:
            (copy / file).unlink()
        else:
            (copy / file).write_bytes(corrupted((copy / file).read_bytes(), chance))
        yield copy, file
        shutil.rmtree(copy)


COUNTS = [60, 200]


@pytest.mark.parametrize("count", marked_slow(COUNTS, lambda _, count: count == 200))
def test_corruptions_of_a_checkpoint(whole, tmp_path, count):
    directory, expected = whole
    files = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    assert len(files) == 6
    refused = 0
    for copy, file in damaged_copies(directory, files, 1, count, tmp_path):
        found, error = attempt(contents, copy)
        where = f"{copy.name}: {file}: {error}"
        if error:
            refused += 1
            assert str(copy) in error, where
            assert file.name in error or file.name == "megazoo.json", where
        else:
            assert all(map(torch.equal, found[0], expected[0])), where
            assert found[1] == expected[1], where
            assert file.name in ("latest", "megazoo.json"), where  # a space in JSON may change
    assert refused > 0.75 * count


def read_all(directory: Path):
    HuggingFaceDirectory(directory).verify()
    megazoo.from_pretrained(directory)


@pytest.mark.parametrize(
    ("kind", "count"),
    marked_slow(
        [(kind, count) for count in COUNTS for kind in ("safetensors", "index", "bin")],
        lambda _, case: case[1] == 200,
    ),
)
def test_corruptions_of_a_hugging_face_directory(kind, count, tmp_path):
    """There are no checksums: what can be read is read, all else is refused."""
    original = tmp_path / "hf"
    hf = llama(kv_heads=2) if kind == "index" else gpt2()
    hf.save_pretrained(original, max_shard_size="30KB" if kind == "index" else "5GB")
    if kind == "bin":
        torch.save(hf.state_dict(), original / "pytorch_model.bin")
        (original / "model.safetensors").unlink()
    refused = 0
    for copy, file in damaged_copies(original, names(original), 2, count, tmp_path):
        _, error = attempt(read_all, copy)
        refused += bool(error)
        assert not error or str(copy) in error, f"{copy.name}: {file}: {error}"
    assert refused > 0.3 * count


def lying(header: dict, data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict:
    """Return a header of one tensor."""
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}}


LIES = [
    lying(one([2**40], 0, 2**42), b"1234"),
    lying(one([2], 0, 4), b"1234"),
    lying(one([1], 4, 8), b"12345678"),
    lying(one([1], -4, 0), b"1234"),
    lying(one([2**32, 2**32], 0, 0), b""),
    lying(one([1], 0, 4), b"1234", 2**63),
    lying(one([1], 0, 4), b"1234", 5),
    lying(one([1], 0, 4, "X"), b"1234"),
    b"",
    b"1234",
    b"{}" * 100,
]


def test_headers_that_lie(tmp_path):
    llama().save_pretrained(tmp_path)
    for file in LIES:
        (tmp_path / "model.safetensors").write_bytes(file)
        with pytest.raises(UserError, match=r"model\.safetensors can't be read: "):
            HuggingFaceDirectory(tmp_path)


def test_sizes_in_a_config_allocate_nothing(tmp_path):
    """A config may ask for a model of terabytes: its files say no before any memory is taken."""
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shape = r"model\.safetensors: .*has shape \[61, 32\], but in the model .* \[1000000000000, 32\]"
    layers = "has 30 tensors, but its config has 1000000000 layers"
    for change, message in (
        ({"vocab_size": 10**12}, shape),
        ({"num_hidden_layers": 10**9}, layers),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            megazoo.from_pretrained(tmp_path)


def test_a_tensor_that_says_more_than_its_file_holds(tmp_path):
    llama().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.weight"] = torch.zeros(1).expand(32)
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"pytorch_model\.bin can't be read: it does not hold named tensors"
    ):
        HuggingFaceDirectory(tmp_path)


def test_a_file_that_another_process_cuts_short_while_saving_is_found(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    file = tmp_path / "run" / "step_00000001" / "optimizer_tp_0_pp_0_dp_0.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    told = r"optimizer_tp_0_pp_0_dp_0\.safetensors has \d+ bytes, but megazoo.json has \d+"
    with pytest.raises(UserError, match=told):
        SavedModel(tmp_path / "run")
