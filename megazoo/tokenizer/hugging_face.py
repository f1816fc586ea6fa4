"""Reads byte-level BPE from Hugging Face files: vocab.json and merges.txt, or a tokenizer.json that
tiktoken can reproduce."""

from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import malformed, read_bytes
from megazoo.tokenizer.added import AddedToken, check_id
from megazoo.tokenizer.byte_bpe import GPT2_PATTERN, ByteLevelBPE
from megazoo.tokenizer.classes import PREFIXED
from megazoo.tokenizer.settings import TokenizerSettings

GPT2_CLASSES = (
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
END_OF_TEXT = "<|endoftext|>"


def byte_of_character() -> dict[str, int]:
    """Return the byte of each character in GPT-2's spelling. Printable bytes are spelled as
    themselves, other bytes as characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF = byte_of_character()


def from_tokenizer_json(path: Path, data: dict, settings: TokenizerSettings) -> ByteLevelBPE:
    """Create the tokenizer of a tokenizer.json with the content `data`.

    Raises:
        UserError: The tokenizer is not a standard byte-level BPE. The `tokenizers` library may
            support it.
    """
    with malformed(path):
        pattern, nfc, template = _read_pipeline(data)
    with malformed(path):
        model = data["model"]
        merges = [
            merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
        ]
        found = [
            AddedToken.from_json(entry, entry["id"]) for entry in data.get("added_tokens") or []
        ]
        unk = model.get("unk_token")
        if unk and model.get("fuse_unk") and not BYTE_OF.keys() <= model["vocab"].keys():
            raise UserError("model.fuse_unk: tiktoken sees no words, in which it would fuse")
        tokenizer, id_of = _build(
            model["vocab"],
            merges,
            pattern,
            found,
            settings,
            nfc=nfc,
            unk=unk,
            exact=bool(model.get("ignore_merges")),
        )
    return settings.apply(tokenizer, id_of, template=template)


def use_prefix_of_class(data: dict, settings: TokenizerSettings) -> bool:
    """Change whether the ByteLevel steps of a tokenizer.json add a space before a text, if the
    class of the tokenizer decides about it. Without add_prefix_space, such a class adds none.

    Args:
        data: The contents of the tokenizer.json, which are changed.
        settings: The settings next to it.

    Returns:
        Whether a step was changed.
    """
    wanted = bool(settings.flag("add_prefix_space"))
    changed, steps = False, [data.get("pre_tokenizer")]
    for step in steps if settings.tokenizer_class in PREFIXED else ():
        if not isinstance(step, dict):
            continue
        if isinstance(inside := step.get("pretokenizers"), list):
            steps += inside
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space", True) != wanted:
            step["add_prefix_space"], changed = wanted, True
    return changed


def from_vocab_and_merges(
    vocab_path: Path, vocab: dict, settings: TokenizerSettings
) -> ByteLevelBPE:
    """Create a GPT-2 tokenizer from vocab.json (with the content `vocab`) and the merges.txt next
    to it."""
    settings.refuse("tokenizer_class", *GPT2_CLASSES)
    settings.declared = settings.declared or GPT2_CLASSES[0]  # whose files these are
    settings.refuse("add_prefix_space", False)
    path = vocab_path.with_name("merges.txt")
    data = read_bytes(path)
    with malformed(path):
        lines = data.decode().splitlines()
        if lines and lines[0].startswith("#version"):  # other lines that start with # are merges
            lines = lines[1:]
        merges = [line.split(" ") for line in lines if line]
    found = [AddedToken(END_OF_TEXT, vocab[END_OF_TEXT])] if END_OF_TEXT in vocab else []
    with malformed(vocab_path):
        tokenizer, id_of = _build(vocab, merges, GPT2_PATTERN, found, settings)
    return settings.apply(tokenizer, id_of)


def _build(vocab, merges, pattern, found, settings, nfc=False, unk=None, exact=False):
    """Return a tokenizer, and the function from a token's content to its id. exact: a word that is
    a token is not split."""
    for content, token in vocab.items():
        check_id(token, content)
    added = settings.all_added(found, vocab.get)
    id_of = vocab | {token.content: token.id for token in added}
    tokens = {token: _bytes_of(content) for content, token in vocab.items()}
    if len(tokens) < len(vocab):
        raise UserError("two tokens of the vocabulary have the same id")
    of_bytes = {content for content in vocab if BYTE_OF.keys() >= set(content)}
    ranked = {vocab[content]: None for content in BYTE_OF if content in vocab}
    for left, right in merges:
        for part in (left, right, left + right):
            if part not in of_bytes:
                raise UserError(
                    f"merge {left!r} {right!r}: {part!r} is not in the vocabulary, or has a "
                    "character that does not encode a byte"
                )
        # if two merges form the same token, the first one sets its rank
        ranked[vocab[left + right]] = None
    if exact:
        names = {token.content for token in added}
        for content, token in vocab.items():
            if token not in ranked and content not in names:
                raise UserError(
                    f"model.ignore_merges true with the token {content!r}, which no merge makes"
                )
    return ByteLevelBPE(tokens, list(ranked), pattern, added, nfc, vocab.get(unk)), id_of.get


def _bytes_of(content: str) -> bytes:
    """Return the bytes that a token of the vocabulary spells. A token with other characters is its
    own UTF-8 text."""
    try:
        return bytes(BYTE_OF[character] for character in content)
    except KeyError:
        return content.encode()


def _read_pipeline(data: dict) -> tuple[str, bool, tuple[list[int], list[int]]]:
    """Read the sections around the model in a tokenizer.json.

    Returns:
        The pattern that splits words, whether texts are normalized to NFC, and the ids to add
            before and after a text.

    Raises:
        UserError: A section is not supported.
    """
    model = data["model"]
    kind = model.get("type", "BPE" if "merges" in model else None)
    _check("model.type", kind, "BPE")
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        _check(f"model.{field}", model.get(field) or None, None)
    normalizers = _steps(data, "normalizer", "normalizers")
    for step in normalizers:
        _check("normalizer", step["type"], "NFC")
    return _read_pattern(data), bool(normalizers), _read_template(data)


def _read_pattern(data: dict) -> str:
    """Return the regular expression with which the pre-tokenizer splits words."""
    steps = _steps(data, "pre_tokenizer", "pretokenizers")
    kinds = [step["type"] for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise UserError(f"pre_tokenizer {' + '.join(kinds) or None} is not supported")
    *splits, last = steps
    _check("pre_tokenizer.add_prefix_space", last.get("add_prefix_space", True), False)
    _check("pre_tokenizer.use_regex", last.get("use_regex", True), not splits)
    if not splits:
        return GPT2_PATTERN
    (split,) = splits
    _check("pre_tokenizer.behavior", split["behavior"], "Isolated")
    _check("pre_tokenizer.invert", split["invert"], False)
    _check("pre_tokenizer.pattern", [*split["pattern"]], ["Regex"])
    pattern = split["pattern"]["Regex"]
    if "$" in pattern.replace(r"\$", ""):  # end of text or of line, by library
        raise UserError(f"pre_tokenizer.pattern {pattern!r} is not supported: it has a $")
    return pattern


def _read_template(data: dict) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor adds before and after a text."""
    steps = _steps(data, "post_processor", "processors")
    templates = [step for step in steps if step["type"] != "ByteLevel"]
    for step in templates:
        _check("post_processor", step["type"], "TemplateProcessing")
    if len(templates) > 1:
        raise UserError("post_processor with several TemplateProcessing is not supported")
    around = [], []
    for step in templates:
        text = [[*item] for item in step["single"]].index(["Sequence"])
        for place, item in enumerate(step["single"]):
            if place != text:
                ids = step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
                around[place > text].extend(ids)
    return around


def _steps(data: dict, field: str, inside: str) -> list[dict]:
    """Return the steps of a normalizer, pre-tokenizer or post-processor, with nested sequences
    flattened."""
    value = data.get(field)
    if value is None:
        return []
    if value["type"] != "Sequence":
        return [value]
    return [step for entry in value[inside] for step in _steps({field: entry}, field, inside)]


def _check(field: str, value, supported) -> None:
    if value != supported:
        raise UserError(f"{field} {value!r} is not supported")
