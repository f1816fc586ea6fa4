"""--loss dpo: training on preferences in several layouts, with adapters off or another model as the
reference."""

import json
import math

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.errors import UserError
from megazoo.losses import DPO, reference
from megazoo.programs import evaluate
from tests.support.pretraining import records
from tests.support.training import context

SIZES = (
    "--hidden-size 32 --heads 4 --layers 3 --max-positions 48 --seq-length 48 --device cpu "
    "--micro-batch-size 1 --global-batch-size 4 --log-interval 1"
).split()
RUN = (
    "--loss dpo --split 50,50 --eval-steps 2 --lr 2e-3 --warmup-steps 1 --lr-decay-steps 4".split()
)
KEYS = ("loss", "grad_norm", "margin", "accuracy", "chosen_logprob")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("preferences")
    words = ["2 + 2 =", "The sky is", "One, two,", "Say hello:"]
    rows = [
        {"prompt": f"{n}. {word}", "chosen": " yes" + "." * (n % 3), "rejected": " no, never" * 2}
        for n in range(5)
        for word in words
    ]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "texts.jsonl").write_text('{"text": "no preferences here"}\n' * 9)
    base = ["--data", "mock", "--tokenizer", "byte", "--vocab-size", "257", "--eval-steps", "0"]
    pretrain.main([*SIZES, *base, "--steps", "1", "--save", str(root / "base")])
    return root


def job(files, *words) -> list[str]:
    data = ["--data", str(files / "pairs.jsonl"), "--tokenizer", "byte"]
    start = ["--load", str(files / "base"), "--load-weights-only"]
    return [*SIZES[-8:], "--seq-length", "48", *RUN, *data, *start, *map(str, words)]


def numbers(metrics) -> list[tuple]:
    lines = [line for line in records(metrics) if "loss" in line]
    return [tuple(line[key] for key in KEYS) for line in lines]


WAYS = {
    "adapters": ["--lora-rank", "4"],
    "a second model": ["--reference", "BASE"],
    "no reference": ["--dpo-variant", "simpo", "--dpo-beta", "2", "--dpo-gamma", "0.3"],
}
LAYOUTS = {
    "adapters": "--tp 2 --pp 2",
    "a second model": "--pp 2 --dp 2 --zero 1",
    "no reference": "--cp 2",
}


