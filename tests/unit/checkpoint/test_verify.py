"""Checksums are compared while a checkpoint is read: a flipped bit in any file is found, by every
rank, in every layout."""

import random
import shutil
import zlib
from pathlib import Path

import pytest

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint, load, save, verifying
from megazoo.checkpoint.tensor_files import crc32_of
from megazoo.errors import UserError
from megazoo.parallel.collectives import all_gather_objects
from megazoo.programs import convert
from tests.support.directories import names
from tests.support.inference import run_main
from tests.support.sampling import marked_slow
from tests.support.scripts import merge_shards
from tests.support.training import (
    context,
    layout_name,
    make_batch,
    replica_rows,
    run_in_layout,
    tiny_config,
)

CHANGED = "is corrupt: its checksum does not match megazoo.json"


def save_run(directory, layout) -> None:
    """Save a step with optimizer state and a file of a tokenizer."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(layers=2), ctx, seed=3)
    model.sidecar_files = {"vocab.json": b'{"a": 0}\n'}
    optimizer = megazoo.optim.AdamW(model)
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets)
    optimizer.step()
    save(directory, 1, model, optimizer, {"consumed_samples": 8})


def flip(directory: Path, kind: str) -> Path:
    """Flip a bit of the last file of a kind, which can be read as before."""
    file = sorted((directory / "step_00000001").glob(f"{kind}*"))[-1]
    data = bytearray(file.read_bytes())
    place = {"trainer.json": data.find(b"8"), "vocab.json": data.find(b"a")}.get(
        kind, len(data) - 3
    )
    data[place] ^= 1
    file.write_bytes(data)
    return file


def error_of(function) -> tuple[str, int] | None:
    try:
        function()
    except UserError as error:
        return str(error), error.exit_code
    return None


def load_run(directory, layout) -> list:
    """What loading all, loading the weights, and both without checking are refused with; one job
    does it all, and goes on after each."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(layers=2), ctx)
    optimizer = megazoo.optim.AdamW(model)
    errors = [
        error_of(lambda: load(Checkpoint(directory), model, optimizer)),
        error_of(lambda: megazoo.from_pretrained(directory, ctx)),
        error_of(lambda: load(Checkpoint(directory, verify=False), model, optimizer)),
        error_of(lambda: megazoo.from_parallelized(directory, ctx, verify=False)),
    ]
    assert all_gather_objects(ctx.rank, ctx) == list(range(ctx.world_size))
    return errors


@pytest.mark.parametrize(
    ("saved", "loaded"),
    marked_slow(
        [({}, dict(tp=2)), (dict(tp=2), {}), ({}, dict(pp=2)), (dict(dp=2), dict(dp=2))],
        lambda number, _: number < 2,
        name=lambda case: " to ".join(map(layout_name, case)),
    ),
)
def test_a_flipped_bit_is_found_by_every_rank(ranks, tmp_path, saved, loaded):
    run_in_layout(ranks, save_run, saved, tmp_path / "whole")
    for kind in ("model", "optimizer", "trainer.json", "vocab.json"):
        shutil.copytree(tmp_path / "whole", tmp_path / kind)
        changed = (f"{flip(tmp_path / kind, kind)} {CHANGED}", 1)
        weights = changed if kind in ("model", "vocab.json") else None
        for errors in run_in_layout(ranks, load_run, loaded, tmp_path / kind):
            assert errors == [changed, weights, None, None], kind


def broken_for_one_rank(directory, layout) -> tuple[str, int] | None:
    """What loading is refused with where one rank alone can't read, though nothing has changed."""
    ctx, checkpoint = context(**layout), Checkpoint(directory)
    model = megazoo.from_config(tiny_config(layers=2), ctx)
    if ctx.rank == 1:
        checkpoint.files.directory = directory / "gone"
    return error_of(lambda: load(checkpoint, model))


def test_reading_that_fails_on_one_rank_is_told_by_all(ranks, tmp_path):
    run_in_layout(ranks, save_run, dict(), tmp_path)
    first, second = run_in_layout(ranks, broken_for_one_rank, dict(tp=2), tmp_path)
    assert first == second
    assert "gone/model_tp_0_pp_0.safetensors can't be read" in first[0]


