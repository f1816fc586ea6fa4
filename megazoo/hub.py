"""Models by their names on the Hugging Face hub: org/name or org/name@revision. Their files are
downloaded into the hub's cache once per machine; only those that are read."""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import BinaryIO

from megazoo.environment import world_size
from megazoo.errors import UserError
from megazoo.files import locked
from megazoo.terminal import print_error

PART = r"[A-Za-z0-9_](?:(?!--|\.\.)[A-Za-z0-9._-]){0,45}(?<![.-])"  # what the hub allows
NAME = re.compile(rf"(?P<name>{PART}/{PART})(?<!\.git)(?:@(?P<revision>[\w.][\w./-]*))?")
SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/([0-9a-f]{40})")  # within the cache
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
# The first kind that a repository has is taken: it may hold the same weights several times.
WEIGHTS = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)
ADAPTERS = (("adapter_model.safetensors",), ("adapter_model.bin",))


def local_directory(where: str | Path, *, tokenizer_alone: bool = False) -> Path:
    """Return the directory of what a user names: a path, as it is, or org/name[@revision], which is
    downloaded from the Hugging Face hub unless there is a file or directory of that name.

    huggingface_hub's cache, token and settings are used: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE,
    HF_ENDPOINT. tokenizer_alone: without the weights. UserError if there is no such model, or no
    permission to read it, and exit code 1 if the hub can't be reached.
    """
    found = NAME.fullmatch(str(where))
    if found is None or os.path.lexists(where):
        return Path(where)
    return _fetched(found["name"], found["revision"] or "main", tokenizer_alone)


def name_of(directory: str | Path) -> str | None:
    """Return org/name@revision of a directory in the cache that is used; None for another."""
    found = SNAPSHOT.search(str(directory))
    if not found or "huggingface_hub" not in sys.modules:
        return None
    from huggingface_hub.constants import HF_HUB_CACHE

    name = f"{found[1]}/{found[2]}@{found[3]}"
    is_there = Path(directory).absolute() == Path(HF_HUB_CACHE, found[0]).absolute()
    return name if is_there and NAME.fullmatch(name) else None


def name_alone(text: str) -> str | None:
    """Return org/name of org/name@revision; None for a directory."""
    found = NAME.fullmatch(text)
    return found and found["name"]


def hint_to_load(name: str) -> str:
    """Return "; ..." with how a model of the hub is loaded, for such a name; nothing for others."""
    if not NAME.fullmatch(name):
        return ""
    return (
        f"; a model of the Hugging Face hub is loaded with its weights: --load {name}, or "
        f"megazoo.from_pretrained({name!r})"
    )


def wanted(names: Iterable[str], *, tokenizer_alone: bool = False) -> list[str]:
    """Return the files of a repository that are read: configs, tokenizers, and weights once, in
    safetensors if there are any."""
    names = [name for name in names if "/" not in name]
    patterns = [*TOKENIZER, *CONFIGS]  # ids of tokens stand in these, too
    if not tokenizer_alone:
        for kinds in (WEIGHTS, ADAPTERS):
            patterns += next((kind for kind in kinds if _matching(names, kind)), ())
    return _matching(names, patterns)


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    patterns = list(patterns)
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def check_upload(name: str) -> None:
    """Raise UserError unless a name can be one on the hub, and huggingface_hub is there."""
    if "@" in name or not name_alone(name):
        raise UserError(f"{name!r} is no name on the Hugging Face hub: give org/name")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UserError(
            "an upload to the Hugging Face hub needs huggingface_hub: pip install 'megazoo[hub]'"
        ) from None


def upload(directory: Path, name: str, *, private: bool | None, message: str) -> str:
    """Upload the files of a directory to org/name, which is made if need be; return its address.
    UserError, exit code 1, with the hub's answer if it refuses."""
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=directory, commit_message=message)
    except Exception as error:  # of the network, whatever library it comes from
        raise UserError(f"{name} can't be uploaded: {_reason(error)}", exit_code=1) from error
    return str(address)


