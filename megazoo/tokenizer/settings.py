"""Tokenizer settings: the JSON files next to a tokenizer name its special tokens, and those to add
before and after a text."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from megazoo.errors import UserError
from megazoo.files import brief, json_object, malformed, read_bytes
from megazoo.sidecars import GENERATION, SETTINGS_FILES
from megazoo.tokenizer.added import AddedToken
from megazoo.tokenizer.base import Side, Tokenizer
from megazoo.tokenizer.classes import DEFAULTS, class_of
from megazoo.tokenizer.templates import chat_templates_in

CONFIG, MAP, ADDED = SETTINGS_FILES
Own = TypeVar("Own", bound=Tokenizer)
ROLES = ("bos", "eos", "pad")
# The names of special tokens that every tokenizer of transformers has.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
Prefix = Literal["model", "always", "first", "never"]
SIDES = ("padding_side", "truncation_side")
# The other names that a chat template is rendered with.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass
class TokenizerSettings:
    """The contents of SETTINGS_FILES, and the ids in config.json and generation_config.json.

    Attributes:
        directory: The directory of the files.
        config: The contents of tokenizer_config.json.
        declared: The tokenizer class that tokenizer_config.json or config.json names, or None.
        model_type: The model_type of config.json or tokenizer_config.json, or None.
        names: Contents of the named tokens, such as bos_token. None if a file sets the token to
            null.
        ids: Ids of the bos, eos and pad tokens by role, used if no file and no class names them.
            Those in tokenizer_config.json come before those of the model.
        special: Additional special tokens.
        added: Added tokens with their ids.
        decides: The flags of `added` replace those in the vocabulary file.
        chat_templates: The Jinja templates of conversations, by name.
        byte_level: The vocabulary file is a tokenizer.json with a ByteLevel step. None if it is
            another file.
        of_file: Token and sides of padding in a tokenizer.json.
    """

    directory: Path
    config: dict = field(default_factory=dict)
    declared: str | None = None
    model_type: str | None = None
    names: dict[str, AddedToken | None] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    special: list[AddedToken] = field(default_factory=list)
    added: list[AddedToken] = field(default_factory=list)
    decides: bool = False
    chat_templates: dict[str, str] = field(default_factory=dict)
    byte_level: bool | None = None
    of_file: dict[str, str] = field(default_factory=dict)

    @property
    def defaults(self) -> Mapping[str, str]:
        """The tokens and padding side of the tokenizer's class, and those of a tokenizer.json."""
        of_class = DEFAULTS.get(self.tokenizer_class or "", {})
        of_file = {n: v for n, v in self.of_file.items() if self.generic or n in SIDES}
        return {**of_class, **of_file}

    def read_tokenizer_json(self, data: bytes, entries: dict) -> None:
        """Read the sections of a tokenizer.json that decide about its class and its padding.

        Args:
            data: The bytes of the file.
            entries: Its JSON object.
        """
        self.byte_level = b'"ByteLevel"' in data
        for section, side in (("padding", SIDES[0]), ("truncation", SIDES[1])):
            values = entries.get(section)
            if isinstance(values, dict):
                found = {side: str(values.get("direction")).lower()}
                found |= {"pad_token": values.get("pad_token")} if section == "padding" else {}
                self.of_file |= {n: v for n, v in found.items() if isinstance(v, str)}

    @property
    def tokenizer_class(self) -> str | None:
        """The class with which transformers opens the tokenizer, without "Fast"; None if neither a
        file nor the model names one."""
        return class_of(self.declared, self.model_type, bool(self.byte_level))

    @property
    def generic(self) -> bool:
        """Whether the tokenizer's class defines no tokens."""
        return self.tokenizer_class not in DEFAULTS

    @property
    def prefix(self) -> Prefix:
        """Texts of a sentencepiece tokenizer that begin with an added space, by the rules of the
        class in transformers 5: `legacy` of LlamaTokenizer is false by default."""
        wanted, legacy = self.flag("add_prefix_space"), self.flag("legacy")
        of_model = self.tokenizer_class if self.byte_level is not None else None
        name = self.declared.removesuffix("Fast") if self.declared else of_model
        if name is None and wanted is None and legacy is None:
            return "model"
        if wanted is False or name in ("PreTrainedTokenizer", "TokenizersBackend"):
            return "never"
        return "always" if legacy and name != "CodeLlamaTokenizer" else "first"

    def refuse(self, key: str, *supported: Any) -> None:
        """Raise UserError if the value of `key` in tokenizer_config.json is neither null nor
        supported."""
        value = self.config.get(key)
        if value is not None and value not in supported:
            raise UserError(f"{self.directory / CONFIG}: {key} {value!r} is not supported")

    def flag(self, key: str) -> bool | None:
        """Return the value of `key` in tokenizer_config.json; UserError if it is neither true,
        false nor null."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise UserError(
                f"{self.directory / CONFIG}: {key} is {brief(value)}, not true or false"
            )
        return value

    def side(self, key: str) -> Side:
        """Return padding_side or truncation_side; UserError if it is neither left nor right."""
        value = self.config.get(key)
        if value is None:
            value = self.defaults.get(key, "right")
        if value not in ("left", "right"):
            raise UserError(
                f"{self.directory / CONFIG}: {key} {brief(value)} is neither left nor right"
            )
        return value

    def all_added(
        self, found: Iterable[AddedToken], id_of: Callable[[str], int | None]
    ) -> list[AddedToken]:
        """Return the added tokens of the vocabulary file and of the settings files, and all tokens
        that the settings call special.

        The flags in added_tokens_decoder of tokenizer_config.json replace those of the vocabulary
        file, as in transformers.

        Args:
            found: Added tokens of the vocabulary file.
            id_of: Function from the content of a token of the vocabulary to its id.
        """
        tokens = {token.content: token for token in found}
        for token in self.added:
            known = tokens.setdefault(token.content, token)
            if self.decides:
                # In a tokenizer.json of the generic class, a special token remains special.
                stays = self.generic and self.byte_level is not None and known.special
                special = token.special or stays
                tokens[token.content] = token._replace(id=known.id, special=special)
        decided = {token.content for token in self.added}
        named = [*filter(None, self.names.values())]
        named += [AddedToken(content, 0) for content in self._of_class().values()]
        for token in named:
            known = tokens.get(token.content)
            if known and (not self.decides or not self.generic or token.content in decided):
                tokens[token.content] = known._replace(special=True)
        for token in [*named, *self.special]:
            if token.content not in tokens and (id_ := id_of(token.content)) is not None:
                tokens[token.content] = token._replace(id=id_)
        return list(tokens.values())

    def apply(
        self,
        tokenizer: Own,
        id_of: Callable[[str], int | None],
        own: dict[str, int] | None = None,
        add_bos: bool = False,
        template: tuple[list[int], list[int]] | None = None,
    ) -> Own:
        """Set the ids of the special tokens, the tokens to add before and after a text, the sides
        of padding and truncation, and the chat templates.

        Args:
            tokenizer: The tokenizer to change.
            id_of: Function from a token's content to its id.
            own: Ids by role that the vocabulary itself defines. Templates can name their tokens.
            add_bos: Default of add_bos_token if the files do not contain it.
            template: Ids before and after a text from a tokenizer.json. They override everything
                else.

        Raises:
            UserError: A named or additional token is not in the vocabulary.
        """
        for extra in self.special:
            if id_of(extra.content) is None:
                self._refuse_missing("the additional special token", extra)
        own = own or {}
        for role in ROLES:
            token = self._id(role, id_of, own, tokenizer.vocab_size)
            setattr(tokenizer, f"{role}_token_id", token)
            if token is not None and token == own.get(role):
                tokenizer.own_texts = {
                    **tokenizer.own_texts,
                    f"{role}_token": tokenizer.decode([token]),
                }
        of_class = {n: c for n, c in self._of_class().items() if id_of(c) is not None}
        named = {name: token.content for name, token in self.names.items() if token}
        tokenizer.special_tokens_map = of_class | named
        if template is None:
            add = {"add_bos_token": add_bos, "add_eos_token": False}
            add |= {key: value for key in add if (value := self.flag(key)) is not None}
            ids = zip(add.values(), (tokenizer.bos_token_id, tokenizer.eos_token_id), strict=True)
            before, after = (
                [token] if wanted and token is not None else [] for wanted, token in ids
            )
            template = before, after
        tokenizer.before, tokenizer.after = map(tuple, template)
        tokenizer.padding_side, tokenizer.truncation_side = map(self.side, SIDES)
        tokenizer.split_special_tokens = bool(self.flag("split_special_tokens"))
        tokenizer.chat_templates = self.chat_templates
        return tokenizer

    def _refuse_missing(self, name: str, token: AddedToken) -> NoReturn:
        raise UserError(f"{self.directory}: {name} {token.content!r} is not in the vocabulary")

    def unnamed_id(self, role: str) -> int | None:
        """Return the id in the files of the token with a role, or None if a file names the
        token."""
        if f"{role}_token" in self.names:
            return None
        # Many a config.json has the id of a bos that the class of the tokenizer does not have.
        ids = ids_in(self.config) if role == "bos" and self.declared else self.ids
        return ids.get(role)

    def _of_class(self) -> dict[str, str]:
        """Return the default tokens that no file names."""
        return {
            name: content
            for name, content in self.defaults.items()
            if name not in self.names and name not in SIDES
        }

    def _id(
        self, role: str, id_of: Callable[[str], int | None], own: dict[str, int], vocab_size: int
    ) -> int | None:
        """Return the id of the token with a role: by its name in the settings, otherwise the
        default of the tokenizer's class, otherwise the id in config.json, otherwise the id in the
        vocabulary."""
        if (name := f"{role}_token") in self.names:
            token = self.names[name]
            if token is not None and id_of(token.content) is None:
                self._refuse_missing(name, token)
            return None if token is None else id_of(token.content)
        of_class = self.defaults.get(name)
        known = (of_class and id_of(of_class), self.unnamed_id(role), own.get(role))
        return next((t for t in known if isinstance(t, int) and t < vocab_size), None)


def read_settings(directory: Path) -> TokenizerSettings:
    """Read the settings in a tokenizer's directory. Missing files are skipped.

    Raises:
        UserError: A file is malformed.
    """
    config = _json_beside(directory / CONFIG)
    settings = TokenizerSettings(directory, config)
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, dict | None):
        raise UserError(
            f"{directory / CONFIG}: added_tokens_decoder is {brief(decoder)}: it must be an object"
        )
    settings.decides = decoder is not None
    _read_names(settings, directory / CONFIG, config)
    if not settings.decides:  # as in transformers, which then reads the older files
        _read_names(settings, directory / MAP, _json_beside(directory / MAP))
    with malformed(directory / CONFIG):
        for token_id, entry in (decoder or {}).items():
            settings.added.append(AddedToken.from_json(entry, int(token_id)))
    settings.added.sort(key=lambda token: token.id)
    if not settings.decides:
        named = {
            token.content for token in [*filter(None, settings.names.values()), *settings.special]
        }
        with malformed(directory / ADDED):
            for content, token_id in _json_beside(directory / ADDED).items():
                entry = {"content": content, "special": content in named}
                settings.added.append(AddedToken.from_json(entry, token_id))
    model = _json_beside(directory / "config.json")
    generation = _json_beside(directory / GENERATION)
    settings.ids = ids_in(model) | ids_in(generation) | ids_in(config)
    _read_class(settings, model)
    settings.chat_templates = chat_templates_in(directory, config)
    return settings


def ids_in(entries: dict) -> dict[str, int]:
    """Return the ids of the bos, eos and pad tokens in a JSON object, by role. Of a list of ids,
    the first one counts."""
    found = {}
    for role in ROLES:
        value = entries.get(f"{role}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and value >= 0:
            found[role] = value
    return found


def _read_class(settings: TokenizerSettings, model: dict) -> None:
    """Read the names of the tokenizer's class and of the model. model: contents of config.json."""
    for path, values in ((CONFIG, settings.config), ("config.json", model)):
        declared = values.get("tokenizer_class")
        if not isinstance(declared, str | None):
            raise UserError(
                f"{settings.directory / path}: tokenizer_class {brief(declared)} is not the name "
                "of a class"
            )
        settings.declared = settings.declared or declared
    model_type = model.get("model_type") or settings.config.get("model_type")
    settings.model_type = model_type if isinstance(model_type, str) else None


