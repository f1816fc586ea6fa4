"""Checkpoints of models with adapters: what they hold, how they go on, and the base that they know
again."""

import hashlib
import json
import re
import struct
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.checkpoint.format import manifest_checksum
from megazoo.errors import UserError
from megazoo.formats.resharding import write_shards
from megazoo.formats.source import HoldsAdapters, SavedModel
from megazoo.lora import checksum as sums
from megazoo.lora.manifest import AdapterInfo, entries_for_manifest
from megazoo.lora.settings import LoRASettings, is_adapter
from megazoo.lora.source import SavedAdapters
from megazoo.models.llama import LlamaConfig
from megazoo.parallel.context import ParallelContext
from tests.support.training import (
    MODELS,
    TINY,
    context,
    make_batch,
    randomize,
    replica_rows,
    run_in_layout,
    worst_relative,
)

LLAMA = LlamaConfig(**{**TINY, "layers": 2}, kv_heads=2, ffn_size=48)
MASK = 2**64 - 1


def factor_by_hand(name: str, shape: tuple, dim: int, index: int) -> int:
    """splitmix64's number at `index`, from a start that depends on name, shape and dimension, made
    odd."""
    digest = hashlib.blake2b(f"{name}/{shape}/{dim}".encode(), digest_size=8).digest()
    z = (int.from_bytes(digest, "little") + index * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def checksum_by_hand(tensors: dict) -> str:
    """The checksum of float32 tensors, element by element in Python's integers."""
    total = 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        factors = [
            [factor_by_hand(name, shape, dim, index) for index in range(size)]
            for dim, size in enumerate(shape)
        ]
        rows = tensor.reshape(shape[0], -1).tolist()
        columns = factors[1] if len(shape) > 1 else [1]
        for row, of_row in zip(rows, factors[0], strict=True):
            bits = struct.unpack(f"<{len(row)}i", struct.pack(f"<{len(row)}f", *row))
            total += of_row * sum(b * c for b, c in zip(bits, columns, strict=True))
    return f"{total % 2**64:016x}"


def checksum(config, layout):
    model = randomize(megazoo.from_config(config, context(**layout), seed=3))
    return sums.checksum_of(model.entries(), model, torch.float32)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_checksum_is_the_same_in_every_layout(ranks, name):
    config = replace(MODELS[name], layers=2)
    whole = randomize(megazoo.from_config(config, seed=3))
    expected = checksum_by_hand({e.name: e.parameter.detach() for e in whole.entries()})
    for layout in ({}, {"tp": 4}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2}):
        assert set(run_in_layout(ranks, checksum, layout, config)) == {expected}


def one_ulp(model):
    weight = model.layers["1"].mlp.down.weight
    weight[3, 5] = torch.nextafter(weight[3, 5].float(), torch.tensor(9.0)).to(weight.dtype)
    if weight.dtype == torch.bfloat16:
        weight.view(torch.int16)[3, 5] += 1


def swapped_elements(model):
    weight = model.layers["1"].mlp.down.weight
    weight[3, 5], weight[3, 6] = weight[3, 6].clone(), weight[3, 5].clone()


def swapped_rows(model):
    weight = model.layers["1"].mlp.down.weight
    weight[[3, 4]] = weight[[4, 3]]


def swapped_tensors(model):
    a, b = (model.layers[i].mlp.down.weight for i in "01")
    a[:], b[:] = b.clone(), a.clone()


