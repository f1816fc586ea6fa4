"""--eval-tasks: an evaluation during training has the numbers of megazoo evaluate on its
checkpoint, in two layouts."""

import json

import pytest

from megazoo import pretrain
from megazoo.errors import UserError
from megazoo.programs import evaluate
from tests.support.harness_files import write_family, write_tasks
from tests.support.pretraining import records

WORDS = "--data mock --seq-length 32 --global-batch-size 8 --micro-batch-size 2 --device cpu"
STEPS = "--steps 2 --eval-interval 1 --eval-steps 0 --lr 1e-3"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("tasks")
    write_family(root / "hf", "llama")
    write_tasks(root / "tasks")
    return root


def trained(arguments: list[str]) -> None:
    pretrain.main(arguments)


def test_the_numbers_are_those_of_evaluate(directory, ranks, tmp_path):
    names = ",".join(str(directory / "tasks" / f"{name}.yaml") for name in ("choices", "rolling"))
    job = ["--load", str(directory / "hf"), *WORDS.split(), *STEPS.split(), "--eval-tasks", names]
    found = []
    for layout, world in (("--tp 2 --pp 2", 4), ("--dp 2 --zero 1", 2)):
        run, metrics = tmp_path / f"run{world}", tmp_path / f"metrics{world}"
        save = ["--save", str(run), "--metrics", str(metrics)]
        ranks(trained, world, [*job, *save, *layout.split()])
        lines = records(metrics)
        found.append([line for line in lines if any(key.startswith("eval_") for key in line)])
        assert [line["step"] for line in lines] == [1, 1, 2, 2]
    output = tmp_path / "results.json"
    evaluate.main([str(run), "--tasks", names, "--output", str(output)])
    results = json.loads(output.read_text())["results"]
    expected = {
        f"eval_{task}_{key.partition(',')[0]}": value
        for task, metrics in results.items()
        for key, value in metrics.items()
        if key.endswith(",none") and "stderr" not in key
    }
    assert {"eval_choices_acc", "eval_rolling_word_perplexity"} <= expected.keys()
    for lines in found:
        assert lines[-1] == pytest.approx({"step": 2, **expected}, rel=1e-5)
        assert lines[0]["eval_rolling_word_perplexity"] != lines[1]["eval_rolling_word_perplexity"]


def test_what_cannot_be_evaluated_is_refused_before_the_run(directory):
    job = ["--load", str(directory / "hf"), *WORDS.split(), *STEPS.split(), "--eval-tasks"]
    for words, line in {
        "no_such_task": "--eval-tasks: unknown task no_such_task",
        "none.yaml": "--eval-tasks: none.yaml can't be read: No such file",
        f"{directory}/tasks --cp 2": "--eval-tasks cannot be used with --cp 2: use --cp 1, or",
    }.items():
        with pytest.raises(UserError, match=line):
            pretrain.prepare([*job, *words.split()])
