"""Checkpoints of torch.distributed.checkpoint that megazoo writes: FSDP2 goes on from them as
megazoo does, and they hold every tensor to the bit."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import writing
from megazoo.errors import UserError
from megazoo.formats.dcp import writing as dcp_writing
from megazoo.formats.dcp.export import write_dcp
from megazoo.formats.dcp.source import DistributedCheckpoint
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.formats.resharding import write_shards
from megazoo.models.pretrained import open_source
from megazoo.programs import convert
from tests.support.dcp import (
    HOW,
    STEPS,
    go_on,
    go_on_with_fsdp2,
    plain_batch,
    small_llama,
    state_of,
    tensors_of,
)
from tests.support.families import TWINS, twin
from tests.support.pretraining import losses
from tests.support.sampling import marked_slow
from tests.support.training import (
    PeakMemory,
    context,
    give_back_freed_memory,
    in_fresh_processes,
    replica_rows,
    run_in_layout,
)
from tests.support.transformers_models import deep_gpt2, deep_llama, deep_mpt

SETTINGS = {"lr": HOW["lr"], "beta1": 0.9, "beta2": 0.95, "weight_decay": HOW["weight_decay"]}


def train_before(directory: Path, run: Path, dtype: str, layout: dict) -> None:
    """Train a Hugging Face directory for some steps, and save the run."""
    ctx = context(**layout)
    model = megazoo.from_pretrained(directory, ctx, dtype=dtype)
    optimizer = megazoo.optim.AdamW(model, **HOW, clip_grad=0)
    for step in range(STEPS[0]):
        ids, targets = (replica_rows(tensor, ctx) for tensor in plain_batch(step))
        model.train_batch(ids, targets=targets, num_microbatches=2)
        optimizer.step()
    megazoo.checkpoint.save(run, STEPS[0], model, optimizer, {"settings": SETTINGS})


def saved_run(ranks, directory: Path, dtype: str, layout: dict, **fields) -> Path:
    small_llama(**fields).save_pretrained(directory / "hf")
    run_in_layout(ranks, train_before, layout, directory / "hf", directory / "run", dtype)
    return directory / "run"


CASES = [
    ({"tp": 2}, "bfloat16", False, 2, {}),
    ({"pp": 2}, "bfloat16", True, 1, {"tie_word_embeddings": True}),
    ({"dp": 2, "zero": 3}, "float32", False, 2, {"tie_word_embeddings": True}),
    ({"tp": 2, "pp": 2}, "bfloat16", True, 2, {}),
]


@pytest.mark.parametrize(
    ("layout", "dtype", "flat", "groups", "fields"),
    marked_slow(CASES, lambda number, _: number > 1),
    ids=str,
)
def test_fsdp2_goes_on_as_megazoo_does(ranks, tmp_path, layout, dtype, flat, groups, fields):
    run = saved_run(ranks, tmp_path, dtype, layout, **fields)
    convert.main([str(run), str(tmp_path / "dcp"), "--to", "dcp"])
    expected = go_on(run, tmp_path / "ours", {}, norms_decay=groups == 1)
    losses = ranks(go_on_with_fsdp2, 2, tmp_path / "dcp", tmp_path / "dcp2", flat, groups)[0]
    assert losses == pytest.approx(expected, abs=1e-6)
    (tmp_path / "dcp2" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    ours, theirs = (tensors_of(open_source(tmp_path / name)) for name in ("ours", "dcp2"))
    assert theirs.keys() <= ours.keys()
    for name, value in theirs.items():
        worst = (ours[name] - value).abs().max()
        assert worst < 1e-6, f"{name}: {worst}"


ROUND_TRIPS = {
    "gpt2, tied": deep_gpt2,
    "mixtral": lambda: twin("mixtral"),
    "pythia": lambda: twin("pythia"),
    "gpt2": lambda: deep_gpt2(tie_word_embeddings=False),
    "llama": lambda: deep_llama(kv_heads=2),
    "mpt": deep_mpt,
    **{name: lambda name=name: twin(name) for name in TWINS},
}


@pytest.mark.parametrize("name", marked_slow([*ROUND_TRIPS], lambda number, _: number > 1))
def test_torch_and_megazoo_read_every_bit(name, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "PIECE_BYTES", 1000)  # several chunks of a tensor
    hf = ROUND_TRIPS[name]()
    hf.save_pretrained(tmp_path / "hf")
    convert.main([str(tmp_path / "hf"), str(tmp_path / "dcp"), "--to", "dcp"])
    expected = hf.state_dict()
    loaded = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load({"model": loaded}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())
    write_hugging_face(open_source(tmp_path / "dcp"), tmp_path / "again")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("hf", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.fixture
def run(tmp_path):
    """A run after some steps in bfloat16, of one process."""
    small_llama().save_pretrained(tmp_path / "hf")
    train_before(tmp_path / "hf", tmp_path / "run", "bfloat16", {})
    return tmp_path / "run"


def test_shards_come_back_with_their_states(run, tmp_path, capsys):
    write_shards(open_source(run), tmp_path / "tp2", 2, 1)
    convert.main([str(tmp_path / "tp2"), str(tmp_path / "dcp"), "--to", "dcp"])
    assert "Llama, weights and optimizer state of tp2; torch." in capsys.readouterr().out
    convert.main([str(tmp_path / "dcp"), str(tmp_path / "shards"), "--pp", "2"])
    before, after = (tensors_of(open_source(each)) for each in (run, tmp_path / "shards"))
    names = {name.removesuffix(".master") for name in before}
    assert after.keys() == names
    for name in names:
        assert torch.equal(after[name], before.get(f"{name}.master", before[name])), name
    assert open_source(tmp_path / "shards").trainer["optimizer_steps"] == STEPS[0]
    (tmp_path / "dcp" / "notes").touch()
    words = [str(run), str(tmp_path / "dcp"), "--to", "dcp", "--dtype", "bfloat16"]
    with pytest.raises(UserError, match="holds notes, which megazoo did not write"):
        convert.main([*words, "--overwrite"])
    (tmp_path / "dcp" / "notes").unlink()
    convert.main([*words, "--overwrite"])
    source = open_source(tmp_path / "dcp")
    assert all(source.dtype_of(name) == torch.bfloat16 for name in source.specs)
    after = tensors_of(source)
    assert all(torch.equal(after[name], before[name]) for name in source.specs)


def test_torch_takes_the_settings_of_the_optimizer(run, tmp_path):
    write_dcp(open_source(run), tmp_path / "dcp")
    for count in (1, 2):
        hf = small_llama()
        matrices = [p for p in hf.parameters() if p.ndim > 1]
        norms = [p for p in hf.parameters() if p.ndim == 1]
        groups = [norms, matrices] if count == 2 else [[*norms, *matrices]]
        optimizer = torch.optim.AdamW([{"params": each} for each in groups], lr=0.5)
        weights, states = get_state_dict(hf, optimizer)
        dcp.load(
            {"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "dcp", no_dist=True
        )
        set_state_dict(hf, optimizer, model_state_dict=weights, optim_state_dict=states)
        found = optimizer.param_groups
        assert [group["weight_decay"] for group in found] == ([0.0, 0.1] if count == 2 else [0.1])
        assert {(group["lr"], group["betas"]) for group in found} == {(1e-3, (0.9, 0.95))}
        assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS[0]}


def test_what_torch_can_not_continue_is_refused(tmp_path):
    small_llama().save_pretrained(tmp_path / "hf")
    model = megazoo.from_pretrained(tmp_path / "hf", context())
    optimizer = megazoo.optim.Muon(model)
    megazoo.checkpoint.save(tmp_path / "run", 1, model, optimizer)
    with pytest.raises(UserError, match=r"has Muon's momentum of .*: write only the weights, with"):
        convert.main([str(tmp_path / "run"), str(tmp_path / "dcp"), "--to", "dcp"])
    assert not (tmp_path / "dcp").exists()


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    class Full(io.RawIOBase):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    small_llama().save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(dcp_writing, "open", lambda *_: Full(), raising=False)
    with pytest.raises(UserError, match=r"can't write .*dcp: No space left on device$"):
        convert.main([str(tmp_path / "hf"), str(tmp_path / "dcp"), "--to", "dcp"])
    assert {path.name for path in tmp_path.iterdir()} <= {"hf", ".dcp.lock"}


def write_large(directory: Path) -> int:
    """Return the peak of memory above the start, of writing a checkpoint."""
    give_back_freed_memory()
    with PeakMemory() as memory:
        write_dcp(open_source(directory), directory.parent / "dcp")
    return memory.above


LARGE = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192}


@pytest.mark.parametrize("layers", marked_slow([6, 24], lambda _, layers: layers > 6))
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_memory_does_not_grow_with_the_model(layers, tmp_path):
    hf = small_llama(**LARGE, num_hidden_layers=layers)
    hf.save_pretrained(tmp_path / "hf")
    (peak,) = in_fresh_processes(write_large, tmp_path / "hf", timeout=600)
    print(f"{sum(p.nbytes for p in hf.parameters()) / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert peak < 96 << 20 < sum(parameter.nbytes for parameter in hf.parameters())


RUN = [
    *"--seq-length 16 --global-batch-size 4 --micro-batch-size 1 --eval-steps 0 --lr 1e-3".split(),
    *"--hidden-size 32 --layers 2 --lr-decay-steps 4 --mock-data --device cpu".split(),
]
LLAMA = "--model llama --dtype float32"
RUNS = [
    (LLAMA, "--tp 2", "--pp 2 --async-save"),
    ("--model gpt2 --dtype bfloat16", "--dp 2 --zero 1 --async-save", "--dp 2"),
    (LLAMA, "--dp 2 --zero 3", "--tp 2"),
    ("--model pythia --dtype float32", "--tp 2 --pp 2", "--dp 2 --zero 2"),
    ("--model mixtral --dtype float32", "--dp 2 --ep 2 --tp 2", "--tp 2"),
]


@pytest.mark.parametrize(
    ("model", "first", "second"), marked_slow(RUNS, lambda number, _: number > 0), ids=str
)
def test_a_run_resumes_in_another_layout(model, first, second, ranks, tmp_path):
    words = [*RUN, *model.split()]

    def start(layout: str, run: str, *more: str) -> None:
        arguments = [*words, *layout.split(), "--save", str(tmp_path / run), *more]
        world = 4 if layout.count(" 2") - layout.count("zero 2") - layout.count("ep 2") > 1 else 2
        ranks(pretrain.main, world, arguments)

    start(first, "whole", "--steps", "4", "--metrics", str(tmp_path / "whole.jsonl"))
    dcp_run = ["--save-format", "dcp", "--save-interval", "1", "--keep-last", "1"]
    start(first, "run", "--steps", "2", *dcp_run, "--metrics", str(tmp_path / "run.jsonl"))
    resume = ["--load", str(tmp_path / "run"), "--metrics", str(tmp_path / "run.jsonl")]
    start(second, "run", "--steps", "4", *dcp_run, *resume)
    expected, found = (losses(tmp_path / f"{name}.jsonl") for name in ("whole", "run"))
    assert len(found) == 4
    tolerance = 2e-2 if "bfloat16" in model else 1e-5
    assert found == pytest.approx(expected, abs=tolerance)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names - {".lock"} == {"latest", "step_00000004"}
    whole, source = (open_source(tmp_path / name) for name in ("whole", "run"))
    assert isinstance(source, DistributedCheckpoint)
    assert source.config == whole.config
    before, after = tensors_of(whole), tensors_of(source)
    assert after.keys() == {name.removesuffix(".master") for name in before}
    for name, value in after.items():
        worst = (before.get(f"{name}.master", before[name]) - value).abs().max()
        assert worst < tolerance, name
    convert.main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"])
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32")
    hf = transformers.AutoModelForCausalLM.from_config(expected.config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(hf.parameters(), weight_decay=0.5)
    weights, states = state_of(hf, optimizer, flat=True)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=source.path, no_dist=True)
    assert all(torch.equal(weights[key], value) for key, value in expected.state_dict().items())
    assert {value for key, value in states.items() if key.endswith(".weight_decay")} == {0.1, 0.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora-rank 2", "--save-format dcp can't hold adapters: use --save-format shards"),
        ("--optimizer muon", "--save-format dcp can't hold the momentum of Muon: use"),
        ("--ema 0.9", "--save-format dcp can't hold the averages of --ema: use"),
    ],
)
def test_runs_that_the_format_can_not_hold_are_refused(words, message, tmp_path):
    arguments = [*RUN, *LLAMA.split(), "--steps", "1", *words.split()]
    with pytest.raises(UserError, match=message):
        pretrain.main([*arguments, "--save-format", "dcp", "--save", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
