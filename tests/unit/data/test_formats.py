"""Conversations in the formats and files that people have: which words carry a loss, and what is
printed for other objects."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from transformers import AutoTokenizer

from megazoo.data import preprocess as module
from megazoo.data.cache import cached_tokens
from megazoo.data.conversations import encode_conversation, template_of
from megazoo.data.encoding import Recipe
from megazoo.data.formats import read_example, read_preference
from megazoo.data.indexed import IndexedTokens
from megazoo.data.preprocess import preprocess
from megazoo.data.sources import source_named
from megazoo.data.streaming import Streamed
from megazoo.data.texts import TextFile
from megazoo.errors import UserError
from megazoo.tokenizer import ByteTokenizer, open_tokenizer
from tests.support.data import open_all, write_lines
from tests.support.harness_files import tokenizer_of

TEMPLATE = "<{role}>{content}\n"
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
WHOLE = "{% for m in messages %}{{ m | tojson }}{% endfor %}"


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def shared(role, content, **more):
    return {"from": role, "value": content, **more}


def pieces(value, template=TEMPLATE):
    """The text of an example, with [ and ] around what carries a loss; the end is a dot."""
    ids, loss_mask = encode_conversation(ByteTokenizer(), value, template)
    text, inside = "", 0
    for token, carries_loss in zip(ids, loss_mask, strict=True):
        if carries_loss != inside:
            text += "[" if carries_loss else "]"
        text, inside = text + ("." if token == 256 else chr(token)), carries_loss
    return text + "]" * inside


TALK = [message("user", "a"), message("assistant", "b"), message("user", "c")]
TALK += [message("assistant", "d")]
SAID = "<user>a\n<assistant>[b\n]<user>c\n<assistant>[d\n.]"
# By name: an object, and its text.
EXAMPLES = {
    "messages": ({"messages": TALK, "id": 3}, SAID),
    "conversations with roles": ({"conversations": TALK}, SAID),
    "conversations with names of ShareGPT as roles": (
        {"conversations": [message("human", "a"), message("gpt", "b")]},
        "<user>a\n<assistant>[b\n.]",
    ),
    "ShareGPT": (
        {
            "conversations": [
                shared("system", "s"), shared("human", "a"), shared("gpt", "b"),
                shared("user", "c"), shared("function", "f"), shared("ChatGPT", "d"),
            ]
        },
        "<system>s\n<user>a\n<assistant>[b\n]<user>c\n<tool>f\n<assistant>[d\n.]",
    ),
    "ShareGPT's other names": (
        {
            "system": "s",
            "conversations": [
                shared("tool", "1"), shared("model", "2"), shared("observation", "3"),
                shared("bing", "4"), shared("user", "5"), shared("bard", "6"),
                shared("assistant", "7"),
            ],
        },
        "<system>s\n<tool>1\n<assistant>[2\n]<tool>3\n<assistant>[4\n]<user>5\n<assistant>[6\n"
        "]<assistant>[7\n.]",
    ),
    "role and value": (
        {"messages": [{"role": "user", "value": "a"}, {"role": "assistant", "value": "b"}]},
        "<user>a\n<assistant>[b\n.]",
    ),
    "keys that are null": (
        {"messages": None, "prompt": None, "text": None, "conversations": TALK}, SAID,
    ),
    "from and value under messages": (
        {"messages": [shared("human", "a"), shared("gpt", "b")]},
        "<user>a\n<assistant>[b\n.]",
    ),
    "texts": ({"prompt": "a", "completion": "b"}, "a[b.]"),
    "lists under prompt and completion": (
        {"prompt": TALK[:3], "completion": TALK[3:]},
        "<user>a\n<assistant>b\n<user>c\n<assistant>[d\n.]",
    ),
    "several messages in a completion": (
        {"prompt": TALK[:1], "completion": TALK[1:]},
        SAID,
    ),
    "Alpaca": (
        {"instruction": "a", "input": "x", "output": "b"},
        "<user>a\n\nx\n<assistant>[b\n.]",
    ),
    "Alpaca without input": (
        {"instruction": "a", "output": "b"},
        "<user>a\n<assistant>[b\n.]",
    ),
    "Alpaca with an empty input, a system message and a history": (
        {"instruction": "c", "input": "", "output": "d", "system": "s", "history": [["a", "b"]]},
        f"<system>s\n{SAID}",
    ),
    "weight 0": (
        {"messages": [TALK[0], message("assistant", "b", weight=0), *TALK[2:]]},
        "<user>a\n<assistant>b\n<user>c\n<assistant>[d\n.]",
    ),
    "weight 0 at the end": (
        {"messages": [*TALK[:3], message("assistant", "d", weight=0.0)]},
        "<user>a\n<assistant>[b\n]<user>c\n<assistant>d\n.",
    ),
    "weights of 1, and of other roles": (
        {
            "messages": [
                message("user", "a", weight=0), message("assistant", "b", weight=1),
                message("user", "c", train=True), message("assistant", "d", weight=None),
            ]
        },
        SAID,
    ),
    "train": (
        {"messages": [TALK[0], message("assistant", "b", train=False), *TALK[2:]]},
        "<user>a\n<assistant>b\n<user>c\n<assistant>[d\n.]",
    ),
    "training": (
        {"conversations": [shared("human", "a"), shared("gpt", "b", training=False), *TALK[2:]]},
        "<user>a\n<assistant>b\n<user>c\n<assistant>[d\n.]",
    ),
    "weight 0 in a completion": (
        {"prompt": TALK[:1], "completion": [message("assistant", "b", weight=0), *TALK[2:]]},
        "<user>a\n<assistant>b\n<user>c\n<assistant>[d\n.]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_format_is_read_as_its_definition_says(name):
    value, text = EXAMPLES[name]
    before = json.dumps(value)
    assert pieces(value) == text
    assert json.dumps(value) == before


def test_marks_hold_in_templates_of_jinja_and_are_not_shown_to_them():
    value = {"messages": [TALK[0], message("assistant", "b", weight=0), *TALK[2:]]}
    assert pieces(value, MARKED) == "<user>a<assistant>b<user>c<assistant>[d]"
    assert pieces({"messages": TALK}, MARKED) == "<user>a<assistant>[b]<user>c<assistant>[d]"
    assert pieces(value, WHOLE).replace("[", "").replace("]", "") == "".join(map(json.dumps, TALK))
    one = "{% generation %}{{ messages[1]['content'] }}{% endgeneration %}"
    two = MARKED.replace(
        "{{ m['content'] }}{% endgeneration %}",
        "{{ m['content'] }}{% endgeneration %}{% if loop.index > 2 %},{% generation %};"
        "{% endgeneration %}{% endif %}",
    )
    assert pieces(value, two) == "<user>a<assistant>b<user>c<assistant>[d],[;]"
    with pytest.raises(ValueError, match="use one block per message"):
        pieces(value, one)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """transformers' tokenizer, and megazoo's of the same files."""
    path = tmp_path_factory.mktemp("chat")
    tokenizer_of("llama").save_pretrained(path)
    return AutoTokenizer.from_pretrained(path), open_tokenizer(path)


def test_a_completion_of_messages_carries_a_loss_after_the_prompt_as_in_trl(both):
    """TRL tokenizes the prompt with the beginning of an answer, and the two together. The tokens
    after the first carry a loss."""
    theirs, ours = both
    prompt, completion = TALK[:3], TALK[3:]
    begun = theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    whole = theirs.apply_chat_template(prompt + completion, return_dict=True)
    start, ids = len(begun["input_ids"]), whole["input_ids"]
    value = {"prompt": prompt, "completion": completion}
    found = encode_conversation(ours, value, template_of(None, ours))
    assert found == (ids, [0] * start + [1] * (len(ids) - start))


NEEDS = "it needs text, or prompt and completion, or messages, or conversations, or instruction and"
# By error: an object.
MISTAKES = {
    f"{NEEDS} output; its keys are: 'question', 'reply', 'n'. To convert the file, for example: "
    "jq -c '(arrays | .[]), objects | {messages: "
    '[{role: "user", content: ."question"}, {role: "assistant", content: ."reply"}]}\' FILE > NEW'
    ".jsonl": {"question": "a", "reply": "b", "n": 1},
    "its keys are: 'response', 'query'. To convert the file, for example: "
    "jq -c '(arrays | .[]), objects | {messages: "
    '[{role: "user", content: ."query"}, {role: "assistant", content: ."response"}]}': {
        "response": "b", "query": "a",
    },
    '{messages: ."dialog"}': {"dialog": TALK},
    'objects | ."data"[]': {"version": "1", "data": [{"messages": TALK}]},
    "jq -c '{messages: .}'": TALK[0],
    "it has preferences: use --loss dpo": {"chosen": TALK[1:2], "rejected": TALK[3:]},
    'user", content: ."instruction"}, {role: "assistant", content: ."response"}': {
        "instruction": "a", "context": "x", "response": "b", "category": "qa",
    },
    '{text: ."content"}': {"content": "a"},
    'content: ."QUESTION"': {"';reboot'": "a", '"': "b"},
    "its keys are: none": {},
    "prompt and completion must be two texts, or two lists": {"prompt": TALK, "completion": "b"},
    "no text under 'completion'": {"prompt": "a", "completion": {"content": "b"}},
    "conversations is not a list of objects": {"conversations": "a"},
    "prompt is not a list of objects": {"prompt": ["a"], "completion": TALK},
    "message 2 is from 'narrator', which is not supported: use human, user, gpt,": {
        "conversations": [shared("human", "a"), shared("narrator", "b")]
    },
    "message 1 is from a list": {"conversations": [shared(["gpt"], "b")]},
    "message 1 has no content; its keys are: 'from'": {"conversations": [{"from": "gpt"}]},
    "message 1 has no content; its keys are: 'from', 'text'": {
        "conversations": [{"from": "human", "text": "a"}]
    },
    "message 1 has no content; its keys are: 'from', 'value'": {
        "conversations": [shared("gpt", {"a": 1})]
    },
    "no text under 'input'": {"instruction": "a", "input": 3, "output": "b"},
    "no text under 'output'": {"instruction": "a", "output": ["b"]},
    "history is not a list of pairs of texts": {
        "instruction": "a", "output": "b", "history": [["a", 1]],
    },
    "no text under 'system'": {"conversations": TALK, "system": 5},
    "message 2 has weight 0.5: use 0 or false (no loss), or 1 or true": {
        "messages": [TALK[0], message("assistant", "b", weight=0.5)]
    },
    "message 1 has weight 2: use": {"messages": [message("user", "a", weight=2), TALK[1]]},
    "message 2 has train 'no': use": {"messages": [TALK[0], message("assistant", "b", train="no")]},
    "nothing to learn: no words of the assistant that carry a loss": {
        "messages": [TALK[0], message("assistant", "b", weight=0)]
    },
    "tools is not a list: an object": {"messages": TALK, "tools": {"name": "f"}},
    "it has only text, but the file begins with a conversation": {"text": "a"},
}  # fmt: skip


def test_other_objects_are_refused_with_their_keys_and_a_command():
    for text, value in MISTAKES.items():
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            pieces(value)
        assert "\n" not in str(caught.value)
    assert read_example({"messages": TALK, "tools": '[{"name": "f"}]'}).tools == [{"name": "f"}]


def test_the_examples_of_the_page_are_read_by_the_format_of_their_row():
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    table = re.findall(r"^\| [^|]+ \| `(\{[^`]+\})` \|", page, re.MULTILINE)
    assert [pieces(value) for value in map(json.loads, table) if "text" not in value] == [
        "<user>Hi\n<assistant>[Hello\n.]",
        "2 + 2 = [4.]",
        "<user>Hi\n<assistant>[Hello\n.]",
        "<user>Hi\n<assistant>[Hello\n.]",
        "<user>Translate.\n\nHallo\n<assistant>[Hello\n.]",
    ]


OBJECTS = [
    {"messages": TALK},
    {"prompt": "é\n", "completion": "b ☃"},
    {"instruction": "a]", "output": "b,{"},
]


def indented(values):
    return "\n".join(json.dumps(value, indent=2) for value in values)


FORMS = {
    "a.jsonl": lambda values: "\n".join(map(json.dumps, values)),
    "lines.json": lambda values: "\n\n".join(map(json.dumps, values)) + "\n",
    "array.json": json.dumps,
    "pretty.json": lambda values: "\n " + json.dumps(values, indent=4, ensure_ascii=False) + "\n\n",
    "marked.json": lambda values: "\ufeff" + json.dumps(values),
    "indented.json": indented,
    "array.json.gz": json.dumps,
    "indented.json.zst": indented,
    "array.jsonl": json.dumps,
    "indented.jsonl": indented,
    "pretty.ndjson": lambda values: json.dumps(values, indent=1),
}


def written(path, text):
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(text.encode()))
    return path


def tokens_in(files):
    """The documents of token files, as lists."""
    return [[file[n].tolist() for n in range(len(file))] for file in files]


def test_every_form_of_a_file_has_the_same_tokens(tmp_path):
    expected = [encode_conversation(ByteTokenizer(), value, TEMPLATE) for value in OBJECTS]
    for name, form in FORMS.items():
        path = written(tmp_path / name, form(OBJECTS))
        assert isinstance(source_named(str(path)), TextFile)
        found = tokens_in(cached_tokens(path, "byte", TEMPLATE))
        assert found == [list(part) for part in zip(*expected, strict=True)], name


BAD_FILES = {
    ("a.json", '[{"messages": 3}]'): "a.json, item 1: messages is not a list of objects",
    ("a.json", json.dumps([*OBJECTS, 5])): "a.json, item 4: not a JSON object",
    ("a.json", indented([*OBJECTS, {"txt": "a"}])): "a.json, item 4: it needs text",
    ("a.json", '[{"prompt": "a",\n"completion": "b"}\n{}]'): "a.json, line 3: Expecting ','",
    ("a.json", json.dumps([TALK])): "a.json, item 1: not a JSON object but a list: a conversation",
    ("a.json", json.dumps(OBJECTS)[:-1]): "a.json, line 1: Expecting ',' delimiter",
    ("a.json", json.dumps(OBJECTS) + "\n\n5"): "a.json, line 3: Extra data",
    ("a.json", "[]"): "a.json has no items",
    ("a.json", "  [\n\n"): "a.json, line 3: Expecting value",
    ("a.json", '{"txt": 1}\n'): "a.json, line 1: it needs text",
    ("a.json", ""): "a.json has no lines",
    ("a.json", json.dumps([OBJECTS[0], None, OBJECTS[1]])): "a.json, item 2: not a JSON object",
    ("a.jsonl", '{"text"\n{"text": "a"}\n'): "a.jsonl, line 1: Expecting ':' delimiter",
    ("a.jsonl", "[1]\n[2]"): "line 1: not a JSON object but a list: a conversation is {",
}


def test_a_bad_item_is_named_with_its_number(tmp_path):
    for (name, text), error in BAD_FILES.items():
        path = written(tmp_path / name, text)
        with pytest.raises(UserError, match=re.escape(error)):
            cached_tokens(path, "byte", TEMPLATE)


def test_preprocess_resumes_within_an_array(tmp_path, monkeypatch):
    """After each chunk of items, of which one is bad."""
    texts = [f"text {n} " * (n % 5) + "é" for n in range(40)]
    values = [{"text": text} for text in texts]
    values[17] = {"txt": "a"}
    first = written(tmp_path / "a.json", json.dumps(values, indent=1))
    second = write_lines(tmp_path / "b.jsonl", {"text": "end"})
    recipe = Recipe((str(first), str(second)), "byte")
    expected = [text for n, text in enumerate(texts) if n != 17] + ["end"]
    monkeypatch.setattr(module, "CHUNK", 200)
    monkeypatch.setattr(module, "SAVED_EVERY", 1)
    for chunks in (1, 3, 6):
        read = []

        def interrupted(size, read=read, chunks=chunks):
            read.append(size)
            if len(read) == chunks:
                raise KeyboardInterrupt

        prefix, told = tmp_path / f"out{chunks}", []
        with pytest.raises(KeyboardInterrupt):
            preprocess(recipe, prefix, 0, progress=interrupted, report=told.append)
        done = preprocess(recipe, prefix, 0, report=told.append)
        assert read[0] == first.stat().st_size
        assert not any(read[1:]), "the size of the file is counted once"
        tokens = IndexedTokens(f"{prefix}_text_document")
        found = [bytes(tokens[n].astype(np.uint8)).decode() for n in range(len(tokens))]
        assert found == expected
        assert (done.documents, done.bad) == (40, 1)
        assert set(told) == {f"{first}, item 18: no text under 'text'; its keys are: 'txt'"}


THOUGHTS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] if loop.last else "
    "m['content'].split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_answers_without_a_loss_may_be_changed_by_the_template():
    """Like Qwen3's, it removes the thoughts of earlier answers."""
    thought = message("assistant", "<think>x</think>b")
    value = {"prompt": [TALK[0], thought, TALK[2]], "completion": TALK[3:]}
    said = "<user>a<assistant>b<user>c<assistant>[d]"
    assert pieces(value, THOUGHTS) == said
    marked = {"messages": [TALK[0], {**thought, "weight": 0}, *TALK[2:]]}
    assert pieces(marked, THOUGHTS) == said
    with pytest.raises(ValueError, match="the chat template changes the text of message 2"):
        pieces({"messages": [TALK[0], thought, *TALK[2:]]}, THOUGHTS)


