"""PEFT's files both ways, against PEFT: the same logits, the same tensors, in any layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import megazoo
from megazoo.layers import ColumnParallelLinear, RowParallelLinear
from tests.support.peft_oracle import (
    CASES,
    IDS,
    KINDS,
    Q_AND_V,
    base_model,
    in_peft,
    settings_for,
    with_adapters,
)
from tests.support.sampling import marked_slow
from tests.support.training import context, layout_name, make_batch, replica_rows, run_in_layout

FILES = ("adapter_config.json", "adapter_model.safetensors")
LAYOUTS = [dict(), dict(tp=2), dict(tp=4), dict(pp=2), dict(tp=2, pp=2), dict(dp=2), dict(cp=2)]
SAVED = "patterns"  # the kind that is saved in every layout: it has all that a file can have
OTHERS = [kind for kind in KINDS if kind != SAVED]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """By family and kind: the directories of a model and of its adapters, and PEFT's logits."""
    root, made = tmp_path_factory.mktemp("peft"), {}
    models = {family: base_model(family) for family, _ in CASES}
    for family, hf in models.items():
        hf.save_pretrained(root / family)
    for family, kind in CASES:
        model = with_adapters(models[family], **settings_for(family, kind))
        model.save_pretrained(root / f"{family}, {kind}")
        with torch.no_grad():
            made[family, kind] = root / family, root / f"{family}, {kind}", model(IDS).logits
    return made


@torch.no_grad()
def loaded(originals, where, layout):
    """Logits with every adapter; some are also saved again."""
    ctx, outputs = context(**layout), {}
    for (family, kind), (base, adapter, _) in originals.items():
        model = megazoo.lora.load(megazoo.from_pretrained(base, ctx), adapter).eval()
        assert [n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n] == []
        outputs[family, kind] = model(IDS).logits
        if kind == SAVED:
            megazoo.lora.save(model, where / family)
    return outputs


@pytest.fixture(scope="module")
def of_one_process(originals, tmp_path_factory):
    """What one process writes."""
    root = tmp_path_factory.mktemp("one")
    loaded(originals, root, {})
    return root


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [pytest.param({}, KINDS, id="one process")]
    + [
        pytest.param(
            layout,
            (SAVED, OTHERS[number % 3]),
            id=f"two kinds, {layout_name(layout)}",
            marks=pytest.mark.slow if layout_name(layout) in ("tp4", "pp2", "dp2", "cp2") else (),
        )
        for number, layout in enumerate(LAYOUTS[1:])
    ]
    + [
        pytest.param(layout, KINDS, id=layout_name(layout), marks=pytest.mark.slow)
        for layout in LAYOUTS[1:]
    ],
)
def test_pefts_own_adapters_in_layouts(ranks, originals, of_one_process, tmp_path, layout, kinds):
    """The logits are PEFT's; saved again, the tensors are PEFT's to the bit, and both files are
    what one process writes, to the byte."""
    some = {case: paths for case, paths in originals.items() if case[1] in kinds}
    results = run_in_layout(ranks, loaded, layout, some, tmp_path)
    assert any(logits is not None for logits in results[-1].values())
    for outputs in results:
        for case, logits in outputs.items():
            if logits is not None:
                assert (logits - originals[case][2]).abs().max() < 1e-5, case
    for family in Q_AND_V:
        theirs = load_file(originals[family, SAVED][1] / FILES[1])
        ours = load_file(tmp_path / family / FILES[1])
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        for file in FILES:
            one = (of_one_process / family / file).read_bytes()
            assert (tmp_path / family / file).read_bytes() == one


def test_peft_loads_what_is_saved(originals, tmp_path):
    for case in CASES:
        check_that_peft_loads(case, *originals[case], tmp_path / ", ".join(case))


def check_that_peft_loads(case, base, adapter, expected, tmp_path):
    model = megazoo.lora.load(megazoo.from_pretrained(base), adapter)
    megazoo.lora.save(model, tmp_path / "out", base_model_name_or_path="a/name")
    with torch.no_grad():
        logits = in_peft(base_model(case[0]), tmp_path / "out")(IDS).logits
    assert (logits - expected).abs().max() < 1e-5, case
    ours, theirs = (
        json.loads((path / FILES[0]).read_text()) for path in (tmp_path / "out", adapter)
    )
    same = ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "bias", "use_rslora",
            "inference_mode", "fan_in_fan_out", "modules_to_save", "use_dora",
            "init_lora_weights")  # fmt: skip
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}, case
    assert ours["base_model_name_or_path"] == "a/name"


NAMES = {
    ("gpt2", "q,v"): ["c_attn"],
    ("gpt2", "output,down"): ["c_proj"],
    ("gpt2", "attn.c_proj,up"): ["attn.c_proj", "c_fc"],
    ("gpt2", "all-linear"): ["c_attn", "c_proj", "c_fc"],
    ("llama", "q,v"): ["q_proj", "v_proj"],
    ("llama", "gate,o"): ["o_proj", "gate_proj"],
    ("llama", "layers.1.attention.k"): ["model.layers.1.self_attn.k_proj"],
    ("mpt", "k,up_proj"): ["Wqkv", "up_proj"],
}


