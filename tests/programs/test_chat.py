"""megazoo chat: in a pseudo-terminal, where Ctrl-C ends an answer, and through a pipe."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megazoo.cli.prompts import Printer
from megazoo.programs import chat, generate
from megazoo.tokenizer import ByteTokenizer
from tests.support.harness_files import tokenizer_of
from tests.support.inference import run_main
from tests.support.transformers_models import deep_llama

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model whose answers are long, with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("chat")
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = TEMPLATE
    hf = deep_llama(vocab_size=len(tokenizer), kv_heads=2, max_positions=60000)
    hf.generation_config.eos_token_id = hf.config.eos_token_id = 2
    with torch.no_grad():  # what ends an answer has a score of 0, and some other a higher one
        hf.lm_head.weight[[2, *tokenizer("<|im_end|>", add_special_tokens=False).input_ids]] = 0
    hf.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def expected(directory, questions, new, system=None):
    """The answers of transformers, each after all that was said before."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages, answers = [{"role": "system", "content": system}] if system else [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        out = model.generate(
            ids, max_new_tokens=new, stop_strings=["<|im_end|>"], tokenizer=tokenizer
        )
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        answers.append(text)
        messages.append({"role": "assistant", "content": text})
    return answers


def test_a_model_without_a_template_needs_one(directory, monkeypatch, capsys):
    words = [directory, "--tokenizer", "byte", "--max-new-tokens", 1, "--device", "cpu"]
    monkeypatch.setattr("megazoo.cli.inference.chat_templates_in", lambda _: {})
    code, out, error = run_main(chat, monkeypatch, capsys, *words, typed="Hi\n")
    assert (code, out) == (2, "")
    assert (
        "the tokenizer byte has no chat template, which conversations need: pass --chat-" in error
    )
    code, _, error = run_main(
        chat, monkeypatch, capsys, *words, "--chat-template", "chatml", typed="Hi\n"
    )
    assert code == 0, error


def test_each_answer_is_transformers_after_all_that_was_said(directory, monkeypatch, capsys):
    questions = ["/etc", "Who are you?"]  # not a command of the chat
    first, second = expected(directory, questions, 12, "Be brief.")
    (again,) = expected(directory, questions[1:], 12, "Be brief.")
    assert second != again
    typed = "/etc\n\n/help\nWho are you?\n/reset\nWho are you?\n/exit\nHi\n"
    words = [directory, "--system", "Be brief.", "--max-new-tokens", 12, "--device", "cpu"]
    code, out, error = run_main(chat, monkeypatch, capsys, *words, typed=typed)
    assert code == 0, error
    assert out == "".join(f"{answer}\n" for answer in (first, second, again))
    assert error.count("/reset starts a new conversation") == 1  # from /help
    assert "loading" not in error


def test_generate_ends_answers_to_messages_where_chat_does(
    directory, monkeypatch, capsys, tmp_path
):
    """At the text with which the template ends an answer: some words of one of the answers."""
    questions = ["Hi", "Who are you?"]
    answers = [expected(directory, [question], 30)[0] for question in questions]
    end = answers[0][8:14]
    assert end.strip() == end
    shown = [answer.partition(end)[0] for answer in answers]
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink()
    plain = (directory / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[-1]['role'] == 'assistant' %}{{ messages[-1]['content'] + '" + end + "' }}"
        "{% else %}" + plain + "{% endif %}"
    )
    file = tmp_path / "questions.jsonl"
    messages = [[{"role": "user", "content": question}] for question in questions]
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    words = [tmp_path, "--max-new-tokens", 30, "--device", "cpu"]
    code, out, error = run_main(chat, monkeypatch, capsys, *words, typed="Hi\n")
    assert (code, out) == (0, f"{shown[0]}\n"), error
    for more in ([], ["--batch-size", 1]):
        words = [tmp_path, "--messages", file, "--max-new-tokens", 30, "--device", "cpu", *more]
        code, out, error = run_main(generate, monkeypatch, capsys, *words)
        assert (code, out) == (0, "".join(f"{answer}\n" for answer in shown)), error


def test_an_answer_is_shown_up_to_what_ends_it(capsys):
    ids = list(b"So long<|im_en<|im_end|>")
    printer = Printer(ByteTokenizer(), [], [256], ("<|im_end|>", "zz"))
    shown = []
    for token in ids:
        printer.put(torch.tensor([token]))
        shown.append(capsys.readouterr().out)
    printer.end()
    assert "".join(shown) == printer.text == "So long<|im_en"
    assert shown[:8] == [*"So long", ""]
    printer = Printer(ByteTokenizer(), [], [256], ("<|im_end|>",))
    for token in b"a <|":
        printer.put(torch.tensor([token]))
    printer.end()
    assert printer.text == "a <|"


def test_mistakes_leave_the_conversation_as_it_was(directory, monkeypatch, capsys):
    (answer,) = expected(directory, ["Hi"], 4)
    typed = f"{'x ' * 60000}\nHi\n"
    words = [directory, "--max-new-tokens", 4, "--device", "cpu"]
    code, out, error = run_main(chat, monkeypatch, capsys, *words, typed=typed)
    assert (code, out) == (0, f"{answer}\n")
    assert "tokens, too many for this model: type /reset to start a new one" in error


def read_until(descriptor, wanted: bytes, seconds: float = 60) -> bytes:
    """What comes from a terminal, up to some bytes."""
    text, deadline = b"", time.monotonic() + seconds
    while wanted not in text:
        ready, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"{wanted} did not come: {text[-400:]}"
        text += os.read(descriptor, 4096)
    return text


@pytest.mark.parametrize("layout", [pytest.param("--tp 2 --pp 2", marks=pytest.mark.slow), ""])
def test_ctrl_c_ends_an_answer_in_a_terminal(directory, layout):
    ours, theirs = pty.openpty()
    command = [sys.executable, "tools/chat.py", directory, *layout.split(), "--device", "cpu"]
    command += ["--max-new-tokens", "50000"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    try:
        os.close(theirs)
        start = read_until(ours, b"\r\n> ")
        assert start.startswith(b"loading ")
        assert b"/exit or Ctrl-D ends the chat" in start
        for _ in range(2):
            os.write(ours, b"Hi\n")
            read_until(ours, b"Hi\r\n")
            time.sleep(0.5)
            assert process.poll() is None, os.read(ours, 9999)
            os.killpg(process.pid, 2)
            read_until(ours, b"\r\n> ")
        os.write(ours, b"/exit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)
