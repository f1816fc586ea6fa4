"""The files beside a tokenizer are read as transformers reads them: flags of added tokens, spaces
of sentencepiece, sides, classes and templates."""

import itertools
import json
import random

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer

from megazoo.errors import UserError
from megazoo.tokenizer import open_tokenizer
from megazoo.tokenizer.byte_bpe import ByteLevelBPE
from megazoo.tokenizer.classes import CLASS_OF, DEFAULTS, GENERIC, MISNAMED
from megazoo.tokenizer.pipeline import PipelineTokenizer

FLAGS = ("lstrip", "rstrip", "normalized", "special")
WORDS = ["hello there fox", "the hello", "fox  there"]
NAMES = ["<|end|>", "<|user|>", "hello", "<img>", "  "]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def base():
    """A byte-level tokenizer.json without special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<s>", "</s>"],
        show_progress=False,
    )
    bpe.train_from_iterator(WORDS * 5, trainer)
    return bpe.to_str()


def write(path, files, data=None):
    path.mkdir(exist_ok=True)
    for old in path.iterdir():
        if old.is_file():
            old.unlink()
    if data:
        (path / "tokenizer.json").write_text(data)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


def flags_of(draw):
    return {name: draw.random() < 0.4 for name in FLAGS} | {"single_word": False}


def check(ours, theirs, texts, case):
    for text in texts:
        for split in (False, True):
            ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=split)
            found = ours.encode(text, add_special_tokens=False, parse_special=not split)
            assert found == ids, (case, text, split)
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, (case, text, skip)
        ids = theirs.encode(text, add_special_tokens=False)
        expected = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=True) == expected, (case, text)


def texts_with(names, draw, count):
    pieces = [*names, *names, " ", "  ", "fox", "hello", "\n", "é", "the ", "x"]
    return ["".join(draw.choices(pieces, k=draw.randrange(1, 9))) for _ in range(count)]


# the first form is read by tiktoken, the second one by the `tokenizers` library
@pytest.mark.parametrize("kind", [ByteLevelBPE, PipelineTokenizer])
def test_flags_of_added_tokens_are_those_of_transformers(kind, base, tmp_path):
    draw = random.Random(5)
    for number in range(30):
        bpe = Tokenizer.from_str(base)
        if kind is PipelineTokenizer:
            digits = pre_tokenizers.Digits(individual_digits=True)
            bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, bpe.pre_tokenizer])
        bpe.add_tokens([AddedToken(n, **flags_of(draw)) for n in NAMES[: draw.randrange(1, 6)]])
        data = json.loads(bpe.to_str())
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if draw.random() < 0.7:
            config["added_tokens_decoder"] = {
                str(entry["id"]): {"content": entry["content"]} | flags_of(draw)
                for entry in data["added_tokens"]
                if draw.random() < 0.8
            }
        named = {
            name: draw.choice([entry["content"] for entry in data["added_tokens"]])
            for name in ("eos_token", "pad_token", "unk_token", "image_token")
            if draw.random() < 0.3
        }
        extra = draw.choice([["<|user|>"], ["fox"], {"audio_token": "<s>"}, None])
        key = draw.choice(["extra_special_tokens", "additional_special_tokens"])
        if extra and (isinstance(extra, list) or key == "extra_special_tokens"):
            config[key] = extra if extra != ["<|user|>"] or len(data["added_tokens"]) > 4 else []
        where = draw.choice(["tokenizer_config.json", "special_tokens_map.json"])
        files = {"tokenizer_config.json": config, "special_tokens_map.json": {}}
        files[where] |= named
        path = write(tmp_path / str(number), files, json.dumps(data))
        ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
        assert isinstance(ours, kind)
        assert ours.special_tokens_map == theirs.special_tokens_map, files
        assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
        check(ours, theirs, texts_with(NAMES, draw, 12), files)


def test_an_object_names_a_token_with_flags(base, tmp_path):
    token = {"__type": "AddedToken", "content": "hello", "lstrip": True, "normalized": True}
    for files in (
        {"tokenizer_config.json": {"eos_token": token}},
        {"tokenizer_config.json": {"extra_special_tokens": [token]}},
        {"special_tokens_map.json": {"pad_token": {"content": "hello", "rstrip": True}}},
        {
            "tokenizer_config.json": {"added_tokens_decoder": {}, "eos_token": "</s>"},
            "special_tokens_map.json": {"eos_token": "<s>", "pad_token": "hello"},
        },
        {"special_tokens_map.json": {"eos_token": "<s>"}},
    ):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
        files["tokenizer_config.json"] = config | files.get("tokenizer_config.json", {})
        path = write(tmp_path / "a", files, base)
        ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
        assert ours.special_tokens_map == theirs.special_tokens_map
        check(ours, theirs, ["a hello fox", "</s> hello  hello", "hello"], files)


def test_spaces_of_sentencepiece_are_those_of_llama_tokenizer(directory, tmp_path):
    pytest.importorskip("google.protobuf")
    draw, data = random.Random(2), (directory / "llama2" / "tokenizer.model").read_bytes()
    added = {
        str(place): {"content": name, "special": place < 3} | flags
        for place, name, flags in [
            (0, "<unk>", {}),
            (1, "<s>", {}),
            (2, "</s>", {"rstrip": True}),
            (1200, "<|end|>", {"lstrip": True, "normalized": False, "special": True}),
        ]
    }
    names = ["</s>", "<s>", "<|end|>", "\u2581"]
    texts = ["fox", " fox", "</s> fox", "</s>fox", "<s> a</s>  b", "", " ", "  x", "\u2581a"]
    texts += texts_with(names, draw, 25)
    for legacy, prefix, decoder in itertools.product(
        (None, True, False), (None, True, False), (None, added)
    ):
        values = {"legacy": legacy, "add_prefix_space": prefix, "added_tokens_decoder": decoder}
        config = {name: value for name, value in values.items() if value is not None}
        config |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        path = write(tmp_path / "a", {"tokenizer_config.json": config})
        (path / "tokenizer.model").write_bytes(data)
        ours, theirs = open_tokenizer(path), LlamaTokenizer.from_pretrained(path)
        check(ours, theirs, texts if decoder else texts[:12], config)
        assert ours.encode("a fox") == theirs.encode("a fox")
        assert ours.padding_side == theirs.padding_side == "left"
        # a tokenizer.json whose own steps add a space before each text, as in LLaMA 2's
        whole = json.loads(theirs.backend_tokenizer.to_str())
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        steps = [{"type": "Prepend", "prepend": "\u2581"}, spaces]
        whole |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
        path = write(tmp_path / "b", {"tokenizer_config.json": config}, json.dumps(whole))
        check(open_tokenizer(path), AutoTokenizer.from_pretrained(path), texts[:12], config)


def test_sides_and_splitting_are_the_defaults_of_a_call(base, tmp_path):
    texts = ["hello there fox", "fox</s>", "x"]
    for sides in itertools.product(("left", "right", None), ("left", "right", None), (True, False)):
        names = ("padding_side", "truncation_side", "split_special_tokens")
        config = {n: value for n, value in zip(names, sides, strict=True) if value is not None}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<s>"}
        path = write(tmp_path / "a", {"tokenizer_config.json": config}, base)
        ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
        for more in ({}, {"padding_side": "left", "split_special_tokens": False}):
            how = dict(padding=True, truncation=True, max_length=2, **more)
            assert ours(texts, **how) == {
                name: theirs(texts, **how)[name] for name in ("input_ids", "attention_mask")
            }, (config, more)
        assert ours.encode("a</s>") == theirs.encode("a</s>")
        assert ours.encode("a</s>", parse_special=True)[-1] == 2
    padding = {"pad_token": "</s>", "pad_id": 2, "direction": "Left", "pad_type_id": 0}
    padding |= {"strategy": "BatchLongest", "pad_to_multiple_of": None}
    whole = json.dumps(json.loads(base) | {"padding": padding})
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    path = write(tmp_path / "a", {"tokenizer_config.json": config}, whole)
    ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
    assert (ours.padding_side, ours.pad_token_id) == (theirs.padding_side, theirs.pad_token_id)
    for name, value in (
        ("padding_side", "up"),
        ("truncation_side", ["left"]),
        ("split_special_tokens", "yes"),
        ("add_prefix_space", 1),
        ("tokenizer_class", 5),
        ("extra_special_tokens", [5]),
        ("extra_special_tokens", {"tools": "<s>"}),
        ("extra_special_tokens", "<s>"),
        ("additional_special_tokens", "<s>"),
        ("added_tokens_decoder", []),
        ("image_token", {"content": 5}),
        ("chat_template", {"default": ["a"]}),
    ):
        path = write(tmp_path / "a", {"tokenizer_config.json": {name: value}}, base)
        with pytest.raises(UserError, match=f"^{path}/tokenizer_config.json") as raised:
            open_tokenizer(path)
        assert "\n" not in str(raised.value)


TEMPLATE = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ image_token }}|{{ audio }}|NAME"
TOOLS = [{"name": "add"}]


def rendered(tokenizer, **settings):
    try:
        return tokenizer.apply_chat_template(MESSAGES, **settings)
    except (UserError, ValueError) as error:
        return type(error).__name__


def test_templates_are_chosen_as_by_transformers(base, tmp_path):
    draw, names = random.Random(4), ["default", "tool_use", "rag"]
    for number in range(20):
        texts = {n: TEMPLATE.replace("NAME", n) for n in names if draw.random() < 0.6}
        value = draw.choice(
            [texts, [{"name": n, "template": t} for n, t in texts.items()], TEMPLATE, None]
        )
        config = {"tokenizer_class": draw.choice(["PreTrainedTokenizerFast", "GPT2Tokenizer"])}
        config |= {"chat_template": value} if value else {}
        more = {"bos_token": "<s>", "unk_token": "fox", "image_token": "<s>", "eos_token": None}
        more |= {"extra_special_tokens": {"audio": "</s>"}}
        config |= {name: value for name, value in more.items() if draw.random() < 0.5}
        files = {"tokenizer_config.json": config}
        for name in names:
            if draw.random() < 0.15:
                files[f"additional_chat_templates/{name}.jinja"] = f"folder {name}"
        if draw.random() < 0.2:
            files["chat_template.jinja"] = "of the file"
        path = write(tmp_path / str(number), files, base)
        ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
        for tools in (None, [], TOOLS):
            for given in (None, "rag", "default", "x{{ bos_token }}"):
                if given == "default" and not isinstance(theirs.chat_template, dict):
                    continue
                how = dict(tools=tools, chat_template=given)
                expected = rendered(theirs, tokenize=False, **how).replace("Value", "User")
                assert rendered(ours, **how) == expected, (files, how)
        text = theirs.chat_template
        assert ours.chat_template == (text.get("default") if isinstance(text, dict) else text)


def test_several_templates_without_a_default_are_named(base, tmp_path):
    named = [{"name": "rag", "template": "1"}, {"name": "tool_use", "template": "2"}]
    path = write(tmp_path / "a", {"tokenizer_config.json": {"chat_template": named}}, base)
    tokenizer = open_tokenizer(path)
    assert tokenizer.chat_template is None
    assert tokenizer.chat_templates == {"rag": "1", "tool_use": "2"}
    with pytest.raises(UserError, match="no default chat template, but these: rag, tool_use; pass"):
        tokenizer.answers_in(MESSAGES)
    assert tokenizer.answers_in(MESSAGES, tools=TOOLS)[0] == "2"
    tokenizer.chat_template = "3"
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "3"


def test_classes_and_their_tokens_are_those_of_transformers(base, tmp_path):
    auto = transformers.models.auto.tokenization_auto
    for model_type, name in CLASS_OF.items():
        found = auto.TOKENIZER_MAPPING_NAMES[model_type].replace("MistralCommonBackend", GENERIC)
        assert found == name, model_type
    misnamed = {m for m in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if m in CLASS_OF}
    assert {m for m in misnamed if CLASS_OF[m] != GENERIC} == MISNAMED
    for name, expected in DEFAULTS.items():
        tokenizer = getattr(transformers, name)()
        expected, side = dict(expected), expected.get("padding_side", "right")
        expected.pop("padding_side", None)
        found = {n: str(t) for n, t in tokenizer.special_tokens_map.items() if n != "fill_token"}
        assert (found, tokenizer.padding_side) == (expected, side), name


def test_no_token_is_guessed(base, tmp_path):
    for files in (
        {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}},
        {"tokenizer_config.json": {"tokenizer_class": "GPT2TokenizerFast"}},
        {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}},  # with ByteLevel steps
        {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "bos_token": None}},
        {"config.json": {"model_type": "gpt2"}},
        {"config.json": {"model_type": "gpt_neox", "tokenizer_class": "GPT2Tokenizer"}},
        {"config.json": {"model_type": "qwen2"}, "tokenizer_config.json": {"tokenizer_class": "A"}},
        {
            "config.json": {"model_type": "phi3"},
            "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
        },
        {
            "config.json": {"model_type": "gpt2"},
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        },
    ):
        path = write(tmp_path / "a", files, base)
        ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        # transformers adds tokens of a class that the vocabulary does not have
        known = [
            token if token is not None and token < 290 else None
            for token in (getattr(theirs, name) for name in names)
        ]
        assert [getattr(ours, name) for name in names] == known, files
    ours = open_tokenizer(write(tmp_path / "a", {}, base))
    assert (ours.bos_token_id, ours.eos_token_id, ours.special_tokens_map) == (None, None, {})
    with pytest.raises(UserError, match=r"no eos_token\. Add it to tokenizer_config.json in the"):
        _ = ours.eod


def test_only_some_classes_add_a_space_before_a_text(base, tmp_path):
    whole = json.loads(base)
    spaced = whole | {"pre_tokenizer": whole["pre_tokenizer"] | {"add_prefix_space": True}}
    names = "GPT2 GPTNeoX Qwen2 Roberta Cohere CodeGen PreTrained Llama".split()
    for name, data in itertools.product([*names, None], (whole, spaced)):
        for prefix in (None, True, False):
            config = {"tokenizer_class": f"{name}Tokenizer"} if name else {}
            config |= {} if prefix is None else {"add_prefix_space": prefix}
            if name == "PreTrained":
                config["tokenizer_class"] = "PreTrainedTokenizerFast"
            path = write(tmp_path / "a", {"tokenizer_config.json": config}, json.dumps(data))
            theirs = AutoTokenizer.from_pretrained(path)
            for text in ("fox", " fox"):
                ids = theirs.encode(text, add_special_tokens=False)
                assert open_tokenizer(path).encode(text) == ids, (config, text)


def test_an_additional_token_that_is_missing_is_an_error(base, tmp_path):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            path = write(tmp_path / "a", {name: {key: ["fox", "<x>"]}}, base)
            with pytest.raises(UserError, match=r"token '<x>' is not in the vocabulary$"):
                open_tokenizer(path)
            assert AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<x>") >= 271
    files = {"tokenizer_config.json": {"extra_special_tokens": ["<x>"]}}
    path = write(tmp_path / "a", files | {"added_tokens.json": {"<x>": 271}}, base)
    assert open_tokenizer(path).encode("<x>") == [271]


def test_templates_see_no_token_that_has_only_an_id(base, tmp_path):
    ids = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"}
    config |= {"pad_token": "fox", "tokenizer_class": "PreTrainedTokenizerFast"}
    path = write(tmp_path / "a", {"config.json": ids, "tokenizer_config.json": config}, base)
    ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
    assert rendered(ours) == rendered(theirs, tokenize=False) == "||fox"
    assert ours.eos_token_id == 2
