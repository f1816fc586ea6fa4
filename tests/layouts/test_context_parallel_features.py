"""Context parallelism with everything else that trains: losses, norms and gradients of one
process."""

from dataclasses import replace
from functools import cache

import pytest

from tests.support.context_parallel import batch_of, cp_name, trained, worst_difference
from tests.support.sampling import pairs_covered
from tests.support.training import MODELS, tiny_config, world

CONFIGS = {
    "gpt2": tiny_config(layers=2),
    "gpt2, untied": tiny_config(tied=False, layers=2),
    "gpt2, 5 heads": tiny_config(layers=2, hidden_size=40, heads=5),
    "llama": replace(MODELS["llama"], layers=2),
    "llama, 6 heads": replace(MODELS["llama"], layers=2, hidden_size=48, heads=6, kv_heads=3),
    "llama, one KV head": replace(MODELS["llama, one KV head"], layers=2),
    "llama, dynamic": replace(
        MODELS["llama"], layers=2, max_positions=8,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    ),
    "mpt": replace(MODELS["mpt"], layers=2),  # clip_qkv, qk_norm, 2 KV heads
    "mpt, learned positions": replace(MODELS["mpt, learned positions"], layers=2),
}  # fmt: skip
ULYSSES = {"method": "ulysses"}
NO_EMBEDDING, HEAD_ALONE = r"^(?!embedding)", r"^head"
# In the first layer no query, key or value has a gradient; in the second they have, and no weight.
KEYS_WITHOUT_GRADIENT = r"layers\.0\.(?!attention\.qkv)|^norm|^head"
EVERYTHING = "documents, padding"

# model, what the batch has, layout, how it trains
CASES = {
    "dp": ("gpt2", "plain", dict(dp=2, cp=2), {}),
    "dp, ulysses": ("llama", EVERYTHING, dict(dp=2, cp=2, **ULYSSES), {}),
    "zero": ("llama", "plain", dict(cp=2), {"zero": 1}),
    "zero, dp": ("mpt", "documents", dict(dp=2, cp=2), {"zero": 1}),
    "zero, offload": ("gpt2", "plain", dict(cp=2), {"zero": 1, "offload": True}),
    "offload, tp": ("llama", "padding", dict(tp=2, cp=2), {"offload": True}),
    "selective": ("mpt", EVERYTHING, dict(tp=2, cp=2, sp=True), dict(recompute=("selective",))),
    "full, every 2": ("llama", "documents", dict(cp=2), dict(recompute=("full", 2))),
    "full, ulysses": ("gpt2", "padding", dict(cp=2, **ULYSSES), dict(recompute=("full", 2))),
    "accumulation": ("llama", EVERYTHING, dict(cp=4), {"count": 4}),
    "embedding frozen": ("llama", "plain", dict(cp=2), dict(train=NO_EMBEDDING)),
    "head alone": ("gpt2, untied", "padding", dict(cp=2, pp=2), dict(train=HEAD_ALONE)),
    "keys without gradient": ("llama", "plain", dict(cp=2), dict(train=KEYS_WITHOUT_GRADIENT)),
    "keys without gradient, ulysses": (
        "gpt2, untied", "plain", dict(cp=2, **ULYSSES), dict(train=KEYS_WITHOUT_GRADIENT),
    ),
    "tied over stages": ("gpt2", "padding", dict(pp=2, cp=2), {}),
    "untied over stages": ("gpt2, untied", "documents", dict(pp=2, cp=2, **ULYSSES), {}),
    "zero bubble": ("gpt2", EVERYTHING, dict(pp=2, cp=2), {"schedule": "zb-h1"}),
    "norms over tp": ("mpt", "plain", dict(tp=2, cp=2), {}),
    "norms over tp, ulysses": ("mpt", EVERYTHING, dict(tp=2, cp=2, **ULYSSES), {}),
    "one KV head": ("llama, one KV head", "documents", dict(cp=4, **ULYSSES), {}),
    "one KV head, tp": ("llama, one KV head", "plain", dict(tp=2, cp=2, **ULYSSES), {}),
    "uneven heads, cp 3": ("gpt2, 5 heads", "documents", dict(cp=3, **ULYSSES), {}),
    "uneven heads, keys": ("gpt2, 5 heads", "plain", dict(tp=2, cp=2, sp=True), {}),
    "positions": ("llama", "positions, padding", dict(cp=2), {}),
    # the longest document has 9 tokens: the scaling is for those, not for 13
    "restarting positions": ("llama, dynamic", "documents, restarting", dict(pp=2, cp=2), {}),
    "learned positions": ("mpt, learned positions", "positions", dict(pp=2, cp=2), {}),
}  # fmt: skip


@cache
def one_process(model: str, kind: str, train: str | None):
    return trained(CONFIGS[model], {}, batches(kind), model={"train": train})


def batches(kind: str) -> list[dict]:
    return [batch_of(step, kind) for step in range(3)]


def check(ranks, model, kind, layout, how):
    how = dict(how)
    of_model = {name: how.pop(name) for name in ("train", "recompute") if name in how}
    given = CONFIGS[model], layout, batches(kind)
    results = ranks(trained, world(layout), *given, model=of_model, **how)
    assert all(theirs == results[0][0] for theirs, _ in results), "ranks disagree"
    worst, what = worst_difference(results, one_process(model, kind, of_model.get("train")))
    assert worst < 1e-5, what


@pytest.mark.parametrize("name", CASES)
def test_cp_trains_like_one_process_with(ranks, name):
    check(ranks, *CASES[name])


PAIRS = pairs_covered(
    list(CONFIGS),
    ["plain", EVERYTHING, "positions"],
    [dict(cp=2), dict(tp=2, cp=2, sp=True), dict(pp=2, cp=2), dict(dp=2, cp=2), dict(cp=3)],
    [{}, ULYSSES],
    [{}, {"zero": 1, "recompute": ("full", 2)}, {"recompute": ("selective",)}],
)
# tp 2 can't cut three heads of keys
SWEEP = [case for case in PAIRS if case[0] != "llama, 6 heads" or "tp" not in case[2]]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind", "layout", "method", "how"), SWEEP, ids=cp_name)
def test_cp_trains_like_one_process_in_all_pairs_of_cases(ranks, model, kind, layout, method, how):
    check(ranks, model, kind, layout | method, how)
