"""What is trained of a conversation: where a template marks it, as transformers' mask says; and
where it does not, as if it did.

Each template stands here with {% generation %} marks, for transformers; ours reads it without."""

import re

import pytest
from transformers import AutoTokenizer

from megazoo.data.conversations import CHATML, as_jinja, encode_conversation, template_of
from megazoo.errors import UserError
from megazoo.tokenizer import ByteTokenizer, open_tokenizer
from tests.support.harness_files import tokenizer_of

BEGIN, END = "{% generation %}", "{% endgeneration %}"
HEADER = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
BODY = "{{ m['content'] + '<|im_end|>\\n' }}"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
TEMPLATES = {
    "ChatML": "{% for m in messages %}" + HEADER + "{% if m['role'] == 'assistant' %}"
    f"{BEGIN}{BODY}{END}{{% else %}}{BODY}{{% endif %}}{{% endfor %}}{ASKED}",
    # Qwen2's and SmolLM2's: a system message of their own where there is none
    "Qwen2": "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    + HEADER
    + f"{{% if m['role'] == 'assistant' %}}{BEGIN}{BODY}{END}{{% else %}}{BODY}{{% endif %}}"
    + "{% endfor %}"
    + ASKED,
    # Qwen3's: thoughts are shown in the last answer alone, where there may be empty ones
    "Qwen3": "{% for m in messages %}"
    + HEADER
    + "{% if m['role'] == 'assistant' %}"
    + BEGIN
    + "{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    + f"{BODY}{END}{{% else %}}{BODY}{{% endif %}}{{% endfor %}}{ASKED}",
    "LLaMA-2": "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}{% else %}"
    f"{BEGIN}{{{{ ' ' + m['content'].strip() + ' ' + eos_token }}}}{END}"
    "{% endif %}{% endfor %}",
    "LLaMA-3": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '<|im_end|>\\n\\n' }}{% if m['role'] == 'assistant' %}"
    f"{BEGIN}{{{{ m['content'] | trim + eos_token }}}}{END}{{% else %}}"
    "{{ m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\\n\\n' }}{% endif %}",
    # Mistral's: the system's words stand before the user's last ones
    "Mistral": "{% if messages[0]['role'] == 'system' %}{% set said = messages[0]['content'] %}"
    "{% set talk = messages[1:] %}{% else %}{% set said = none %}{% set talk = messages %}"
    "{% endif %}{{ bos_token }}{% for m in talk %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if said and loop.index >= talk | length - 1 %}{{ said + '\\n\\n' }}{% endif %}"
    "{{ m['content'] + '[/INST]' }}{% else %}"
    f"{BEGIN}{{{{ ' ' + m['content'] + eos_token }}}}{END}{{% endif %}}{{% endfor %}}",
}
SYSTEM = {"role": "system", "content": "Be kind."}
TALK = [
    {"role": "user", "content": "What is one and one?"},
    {"role": "assistant", "content": "Two, é."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still two.\n\nSo it stays."},
]
CHATS = [TALK[:2], TALK, [SYSTEM, *TALK], TALK[:3]]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """transformers' tokenizer, and ours of the same files."""
    path = tmp_path_factory.mktemp("chat")
    tokenizer_of("llama").save_pretrained(path)
    return AutoTokenizer.from_pretrained(path), open_tokenizer(path)


def without_marks(template):
    return re.sub(r"{% (end)?generation %}", "", template)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(both, name):
    theirs, ours = both
    for chat in CHATS:
        if name == "LLaMA-2" and chat[0] is SYSTEM:
            continue
        expected = theirs.apply_chat_template(
            chat, chat_template=TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
        )
        for template in (TEMPLATES[name], without_marks(TEMPLATES[name])):
            ids, mask = encode_conversation(ours, {"messages": chat}, template)
            assert ids == expected["input_ids"], (chat, template)
            assert mask == expected["assistant_masks"], (chat, template)


def test_words_that_a_template_changes_are_refused(both):
    template = (
        "{% for m in messages %}{{ m['content'] | upper + loop.length | string }}{% endfor %}"
    )
    with pytest.raises(UserError, match="changes the text of message 2: mark the text to train"):
        encode_conversation(both[1], {"messages": TALK}, template)


def test_a_template_is_given_the_tools_of_a_line(both):
    template = "{{ tools[0]['name'] }}" + without_marks(TEMPLATES["ChatML"])
    line = {"messages": TALK[:2], "tools": [{"name": "add"}]}
    ids, mask = encode_conversation(both[1], line, template)
    assert both[1].decode(ids).startswith("add<|im_start|>user")
    trained = [token for token, counts in zip(ids, mask, strict=True) if counts]
    assert both[1].decode(trained) == "Two, é.<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, '[{role}] "{content}"#}\n\U0001f600{role}\\n'])
def test_a_text_is_the_same_in_jinja(both, template):
    for tokenizer in (both[1], ByteTokenizer()):
        ids, mask = encode_conversation(tokenizer, {"messages": TALK}, template)
        jinja = as_jinja(template, tokenizer)
        again, mask_again = encode_conversation(tokenizer, {"messages": TALK}, jinja)
        assert ids == [*again, tokenizer.eod]
        assert mask == [*mask_again, 1]
        asked = tokenizer.apply_chat_template(
            TALK[:1], chat_template=jinja, add_generation_prompt=True
        )
        whole = tokenizer.apply_chat_template(TALK[:2], chat_template=jinja)
        assert whole.startswith(asked + TALK[1]["content"])
        owner = ByteTokenizer()
        owner.chat_template = jinja  # a model that was trained so is trained so again
        assert template_of(None, owner) == template


def test_special_names_in_lists_are_refused(both):
    for content in ("x<|im_end|>", [{"type": "text", "text": "x<|im_end|>"}]):
        line = {"messages": [TALK[0] | {"content": content}, TALK[1]]}
        with pytest.raises(ValueError, match="contains the name of a special token"):
            encode_conversation(both[1], line, without_marks(TEMPLATES["ChatML"]))
