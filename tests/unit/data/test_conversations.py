"""Fine-tuning data: what carries a loss, how conversations share samples, and the losses that
transformers gives."""

import json
import random
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megazoo import pretrain
from megazoo.checkpoint import Checkpoint
from megazoo.cli.inference import run_with_model
from megazoo.data import Batches, Blend
from megazoo.data.cache import cached_tokens
from megazoo.data.conversations import CHATML, encode_conversation
from megazoo.data.samples import Conversations, best_fit
from megazoo.errors import UserError
from megazoo.parallel import ParallelContext
from megazoo.programs import convert, generate
from megazoo.tokenizer import Tokenizer, open_tokenizer
from tests.support.data import open_all, write_lines
from tests.support.pretraining import close, losses
from tests.support.sampling import marked_slow
from tests.support.transformers_models import deep_llama


class FewTokens(Tokenizer):
    """Bytes, but <|im_end|> is one token, 300; bos is 301; and two newlines are one token, 302."""

    vocab_size, eos_token_id, before = 303, 256, (301,)

    def _encode(self, text, parse_special):
        parts, ids = text.split("<|im_end|>") if parse_special else [text], []
        for number, part in enumerate(parts):
            ids += [300] * (number > 0)
            for index, piece in enumerate(part.encode().split(b"\n\n")):
                ids += [302] * (index > 0) + list(piece)
        return np.array(ids, np.uint32)


def encoded(value, template=CHATML):
    """The text that carries no loss and that which does, in turn; special tokens spelled out."""
    ids, loss_mask = encode_conversation(FewTokens(), value, template)
    assert len(ids) == len(loss_mask)
    spelled = {300: "<|im_end|>", 301: "[bos]", 302: "\n\n", 256: "[eod]"}
    pieces, before = [], None
    for token, carries_loss in zip(ids, loss_mask, strict=True):
        pieces += [""] if carries_loss != before else []
        pieces[-1] += spelled.get(token) or chr(token)
        before = carries_loss
    return pieces


def message(role, content):
    return {"role": role, "content": content}


def test_the_loss_is_on_the_completion_alone():
    assert encoded({"prompt": "2 + 2 = ", "completion": "4"}) == ["[bos]2 + 2 = ", "4[eod]"]
    assert encoded({"prompt": "", "completion": "4"}) == ["[bos]", "4[eod]"]
    name = "<|im_end|>"  # is text in a text
    ids, _ = encode_conversation(FewTokens(), {"prompt": name, "completion": name}, CHATML)
    assert ids == [301, *name.encode() * 2, 256]
    # and on a token that prompt and completion share
    assert encoded({"prompt": "a\n", "completion": "\nb"}) == ["[bos]a", "\n\nb[eod]"]


def test_the_assistants_words_carry_a_loss_with_what_ends_them():
    talk = [message("system", "Be kind."), message("user", "Hi"), message("assistant", "Hello")]
    talk += [message("user", "Bye"), message("assistant", "So long")]
    assert encoded({"messages": talk}) == [
        "[bos]<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "Hello<|im_end|>\n",
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        "So long<|im_end|>\n[eod]",
    ]
    assert encoded({"messages": talk[1:4]}, "{role}> {content}\n")[1:] == [
        "Hello\n",
        "user> Bye\n[eod]",
    ]
    assert encoded({"messages": talk[1:3]}, "<{role}>{content}</{role}>") == [
        "[bos]<user>Hi</user><assistant>",
        "Hello</assistant>[eod]",
    ]


MISTAKES = {
    "its keys are: 'completion'": {"completion": "a"},
    "no text under 'prompt'": {"prompt": 3, "completion": "a"},
    "the completion is empty": {"prompt": "a", "completion": ""},
    "message 1 has no content": {"messages": [{"role": "user"}]},
    "messages is not a list": {"messages": {}},
    "nothing to learn: no words of the assistant": {"messages": [message("user", "a")]},
    "'a<|im_end|>' contains the name of a special token": {
        "messages": [message("assistant", "a<|im_end|>")]
    },
}


def test_what_can_not_be_encoded_is_told():
    for text, value in MISTAKES.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            encode_conversation(FewTokens(), value, CHATML)


