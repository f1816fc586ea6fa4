"""ZeRO and the offloaded optimizer: the same parameters and checkpoints, a share of the state."""

import copy
import gc
import itertools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.evaluation.scoring import score
from megazoo.layers.linear import round_to_int8
from megazoo.models.llama import LlamaConfig
from megazoo.optim.adamw import AdamW
from megazoo.parallel.buckets import ALIGNMENT, GradientBuckets
from megazoo.parallel.storage import KEPT, in_memory, storage_of
from megazoo.planning import PlannedRun, Planner
from megazoo.testing import Layout
from tests.support.layouts import in_layout
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    PeakMemory,
    context,
    give_back_freed_memory,
    in_fresh_processes,
    make_batch,
    randomize,
    replica_rows,
    tiny_config,
)

DP = ["dp2", "dp4", "tp2dp2", "pp2dp2", "tp2dp2+sp", "cp2", "cp2dp2", "cp2+ulysses"]
CONFIGS = {
    "gpt2": tiny_config(layers=3),
    "llama": replace(MODELS["llama"], layers=3),
    "llama, one KV head": replace(MODELS["llama, one KV head"], layers=2),
}


def parts(model):
    """This rank's parameters by name, copied."""
    entries = in_memory(model, model.entries())
    return {entry.name: entry.parameter.detach().clone() for entry in entries}


def trained(config, layout, dtype=torch.float32, steps=5, small_buckets=True, count=2, **settings):
    """Train some steps; returns parameters, gradient norms and elements of state on this rank."""
    zero = settings.get("zero", 0)
    ctx = context(**{**layout, "zero": zero if zero == 3 else 0})
    model = randomize(megazoo.from_config(config, ctx, dtype=dtype, seed=3))
    if small_buckets and not storage_of(
        model
    ):  # several of them, so that parameters begin and end within shards
        entries = list(model.entries())
        late = {
            e.parameter for e in entries if len(e.pp_ranks) > 1 or e.spec.has_partial_gradient(ctx)
        }
        model.engine.gradients.made = GradientBuckets(
            [e.parameter for e in entries], ctx, 3000, late
        )
    optimizer, norms = AdamW(model, lr=1e-2, **settings), []
    for step in range(steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        model.train_batch(ids, targets=targets, num_microbatches=count, step=step)
        norms.append(optimizer.step().item())
    state = sum(tensor.numel() for states in optimizer.state.values() for tensor in states.values())
    return parts(model), norms, state


def trained_both_ways(config, clip, layout, stages, count):
    """With the stages of ZeRO."""
    how = {"steps": 2, "clip_grad": clip, "eps": 1e-4, "count": count}
    return [trained(config, layout, zero=zero, **how) for zero in stages]


FAST = [("gpt2", "dp2", 0.0), ("llama", "tp2dp2+sp", 0.0), ("llama, one KV head", "dp4", 0.2),
        ("gpt2", "pp2dp2", 0.2), ("llama", "cp2", 0.0)]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout", "clip"),
    marked_slow(
        list(itertools.product(CONFIGS, DP, (0.0, 0.2))),
        lambda _, case: case not in FAST,
        name=lambda case: "-".join(map(str, case)),
    ),
)
def test_every_stage_gives_the_parameters_of_zero_0(ranks, model, layout, clip):
    """Bit for bit with two replicas where nothing is clipped, because the norm's sum has another
    order; from ZeRO-2 on with one micro-batch, because the sum of several has another order."""
    place = Layout.named(layout)
    for stages, count in [((0, 1, 2, 3), 2), ((0, 2, 3), 1)]:
        for (expected, norms, whole), *others in in_layout(
            ranks, trained_both_ways, layout, CONFIGS[model], clip, stages=stages, count=count
        ):
            assert all(norm > 0.2 for norm in norms)
            for zero, (ours, our_norms, share) in zip(stages[1:], others, strict=True):
                assert our_norms == pytest.approx(norms, rel=1e-5)
                for name, parameter in ours.items():
                    if clip or place.dp * place.cp > 2 or (zero >= 2 == count):
                        torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=1e-6)
                    else:
                        assert torch.equal(parameter, expected[name]), name
                # these buckets are small, and cut at whole vectors
                assert abs(share - whole / (place.dp * place.cp)) < 0.1 * whole