@pytest.mark.parametrize("way", WAYS)
def test_the_margin_grows_alike_in_two_layouts(way, files, ranks, tmp_path):
    words = [str(files / "base") if word == "BASE" else word for word in WAYS[way]]
    whole, metrics = tmp_path / "whole", tmp_path / "layout"
    pretrain.main(job(files, *words, "--steps", 4, "--metrics", whole, "--save", tmp_path / "a"))
    found = numbers(whole)
    if way != "no reference":
        assert found[0][0] == pytest.approx(math.log(2))  # the model is the reference
    assert found[-1][2] > found[0][2]
    (evaluation,) = [line for line in records(whole) if "eval_loss" in line]
    assert {"eval_margin", "eval_accuracy", "eval_chosen_reward"} <= evaluation.keys()
    assert "eval_perplexity" not in evaluation
    layout = LAYOUTS[way].split()
    world = 4 if way != "no reference" else 2
    stop = ["--steps", "2", "--save", tmp_path / "b"]
    ranks(pretrain.main, world, job(files, *words, *stop, *layout, "--metrics", metrics))
    rest = ["--load", tmp_path / "b", "--data", files / "pairs.jsonl", "--steps", "4"]
    rest += [word for word in words if way == "a second model"]
    pretrain.main([*map(str, rest), "--metrics", str(metrics), "--device", "cpu"])
    for line, expected in zip(numbers(metrics), found, strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_packed_pairs_train_as_unpacked_ones(files, ranks, tmp_path, capfd):
    data = tmp_path / "short.jsonl"
    rows = [{"prompt": "ab", "chosen": "c" * (3 + n), "rejected": "d" * (15 - n)} for n in range(8)]
    rows += [{"prompt": "ab", "chosen": "c" * 30, "rejected": "d" * 30}] * 2  # longer than a row
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--lora-rank", "4", "--steps", "3", "--data", data, "--split", "100,0"]
    words += ["--eval-steps", "0"]
    sizes = {"alone": 8, "one": 4, "layout": 4}
    jobs = {
        name: [*job(files, *words), "--global-batch-size", str(size), "--metrics", tmp_path / name]
        for name, size in sizes.items()
    }
    short = [row for row in rows if len(row["chosen"]) < 30]
    (tmp_path / "whole.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    pretrain.main([*map(str, jobs["alone"]), "--data", str(tmp_path / "whole.jsonl")])
    pretrain.main([*map(str, jobs["one"]), "--packing"])
    line = "skipped pairs that are longer than --seq-length 48: 2. --seq-length 64 keeps all"
    assert line in capfd.readouterr().out
    layout = "--packing --dp 2 --cp 2 --micro-batch-size 2".split()
    ranks(pretrain.main, 4, [*map(str, jobs["layout"]), *layout])
    alone, *others = (numbers(tmp_path / name) for name in sizes)
    assert alone[-1][2] > alone[0][2]
    for found in others:
        for line, expected in zip(found, alone, strict=True):
            assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("way", "layout"),
    [("adapters", "--pp 3 --packing"), ("a second model", "--cp 2 --dp 2 --micro-batch-size 2")],
)
def test_the_reference_is_computed_once(way, layout, files, ranks, tmp_path, capfd, monkeypatch):
    data = tmp_path / "pairs.jsonl"
    rows = (files / "pairs.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(rows[:-1]))  # an odd number
    words = [str(files / "base") if word == "BASE" else word for word in WAYS[way]]
    words = [*job(files, *words, "--steps", 3), "--data", str(data), *layout.split()]
    words += ["--global-batch-size", "4", "--split", "58,42", "--metrics"]
    pretrain.main([*words, str(tmp_path / "0"), "--pp", "1", "--cp", "1", "--dp", "1"])
    once = "--precompute-reference"
    ranks(pretrain.main, 3 if "pp" in layout else 4, [*words, str(tmp_path / "1"), once])
    monkeypatch.setattr(reference, "_collected", None)  # no forward of the reference
    words += [str(tmp_path / "2"), "--pp", "1", "--cp", "1", "--dp", "1", once]
    capfd.readouterr()
    pretrain.main(words)
    assert "of the reference: 0 pairs computed" in capfd.readouterr().out
    keys = {*KEYS, "eval_margin"} - {"accuracy"}  # that of margins of 0 is rounding
    expected, *others = (
        [line[key] for line in records(tmp_path / name) for key in keys & line.keys()]
        for name in "012"
    )
    for found in others:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    pretrain.main([*words, "--split", "30,70"])
    assert "of the reference: 0 pairs computed" in capfd.readouterr().out
    (file,) = data.parent.glob("pairs.jsonl.tokens/*_reference_*.safetensors")
    file.write_bytes(b"{}")
    with pytest.raises(UserError, match="delete it, and its values are computed again"):
        pretrain.main(words)


def test_a_changed_reference_is_reported(files, tmp_path, capfd):
    words = [*job(files, "--reference", files / "base", "--steps"), "1", "--save"]
    pretrain.main([*words, str(tmp_path / "a"), "--eval-steps", "0"])
    rest = ["--load", str(tmp_path / "a"), "--data", str(files / "pairs.jsonl"), "--device", "cpu"]
    for steps, model in (2, files / "base"), (3, tmp_path / "a"):
        pretrain.main([*rest, "--steps", str(steps), "--reference", str(model)])
        line = "has other weights than in earlier steps"
        assert (line in capfd.readouterr().err) == (steps == 3)


def test_pairs_that_fill_the_last_batch_do_not_count(files, tmp_path):
    """In micro-batches of 4, the last batch of 10 pairs has two without labels."""
    found = []
    for size in ("1", "4"):
        metrics = tmp_path / size
        words = ["--lora-rank", "4", "--steps", "1", "--eval-steps", "9", "--metrics", metrics]
        pretrain.main(job(files, *words, "--micro-batch-size", size))
        (line,) = [line for line in records(metrics) if "eval_loss" in line]
        found.append({key: value for key, value in line.items() if key.startswith("eval_")})
    assert found[0]["eval_chosen_logprob"] < -1
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)


def test_a_student_learns_from_a_teacher_alike_in_two_layouts(files, ranks, tmp_path):
    texts = ["--data", files / "texts.jsonl", "--tokenizer", "byte", "--vocab-size", "257"]
    how = "--steps 4 --loss distill --distill-temperature 0.2 --split 50,50 --eval-steps 1"
    how += " --lr 5e-3 --seq-length 16"
    words = [*SIZES, *texts, *how.split(), "--reference", files / "base"]
    words = [*map(str, words), "--warmup-steps", "1", "--layers", "1", "--seed", "5"]
    pretrain.main([*words, "--metrics", str(tmp_path / "whole")])
    layout = [*words, "--tp", "2", "--pp", "1", "--dp", "2", "--metrics", str(tmp_path / "layout")]
    ranks(pretrain.main, 4, layout)
    found = [
        [(line["loss"], line["kl"], line["lm_loss"]) for line in records(path) if "loss" in line]
        for path in (tmp_path / "whole", tmp_path / "layout")
    ]
    assert found[0][-1][1] < 0.5 * found[0][0][1]
    for line, expected in zip(*found, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
        assert line[0] == pytest.approx(line[1])


@pytest.fixture(scope="module")
def top(files):
    """A file of the most likely tokens of a trained teacher, in windows of 16 tokens."""
    texts = files / "uneven.jsonl"
    rows = [{"text": "abcdefghij"[:n] * (n % 4 + 1)} for n in range(2, 11)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data", texts, "--tokenizer", "byte", "--vocab-size", "257"]
    how = "--eval-steps 0 --lr 2e-2 --warmup-steps 1 --seq-length 16 --steps 3 --save"
    pretrain.main([*SIZES, *map(str, data), *how.split(), str(files / "teacher")])
    scored = ["--text", texts, "--logprobs", files / "top.jsonl", "--top-k", 5]
    words = [files / "teacher", *scored, "--seq-length", 16, "--device", "cpu"]
    evaluate.main(list(map(str, words)))
    return files / "top.jsonl"


def from_file(top, *words) -> list[str]:
    data = ["--data", top, "--tokenizer", "byte", "--vocab-size", "257", "--loss", "distill"]
    how = "--split 70,30 --lr 5e-3 --seq-length 16 --warmup-steps 1 --lr-decay-steps 4".split()
    return [*SIZES, *map(str, [*data, *how, *words])]


def test_a_student_learns_from_a_file_alike_in_all_layouts(top, ranks, tmp_path):
    same = ["--load", top.parent / "teacher", "--load-weights-only", "--steps", 1]
    evaluates = ["--eval-steps", 2, "--metrics", tmp_path / "same"]
    pretrain.main(from_file(top, *same, *evaluates))
    step, evaluation = records(tmp_path / "same")[:2]
    assert step["kl"] == pytest.approx(0, abs=1e-5)  # the contexts are those of the teacher
    assert evaluation["eval_lm_loss"] > 1
    student = ["--seed", 5, "--distill-lm-weight", 0.25, "--eval-steps", 0, "--metrics"]
    pretrain.main(from_file(top, "--steps", 4, *student, tmp_path / "whole"))
    keys = ("loss", "kl", "lm_loss", "grad_norm")
    found = [[line[key] for key in keys] for line in records(tmp_path / "whole")]
    assert found[-1][1] < 0.8 * found[0][1]
    for number, words in enumerate(("--tp 2 --pp 2", "--tp 2 --cp 2")):
        metrics = tmp_path / str(number)
        words = [*words.split(), "--steps", 2, *student, metrics]
        ranks(pretrain.main, 4, from_file(top, *words))
        lines = [[line[key] for key in keys] for line in records(metrics)]
        for line, expected in zip(lines, found[:2], strict=True):
            assert line == pytest.approx(expected, rel=1e-4)


def test_what_does_not_fit_a_file_of_a_teacher_is_refused(files, top):
    texts, one = files / "texts.jsonl", files / "one.jsonl"
    one.write_text(json.dumps({"tokens": [1], "top_ids": [[1]], "top_logprobs": [[-1]]}))
    for words, line in {
        "--loss lm": "--loss lm can't be computed from .*: use --loss distill; with --distill-lm-w",
        "--loss dpo --lora-rank 2": "--loss dpo can't be computed from .*top.jsonl, which has a",
        f"--data 0.5 {top} 0.5 {texts}": "--loss distill needs a teacher, and .*texts.jsonl has no",
        f"--reference {files}/base": "--reference cannot be used with .*top.jsonl, which has a",
        f"--data 0.5 {top} 0.5 {one}": r"differ \(.*top.jsonl: 5, .*one.jsonl: 1\): write them",
        "--distill-temperature 2": "temperature 2 must .*: use 1, or pass the teacher with --refer",
    }.items():
        with pytest.raises(UserError, match=line):
            pretrain.main(from_file(top, "--steps", 1, *words.split()))


def of_base(ctx, adapted):
    model = megazoo.from_config("gpt2-tiny", ctx, seed=3)
    ids = torch.arange(20).view(2, 10)
    before = model.token_logprobs(ids)
    if not adapted:
        return before.tolist()
    megazoo.lora.add(model, rank=4, targets=("q", "v", "up", "down"))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.ones_(parameter)
    changed = model.token_logprobs(ids)
    with megazoo.lora.off(model):
        off = model.token_logprobs(ids)
    assert torch.equal(model.token_logprobs(ids), changed)
    assert not torch.allclose(changed, before)
    assert torch.equal(off, before)
    return off.tolist()


def of_layout(layout):
    return of_base(context(**layout), adapted=True)


def test_off_gives_the_base_in_every_layout(ranks):
    expected = of_base(megazoo.ParallelContext(), adapted=True)
    assert expected == of_base(megazoo.ParallelContext(), adapted=False)
    for found in ranks(of_layout, 4, {"tp": 2, "pp": 2}):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    model = megazoo.lora.add(megazoo.from_config("gpt2-tiny"))
    within = pytest.raises(UserError, match="merge can't be called within megazoo")
    with within, megazoo.lora.off(model):
        megazoo.lora.merge(model)
    assert megazoo.lora.has_adapters(model)
    none = megazoo.lora.off(megazoo.from_config("gpt2-tiny"))
    with pytest.raises(UserError, match="the model has no adapters to turn off"), none:
        pass


def test_what_does_not_fit_is_refused(files):
    base = ["--lora-rank", "2", "--steps", "1"]
    for words, line in {
        "": "--loss dpo needs a reference: train adapters",
        "--lora-rank 2 --loss lm --dpo-beta 1": "--dpo-beta cannot be used with --loss lm: remove",
        "--lora-rank 2 --loss lm --precompute-reference": "--precompute-reference cannot be used",
        "--lora-rank 2 --dpo-variant simpo --precompute-reference": "with --loss dpo: remove --pre",
        "--lora-rank 2 --loss dpp": "--loss is 'dpp': use one of lm, dpo",
        f"--reference {files}/base --save {files}/base": "is in the directory of --save",
        "--reference none": "--reference: ",
        "--lora-rank 2 --dpo-variant simpo --reference none": "--reference cannot be used with",
        "--lora-rank 2 --train-only lora|norm": "with --train-only needs a reference: pass",
        "--lora-rank 2 --dpo-beta 0": "DPO needs a beta above 0",
        "--lora-rank 2 --dpo-variant ipo --dpo-label-smoothing 0.1": "ipo has no label_smoothing",
        "--lora-rank 2 --dpo-label-smoothing 0.5": "--dpo-label-smoothing 0.5 must be below 0.5",
    }.items():
        with pytest.raises(UserError, match=line):
            pretrain.prepare(job(files, "--steps", "1", *words.split()))
    for words, line in {
        f"--data {files}/texts.jsonl": "which has no chosen and rejected answers: use a file of",
        "--loss distill --split 75,25": "--loss distill needs a teacher, and .*pairs.jsonl has no",
        "--data mock": "--loss dpo can't be computed from mock, which has no chosen",
        "--loss lm": "pairs.jsonl, line 1: it has preferences: use --loss dpo",
    }.items():
        with pytest.raises(UserError, match=line):
            pretrain.main(job(files, *base, *words.split()))


def test_the_settings_of_the_flags_are_those_of_the_loss(files):
    words = "--lora-rank 2 --steps 1 --dpo-beta 0.3 --dpo-variant ipo".split()
    assert pretrain.prepare(job(files, *words)).loss == DPO(beta=0.3, variant="ipo")
