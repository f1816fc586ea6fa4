"""Checkpoints: the bytes on disk, resuming in any layout, and what is refused."""

import json
import struct
import subprocess
import sys
import zlib

import pytest
import torch
from safetensors.torch import load_file

import megazoo
from megazoo.checkpoint import Checkpoint, load, save, writing
from megazoo.errors import UserError
from megazoo.parallel import ParallelContext
from tests.support.checkpoints import run_steps
from tests.support.sampling import marked_slow
from tests.support.training import layout_name, run_in_layout, tiny_config, worst_relative


def saved(config, steps, directory, layout) -> None:
    """Train some steps, and save the last one."""
    run_steps(layout, config, steps, directory)


def resumed(config, steps, directory, layout) -> list:
    """Go on from a checkpoint; returns the losses and norms."""
    return run_steps(layout, config, steps, None, directory)[0]


def test_stop_and_resume_is_bit_for_bit_with_dropout(ranks, tmp_path):
    layout, config = {"tp": 2, "pp": 2}, tiny_config(dropout=0.1)
    straight = ranks(run_steps, 4, layout, config, 4)
    first = ranks(run_steps, 4, layout, config, 2, tmp_path)
    second = ranks(run_steps, 4, layout, config, 2, None, tmp_path)
    for whole, before, after in zip(straight, first, second, strict=True):
        assert whole[0] == before[0] + after[0]
        assert all(torch.equal(whole[1][name], after[1][name]) for name in whole[1])


RESHARDED = [
    ({"tp": 2, "pp": 2, "dp": 2}, [{"pp": 4}, {"tp": 4, "dp": 2}, {}]),
    ({"pp": 2}, [{"tp": 2, "dp": 2}]),
    ({}, [{"tp": 2, "pp": 2}]),
]


@pytest.mark.parametrize(
    ("before", "afters", "tied"),
    marked_slow(
        [(before, afters, tied) for before, afters in RESHARDED for tied in (True, False)],
        lambda number, _: number not in (3, 5),
        name=lambda case: f"{layout_name(case[0])}, {'tied' if case[2] else 'untied'}",
    ),
)
def test_resume_in_another_layout(ranks, tmp_path, before, afters, tied):
    config = tiny_config(tied)
    expected, _ = run_steps({}, config, 4)
    run_in_layout(ranks, saved, before, config, 2, tmp_path)
    for after in afters:
        history = run_in_layout(ranks, resumed, after, config, 2, tmp_path)[0]
        assert worst_relative(history, expected[2:]) < 1e-5, after


@pytest.mark.parametrize("ffn_size", [pytest.param(50, marks=pytest.mark.slow), 1283])
def test_resume_in_another_layout_with_inner_features_that_tp_does_not_divide(
    ranks, tmp_path, ffn_size
):
    config = tiny_config(hidden_size=40, heads=5, ffn_size=ffn_size)
    expected, _ = run_steps({}, config, 3)
    run_in_layout(ranks, saved, {"tp": 3}, config, 2, tmp_path)
    stored = Checkpoint(tmp_path).manifest["tensors"]["layers.0.mlp.up.weight"]["shard"]
    assert stored == {"dim": 0, "parts": [ffn_size], "units": [128] if ffn_size == 1283 else []}
    for after in ({"tp": 2, "dp": 2}, {}):
        history = run_in_layout(ranks, resumed, after, config, 1, tmp_path)[0]
        assert worst_relative(history, expected[2:]) < 1e-5, after


def test_files_and_manifest_are_as_documented(ranks, tmp_path):
    ranks(run_steps, 4, {"tp": 2, "dp": 2}, tiny_config(), 1, tmp_path)
    step = tmp_path / "step_00000001"
    assert (tmp_path / "latest").read_text().strip() == step.name
    models = {f"model_tp_{t}_pp_0.safetensors" for t in range(2)}
    optimizers = {f"optimizer_tp_{t}_pp_0_dp_{d}.safetensors" for t in range(2) for d in range(2)}
    assert {path.name for path in step.iterdir()} == models | optimizers | {
        "megazoo.json",
        "trainer.json",
    }
    manifest = json.loads((step / "megazoo.json").read_text())
    for name, info in manifest["files"].items():
        data = (step / name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (info["size"], info["crc32"])
    assert manifest["layout"] == {"tp": 2, "pp": 1, "dp": 2}
    assert manifest["family"] == "gpt2"
    assert manifest["config"]["vocab_size"] == 61
    vocabulary = [load_file(step / name)["embedding.weight"] for name in sorted(models)]
    assert [len(part) for part in vocabulary] == [31, 30]
    assert manifest["tensors"]["embedding.weight"]["shape"] == [61, 32]
    # Every tensor is stored once: replicated ones by tp rank 0 only, optimizer states by one
    # replica each.
    assert "norm.weight" in load_file(step / "model_tp_0_pp_0.safetensors")
    assert "norm.weight" not in load_file(step / "model_tp_1_pp_0.safetensors")
    states = [set(load_file(step / f"optimizer_tp_0_pp_0_dp_{d}.safetensors")) for d in range(2)]
    assert states[0]
    assert states[1]
    assert not states[0] & states[1]
    assert {"embedding.weight.exp_avg", "embedding.weight.exp_avg_sq"} <= states[0] | states[1]
    assert json.loads((step / "trainer.json").read_text())["consumed_samples"] == 8


def test_safetensors_bytes_written_by_hand(tmp_path):
    tensors = {
        "a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "b": torch.tensor([5.0], dtype=torch.bfloat16),
    }
    info = writing.write_safetensors(tmp_path / "x", tensors)
    header = {
        "__metadata__": {"format": "pt", "writer": "megazoo"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [1], "data_offsets": [16, 18]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    expected = (
        struct.pack("<Q", len(text)) + text + struct.pack("<4f", 1, 2, 3, 4) + bytes.fromhex("a040")
    )
    assert (tmp_path / "x").read_bytes() == expected
    assert info == {"size": len(expected), "crc32": zlib.crc32(expected)}


def test_what_is_not_a_checkpoint_or_of_a_newer_format_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a checkpoint: no such directory"):
        Checkpoint(tmp_path / "none")
    with pytest.raises(UserError, match=r"it has neither latest nor megazoo\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "megazoo.json").write_text("{}")
    with pytest.raises(UserError, match="is not a manifest"):
        Checkpoint(tmp_path)
    path = save(tmp_path / "run", 1, megazoo.from_config(tiny_config()))
    manifest = json.loads((path / "megazoo.json").read_text())
    (path / "megazoo.json").write_text(json.dumps({**manifest, "format": 3}))
    with pytest.raises(
        UserError, match="has format 3, and this megazoo reads formats 1 and 2: a newer"
    ):
        Checkpoint(path)


def test_a_step_is_found_without_torch(tmp_path):
    path = save(tmp_path, 7, megazoo.from_config(tiny_config()))
    script = """
import sys
from megazoo.checkpoint.places import find_checkpoint
print(find_checkpoint(sys.argv[1]))
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    found = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert found.stdout.strip() == str(path)


def test_loading_reads_only_the_ranks_own_bytes(ranks, tmp_path):
    ranks(run_steps, 2, {"tp": 2}, tiny_config(tied=False), 1, tmp_path)
    for rank in range(4):
        model = megazoo.from_config(
            tiny_config(tied=False), ParallelContext.virtual(tp=2, pp=2, rank=rank)
        )
        checkpoint = Checkpoint(tmp_path)
        load(checkpoint, model)
        assert checkpoint.bytes_read == sum(parameter.nbytes for parameter in model.parameters())
