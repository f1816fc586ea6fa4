"""What adapters take: the plan's bytes are those that a run has, its FLOPs those that torch counts,
and both are in proportion to what is trained."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import megazoo
from megazoo import pretrain
from megazoo.formats.source import SavedModel
from megazoo.lora import LoRASettings
from megazoo.models.counts import flops_per_token, parameter_count
from megazoo.models.llama import LlamaConfig
from megazoo.models.registry import find_config
from megazoo.planning import PlannedRun, Planner, find_layouts
from megazoo.programs import plan as tool
from tests.support.planning import plan
from tests.support.pretraining import SMALL
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    PeakMemory,
    context,
    give_back_freed_memory,
    in_fresh_processes,
    layout_name,
    make_batch,
    replica_rows,
    run_in_layout,
    tiny_config,
)

ALL = LoRASettings(rank=3, targets=("all-linear",))
GPT2 = tiny_config(tied=False)


def test_llama_7b_at_rank_8_trains_4_194_304_parameters():
    """Of each of 32 layers' q and v, [4096, 4096]: A and B of 8 x 4096, by hand."""
    config, lora = find_config("llama-7b"), LoRASettings(rank=8, targets=("q", "v"))
    count = 32 * 2 * 2 * 8 * 4096
    assert count == 4_194_304 == parameter_count(config, attached=lora)
    for layout in ({}, dict(tp=2, pp=2, sp=True)):
        told = plan(config, layout, lora=lora, quick=True, dtype="bfloat16", seq_length=64)
        assert told.trainable_parameters == count
        assert told.parameters == 6_738_415_616 + count  # published, and the adapters
        for rank in told.ranks:
            assert rank.weights == 2 * rank.parameters
            assert rank.gradients == 4 * rank.trainable_parameters
            assert rank.optimizer == 12 * rank.trainable_parameters
    # of each tp rank: A whole, and half of B; half of the layers
    assert [rank.trainable_parameters for rank in told.ranks] == [16 * 2 * 8 * (4096 + 2048)] * 2


def bytes_of_a_run(config, layout, lora, train_only, **how):
    """Of this rank after a step: parameters, and bytes of weights, gradients and optimizer's
    state."""
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, dtype=torch.bfloat16)
    if lora:
        megazoo.lora.add_by(model, lora)
    if train_only:
        model.train_only(train_only)
    optimizer = megazoo.optim.AdamW(model, **how)
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets, num_microbatches=2)
    optimizer.step()
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}
    states = (t.nbytes for state in optimizer.state.values() for t in state.values())
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": trained,
        "weights": weights,
        "gradients": sum(storages.values()),
        "optimizer": sum(states),
    }


BYTES = [
    ("llama", dict(tp=2), ALL, None, {}),
    ("llama", dict(tp=2, sp=True), LoRASettings(rank=4), None, {}),
    ("gpt2", dict(pp=2), ALL, None, {}),
    ("mpt", dict(dp=2), ALL, None, dict(zero=1)),
    ("gpt2", dict(pp=2), None, r"layers\.4", {}),
    ("gpt2", dict(pp=2), ALL, r"layers\.4.*lora", {}),
    ("llama", dict(tp=2, pp=2), ALL, None, {}),
    ("gpt2", dict(pp=2, dp=2), ALL, None, dict(zero=1)),
]


@pytest.mark.parametrize(
    ("name", "layout", "lora", "train_only", "how"),
    marked_slow(BYTES, lambda number, _: number not in (0, 3, 5)),
)
def test_gradients_and_states_have_the_bytes_of_the_plan(
    ranks, name, layout, lora, train_only, how
):
    found = run_in_layout(ranks, bytes_of_a_run_in, layout, MODELS[name], lora, train_only, **how)
    options = layout | how
    told = plan(MODELS[name], options, lora=lora, dtype="bfloat16", train_only=train_only)
    places = {(rank.pp, tp): rank for rank in told.ranks for tp in rank.tp}
    for (pp, tp, dp), of_run in found:
        of_plan = {key: getattr(places[pp, tp], key) for key in of_run}
        if "zero" in how and dp:  # the plan is of the first replica, whose share is the largest
            of_plan["optimizer"] = 12 * of_run["trainable_parameters"] - of_plan["optimizer"]
        assert of_run == of_plan
    assert any(of_run["gradients"] for _, of_run in found)