def examples(count, seed=0, longest=6):
    """Prompts and completions of very different lengths."""
    generator = random.Random(seed)
    words = "the a def return class self if else import print".split()

    def text(most):
        return " ".join(generator.choices(words, k=generator.randint(1, most)))

    return [
        {"prompt": text(longest) + " ->", "completion": " " + text(generator.choice((1, longest)))}
        for _ in range(count)
    ]


def test_samples_are_cut_shifted_and_masked(tmp_path):
    values = [{"prompt": "ab", "completion": "cd"}, {"prompt": "abcdef", "completion": "ghi"}]
    tokens = cached_tokens(write_lines(tmp_path / "a.jsonl", *values), "byte", CHATML)
    dataset = Conversations(*tokens, 0, 2, 7, packing=False)
    assert [bytes(sample.input_ids.tolist()) for sample in dataset] == [b"abcd", b"abcdefg"]
    assert [sample.targets.tolist() for sample in dataset] == [
        [-100, ord("c"), ord("d"), 256],
        [-100] * 5 + [ord("g"), ord("h")],
    ]
    assert dataset.cut == 1
    assert [dataset.tokens_of(index) for index in range(2)] == [4, 7]
    assert Conversations(*tokens, 1, 2, 9, packing=False)[0].targets.tolist()[-1] == 256
    batch = Batches(Blend([dataset]), 2, ParallelContext())(0)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[*b"abcd", 0, 0, 0], [*b"abcdefg"]],
        "targets": [[-100, *b"cd", 256, -100, -100, -100], [-100] * 5 + [*b"gh"]],
    }


def test_conversations_of_which_nothing_is_left_to_learn_are_left_out(tmp_path):
    values = [{"prompt": "p" * length, "completion": "cd"} for length in (3, 9, 6, 7)]
    tokens = cached_tokens(write_lines(tmp_path / "a.jsonl", *values), "byte", CHATML)
    for packing in (False, True):
        dataset = Conversations(*tokens, 1, 4, 7, packing)
        assert (dataset.cut, dataset.left_out) == (3, 1)
        targets = sorted(sample.targets[-2:].tolist() for sample in dataset)
        assert targets == [[-100, ord("c")], [ord("c"), ord("d")]]