def test_bytes_in_parquet_are_texts(tmp_path):
    texts = pa.array([b"a", "\u00e9".encode()], pa.binary())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": texts, "completion": texts}), path)
    expected = [
        encode_conversation(ByteTokenizer(), {"prompt": t, "completion": t}, None)
        for t in ("a", "\u00e9")
    ]
    found = tokens_in(cached_tokens(path, "byte", None))
    assert found == [list(part) for part in zip(*expected, strict=True)]
    pq.write_table(pa.table({"prompt": texts, "completion": pa.array([b"\xff"] * 2)}), path)
    with pytest.raises(UserError, match=r"a\.parquet can't be read: 'utf-8' codec"):
        cached_tokens(path, "byte", None)


def test_rows_of_parquet_are_conversations(tmp_path):
    rows = [
        {"messages": [message("user", "a", weight=None), message("assistant", "b", weight=0)] * 2},
        {"messages": [message("user", "c"), message("assistant", "d", weight=1)]},
    ]
    rows[0]["messages"][3] = message("assistant", "b", weight=1)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert isinstance(source_named(str(path)), TextFile)
    expected = [encode_conversation(ByteTokenizer(), row, WHOLE) for row in rows]
    found = tokens_in(cached_tokens(path, "byte", WHOLE))
    assert found == [list(part) for part in zip(*expected, strict=True)]
    assert "weight" not in bytes(found[0][0]).decode()
    blend = open_all(path, split="1,0", seq_length=400, chat_template=WHOLE).training
    assert len(blend.datasets[0]) == 2
    pq.write_table(pa.Table.from_pylist([{"messages": [], "n": 1}]), path)
    with pytest.raises(UserError, match=r"a\.parquet, row 1: nothing to learn"):
        cached_tokens(path, "byte", TEMPLATE)
    pq.write_table(pa.Table.from_pylist([{"text": "a", "messages": TALK}]), path)
    assert isinstance(source_named(str(path)), Streamed), "a column text is streamed"
    for name in ("b", "c"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match="conversations cannot be streamed: pass each file"):
        open_all(f"{tmp_path}/[bc].parquet")


