"""Hugging Face directories in and out, against transformers: the same tensors, the same logits, in
any layout."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint, save
from megazoo.cli.program import run_program
from megazoo.errors import UserError
from megazoo.formats.hugging_face.directory import HuggingFaceDirectory
from megazoo.formats.hugging_face.export import parse_size
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from megazoo.programs import convert, inspect_checkpoint
from tests.support.scripts import merge_shards
from tests.support.training import context, make_batch
from tests.support.transformers_models import LLAMA_SIZES, ROPE, gpt2, llama, mpt

TOOLS = Path(__file__).parents[2] / "tools"


IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(2))


MODELS = {
    "gpt2": gpt2,
    "gpt2, untied": lambda: gpt2(tie_word_embeddings=False, n_inner=48),
    "llama": lambda: llama(
        kv_heads=2, attention_bias=True, mlp_bias=True, rope_scaling=ROPE["llama3"]
    ),
    "llama, tied, wide heads": lambda: llama(kv_heads=1, head_size=12, tie_embeddings=True),
    "mpt": mpt,
    "mpt, untied": lambda: mpt(tie_word_embeddings=False),
}


def same_tensors(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_through_two_layouts_is_bit_for_bit(name, tmp_path):
    hf = MODELS[name]()
    hf.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    convert.main([str(tmp_path / "hf"), str(tmp_path / "a"), "--tp", "2", "--pp", "3"])
    assert len(list((tmp_path / "a").glob("model_tp_*_pp_*.safetensors"))) == 6
    convert.main([str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "4"])
    merge_shards.main([str(tmp_path / "b"), str(tmp_path / "merged"), "--max-shard-size", "20KB"])
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    theirs = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert index["metadata"] == theirs["metadata"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert same_tensors(hf, again)
    with torch.no_grad():
        expected = hf(IDS).logits
        assert (again(IDS).logits - expected).abs().max() < 5e-5
        for directory in ("hf", "a", "b", "merged"):
            logits = megazoo.from_pretrained(tmp_path / directory).eval()(IDS).logits
            assert (logits - expected).abs().max() < 5e-5


def logits_and_saves(layout, directory):
    model = megazoo.from_pretrained(directory / "hf", context(**layout)).eval()
    with torch.no_grad():
        logits = model(IDS).logits
    model.save_parallelized(directory / "shards")
    model.save_parallelized(directory / "shards")  # in place of the first
    model.save_parallelized(directory / "merged", merge_checkpoints=True, max_shard_size=20_000)
    return logits


@pytest.mark.parametrize("layout", [dict(tp=2, pp=2), dict(tp=2, dp=2, sp=True)], ids=str)
def test_ranks_read_and_write_together(ranks, layout, tmp_path):
    hf = llama(kv_heads=2, tie_embeddings=True)
    hf.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = hf(IDS).logits
    results = ranks(logits_and_saves, 4, layout, tmp_path)
    assert max((logits - expected).abs().max() for logits in results if logits is not None) < 5e-5
    assert same_tensors(hf, AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "merged", "shards"]
    whole = dict(megazoo.from_parallelized(tmp_path / "shards").named_parameters())
    for name, parameter in megazoo.from_pretrained(tmp_path / "hf").named_parameters():
        assert torch.equal(whole[name], parameter)


def test_bin_files_prefixes_and_legacy_buffers(tmp_path):
    hf = gpt2()
    hf.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = {
        name.removeprefix("transformer."): t
        for name, t in hf.state_dict().items()
        if name != "lm_head.weight"
    }
    for layer in range(3):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24)
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(state, tmp_path / "pytorch_model.bin")
    of_one_file = megazoo.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert (of_one_file(IDS).logits - hf(IDS).logits).abs().max() < 5e-5
    names = list(state)
    parts = {
        "pytorch_model-00001-of-00002.bin": names[:10],
        "pytorch_model-00002-of-00002.bin": names[10:],
    }
    for file, group in parts.items():
        torch.save({name: state[name] for name in group}, tmp_path / file)
    (tmp_path / "pytorch_model.bin").unlink()
    where = {name: file for file, group in parts.items() for name in group}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    assert same_tensors(megazoo.from_pretrained(tmp_path), of_one_file)


def test_ties_as_transformers_takes_them(tmp_path):
    hf = llama(tie_embeddings=True)
    hf.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    both = {**state, "lm_head.weight": state[embedding].clone()}
    save_file(both, tmp_path / "model.safetensors")
    assert megazoo.from_pretrained(tmp_path).config.tie_embeddings
    save_file(
        {**both, "lm_head.weight": both["lm_head.weight"] + 1}, tmp_path / "model.safetensors"
    )
    assert not megazoo.from_pretrained(tmp_path).config.tie_embeddings
    only_head = {name: tensor for name, tensor in both.items() if name != embedding}
    save_file(only_head, tmp_path / "model.safetensors")
    assert torch.equal(megazoo.from_pretrained(tmp_path).embedding.weight, state[embedding])


def edited(tmp_path, name, change):
    """A directory whose tensors went through `change`."""
    MODELS[name]().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    return HuggingFaceDirectory(tmp_path)


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    for name, change, message in (
        ("llama", lambda s: s.pop("model.norm.weight"),
         "lacks model.norm.weight: its tensors do not match the Llama"),
        ("llama", lambda s: s.pop("lm_head.weight"), "lacks lm_head.weight"),
        ("llama", lambda s: s.update(x=torch.ones(1)), "has the unexpected x"),
        ("mpt", lambda s: s.update({f"{i}": torch.ones(1) for i in range(7)}),
         "0, 1, 2, 3, 4 and 2 more"),
        ("gpt2", lambda s: s.update({"h.0.attn.c_attn.masked_bias": torch.ones(1)}),
         "unexpected h.0.attn.c_attn"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            edited(tmp_path, name, change)
    with pytest.raises(
        UserError,
        match=r"transformer.wte.weight has shape \[60, 32\], but in the model .* \[61, 32\]",
    ):
        edited(tmp_path, "gpt2", lambda s: s.update({"transformer.wte.weight": torch.ones(60, 32)}))


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("/tmp/megazoo-was-here"),)


def test_what_is_dangerous_is_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(
        UserError, match=r"names a file outside its directory: '../elsewhere.safetensors'"
    ):
        HuggingFaceDirectory(tmp_path)
    index.write_text("[]")
    with pytest.raises(UserError, match=r"index\.json holds a list, but must hold a JSON"):
        HuggingFaceDirectory(tmp_path)
    index.unlink()
    torch.save({"x": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin can't be read"):
        HuggingFaceDirectory(tmp_path)
    assert not Path("/tmp/megazoo-was-here").exists()
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="has no weights: it must contain one of model"):
        HuggingFaceDirectory(tmp_path)


def test_what_transformers_cannot_compute_is_not_written(tmp_path):
    for settings, message in (
        ({"alibi_bias_max": 16.0}, "alibi_bias_max 16.0: transformers' MPT has 8.0 only"),
        ({"qk_norm": True}, "qk_norm True"),
        ({"kv_heads": 2}, "kv_heads 2: transformers' MPT has 4 only"),
        ({"bias": True}, "bias True"),
        ({"alibi": False}, "alibi False"),
        ({"logit_scale": 0.5}, "logit_scale 0.5: transformers' MPT has None only"),
    ):
        sizes = dict(vocab_size=61, max_positions=32, hidden_size=32, layers=1, heads=4)
        model = megazoo.from_config(MPTConfig(**sizes, **settings))
        with pytest.raises(UserError, match=message):
            model.save_parallelized(tmp_path / "x", merge_checkpoints=True)
        assert not (tmp_path / "x").exists(), message


def test_optimizer_state_is_resharded_and_training_goes_on(tmp_path):
    model = megazoo.from_config(
        LlamaConfig(**LLAMA_SIZES, kv_heads=2), seed=3, dtype=torch.bfloat16
    )
    optimizer = megazoo.optim.AdamW(model)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    optimizer.step()
    save(tmp_path / "run", 1, model, optimizer, {"consumed_samples": 8})
    convert.main([str(tmp_path / "run"), str(tmp_path / "cut"), "--tp", "4", "--pp", "2"])
    before, after = Checkpoint(tmp_path / "run"), Checkpoint(tmp_path / "cut")
    assert after.trainer == before.trainer
    assert after.tensors.keys() == before.tensors.keys()
    for entry in model.entries():
        for name in (
            entry.name,
            *(f"{entry.name}.{state}" for state in before.states_of(entry.name)),
        ):
            tensors = [torch.zeros(entry.spec.shape, dtype=before.dtype_of(name)) for _ in range(2)]
            for source, tensor in zip((before, after), tensors, strict=True):
                source.read_into(name, tensor, entry.spec, model.ctx)
            assert torch.equal(*tensors), name
    after.verify()
    half = ["--tp", "2", "--dtype", "float16"]
    convert.main([str(tmp_path / "run"), str(tmp_path / "half"), *half])
    rounded = Checkpoint(tmp_path / "half")
    for entry in model.entries():
        states = {rounded.dtype_of(f"{entry.name}.{s}") for s in before.states_of(entry.name)}
        assert (rounded.dtype_of(entry.name), states) == (torch.float16, {torch.float32})


def test_pretraining_starts_from_hugging_faces_weights(tmp_path):
    sizes = {"vocab_size": 257, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=0, bos_token_id=0)).save_pretrained(
        tmp_path / "hf"
    )
    common = (
        "--seq-length 32 --global-batch-size 4 --micro-batch-size 2 --eval-steps 0 --device cpu "
        "--dropout 0 --lr 1e-3"
    ).split()
    metrics = tmp_path / "metrics"
    run = [*common, "--steps", "1", "--metrics", str(metrics), "--save", str(tmp_path / "run")]
    pretrain.main([*run, "--load", str(tmp_path / "hf")])
    convert.main([str(tmp_path / "hf"), str(tmp_path / "shards"), "--tp", "2"])
    pretrain.main([*run, "--load", str(tmp_path / "shards"), "--load-weights-only"])
    pretrain.main([*run, "--load", str(tmp_path / "run"), "--load-weights-only"])
    first, again, trained = (json.loads(line) for line in metrics.read_text().splitlines())
    assert first["loss"] == again["loss"] != trained["loss"]
    assert trained["step"] == 1


def one_line(monkeypatch, capsys, tool, *arguments):
    capsys.readouterr()  # transformers' own bars
    monkeypatch.setattr(sys, "argv", [f"{Path(tool.__file__).name}", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        run_program(tool.main)
    return stop.value.code, capsys.readouterr().err


def test_tools_tell_mistakes_in_one_line(tmp_path, monkeypatch, capsys):
    llama(kv_heads=2).save_pretrained(tmp_path / "hf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    hf, full, none, out = (tmp_path / name for name in ("hf", "full", "none", "x"))
    for tool, arguments, message in (
        (convert, (), "the argument SOURCE is required (see --help)"),
        (convert, (hf,), "the argument OUTPUT is required (see --help)"),
        (convert, (hf, full), f"{full} is not empty: choose another, or pass --overwrite"),
        (convert, (hf, out, "--tp", 3),
         "heads 4 with kv-heads 2 can't be sharded over tp 3: use tp 1, 2 or 4, or use --pp 3"),
        (convert, (none, out), f"{none} is not a directory"),
        (merge_shards, (full, out),
         f"{full} is not a checkpoint: it has neither latest nor megazoo.json, nor config.json"),
        (merge_shards, (hf, out, "--max-shard-size", "lots"),
         "'lots' is not a size such as 5GB or 200MB"),
        (inspect_checkpoint, (none,), f"{none} is not a directory"),
    ):  # fmt: skip
        assert one_line(monkeypatch, capsys, tool, *arguments) == (
            2,
            f"{Path(tool.__file__).name}: error: {message}\n",
        )
    assert not (tmp_path / "x").exists()


def test_inspect_finds_a_flipped_byte(tmp_path, monkeypatch, capsys):
    llama(kv_heads=2).save_pretrained(tmp_path / "hf")
    convert.main([str(tmp_path / "hf"), str(tmp_path / "a"), "--tp", "2"])
    inspect_checkpoint.main([str(tmp_path / "hf"), "--verify"])
    inspect_checkpoint.main([str(tmp_path / "a"), "--verify"])
    output = capsys.readouterr().out
    for words in ("llama, ", "tp 2 x pp 1 x dp 1", "all files match their checksums"):
        assert words in output
    assert "all files are readable" in output
    file = tmp_path / "a" / "model_tp_1_pp_0.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    code, line = one_line(monkeypatch, capsys, inspect_checkpoint, tmp_path / "a", "--verify")
    assert code == 1
    told = f"{file} is corrupt: its checksum does not match megazoo.json"
    assert line == f"inspect_checkpoint.py: error: {told}\n"
    file.write_bytes(data[:-1])
    code, line = one_line(monkeypatch, capsys, inspect_checkpoint, tmp_path / "a", "--verify")
    assert code == 1
    assert f"{file} has {len(data) - 1} bytes, but megazoo.json has {len(data)}" in line


def test_sizes():
    sizes = {"5GB": 5 * 10**9, "200 MB": 2 * 10**8, "1GiB": 1 << 30, "1000": 1000, "1.5kb": 1500}
    assert {text: parse_size(text) for text in sizes} == sizes
