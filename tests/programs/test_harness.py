"""tools/evaluate.py --tasks: lm-evaluation-harness from the command line, in any layout."""

import functools
import json
import subprocess

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from megazoo.evaluation import tasks as of_tasks
from megazoo.formats.resharding import write_shards
from megazoo.models.pretrained import open_source
from megazoo.programs import evaluate
from tests.support.harness import LENGTH, theirs
from tests.support.harness_files import write_family, write_tasks
from tests.support.inference import ROOT, run_main
from tests.support.programs import python


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("program")
    write_family(root / "hf", "llama")
    write_shards(open_source(root / "hf"), root / "shards", tp=2, pp=1)
    write_tasks(root / "tasks")
    group = {"group": "both", "task": ["choices", "rolling"]}
    (root / "tasks" / "both.yaml").write_text("".join(f"{k}: {v}\n" for k, v in group.items()))
    (root / "one").mkdir()
    (root / "one" / "writing.yaml").write_text((root / "tasks" / "writing.yaml").read_text())
    return root


@pytest.fixture(scope="module")
def expected(directory):
    """HFLM's results of all tasks, the first three documents of each."""
    return lm_eval.simple_evaluate(
        model=theirs(directory / "hf", batch_size=1),
        tasks=[str(file) for file in sorted((directory / "tasks").glob("*ing.yaml"))]
        + [str(directory / "tasks" / "choices.yaml")],
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=True,
        num_fewshot=0,
        limit=3,
        bootstrap_iters=0,
    )["results"]


def assert_expected(results: dict, expected: dict, *names: str):
    assert sorted(results) == sorted(names)
    for name in names:
        for metric, value in expected[name].items():
            if "stderr" not in metric:
                found = results[name][metric]
                assert found == value or abs(found - value) < 1e-5 * abs(value), (name, metric)


def test_the_tool_answers_tasks_of_a_directory_as_hflm(
    directory, expected, tmp_path, monkeypatch, capsys
):
    arguments = [directory / "shards", "--tasks", f"{directory / 'tasks'},rolling"]
    arguments += ["--limit", 3, "--num-fewshot", 0, "--apply-chat-template"]
    arguments += ["--output", tmp_path / "results.json", "--tokenizer", directory / "hf"]
    code, out, error = run_main(evaluate, monkeypatch, capsys, *arguments)
    assert code == 0, error
    results = json.loads((tmp_path / "results.json").read_text())
    assert_expected(results["results"], expected, *expected)
    assert results["n-shot"]["chatting"] == 0, "the task says 1"
    assert results["n-samples"]["choices"] == {"original": 6, "effective": 3}
    lines = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()]
    told = {cells[5]: cells[7] for cells in lines if len(cells) > 7}
    assert told["word_perplexity"] == f"{results['results']['rolling']['word_perplexity,none']:.4f}"
    assert out.splitlines()[0].startswith("|"), "nothing but the table"