def gradients_after(layout, gather, count):
    """The elements of gradients that this rank has during the batch at most, and after it."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(tiny_config(layers=6, vocab_size=8), ctx, seed=3))
    parameters = [entry.parameter for entry in model.entries()]
    buckets = model.engine.gradients.made = GradientBuckets(parameters, ctx, 3000)
    AdamW(model, zero=2, zero_gather=gather)
    most = []

    def whole(*_):
        of_buckets = sum(len(bucket) for _, bucket, _ in buckets.leaving)
        return of_buckets + sum(p.grad.numel() for p in parameters if p.grad is not None)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: most.append(whole()))
    ids, targets = (replica_rows(tensor, ctx) % 8 for tensor in make_batch(0))
    model.train_batch(ids, targets=targets, num_microbatches=count)
    shards = sum(map(len, buckets.shards.values()))
    return max(most), whole(), shards, sum(buckets.sizes)


@pytest.mark.parametrize(("gather", "count"), [("microbatch", 2), ("step", 2), ("step", 1)])
def test_zero_2_keeps_only_shards_of_gradients(ranks, gather, count):
    for most, after, shards, size in ranks(gradients_after, 2, dict(dp=2), gather, count):
        assert (after, shards) == (0, size // 2)
        # Those of the first backward stay until the second one, if they are reduced once per step.
        assert (most > 0.9 * size) == (gather == "step" and count == 2), most / size
        assert most > 0.9 * size or most < 0.5 * size, most / size


def test_each_replica_has_its_share_of_the_state(ranks):
    config = tiny_config()
    *_, whole = trained(config, {}, steps=1)
    for dp in (2, 4):
        shares = [
            share
            for *_, share in ranks(
                trained, dp, config, dict(dp=dp), steps=1, small_buckets=False, zero=1
            )
        ]
        assert sum(shares) == whole
        assert max(shares) < 1.01 * whole / dp


def run_of(config, layout, steps, path=None, start=None, dtype=torch.float32, **settings):
    """Losses of a run that may begin with a checkpoint and end with one."""
    ctx = context(**{**layout, "zero": 3 if settings.get("zero") == 3 else 0})
    model = randomize(megazoo.from_config(config, ctx, dtype=dtype, seed=3))
    optimizer, losses, first = AdamW(model, lr=1e-2, **settings), [], 0
    if start:
        first = load(Checkpoint(start), model, optimizer)["step"]
    for step in range(first, steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        losses.append(model.train_batch(ids, targets=targets, num_microbatches=2, step=step).item())
        losses.append(optimizer.step().item())
    if path:
        save(path, steps, model, optimizer)
    return losses


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_checkpoints_know_nothing_of_zero(ranks, tmp_path, dtype):
    """What tp 2 and dp 2 save under ZeRO-1 is to the bit what they save without, and resumes in any
    layout."""
    config, layout = CONFIGS["llama, one KV head"], "tp2dp2"
    how = {"clip_grad": 0, "dtype": dtype}
    for zero in (0, 1, 3):
        path = tmp_path / str(zero)
        in_layout(ranks, run_of, layout, config, steps=2, path=path, zero=zero, **how)
    ours, theirs = (Checkpoint(tmp_path / str(zero)) for zero in (1, 0))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for file in theirs.file_sizes():
        if file.endswith("safetensors"):
            assert (ours.path / file).read_bytes() == (theirs.path / file).read_bytes(), file
    straight = in_layout(ranks, run_of, layout, config, steps=4, zero=1, **how)[0][4:]
    for later, settings in [
        ("dp4", {"zero": 2}),
        ("dp4", {"zero": 3}),
        ("tp2pp2", {"start": tmp_path / "3"}),
        (layout, {"zero": 3, "start": tmp_path / "3"}),
        ("tp2pp2", {}),
        ("tp1", {"offload": True}),
        (layout, {"zero": 1}),
    ]:
        settings = {"start": tmp_path / "1", **how, **settings}
        losses = in_layout(ranks, run_of, later, config, steps=4, **settings)[0]
        assert losses == pytest.approx(straight, rel=1e-5 if dtype == torch.float32 else 2e-2)


OFFLOADED = list(itertools.product(["pp2dp2", "dp2", "tp1"], [torch.bfloat16, torch.float32]))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    marked_slow(OFFLOADED, lambda number, _: number not in (0, 3, 5)),
)
def test_an_offloaded_optimizer_gives_the_same_parameters(ranks, layout, dtype):
    """With bfloat16 and a pipeline together, too; there the state is masters and moments either
    way."""
    config = CONFIGS["gpt2"]
    for zero in (0, 1, 3):
        results = [
            in_layout(ranks, trained, layout, config, steps=2, dtype=dtype, zero=zero, offload=how)
            for how in (False, True)
        ]
        for (expected, norms, _), (ours, our_norms, _) in zip(*results, strict=True):
            assert our_norms == norms
            assert all(torch.equal(ours[name], expected[name]) for name in expected)


def bytes_of(model) -> int:
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def memory_of(layout, recompute):
    """The bytes of all parameters, of the largest that are together in memory, and at rest."""
    whole = bytes_of(megazoo.from_config(tiny_config(layers=8), context(**layout), seed=3))
    ctx, most = context(**layout, zero=3), []
    model = randomize(megazoo.from_config(tiny_config(layers=8), ctx, seed=3)).recompute(recompute)
    optimizer = AdamW(model)
    for module in (*model.layers.values(), model.embedding, model.norm):
        module.register_forward_hook(lambda *_: most.append(bytes_of(model)))
        module.register_full_backward_hook(lambda *_: most.append(bytes_of(model)))
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets, num_microbatches=2)
    rest = bytes_of(model)
    optimizer.step()
    units = sorted(sum(f.size for f in flats) * 4 for flats in storage_of(model).flats.values())
    own = sum(flat.own.nbytes for flat in storage_of(model).every_flat())
    return whole, max(most), sum(units[-KEPT:]), max(rest, bytes_of(model)), own


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_3_keeps_two_units_of_parameters(ranks, recompute):
    for whole, most, two, rest, own in ranks(memory_of, 2, dict(dp=2), recompute):
        assert most <= two + 100 < whole
        assert rest < 100  # a NaN
        assert own < 0.6 * whole


def gathers(layout, recompute):
    """Of a later batch: each start of a gather, each wait for one, and each use, with the unit."""
    ctx = context(**layout, zero=3)
    model = randomize(megazoo.from_config(CONFIGS["llama"], ctx, seed=3)).recompute(recompute)
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets, num_microbatches=2)
    log, storage = [], storage_of(model)
    use = storage.gather
    storage.gather = lambda *units: log.append(("use", units)) or use(*units)
    for unit, flats in storage.flats.items():
        for name in ("start", "finish"):
            call = getattr(flats[0], name)
            setattr(flats[0], name, lambda call=call, at=(name, unit): log.append(at) or call())
    model.train_batch(ids, targets=targets, num_microbatches=2)
    return log, list(storage.flats)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_next_unit_is_gathered_before_its_use(ranks, recompute):
    for log, units in ranks(gathers, 2, dict(dp=2), recompute):
        late = [a for a, b in pairwise(log) if a == ("start", b[1]) and b[0] == "finish"]
        assert late == [("start", units[0])]
        starts = [unit for kind, unit in log if kind == "start"]
        assert len(starts) <= 2 * 2 * len(units)  # forward and backward of each micro-batch
        assert sorted(starts) == sorted(unit for kind, unit in log if kind == "finish")


def losses_in_place(zero):
    """Of a model whose layers write into their input and return it."""
    ctx = context(dp=2, zero=zero)
    model = randomize(megazoo.from_config(CONFIGS["llama"], ctx, seed=3))
    for layer in model.layers.values():

        def forward(x, *arguments, own=layer.forward, **named):
            y = own(x.clone(), *arguments, **named)
            return x.mul_(0).add_(y)

        layer.forward = forward
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    optimizer, found = AdamW(model, lr=1e-2), []
    for _ in range(2):
        found.append(model.train_batch(ids, targets=targets).item())
        optimizer.step()
    return found


def test_a_layer_may_return_its_input_changed(ranks):
    assert ranks(losses_in_place, 2, 3)[0] == pytest.approx(ranks(losses_in_place, 2, 0)[0])


def norm_without_a_gradient(skips):
    """Of a step in which a rank along cp does not use the last MLP."""
    ctx = context(cp=2)
    model = randomize(megazoo.from_config(CONFIGS["llama"], ctx, seed=3))
    model.engine.gradients.made = GradientBuckets(list(model.parameters()), ctx, 1000)
    *_, top = model.layers.values()
    if ctx.cp_rank == skips:
        top.mlp.forward = lambda x: 0 * x
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    return AdamW(model, zero=0).step().item()


def test_a_rank_without_a_gradient_delays_its_bucket(ranks):
    first, second = ranks(norm_without_a_gradient, 2, 1)
    assert first == second > 0


def memory_of_steps(zero, dtype):
    """The peak of this rank's memory in two steps, and what the plan says, bytes."""
    give_back_freed_memory()
    torch.set_num_threads(1)
    size = dict(vocab_size=2000, hidden_size=512, layers=12, heads=8, ffn_size=1408)
    tiny = dict(vocab_size=200, hidden_size=64, layers=2, heads=2, ffn_size=128)
    ctx = context(dp=4, zero=zero)
    for shape in (tiny, size):
        gc.collect()
        with PeakMemory() as memory:
            model = megazoo.from_config(LlamaConfig(**shape), ctx, dtype=dtype).recompute("full")
            optimizer = AdamW(model)
            ids = torch.randint(0, 200, (2, 256))
            for _ in range(2):
                model.train_batch(ids, targets=ids, num_microbatches=2)
                optimizer.step()
                optimizer.zero_grad()
    run = PlannedRun(
        global_batch_size=8,
        micro_batch_size=1,
        seq_length=256,
        recompute="full",
        dtype=str(dtype).removeprefix("torch."),
    )
    return memory.above, Planner(model.config).plan(ctx.layout, run).ranks[0].total


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_steps_take_the_memory_of_the_plan(zero, dtype):
    for measured, planned in in_fresh_processes(memory_of_steps, zero, dtype, processes=4):
        assert 0.9 * planned < measured < 1.1 * planned