def _read_names(settings: TokenizerSettings, path: Path, entries: dict) -> None:
    """Read the named and the additional special tokens in tokenizer_config.json or
    special_tokens_map.json."""
    named = {
        name: value
        for name, value in entries.items()
        if name in NAMED or (name.endswith("_token") and _is_token(value))
    }
    for name in EXTRA:
        if not isinstance(value := entries.get(name), dict | list | None):
            raise UserError(f"{path}: {name} is {brief(value)}: it must be a list or an object")
    extra = entries.get(EXTRA[0]) or entries.get(EXTRA[1])
    if isinstance(extra, dict):
        named |= extra
    with malformed(path):
        for name, value in named.items():
            if name in RESERVED:
                raise UserError(f"{name} can't be the name of a token: templates use it otherwise")
            token = None if value is None else _token_of(name, value, special=True)
            if token is None or token.content:
                settings.names[name] = token
        if not isinstance(extra, dict):
            for value in extra or ():
                token = _token_of(EXTRA[0], value, special=path.name == MAP)
                settings.special.append(token)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _token_of(name: str, value: Any, special: bool) -> AddedToken:
    """Return a token that is given as a text or as an object with flags.

    Args:
        name: Its name, for the error.
        value: The text or object. A text is a special token.
        special: Make the token special, regardless of its flags.
    """
    entry = value if isinstance(value, dict) else {"content": value, "special": True}
    if not isinstance(entry.get("content"), str):
        raise UserError(f"{name} {value!r} is not a token")
    return AddedToken.from_json({**entry, "special": True} if special else entry, 0)


def _json_beside(path: Path) -> dict:
    """Read the object in a JSON file. Returns an empty object if the file does not exist."""
    return json_object(path, read_bytes(path)) if path.exists() else {}