def bytes_of_a_run_in(config, lora, train_only, layout, **how):
    """The same, with the rank's place: (pp, tp, dp)."""
    of_run = bytes_of_a_run(config, layout, lora, train_only, **how)
    ctx = context(**layout)
    return (ctx.pp_rank, ctx.tp_rank, ctx.dp_rank), of_run


LARGER = LlamaConfig(
    vocab_size=500, max_positions=64, hidden_size=512, layers=6, heads=4, ffn_size=1536
)


def memory_above_the_weights(lora) -> int:
    """The peak of the memory of two steps in fp32, bytes, above that of the model without
    adapters."""
    give_back_freed_memory()
    torch.set_num_threads(1)

    def steps(config, sequence):
        model = megazoo.from_config(config)
        ids = torch.zeros(4, sequence, dtype=torch.int64)
        with PeakMemory() as peak:
            if lora:
                megazoo.lora.add_by(model, lora)
            optimizer = megazoo.optim.AdamW(model)
            for _ in range(2):
                model.train_batch(ids, targets=ids, num_microbatches=2)
                optimizer.step()
        return peak.above

    steps(replace(LARGER, hidden_size=64, layers=2, ffn_size=64), 8)  # what is allocated once
    return steps(LARGER, 64)


@pytest.mark.slow  # of three processes; sizes are compared with a run's in the test above
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_memory_above_the_weights_is_in_proportion_to_what_is_trained():
    settings = {"full": None} | {
        rank: LoRASettings(rank=rank, targets=("q", "v")) for rank in (8, 512)
    }
    measured, told = {}, {}
    for name, lora in settings.items():
        (measured[name],) = in_fresh_processes(memory_above_the_weights, lora)
        (rank,) = plan(LARGER, lora=lora, seq_length=64, global_batch_size=4).ranks
        trained, frozen = rank.trainable_parameters, rank.parameters
        assert rank.gradients + rank.optimizer == 12 * trained
        adapters = 4 * (frozen - parameter_count(LARGER))
        told[name] = rank.total - rank.weights + adapters
    assert told["full"] > 200e6
    assert measured["full"] == pytest.approx(told["full"], rel=0.1)
    assert measured[512] == pytest.approx(told[512], rel=0.15)
    assert measured[8] < measured["full"] / 8
    counts = {rank: parameter_count(LARGER, attached=settings[rank]) for rank in (8, 512)}
    more = counts[512] - counts[8]
    # weight, gradient and two moments
    assert measured[512] - measured[8] == pytest.approx(16 * more, rel=0.2)


PATTERNS = [
    None,
    "embedding",
    "head|^norm",
    r"layers\.4\.",
    r"layers\.2\.mlp",
    r"layers\.2\.(attention|mixer)\.output",
    r"layers\.[12]\..*norm.*weight",
]
ADAPTERS = [
    (None, LoRASettings(rank=4)),
    (None, ALL),
    (None, LoRASettings(rank=4, targets=("down",))),
    (r"layers\.3.*lora", ALL),
    (r"mlp.*lora|head", ALL),
    (r"lora\.\w+\.B", ALL),
]
CASES = [
    (name, *case)
    for name in ("llama", "gpt2", "mpt")
    for case in [(pattern, None) for pattern in PATTERNS] + ADAPTERS
]


def name_of(part) -> str:
    if isinstance(part, LoRASettings):
        return f"{part.rank} on {','.join(part.targets)}"
    return layout_name(part) if isinstance(part, dict) else str(part)


