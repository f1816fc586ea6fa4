"""What a run will need, told without running it: against the models, real runs and arithmetic by
hand."""

import json
import re
import sys
from dataclasses import replace
from functools import partial, update_wrapper
from itertools import product

import pytest
import torch
import torch.distributed as dist

import megazoo
from megazoo.cli.parsing import CommandLine
from megazoo.cli.program import run_program
from megazoo.families.registry import FAMILIES, family_of
from megazoo.models.counts import flops_per_token, parameter_count
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.registry import find_config
from megazoo.parallel import failure
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.schedule import Exchange, one_f_one_b, program
from megazoo.planning import PlannedRun, Planner
from megazoo.planning.ranks import place_in
from megazoo.programs import plan as tool
from tests.support.planning import plan
from tests.support.sampling import marked_slow, sampled
from tests.support.training import (
    PeakMemory,
    context,
    give_back_freed_memory,
    in_fresh_processes,
    make_batch,
    tiny_config,
)

PRESETS = [preset for family in FAMILIES.values() for preset in family.presets]
NO_DROPOUT = dict(embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)


# Learned positions, rotary ones with fewer KV heads, ALiBi, norms around layers and caps, experts
# with and without one that all tokens use, and a parallel block.
KINDS = {f"{name}-tiny" for name in "gpt2 llama mpt gemma2 mixtral qwen2_moe pythia".split()}


@pytest.mark.parametrize("preset", marked_slow(PRESETS, lambda _, preset: preset not in KINDS))
def test_parameters_and_flops_are_those_of_the_built_model(preset):
    """Parameters of each rank; the training program's count of FLOPs, of weights and heads, against
    the meter's, of what runs on meta."""
    config = find_config(preset)
    planner, tp, pp = Planner(config), 2, 2
    run = PlannedRun(global_batch_size=32, micro_batch_size=16, seq_length=128, dtype="bfloat16")
    family = FAMILIES[family_of(config)]
    build = family.build if preset.endswith("tiny") else family.on_meta
    for pp_rank, tp_rank in product(range(pp), range(tp)):
        layout = Layout(tp=tp, pp=pp)
        model = build(config, ParallelContext(layout, pp_rank * tp + tp_rank))
        built = sum(parameter.numel() for parameter in model.parameters())
        planned = planner.static(planner.build(place_in(layout, pp_rank, tp_rank)), run)
        assert planned.parameters == built
        assert planned.weights == 2 * built
        assert planned.optimizer == 12 * built
    told = plan(config, quick=True).model_flops_per_token
    assert flops_per_token(config, 16) == pytest.approx(told, rel=1e-9)


def test_with_uneven_inner_features_the_first_rank_has_the_most_and_all_add_up():
    # 512 + 131 and 640; 384, 384, 259 and 256
    config = replace(find_config("gpt2-tiny"), ffn_size=1283)
    for tp in (2, 4):
        planned = plan(config, layout=dict(tp=tp))
        assert planned.parameters == parameter_count(config)
        assert planned.ranks[0].tp[0] == 0
        assert planned.ranks[0].parameters == max(rank.parameters for rank in planned.ranks)
        whole = plan(config).model_flops_per_token
        assert (
            planned.model_flops_per_token
            == pytest.approx(whole)
            == pytest.approx(flops_per_token(config, 16))
        )


def test_copies_count_once_in_the_whole():
    for name in ("gpt2-tiny", "llama-tiny", "mpt-tiny"):
        config = find_config(name)
        for parallel in ({}, dict(tp=4), dict(tp=2, pp=2, virtual_pp=2)):
            assert plan(config, layout=parallel).parameters == parameter_count(config), name
    # published
    assert plan(GPT2Config(**NO_DROPOUT), layout=dict(tp=2, pp=2)).parameters == 124_439_808


@pytest.mark.parametrize(
    ("layers", "pp", "dp"), [(12, 6, 64), pytest.param(96, 16, 32, marks=pytest.mark.slow)]
)
def test_thousands_of_ranks_are_planned_as_their_few_shapes(layers, pp, dp):
    config, h = replace(find_config("gpt3-175b"), layers=layers), 12288
    how = {"micro_batch_size": 1, "seq_length": 2048, "dtype": "bfloat16"}
    told = plan(config, dict(tp=8, pp=pp, dp=dp), global_batch_size=1536, quick=True, **how)
    by_hand = layers * (12 * h**2 + 13 * h) + (50257 + 2048) * h + 2 * h
    assert told.parameters == by_hand
    assert layers < 96 or by_hand == 174_604_259_328, "as published"
    assert sorted((rank.pp, tp) for rank in told.ranks for tp in rank.tp) == [
        (p, t) for p in range(pp) for t in range(8)
    ]
    # one has a token of the vocabulary more, on the first stage and on the last
    assert len(told.ranks) == pp + 2


