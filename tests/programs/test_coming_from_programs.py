"""docs/coming_from.md: scripts and runs that its tables speak of, started whole."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint
from megazoo.programs import preprocess_data
from tests.support.inference import run_main
from tests.support.programs import python

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch, megazoo
ctx = megazoo.ParallelContext.from_torch(tensor_parallel_size=2)
ids = torch.arange(16).view(2, 8)
print("loss", megazoo.from_config("gpt2-tiny", ctx).train_batch(ids, labels=ids).item(), flush=True)
"""


def start(directory: Path, *words) -> str:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"PYTHONPATH": str(ROOT), "PET_STANDALONE": "1"}
    done = subprocess.run(
        [python(), *map(str, words)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "launcher",
    ["torch.distributed.launch", pytest.param("torch.distributed.run", marks=pytest.mark.slow)],
)
def test_a_script_starts(launcher, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    told = re.findall(
        "loss (.*)", start(tmp_path, "-m", launcher, "--nproc_per_node", "2", "script.py")
    )
    ids = torch.arange(16).view(2, 8)
    expected = megazoo.from_config("gpt2-tiny").train_batch(ids, labels=ids).item()
    assert [float(loss) for loss in told] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.slow
def test_the_training_program_starts_by_the_older_launcher(tmp_path):
    launcher = "-m torch.distributed.launch --nproc_per_node 2".split()
    job = "--tp 2 --hidden-size 16 --heads 2 --layers 1 --seq-length 16 --device cpu "
    job += "--steps 1 --eval-steps 0"
    told = start(tmp_path, *launcher, ROOT / "pretrain_gpt.py", *job.split())
    assert "tp 2 x pp 1 x dp 1" in told
    assert "step 1/1" in told


def test_an_error_ends_with_the_command_that_runs(monkeypatch, capsys):
    """Only the first line has the name of the program. The note on torchrun needs several ranks."""
    foreign = "--train-iters 5 --use-flash-attn --dtype bfloat16"
    for more, equivalent in (
        ("--tensor-model-parallel-size 2", "--tp 2"),
        ("--num-layers 2", "--layers 2"),
    ):
        code, out, error = run_main(pretrain, monkeypatch, capsys, *foreign.split(), *more.split())
        first, *hints, last = error.splitlines()
        assert (code, out) == (2, "")
        assert first.endswith("error: 3 unknown flags (--help-all lists all)")
        note = "  On one machine, this command starts its ranks itself, without torchrun."
        if "tp" in equivalent:
            assert last == note
            last = hints.pop()
        assert note not in error.splitlines() or "tp" in equivalent
        assert last.startswith("  use: ")
        assert last.endswith(f" --steps 5 --dtype bfloat16 {equivalent}")
        assert [hint.split(":")[0].strip() for hint in hints] == [
            "--train-iters",
            "--use-flash-attn",
            more.split()[0],
        ]


@pytest.mark.slow
def test_a_run_with_the_settings_of_the_tables(ranks, tmp_path, monkeypatch):
    """Megatron's data flags, and most of the others, at tp 2 x pp 2; then --finetune's equal."""
    monkeypatch.chdir(tmp_path)
    text = {"text": "a text of some words " * 4}
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text((json.dumps(text) + "\n") * 300)
        preprocess = f"--input {name}.jsonl --output-prefix out/{name} --json-keys text "
        preprocess += "--append-eod --workers 2"
        preprocess_data.main([*preprocess.split(), "--tokenizer", "byte"])
    data = ["--data", "0.7", "out/a_text_document", "0.3", "out/b_text_document"]
    data = [str(tmp_path / word) if word.startswith("out") else word for word in data]
    sizes = (
        "--preset llama-tiny --layers 4 --hidden-size 32 --ffn-size 64 --heads 8 --kv-heads 4 "
        "--seq-length 16 --max-positions 32 --tie-embeddings False --micro-batch-size 2 "
        "--global-batch-size 8 --seed 5 --device cpu"
    )
    how = (
        "--tp 2 --pp 2 --sequence-parallel --zero 1 --offload-optimizer --dtype bfloat16 "
        "--timeout 600 --recompute full --recompute-interval 2 --stage-layers 1,3 "
        "--separate-documents --tokenizer byte --lr 1e-3 --min-lr 1e-4 --lr-schedule wsd "
        "--lr-decay-steps 4 --warmup-steps 1 --weight-decay 0.1 --clip-grad 1.0 --beta1 0.9 "
        "--beta2 0.95 --split 98,1,1 --eval-interval 2 --eval-steps 1 --log-interval 1"
    )
    outputs = {name: str(tmp_path / name) for name in ("save", "metrics", "tensorboard", "profile")}
    told = [word for name, path in outputs.items() for word in (f"--{name}", path)]
    told += ["--profile-steps", "1", "2", "--save-interval", "2", "--async-save"]
    ranks(pretrain.main, 4, [*sizes.split(), *how.split(), *data, *told, "--steps", "4"])
    assert (tmp_path / "profile" / "rank_3.json.gz").is_file()
    assert sorted(path.name for path in (tmp_path / "save").glob("step_*")) == [
        "step_00000002",
        "step_00000004",
    ]
    assert Checkpoint(tmp_path / "save").trainer["settings"]["lr_schedule"] == "wsd"
    again = ["--load", outputs["save"], "--load-weights-only", "--steps", "1"]
    again += ["--metrics", str(tmp_path / "new")]
    pretrain.main([*sizes.split(), *again, *data])
    first = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    new = [json.loads(line) for line in (tmp_path / "new").read_text().splitlines()]
    assert [record["step"] for record in new] == [1, 1]  # from the start, with an evaluation
    assert new[0]["loss"] < first[0]["loss"] - 0.01  # with the weights