@pytest.mark.parametrize(
    ("name", "train_only", "lora"),
    marked_slow(  # some patterns and adapters of one model, in turn
        CASES,
        lambda number, _: number % 13 % 3 != number // 13 or number % 4,
        name=lambda case: "-".join(map(name_of, case)),
    ),
)
def test_flops_are_those_that_torch_counts(name, train_only, lora):
    """Of a real forward and backward, with attention as plain products; and of the plan, cut in any
    way."""
    config = GPT2 if name == "gpt2" else replace(MODELS[name], tie_embeddings=False)
    model = megazoo.from_config(config)
    if lora:
        megazoo.lora.add_by(model, lora)
    if train_only:
        model.train_only(train_only)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.train_batch(ids, targets=ids)
    assert flops_per_token(config, 16, train_only, lora) == counter.get_total_flops() / 32
    for layout in ({}, dict(tp=2, pp=2, sp=True)):
        told = plan(config, layout, lora=lora, train_only=train_only)
        assert told.model_flops_per_token == counter.get_total_flops() / 32
    assert told.trainable_parameters == parameter_count(config, train_only, lora)


def test_frozen_weights_have_no_gradient_to_compute():
    """By hand: 4 FLOPs a frozen weight, where anything before it is trained, and 2 where nothing
    is; attention's 12 x features, and 4."""
    config, count = GPT2, 4
    lora = LoRASettings(rank=count, targets=("qkv",))
    h, s, layers, vocab = config.hidden_size, 16, config.layers, config.vocab_size
    a, b = count * h, count * 3 * h
    frozen = layers * 12 * h * h + vocab * h
    first = 2 * (3 * h * h + a)  # whose input has no gradient
    by_hand = 4 * frozen + 6 * layers * (a + b) - first + 12 * layers * s * h
    assert flops_per_token(config, s, attached=lora) == by_hand
    last = 2 * frozen + 4 * layers * s * h  # forward
    last += 2 * 4 * h * h + 2 * (
        4 * h * h + vocab * h
    )  # up's own; then down's and the head's inputs
    assert flops_per_token(config, s, r"layers\.4\.mlp\.up") == last


def test_the_mfu_of_a_run_counts_what_is_trained(tmp_path):
    pattern, metrics = r"layers\.1\.mlp", tmp_path / "metrics.jsonl"
    arguments = ["--metrics", metrics, "--save", tmp_path / "run", "--peak-tflops", "0.5"]
    arguments += ["--steps", "2", "--eval-steps", "0", "--train-only", pattern]
    pretrain.main([*SMALL, *map(str, arguments)])
    record = json.loads(metrics.read_text().splitlines()[0])
    counted = record["mfu"] * 0.5e12 / record["tokens_per_second"]
    config = SavedModel(tmp_path / "run").config
    assert counted == pytest.approx(flops_per_token(config, 32, pattern))
    assert counted < flops_per_token(config, 32) / 1.5


def test_a_stage_before_the_first_trained_one_computes_forwards_alone():
    pattern = r"layers\.[34]\.|^norm"
    frozen = plan(GPT2, dict(pp=3), train_only=pattern)
    full = plan(GPT2, dict(pp=3))
    learns = [rank.trainable_parameters > 0 for rank in frozen.ranks]
    assert learns == [False, True, True]
    for some, every in zip(frozen.ranks, full.ranks, strict=True):
        assert some.sent_pp == every.sent_pp  # zeros, so that every receive is answered
    assert frozen.ranks[0].flops == pytest.approx(full.ranks[0].flops / 3)
    assert frozen.ranks[0].gradients == frozen.ranks[0].optimizer == 0
    assert frozen.ranks[0].activations < full.ranks[0].activations / 4
    assert frozen.ranks[2].flops > full.ranks[2].flops / 2


