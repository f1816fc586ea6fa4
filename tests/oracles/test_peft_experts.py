"""Adapters of experts and routers in PEFT's files, against PEFT: the same logits, the same tensors,
merged or not, in any layout; and they train as in one process."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import megazoo
from megazoo.errors import UserError
from megazoo.models.mixtral import MixtralConfig
from tests.support.families import saved, twin
from tests.support.layouts import in_layout
from tests.support.lora import assert_alike, one_process, train
from tests.support.peft_oracle import IDS, edit_config, in_peft, with_adapters
from tests.support.sampling import marked_slow
from tests.support.scripts import merge_shards
from tests.support.training import TINY, context

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {  # by family of tests.support.families: arguments of a LoraConfig
    "mixtral": dict(target_modules=["q_proj"], target_parameters=BOTH),
    "qwen2_moe, dense between": dict(
        target_modules="all-linear",
        target_parameters=["experts.down_proj"],
        rank_pattern={"experts.down_proj": 2, "shared_expert_gate": 3},
    ),
    "qwen3_moe, window, dense between": dict(
        target_modules=[], target_parameters=["gate.weight", "gate_up_proj"], use_rslora=True
    ),
    "olmoe, grouped, normalised": dict(
        target_modules=["down_proj", "o_proj"],
        target_parameters=[*BOTH, "mlp.gate.weight"],
        # as PEFT converts adapters of each expert
        rank_pattern={r".*\.mlp\.experts\.gate_up_proj": 8},
        alpha_pattern={r".*\.mlp\.experts\.gate_up_proj": 16},
    ),
}
LAYOUTS = ["tp2ep2", "tp1", "tp2", "pp2ep2"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """By family: the directories of a model and of its adapters, and PEFT's model."""
    root, made = tmp_path_factory.mktemp("peft"), {}
    for family, settings in CASES.items():
        peft = with_adapters(twin(family), r=4, lora_alpha=8, **settings)
        peft.save_pretrained(root / f"{family}, adapter")
        made[family] = saved(family, root), root / f"{family}, adapter", peft
    return made


def near(found, expected):
    return (found - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def loaded(paths, where, layout):
    """Logits with the adapters, which are saved again, and with the merged weights."""
    ctx, outputs = context(**layout), {}
    for family, (base, adapter) in paths.items():
        model = megazoo.lora.load(megazoo.from_pretrained(base, ctx), adapter).eval()
        before = model(IDS).logits
        megazoo.lora.save(model, where / family)
        outputs[family] = before, megazoo.lora.merge(model)(IDS).logits
    return outputs


@pytest.mark.parametrize("layout", marked_slow(LAYOUTS, lambda number, _: number > 0))
def test_pefts_own_adapters(ranks, originals, tmp_path, layout):
    paths = {family: each[:2] for family, each in originals.items()}
    for outputs in in_layout(ranks, loaded, layout, paths, tmp_path):
        for family, logits in outputs.items():
            with torch.no_grad():
                expected = originals[family][2](IDS).logits
            for each in logits:
                assert each is None or near(each, expected), family
    for family, (_, adapter, _) in originals.items():
        ours, theirs = (
            load_file(path / "adapter_model.safetensors") for path in (tmp_path / family, adapter)
        )
        assert ours.keys() == theirs.keys(), family
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), family
        with torch.no_grad():
            again = in_peft(twin(family), tmp_path / family)(IDS).logits
            assert near(again, originals[family][2](IDS).logits), family


def test_merged_on_the_way(originals, tmp_path):
    for family, (base, adapter, peft) in originals.items():
        out = tmp_path / family
        merge_shards.main([str(base), str(out), "--adapter", str(adapter)])
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(out).eval()(IDS).logits
            assert near(logits, peft(IDS).logits), family


CONFIG = MixtralConfig(**TINY, kv_heads=2, ffn_size=24, experts=4, router_aux_loss_coef=0.1)
TARGETS = ("gate_up", "down", "router", "q")
FAST = ("tp2ep2+sp",)


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        [*FAST, "pp2ep2+zero", "ep2", "tp2", "tp2+sp", "cp2ep2", "pp2v2ep2+zb-v", "dp4ep2+zero"],
        lambda number, _: number >= len(FAST),
    ),
)
def test_they_train_as_in_one_process(ranks, layout):
    expected = one_process(CONFIG, targets=TARGETS, steps=3)
    schedule = {"schedule": "zb-v"} if "zb-v" in layout else {}
    found = in_layout(ranks, train, layout, CONFIG, targets=TARGETS, steps=3, **schedule)
    assert_alike(found, expected)


def test_dropout_is_refused():
    model = megazoo.from_config(CONFIG)
    with pytest.raises(UserError, match=r"dropout 0.1 is not supported for layers.0.moe.gate_up"):
        megazoo.lora.add(model, targets="gate_up,q", dropout=0.1)
    megazoo.lora.add(model, dropout=0.1, targets="all-linear")  # as in PEFT, without experts
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert not any("moe" in name for name in names)


def test_a_missing_tensor_is_named(originals, tmp_path):
    base, adapter, _ = originals["mixtral"]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in adapter.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    edit_config(copy, target_parameters=["experts.gate_up_proj"])
    with pytest.raises(UserError, match=r"has the unexpected .*base_layer"):
        megazoo.lora.load(megazoo.from_pretrained(base), copy)
    assert json.loads((adapter / "adapter_config.json").read_text())["target_parameters"]
