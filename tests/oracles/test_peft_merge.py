"""Adapters merged into the weights, in memory and on the way to a Hugging Face directory, against
PEFT's merge_and_unload; and the tools that run a model with adapters."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import megazoo
from megazoo.formats.resharding import write_shards
from megazoo.lora.merged import MergedSource
from megazoo.lora.source import open_adapter
from megazoo.models.pretrained import open_source
from megazoo.parallel import ParallelContext
from megazoo.parallel.shard import Piece
from megazoo.programs import generate
from tests.support.inference import run_main
from tests.support.peft_oracle import CASES, IDS, Q_AND_V, base_model, settings_for, with_adapters
from tests.support.programs import python
from tests.support.scripts import merge_shards
from tests.support.training import context, run_in_layout

ROOT = Path(__file__).parents[2]


MERGED = [(family, kind) for family, kind in CASES if kind in ("rslora", "patterns")]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """By family and kind: the directories of a model, of its shards and of its adapters, and PEFT's
    merged model."""
    root, made = tmp_path_factory.mktemp("peft"), {}
    for family in Q_AND_V:
        hf = base_model(family)
        hf.save_pretrained(root / family)
        write_shards(open_source(root / family), root / f"{family}, shards", tp=2, pp=2)
        for kind in (kind for name, kind in MERGED if name == family):
            model, adapter = (
                with_adapters(hf, **settings_for(family, kind)),
                root / f"{family} {kind}",
            )
            model.save_pretrained(adapter)
            made[family, kind] = (
                root / family, root / f"{family}, shards", adapter, model.merge_and_unload()
            )  # fmt: skip
    return made


@torch.no_grad()
def in_memory(cases, layout):
    """Logits with adapters and with the merged weights, of every case."""
    ctx, outputs = context(**layout), {}
    for case, (base, adapter) in cases.items():
        model = megazoo.lora.load(megazoo.from_pretrained(base, ctx).eval(), adapter)
        before = model(IDS).logits
        megazoo.lora.merge(model)
        assert not any(".lora." in name for name, _ in model.named_parameters())
        outputs[case] = before, model(IDS).logits
    return outputs


@pytest.mark.parametrize(
    "layout", [dict(), pytest.param(dict(tp=4), marks=pytest.mark.slow), dict(tp=2, pp=2)], ids=str
)
def test_merged_computes_what_it_did(ranks, originals, layout):
    cases = {case: (base, adapter) for case, (base, _, adapter, _) in originals.items()}
    for outputs in run_in_layout(ranks, in_memory, layout, cases):
        for case, (before, after) in outputs.items():
            if after is not None:
                with torch.no_grad():
                    expected = originals[case][3](IDS).logits
                assert (after - before).abs().max() < 1e-5, case
                assert (after - expected).abs().max() < 1e-5, case


def test_merged_on_the_way(originals, tmp_path):
    """The directory is a model of transformers with PEFT's merged weights."""
    for case in MERGED:
        _, shards, adapter, merged = originals[case]
        out = tmp_path / ", ".join(case)
        merge_shards.main([str(shards), str(out), "--adapter", str(adapter)])
        hf = AutoModelForCausalLM.from_pretrained(out).eval()
        with torch.no_grad():
            assert (hf(IDS).logits - merged(IDS).logits).abs().max() < 1e-5, case
        theirs, ours = merged.state_dict(), hf.state_dict()
        assert ours.keys() == theirs.keys(), case
        assert all((ours[name] - theirs[name]).abs().max() < 1e-6 for name in theirs), case


def exact_sums(weights: dict, factors: dict, scale: float, turned: bool) -> dict:
    """Each weight with its change, in fp64, by Hugging Face's names."""
    weights = dict(weights)
    for name in [name for name in factors if name.endswith("lora_A.weight")]:
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        a, b = factors[name].double(), factors[name.replace("lora_A", "lora_B")].double()
        change = scale * (b @ a)
        weights[weight] = weights[weight].double() + (change.T if turned else change)
    return weights


def different(ours: dict, expected: dict, dtype: torch.dtype) -> float:
    """The share of numbers that are not the exact ones, rounded once."""
    assert ours.keys() == expected.keys()
    assert {tensor.dtype for tensor in ours.values()} == {dtype}
    count = sum((ours[name] != expected[name].to(dtype)).sum().item() for name in ours)
    return count / sum(tensor.numel() for tensor in ours.values())


