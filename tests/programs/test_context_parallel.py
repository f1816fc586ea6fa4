"""The training program and the tools with --cp: several ranks share each sequence."""

import json
import re

import pytest

from megazoo import pretrain
from megazoo.cli.parsing import CommandLine
from megazoo.formats.source import SavedModel
from megazoo.launching.deaths import name_of
from megazoo.models.counts import flops_per_token
from megazoo.parallel import ParallelContext
from megazoo.programs import evaluate, generate
from tests.support.data import write_lines
from tests.support.inference import assert_same_output, output_of, run_main
from tests.support.pretraining import SMALL, close, losses, records, start
from tests.support.sampling import marked_slow

MPT = [*SMALL, "--model", "mpt"]  # ALiBi


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags of two kinds of data: rows of odd lengths, and documents of odd lengths that are packed
    into samples without seeing each other."""
    path = tmp_path_factory.mktemp("data")
    rows = write_lines(
        path / "rows.jsonl",
        *({"prompt": "ab" * (n % 13), "completion": " c" + "d" * (n % 5)} for n in range(60)),
    )
    texts = write_lines(
        path / "texts.jsonl",
        *({"text": "word" * (n % 5) + "s" * (n % 3)} for n in range(1, 200)),
    )
    return {
        "rows": ["--data", str(rows), "--split", "80,20"],
        "packed": ["--data", str(texts), "--split", "80,20", "--separate-documents"],
    }


def evaluations(path):
    return {
        record["step"]: record["eval_loss"] for record in records(path) if "eval_loss" in record
    }


LAYOUTS = {
    "cp 2": (2, "--cp 2", "rows"),
    "cp 2, two replicas": (4, "--cp 2", "packed"),
    "cp 2, tp 2, sequence parallel": (4, "--cp 2 --tp 2 --sequence-parallel", "rows"),
    "cp 4 by heads": (4, "--cp 4 --cp-method ulysses", "packed"),
    "cp 2, pp 2": (4, "--cp 2 --pp 2 --schedule zb-h1", "packed"),
}


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """The metrics of two steps in one process, on each kind of data."""
    files = {kind: tmp_path_factory.mktemp("one") / kind for kind in data}
    for kind, path in files.items():
        pretrain.main([*MPT, *data[kind], "--steps", "2", "--metrics", str(path)])
    return files


@pytest.mark.parametrize("name", marked_slow(list(LAYOUTS), lambda number, _: number != 1))
def test_ranks_that_share_sequences_train_like_one_process(
    name, ranks, data, one_process, tmp_path
):
    world, layout, kind = LAYOUTS[name]
    metrics = tmp_path / "metrics"
    job = [*MPT, *data[kind], *layout.split(), "--steps", "2", "--metrics", str(metrics)]
    ranks(pretrain.main, world, job)
    expected = one_process[kind]
    assert close(losses(metrics), losses(expected))
    assert close(evaluations(metrics), evaluations(expected))
    for key in ("consumed_samples", "consumed_tokens"):
        theirs = [record.get(key) for record in records(expected)]
        assert [record.get(key) for record in records(metrics)] == theirs


@pytest.mark.slow
def test_a_run_goes_on_at_another_cp(ranks, data, tmp_path):
    """Two steps at each of four layouts: the losses of eight in one process."""
    straight, metrics, saved = (tmp_path / name for name in ("straight", "metrics", "run"))
    job = [*MPT, *data["packed"], "--lr-decay-steps", "8"]
    pretrain.main([*job, "--steps", "8", "--metrics", str(straight)])
    kept = ["--metrics", str(metrics), "--save", str(saved), *"--device cpu --eval-steps 1".split()]
    for steps, cp, method in [
        (2, 2, "allgather"),
        (4, 1, "allgather"),
        (6, 4, "allgather"),
        (8, 2, "ulysses"),
    ]:
        layout = ["--cp", str(cp), "--cp-method", method, "--steps", str(steps)]
        beginning = job if steps == 2 else ["--load", str(saved)]
        ranks(pretrain.main, cp, [*beginning, *kept, *layout])
        manifest = json.loads((saved / f"step_{steps:08}" / "megazoo.json").read_text())
        assert manifest["layout"] == {"tp": 1, "pp": 1, "dp": cp}
    assert list(losses(metrics)) == list(range(1, 9))
    assert close(losses(metrics), losses(straight))
    assert evaluations(metrics)[8] == pytest.approx(evaluations(straight)[8], rel=1e-5)


@pytest.mark.slow
def test_python_starts_the_ranks_of_cp_and_says_the_layout(tmp_path):
    saved = tmp_path / "run"
    done = start([], *SMALL, "--cp", 2, "--steps", 2, "--save", saved)
    assert done.returncode == 0, done.stderr
    assert "starting 2 ranks here, as torchrun --nproc-per-node 2 pretrain_gpt.py" in done.stdout
    assert "on 2 x cpu: tp 1 x pp 1 x cp 2 x dp 1\n" in done.stdout
    assert "(tp 1 x pp 1 x cp 2; loads in any layout)" in done.stdout
    assert re.search(r"resume +\S*python pretrain_gpt.py .*--cp 2", done.stdout)


def test_the_method_is_that_of_the_flag(ranks):
    """Either gives the same losses, so it is asked of the context that the model has."""
    methods = ranks(method_of_the_run, 2, [*SMALL, "--cp", "2", "--cp-method", "ulysses"])
    assert methods == [("ulysses", 2)] * 2


def method_of_the_run(arguments: list[str]) -> tuple[str, int]:
    ctx = pretrain.start_rank(pretrain.prepare(arguments))
    return ctx.layout.cp_method, ctx.cp_size


MISTAKES = {
    "--cp 0": "--cp 0 must be at least 1",
    "--cp 70000": "--cp 70000 must be at most 65,536",
    "--cp 4 --tp 2 --cp-method ulysses": "cp-method ulysses can't split the 2 heads of a "
    "tensor-parallel rank over cp 4: use cp of at most 2, or cp-method allgather",
    "--cp 2 --cp-method ring": "--cp-method is 'ring': use one of allgather, ulysses",
}


def test_mistakes_end_in_one_line_before_any_rank_starts(capsys, monkeypatch):
    for flags, line in MISTAKES.items():
        told = run_main(pretrain, monkeypatch, capsys, *SMALL, *flags.split())
        assert told == (2, "", f"pretrain_gpt.py: error: {line}\n")


def test_cp_can_stand_in_the_toml_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('cp = 4\ncp_method = "ulysses"\n')
    parallel = CommandLine.read(["--config", str(file), "--cp", "2"]).options().parallel
    assert (parallel.cp, parallel.cp_method, parallel.replica) == (2, "ulysses", 2)


def test_mfu_counts_each_token_once_and_every_rank(ranks, tmp_path):
    """The tokens of a replica are those of all its ranks together, and so is their peak."""
    metrics, saved = tmp_path / "metrics", tmp_path / "run"
    job = [*SMALL, "--cp", "2", "--steps", "2", "--peak-tflops", "0.5", "--save", str(saved)]
    ranks(pretrain.main, 4, [*job, "--metrics", str(metrics)])
    steps = [record for record in records(metrics) if "loss" in record]
    flops = flops_per_token(SavedModel(saved).config, 32)
    for record in steps:
        assert record["tokens_per_second"] == pytest.approx(8 * 32 / record["step_time"])
        of_each_rank = record["tokens_per_second"] * flops / 4
        assert record["mfu"] == pytest.approx(of_each_rank / 0.5e12)


def test_a_rank_is_named_with_its_place_along_cp():
    ctx = ParallelContext.virtual(tp=2, pp=2, dp=2, cp=3)
    last = ctx.world_size - 1
    assert name_of(last, ctx) == "rank 23 (tp 1, pp 1, cp 2, dp 1)"
    assert name_of(2, ctx) == "rank 2 (tp 0, pp 0, cp 1, dp 0)"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    pretrain.main([*MPT, "--steps", "2", "--eval-steps", "0", "--save", str(path)])
    return path


def test_generation_and_scores_are_those_of_one_process(saved, ranks, tmp_path):
    """Ranks along cp are replicas there."""
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 9)
    scored = ["--text", str(text), "--seq-length", "17", "--device", "cpu"]
    written = ["--prompt", "def ", "--max-new-tokens", "8", "--device", "cpu"]
    for tool, arguments in ((evaluate, scored), (generate, written)):
        expected = output_of(tool.main, [str(saved), *arguments])
        layout = ["--cp", "2", "--tp", "2"]
        found, *others = ranks(output_of, 4, tool.main, [str(saved), *arguments, *layout])
        assert_same_output(found, expected)
        assert others == [""] * 3


def test_a_tool_refuses_a_cp_that_is_none(saved, monkeypatch, capsys):
    code, _, error = run_main(generate, monkeypatch, capsys, saved, "--cp", 0, "--prompt", "a")
    assert (code, error) == (2, "generate.py: error: --cp 0 must be at least 1\n")
