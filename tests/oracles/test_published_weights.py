"""Directories of weights as people have them: read as transformers reads them, or named, with what
to do."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import megazoo
from megazoo.checkpoint.foreign import what_is
from megazoo.errors import UserError
from megazoo.models.pretrained import open_source
from megazoo.tokenizer import open_tokenizer
from tests.support.families import config_of, twin
from tests.support.layouts import in_layout
from tests.support.training import context
from tests.support.transformers_models import gpt2, llama

IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(2))
INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n"


def logits_of(path, layout=None):
    ctx = context(**layout) if layout else None
    with torch.no_grad():
        return megazoo.from_pretrained(path, ctx)(IDS, return_logits=True).logits


def close(ours, theirs) -> bool:
    return (ours - theirs).abs().max() < 1e-5 * theirs.abs().max().clamp(min=1)


@torch.no_grad()
def test_a_tensor_that_the_index_lacks_is_read(tmp_path):
    """A head that differs from the embedding, in a shard whose index does not list it."""
    hf = llama(tie_embeddings=True)
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    file = tmp_path / index["weight_map"]["model.norm.weight"]
    state = load_file(file)
    head = torch.randn(61, hf.config.hidden_size, generator=torch.Generator().manual_seed(1))
    save_file({**state, "lm_head.weight": head}, file)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert close(logits_of(tmp_path), theirs(IDS).logits)
    assert not close(theirs(IDS).logits, hf(IDS).logits)
    save_file({**state, "model.unknown.weight": head}, file)
    with pytest.raises(UserError, match=r"has the unexpected model\.unknown\.weight"):
        megazoo.from_pretrained(tmp_path)
    # The index decides about a tensor that is in two files.
    other = next(name for name in index["weight_map"] if index["weight_map"][name] != file.name)
    save_file({**state, other: head}, file)
    assert close(logits_of(tmp_path), hf(IDS).logits)
    file_of_other = tmp_path / index["weight_map"][other]
    for path in (file, file_of_other):
        save_file({**load_file(path), "lm_head.weight": head}, path)
    with pytest.raises(UserError, match=r"has lm_head\.weight, which .* has, too: remove one of"):
        megazoo.from_pretrained(tmp_path)
    (tmp_path / INDEX).write_text(POINTER)
    with pytest.raises(UserError, match=rf"{INDEX} is a pointer of Git LFS"):
        megazoo.from_pretrained(tmp_path)
    for name in ("..", "", "a/b"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {other: name}}))
        with pytest.raises(UserError, match="names a file outside its directory: '"):
            megazoo.from_pretrained(tmp_path)


STACKED = ["mixtral", "qwen2_moe, dense between", "qwen3_moe, wide heads", "olmoe"]


@pytest.mark.parametrize("name", STACKED)
@torch.no_grad()
def test_stacked_experts_are_read(name, ranks, tmp_path):
    """As transformers 5 writes them without the original format."""
    hf = twin(name)
    hf.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert close(logits_of(tmp_path), hf(IDS).logits)
    if name == STACKED[-1]:
        results = in_layout(ranks, logits_of, "tp2", tmp_path)
        assert all(close(logits, hf(IDS).logits) for logits in results)


@torch.no_grad()
def test_bin_files_from_before_torch_1_6_are_read(tmp_path):
    hf = gpt2()
    hf.config.save_pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(hf.state_dict(), file, _use_new_zipfile_serialization=False)
    assert close(logits_of(tmp_path), hf(IDS).logits)
    torch.save({"a": print}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"pytorch_model\.bin can't be read"):
        megazoo.from_pretrained(tmp_path)


def test_pointers_of_git_lfs_are_named(tmp_path):
    config_of("mistral, window").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text(POINTER)
    (tmp_path / "tokenizer.json").write_text(POINTER)
    (tmp_path / "data.jsonl").write_text(POINTER)
    (tmp_path / "model.gguf").write_text(POINTER)
    train = ["--steps", "1", "--data", str(tmp_path / "data.jsonl")]
    for call, name in (
        (lambda: megazoo.from_pretrained(tmp_path), "model.safetensors"),
        (lambda: open_tokenizer(tmp_path), "tokenizer.json"),
        (lambda: open_source(tmp_path / "model.gguf"), "model.gguf"),
        (lambda: megazoo.pretrain.main(train), "data.jsonl"),
    ):
        with pytest.raises(UserError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
            call()


def make(path, *names):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("global_step7" if name == "latest" else "{}")
    return path


FOREIGN = {
    "the output of Trainer": (
        ["checkpoint-500/config.json", "checkpoint-1000/config.json", "all_results.json"],
        "", "checkpoints of a training with transformers: pass .*checkpoint-1000$",
    ),
    "the hub's cache": (
        ["models--a--b-c/refs/main", "version.txt"],
        "", "the cache of the Hugging Face hub: pass the name of a model, such as a/b-c",
    ),
    "a folder of the hub's cache": (
        ["models--a--b-c/snapshots/12ab/config.json", "models--a--b-c/blobs/x"],
        "models--a--b-c", "folder of the Hugging Face hub's cache: pass a/b-c or .*snapshots/12ab",
    ),
    "DeepSpeed": (["latest", "global_step7/mp_rank_00_model_states.pt"], "", "DeepSpeed.*zero_to_"),
    "a step of DeepSpeed": (
        ["global_step7/mp_rank_00_model_states.pt"], "global_step7", "is a checkpoint of DeepSpeed"
    ),
    "distributed checkpoints": (
        [".metadata", "__0_0.distcp"], "", "distributed.checkpoint without a config.json: copy"
    ),
    "nanoGPT": (["ckpt.pt"], "", "has ckpt.pt, a checkpoint of another program: load it with"),
    "its file": (["ckpt.pt"], "ckpt.pt", "is a checkpoint of another program: load it with"),
    "Meta's weights": (["consolidated.00.pth", "params.json"], "", "has consolidated.00.pth, a"),
    "weights alone": (["model.safetensors"], "", "has weights but no config.json: copy the mod"),
    "a file of weights": (
        ["model.safetensors", "config.json"], "model.safetensors", "is a file of a model: pass its"
    ),
    "its config": (["config.json"], "config.json", "is a file of a model: pass its directory"),
}  # fmt: skip


def test_what_is_no_model_is_named_with_what_to_do(tmp_path):
    for number, (case, (names, place, told)) in enumerate(FOREIGN.items()):
        path = make(tmp_path / str(number), *names) / place
        with pytest.raises(UserError, match=told) as refused:
            megazoo.from_pretrained(path)
        assert "neither" not in str(refused.value), case
    assert what_is(make(tmp_path / "other", "readme.txt")) == ""
    assert what_is(tmp_path / "absent") == ""