def test_stages_of_the_same_shapes_are_told_apart_by_what_they_train():
    """Of a layer each: what comes before the one that is trained, that one, and the next."""
    _, before, trained, after, _ = plan(GPT2, dict(pp=5), train_only=r"layers\.2\.").ranks
    assert before.trainable_parameters == after.trainable_parameters == 0
    assert trained.trainable_parameters > 12 * GPT2.hidden_size**2
    weights, scores = 2 * 12 * GPT2.hidden_size**2, 4 * 16 * GPT2.hidden_size  # of a token, forward
    assert before.flops == 8 * 16 * (weights + scores)
    assert trained.flops == 8 * 16 * 3 * (weights + scores)
    assert after.flops == 8 * 16 * (2 * weights + 3 * scores)


@pytest.mark.slow
def test_a_search_tells_the_stages_apart_that_train():
    config, pattern = replace(find_config("llama-tiny"), layers=8), r"layers\.4\.attention_norm"
    run = PlannedRun(
        micro_batch_size=1, global_batch_size=8, seq_length=16, train_only=pattern, dtype="bfloat16"
    )
    found = list(find_layouts(Planner(config, True), 4, 1_200_000, run))
    assert max(each.layout.pp for each in found) == 4
    for each in found:
        told = Planner(config).plan(each.layout, run)
        most = max(rank.total for rank in told.ranks)
        assert 0.999 * most <= each.total <= 1.05 * most
        assert each.step_flops == pytest.approx(told.step_flops)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, ALL])
def test_a_search_tells_what_a_plan_tells(lora):
    """Of a few layers, too, where only some are trained."""
    config = replace(find_config("llama-tiny"), layers=8)
    for pattern in (None, r"layers\.[67]\."):
        for layout in (dict(pp=2), dict(tp=2, sp=True), dict(pp=4)):
            exact, quick = (
                plan(config, layout, lora=lora, quick=quick, train_only=pattern)
                for quick in (False, True)
            )
            assert exact.model_flops_per_token == pytest.approx(quick.model_flops_per_token)
            for a, b in zip(exact.ranks, quick.ranks, strict=True):
                assert (a.flops, a.sent_tp) == pytest.approx((b.flops, b.sent_tp))
                assert 0.999 * a.total <= b.total <= 1.05 * a.total


def test_the_tool_tells_it_in_its_table_and_as_json(tmp_path, capsys):
    arguments = "--preset llama-tiny --lora-rank 4 --lora-targets q_proj,v_proj".split()
    file = tmp_path / "plan.json"
    tool.main([*arguments, *"--tp 2 --pp 2 --json".split(), str(file)])
    first, *lines = capsys.readouterr().out.splitlines()
    told = json.loads(file.read_text())
    count = parameter_count(find_config("llama-tiny"), attached=LoRASettings(rank=4))
    assert f"parameters + {count:,} of adapters, {count:,} of them trained, on" in first
    assert told["trainable_parameters"] == count
    names, *rows = [re.split(" {2,}", line.strip()) for line in lines[3:-1]]
    column = names.index("trainable")
    assert [row[column] for row in rows] == [
        f"{rank['trainable_parameters']:,}" for rank in told["ranks"]
    ]
    arguments += "--micro-batch-size 1 --seq-length 256".split()
    tool.main([*arguments, *"--search --gpus 2 --memory 6MB --json -".split()])
    found = json.loads(capsys.readouterr().out)
    assert found
    with pytest.raises(megazoo.UserError, match="no layout of 2 GPUs fits into 6MB"):
        tool.main([*arguments[:2], *arguments[-4:], *"--search --gpus 2 --memory 6MB".split()])


REFUSED = {
    "--lora-rank 4 --lora-targets qq": "the target 'qq' is not a linear layer of the model",
    "--lora-targets q": "--lora-targets needs adapters: use --lora-rank R",
    "--train-only nothing": "the pattern 'nothing' matches no parameter; there are",
    "--num-labels 2": "planning a classifier is not supported: plan the",
}


def test_what_cannot_be_planned_is_refused():
    for arguments, message in REFUSED.items():
        with pytest.raises(megazoo.UserError, match=message):
            tool.main(arguments.split())
