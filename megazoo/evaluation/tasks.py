"""Tasks of lm-evaluation-harness are found, by name or in files, and a model in any layout is asked
them."""

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
    raise UserError(f"lm_eval can't be imported: {error} (pip install 'megazoo[eval]')") from error

from megazoo.evaluation.harness import HarnessModel

GROUP = re.compile(rb"^group\s*:\s*[\"']?([\w.-]+)", re.MULTILINE)
STDERR_DRAWS = 100_000  # what the harness's own program takes


class _Tasks(TaskManager):
    """Tells in one line why a task can't be loaded."""

    def load(self, task_list):
        try:
            return super().load(task_list)
        except Exception as error:  # of a file, of its data, of the network, of code beside it
            raise UserError(
                f"--tasks: {', '.join(task_list)} can't be loaded: {type(error).__name__} {error}",
                exit_code=1,
            ) from error


def find_tasks(words: str) -> tuple[list[str], TaskManager]:
    """Return the names and files of tasks, and what loads them; no data is read yet.

    words: between commas names of tasks, groups or tags, or patterns of names (mmlu_*); YAML files;
    and directories, for the tasks in them. Names are those of directories and of groups' own, else
    the harness's. UserError for what is not there.
    """
    named = [word.strip() for word in words.split(",") if word.strip()]
    if not named:
        raise UserError("--tasks is empty: name tasks, YAML files or directories")
    files = {word: Path(word).resolve() for word in named if word.endswith((".yaml", ".yml"))}
    groups = {word: GROUP.search(_read(word)) for word in files}
    beside = [path.parent for word, path in files.items() if groups[word]]
    directories = {word: Path(word) for word in named if Path(word).is_dir()}
    manager = _Tasks(include_path=[*beside, *directories.values()], include_defaults=False)
    names = [word for word in named if word not in files and word not in directories]
    if not all(manager.match_tasks([name]) for name in names):  # the harness's own: thousands
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
            raise UserError(f"--tasks: there is no task {word}{known}")
        found += some
    return list(dict.fromkeys(found)), manager


def _read(word: str) -> bytes:
    try:
        return Path(word).read_bytes()
    except OSError as error:
        raise UserError(f"--tasks: {word} can't be read: {reason_of(error)}") from error


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
    """Return the harness's results of tasks that `find_tasks` has found; None on ranks that are not
    the first of their machine. Call it on every rank.

    limit: how many documents of each task are taken, or below 1 which share of them. settings: of
    `HarnessModel`. UserError for a task that can't be loaded, or that the model can't be asked.
    """
    names, manager = tasks
    # All ranks do the harness's work, and one shows it.
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