def test_a_group_and_a_file_in_two_processes(directory, expected, tmp_path):
    command = [python(), "tools/evaluate.py", directory / "hf", "--tp", "2", "--device", "cpu"]
    files = f"{directory / 'tasks' / 'both.yaml'},{directory / 'one' / 'writing.yaml'}"
    command += ["--tasks", files, "--limit", "3", "--output", tmp_path / "results.json"]
    command += ["--num-fewshot", "0", "--apply-chat-template", "--batch-size", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["group_subtasks"]["both"] == ["choices", "rolling"]
    found = {name: value for name, value in results["results"].items() if name != "both"}
    assert_expected(found, expected, "choices", "rolling", "writing")
    assert done.stdout.count("word_perplexity") == 1, "one rank tells"


def test_mistakes_are_told_in_one_line(directory, tmp_path, monkeypatch, capsys):
    task = json.loads((directory / "tasks" / "writing.yaml").read_text())
    for name, changes in {
        "none": {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "nowhere.jsonl")}}},
        "field": {"doc_to_text": "{{ q.a.b }}"},
        "later": {"doc_to_text": "{{ q.a.b if q | length > 99 else q }}"},
        "unsafe": {"unsafe_code": True},
        "long": {"generation_kwargs": {"until": ["a"], "max_gen_toks": LENGTH}},
        "far": {"dataset_path": "someone/something", "dataset_kwargs": {}},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**task, "task": name, **changes}))
    (tmp_path / "broken.yaml").write_text("task: [")
    (tmp_path / "empty").mkdir()
    # without the thousands of its own, which take long to read
    here = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(of_tasks._Tasks, "__init__", lambda self, include_path=None, **_: (
        here.__get__(self)(include_path=include_path)))  # fmt: skip
    good = directory / "tasks" / "writing.yaml"
    for arguments, message in {
        ("--tasks", ""): "--tasks is empty: pass a name",
        ("--tasks", " , "): "--tasks is empty: pass names of tasks, YAML files or directories",
        ("--tasks", good, "--text", good): "use exactly one of --text, --choices, ",
        ("--tasks", good, "--labels", good): "use exactly one of --text, --choices, ",
        ("--text", good, "--limit", 1): "--limit needs --tasks",
        ("--text", good, "--num-fewshot", 0): "--num-fewshot needs --tasks",
        ("--choices", good, "--apply-chat-template"): "--apply-chat-template needs --tasks",
        ("--tasks", good, "--limit", 0): "--limit 0 must be a number of documents, or a fraction",
        (
            "--tasks",
            good,
            "--limit",
            2.5,
        ): "--limit 2.5 must be a number of documents, or a fraction",
        ("--tasks", good, "--limit", "nan"): "--limit nan must be a number",
        ("--tasks", good, "--num-fewshot", -1): "--num-fewshot -1 must be 0 or more",
        (
            "--tasks",
            good,
            "--seq-length",
            LENGTH + 1,
        ): f"--seq-length {LENGTH + 1} must be from 1 to",
        ("--tasks", tmp_path / "no.yaml"): "no.yaml can't be read: No such file",
        (
            "--tasks",
            f"{directory / 'tasks'},choicse",
        ): "unknown task choicse; did you mean choices?",
        ("--tasks", tmp_path / "empty"): f"unknown task {tmp_path / 'empty'}",
        ("--tasks", tmp_path / "broken.yaml"): "broken.yaml can't be loaded: ParserError",
        ("--tasks", tmp_path / "none.yaml"): "nowhere.jsonl",
        ("--tasks", tmp_path / "far.yaml"): "far.yaml can't be loaded: ",
        ("--tasks", tmp_path / "field.yaml"): "field.yaml can't be loaded: UndefinedError",
        ("--tasks", tmp_path / "later.yaml"): "--tasks: UndefinedError 'str object' has no",
        ("--tasks", tmp_path / "unsafe.yaml"): "unsafe which is marked as unsafe",
        ("--tasks", tmp_path / "long.yaml"): f"max_gen_toks {LENGTH} leaves no room for a prompt",
    }.items():
        code, out, error = run_main(evaluate, monkeypatch, capsys, directory / "hf", *arguments)
        told = [line for line in error.splitlines() if line.startswith("evaluate.py: error: ")]
        assert (code in (1, 2), out, len(told)) == (True, "", 1), error
        assert message in told[0], told[0]


@pytest.mark.slow
def test_a_name_that_the_harness_does_not_know(directory, monkeypatch, capsys):
    arguments = [directory / "hf", "--tasks", "arc_easi"]
    code, _, error = run_main(evaluate, monkeypatch, capsys, *arguments)
    assert (code, error.count("\n")) == (2, 1)
    assert "unknown task arc_easi; did you mean arc_easy?" in error


def test_without_the_extra_one_line_says_what_to_install(directory, tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ImportError('not here')\n")
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, timeout=100)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    ended = "import megazoo.evaluation; megazoo.evaluation.score_choices; print('imported')\n"
    from_python = run([python(), "-c", program + ended + "megazoo.evaluation.HarnessModel"])
    assert from_python.stdout == "imported\n"
    fix = "(in the clone of megazoo: pip install -e '.[eval]')"
    message = f"lm_eval can't be imported: not here {fix}"
    assert from_python.stderr.endswith(f"UserError: {message}\n")
    tool = program + "sys.argv[0] = 'evaluate.py'; from megazoo.cli.program import run_script; "
    tool += "run_script('evaluate')"
    task = directory / "tasks" / "choices.yaml"
    done = run([python(), "-c", tool, directory / "hf", "--tasks", task])
    assert (done.returncode, done.stderr) == (2, f"evaluate.py: error: {message}\n")