def used_in_other_ways(path, **settings):
    """What Python users do with a model, with zero 3 and without."""
    ctx = context(**settings)
    untied = randomize(megazoo.from_config(CONFIGS["llama"], ctx, seed=3))
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    # two graphs, of which the second backward needs what the first forward used
    sum(untied.token_logprobs(rows).sum() for rows in (ids, ids.flip(1))).backward()
    found = [p.grad.norm().item() for p in untied.parameters()]
    one = ids[: 1 if ctx.dp_rank else 2]  # uneven rows
    found += score(untied, one, one).log_likelihood.tolist()
    model = randomize(megazoo.from_config(tiny_config(), ctx, seed=3))
    found += [model.eval_batch(ids, targets=targets).item(), model.token_logprobs(ids).sum().item()]
    found += model.generate(ids[:2, :4], max_new_tokens=5).flatten().tolist()
    optimizer = AdamW(model, lr=1e-2, zero=None if ctx.layout.zero else int(ctx.dp_size > 1))
    model.train()
    for _ in range(2):  # a loop of one's own
        loss = model(ids, labels=ids).loss
        loss.backward()
        model.sync_gradients()
        found += [loss.item(), optimizer.step().item()]
        optimizer.zero_grad()
    for out in model.microbatches(ids, labels=ids, num_microbatches=2):
        out.loss.backward()
    found += [optimizer.step().item(), model.token_logprobs(ids).sum().item()]
    model.save_parallelized(path / f"zero{ctx.layout.zero}", merge_checkpoints=True)
    again = megazoo.from_pretrained(path / f"zero{ctx.layout.zero}", ctx)
    return [*found, again.token_logprobs(ids).sum().item()]


