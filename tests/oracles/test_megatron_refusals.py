"""What is refused of Megatron-LM's checkpoints, in one line that names it: pickles that would call
something, models that are none of ours, files that are missing or broken."""

import io
import os
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch

import megazoo
from megazoo.cli.program import run_program
from megazoo.errors import UserError
from megazoo.formats.dcp.unpickling import unpickle
from megazoo.formats.megatron.source import MegatronCheckpoint
from megazoo.programs import convert
from tests.support.megatron import (
    arguments_of,
    megatron_tensors,
    of_megatron,
    twin,
    write_distributed,
    write_legacy,
)


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


@pytest.fixture(scope="module")
def tensors():
    return megatron_tensors(twin("llama"))


def write(root: Path, tensors: dict, legacy: bool = False, **arguments) -> Path:
    writer = write_legacy if legacy else write_distributed
    return writer(root, tensors, arguments_of("llama", **{"vocab_size": 61, **arguments}))


CALLS = {
    "posix.system": (os.system, "touch {}"),
    "builtins.eval": (eval, "open('{}', 'w')"),
    "builtins.exec": (exec, "open('{}', 'w')"),
    "pathlib.Path.touch": (getattr, Path, "touch"),
    "torch.load": (torch.load, "{}"),
    "torch.hub.load": (torch.hub.load, "{}"),
}


@pytest.mark.parametrize("place", ["common.pt", ".metadata", "chunk", "legacy"])
def test_a_pickle_that_calls_anything_is_refused(place, tensors, tmp_path):
    for name in CALLS:
        (tmp_path / name).mkdir()
        check_that_nothing_is_called(name, place, tensors, tmp_path / name)


def check_that_nothing_is_called(name, place, tensors, tmp_path):
    marker = tmp_path / "was-here"
    function, *arguments = CALLS[name]
    filled = [text.format(marker) if isinstance(text, str) else text for text in arguments]
    evil = Calls(function, *filled)
    directory = write(tmp_path / "ckpt", tensors, legacy=place == "legacy")
    if place == ".metadata":
        (directory / ".metadata").write_bytes(pickle.dumps({"x": evil}))
    elif place == "chunk":
        for file in directory.glob("*.distcp"):
            data = file.read_bytes()
            torch.save([evil, torch.zeros(4096)], tmp_path / "evil")  # as large as a chunk
            start = (tmp_path / "evil").read_bytes()
            file.write_bytes(start + data)  # the chunks are no longer where they were
            at = pickle.loads((directory / ".metadata").read_bytes())
            for info in at.storage_data.values():
                if info.relative_path == file.name:
                    info.offset, info.length = 0, len(start)
            (directory / ".metadata").write_bytes(pickle.dumps(at))
    else:
        file = directory / ("mp_rank_00/model_optim_rng.pt" if place == "legacy" else "common.pt")
        torch.save({"args": evil, "model": {}}, file)
    with pytest.raises(UserError, match="is not safe to load: it would call") as refusal:
        megazoo.from_pretrained(tmp_path / "ckpt")
    called = "builtins.getattr" if "Path" in name else name
    assert re.search(rf"would call (__builtin__|{called.rpartition('.')[0]})", str(refusal.value))
    assert not marker.exists()
    assert "\n" not in str(refusal.value)


def test_a_pickle_leaves_nothing_behind():
    """BUILD writes to the attributes of whatever object it is given: here of what stands for a
    function, which the next pickle gets, too."""
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        writes = f"ctorch._utils\n{name}\n}}(Vkept\nI1\nub.".encode()
        assert unpickle(io.BytesIO(writes), Path("a")).kept == 1, name
        reads = f"ctorch._utils\n{name}\n.".encode()
        assert not vars(unpickle(io.BytesIO(reads), Path("a"))), name


def forge(directory: Path, change) -> None:
    """Write what .metadata says after a change of it."""
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_a_chunk_of_more_layers_than_its_bytes_hold_is_refused(tensors, tmp_path):
    """At once: not after it has named each of the layers."""

    def more_layers(metadata):
        chunk = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks[0]
        chunk.sizes = torch.Size([2**20, *chunk.sizes[1:]])

    forge(write(tmp_path, tensors), more_layers)
    with pytest.raises(UserError, match=r"\d+ bytes can't hold \[1048576, 16, 48\] of decoder"):
        MegatronCheckpoint(tmp_path)


def test_a_file_outside_the_directory_is_refused(tensors, tmp_path):
    directory = write(tmp_path, tensors)
    for name in ("..", "", "/dev/zero", "../x"):

        def elsewhere(metadata, name=name):
            for info in metadata.storage_data.values():
                info.relative_path = name

        forge(directory, elsewhere)
        with pytest.raises(UserError, match=r"\.metadata names a file outside its directory"):
            MegatronCheckpoint(tmp_path)