def train_twice(config, layout, rows, dtype, recompute, count) -> int:
    """The peak of the memory of two steps of `count` micro-batches, the model's and the optimizer's
    included, bytes."""
    give_back_freed_memory()

    def steps(config, sequence):
        model = megazoo.from_config(config, ctx, dtype=getattr(torch, dtype)).recompute(recompute)
        optimizer = megazoo.optim.AdamW(model)
        ids = torch.randint(
            0,
            config.vocab_size,
            (count * rows, sequence),
            generator=torch.Generator().manual_seed(1),
        )
        for _ in range(2):
            model.train_batch(ids, targets=ids, num_microbatches=count)
            optimizer.step()

    ctx = context(**layout)
    tiny = megazoo.models.find_config(f"{family_of(config)}-tiny")
    steps(tiny, 8)  # what is imported and allocated once
    with PeakMemory() as peak:
        steps(config, config.max_positions)
    return peak.above


SIZES = dict(vocab_size=2000, max_positions=256, hidden_size=256, layers=6, heads=4)
MEASURED = [
    ("gpt2", {**SIZES, **NO_DROPOUT}, {}, 4, "bfloat16", "none", 2),
    ("llama", {**SIZES, "ffn_size": 1024}, {}, 2, "float32", "full", 2),
    ("llama", {**SIZES, "ffn_size": 1024}, {}, 2, "float32", "none", 1),
    ("gpt2", {**SIZES, **NO_DROPOUT}, dict(pp=2), 4, "float32", "none", 2),
    (
        "llama",
        {**SIZES, "layers": 12, "ffn_size": 1024},
        dict(dp=2, zero=3),
        1,
        "float32",
        "full",
        2,
    ),
]


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize(
    ("family", "sizes", "layout", "rows", "dtype", "recompute", "count"),
    sampled(MEASURED, 2, seed=1),
)
def test_memory_is_within_a_tenth_of_what_a_run_takes(
    family, sizes, layout, rows, dtype, recompute, count
):
    config = FAMILIES[family].Config(**sizes)
    dp = layout.get("dp", 1)
    measured = in_fresh_processes(
        train_twice, config, layout, rows, dtype, recompute, count, processes=layout.get("pp", dp)
    )
    measured = measured[: layout.get("pp", 1)]
    batch = {"micro_batch_size": rows, "global_batch_size": count * rows * dp, "seq_length": 256}
    told = plan(config, layout=layout, dtype=dtype, recompute=recompute, **batch)
    for rank, peak in zip(told.ranks, measured, strict=True):
        assert peak > 80e6
        assert rank.total == pytest.approx(peak, rel=0.1), (rank, peak)


def sent_by(layout, config, recompute):
    """Bytes that this rank sends over tp in a step, by wrapping what torch.distributed is asked
    for."""
    ctx, sent = context(**layout), 0.0
    model = megazoo.from_config(config, ctx).recompute(recompute)
    ids, _ = make_batch(0)
    model.train_batch(ids, targets=ids, num_microbatches=4)

    def counted(real, rounds, whole, *args, group=None, **kwargs):
        nonlocal sent
        if group is ctx.tp_group:
            sent += rounds * args[whole].nbytes * (ctx.tp_size - 1) / ctx.tp_size
        return real(*args, group=group, **kwargs)

    from megazoo.parallel import collectives
    from megazoo.parallel.cpu import shared_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "shared_by", lambda group, kind: None)
        patch.setattr(failure, "agree", lambda *_: None)  # 16 bytes, whatever the step
        for place, name, rounds, whole in (
            (dist, "all_reduce", 2, 0),
            (collectives, "_all_gather", 1, 0),
            (collectives, "_reduce_scatter", 1, 1),
        ):
            real = getattr(place, name)
            patch.setattr(place, name, update_wrapper(partial(counted, real, rounds, whole), real))
        model.train_batch(ids, targets=ids, num_microbatches=4)
    return sent