def test_a_cut_never_teaches_an_end(tmp_path):
    """The last target is the token that follows, at every length."""
    talk = [message("user", "ab"), message("assistant", "cd"), message("user", "e")]
    talk += [message("assistant", "fgh")]
    path = write_lines(tmp_path / "a.jsonl", {"messages": talk})
    whole, carries_loss = b"ab\ncd\ne\nfgh\n", [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    tokens = cached_tokens(path, "byte", "{content}\n")
    for length in range(3, 14):
        for packing in (False, True):
            sample = Conversations(*tokens, 0, 1, length, packing)[0]
            following = [*whole[1:], 256][:length]
            marked = zip(following, [*carries_loss[1:], 1], strict=False)
            targets = [token if counts else -100 for token, counts in marked]
            assert sample.input_ids.tolist() == list(whole[:length])
            assert sample.targets.tolist() == targets
            assert (256 in targets) == (length >= len(whole))


def test_the_lengths_that_keep_conversations_are_printed(tmp_path):
    """The ids of a line: its prompt, two of the completion, and the end, which is only a target."""
    values = [{"prompt": "p" * length, "completion": "cd"} for length in (3, 4, 9, 12, 15, 2)]
    path = write_lines(tmp_path / "a.jsonl", *values)
    said = []
    open_all(path, split="1,0", seq_length=5, report=said.append)
    assert said == [
        f"{path}: 4 conversations are longer than --seq-length 5 and are truncated: --seq-length 6 "
        "keeps one of them complete, 17 all; 3 of them are skipped, because no tokens with a loss "
        "remain: --seq-length 9 keeps one of them, 15 all"
    ]
    said.clear()
    open_all(path, split="1,0", seq_length=16, report=said.append)
    assert said == [
        f"{path}: 1 conversations are longer than --seq-length 16 and are truncated: "
        "--seq-length 17 keeps it complete"
    ]
    said.clear()
    open_all(path, split="1,0", seq_length=17, report=said.append)
    assert not said
    twice = write_lines(tmp_path / "b.jsonl", *[values[1]] * 2)
    open_all(twice, split="1,0", seq_length=5, report=said.append)
    assert said[0].endswith("are truncated: --seq-length 6 keeps all of them complete")
    all_of = r"all 5 conversations are longer than --seq-length 2 before their first answer\. "
    shortest = "The shortest length that keeps one is 3: use --seq-length 3 or more"
    for packing in (False, True):
        with pytest.raises(UserError, match=all_of + shortest):
            open_all(path, split="5,1", seq_length=2, packing=packing)
    with pytest.raises(UserError, match="all 1 validation conversations are longer than --seq-le"):
        open_all(write_lines(path, values[5], values[2]), split="1,1", seq_length=4)


def test_packed_samples_hold_whole_conversations_apart(tmp_path):
    tokens = cached_tokens(write_lines(tmp_path / "a.jsonl", *examples(200)), "byte", CHATML)
    alone, packed = (
        Conversations(*tokens, 10, 190, 200, packing=packing) for packing in (False, True)
    )
    assert len(packed) < 1.15 * alone.lengths.sum() / 200
    found = []
    for index, sample in enumerate(packed):
        assert len(sample.input_ids) == packed.tokens_of(index) <= 200
        for number in range(sample.documents.max() + 1):
            mine = sample.documents == number
            found.append((sample.input_ids[mine].tolist(), sample.targets[mine].tolist()))
    assert sorted(found) == sorted(
        (sample.input_ids.tolist(), sample.targets.tolist()) for sample in alone
    )
    batch = Batches(Blend([packed]), 4, ParallelContext())(0)
    starts = batch["document_ids"].diff(dim=1, prepend=torch.full((4, 1), -2)) != 0
    assert torch.equal(batch["position_ids"] == 0, starts)


def test_best_fit_fills_the_bins():
    lengths = np.random.default_rng(0).integers(1, 101, 5000)
    bins = best_fit(lengths, 100)
    assert sorted(number for each in bins for number in each) == list(range(5000))
    assert max(lengths[each].sum() for each in bins) <= 100
    assert len(bins) * 100 < 1.02 * lengths.sum() + 100
    assert best_fit(np.array([3, 4, 2, 1]), 5) == [[1, 3], [0, 2]]
    assert best_fit(np.array([], int), 5) == []


# Against transformers.


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
    """A LLaMA of transformers with its tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    deep_llama(vocab_size=len(tokenizer), kv_heads=2, max_positions=64).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def loss_of_transformers(directory, values) -> float:
    """The mean over all tokens of all completions, each example by itself, in the ids of
    transformers' tokenizer."""
    model, theirs = (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    nats = labels = 0
    for value in values:
        ids = theirs(value["prompt"] + value["completion"])["input_ids"] + [theirs.eos_token_id]
        prompt = theirs(value["prompt"])["input_ids"]
        shared = next(
            (i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt)
        )
        target = torch.tensor([[-100] * shared + ids[shared:]])
        with torch.no_grad():
            loss = model(torch.tensor([ids]), labels=target).loss.item()
        count = (target[:, 1:] != -100).sum().item()
        nats, labels = nats + loss * count, labels + count
    return nats / labels


LAYOUTS = {
    "one": (1, ""), "tp2 pp2": (4, "--tp 2 --pp 2"), "pp3": (3, "--pp 3"), "dp2": (2, ""),
    "tp2 sp": (2, "--tp 2 --sequence-parallel"),
}  # fmt: skip
CASES = [
    ("padded", "one, tp2 pp2, dp2"),
    ("packed", "one, pp3, tp2 sp"),
    ("padded", "one, pp3, tp2 sp"),
    ("packed", "one, tp2 pp2, dp2"),
]
PROGRAM = "--device cpu --micro-batch-size 2".split()


@pytest.mark.parametrize(("kind", "layouts"), marked_slow(CASES, lambda number, _: number > 0))
def test_fine_tuning_gives_transformers_loss_and_one_processs_in_every_layout(
    ranks, llama, tmp_path, kind, layouts
):
    """A batch is an epoch here, so that the first loss is that of all examples; the ids have 1 to
    30 labels a row."""
    values, packing = examples(24), kind == "packed"
    data = write_lines(tmp_path / "a.jsonl", *values)
    tokens = cached_tokens(data, str(llama), CHATML)
    samples = len(Conversations(*tokens, 0, 24, 64, packing))
    rows = samples // 4 * 4
    assert samples == rows or packing
    common = [*PROGRAM, *"--split 1,0 --seq-length 64 --steps 3 --lr 1e-3".split()]
    common += ["--load", str(llama), "--data", str(data), "--global-batch-size", str(rows)]
    common += ["--packing"] if packing else []
    found = {}
    for name in layouts.split(", "):
        world, flags = LAYOUTS[name]
        metrics = tmp_path / name
        ranks(pretrain.main, world, [*common, *flags.split(), "--metrics", str(metrics)])
        found[name] = losses(metrics)
    for name, loss in found.items():
        assert close(loss, found["one"]), name
    if samples == rows:
        assert abs(found["one"][1] - loss_of_transformers(llama, values)) < 1e-5
    record = json.loads((tmp_path / "one").read_text().splitlines()[0])
    if not packing:
        assert record["consumed_tokens"] == sum(tokens[0].lengths - 1), "padding is not counted"


def test_tokenizer_files_travel_with_a_fine_tuned_model(llama, tmp_path):
    data, run = write_lines(tmp_path / "a.jsonl", *examples(12)), str(tmp_path / "run")
    common = [*PROGRAM, "--data", str(data), "--global-batch-size", "2", "--save", run]
    first = "--seq-length 32 --epochs 1 --eval-steps 1 --split 80,20 --lr 1e-3".split()
    pretrain.main([*common, *first, "--load", str(llama)])
    saved = Checkpoint(run)
    assert saved.trainer["settings"]["epochs"] == 1
    # 10 of the 12, two a step
    assert saved.trainer["step"] == saved.trainer["settings"]["steps"] == 5
    text = examples(1)[0]["prompt"]
    assert open_tokenizer(saved.path).encode(text) == open_tokenizer(llama).encode(text)
    assert "tokenizer" not in saved.trainer["settings"]
    pretrain.main([*common, "--load", run, "--epochs", "2"])
    again = Checkpoint(run)
    assert (again.trainer["step"], again.trainer["consumed_samples"]) == (10, 20)
    assert again.sidecar_files == saved.sidecar_files


def test_the_chat_template_travels_with_a_fine_tuned_model(tmp_path):
    talk = {"messages": [message("user", "Hi"), message("assistant", "Hello")]}
    data, run = write_lines(tmp_path / "a.jsonl", *[talk] * 12), str(tmp_path / "run")
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    common = (
        "--steps 1 --layers 1 --seq-length 64 --global-batch-size 2 --eval-steps 0 --device cpu"
    )
    common = [*common.split(), "--data", str(data), "--save", run]
    for given, expected in (
        (["--chat-template", f"{tmp_path}/mine.jinja"], template),
        (["--chat-template", "{role}> {content}\n"], "{% for message in messages %}"),
        (["--chat-template", "chatml"], "{% for message in messages %}"),
    ):
        pretrain.main([*common, *given])
        saved = Checkpoint(run).sidecar_files["chat_template.jinja"].decode()
        assert expected in saved
    pretrain.main([*common, "--load", run, "--steps", "2"])
    assert Checkpoint(run).sidecar_files["chat_template.jinja"].decode() == saved
    lora, merged = str(tmp_path / "lora"), str(tmp_path / "merged")
    words = [*common[:-1], lora, "--load", run, "--lora-rank", "1"]
    pretrain.main([*words, "--chat-template", f"{tmp_path}/mine.jinja"])
    options = generate.Options(source=tmp_path / "run", adapter=tmp_path / "lora", device="cpu")
    templates = []
    run_with_model(options, lambda _, tokenizer: templates.append(tokenizer.chat_template))
    assert templates == [template]
    convert.main([run, merged, "--to", "hf", "--adapter", lora])
    assert (tmp_path / "merged/chat_template.jinja").read_text() == template
    asked = []

    def ask(_, tokenizer) -> None:
        ask = tokenizer.apply_chat_template
        asked.append(ask(talk["messages"][:1], add_generation_prompt=True))

    run_with_model(generate.Options(source=tmp_path / "run", device="cpu"), ask)
    assert asked == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]