def test_a_conversation_needs_a_template(tmp_path):
    tokenizer = ByteTokenizer()
    told = (
        "the tokenizer byte has no chat template, which the conversations of {} need: pass "
        "--chat-template chatml, a text with {{role}} and {{content}}, or a .jinja file"
    )
    for number, value in enumerate(({"messages": TALK}, OBJECTS[2], {"conversations": TALK})):
        path = write_lines(tmp_path / f"{number}.jsonl", value)
        with pytest.raises(UserError) as caught:
            open_all(path, split="1,0")
        assert str(caught.value) == told.format(path)
    later = write_lines(tmp_path / "later.jsonl", OBJECTS[1], OBJECTS[0])
    with pytest.raises(UserError, match=r"later.jsonl, line 2: the tokenizer byte has no chat te"):
        open_all(later, split="1,0")
    texts = write_lines(tmp_path / "texts.jsonl", OBJECTS[1])
    assert len(open_all(texts, split="1,0").training.datasets[0]) == 1
    assert template_of(None, tokenizer) is None
    ids, _ = encode_conversation(tokenizer, {"messages": TALK}, template_of("chatml", tokenizer))
    said = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert bytes(ids[:-1]).decode().startswith(said)


TEXTS = {"prompt": "a b", "chosen": " c d", "rejected": " c e"}


