"""Activation recomputation: the same numbers from fewer saved tensors."""

import sys

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig
from tests.support.training import (
    PeakMemory,
    give_back_freed_memory,
    in_fresh_processes,
    make_batch,
    randomize,
)

SIZES = {"vocab_size": 61, "max_positions": 16, "hidden_size": 32, "layers": 5, "heads": 4}
CONFIGS = {
    "gpt2": GPT2Config(**SIZES, embedding_dropout=0.1, attention_dropout=0.1, residual_dropout=0.1),
    "llama": LlamaConfig(**SIZES, kv_heads=2, ffn_size=48),
    "mpt": MPTConfig(**SIZES, qk_norm=True, attention_dropout=0.1),
}
MODES = [("selective",), ("full",), ("full", 2)]


def gradients(config, recompute):
    model = randomize(megazoo.from_config(config, seed=3)).recompute(*recompute)
    ids, targets = make_batch(0)
    loss = model.train_batch(ids, targets=targets, num_microbatches=2, step=1)
    return loss, {entry.name: entry.parameter.grad.clone() for entry in model.entries()}


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_the_same_with_dropout(family):
    loss, expected = gradients(CONFIGS[family], ("none",))
    for mode in MODES:
        again, ours = gradients(CONFIGS[family], mode)
        assert torch.equal(loss, again), mode
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-8, rtol=1e-5)


def saved_bytes(config, recompute):
    """Bytes of the tensors, parameters aside, that one forward and loss save for backward."""
    model = megazoo.from_config(config).recompute(*recompute)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = 0

    def pack(tensor):
        nonlocal total
        if tensor.untyped_storage().data_ptr() not in parameters:
            total += tensor.numel() * tensor.element_size()
        return tensor

    ids = torch.randint(0, 61, (4, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids)
    return total


@pytest.mark.parametrize("config", [GPT2Config, LlamaConfig, MPTConfig])
def test_saved_tensors_shrink(config):
    sizes = dict(vocab_size=61, max_positions=64, hidden_size=64, layers=12, heads=4, ffn_size=256)
    rates = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0)
    config = config(**sizes, **(rates if config is GPT2Config else {}))
    none, selective, full = (saved_bytes(config, (mode,)) for mode in ("none", "selective", "full"))
    assert selective <= 0.75 * none
    assert full <= 0.25 * none
    assert saved_bytes(config, ("full", 3)) < full


def peak_of_training(mode) -> int:
    """Bytes above the level before the step."""
    give_back_freed_memory()
    sizes = dict(
        vocab_size=61, max_positions=256, hidden_size=128, layers=12, heads=4, ffn_size=512
    )
    model = megazoo.from_config(LlamaConfig(**sizes)).recompute(mode)
    ids = torch.randint(0, 61, (8, 256))
    model.train_batch(ids[:1], labels=ids[:1])  # the gradients' memory
    with PeakMemory() as peak:
        model.train_batch(ids, labels=ids)
    return peak.above


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_the_peak_of_resident_memory_falls():
    none, selective, full = (
        in_fresh_processes(peak_of_training, mode)[0] for mode in ("none", "selective", "full")
    )
    assert full < 0.5 * none
    assert full < selective < none


def test_an_unknown_mode_is_refused():
    with pytest.raises(
        UserError, match="unknown recompute mode 'some'; supported: none, selective, full"
    ):
        megazoo.from_config("gpt2-tiny").recompute("some")