CHANGES = [one_ulp, swapped_elements, swapped_rows, swapped_tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_another_base_has_another_checksum(dtype):
    model = megazoo.from_config(LLAMA, dtype=dtype, seed=3)
    found = [sums.checksum_of(model.entries(), model, dtype)]
    assert sums.checksum_of(model.entries(), model, dtype) == found[0]
    for change in CHANGES:  # of what the ones before have changed
        change(model)
        found.append(sums.checksum_of(model.entries(), model, dtype))
        assert len(set(found)) == len(found), change


def test_the_checksum_is_computed_once(monkeypatch):
    model = megazoo.lora.add(megazoo.from_config(LLAMA, seed=3))
    first = entries_for_manifest(model)
    monkeypatch.setattr(sums, "_factors", None)
    assert entries_for_manifest(model) == first
    with torch.no_grad():
        one_ulp(model)
    with pytest.raises(TypeError):
        entries_for_manifest(model)


def run(
    config, layout, steps, directory=None, resume=None, dtype=torch.float32, zero=0,
    targets="all-linear",
):  # fmt: skip
    """Train some steps with adapters, from a checkpoint or the start; save at the end.

    Returns the (loss, norm) of every step, the adapters, and whether the base is as it was.
    """
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, dtype=dtype, seed=3)
    before = {e.name: e.parameter.detach().clone() for e in model.entries()}
    megazoo.lora.add(model, rank=3, alpha=6, targets=targets)
    optimizer = megazoo.optim.AdamW(model, lr=1e-2, zero=zero)
    first, history = load(Checkpoint(resume), model, optimizer)["step"] if resume else 0, []
    for step in range(first, first + steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        loss = model.train_batch(ids, targets=targets, num_microbatches=2, step=step)
        history.append((loss.item(), optimizer.step().item()))
    if directory:
        save(directory, first + steps, model, optimizer)
    values = {e.name: e.parameter.detach().clone() for e in model.entries()}
    same = all(torch.equal(values[name], before[name]) for name in before)
    return history, {n: v for n, v in values.items() if is_adapter(n)}, same


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_any_layout(ranks, tmp_path, name):
    config = replace(MODELS[name], layers=3)
    expected, _, _ = run(config, {}, 8)
    found, before = [], None
    for layout, zero in [({"tp": 2}, 0), ({"pp": 2}, 0), ({"dp": 2}, 1), ({}, 0)]:
        saved = tmp_path / str(len(found))
        how = {"directory": saved, "resume": before, "zero": zero}
        results = run_in_layout(ranks, run, layout, config, steps=2, **how)
        assert all(same for _, _, same in results)
        found, before = [*found, *results[0][0]], saved
    assert worst_relative(found, expected) < 1e-5
    assert min(norm for _, norm in found) > 1e-3  # something is learnt


def test_a_run_in_bfloat16_under_zero_goes_on_bit_for_bit(ranks, tmp_path):
    layout, how = {"dp": 2}, {"dtype": torch.bfloat16, "zero": 1}
    straight = ranks(run, 2, LLAMA, layout, 4, **how)
    first = ranks(run, 2, LLAMA, layout, 2, tmp_path, **how)
    second = ranks(run, 2, LLAMA, layout, 2, None, tmp_path, **how)
    for whole, before, after in zip(straight, first, second, strict=True):
        assert whole[0] == before[0] + after[0]
        assert all(torch.equal(value, after[1][name]) for name, value in whole[1].items())
        assert after[2]
    assert any("master" in name for name in Checkpoint(tmp_path).tensors)


def test_a_stage_may_have_no_adapters(ranks, tmp_path):
    layout, how = {"pp": 2}, {"targets": "layers.0.attention.q"}
    expected, _, _ = run(LLAMA, {}, 4, **how)
    first = ranks(run, 2, LLAMA, layout, 2, tmp_path, **how)[0][0]
    assert len(SavedAdapters(tmp_path).specs) == 2
    second = ranks(run, 2, LLAMA, layout, 2, None, tmp_path, **how)[0][0]
    assert worst_relative([*first, *second], expected) < 1e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The step of a run with adapters on q and v, of one process."""
    model = megazoo.lora.add(megazoo.from_config(LLAMA, seed=3), rank=2)
    optimizer = megazoo.optim.AdamW(model, lr=1e-2)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    optimizer.step()
    return save(tmp_path_factory.mktemp("run"), 1, model, optimizer)


def test_a_step_holds_the_adapters_alone(saved):
    head = 32 // 4
    # of a layer: A of q and v [2, 32], B of q [32, 2], of v [2 heads x 8, 2]
    count = 2 * (2 * 2 * 32 + 2 * 32 + 2 * 2 * head)
    weights = load_file(saved / "model_tp_0_pp_0.safetensors")
    assert {name.split(".", 2)[2] for name in weights} == {
        f"attention.qkv.lora.{part}.{factor}" for part in "qv" for factor in "AB"
    }
    assert sum(tensor.numel() for tensor in weights.values()) == count
    states = load_file(saved / "optimizer_tp_0_pp_0_dp_0.safetensors")
    assert states.keys() == {f"{n}.{s}" for n in weights for s in ("exp_avg", "exp_avg_sq")}
    header = 200 * len(weights) * 3  # of JSON, for each tensor
    assert sum(file.stat().st_size for file in saved.glob("*.safetensors")) < 12 * count + header
    about = Checkpoint(saved).attached
    assert about["adapters"] == {
        "rank": 2, "alpha": 16, "dropout": 0.0, "targets": ["q", "v"], "rslora": False,
        "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    model = megazoo.from_config(LLAMA, seed=3)
    summed = checksum_by_hand({e.name: e.parameter.detach() for e in model.entries()})
    assert about["base"] == {"checksum": summed, "dtype": "F32", "path": None}


def fresh(seed=3, rank=2, config=LLAMA, ctx=None, **how):
    return megazoo.lora.add(megazoo.from_config(config, ctx, seed=seed), rank=rank, **how)


def on_another_base(path, layout):
    told, ctx = [], context(**layout)
    for seed, change in ((4, None), (3, one_ulp)):
        model = fresh(seed, ctx=ctx)
        if change and "1" in model.layers and ctx.tp_rank == 0:
            with torch.no_grad():
                change(model)
        with pytest.raises(UserError) as caught:
            load(Checkpoint(path), model)
        told.append(str(caught.value))
        found = sums.checksum_of((e for e in model.entries() if not is_adapter(e.name)), model,
                                 torch.float32)  # fmt: skip
        assert told[-1].endswith(f", that of the model's weights is {found}")
    return told


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_another_base_is_refused_on_every_rank(ranks, saved, layout):
    theirs = Checkpoint(saved).manifest["base"]["checksum"]
    results = run_in_layout(ranks, on_another_base, layout, saved)
    for told in zip(*results, strict=True):
        assert len(set(told)) == 1
        assert told[0].startswith(
            f"the adapters of {saved} belong to another base: its checksum is {theirs} "
            "(drawn from --seed), that of"
        )
    assert len({line for told in results for line in told}) == 2


def test_a_base_of_another_precision_is_rounded_or_told(tmp_path, recwarn):
    half = megazoo.lora.add(megazoo.from_config(LLAMA, dtype=torch.bfloat16, seed=3))
    path = save(tmp_path, 1, half)
    load(Checkpoint(path), fresh(rank=8))  # rounds to the same
    with pytest.raises(UserError, match="belong to another base"):
        load(Checkpoint(path), fresh(seed=4, rank=8))
    assert not recwarn.list
    other = megazoo.lora.add(megazoo.from_config(LLAMA, dtype=torch.float16, seed=3))
    with pytest.warns(megazoo.errors.Advice, match="can't be compared .* trained in bfloat16"):
        load(Checkpoint(path), other)


def test_what_else_is_trained_is_held_too(tmp_path):
    classifier = LlamaConfig(
        **{**TINY, "layers": 2}, kv_heads=2, ffn_size=48, num_labels=3, pad_token_id=0
    )
    model = fresh(config=classifier)
    with torch.no_grad():
        model.score.weight.normal_()
    path = save(tmp_path, 1, model)
    specs = SavedAdapters(path).specs
    assert [name for name in specs if not is_adapter(name)] == ["score.weight"]
    other = fresh(config=classifier)
    load(Checkpoint(path), other)
    assert torch.equal(other.score.weight, model.score.weight)
    norms = fresh().train_only("lora|^norm")
    assert "norm.weight" in SavedAdapters(save(tmp_path, 2, norms)).specs
    with pytest.raises(
        UserError, match=r"has norm\.weight, which is frozen in the model: train the"
    ):
        load(Checkpoint(tmp_path), fresh())


def test_adapters_that_are_frozen_are_held_too(tmp_path):
    model = fresh().train_only(r"layers\.1\..*lora")
    assert len(SavedAdapters(save(tmp_path, 1, model)).specs) == 8


@pytest.mark.parametrize(
    "layout",
    [(4, 2), *(pytest.param(layout, marks=pytest.mark.slow) for layout in ((2, 1), (1, 2)))],
    ids=str,
)
def test_resharding_keeps_every_bit(saved, tmp_path, layout):
    source = SavedAdapters(saved)
    write_shards(source, tmp_path / "cut", *layout)
    cut = SavedAdapters(tmp_path / "cut")
    assert (cut.layout["tp"], cut.layout["pp"]) == layout
    assert cut.attached == source.attached
    assert cut.tensors.keys() == source.tensors.keys()
    one = ParallelContext()
    for name in source.tensors:
        parameter = name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
        spec = source.specs[parameter]
        both = [torch.full(spec.shape, torch.nan) for _ in range(2)]
        for each, tensor in zip((source, cut), both, strict=True):
            each.read_into(name, tensor, spec, one)
        assert torch.equal(*both), name
    cut.verify()


def forged(path, saved, change):
    """A copy of a step with its manifest changed, and its checksum made anew."""
    path.mkdir()
    for file in saved.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((path / "megazoo.json").read_text())
    change(manifest)
    del manifest["crc32"]
    text = json.dumps({**manifest, "crc32": manifest_checksum(manifest)})
    (path / "megazoo.json").write_text(text)
    return path


def adapters(**values):
    return lambda m: m["adapters"].update(values)


def of_base(**values):
    return lambda m: m["base"].update(values)


A = "layers.1.attention.qkv.lora.q.A"
FORGERIES = {
    "adapters alone": (lambda m: m.pop("base"), "base is missing"),
    "a base alone": (lambda m: m.pop("adapters"), "adapters is missing"),
    "neither": (
        lambda m: (m.pop("base"), m.pop("adapters")),
        "has no adapters: it holds a complete",
    ),
    "rank 0": (adapters(rank=0), r"adapters\.rank is 0"),
    "huge rank": (adapters(rank=2**50), r"adapters\.rank is"),
    "another rank": (
        adapters(rank=3),
        r"has shape \[2, 32\], but in the model it has shape \[3, 32\]",
    ),
    "rank of text": (adapters(rank="2"), r"adapters\.rank is '2'"),
    "alpha": (adapters(alpha=-1.0), r"adapters\.alpha is -1"),
    "a name of a pattern": (
        adapters(rank_pattern={"": 2}),
        r"adapters\.rank_pattern has a wrong key: it must be a",
    ),
    "null": (lambda m: m.update(adapters=None), "adapters is missing"),
    "a list": (lambda m: m.update(adapters=[]), "adapters is a list: it must be an object"),
    "alpha nan": (adapters(alpha=float("nan")), "alpha"),
    "dropout": (adapters(dropout=1.0), r"adapters\.dropout is 1"),
    "no targets": (adapters(targets=[]), r"adapters\.targets is a list"),
    "unknown target": (adapters(targets=["qq"]), "the target 'qq' is not a linear layer"),
    "unknown setting": (adapters(zzz=1), "adapters has the unknown key 'zzz': upgrade megazoo"),
    "other targets": (
        adapters(targets=["q"]),
        r"lists the tensor layers\.0.*lora\.v\S*, which the model of its config does not have",
    ),
    "more targets": (adapters(targets=["q", "v", "up"]), "has no tensor layers.0.mlp"),
    "target with a line": (adapters(targets=["q\n"]), "can't be the name of a target"),
    "a missing key": (lambda m: m["adapters"].pop("rslora"), "adapters has no rslora"),
    "checksum": (of_base(checksum="12"), r"base\.checksum is '12'"),
    "dtype": (of_base(dtype="I64"), r"base\.dtype is 'I64'"),
    "path": (of_base(path="a\x1b[2J"), r"base\.path is .*: it must be printable"),
    "a missing tensor": (lambda m: m["tensors"].pop(A), f"has no tensor {A}"),
    "a tensor of the base": (
        lambda m: m["tensors"].update({"norm.weight": m["tensors"][A]}),
        r"norm\.weight has shape",
    ),
    "another cut": (
        lambda m: [
            m["tensors"][A.replace("q.A", "q.B") + state]["shard"].update(units=[4])
            for state in ("", ".exp_avg", ".exp_avg_sq")
        ],
        "is not sharded as in the model",
    ),
    "another base": (of_base(checksum="0" * 16), "belong to another base: its checksum is 0000"),
}


def test_forged_manifests(saved, tmp_path):
    for what, (change, message) in FORGERIES.items():
        path = forged(tmp_path / what, saved, change)
        with pytest.raises(UserError) as caught:
            load(SavedAdapters(path), fresh())
        assert re.search(message, str(caught.value)), what
        assert len(str(caught.value)) < 500, what


def test_a_plain_model_loads_no_checkpoint_with_adapters(tmp_path):
    """Also one that holds all parameters."""
    path = save(tmp_path, 1, fresh().train_only(".*"))
    with pytest.raises(UserError, match=r"holds only adapters, but the model has none: load them"):
        load(Checkpoint(path), megazoo.from_config(LLAMA, seed=3))


def test_the_schema_has_the_fields_of_the_settings():
    assert {f.name for f in fields(AdapterInfo)} == {f.name for f in fields(LoRASettings)}


def test_a_flipped_bit_of_the_adapters_is_found(saved, tmp_path):
    path = forged(tmp_path / "step", saved, lambda m: m.update(later=1))
    load(SavedAdapters(path), fresh())  # what a later version adds to the manifest is let be
    data = bytearray((path / "model_tp_0_pp_0.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "model_tp_0_pp_0.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"model_tp_0_pp_0\.safetensors is corrupt"):
        load(SavedAdapters(path), fresh())


def test_kinds_of_checkpoints_are_told_apart(saved, tmp_path):
    whole = save(tmp_path, 1, megazoo.from_config(LLAMA, seed=3))
    assert "adapters" not in Checkpoint(whole).manifest
    with pytest.raises(HoldsAdapters, match="pass its base as the model, and this"):
        SavedModel(saved)
    with pytest.raises(HoldsAdapters, match=r"load its base, then call megazoo\.lora\.load"):
        megazoo.from_pretrained(saved)
    with pytest.raises(UserError, match="has no adapters: it holds a complete model"):
        SavedAdapters(whole)
    for checkpoint, model, message in [
        (saved, megazoo.from_config(LLAMA, seed=3), "but the model has none: load them with megaz"),
        (whole, fresh(), r"has no adapters, but the model has: load it before megazoo\.lora\.add"),
        (saved, fresh(rank=4), "has adapters with rank 2, but the model's adapters have 4"),
        (
            saved,
            fresh(targets="q"),
            r"adapters with targets \['q', 'v'\], but the model's adapters have \['q'\]",
        ),
        (
            saved,
            fresh().train_only("norm|lora"),
            "has no layers.0.attention_norm.weight, which was",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            load(Checkpoint(checkpoint), model)
