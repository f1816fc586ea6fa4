"""docs/coming_from.md: what its tables name exists, and is run once, as written where that can be.

Each code span of a table's right column (and of its left, where the right says "the same") is a
claim. Flags must be those of the program that they belong to, and their values must parse; Python
runs on four ranks, tp 2 x pp 2, in a directory that has what it names. A row without code names the
test that shows what it says, in ELSEWHERE.
"""

import inspect
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.distributed.run import get_args_parser
from torch.utils.data import DistributedSampler

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint, load
from megazoo.cli.flags import parse_flags
from megazoo.cli.parsing import CommandLine
from megazoo.models.base import Model
from megazoo.models.gpt2 import GPT2Config
from megazoo.parallel.stages import cut_into_stages
from megazoo.settings import settings_of
from megazoo.trainer.options import Options
from tests.support.scripts import program_of
from tests.support.training import context

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text()

CONFIG = GPT2Config(vocab_size=61, max_positions=64, hidden_size=32, layers=2, heads=4)
PLACES = {"N": "2", "DIR": "dir", "FILE": "file", "CKPT": "ckpt"}

# What else than the span itself is run for it, on the ranks.
RUN_FOR = {
    "GPT2Config(...)": (
        "megazoo.from_config(transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4), ctx)"
    ),
    'save_directory="merged"': (
        'model.save_parallelized(save_directory="merged", merge_checkpoints=True)'
    ),
    'load_directory="ckpt"': 'model.from_parallelized(load_directory="ckpt")',
    "config.json": 'megazoo.from_config("path/to/gpt2/config.json", ctx)',
    "model_tp_0_pp_0.safetensors": 'assert Path("ckpt/model_tp_0_pp_0.safetensors").is_file()',
    '"selective"': 'model.recompute("selective")',
    "Model.tie": 'assert model.tied == {"embedding.weight": (0, 1)}',  # done for the models here
    "DistributedSampler": (
        "assert len(list(DistributedSampler(range(8), ctx.dp_size, ctx.dp_rank))) == 8"
    ),
    "megazoo.checkpoint.save": 'megazoo.checkpoint.save("run", 1, model, optimizer)',
    "load": (
        'megazoo.checkpoint.save("run", 1, model, optimizer); '
        'load(Checkpoint("run"), model, optimizer)'
    ),
    "train_batch": "model.train_batch(ids, labels=ids, num_microbatches=m)",
    'megazoo.lora.save(model, "adapter")': (
        'megazoo.lora.add(model); megazoo.lora.save(model, "adapter"); '
        'assert sorted(os.listdir("adapter")) == '
        '["adapter_config.json", "adapter_model.safetensors"]'
    ),
    'megazoo.lora.load(model, "adapter")': (
        "other = megazoo.lora.add(megazoo.from_config(config, ctx)); "
        'megazoo.lora.save(other, "adapter"); megazoo.lora.load(model, "adapter")'
    ),
    "megazoo.lora.merge(model)": "megazoo.lora.add(model); megazoo.lora.merge(model)",
}
# Where the dots of a span are.
DOTS = {
    "megazoo.from_config(...)": "megazoo.from_config(config, ctx)",
    "model.generate(...)": "model.generate(ids, max_new_tokens=2)",
    "train_batch(..., loss_fn=f)": "model.train_batch(ids, labels=ids, loss_fn=f)",
    "labels=...": "labels=ids",
    "(model, ...)": "(model)",
}
# The tests that show what is not shown here.
ELSEWHERE = {
    '`megazoo.from_pretrained("path/to/model.gguf")`': (
        "test_transformers_reads_what_is_written_and_it_comes_back"
    ),
    "`TensorParallel(model, parallel_context)`": (
        "test_initial_weights_are_the_same_in_every_layout"
    ),
    "`tensor_parallel_size` a power of 2": "test_three_ranks_share_a_model",
    "`gradient_accumulation_steps`": "test_micro_batches_follow",
    "`deepspeed --hostfile hosts train.py`": "test_two_nodes_train_like_one_process",
    "`make_vocab_size_divisible_by`": "test_the_vocabulary_is_never_padded",
    "`--make-vocab-size-divisible-by`": "test_the_vocabulary_is_never_padded",
    "`LazyInitContext`": "test_building_a_rank_takes_the_memory_of_its_shard",
    "`ds_to_universal.py`": "test_resume_in_another_layout",
    "`--num-layers-per-virtual-pipeline-stage`": ("test_layers_of_a_virtual_stage_follow"),
    "`--exit-signal-handler`": "test_a_signal_to_one_rank_saves_and_ends_all",
    '`model.push_to_hub("me/tuned")`': "test_refusals_are_one_line_and_a_token_opens",
    '`tokenizer(texts, padding=True, return_tensors="pt")`': (
        "test_a_call_gives_what_transformers_gives"
    ),
    "`model.compile()`": "test_the_graphs_of_a_pipeline_with_full_recomputation_train_alike",
}