def test_what_works_without_zero_3_works_with_it(ranks, tmp_path):
    plain = ranks(used_in_other_ways, 2, tmp_path, dp=2)
    for expected, found in zip(
        plain, ranks(used_in_other_ways, 2, tmp_path, dp=2, zero=3), strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-5)


REFUSED = {
    "a state_dict is not supported with zero 3, because": lambda model: model.state_dict(),
    "state_dict is not supported": lambda model: model.load_state_dict({}),
    "parameters were written, which is lost with zero 3": lambda model: written(model),
    "with zero 3 can't be copied": lambda model: copy.deepcopy(model),
    "with zero 3 can't be converted": lambda model: model.half(),
    "compile is not supported with zero 3": lambda model: model.compile(),
    "can't be rounded with zero 3": round_to_int8,
    "merge is not supported with zero 3": lambda model: megazoo.lora.merge(megazoo.lora.add(model)),
    "but the model was built with zero 3": lambda model: AdamW(model, zero=2),
    "parameters rest as ranges": lambda model: torch.optim.SGD(model.parameters(), lr=1).step(),
}


def test_one_replica_keeps_its_parameters_in_memory():
    model = megazoo.from_config(tiny_config(), context(zero=3), seed=3)
    expected = megazoo.from_config(tiny_config(), seed=3).state_dict()
    for name, tensor in copy.deepcopy(model).state_dict().items():
        assert torch.equal(tensor, expected[name])
    assert AdamW(model).zero == 0


