"""Find tasks of lm-evaluation-harness, by names or in files, and evaluate a model on them."""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

from megazoo.environment import is_rank_zero
from megazoo.errors import UserError, nearest
from megazoo.files import reason_of

try:
    import lm_eval
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise UserError(
        f"lm_eval can't be imported: {error} (in the clone of megazoo: pip install -e '.[eval]')"
    ) from error

from megazoo.evaluation.harness import HarnessModel

GROUP = re.compile(rb"^group\s*:\s*[\"']?([\w.-]+)", re.MULTILINE)
STDERR_DRAWS = 100_000  # default of the harness's command line


class _Tasks(TaskManager):
    """A TaskManager that reports in one line why a task can't be loaded.

    flag: the setting that names the tasks.
    """

    flag = "--tasks"

    def load(self, task_list):
        try:
            return super().load(task_list)
        except Exception as error:  # file, data, network, or Python code of the task
            raise UserError(
                f"{self.flag}: {', '.join(task_list)} can't be loaded: "
                f"{type(error).__name__} {error}",
                exit_code=1,
            ) from error


def find_tasks(words: str, flag: str = "--tasks") -> tuple[list[str], TaskManager]:
    """Find tasks of the harness. No data is read yet.

    Tasks in the given directories, and groups in the given files, take precedence over tasks of the
    harness.

    Args:
        words: Comma-separated: names of tasks, groups or tags; patterns (mmlu_*); YAML files; or
            directories with tasks.
        flag: Name of the setting, for errors.

    Returns:
        The names and files of tasks, and the manager that loads them.

    Raises:
        UserError: A task, file or directory does not exist.
    """
    named = [word.strip() for word in words.split(",") if word.strip()]
    if not named:
        raise UserError(f"{flag} is empty: pass names of tasks, YAML files or directories")
    files = {word: Path(word).resolve() for word in named if word.endswith((".yaml", ".yml"))}
    groups = {word: GROUP.search(_read(word, flag)) for word in files}
    beside = [path.parent for word, path in files.items() if groups[word]]
    directories = {word: Path(word) for word in named if Path(word).is_dir()}
    manager = _Tasks(include_path=[*beside, *directories.values()], include_defaults=False)
    names = [word for word in named if word not in files and word not in directories]
    if not all(manager.match_tasks([name]) for name in names):  # the harness has thousands of tasks
        manager = _Tasks(include_path=[*beside, *directories.values()])
    found: list[str] = []
    for word in named:
        if word in files:
            group = groups[word]
            some = [group[1].decode() if group else str(files[word])]
        elif word in directories:
            some = _Tasks(include_path=directories[word], include_defaults=False).all_subtasks
        else:
            some = manager.match_tasks([word])
        if not some:
            known = "" if word in directories else nearest(word, manager.all_tasks)
            raise UserError(f"{flag}: unknown task {word}{known}")
        found += some
    manager.flag = flag
    return list(dict.fromkeys(found)), manager


def _read(word: str, flag: str) -> bytes:
    try:
        return Path(word).read_bytes()
    except OSError as error:
        raise UserError(f"{flag}: {word} can't be read: {reason_of(error)}") from error


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: tuple[list[str], TaskManager],
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    apply_chat_template: bool = False,
    **settings: Any,
) -> dict | None:
    """Evaluate a model on tasks. Call it on every rank.

    Args:
        model: A language model.
        tokenizer: Its tokenizer.
        tasks: The result of `find_tasks`.
        num_fewshot: Number of examples in the prompt; by default the task's.
        limit: Number of documents per task, or a fraction of them if below 1.
        apply_chat_template: Apply the tokenizer's chat template.
        **settings: Arguments of `HarnessModel`.

    Returns:
        The harness's results; None on ranks that are not the first of their machine.

    Raises:
        UserError: A task can't be loaded, or does not support the model.
    """
    names, manager = tasks
    # All ranks run the harness; one shows its output.
    shown = sys.stderr if is_rank_zero() else io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            return lm_eval.simple_evaluate(
                model=HarnessModel(model, tokenizer, **settings),
                tasks=names,
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                apply_chat_template=apply_chat_template,
                bootstrap_iters=STDERR_DRAWS if is_rank_zero() else 0,
                log_samples=False,
            )
        except UserError:
            raise
        except (TemplateError, ValueError) as error:
            raise UserError(f"--tasks: {type(error).__name__} {error}", exit_code=1) from error