def rows() -> list[tuple[str, str]]:
    """The left and the right cell of each row of the page's tables."""
    lines = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith("| there |")
    ]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


def spans_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def claims() -> list[tuple[str, str]]:
    """(span, the span before it in its cell) of all that the page says is here."""
    found = []
    for there, here in rows():
        cells = [here, there] if here.startswith("the same") else [here]
        for spans in map(spans_of, cells):
            found += zip(spans, ["", *spans], strict=False)
    return list(dict.fromkeys(found))


def kind_of(span: str, before: str) -> str:
    if span in RUN_FOR:
        return "python"
    if span.startswith("--"):
        return "flags"
    if re.match(r"(tools/\w+\.py|torchrun|python)\b", span):
        return "command"
    if re.fullmatch(r"\w+ = \d+", span) or span.endswith(".toml"):
        return "toml"
    if before.startswith("--") and re.fullmatch(r"[\w-]+", span):
        return "value"  # another one of the flag before
    return "python"


def cases(kind: str) -> list[tuple[str, str]]:
    found = [(span, before) for span, before in claims() if kind_of(span, before) == kind]
    assert found, f"no {kind} on the page"
    return found


def words_of(span: str) -> list[str]:
    return [PLACES.get(word, word) for word in span.split() if word != "..."]


def known_flags(kind: type) -> set[str]:
    flags = {"--" + name.replace("_", "-") for name in settings_of(kind)}
    return flags | {"--no-" + flag[2:] for flag in flags}


def check_flags(words: list[str], kind: type) -> None:
    """Each flag is one of a program's; with a value that follows it, it parses. Flags are parsed
    together, in as many command lines as have each flag once."""
    lines, known = [], known_flags(kind)
    for flag, *values in (
        part.split() for part in re.findall(r"--\S+(?: (?!--)\S+)*", " ".join(words))
    ):
        assert flag in known, flag
        if values:
            line = next((line for line in lines if flag not in line), None)
            if line is None:
                lines.append(line := [])
            line += [flag, *values]
    for line in lines:
        parse_flags(kind, line, "")


def test_flags_are_the_training_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("tp = 2\npp = 2\n")
    spans = [words_of(span) for span, _ in cases("flags")]
    check_flags([word for words in spans for word in words], Options)
    stages = [words for words in spans if "--stage-layers" in words]
    assert stages
    for words in stages:
        cut_into_stages(22, 4, stages_of(words))  # 5,6,6,5
    for span, before in cases("value"):  # another one of the flag before
        cut_into_stages(22, 4, stages_of([before.split()[0], span]))


def stages_of(words: list[str]):
    return CommandLine.read(words).options().parallel.layout(1).stage_layers


def test_files_of_settings_are_read(tmp_path):
    for span, _ in cases("toml"):
        (tmp_path / "my.toml").write_text("pp = 2\ntp = 2\n" if span == "my.toml" else span)
        options = CommandLine.read(["--config", str(tmp_path / "my.toml")]).options()
        assert 2 in vars(options.parallel).values(), span


def test_commands_have_their_flags():
    for span, _ in cases("command"):
        program, *words = words_of(span)
        if program.startswith("tools/"):
            assert (ROOT / program).is_file()
            check_flags(words, program_of(program).Options)
        else:  # see test_coming_from_programs.py
            words = words[2:] if words[:1] == ["-m"] else words
            assert get_args_parser().parse_args(words).training_script.endswith(".py"), span


