"""tools/generate.py, on Hugging Face directories and shards, and in sessions."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import megazoo
from megazoo.cli.prompts import read_messages, read_prompts
from megazoo.programs import generate
from tests.support.inference import PROMPT, expected_text, run_main, write_model
from tests.support.programs import python
from tests.support.training import tiny_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directories(tokenizer, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("inference"), tokenizer)


@pytest.mark.parametrize("kind", [pytest.param("hf", marks=pytest.mark.slow), "shards"])
def test_torchrun_generates_what_transformers_does(directories, kind):
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["tools/generate.py", directories / kind, *"--tp 2 --pp 2 --device cpu".split()]
    command += ["--prompt", PROMPT, "--max-new-tokens", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_text(directories / "hf") + "\n"
    assert "20 new tokens in" in done.stderr
    assert "tokens/s" in done.stderr.splitlines()[-1]


def test_prompts_from_a_file_are_answered_together(directories, tmp_path, monkeypatch, capsys):
    prompts = [PROMPT, "import", "class Oracle:"]
    (tmp_path / "prompts").write_text("\n".join(prompts) + "\n\n")
    arguments = [directories / "hf", "--prompts", tmp_path / "prompts"]
    arguments += "--max-new-tokens 12 --batch-size 2".split()
    code, out, _ = run_main(generate, monkeypatch, capsys, *arguments)
    assert code == 0
    assert out.startswith(
        "\n".join(expected_text(directories / "hf", prompt, 12) for prompt in prompts) + "\n"
    )
    _, out, _ = run_main(generate, monkeypatch, capsys, *arguments, "--num-beams", 3)
    beams = [expected_text(directories / "hf", prompt, 12, num_beams=3) for prompt in prompts]
    assert out.startswith("\n".join(beams) + "\n")


def test_several_answers_to_each_prompt(directories, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts").write_text(f"{PROMPT}\nimport\n")
    arguments = [directories / "hf", "--prompts", tmp_path / "prompts", "--max-new-tokens", 12]
    arguments += "--num-beams 3 --num-return-sequences 2 --no-repeat-ngram-size 2".split()
    code, out, _ = run_main(generate, monkeypatch, capsys, *arguments)
    settings = {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 2}
    tokens = AutoTokenizer.from_pretrained(directories / "hf")
    model = AutoModelForCausalLM.from_pretrained(directories / "hf")
    texts = []
    for prompt in (PROMPT, "import"):
        ids = tokens(prompt, return_tensors="pt").input_ids
        texts += tokens.batch_decode(
            model.generate(ids, max_new_tokens=12, **settings), skip_special_tokens=True
        )
    assert code == 0
    assert out.startswith("\n".join(texts) + "\n")
    assert len(set(texts)) == 4


def test_a_session_answers_line_by_line(directories, monkeypatch, capsys):
    typed = f"{PROMPT}\n\n{'x = 1 ' * 40}\nimport\n"
    code, out, error = run_main(
        generate, monkeypatch, capsys, directories / "shards", "--max-new-tokens", 8, typed=typed
    )
    assert code == 0
    answers = [expected_text(directories / "hf", prompt, 8) for prompt in (PROMPT, "import")]
    assert out == "".join(answer + "\n" for answer in answers)
    assert "exceed the model's max-positions 64" in error
    assert ">" not in error


def test_sampling_and_stopping(directories, monkeypatch, capsys):
    arguments = [directories / "hf", "--prompt", PROMPT, "--max-new-tokens", 15]
    draws = [
        run_main(generate, monkeypatch, capsys, *arguments, "--temperature", 2, "--seed", n)[1]
        for n in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    text = expected_text(directories / "hf", new=15)
    cold = run_main(generate, monkeypatch, capsys, *arguments, "--temperature", 0, "--top-k", 5)
    assert cold[1] == text + "\n"
    stop = text[len(PROMPT) + 4 : len(PROMPT) + 7]
    stops = ["--stop", "never there", "--stop", stop]
    _, out, _ = run_main(generate, monkeypatch, capsys, *arguments, *stops)
    answer = out.removeprefix(PROMPT).removesuffix("\n")
    assert text.removeprefix(PROMPT).startswith(answer)
    assert stop in answer
    assert len(answer) < len(text) - len(PROMPT)


TEMPLATE = "{% for m in messages %}{{ bos_token + m['content'] + '\\n' }}{% endfor %}"


def test_lines_of_json_are_answered_into_a_file(directories, tmp_path, monkeypatch, capsys):
    lines = [{"prompt": f"{PROMPT}\n  return", "id": 7}, {"prompt": "import"}]
    talks = [{"messages": [{"role": "user", "content": line["prompt"]}]} for line in lines]
    for name, values in (("prompts", lines), ("messages", talks)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(v)}\n" for v in values))
    theirs = AutoTokenizer.from_pretrained(directories / "hf")
    model = AutoModelForCausalLM.from_pretrained(directories / "hf")

    def answer(ids):
        return theirs.decode(model.generate(ids, max_new_tokens=6)[0, ids.shape[1] :])

    common = [directories / "hf", "--max-new-tokens", 6, "--output", tmp_path / "out.jsonl"]
    (tmp_path / "out.jsonl").write_text("what was there before\n")
    for name, values in (("prompts", lines), ("messages", talks)):
        if name == "messages":
            (directories / "hf/chat_template.jinja").write_text(TEMPLATE)
            ids = [
                theirs.apply_chat_template(
                    talk["messages"], chat_template=TEMPLATE, return_tensors="pt", return_dict=True
                )["input_ids"]
                for talk in talks
            ]
        else:
            ids = [theirs(line["prompt"], return_tensors="pt").input_ids for line in lines]
        words = [*common, f"--{name}", tmp_path / f"{name}.jsonl"]
        code, out, error = run_main(generate, monkeypatch, capsys, *words)
        assert (code, out) == (0, ""), error
        assert [json.loads(line) for line in (tmp_path / "out.jsonl").open()] == [
            value | {"answer": answer(each)} for value, each in zip(values, ids, strict=True)
        ]
    code, out, _ = run_main(
        generate, monkeypatch, capsys, *common[:-2], "--messages", tmp_path / "messages.jsonl",
        "--batch-size", 1,
    )  # fmt: skip
    assert out == "".join(answer(each) + "\n" for each in ids)
    (directories / "hf/chat_template.jinja").unlink()


def test_bad_lines_are_named(tmp_path):
    file = tmp_path / "a.jsonl"
    for text, message in (
        ('{"prompt": "a"}\n\n{"text": "a"}', "a.jsonl, line 3: it has no text under 'prompt'"),
        ("[1]", "a.jsonl, line 1: '.1.' is not a JSON object"),
        ('{"prompt": "a"}\n{', "a.jsonl, line 2 is not JSON: Expecting property name"),
        ("\n", "a.jsonl has no prompts"),
    ):
        file.write_text(text)
        with pytest.raises(megazoo.UserError, match=message):
            read_prompts(file)
    for text in ('{"messages": "a"}', '{"messages": []}'):
        file.write_text(text)
        with pytest.raises(megazoo.UserError, match="line 1: it has no list of objects under 'm"):
            read_messages(file)
    (tmp_path / "a.txt").write_bytes("a\u2028b\r\n\nc".encode())
    assert [prompt.text for prompt in read_prompts(tmp_path / "a.txt")] == ["a\u2028b", "c"]


TOO_LONG = "x = 1 " * 40
WRONG = [
    (["--prompt", TOO_LONG], r"a prompt of \d+ tokens and 128 new ones exceed the model's"),
    (["--prompt", ""], "the prompt is empty, and this tokenizer has no token that begins a text"),
    ("--prompt a --prompts b".split(), "--prompt and --prompts exclude each other"),
    ("--prompts /nowhere".split(), "/nowhere can't be read: No such file"),
    ("--prompt a --output /nowhere/a.jsonl".split(), "--output /nowhere/a.jsonl: No such file"),
    ("--prompt a --messages b".split(), "--prompt and --messages exclude each other"),
    ("--prompt a --tp 3".split(), "heads 8 with kv-heads 2 can't be sharded over tp 3"),
    ("--prompt a --tokenizer /nowhere".split(), "/nowhere"),
    ("--prompt a --num-return-sequences 2".split(), "num-return-sequences 2 needs --temperature,"),
    ("--prompt a --top-p 2".split(), "top_p 2.0 is out of range"),
]


def test_mistakes_are_told_in_one_line(directories, monkeypatch, capsys):
    for arguments, message in WRONG:
        code, out, error = run_main(generate, monkeypatch, capsys, directories / "hf", *arguments)
        expected = 1 if "--output" in arguments else 2
        assert (code, out, error.count("\n")) == (expected, "", 1), error
        assert re.search(message, error), error


def test_a_model_that_was_trained_here_needs_no_tokenizer_files(tmp_path, monkeypatch, capsys):
    megazoo.from_config(tiny_config(vocab_size=257)).save_parallelized(tmp_path)
    words = (tmp_path, "--prompt", "a", "--max-new-tokens", 3)
    code, _, error = run_main(generate, monkeypatch, capsys, *words)
    assert (code, "has no tokenizer: use --tokenizer byte" in error) == (2, True)
    code, out, _ = run_main(generate, monkeypatch, capsys, *words, "--tokenizer", "byte")
    assert (code, out[0]) == (0, "a")