@pytest.mark.parametrize(
    ("sp", "recompute"),
    marked_slow([(False, "none"), (True, "none"), (True, "full")], lambda number, _: number == 1),
)
def test_bytes_over_tp_are_those_of_a_real_run(ranks, sp, recompute):
    config = tiny_config()
    real = ranks(sent_by, 2, dict(tp=2, sp=sp), config, recompute)
    told = plan(config, layout=dict(tp=2, sequence_parallel=sp), recompute=recompute)
    for rank in told.ranks:
        for tp in rank.tp:
            assert rank.sent_tp == real[tp] > 0


def test_bytes_by_hand():
    """Two all-reduces of the activations forward and two backward in a layer, by Megatron-LM; one
    more at each end."""
    config, m, b, s, h, layers = tiny_config(tied=False), 4, 2, 16, 32, 5
    activation = 4 * b * s * h
    told = plan(config, layout=dict(tp=2))
    # the largest logit, then the sums of exponentials and the target's
    losses = 4 * b * s * (1 + 2)
    assert told.ranks[0].sent_tp == m * ((4 * layers + 2) * activation + losses)
    told = plan(config, dict(pp=3, dp=2), global_batch_size=16)
    for rank in told.ranks:
        steps = program(one_f_one_b, rank.pp, 3, 1, m)
        sends = sum(len(step.sends) for step in steps if isinstance(step, Exchange))
        assert rank.sent_pp == sends * activation
        assert rank.sent_dp == rank.gradients  # 2 (n - 1) / n of the buckets, for n = 2
    zero = plan(config, dict(pp=3, dp=2, zero=1), global_batch_size=16, dtype="bfloat16")
    for rank, before in zip(zero.ranks, told.ranks, strict=True):
        # a half of the fp32 gradients and bf16 parameters
        assert rank.sent_dp == before.gradients * (4 + 2) / 8
        assert rank.optimizer == pytest.approx(rank.parameters * 12 / 2, rel=0.1)


def test_flops_by_hand():
    """6 a parameter that is multiplied, and a token; attention's scores and sums 12 x layers x
    length x hidden."""
    config, b, s = GPT2Config(**NO_DROPOUT), 2, 128
    told = plan(config, seq_length=s, micro_batch_size=b)
    multiplied = 12 * config.layers * config.hidden_size**2 + config.vocab_size * config.hidden_size
    by_hand = 6 * multiplied + 12 * config.layers * s * config.hidden_size
    assert told.model_flops_per_token == pytest.approx(by_hand, rel=1e-6)
    assert told.ranks[0].flops == pytest.approx(8 * s * by_hand, rel=1e-6)
    full = plan(config, seq_length=s, micro_batch_size=b, recompute="full")
    assert full.model_flops_per_token == told.model_flops_per_token
    layers = by_hand - 6 * config.vocab_size * config.hidden_size
    assert full.ranks[0].flops == pytest.approx(8 * s * (by_hand + layers / 3), rel=1e-6)
    cut = plan(config, seq_length=s, micro_batch_size=b, layout=dict(tp=2, pp=3, schedule="zb-h1"))
    assert sum(rank.flops * len(rank.tp) for rank in cut.ranks) == pytest.approx(
        8 * s * by_hand, rel=1e-4
    )


def test_logits_in_pieces_take_as_many_flops_and_less_memory(monkeypatch):
    """Of 16,384 tokens and a vocabulary of 50,257 on a device."""
    config = GPT2Config(**NO_DROPOUT, layers=2)
    how = dict(seq_length=1024, micro_batch_size=16, global_batch_size=32, dtype="bfloat16")
    pieces = plan(config, **how)
    monkeypatch.setattr(
        "megazoo.layers.embedding.VocabParallelHead.pieces_save_memory", lambda *_: False
    )
    whole = plan(config, **how)
    assert pieces.model_flops_per_token == pytest.approx(whole.model_flops_per_token)
    logits, gradient = 2 * 16_384 * config.vocab_size, 4 * config.hidden_size * config.vocab_size
    piece = 6 * (1 << 27)  # in fp32 and bfloat16
    saved = whole.ranks[0].activations - pieces.ranks[0].activations
    assert saved == pytest.approx(2 * logits - gradient - piece, rel=0.1)