def bytes_summed_up(directory, layout) -> dict[str, int]:
    """The bytes of each file that a rank sums up while it loads."""
    sizes: dict[str, int] = {}

    def counted(path, **options):
        sizes[path.name] = sizes.get(path.name, 0) + path.stat().st_size
        return crc32_of(path, **options)

    verifying.crc32_of = counted
    try:
        load(Checkpoint(directory), megazoo.from_config(tiny_config(layers=2), context(**layout)))
    finally:
        verifying.crc32_of = crc32_of
    return sizes


def test_a_file_is_summed_up_once_by_those_that_read_it(ranks, tmp_path):
    run_in_layout(ranks, save_run, dict(tp=2), tmp_path)
    sizes = Checkpoint(tmp_path).file_sizes()
    shares = run_in_layout(ranks, bytes_summed_up, dict(tp=2, dp=2), tmp_path)
    for file in ("model_tp_0_pp_0.safetensors", "model_tp_1_pp_0.safetensors"):
        assert sum(share.get(file, 0) for share in shares) == sizes[file]
    assert {file for share in shares for file in share} == set(sizes) & {
        "model_tp_0_pp_0.safetensors",
        "model_tp_1_pp_0.safetensors",
    }
    # tp rank 1 reads nothing of its own from the file of tp rank 0 but what is not cut
    assert "model_tp_1_pp_0.safetensors" not in shares[0]


def test_checksums_are_zlibs(tmp_path):
    file, chance, seen = tmp_path / "file", random.Random(0), []
    for size in (0, 1, 1000, 3 << 20 | 17):
        file.write_bytes(data := chance.randbytes(size))
        seen.clear()
        assert crc32_of(file, seen.append) == zlib.crc32(data)
        assert sum(seen) == size


def test_files_are_dealt_out_evenly_to_those_that_read_them():
    sizes = {"a": 30, "b": 40, "c": 0, "d": 9, "e": 20}
    shares = verifying.dealt_out(sizes, [["a", "c"], ["a", "b", "e"], ["b", "e"], []])
    assert shares == [["a", "c"], ["b"], ["e"], []]
    replicas = verifying.dealt_out(dict.fromkeys("abcdef", 1), [list("abcdef")] * 3)
    assert [len(share) for share in replicas] == [2, 2, 2]
    assert sorted(file for share in replicas for file in share) == list("abcdef")


def test_tools_leave_no_output_of_a_file_that_has_changed(tmp_path, monkeypatch, capsys):
    output = tmp_path / "output"
    for kind in ("optimizer", "model"):
        save_run(tmp_path / "run", {})
        changed = f"{flip(tmp_path / 'run', kind)} {CHANGED}"
        for tool in (convert, merge_shards):
            fails = kind == "model" or tool is convert  # a merge reads no optimizer state
            code, _, errors = run_main(tool, monkeypatch, capsys, tmp_path / "run", output)
            assert (code, errors.splitlines()[-1:]) == (
                (1, [f"{Path(tool.__file__).name}: error: {changed}"]) if fails else (0, [])
            )
            assert names(tmp_path) == (["run"] if fails else ["output", "run"])
            options = "--no-verify", "--overwrite"
            assert run_main(tool, monkeypatch, capsys, tmp_path / "run", output, *options)[0] == 0
            shutil.rmtree(output)
        shutil.rmtree(tmp_path / "run")


def test_the_training_program_refuses_what_has_changed(tmp_path, monkeypatch, capsys):
    arguments = "--device cpu --layers 2 --hidden-size 32 --heads 4 --seq-length 16".split()
    arguments += ["--global-batch-size=2", "--micro-batch-size=2", "--eval-steps=0", "--mock-data"]
    run = tmp_path / "run"
    assert run_main(pretrain, monkeypatch, capsys, *arguments, "--steps=1", "--save", run)[0] == 0
    changed = f"{flip(run, 'optimizer')} {CHANGED}"
    resume = ["--load", run, "--steps", "2", "--device", "cpu"]
    code, _, errors = run_main(pretrain, monkeypatch, capsys, *resume)
    assert (code, errors) == (1, f"pretrain_gpt.py: error: {changed}\n")
    assert run_main(pretrain, monkeypatch, capsys, *resume, "--no-verify")[0] == 0
