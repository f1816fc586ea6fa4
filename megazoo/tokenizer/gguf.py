"""Tokenizers in GGUF files: conversion between metadata and Hugging Face files.

tokenizer.ggml.model is the kind of tokenizer: "gpt2" (byte-level BPE) or "llama" (sentencepiece BPE
with byte fallback). tokenizer.ggml.pre names the rule that splits a text into words.
"""

import json
import re
from typing import Any, NamedTuple

import sentencepiece

from megazoo.errors import UserError
from megazoo.files import convert
from megazoo.sidecars import CHAT_TEMPLATE, TEMPLATE_FOLDER, TEMPLATE_NAME
from megazoo.tokenizer.added import AddedToken
from megazoo.tokenizer.base import Tokenizer
from megazoo.tokenizer.byte_bpe import LLAMA3_PATTERN
from megazoo.tokenizer.sentence_piece import SPACE, SentencePieceTokenizer
from megazoo.tokenizer.templates import DEFAULT

TEMPLATE = "tokenizer.chat_template"  # the key of the default template; other keys begin with it

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Words(NamedTuple):
    """How byte-level BPE splits a text into words.

    Attributes:
        pattern: The regular expression; None for GPT-2's.
        digits: Split each digit into its own word.
        nfc: Normalize the text to NFC before splitting.
        whole: Do not merge a word that is a token (ignore_merges).
        bos: Default of add_bos_token if the file does not contain it.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False

    def pre_tokenizer(self) -> dict:
        """Return the pre_tokenizer section of a tokenizer.json."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps: list[dict] = [byte_level | {"use_regex": self.pattern is None}]
        if self.pattern:
            regex = {"Regex": self.pattern}
            steps.insert(
                0, {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
            )
        if self.digits:
            steps.insert(0, {"type": "Digits", "individual_digits": True})
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


# By tokenizer.ggml.pre. Export writes the first of several names for the same rule.
WORDS = {
    "gpt-2": Words(),
    "smollm": Words(digits=True),
    "llama-bpe": Words(LLAMA3_PATTERN, whole=True, bos=True),
    "qwen2": Words(QWEN2_PATTERN, nfc=True),
    "tekken": Words(TEKKEN_PATTERN, whole=True, bos=True),
}
WORDS |= dict.fromkeys(("mpt", "olmo", "phi-2"), WORDS["gpt-2"])
WORDS |= dict.fromkeys(("starcoder", "refact"), WORDS["smollm"])
WORDS |= dict.fromkeys(("llama3", "llama-v3"), WORDS["llama-bpe"])
WORDS |= dict.fromkeys(("deepseek-r1-qwen",), WORDS["qwen2"])


def has_vocabulary(metadata: dict[str, Any]) -> bool:
    """Return whether the metadata of a GGUF file contains a tokenizer."""
    return bool(metadata.get("tokenizer.ggml.tokens"))


def tokenizer_files_of(metadata: dict[str, Any]) -> dict[str, bytes]:
    """Convert the metadata of a GGUF file to Hugging Face tokenizer files.

    Returns:
        The contents of tokenizer.json and its settings files, keyed by file name. Empty if the
            metadata contains no tokenizer.

    Raises:
        UserError: The kind of tokenizer is not supported.
    """
    if not has_vocabulary(metadata):
        return {}
    start = "tokenizer.ggml."
    of = {
        key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)
    }
    of = {key: convert(of[key], TYPES.get(key, Any), f"{start}{key}") for key in of}
    tokens, kind = of["tokens"], of.get("model")
    kinds = of.get("token_type") or [NORMAL] * len(tokens)
    scores = of.setdefault("scores", [0.0] * len(tokens))
    if not len(kinds) == len(scores) == len(tokens) == len(set(tokens)):
        raise UserError(f"{start}tokens has repeated tokens, or tokens without a type or a score")
    for key in ROLES.values():
        if not 0 <= of.get(f"{key}_token_id", 0) < len(tokens):
            raise UserError(
                f"{start}{key}_token_id {of[f'{key}_token_id']} is not the id of a token"
            )
    if kind not in ("gpt2", "llama"):
        raise UserError(f"tokenizer.ggml.model {kind!r} is not supported: only gpt2 and llama")
    pipeline, bos = (_byte_level if kind == "gpt2" else _sentencepiece)(of, tokens, kinds)
    marked = {CONTROL, USER_DEFINED} | ({UNKNOWN} if kind == "llama" else set())
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    added = [
        {"id": token, "content": content, **flags, "special": mark != USER_DEFINED}
        for token, (content, mark) in enumerate(zip(tokens, kinds, strict=True))
        if mark in marked
    ]
    names = {
        role: tokens[of[f"{key}_token_id"]]
        for role, key in ROLES.items()
        if of.get(f"{key}_token_id") is not None
    }
    around = {
        "bos": of.get("add_bos_token", bos) and names.get("bos"),
        "eos": of.get("add_eos_token", False) and names.get("eos"),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": name for role, name in names.items()},
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **pipeline,
        "post_processor": _template(around, tokens) or pipeline["post_processor"],
    }
    files = {"tokenizer.json": json.dumps(whole), "tokenizer_config.json": json.dumps(settings)}
    template = convert(metadata.get(TEMPLATE, ""), str, TEMPLATE)
    if template:
        files[CHAT_TEMPLATE] = template
    named = convert(metadata.get(f"{TEMPLATE}s", []), list[str], f"{TEMPLATE}s")
    for name in filter(TEMPLATE_NAME.fullmatch, named):
        key = f"{TEMPLATE}.{name}"
        files[f"{TEMPLATE_FOLDER}/{name}.jinja"] = convert(metadata.get(key), str, key)
    return {name: text.encode() for name, text in files.items()}


ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
TYPES: dict[str, Any] = {
    "tokens": list[str],
    "token_type": list[int],
    "scores": list[float],
    "merges": list[str],
    "model": str,
    "pre": str,
    **dict.fromkeys((f"{role}_token_id" for role in ROLES.values()), int),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), bool),
}  # by the part of the key after "tokenizer.ggml."


