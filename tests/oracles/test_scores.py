"""tools/evaluate.py, and the scores behind it, are those of transformers, in every layout."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import megazoo
from megazoo.evaluation.scoring import evaluate_texts, score, score_choices, windows
from megazoo.models.mpt import MPTConfig
from megazoo.programs import evaluate
from megazoo.tokenizer import ByteTokenizer, open_tokenizer
from tests.support.inference import PROMPT, expected_text, run_main, write_model
from tests.support.sampling import marked_slow
from tests.support.training import context, layout_name, randomize, world

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directories(tokenizer, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("inference"), tokenizer)


def test_windows_predict_every_id_once():
    for count in range(1, 40):
        for length, stride in [(8, 8), (8, 3), (8, 1), (1, 1), (50, 50)]:
            ids, seen = list(range(count)), [0]
            for window, known in windows(ids, length, stride):
                assert len(window) <= length + 1
                assert known >= min(window[known], length + 1 - stride)
                seen += window[known:]
            assert seen == ids


def test_the_loss_of_texts_is_transformers(directories, tmp_path, monkeypatch, capsys):
    hf = AutoModelForCausalLM.from_pretrained(directories / "hf")
    tokens = open_tokenizer(directories / "hf")
    texts = [Path(__file__).read_text()[:700], "short", "", "é🙂" * 30]
    nats, count = 0.0, 0
    # windows of 40 tokens: the first predicts all of them, the others 20 each, or the last ones
    for text in texts:
        ids = torch.tensor([[1, *tokens.encode(text, add_special_tokens=False)]])
        last = ids.shape[1] - 1
        ends = [min(40, last), *range(60, last, 20), *([last] if last > 40 else [])]
        for before, end in zip([0, *ends], ends, strict=False):
            with torch.no_grad():
                logits = hf(ids[:, max(0, end - 40) : end or 1]).logits[0, before - end :].double()
            predicted = ids[0, before + 1 : end + 1, None]
            nats -= logits[: len(predicted)].log_softmax(-1).gather(1, predicted).sum().item()
            count += end - before
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(lines)
    arguments = [directories / "shards", "--text", tmp_path / "texts.jsonl"]
    arguments += ["--seq-length", 40, "--stride", 20, "--output", tmp_path / "scores.json"]
    arguments += ["--logprobs", tmp_path / "tokens.jsonl", "--top-k", 3]
    code, out, _ = run_main(evaluate, monkeypatch, capsys, *arguments)
    result = json.loads((tmp_path / "scores.json").read_text())
    assert code == 0
    assert result["tokens"] == count
    assert result["documents"] == 4
    assert result["bytes"] == sum(len(text.encode()) for text in texts)
    assert abs(result["loss"] - nats / count) < 1e-5
    assert f"loss            {result['loss']:.6f} nats per token" in out
    assert "windows of 40 tokens, 20 apart; each text follows the token 1, <s>" in out
    assert (
        abs(result["bits_per_byte"] * result["bytes"] * 0.6931471805599453 - result["nats"]) < 1e-6
    )
    lines = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [
        tokens.encode(text, add_special_tokens=False) for text in texts
    ]
    for line in lines:
        assert len(line["logprobs"]) == len(line["top_ids"]) == len(line["tokens"])
    assert sum(sum(line["logprobs"]) for line in lines) == pytest.approx(-result["nats"])
    with torch.no_grad():
        every = hf(torch.tensor([[1, *lines[1]["tokens"]]])).logits[0, :-1].double().log_softmax(-1)
    exact = every.gather(1, torch.tensor(lines[1]["tokens"])[:, None])[:, 0]
    assert lines[1]["logprobs"] == pytest.approx(exact.tolist(), abs=1e-5)
    assert torch.tensor(lines[1]["top_ids"]).equal(every.topk(3).indices)
    top = torch.tensor(lines[1]["top_logprobs"], dtype=torch.float64)
    torch.testing.assert_close(top, every.topk(3).values, atol=1e-5, rtol=0)


CONFIG = MPTConfig(vocab_size=257, max_positions=64, hidden_size=32, layers=5, heads=4)
TEXTS = [Path(__file__).read_text()[:300], "short", "x" * 41]
REQUESTS = [("def f(", "x):"), ("", "import"), ("a" * 100, "bc"), ("é", "🙂 and more")]
REQUESTS += [("1 2 3", " 4")]


def scores_in(layout):
    model = randomize(megazoo.from_config(CONFIG, context(**layout), seed=3))
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1).masked_fill(torch.arange(9) % 4 == 3, -100)
    of_tokens = []
    loss = evaluate_texts(
        model,
        ByteTokenizer(),
        TEXTS,
        length=40,
        stride=16,
        batch=3,
        top_k=2,
        each=lambda ids, scores: of_tokens.append((len(ids), scores)),
    )
    assert [(count, 5) for count, _ in of_tokens] == [tuple(each.shape) for _, each in of_tokens]
    assert sum(float(each[:, 0].sum()) for _, each in of_tokens) == pytest.approx(-loss.nats)
    choices = score_choices(model, ByteTokenizer(), REQUESTS, batch=4)
    return loss.nats, loss.tokens, choices, score(model, ids, targets)


# each axis in one that is fast
@pytest.mark.parametrize(
    "layout",
    marked_slow(
        [dict(tp=2, pp=2), dict(pp=2, dp=2), dict(tp=2, dp=2, sp=True)],
        lambda number, _: number == 1,
        name=layout_name,
    ),
)
def test_scores_are_the_same_in_every_layout(ranks, layout):
    nats, tokens, choices, scores = scores_in({})
    assert tokens == sum(len(text) for text in TEXTS)
    for result in ranks(scores_in, world(layout), layout):
        assert result[1] == tokens
        assert abs(result[0] - nats) < 1e-5 * nats
        for (likelihood, count, greedy), expected in zip(result[2], choices, strict=True):
            assert (count, greedy) == expected[1:]
            assert abs(likelihood - expected[0]) < 1e-4
        assert all(
            torch.allclose(a.double(), b.double(), atol=1e-4)
            for a, b in zip(result[3], scores, strict=True)
        )


def test_choices_are_scored_as_by_transformers(directories):
    hf = AutoModelForCausalLM.from_pretrained(directories / "hf")
    tokens = open_tokenizer(directories / "hf")
    model = megazoo.from_pretrained(directories / "shards")
    greedy = expected_text(directories / "hf", PROMPT, 6).removeprefix(PROMPT)
    requests = [(PROMPT, greedy), (PROMPT, " return"), ("", "import"), ("x" * 200, "y = 2")]
    for (context_text, choice), (likelihood, count, is_greedy) in zip(
        requests, score_choices(model, tokens, requests), strict=True
    ):
        before, whole = tokens.encode(context_text), tokens.encode(context_text + choice)
        before, whole = (before, whole) if before else ([1], [1, *whole])
        scored = len(whole) - len(before)
        ids = torch.tensor([whole[-65:]])
        with torch.no_grad():
            logits = hf(ids[:, :-1]).logits[0, -scored:].double().log_softmax(-1)
        assert count == scored
        assert abs(likelihood - logits.gather(1, ids[0, -scored:, None]).sum().item()) < 1e-4
        assert is_greedy == torch.equal(logits.argmax(-1), ids[0, -scored:])


def test_spaces_at_the_boundary_count_to_the_choice(directories):
    model, tokens = megazoo.from_pretrained(directories / "hf"), open_tokenizer(directories / "hf")
    (a, *rest), (b, *same) = score_choices(
        model, tokens, [(PROMPT + " ", "return x"), (PROMPT, " return x")]
    )
    assert rest == same
    assert abs(a - b) < 1e-5


def test_the_tool_scores_choices_and_counts_the_right_ones(
    directories, tmp_path, monkeypatch, capsys
):
    model, tokens = megazoo.from_pretrained(directories / "hf"), open_tokenizer(directories / "hf")
    choices = [" a", " b", "return x"]
    scored = score_choices(model, tokens, [(PROMPT, choice) for choice in choices])
    likelihoods = [value for value, *_ in scored]
    best = likelihoods.index(max(likelihoods))
    requests = [
        {"context": PROMPT, "choices": choices, "answer": answer}
        for answer in (best, (best + 1) % 3)
    ]
    (tmp_path / "questions").write_text("".join(json.dumps(request) + "\n" for request in requests))
    arguments = [directories / "hf", "--choices", tmp_path / "questions"]
    arguments += ["--output", tmp_path / "scores"]
    code, out, _ = run_main(evaluate, monkeypatch, capsys, *arguments)
    assert code == 0
    assert out.endswith("right           1 of 2: 0.5000\n")
    lines = [json.loads(line) for line in (tmp_path / "scores").read_text().splitlines()]
    assert torch.allclose(
        torch.tensor(lines[1]["log_likelihoods"]), torch.tensor(likelihoods), atol=1e-5
    )


def test_evaluate_tells_mistakes_in_one_line(directories, tmp_path, monkeypatch, capsys):
    files = {
        "a.jsonl": '{"text": "a"}\nnonsense\n',
        "b.jsonl": '{"other": "a"}\n',
        "c.jsonl": '{"context": "a"}\n',
        "d.jsonl": "",
        "e.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for arguments, message in {
        (): "use exactly one of --text, --choices, --labels and --tasks",
        ("--text", tmp_path / "a.jsonl"): "a.jsonl, line 2 is not JSON",
        ("--text", tmp_path / "b.jsonl"): "b.jsonl, line 1 has no text with the key 'text'",
        ("--text", tmp_path / "e.jsonl"): "'text': it is a conversation. For the loss on its",
        ("--choices", tmp_path / "c.jsonl"): 'c.jsonl, line 1 is not {"context"',
        ("--choices", tmp_path / "d.jsonl"): "d.jsonl has no lines",
        ("--text", tmp_path / "none"): "none can't be read: No such file",
        ("--text", __file__, "--seq-length", 65): "--seq-length 65 must be from 1 to 64",
        ("--text", __file__, "--stride", 65): "stride 65 must be from 1",
    }.items():
        code, _, error = run_main(evaluate, monkeypatch, capsys, directories / "hf", *arguments)
        assert (code, error.count("\n"), message in error) == (2, 1, True), error
