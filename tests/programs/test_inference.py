"""tools/generate.py, on Hugging Face directories and shards, and in sessions."""

import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import megazoo
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
    assert done.stdout.startswith(expected_text(directories / "hf"))
    assert "20 new tokens in" in done.stdout
    assert "tokens/s" in done.stdout.splitlines()[-1]


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
    code, out, _ = run_main(
        generate, monkeypatch, capsys, directories / "shards", "--max-new-tokens", 8, typed=typed
    )
    assert code == 0
    assert expected_text(directories / "hf", PROMPT, 8) in out
    assert expected_text(directories / "hf", "import", 8) in out
    assert "exceed the model's max-positions 64" in out


def test_sampling_and_stopping(directories, monkeypatch, capsys):
    arguments = [directories / "hf", "--prompt", PROMPT, "--max-new-tokens", 15]
    draws = [
        run_main(generate, monkeypatch, capsys, *arguments, "--temperature", 2, "--seed", n)[1]
        for n in (1, 1, 2)
    ]
    draws = [out.rpartition(" in ")[0] for out in draws]
    assert draws[0] == draws[1] != draws[2]
    text = expected_text(directories / "hf", new=15)
    stop = text[len(PROMPT) + 4 : len(PROMPT) + 7]
    _, out, _ = run_main(generate, monkeypatch, capsys, *arguments, "--stop", stop)
    answer = out.rpartition("\n\n")[0].removeprefix(PROMPT).rstrip("\n")
    assert text.removeprefix(PROMPT).startswith(answer)
    assert stop in answer
    assert len(answer) < len(text) - len(PROMPT)


TOO_LONG = "x = 1 " * 40
WRONG = [
    (["--prompt", TOO_LONG], r"a prompt of \d+ tokens and 128 new ones exceed the model's"),
    (["--prompt", ""], "the prompt is empty, and this tokenizer begins no text: give some text"),
    ("--prompt a --prompts b".split(), "--prompt and --prompts exclude each other"),
    ("--prompts /nowhere".split(), "/nowhere can't be read: No such file"),
    ("--prompt a --tp 3".split(), "tp 3 doesn't divide"),
    ("--prompt a --tokenizer /nowhere".split(), "/nowhere"),
    ("--prompt a --num-return-sequences 2".split(), "num-return-sequences 2 needs --temperature,"),
    ("--prompt a --top-p 2".split(), "top_p 2.0 is out of range"),
]


def test_mistakes_are_told_in_one_line(directories, monkeypatch, capsys):
    for arguments, message in WRONG:
        code, out, error = run_main(generate, monkeypatch, capsys, directories / "hf", *arguments)
        assert (code, out, error.count("\n")) == (2, "", 1), error
        assert re.search(message, error), error


def test_a_model_that_was_trained_here_needs_no_tokenizer_files(tmp_path, monkeypatch, capsys):
    megazoo.from_config(tiny_config(vocab_size=257)).save_parallelized(tmp_path)
    words = (tmp_path, "--prompt", "a", "--max-new-tokens", 3)
    code, _, error = run_main(generate, monkeypatch, capsys, *words)
    assert (code, "has no tokenizer: give --tokenizer byte" in error) == (2, True)
    code, out, _ = run_main(generate, monkeypatch, capsys, *words, "--tokenizer", "byte")
    assert (code, out[0]) == (0, "a")