def _byte_level(of: dict, tokens: list[str], kinds: list[int]) -> tuple[dict, bool]:
    """Return the tokenizer.json sections of byte-level BPE, and the default of add_bos_token."""
    if (words := WORDS.get(of.get("pre", ""))) is None:
        known = ", ".join(WORDS)
        raise UserError(f"tokenizer.ggml.pre {of.get('pre')!r} is not supported: only {known}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    parts = {
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": words.pre_tokenizer(),
        "post_processor": byte_level | {"trim_offsets": False, "use_regex": True},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": words.whole,
            "vocab": _vocabulary(tokens, kinds),
            "merges": [merge.split(" ", 1) for merge in of.get("merges") or []],
        },
    }
    return parts, words.bos


def _sentencepiece(of: dict, tokens: list[str], kinds: list[int]) -> tuple[dict, bool]:
    """Return the tokenizer.json sections of sentencepiece BPE, and the default of add_bos_token."""
    prefix = of.get("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    decoders: list[dict] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((c for c, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    listed = zip(tokens, of.get("scores", ()), kinds, strict=True)
    normal = {content: score for content, score, kind in listed if kind == NORMAL}
    merges = [merge.split(" ", 1) for merge in of.get("merges") or []]
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": BYTE in kinds,
            "ignore_merges": False,
            "vocab": _vocabulary(tokens, kinds),
            "merges": merges or merges_of(normal),
        },
    }
    return parts, True


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Return the ids of all tokens, except unused ones, which only pad the list."""
    pairs = enumerate(zip(tokens, kinds, strict=True))
    return {content: token for token, (content, kind) in pairs if kind != UNUSED}


def merges_of(scores: dict[str, float]) -> list[list[str]]:
    """Return the merges of a sentencepiece BPE model: all pairs of pieces that form a piece,
    highest scores first.

    Args:
        scores: Scores of the pieces, in the order of their ids.
    """
    place = {piece: token for token, piece in enumerate(scores)}
    ways = [
        (-score, place[piece], place[piece[:cut]], piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in place and piece[cut:] in place
    ]
    return [[left, right] for *_, left, right in sorted(ways)]


def _template(around: dict[str, str | None], tokens: list[str]) -> dict | None:
    """Return the post_processor that adds bos before and eos after a text, or None if neither is
    added."""
    used = [name for name in around.values() if name]
    if not used:
        return None

    def special(role: str, sequence: int) -> list[dict]:
        name = around[role]
        return [{"SpecialToken": {"id": name, "type_id": sequence}}] if name else []

    def text(name: str, sequence: int) -> list[dict]:
        inside = {"Sequence": {"id": name, "type_id": sequence}}
        return [*special("bos", sequence), inside, *special("eos", sequence)]

    ids = {name: {"id": name, "ids": [tokens.index(name)], "tokens": [name]} for name in used}
    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": ids,
    }


def metadata_of(tokenizer: Tokenizer, files: dict[str, bytes], vocab_size: int) -> dict[str, Any]:
    """Convert a tokenizer to GGUF metadata. This is the inverse of `tokenizer_files_of`.

    Args:
        tokenizer: The tokenizer.
        files: The tokenizer's files, by their names in a model's directory.
        vocab_size: Vocabulary size of the model. The token list is padded to it with unused tokens.

    Raises:
        UserError: GGUF cannot represent the tokenizer.
    """
    if "tokenizer.json" in files:
        tokens, values = _of_pipeline(json.loads(files["tokenizer.json"]))
    elif "tokenizer.model" in files:
        tokens, values = _of_pieces(files["tokenizer.model"], tokenizer)
    else:
        raise UserError(
            "this tokenizer can't be written as GGUF: only a tokenizer.json or a "
            "sentencepiece model is supported"
        )
    if len(tokens) > vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokens)} tokens, which is more than the model's {vocab_size}"
        )
    for token in range(len(tokens), vocab_size):
        tokens.append(Token(f"[PAD{token}]", UNUSED, 0.0))
    values |= {
        "tokens": [token.content for token in tokens],
        "token_type": [token.kind for token in tokens],
        "add_bos_token": bool(tokenizer.before),
        "add_eos_token": bool(tokenizer.after),
    }
    if values["model"] == "llama":
        values["scores"] = [token.score for token in tokens]
    unknown = next((i for i, token in enumerate(tokens) if token.kind == UNKNOWN), None)
    for role, token in (
        ("bos", _first(tokenizer.bos_token_id, *tokenizer.before[:1])),
        ("eos", _first(tokenizer.eos_token_id, *tokenizer.after[-1:])),
        ("padding", tokenizer.pad_token_id),
        ("unknown", unknown),
    ):
        if token is not None:
            values[f"{role}_token_id"] = token
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    templates = dict(tokenizer.chat_templates)
    if template := templates.pop(DEFAULT, None):
        metadata[TEMPLATE] = template
    if templates:
        metadata[f"{TEMPLATE}s"] = sorted(templates)
        metadata |= {f"{TEMPLATE}.{name}": text for name, text in templates.items()}
    return metadata


def _first(*tokens: int | None) -> int | None:
    """Return the first of the ids that is not None."""
    return next((token for token in tokens if token is not None), None)


class Token(NamedTuple):
    """A token: its content, its tokenizer.ggml.token_type, and sentencepiece's score."""

    content: str
    kind: int
    score: float = 0.0


