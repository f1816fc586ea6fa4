"""Megatron-LM's checkpoints against the models of transformers whose weights they hold, written
here by Megatron-LM's rules; and against Megatron Core itself, where there is one."""

import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import megazoo
from megazoo import pretrain
from megazoo.errors import Advice
from megazoo.formats.megatron.source import MegatronCheckpoint
from megazoo.formats.resharding import write_shards
from megazoo.models.pretrained import open_source
from megazoo.programs import convert, inspect_checkpoint
from tests.support.megatron import (
    TWINS,
    arguments_of,
    megatron_tensors,
    twin,
    write_distributed,
    write_legacy,
)
from tests.support.sampling import marked_slow
from tests.support.training import PeakMemory, context, give_back_freed_memory, in_fresh_processes

IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(2))
ORACLE = Path(__file__).parents[1] / "support" / "megatron_oracle.py"
# A Python that has megatron-core; the suite's own needs none.
MEGATRON_PYTHON = os.environ.get("MEGATRON_PYTHON")
WRITERS = {
    "stacked": write_distributed,
    "stacked, one chunk": lambda *about: write_distributed(*about, in_chunks=False),
    "by layer": lambda *about: write_distributed(*about, stacked=False, prefix="model."),
    "legacy": write_legacy,
    "legacy, tp 2 pp 2": lambda *about: write_legacy(*about, tp=2, pp=2),
    "legacy, interleaved": lambda *about: write_legacy(*about, tp=2, pp=2, virtual=2),
}
CASES = list(product(TWINS, WRITERS, (True, False)))


@cache
def twin_and_logits(name: str):
    hf = twin(name)
    with torch.no_grad():
        return hf, hf(IDS).logits