@pytest.mark.parametrize(
    ("value", "prompt", "answers"),
    [
        (TEXTS, "a b", (" c d", " c e")),
        ({"chosen": "a b c d", "rejected": "a b c e"}, "a b c", (" d", " e")),
        ({"chosen": "ab", "rejected": "ac"}, "a", ("b", "c")),
        ({"chosen": "ab", "rejected": "ab c"}, "a", ("b", "b c")),
    ],
)
def test_preferences_of_texts_have_the_prompt_that_both_begin_with(value, prompt, answers):
    found = read_preference(value)
    assert [each.prompt for each in found] == [prompt] * 2
    assert tuple(each.completion for each in found) == answers


def test_preferences_of_messages_have_a_loss_on_the_answers_only():
    good, bad = ({"role": "assistant", "content": text} for text in ("good", "bad"))
    asked = [{"role": "user", "content": "q"}]
    for value in (
        {"prompt": asked, "chosen": [good], "rejected": [bad]},
        {"chosen": [*asked, good], "rejected": [*asked, bad]},
        {"prompt": "q", "chosen": [*asked, good], "rejected": [*asked, bad], "messages": TALK},
    ):
        found = read_preference(value)
        assert [each.messages for each in found] == [[*asked, good], [*asked, bad]]
        assert [each.trained for each in found] == [[False, True]] * 2