def _of_pipeline(whole: dict) -> tuple[list[Token], dict[str, Any]]:
    """Return the tokens of a tokenizer.json, and metadata values by the part of the key after
    "tokenizer.ggml."."""
    model = whole["model"]
    if "merges" not in model:
        raise UserError(
            f"a tokenizer.json with the model {model.get('type')} can't be written as GGUF: "
            "only BPE is supported"
        )
    added = [AddedToken.from_json(entry, entry["id"]) for entry in whole.get("added_tokens") or []]
    for token in added:
        if token.lstrip or token.rstrip or token.single_word:
            raise UserError(
                f"{token.content!r} has lstrip, rstrip or single_word, which GGUF can't represent"
            )
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    vocab, byte_level = model["vocab"], not model.get("byte_fallback")
    names = {token: content for content, token in vocab.items()}
    names |= {token.id: token.content for token in added}
    kinds = {token.id: CONTROL if token.special else USER_DEFINED for token in added}
    if byte_level:
        scores, words = {}, _name_of_words(whole)
        values = {"model": "gpt2", "pre": words, "merges": merges}
    else:
        spelled = {token: BYTE for token, content in names.items() if BYTE_NAME.fullmatch(content)}
        kinds = spelled | kinds
        kinds |= {vocab[name]: UNKNOWN for name in (model.get("unk_token"),) if name in vocab}
        scores = _scores(merges)
        values = {"model": "llama", "pre": "default", "add_space_prefix": _adds_space(whole)}
    tokens = []
    for token in range(max(names) + 1):
        content = names.get(token, f"[PAD{token}]")
        kind = kinds.get(token, NORMAL if token in names else UNUSED)
        tokens.append(Token(content, kind, scores.get(content, -float(len(merges)))))
    return tokens, values


BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")


def _name_of_words(whole: dict) -> str:
    """Return the tokenizer.ggml.pre of a tokenizer.json."""
    normalizer = whole.get("normalizer") or {"normalizers": []}
    steps = normalizer.get("normalizers", [normalizer])
    for name, words in WORDS.items():
        if (
            _steps_of(words.pre_tokenizer()) == _steps_of(whole.get("pre_tokenizer") or {})
            and words.whole == bool(whole["model"].get("ignore_merges"))
            and steps == ([{"type": "NFC"}] if words.nfc else [])
        ):
            return name
    raise UserError("GGUF can't represent how its tokenizer.json splits a text into words")


def _steps_of(pre_tokenizer: dict) -> list[dict]:
    """Return the steps of a pre_tokenizer, without settings that do not change ids."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    usual = {"ByteLevel": {"use_regex": True}}
    return [
        {
            **usual.get(step.get("type"), {}),
            **{k: v for k, v in step.items() if k != "trim_offsets"},
        }
        for step in steps
    ]


def _adds_space(whole: dict) -> bool:
    """Return whether a sentencepiece BPE tokenizer.json adds a space before a text."""
    for prefix in (True, False):
        ours, _ = _sentencepiece({"add_space_prefix": prefix}, [], [])
        if all(ours[part] == whole.get(part) for part in ("normalizer", "pre_tokenizer")):
            return prefix
    raise UserError("GGUF can't represent how its tokenizer.json treats spaces")


def _scores(merges: list[str]) -> dict[str, float]:
    """Return scores that preserve the order of merges. The score of a piece is minus the number of
    merges before the first one that forms it."""
    scores: dict[str, float] = {}
    for place, merge in enumerate(merges):
        scores.setdefault(merge.replace(" ", ""), -float(place))
    return scores


def _of_pieces(data: bytes, tokenizer: Tokenizer) -> tuple[list[Token], dict[str, Any]]:
    """Return the tokens of a sentencepiece model, and metadata values by the part of the key after
    "tokenizer.ggml."."""
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError:
        raise UserError("a tokenizer.model of tiktoken can't be written as GGUF") from None
    if model.vocab_size() != tokenizer.vocab_size:
        raise UserError("a sentencepiece model with added tokens can't be written as GGUF")
    tokens = []
    for token in range(model.vocab_size()):
        marks = {
            UNKNOWN: model.is_unknown(token),
            CONTROL: model.is_control(token),
            UNUSED: model.is_unused(token),
            BYTE: model.is_byte(token),
        }
        kind = next((kind for kind, marked in marks.items() if marked), NORMAL)
        tokens.append(Token(model.id_to_piece(token), kind, model.get_score(token)))
    if any(token.score % 1 for token in tokens):  # log-probabilities of a unigram model
        raise UserError("a unigram sentencepiece model can't be written as GGUF")
    if sum(token.kind == NORMAL and token.score == 0 for token in tokens) > 1:
        raise UserError("a sentencepiece model with user-defined symbols can't be written as GGUF")
    prefix = model.encode("a", out_type=str)[0].startswith(SPACE)
    text = " two  spaces, \uff21 \ufb01 e\u0301 "
    if model.normalize(text) != (SPACE if prefix else "") + text.replace(" ", SPACE):
        raise UserError("a sentencepiece model that normalizes text can't be written as GGUF")
    adds_space = isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.adds_space
    return tokens, {"model": "llama", "pre": "default", "add_space_prefix": adds_space}