def write(name: str, writer: str, root: Path, fused_norms: bool = True, **arguments) -> Path:
    tensors = megatron_tensors(twin_and_logits(name)[0], fused_norms)
    return WRITERS[writer](root, tensors, arguments_of(name, **{"vocab_size": 61, **arguments}))


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest logit."""
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


# Fast: every fifth, so that each model meets two writers or three.
@pytest.mark.parametrize(
    ("name", "writer", "fused_norms"),
    marked_slow(CASES, lambda number, _: number % 5 != 0),
)
def test_logits_are_those_of_the_twin(name, writer, fused_norms, tmp_path):
    write(name, writer, tmp_path, fused_norms)
    assert_close(logits_of(megazoo.from_pretrained(tmp_path)), twin_and_logits(name)[1])


@pytest.mark.parametrize("writer", ["stacked", "legacy, tp 2 pp 2"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_tool_writes_shards_and_hugging_faces_files(name, writer, tmp_path, capsys):
    write(name, writer, tmp_path / "megatron", vocab_size=None)
    root, size = str(tmp_path / "megatron"), ["--vocab-size", "61"]
    (tmp_path / "megatron" / "tokenizer.json").write_text("{}")
    convert.main([root, str(tmp_path / "shards"), "--tp", "2", "--pp", "2", *size])
    assert len(list((tmp_path / "shards").glob("model_tp_*_pp_*.safetensors"))) == 4
    assert (tmp_path / "shards" / "tokenizer.json").read_text() == "{}"
    convert.main([root, str(tmp_path / "hf"), "--to", "hf", *size])
    hf, logits = twin_and_logits(name)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for tensor, value in hf.state_dict().items():
        assert torch.equal(again[tensor], value), tensor
    assert_close(logits_of(megazoo.from_pretrained(tmp_path / "shards")), logits)
    one = [root, str(tmp_path / "bf16"), "--iteration", "100", "--dtype", "bfloat16", *size]
    convert.main(one)
    assert open_source(tmp_path / "bf16").dtype_of("norm.weight") == torch.bfloat16
    assert "wrote" in capsys.readouterr().out


def on_ranks(directory: Path):
    return logits_of(megazoo.from_pretrained(directory, context(tp=2, pp=2)))


def test_ranks_read_their_parts(ranks, tmp_path):
    write("qwen3", "stacked", tmp_path)
    results = [logits for logits in ranks(on_ranks, 4, tmp_path) if logits is not None]
    for logits in results:
        assert_close(logits, twin_and_logits("qwen3")[1])
    assert results


def test_training_goes_on_from_it(tmp_path):
    write("llama", "stacked", tmp_path / "megatron")
    sizes = "--seq-length 16 --global-batch-size 2 --micro-batch-size 2 --eval-steps 0 --steps 1"
    words = [*sizes.split(), "--lr", "1e-4", "--mock-data", "--device", "cpu", "--dtype", "float32"]
    pretrain.main([*words, "--load", str(tmp_path / "megatron"), "--save", str(tmp_path / "run")])
    assert open_source(tmp_path / "run").config == open_source(tmp_path / "megatron").config


def test_inspecting_tells_what_it_is(tmp_path, capsys):
    write("llama", "legacy", tmp_path)
    inspect_checkpoint.main([str(tmp_path), "--verify"])
    told = capsys.readouterr().out
    assert "llama" in told
    assert "model_optim_rng.pt" in told


def test_the_padded_vocabulary_is_told_where_nothing_says_the_true_one(tmp_path):
    write("llama", "stacked", tmp_path, vocab_size=None)
    with pytest.warns(Advice, match="to have 64 tokens"):
        assert MegatronCheckpoint(tmp_path).config.vocab_size == 64
    assert MegatronCheckpoint(tmp_path, vocab_size=60).config.vocab_size == 60


def test_norms_that_add_one(tmp_path):
    hf, logits = twin_and_logits("gpt")
    tensors = megatron_tensors(hf)
    less = {name: value - 1 for name, value in tensors.items() if name.endswith("norm_weight")}
    less["decoder.final_layernorm.weight"] = tensors["decoder.final_layernorm.weight"] - 1
    arguments = arguments_of("gpt", vocab_size=61, apply_layernorm_1p=True)
    write_distributed(tmp_path, tensors | less, arguments)
    assert_close(logits_of(megazoo.from_pretrained(tmp_path)), logits)


def convert_large(directory: Path) -> int:
    """Return the peak of memory above the start, of converting to shards."""
    give_back_freed_memory()
    with PeakMemory() as memory:
        write_shards(MegatronCheckpoint(directory), directory.parent / "shards", 2, 2)
    return memory.above


def write_large(root: Path, layers: int) -> None:
    """Write a LLaMA of 66 MB a layer, its layers stacked, and 67 MB for each of both ends."""
    size, ffn = 1024, 4096
    shapes = {
        "self_attention.linear_qkv.layer_norm_weight": (size,),
        "self_attention.linear_qkv.weight": (3 * size, size),
        "self_attention.linear_proj.weight": (size, size),
        "mlp.linear_fc1.layer_norm_weight": (size,),
        "mlp.linear_fc1.weight": (2 * ffn, size),
        "mlp.linear_fc2.weight": (size, ffn),
    }
    tensors = {
        f"decoder.layers.{layer}.{name}": torch.ones(shape)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    tensors["embedding.word_embeddings.weight"] = torch.ones(16384, size)
    tensors["output_layer.weight"] = torch.ones(16384, size)
    tensors["decoder.final_layernorm.weight"] = torch.ones(size)
    sizes = {"num_layers": layers, "hidden_size": size, "ffn_hidden_size": ffn, "kv_channels": 256}
    sizes |= {"num_query_groups": 4, "vocab_size": 16384}
    write_distributed(root, tensors, arguments_of("llama", **sizes))


@pytest.mark.parametrize("layers", [2, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_pieces_move_one_at_a_time(layers, tmp_path):
    write_large(tmp_path, layers)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    (peak,) = in_fresh_processes(convert_large, tmp_path, timeout=600)
    print(f"{written / 1e6:.0f} MB on disk, peak {peak / 1e6:.0f} MB")
    assert written > layers * 66e6
    assert peak < (32 << 20) + (64 << 20)  # the largest chunk, half an embedding, and 64 MB


@pytest.mark.slow
@pytest.mark.skipif(not MEGATRON_PYTHON, reason="MEGATRON_PYTHON names no Python")
def test_logits_are_those_of_megatron_core(tmp_path):
    ranks = [
        subprocess.Popen([MEGATRON_PYTHON, ORACLE, tmp_path, str(rank), "2"]) for rank in range(2)
    ]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    cases = sorted(path.parent for path in tmp_path.glob("*/logits.pt"))
    assert len(cases) == 9
    for case, kind in product(cases, ("dist", "legacy")):
        told = torch.load(case / "logits.pt")
        with torch.no_grad():
            logits = megazoo.from_pretrained(case / kind).eval()(told["ids"]).logits
        print(f"{case.name}, {kind}: {(logits - told['logits']).abs().max():.1e}")
        assert_close(logits, told["logits"])
