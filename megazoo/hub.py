"""Downloads models of the Hugging Face hub by name: org/name or org/name@revision.

Only the files that megazoo reads are downloaded, once per machine, into the hub's cache.
"""

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
from megazoo.sidecars import TEMPLATE_FILE
from megazoo.terminal import print_error

PART = r"[A-Za-z0-9_](?:(?!--|\.\.)[A-Za-z0-9._-]){0,45}(?<![.-])"  # the hub's rule for names
NAME = re.compile(rf"(?P<name>{PART}/{PART})(?<!\.git)(?:@(?P<revision>[\w.][\w./-]*))?")
SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/([0-9a-f]{40})")  # within the cache
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
# Only the first kind that a repository has is downloaded: the others hold the same weights.
WEIGHTS = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)
ADAPTERS = (("adapter_model.safetensors",), ("adapter_model.bin",))


def local_directory(where: str | Path, *, tokenizer_alone: bool = False) -> Path:
    """Return the directory of a model, and download it if necessary.

    It uses the cache, token and settings of huggingface_hub: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE,
    HF_ENDPOINT.

    Args:
        where: a path, or org/name[@revision] on the Hugging Face hub. A file or directory of that
            name has priority. Other paths are returned unchanged.
        tokenizer_alone: don't download the weights.

    Raises:
        UserError: if the model does not exist, or access is denied; with exit code 1 if the hub
            can't be reached.
    """
    found = NAME.fullmatch(str(where))
    if found is None or os.path.lexists(where):
        return Path(where)
    try:
        return _fetched(found["name"], found["revision"] or "main", tokenizer_alone)
    except UserError as error:
        folder = Path(where).parent  # a path, rather than the name of an organisation
        if not folder.is_dir() and folder.name != "runs":
            raise
        line = f"the directory {where} does not exist; as a name on the Hugging Face hub: {error}"
        raise UserError(line, error.exit_code) from error


def name_of(directory: str | Path) -> str | None:
    """Return org/name@revision of a directory in the hub's cache; None for other directories."""
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
    """Return a hint, "; ...", on how to load a model of the hub; "" if the name is not org/name."""
    if not NAME.fullmatch(name):
        return ""
    return (
        f"; to load a model of the Hugging Face hub with its weights, use --load {name} or "
        f"megazoo.from_pretrained({name!r})"
    )


def wanted(names: Iterable[str], *, tokenizer_alone: bool = False) -> list[str]:
    """Return the files of a repository to download: configs, tokenizers, and the weights in one
    format, safetensors if possible."""
    names = list(names)
    templates = [name for name in names if TEMPLATE_FILE.fullmatch(name)]
    names = [name for name in names if "/" not in name]
    patterns = [*TOKENIZER, *CONFIGS]  # configs also hold token ids
    if not tokenizer_alone:
        for kinds in (WEIGHTS, ADAPTERS):
            patterns += next((kind for kind in kinds if _matching(names, kind)), ())
    return [*_matching(names, patterns), *templates]


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    patterns = list(patterns)
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def check_upload(name: str) -> None:
    """Raise UserError unless a name is valid on the hub, and huggingface_hub is installed."""
    if "@" in name or not name_alone(name):
        raise UserError(f"{name!r} is not a name on the Hugging Face hub: it must be org/name")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UserError(
            "an upload to the Hugging Face hub needs huggingface_hub; "
            "in the clone of megazoo: pip install -e '.[hub]'"
        ) from None


def upload(directory: Path, name: str, *, private: bool | None, message: str) -> str:
    """Upload the files of a directory to org/name, and return its URL.

    The repository is created if it does not exist. UserError, exit code 1, with the hub's answer if
    the upload fails.
    """
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=directory, commit_message=message)
    except Exception as error:  # network errors of several libraries
        raise UserError(f"{name} can't be uploaded: {_reason(error)}", exit_code=1) from error
    return str(address)


@cache
def _fetched(name: str, revision: str, tokenizer_alone: bool) -> Path:
    """Download a repository's files, or find them in the cache; return their directory.

    All ranks of a machine use the revision that the first rank found.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"{name} is not a directory; a model of that name on the Hugging Face hub needs "
            "huggingface_hub; in the clone of megazoo: pip install -e '.[hub]'"
        ) from None
    with _notes_of(name, revision) as notes:
        job = f"{_launcher()} {tokenizer_alone}"
        lines = notes.read().decode().splitlines() if notes and world_size() > 1 else []
        if lines[:1] == [job]:
            with contextlib.suppress(UserError):  # if the files have been deleted
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
    """Return an id of the launcher that started the ranks on this machine: its process, the start
    time of the process, and the number of the restart."""
    parent, began = os.getppid(), ""
    with contextlib.suppress(OSError, IndexError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return " ".join([os.uname().nodename, str(parent), began, *(os.getenv(n, "") for n in names)])


def _download(name: str, revision: str, tokenizer_alone: bool) -> Path:
    """Download the files that are not in the cache. If the hub can't be reached, use the cache."""
    from huggingface_hub import HfApi, errors, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is gated: request access on its page of the Hugging Face hub, and log in (hf "
            "auth login, or HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision} on the Hugging Face hub") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is not a directory, and no model of that name is on the Hugging Face hub; a "
            "private model needs a login (hf auth login, or HF_TOKEN)"
        ) from error
    except Exception as error:  # network errors of several libraries
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
            lacks += f"; download a GGUF file, and pass its path: hf download {name} FILE.gguf"
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
        f"{_reason(error)}; run the command again to resume the download",
        exit_code=1,
    )


def _cached(name: str, revision: str) -> Path:
    """Return the directory of a revision in the cache; UserError if the cache does not have it."""
    from huggingface_hub import try_to_load_from_cache

    for file in (*CONFIGS, *TOKENIZER):
        if isinstance(path := try_to_load_from_cache(name, file, revision=revision), str):
            return Path(path).parent
    raise UserError(
        f"{name} is not a directory, and no model of that name is in the cache of the Hugging Face "
        "hub; unset HF_HUB_OFFLINE to download it"
    )


@contextlib.contextmanager
def _notes_of(name: str, revision: str) -> Iterator[BinaryIO | None]:
    """Hold the lock of a revision within this block. Yield the file in which the first rank of a
    machine records the revision that it found, or None if the cache is not writable."""
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
    """Return the first line of an exception's text, or its type if the text is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
