"""Tokenizer settings: the JSON files next to a tokenizer name its special tokens, and those to add
before and after a text."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megazoo.errors import UserError
from megazoo.files import json_object, read_bytes
from megazoo.tokenizer.added import AddedToken
from megazoo.tokenizer.base import Tokenizer

SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
CHAT_TEMPLATE = "chat_template.jinja"
Own = TypeVar("Own", bound=Tokenizer)
ROLES = ("bos", "eos", "pad")
# Default tokens for published files that do not name them, such as GPT-2's.
USUAL = {
    "bos": ("<|begin_of_text|>", "<|endoftext|>", "<s>"),
    "eos": ("<|end_of_text|>", "<|endoftext|>", "</s>"),
    "pad": ("<|padding|>",),
}
# Classes of transformers without default special tokens (GPT2Tokenizer has some).
GENERIC = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass
class TokenizerSettings:
    """The contents of SETTINGS_FILES, and the ids in config.json and generation_config.json.

    Attributes:
        directory: The directory of the files.
        config: The contents of tokenizer_config.json.
        names: Contents of the bos, eos, pad and unk tokens, by role. None if a file sets the token
            to null.
        ids: Ids of these tokens, used if nothing else defines them.
        special: Contents of additional special tokens.
        added: Added tokens with their ids.
        chat_template: The Jinja template of conversations, or None.
    """

    directory: Path
    config: dict = field(default_factory=dict)
    names: dict[str, str | None] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    special: list[str] = field(default_factory=list)
    added: list[AddedToken] = field(default_factory=list)
    chat_template: str | None = None

    def refuse(self, key: str, *supported: Any) -> None:
        """Raise UserError if the value of `key` in tokenizer_config.json is neither null nor
        supported."""
        value = self.config.get(key)
        if value is not None and value not in supported:
            raise UserError(
                f"{self.directory / 'tokenizer_config.json'}: {key} {value!r} is not supported"
            )

    def all_added(
        self, found: Iterable[AddedToken], id_of: Callable[[str], int | None]
    ) -> list[AddedToken]:
        """Return the added tokens of the vocabulary file and of the settings files, and all tokens
        that the settings call special."""
        tokens = {token.content: token for token in self.added} | {
            token.content: token for token in found
        }
        for name in [*self.names.values(), *self.special]:
            if name and name not in tokens and (token := id_of(name)) is not None:
                tokens[name] = AddedToken(name, token)
        return list(tokens.values())

    def apply(
        self,
        tokenizer: Own,
        id_of: Callable[[str], int | None],
        own: dict[str, int] | None = None,
        add_bos: bool = False,
        template: tuple[list[int], list[int]] | None = None,
    ) -> Own:
        """Set the ids of the special tokens, and the tokens to add before and after a text.

        Args:
            tokenizer: The tokenizer to change.
            id_of: Function from a token's content to its id.
            own: Ids by role that the vocabulary itself defines.
            add_bos: Default of add_bos_token if the files do not contain it.
            template: Ids before and after a text from a tokenizer.json. They override everything
                else.
        """
        for role in ROLES:
            token = self._id(role, id_of, own or {}, tokenizer.vocab_size)
            setattr(tokenizer, f"{role}_token_id", token)
        if template is None:
            add = {"add_bos_token": add_bos, "add_eos_token": False}
            add |= {key: self.config[key] for key in add if self.config.get(key) is not None}
            ids = zip(add.values(), (tokenizer.bos_token_id, tokenizer.eos_token_id), strict=True)
            before, after = (
                [token] if wanted and token is not None else [] for wanted, token in ids
            )
            template = before, after
        tokenizer.before, tokenizer.after = map(tuple, template)
        return tokenizer

    def _id(
        self, role: str, id_of: Callable[[str], int | None], own: dict[str, int], vocab_size: int
    ) -> int | None:
        """Return the id of the token with a role: by its name in the settings, otherwise the id in
        the vocabulary, otherwise the usual token of published files."""
        if role in self.names:
            name = self.names[role]
            if name is not None and id_of(name) is None:
                raise UserError(f"{self.directory}: {role}_token {name!r} is not in the vocabulary")
            return None if name is None else id_of(name)
        if role == "bos" and self.config.get("tokenizer_class") in GENERIC:
            return None
        usual = (id_of(name) for name in USUAL[role])
        known = [
            token for token in (own.get(role), *usual, self.ids.get(role)) if token is not None
        ]
        return known[0] if known and known[0] < vocab_size else None


def read_settings(directory: Path) -> TokenizerSettings:
    """Read the settings in a tokenizer's directory. Missing files are skipped.

    Raises:
        UserError: A file is malformed.
    """
    settings = TokenizerSettings(directory)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        entries = _json_beside(directory / name)
        for role in (*ROLES, "unk"):
            value = entries.get(f"{role}_token", "")
            content = value.get("content") if isinstance(value, dict) else value
            if content is not None and not isinstance(content, str):
                raise UserError(f"{directory / name}: {role}_token {value!r} is not a token")
            if content != "":
                settings.names[role] = content
        for key in ("additional_special_tokens", "extra_special_tokens"):
            settings.special += _contents(entries.get(key))
        settings.config = entries
    path = directory / "tokenizer_config.json"
    with malformed(path):
        for token_id, entry in (settings.config.get("added_tokens_decoder") or {}).items():
            settings.added.append(AddedToken.from_json(entry, int(token_id)))
    path = directory / "added_tokens.json"
    with malformed(path):
        for content, token_id in _json_beside(path).items():
            special = content in settings.special or content in settings.names.values()
            settings.added.append(
                AddedToken.from_json({"content": content, "special": special}, token_id)
            )
    for name in ("config.json", "generation_config.json"):
        entries = _json_beside(directory / name)
        for role in ROLES:
            value = entries.get(f"{role}_token_id")
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and value >= 0:
                settings.ids[role] = value
    settings.chat_template = chat_template_in(directory, settings.config)
    return settings


def chat_template_in(directory: Path, config: Mapping = {}) -> str | None:
    """Return the template in chat_template.jinja, otherwise in tokenizer_config.json.

    Args:
        directory: The directory of the files.
        config: Contents of tokenizer_config.json. Of several templates, the one named default is
            used.
    """
    path = directory / CHAT_TEMPLATE
    if path.exists():
        with malformed(path):
            return read_bytes(path).decode()
    template = config.get("chat_template")
    with malformed(directory / "tokenizer_config.json"):
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if not isinstance(template, str | None):
            raise UserError(f"chat_template {template!r} is not a template")
    return template


def _contents(tokens) -> list[str]:
    """Return the contents of tokens, given as a list or object of strings or of token objects."""
    if isinstance(tokens, dict):
        tokens = tokens.values()
    elif not isinstance(tokens, list):
        tokens = []
    contents = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return [content for content in contents if isinstance(content, str)]


def _json_beside(path: Path) -> dict:
    """Read the object in a JSON file. Returns an empty object if the file does not exist."""
    return json_object(path, read_bytes(path)) if path.exists() else {}


@contextmanager
def malformed(path: Path) -> Iterator[None]:
    """Convert errors caused by wrong types or missing keys within this block to a UserError that
    names the file."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{path}: {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is malformed: {type(error).__name__} {error}") from error