# Python.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with what the page's code names: a model of Hugging Face, a checkpoint, files of
    settings."""
    folder = tmp_path_factory.mktemp("coming-from")
    model = megazoo.from_config(CONFIG)
    model.save_parallelized(folder / "path/to/gpt2", merge_checkpoints=True)
    for name in ("ckpt", "dir"):
        model.save_parallelized(folder / name)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    (folder / "oslo-config.json").write_text(
        json.dumps({"model_parallelism": {"enable": True, **sizes}})
    )
    return folder


def run_span(span: str, folder: Path, ctx: megazoo.ParallelContext) -> None:
    """Run a span's code where ctx, model, optimizer, ids and the like are what readers have."""
    before = os.getcwd()
    os.chdir(folder)
    ids = torch.randint(0, 61, (4, 8), generator=torch.Generator().manual_seed(1))
    names = dict(config=CONFIG, ctx=ctx, m=2)
    names |= dict(ids=ids, mask=torch.ones_like(ids), inputs={"input_ids": ids}, f=own_loss)
    names |= dict(tp=2, pp=2, path="path/to/gpt2", dir="dir", Path=Path, os=os, load=load)
    names |= dict(megazoo=megazoo, transformers=transformers, Model=Model, Checkpoint=Checkpoint)
    names |= {"ParallelContext": megazoo.ParallelContext, "DistributedSampler": DistributedSampler}
    code = RUN_FOR.get(span, span)
    for dots, meant in DOTS.items():
        code = code.replace(dots, meant)
    if re.search(r"\b(model|optimizer)\b", code):
        names["model"] = megazoo.from_config(CONFIG, ctx)
    if "optimizer" in code:
        names["optimizer"] = megazoo.optim.AdamW(names["model"])
    if re.fullmatch(r"\w+=\w+", code):  # an argument
        code = f"ParallelContext.from_torch(2, 2, {code})"
    try:
        exec(code, names)
    finally:
        os.chdir(before)


def own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100
    )


def test_python_runs_as_written(ranks, folder):
    spans = [span for span, _ in cases("python") if f"`{span}`" not in ELSEWHERE]
    names = [span[:-1] for span in spans if span.endswith("=")]  # of arguments
    assert names
    assert set(names) <= inspect.signature(Model.train_batch).parameters.keys()
    ranks(run_spans, 4, [span for span in spans if not span.endswith("=")], folder)


def run_spans(spans: list[str], folder: Path) -> None:
    stages, replicas = context(tp=2, pp=2), context(tp=2, dp=2)
    for span in spans:
        one_stage = ".backward()" in span and "microbatches" not in span
        try:
            run_span(span, folder, replicas if one_stage else stages)
        except Exception as error:
            error.add_note(f"in `{span}`")
            raise


def test_every_row_is_checked():
    """A row has code that the tests above take, or says that there is nothing, or is named in
    ELSEWHERE."""
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    for there, here in rows():
        named = any(there.startswith(start) or start in here for start in ELSEWHERE)
        checked = named or spans_of(here) or re.match(r"none|nothing|the same", here)
        assert checked, f"nothing checks | {there} | {here} |: add its test to ELSEWHERE"
    for test in ELSEWHERE.values():
        assert any(f"def {test}(" in text for text in tests), test


def test_three_ranks_share_a_model(ranks):
    """Not a power of two; of the five heads two ranks have two each."""
    one = losses_of({})
    for losses in ranks(losses_of, 3, dict(tp=3)):
        assert losses == pytest.approx(one, rel=1e-5)


def losses_of(layout: dict) -> list[float]:
    config = GPT2Config(
        vocab_size=61, max_positions=16, hidden_size=40, layers=2, heads=5, ffn_size=96
    )
    ids = torch.arange(32).view(2, 16)
    model = megazoo.from_config(config, context(**layout)).eval()
    return [model(ids, labels=ids).loss.item()]


def test_the_vocabulary_is_never_padded():
    """Of 61 tokens two ranks have 31 and 30, and what is exported has 61."""
    contexts = [megazoo.ParallelContext.virtual(2, rank=rank) for rank in (0, 1)]
    models = [megazoo.models.FAMILIES["gpt2"].on_meta(CONFIG, ctx) for ctx in contexts]
    assert [model.embedding.weight.shape[0] for model in models] == [31, 30]


def test_layers_of_a_virtual_stage_follow():
    """Layers / (pp x virtual-pp): two of eight."""
    ctx = megazoo.ParallelContext.virtual(pp=2, virtual=2)
    stages = megazoo.models.FAMILIES["gpt2"].all_stages(replace(CONFIG, layers=8), ctx)
    assert [len(stage.layers) for stage in stages] == [2, 2, 2, 2]


def test_micro_batches_follow(ranks):
    """16 rows on two replicas, two at a time: four micro-batches."""
    assert ranks(micro_batches_of, 2, ["--global-batch-size", "16", "--micro-batch-size", "2"]) == [
        4,
        4,
    ]


def micro_batches_of(arguments: list[str]) -> int:
    counts, train_batch = [], Model.train_batch

    def counted(self, *args, num_microbatches, **inputs):
        counts.append(num_microbatches)
        return train_batch(self, *args, num_microbatches=num_microbatches, **inputs)

    Model.train_batch = counted
    try:
        small = "--hidden-size 16 --heads 2 --layers 1 --seq-length 16 --device cpu "
        small += "--steps 1 --eval-steps 0"
        pretrain.main([*small.split(), *arguments])
    finally:
        Model.train_batch = train_batch
    return counts[0]