def test_target_modules_are_the_shortest_names(originals, tmp_path):
    """What `add` was told; PEFT then adapts the same layers, and finds all tensors."""
    for case in NAMES:
        check_names(case, originals, tmp_path / ", ".join(case))


def check_names(case, originals, tmp_path):
    family, targets = case
    model = megazoo.from_pretrained(originals[family, "q and v"][0])
    megazoo.lora.add(model, rank=3, alpha=5.5, targets=targets, rslora=True, dropout=0.25)
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    megazoo.lora.save(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / FILES[0]).read_text())
    assert config["target_modules"] == NAMES[case], case
    assert (config["lora_alpha"], config["lora_dropout"]) == (5.5, 0.25)
    assert config["fan_in_fan_out"] == (family == "gpt2")
    with torch.no_grad():
        theirs = in_peft(base_model(family), tmp_path / "out")(IDS).logits
        assert (theirs - model.eval()(IDS).logits).abs().max() < 1e-5, case
    again = megazoo.lora.load(
        megazoo.from_pretrained(originals[family, "q and v"][0]), tmp_path / "out"
    )
    settings = again.attached
    assert (settings.dropout, settings.alpha, settings.rslora) == (0.25, 5.5, True)


PATTERNS = {
    "ends of names": {"proj": 7, "v_proj": 2, "mlp.up_proj": 5, "lp.down_proj": 6},
    "a dot for any character": {"v.proj": 100},
    "regular expressions": {
        "layers.[01].self_attn.q_proj": 5, "^model.*down_proj": 6, "(up|gate)_proj": 3, "k": 9,
    },
    "the first that matches": {r".*\.self_attn\.[qk]_proj": 3, "q_proj": 8},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind", PATTERNS)
def test_patterns_are_regular_expressions_of_whole_names(kind, originals, tmp_path):
    """A pattern matches the end of a module's name that begins after a dot."""
    base, _, _ = originals["llama", SAVED]
    patterns = {"rank_pattern": PATTERNS[kind], "alpha_pattern": PATTERNS[kind]}
    hf = with_adapters(base_model("llama"), r=4, target_modules="all-linear", **patterns)
    hf.save_pretrained(tmp_path)
    model = megazoo.lora.load(megazoo.from_pretrained(base), tmp_path).eval()
    assert (model(IDS).logits - hf(IDS).logits).abs().max() < 1e-5 * hf(IDS).logits.abs().max()


def test_a_bin_file_is_read_without_code(originals, tmp_path):
    base, adapter, expected = originals["llama", "patterns"]
    (tmp_path / FILES[0]).write_bytes((adapter / FILES[0]).read_bytes())
    torch.save(load_file(adapter / FILES[1]), tmp_path / "adapter_model.bin")
    model = megazoo.lora.load(megazoo.from_pretrained(base), tmp_path).eval()
    assert (model(IDS).logits - expected).abs().max() < 1e-5


def test_the_same_adapters_are_filled_others_refused(originals):
    base, adapter, expected = originals["llama", "q and v"]
    model = megazoo.lora.add(megazoo.from_pretrained(base).eval(), rank=4, alpha=8, dropout=0.1)
    before = dict(model.named_parameters())
    megazoo.lora.load(model, adapter)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert (model(IDS).logits - expected).abs().max() < 1e-5
    for other in (dict(rank=5), dict(rank=4, alpha=9), dict(rank=4, alpha=8, targets="q,k")):
        model = megazoo.lora.add(megazoo.from_pretrained(base), **other)
        with pytest.raises(megazoo.UserError, match="load it into a model without adapters"):
            megazoo.lora.load(model, adapter)


def trained(base, where, layout):
    """Adapters after some steps, saved."""
    ctx = context(**layout)
    model = megazoo.lora.add(megazoo.from_pretrained(base, ctx), rank=4, targets="all-linear")
    opt = megazoo.optim.AdamW(model, lr=1e-3)
    for step in range(2):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        model.train_batch(ids, targets=targets, num_microbatches=2, step=step)
        opt.step()
    megazoo.lora.save(model, where)


# what is exported of a layer is no matter of the family: test_a_classifier_with_its_head has all
@pytest.mark.parametrize("family", marked_slow(list(Q_AND_V), lambda _, name: name != "llama"))
def test_what_is_trained_is_what_is_exported(ranks, originals, tmp_path, family):
    """Of the last layer, B is not zero, and what one process exports, under sequence parallelism
    too."""
    base = originals[family, "q and v"][0]
    for name, layout in {"one": {}, "sp": dict(tp=2, sp=True), "tp4": dict(tp=4)}.items():
        run_in_layout(ranks, trained, layout, base, tmp_path / name)
    one = load_file(tmp_path / "one" / FILES[1])
    for name in ("sp", "tp4"):
        other = load_file(tmp_path / name / FILES[1])
        assert other.keys() == one.keys()
        for tensor, values in other.items():
            assert values.abs().max() > 1e-3, tensor
            assert (values - one[tensor]).abs().max() < 1e-5, tensor


@pytest.mark.parametrize("family", Q_AND_V)
def test_a_classifier_with_its_head(ranks, tmp_path, family):
    hf = base_model(family, labels=3)
    hf.save_pretrained(tmp_path / "hf")
    model = with_adapters(hf, "SEQ_CLS", r=4, target_modules=Q_AND_V[family])
    model.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = model(IDS).logits
    paths = tmp_path / "hf", tmp_path / "theirs", tmp_path / "ours"
    for layout in ({}, dict(tp=2, pp=2)):
        for logits in run_in_layout(ranks, classified, layout, *paths):
            assert logits is None or (logits - expected).abs().max() < 1e-5
        config = json.loads((tmp_path / "ours" / FILES[0]).read_text())
        assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
        with torch.no_grad():
            assert (in_peft(hf, tmp_path / "ours")(IDS).logits - expected).abs().max() < 1e-5


@torch.no_grad()
def classified(base, adapter, out, layout):
    model = megazoo.from_pretrained(base, context(**layout)).eval()
    megazoo.lora.load(model, adapter)
    megazoo.lora.save(model, out)
    return model(IDS).logits


class Own(nn.Module):
    def __init__(self, ctx):
        super().__init__()
        self.first = ColumnParallelLinear(8, 16, ctx=ctx)
        self.second = RowParallelLinear(16, 8, ctx=ctx)

    def forward(self, x):
        return self.second(self.first(x))


@torch.no_grad()
def own(where, layout):
    ctx = context(**layout)
    torch.manual_seed(5)
    model = Own(ctx)
    megazoo.lora.add(model, rank=2, alpha=3, targets="first,second")
    for layer in (model.first, model.second):
        adapter = next(iter(layer.lora.values()))
        whole = torch.arange(32.0).view(16, 2) if layer is model.first else torch.ones(8, 2)
        piece = adapter.specs["B"].pieces(ctx.place)
        for each in piece:
            adapter.B[each.index()] = whole[tuple(slice(*bounds) for bounds in each.box)]
    megazoo.lora.save(model, where)
    x = torch.linspace(-1, 1, 8).repeat(2, 1)
    expected = model(x)
    torch.manual_seed(5)
    again = megazoo.lora.load(Own(ctx), where)
    assert torch.equal(again(x), expected)
    return expected


def test_a_module_of_ones_own(ranks, tmp_path):
    """It has its own modules' names."""
    (expected,) = run_in_layout(ranks, own, {}, tmp_path / "one")
    for out in run_in_layout(ranks, own, dict(tp=2), tmp_path / "tp2"):
        assert (out - expected).abs().max() < 1e-4
    for file in FILES:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "tp2" / file).read_bytes()
    tensors = load_file(tmp_path / "tp2" / FILES[1])
    assert torch.equal(
        tensors["base_model.model.first.lora_B.weight"], torch.arange(32.0).view(16, 2)
    )
    config = json.loads((tmp_path / "tp2" / FILES[0]).read_text())
    assert config["target_modules"] == ["first", "second"]


