"""tools/convert_megatron.py: shards and Hugging Face directories, what it refuses, that nothing of
a file is called, and what memory it takes."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import context, run_in_layout
from helpers_megatron import TWINS, arguments_of, megatron_tensors, write_distributed, write_legacy
from test_megatron import IDS, close, expected
from transformers import AutoModelForCausalLM

import megazoo
from megazoo.errors import UserError

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import convert_megatron  # noqa: E402

NAMES = list(TWINS)[:3]


def written(name, root, write=write_distributed, **more):
    write(root, megatron_tensors(expected(name)[0], True), arguments_of(name, **more))
    return root


def logits_in(directory, layout):
    with torch.no_grad():
        return megazoo.from_pretrained(directory, context(**layout)).eval()(IDS).logits


@pytest.mark.parametrize("write", [write_distributed, write_legacy])
@pytest.mark.parametrize("name", NAMES)
def test_to_shards_and_to_hugging_face(ranks, name, write, tmp_path):
    source = written(name, tmp_path / "megatron", write, vocab_size=61)
    convert_megatron.main([str(source), str(tmp_path / "hf"), "--hugging-face"])
    convert_megatron.main([str(source), str(tmp_path / "shards"), "--tp", "2", "--pp", "2"])
    with torch.no_grad():
        assert close(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(IDS).logits, name)
    for directory in ("megatron", "shards"):
        for logits in run_in_layout(ranks, logits_in, dict(tp=2, pp=2), tmp_path / directory):
            assert logits is None or close(logits, name)


def test_the_vocabulary_is_cut_at_its_true_size(tmp_path):
    source = written("llama", tmp_path / "megatron")
    convert_megatron.main([str(source), str(tmp_path / "a"), "--vocab-size", "61"])
    assert close(logits_in(tmp_path / "a", {}), "llama")
    with pytest.raises(UserError, match="vocab"):
        convert_megatron.main([str(source), str(tmp_path / "b"), "--vocab-size", "100000"])
    assert not (tmp_path / "b").exists()


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("file", ["common.pt", ".metadata", "model_optim_rng.pt"])
def test_a_pickle_that_calls_anything_is_refused(file, tmp_path):
    write = write_legacy if file.startswith("model") else write_distributed
    source = written("llama", tmp_path / "megatron", write, vocab_size=61)
    (place,) = source.rglob(file)
    marker = tmp_path / "called"
    if file == ".metadata":
        place.write_bytes(pickle.dumps({"a": Evil(marker)}))
    else:
        torch.save({"args": Evil(marker), "model": {}}, place)
    with pytest.raises(UserError, match="system") as error:
        convert_megatron.main([str(source), str(tmp_path / "out")])
    assert "\n" not in str(error.value)
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


UNKNOWN = {
    "experts": "decoder.layers.0.mlp.experts.linear_fc1.weight",
    "router": "decoder.layers.0.mlp.router.weight",
    "latent": "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
    "another": "decoder.layers.0.self_attention.novelty.weight",
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_unknown_is_refused_by_name(what, tmp_path):
    tensors = megatron_tensors(expected("llama")[0], True) | {UNKNOWN[what]: torch.ones(4, 4)}
    write_distributed(
        tmp_path / "megatron", tensors, arguments_of("llama", vocab_size=61), stacked=False
    )
    with pytest.raises(UserError, match=UNKNOWN[what].split(".")[-2]):
        convert_megatron.main([str(tmp_path / "megatron"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_damaged_directories(tmp_path):
    source = written("llama", tmp_path / "megatron", vocab_size=61)
    chunk = next(source.rglob("*.distcp"))
    chunk.write_bytes(chunk.read_bytes()[:100])
    with pytest.raises(UserError) as error:
        convert_megatron.main([str(source), str(tmp_path / "out")])
    assert "\n" not in str(error.value)
    (source / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(UserError):
        convert_megatron.main([str(source), str(tmp_path / "out")])
    with pytest.raises(UserError):
        convert_megatron.main([str(tmp_path / "nothing"), str(tmp_path / "out")])


MEASURE = """
import resource, sys
import convert_megatron, megazoo.models, safetensors.torch
megazoo.models.find_config("llama-tiny")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_megatron.main(sys.argv[1:])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_memory_is_a_chunk_and_a_little(tmp_path):
    """1 GB, in chunks of which the largest has 16.8 MB (a layer's half of fc1)."""
    arguments = arguments_of("llama", vocab_size=4096) | dict(
        num_layers=24, hidden_size=1024, num_attention_heads=8, num_query_groups=8,
        ffn_hidden_size=2048, padded_vocab_size=4096, kv_channels=128,
    )  # fmt: skip
    tensors = {
        "embedding.word_embeddings.weight": torch.ones(4096, 1024),
        "decoder.final_layernorm.weight": torch.ones(1024),
        "output_layer.weight": torch.ones(4096, 1024),
    }
    for layer in range(24):
        at = f"decoder.layers.{layer}."
        tensors |= {
            f"{at}self_attention.linear_qkv.layer_norm_weight": torch.ones(1024),
            f"{at}self_attention.linear_qkv.weight": torch.ones(3072, 1024),
            f"{at}self_attention.linear_proj.weight": torch.ones(1024, 1024),
            f"{at}mlp.linear_fc1.layer_norm_weight": torch.ones(1024),
            f"{at}mlp.linear_fc1.weight": torch.ones(4096, 1024),
            f"{at}mlp.linear_fc2.weight": torch.ones(1024, 2048),
        }
    assert sum(tensor.nbytes for tensor in tensors.values()) > 0.98e9
    write_distributed(tmp_path / "megatron", tensors, arguments)
    del tensors
    told = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "megatron"), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    peak = int(told.stdout.split()[-1])
    assert peak < 64e6 + 4096 * 1024 * 4, f"{peak:,}"
    about = json.loads((tmp_path / "out" / "megazoo.json").read_text())
    assert about["family"] == "llama"