NOT_OURS = [
    ({"num_experts": 8}, "num_experts 8 is not supported"),
    ({"multi_latent_attention": True}, "multi_latent_attention True"),
    ({"mtp_num_layers": 1}, "mtp_num_layers 1"),
    ({"rotary_interleaved": True}, "rotary_interleaved True"),
    ({"rotary_percent": 0.5}, "rotary_percent 0.5 is not supported"),
    ({"squared_relu": True}, "squared_relu True"),
    ({"normalization": "LayerNorm"}, "normalization LayerNorm, position_embedding_type rope"),
    ({"position_embedding_type": "yarn"}, "position_embedding_type yarn"),
    ({"qk_layernorm": True, "add_qkv_bias": True}, "add_qkv_bias True is not supported with"),
    ({"window_size": (4, 0), "add_bias_linear": True}, "add_bias_linear True"),
    ({"window_size": (4, 4)}, "later tokens"),
    ({"window_size": [4]}, "must be two numbers"),
    ({"rotary_seq_len_interpolation_factor": "2"}, "factor is '2', not of the type float"),
    ({"window_attn_skip_freq": 2}, "window_attn_skip_freq 2"),
    ({"vocab_size": 65}, "vocab-size 65 must be from 1 to 64"),
    ({"num_layers": "4"}, "num_layers is '4', not of the type int"),
    ({"num_layers": 3}, "has the unexpected decoder.layers.3"),
    ({"num_layers": 5}, "lacks decoder.layers.4"),
    ({"num_layers": 10**9}, "for 1000000000 layers"),
    ({"hidden_size": 64}, "has shape"),
    ({"num_query_groups": 1}, "linear_qkv.weight has shape"),
    ({"untie_embeddings_and_output_weights": False}, "but the arguments describe them as tied"),
]


def test_models_that_are_none_of_ours_are_refused(tensors, tmp_path):
    for number, (arguments, message) in enumerate(NOT_OURS):
        write(tmp_path / str(number), tensors, **arguments)
        with pytest.raises(UserError, match=message):
            MegatronCheckpoint(tmp_path / str(number))


UNKNOWN = [
    ("decoder.layers.0.mlp.experts.linear_fc1.weight", "it is a mixture of experts"),
    ("decoder.layers.0.mlp.router.weight", "it is a mixture of experts"),
    ("decoder.layers.0.self_attention.linear_kv_down_proj.weight", "multi-latent attention"),
    ("mtp.layers.0.eh_proj.weight", "multi-token prediction"),
    ("decoder.layers.0.mixer.in_proj.weight", "state-space"),
    ("decoder.something.weight", "has the unexpected decoder.something.weight"),
]


@pytest.mark.parametrize("legacy", [True, False])
def test_tensors_that_are_not_known_are_refused(legacy, tensors, tmp_path):
    for number, (name, message) in enumerate(UNKNOWN):
        root, more = tmp_path / str(number), {**tensors, name: torch.ones(2, 2)}
        if legacy:
            write(root, more, legacy=True)
        else:
            write_distributed(root, more, arguments_of("llama", vocab_size=61), stacked=False)
        with pytest.raises(UserError, match=re.escape(message)):
            MegatronCheckpoint(root)


def test_files_that_are_missing_or_broken_are_refused(tensors, tmp_path):
    directory = write(tmp_path, tensors)
    (chunks,) = directory.glob("*.distcp")
    data = chunks.read_bytes()
    chunks.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"distcp has \d+ bytes, but should have \d+"):
        MegatronCheckpoint(tmp_path)
    chunks.unlink()
    with pytest.raises(UserError, match="distcp is missing"):
        MegatronCheckpoint(tmp_path)
    (directory / ".metadata").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"\.metadata can't be read"):
        MegatronCheckpoint(tmp_path)
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UserError, match="has the format 'zarr'"):
        MegatronCheckpoint(tmp_path)
    (directory / ".metadata").unlink()
    with pytest.raises(UserError, match=r"iter_0000100 is not a Megatron-LM checkpoint"):
        MegatronCheckpoint(tmp_path)


def test_an_older_version_is_refused(tensors, tmp_path):
    """Up to version 2, the rows of q, k and v were in another order."""
    (file,) = write(tmp_path, tensors, legacy=True).rglob("model_optim_rng.pt")
    for version in (0, 1.0, "2"):
        with of_megatron():
            held = torch.load(file, weights_only=False)
            torch.save({**held, "checkpoint_version": version}, file)
        with pytest.raises(UserError, match=f"has version {version!r}, whose rows are in another"):
            MegatronCheckpoint(tmp_path)


def test_a_rank_that_is_missing_is_refused(tensors, tmp_path):
    directory = write_legacy(tmp_path, tensors, arguments_of("llama", vocab_size=61), tp=2, pp=2)
    (directory / "mp_rank_00_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(UserError, match=r"lacks the file of rank \(0, 1\) of tp 2 x pp 2"):
        MegatronCheckpoint(tmp_path)


def test_the_tool_tells_mistakes_in_one_line(tensors, tmp_path, monkeypatch, capsys):
    write(tmp_path / "a", tensors)
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (
            ["a", "x", "--to", "hf", "--tp", "2"],
            "--tp belongs to --to shards: omit it with --to hf",
        ),
        (["a", "x", "--iteration", "7"], "iter_0000007 is not a Megatron-LM checkpoint"),
        (["empty", "x"], "empty is not a checkpoint: it has neither latest nor megazoo.json"),
        (["a", "x", "--vocab-size", "99"], "vocab-size 99 must be from 1 to 64"),
        (["a", "x", "--vocab-size", "0"], "vocab-size 0 must be from 1 to 64"),
        (["a", "a"], "choose another"),
    ):
        words = [
            str(tmp_path / word) if word in ("a", "x", "empty") else word for word in arguments
        ]
        monkeypatch.setattr(sys, "argv", ["convert_megatron.py", *words])
        with pytest.raises(SystemExit) as stop:
            run_program(convert.main)
        told = capsys.readouterr().err
        assert stop.value.code == 2
        assert told.count("\n") == 1
        assert message in told
    assert not (tmp_path / "x").exists()