@pytest.mark.slow
def test_a_few_layers_stand_for_many():
    """What a search does gives what all layers would, or above."""
    for name in ("gpt2", "llama"):
        config = find_config(name)
        config = type(config)(**{**vars(config), "layers": 8})
        for how in (
            dict(recompute="none"),
            dict(recompute="full", recompute_interval=3),
            dict(recompute="selective"),
        ):
            for parallel in (
                dict(pp=2),
                dict(pp=2, schedule="zb-h1"),
                dict(tp=2, sequence_parallel=True),
            ):
                exact, quick = (
                    plan(config, layout=parallel, seq_length=64, quick=q, **how)
                    for q in (False, True)
                )
                for a, b in zip(exact.ranks, quick.ranks, strict=True):
                    assert (a.flops, a.sent_tp) == pytest.approx((b.flops, b.sent_tp))
                    assert 0.999 * a.total <= b.total <= 1.05 * a.total, (name, how, parallel)


def test_bubbles():
    told = plan(tiny_config(), layout=dict(pp=4))
    assert told.bubble == pytest.approx(3 / 4)
    assert told.bubble_of_stages > told.bubble  # 5 layers on 4 stages
    assert [rank.in_flight for rank in told.ranks] == [4, 3, 2, 1]
    held = [rank.activations for rank in told.ranks]
    assert held[1] > held[2]
    assert plan(tiny_config(), layout=dict(pp=4, schedule="zb-h1")).bubble == pytest.approx(1 / 4)


def test_an_offloaded_optimizer_is_not_on_the_device():
    there = plan(tiny_config(), layout=dict(offload_optimizer=True), dtype="bfloat16").ranks[0]
    here = plan(tiny_config(), dtype="bfloat16").ranks[0]
    assert (there.optimizer, there.optimizer_host) == (0, here.optimizer)
    assert here.optimizer == 12 * here.parameters
    assert here.total - there.total == here.optimizer


def test_a_virtual_context_still_runs_nothing():
    with ParallelContext.virtual(tp=2) as ctx:
        model = megazoo.from_config("gpt2-tiny", ctx)
        with pytest.raises(megazoo.UserError, match="no other ranks"):
            model.train_batch(
                torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)
            )
        with pytest.raises(megazoo.UserError, match="no other ranks"):
            model.embedding(torch.zeros(1, 4, dtype=torch.int64))


def test_the_table_and_the_json_say_the_same(tmp_path, capsys):
    arguments = "--preset gpt2-124m --tp 2 --pp 2 --dp 2 --seq-length 64 --json".split()
    tool.main([*arguments, str(tmp_path / "plan.json")])
    told = json.loads((tmp_path / "plan.json").read_text())
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    rows = [row for row in rows if len(row) == 15 and row[0].isdigit()]
    assert len(rows) == len(told["ranks"]) >= 2
    for row, rank in zip(rows, told["ranks"], strict=True):
        assert row[3] == f"{rank['parameters']:,}"
        assert row[9] == f"{rank['total'] / 1e6:.4g}MB" or row[9] == f"{rank['total'] / 1e9:.4g}GB"
        sizes = ("weights", "gradients", "optimizer", "activations")
        assert rank["total"] == sum(rank[name] for name in sizes)
        assert row[11] == f"{rank['flops']:.4g}"
    assert f"{told['parameters']:,} parameters" in printed


def test_search_lists_what_fits_fastest_first(capsys):
    batch = "--global-batch-size 4 --seq-length 1024"
    tool.main(f"--preset gpt2-124m --search --gpus 4 --memory 1.5GB --json - {batch}".split())
    told = json.loads(capsys.readouterr().out)
    assert told
    assert [each["time"] for each in told] == sorted(each["time"] for each in told)
    for each in told:
        assert each["tp"] * each["pp"] * each["dp"] == 4
        assert each["total"] <= 1.5e9
        rate = 4 * 1024 / each["time"] / 4
        assert each["tokens_per_second_per_gpu"] == pytest.approx(rate)
        flops = rate * flops_per_token(find_config("gpt2-124m"), 1024)
        assert each["mfu"] == pytest.approx(flops / 989e12)
    best = told[0]
    names = ("tp", "pp", "dp", "virtual_pp", "sequence_parallel", "zero")
    layout = {name: best[name] for name in names}
    batch = {"micro_batch_size": 1, "global_batch_size": 4, "seq_length": 1024, "dtype": "bfloat16"}
    exact = plan(find_config("gpt2-124m"), layout, recompute=best["recompute"], **batch)
    assert 0.999 <= best["total"] / max(rank.total for rank in exact.ranks) < 1.1
    assert best["bubble"] == pytest.approx(exact.bubble_of_stages, rel=1e-3, abs=1e-9)