def classifier_saved(path):
    config = tiny_config(num_labels=3, pad_token_id=0)
    model = randomize(megazoo.from_config(config, context(dp=2, zero=3), seed=3))
    megazoo.lora.add(model, rank=2)
    megazoo.lora.save(model, path)
    (head,) = (e for e in model.entries() if e.name == "score.weight")
    return next(entry.parameter.clone() for entry in in_memory(model, [head]))


def test_the_head_of_a_classifier_is_saved_with_its_adapters(ranks, tmp_path):
    expected, _ = ranks(classifier_saved, 2, tmp_path / "adapters")
    model = megazoo.from_config(tiny_config(num_labels=3, pad_token_id=0), seed=4)
    megazoo.lora.load(model, tmp_path / "adapters")
    assert torch.equal(model.score.weight, expected)


def written(model):
    model.eval_batch(torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8))
    with storage_of(model).all_in_memory(), torch.no_grad():
        model.norm.bias.fill_(3.0)


def refused_with_zero_3():
    for line, call in REFUSED.items():
        model = megazoo.from_config(tiny_config(), context(dp=2, zero=3), seed=3)
        with pytest.raises(megazoo.UserError, match=line):
            call(model)


def test_what_zero_3_does_not_support_is_refused(ranks):
    ranks(refused_with_zero_3, 2)
    with pytest.raises(megazoo.UserError, match="has zero 3, but the model was built with zero 0"):
        AdamW(megazoo.from_config(tiny_config()), zero=3)


def test_an_unknown_zero_is_refused():
    with pytest.raises(megazoo.UserError, match="zero must be 0, 1, 2 or 3, got 4"):
        AdamW(megazoo.from_config(tiny_config()), zero=4)
    with pytest.raises(megazoo.UserError, match="zero-gather step needs zero 2 or 3: use both, o"):
        Layout(dp=2, zero=1, zero_gather="step")


def test_ranges_cover_every_parameter_once_and_begin_aligned():
    for dp in (1, 2, 3, 8):
        contexts = [megazoo.ParallelContext.virtual(dp=dp, rank=rank) for rank in range(dp)]
        parameters = list(megazoo.from_config(tiny_config()).parameters())
        buckets = GradientBuckets(parameters, contexts[0], 3000)
        for parameter in parameters:
            ranges = [buckets.range_of(parameter, rank) for rank in range(dp)]
            filled = [each for each in ranges if each[0] < each[1]]
            assert filled[0][0] == 0
            assert filled[-1][1] == parameter.numel()
            assert all(a[1] == b[0] for a, b in pairwise(filled))
            assert all(first % ALIGNMENT == 0 for first, _ in filled)