def test_bfloat16_stays_as_it_is(originals, tmp_path):
    base, adapter, _ = originals["llama", "all linear"]
    model = megazoo.lora.load(megazoo.from_pretrained(base, dtype=torch.bfloat16), adapter)
    megazoo.lora.save(model, tmp_path / "out")
    ours, theirs = load_file(tmp_path / "out" / FILES[1]), load_file(adapter / FILES[1])
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in theirs)


def test_a_directory_of_others_is_refused(originals, tmp_path):
    base, adapter, _ = originals["llama", "q and v"]
    model = megazoo.lora.load(megazoo.from_pretrained(base), adapter)
    megazoo.lora.save(model, tmp_path / "out")
    megazoo.lora.save(model, tmp_path / "out")  # in place of its own
    save_file({"a": torch.ones(1)}, tmp_path / "foreign")
    model_of_ours = tmp_path / "model"
    megazoo.from_pretrained(base).save_parallelized(model_of_ours, merge_checkpoints=True)
    for path, name in ((adapter, "README.md"), (model_of_ours, "config.json")):
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        with pytest.raises(megazoo.UserError, match=f"holds {name}"):
            megazoo.lora.save(model, path)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(megazoo.UserError, match="holds notes"):
        megazoo.lora.save(model, tmp_path / "out")
    assert not list(tmp_path.glob(".*.partial"))
    with pytest.raises(megazoo.UserError, match="no adapters to save"):
        megazoo.lora.save(megazoo.from_pretrained(base), tmp_path / "other")
    assert not (tmp_path / "other").exists()