def test_a_search_shows_its_progress_and_the_command_of_the_fastest_layout(
    capsys, monkeypatch, tmp_path
):
    """The command has the words of the user, except those of plan and those that the layout
    replaces."""
    monkeypatch.setattr(sys, "argv", ["tools/plan.py"])
    monkeypatch.setattr(tool, "PROGRESS_SECONDS", 0)
    settings = tmp_path / "run.toml"
    settings.write_text('recompute = "full"\nsequence_parallel = true\n')
    words = "--preset gpt2-tiny --gpus=4 --memory 8MB --tp 4 --lr 1e-4 --search --gpu a100"
    tool.main([*words.split(), "--json", str(tmp_path / "found"), "--config", str(settings)])
    best, done = json.loads((tmp_path / "found").read_text())[0], capsys.readouterr()
    command = done.out.splitlines()[-1].partition("pretrain_gpt.py ")
    assert command[0] == "start it with: torchrun --nproc-per-node 4 "
    given = command[2].split()
    assert given[:6] == ["--preset", "gpt2-tiny", "--lr", "1e-4", "--config", str(settings)]
    values = CommandLine.read(given).options().values
    assert values["global_batch_size"] == 32
    assert values["micro_batch_size"] == 8  # of 4 replicas
    selected = {name: values[name] for name in tool.SELECTED if name != "dp"}
    assert selected == {name: best[name] for name in selected}
    lines = [re.fullmatch(r"search: (\d+)% of 8, .*", line) for line in done.err.splitlines()]
    shares = [int(line[1]) for line in lines if line]
    assert len(shares) == len(lines) > 2
    assert shares == sorted(shares)
    assert shares[-1] <= 100


def test_the_command_for_several_nodes_is_that_of_each_node(capsys):
    tool.main("--preset gpt2-tiny --search --gpus 9 --global-batch-size 9".split())
    last = capsys.readouterr().out.splitlines()[-1]
    start = "on each of 3 nodes: torchrun --nproc-per-node 3 --nnodes 3 --rdzv-backend c10d "
    assert last.startswith(start + "--rdzv-endpoint NODE:29400 ")


def test_mistakes_are_told_in_one_line(capsys, monkeypatch):
    for arguments, message in {
        "--tp 3": "heads 4 can't be sharded over tp 3: use tp 1, 2 or 4, or use --pp 3",
        "--dp 0": "--dp 0 must be at least 1",
        "--tp 100000": "--tp 100000 must be at most 65,536",
        "--recompute-interval 0": "--recompute-interval 0 must be at least 1",
        "--global-batch-size 3 --micro-batch-size 1 --dp 2": "global-batch-size 3 is not a "
        "multiple of micro-batch-size 1 x dp 2 = 2: use 2 or 4",
        "--optimizer muon --offload-optimizer": "--offload-optimizer cannot be used with "
        "--optimizer muon, because it offloads only AdamW's state: remove one of them",
        "--pp 9": "layers 4 are too few for pp 9 stages: use pp of at most 4",
        "--search --memory 80X": "'80X' is not a size such as 5GB or 200MB",
        "--search --memory 1KB": "no layout of 8 GPUs fits into 1KB",
        "--search --plot a.svg": "--plot draws a single layout: remove --plot or --search",
        "--plot a.pdf": "--plot a.pdf must end in .png or .svg",
        "--search --gpus 0": "--gpus 0 must be at least 1",
        "--serach": "unknown flag --serach; did you mean --search? (--help lists all)",
        "--seq-length 257": "seq-length 257 exceeds the model's max-positions 256: use "
        "a smaller --seq-length, or a larger --max-positions",
        "--model mixtral --router-balance batch --micro-batch-size 1 --global-batch-size 4": "the "
        "auxiliary loss router_balance is over the whole batch, so all 4 forwards must precede the "
        "first backward: use schedule gpipe, or one micro-batch",
        "--json /none/there.json": "--json /none/there.json: No such file or directory",
    }.items():
        monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            run_program(tool.main)
        assert stop.value.code in (1, 2)
        assert capsys.readouterr().err == f"plan.py: error: {message}\n"