@cache
def _fetched(name: str, revision: str, tokenizer_alone: bool) -> Path:
    """Download a repository's files, or find them in the cache; return their directory. All ranks
    of a machine take what the first of them found."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"{name} is not a directory; a model of that name on the Hugging Face hub needs "
            "huggingface_hub: pip install 'megazoo[hub]'"
        ) from None
    with _notes_of(name, revision) as notes:
        job = f"{_launcher()} {tokenizer_alone}"
        lines = notes.read().decode().splitlines() if notes and world_size() > 1 else []
        if lines[:1] == [job]:
            with contextlib.suppress(UserError):  # of files that were deleted since
                return _cached(name, lines[1])
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            return _cached(name, revision)
        directory = _download(name, revision, tokenizer_alone)
        if notes:
            notes.seek(0)
            notes.truncate()
            notes.write(f"{job}\n{directory.name}".encode())
        return directory


def _launcher() -> str:
    """Return what tells the ranks that one launcher started here from all others: its process, when
    that began, and the launcher's own number of this start."""
    parent, began = os.getppid(), ""
    with contextlib.suppress(OSError, IndexError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return " ".join([os.uname().nodename, str(parent), began, *(os.getenv(n, "") for n in names)])


def _download(name: str, revision: str, tokenizer_alone: bool) -> Path:
    """Download what is not in the cache yet. If the hub can't be reached, use the cache."""
    from huggingface_hub import HfApi, errors, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is gated: ask for access on its page of the Hugging Face hub, and log in (hf "
            "auth login, or HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision} on the Hugging Face hub") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is not a directory, and no model of that name is on the Hugging Face hub; a "
            "private one needs a login (hf auth login, or HF_TOKEN)"
        ) from error
    except Exception as error:  # of the network, whatever library it comes from
        with contextlib.suppress(UserError):
            directory = _cached(name, revision)
            print_error(f"{name}: the Hugging Face hub can't be reached; the cached files are used")
            return directory
        raise _broken_off(name, error) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = wanted(sizes, tokenizer_alone=tokenizer_alone)
    if not files:
        lacks = "no tokenizer" if tokenizer_alone else f"no model: it lacks {CONFIGS[0]}"
        if any(file.endswith(".gguf") for file in sizes):
            lacks += (
                f"; download a GGUF file of it, and give its path: hf download {name} FILE.gguf"
            )
        raise UserError(f"{name} on the Hugging Face hub has {lacks}")
    found = {file: try_to_load_from_cache(name, file, revision=info.sha) for file in files}
    if new := [file for file, path in found.items() if not isinstance(path, str)]:
        size = sum(sizes[file] for file in new)
        print_error(f"download {name}: {len(new)} files, {size / 1e6:,.1f} MB")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:
        raise _broken_off(name, error) from error


def _broken_off(name: str, error: Exception) -> UserError:
    return UserError(
        f"{name} is not a directory, and can't be downloaded from the Hugging Face hub: "
        f"{_reason(error)}; what has arrived is kept: run the command again",
        exit_code=1,
    )


def _cached(name: str, revision: str) -> Path:
    """Return the directory of a revision's files in the cache. UserError if they are not there."""
    from huggingface_hub import try_to_load_from_cache

    for file in (*CONFIGS, *TOKENIZER):
        if isinstance(path := try_to_load_from_cache(name, file, revision=revision), str):
            return Path(path).parent
    raise UserError(
        f"{name} is not a directory, and no model of that name is in the cache of the Hugging Face "
        "hub, which is not asked while HF_HUB_OFFLINE is set"
    )


@contextlib.contextmanager
def _notes_of(name: str, revision: str) -> Iterator[BinaryIO | None]:
    """Hold the lock of a revision within this block; give the file in which the first rank of a
    machine says what it found, or None where the cache can't be written."""
    from huggingface_hub.constants import HF_HUB_CACHE

    directory = Path(HF_HUB_CACHE, ".locks", "megazoo")
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            place = directory / f"{name}@{revision}".replace("/", "--")
            file = stack.enter_context(locked(place))
        yield file


def _reason(error: Exception) -> str:
    """Return the first line of what an exception says, or else its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