@pytest.mark.parametrize("family", Q_AND_V)
def test_bfloat16_is_rounded_once(originals, tmp_path, family):
    """A base in bfloat16, the sum in fp32, and one rounding: bit for bit but where the sum lies
    within fp32's error of the middle of two numbers. With two roundings a tenth would differ."""
    base, _, adapter, _ = originals[family, "rslora"]
    half, whole, saved = tmp_path / "half", tmp_path / "whole", tmp_path / "saved"
    write_shards(open_source(base), half, tp=2, pp=1, dtype=torch.bfloat16)
    merge_shards.main([str(half), str(whole)])
    weights = load_file(whole / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    how = 8 / 4**0.5, family == "gpt2"
    expected = exact_sums(weights, factors, *how)
    for flags, dtype in (([], torch.bfloat16), (["--dtype", "float16"], torch.float16)):
        out = tmp_path / str(dtype)
        merge_shards.main([str(half), str(out), "--adapter", str(adapter), *flags])
        assert different(load_file(out / "model.safetensors"), expected, dtype) < 1e-3
    # in memory the adapters are bfloat16 themselves
    model = megazoo.lora.load(megazoo.from_pretrained(half), adapter)
    megazoo.lora.merge(model).save_parallelized(saved, merge_checkpoints=True)
    rounded = {name: values.bfloat16() for name, values in factors.items()}
    expected = exact_sums(weights, rounded, *how)
    assert different(load_file(saved / "model.safetensors"), expected, torch.bfloat16) < 1e-3


def test_a_changed_file_is_noticed(originals, tmp_path, monkeypatch, capsys):
    base, _, adapter, _ = originals["llama", "rslora"]
    write_shards(open_source(base), tmp_path / "shards", tp=1, pp=1)
    file = tmp_path / "shards" / "model_tp_0_pp_0.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    arguments = tmp_path / "shards", tmp_path / "out", "--adapter", adapter
    code, _, told = run_main(merge_shards, monkeypatch, capsys, *arguments)
    assert code == 1
    assert "is corrupt: its checksum does not match megazoo.json" in told
    assert not (tmp_path / "out").exists()


def test_any_box_takes_little_memory(originals, monkeypatch):
    """Boxes that begin anywhere are those of the whole; what is worked on is a few megabytes."""
    base, _, adapter, merged = originals["llama", "patterns"]
    source = open_source(base)
    adapters = open_adapter(adapter, source.model.on_meta(source.config, ParallelContext()))
    monkeypatch.setattr("megazoo.lora.merged.PIECE_BYTES", 7 * 4)  # parts of 7 numbers
    made = MergedSource(source, adapters, source.config)
    theirs = merged.state_dict()
    parts = [theirs[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    whole, name = torch.cat(parts), "layers.1.attention.qkv.weight"
    box = ((5, 60), (3, 29))
    values = torch.full((60, 30), 9.0)
    made.read_pieces(name, values, source.specs[name], [Piece(box, (2, 1))])
    assert (values[2:57, 1:27] - whole[5:60, 3:29]).abs().max() < 1e-6
    assert values[:2].eq(9).all()
    assert values[57:].eq(9).all()


def test_the_output_is_not_the_adapter(originals, tmp_path, monkeypatch, capsys):
    base, _, adapter, _ = originals["llama", "rslora"]
    model = megazoo.lora.load(megazoo.from_pretrained(base), adapter)
    megazoo.lora.save(model, tmp_path / "mine")
    arguments = base, tmp_path / "mine", "--adapter", tmp_path / "mine", "--overwrite"
    code, _, told = run_main(merge_shards, monkeypatch, capsys, *arguments)
    assert code == 2
    assert "is also the input: choose another output" in told
    assert sorted(file.name for file in (tmp_path / "mine").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip


PROMPT = ["--prompt", "def f(", "--max-new-tokens", "12", "--temperature", "1", "--seed", "3"]


@pytest.fixture(scope="module")
def with_tokenizer(originals, tokenizer, tmp_path_factory):
    """Directories of a model with a tokenizer, of its adapters, and of both merged by PEFT."""
    root = tmp_path_factory.mktemp("run")
    hf = base_model("llama")
    hf.resize_token_embeddings(len(tokenizer))
    hf.generation_config.eos_token_id = None
    model = with_adapters(hf, **settings_for("llama", "patterns"))
    for directory, what in (("hf", hf), ("adapter", model), ("merged", None)):
        (what or model.merge_and_unload()).save_pretrained(root / directory)
        tokenizer.save_pretrained(root / directory)
    return root


def test_generate_with_an_adapter(with_tokenizer, monkeypatch, capsys):
    """The text is that of PEFT's merged model, and not the base's, in this process and in two."""
    root, texts = with_tokenizer, {}
    for name, arguments in {
        "merged": [root / "merged"],
        "base": [root / "hf"],
        "adapter": [root / "hf", "--adapter", root / "adapter"],
    }.items():
        code, out, told = run_main(generate, monkeypatch, capsys, *arguments, *PROMPT)
        assert code == 0, told
        texts[name] = out.rpartition("\n12 new tokens")[0] or out.rpartition("\n")[0]
    assert texts["adapter"] == texts["merged"] != texts["base"]
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["tools/generate.py", root / "hf", "--adapter", root / "adapter", *PROMPT]
    command += ["--pp", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(texts["adapter"])


@pytest.mark.parametrize("tool", [generate, merge_shards], ids=["generate", "merge_shards"])
def test_an_adapter_that_is_none(with_tokenizer, tmp_path, monkeypatch, capsys, tool):
    root, output = with_tokenizer, [tmp_path / "out"] if tool is merge_shards else PROMPT
    for adapter, lacks in (
        (tmp_path / "x", "is not a directory"),
        (root / "hf", "it lacks adapter_"),
    ):
        arguments = root / "hf", *output, "--adapter", adapter
        code, _, told = run_main(tool, monkeypatch, capsys, *arguments)
        assert code == 2
        assert told.count("\n") == 1
        assert lacks in told
