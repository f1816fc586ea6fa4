"""Chat templates are found and rendered as transformers does; mistakes in them are told in one
line."""

import json

import pytest
from transformers import AutoTokenizer

from megazoo.errors import UserError
from megazoo.tokenizer import ByteTokenizer, open_tokenizer
from tests.support.harness_files import CHAT, tokenizer_of

TEMPLATES = {
    "with a condition": CHAT,
    "LLaMA-2's": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "with JSON, a date and tools": "{{ strftime_now('%Y') }}\n"
    "{%- if tools is not none or documents is not none %}unexpected{% endif %}\n"
    "  {% for message in messages %}\n{{ message | tojson }}{# content #}\n"
    "{{ {'é': '<&>', 'a': [1, 2]} | tojson(indent=2) }}{{ pad_token }}{{ unk_token }}\n"
    "    {% if loop.index > 2 %}{% break %}{% endif %}\n  {% endfor %}\n",
    "with a mark for training": "{% set ns = namespace(n=0) %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}\n{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
}
SYSTEM, USER = {"role": "system", "content": "Be <kind>."}, {"role": "user", "content": " Hi é\n"}
ANSWER = {"role": "assistant", "content": "Hello  ", "name": None}
GO_ON = {"continue_final_message": True}
CHATS = [[USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER], [USER, ANSWER, USER], [USER, ANSWER]]


def written(path, template, **settings):
    """A directory with a tokenizer and a template."""
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path, **settings)
    return path


def test_templates_are_rendered_as_by_transformers(tmp_path):
    for name, template in TEMPLATES.items():
        path = written(tmp_path / name, template)
        theirs, ours = AutoTokenizer.from_pretrained(path), open_tokenizer(path)
        for chat in CHATS:
            for how in ({}, {"add_generation_prompt": True}, GO_ON):
                expected = theirs.apply_chat_template(chat, tokenize=False, **how)
                assert ours.apply_chat_template(chat, **how) == expected, (name, chat, how)


def test_where_a_template_is_found(tmp_path):
    path = written(tmp_path, "of a file of its own")
    assert (path / "chat_template.jinja").exists()
    assert open_tokenizer(path).chat_template == "of a file of its own"
    config = path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "chat_template": "of the settings"}))
    assert open_tokenizer(path).chat_template == "of a file of its own"
    (path / "chat_template.jinja").unlink()
    assert open_tokenizer(path).chat_template == "of the settings"
    named = [{"name": "rag", "template": "1"}, {"name": "default", "template": "2"}]
    for value, expected in ((named, "2"), (named[:1], None), (None, None)):
        config.write_text(json.dumps({**settings, "chat_template": value}))
        assert open_tokenizer(path).chat_template == expected
    for value in (5, [{"name": "default"}], {"a": 1}):
        config.write_text(json.dumps({**settings, "chat_template": value}))
        with pytest.raises(UserError, match=r"tokenizer_config.json"):
            open_tokenizer(path)


def test_mistakes_are_told_in_one_line(tmp_path):
    tokenizer = ByteTokenizer()
    with pytest.raises(UserError, match="the tokenizer byte has no chat template: neither a chat_"):
        tokenizer.apply_chat_template([USER])
    for template, chat, how, message in [
        (CHAT, [], {}, "a chat template needs at least one message"),
        (CHAT, [USER, SYSTEM], {}, "can't be applied: the system speaks first"),
        ("{% if %}", [USER], {}, "can't be applied: Expected an expression"),
        ("{{ none + 1 }}", [USER], {}, "can't be applied: unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", [USER], {}, "can't be applied: access to attribute"),
        ("{{ messages.append(1) }}", [USER], {}, "can't be applied: access to attribute 'append'"),
        ("a", [USER], GO_ON, "does not contain the last message"),
        ("a", [{"role": "user"}], GO_ON, "has no text to continue"),
        ("a", [USER], {**GO_ON, "add_generation_prompt": True}, "exclude each other"),
    ]:
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=message) as raised:
            tokenizer.apply_chat_template(chat, **how)
        assert "\n" not in str(raised.value)
