"""Steps of fixed shapes whose attention reads pages, without a mask, generate what other steps do;
and where a mask is needed, there is one."""

import pytest
import torch

import megazoo
from megazoo.models.gemma2 import Gemma2Config
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mistral import MistralConfig
from megazoo.models.mpt import MPTConfig
from megazoo.models.qwen2 import Qwen2Config
from megazoo.torch_internals import takes_pages
from tests.support.generation import prompts
from tests.support.pages import WHY_NOT, by_hand, logits_of_steps, pages
from tests.support.static_steps import static_steps
from tests.support.training import randomize

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
SIZES = {"vocab_size": 61, "max_positions": 600, "hidden_size": 32, "layers": 2, "heads": 4}
GROUPS = {**SIZES, "kv_heads": 2, "ffn_size": 48}
NEW = 12
BEAMS = {"num_beams": 3, "length_penalty": 2.0}
SAMPLES = {"do_sample": True, "num_return_sequences": 2, "seed": 3}
CONFIGS = {
    "heads": GPT2Config(**SIZES),
    "groups": LlamaConfig(**GROUPS),
    "window of a page": MistralConfig(**GROUPS, window=256),
    "small window in one layer": Qwen2Config(**GROUPS, window=5, full_layers=1),
}


def model_of(config):
    return randomize(megazoo.from_config(config, seed=3))


def generated(model, length, rows=3, mask=None, **settings):
    ids, padding = prompts(batch=rows, length=length)
    return model.generate(ids, padding if mask else None, max_new_tokens=NEW, **settings)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("settings", [{}, BEAMS, SAMPLES], ids=["greedy", "beams", "samples"])
def test_pages_generate_the_same(name, settings):
    """Past 64 tokens, and past 256, where a window comes round and others have two pages."""
    model = model_of(CONFIGS[name])
    for length, slots in ((60, {256}), (250, {512} if name != "window of a page" else {256})):
        expected = generated(model, length, **settings)
        with pages() as seen, static_steps(graphs=True) as steps:
            assert torch.equal(generated(model, length, **settings), expected), length
        assert {capture for _, capture, _ in steps} == {1}
        assert set(seen[1:]) == slots  # the first is the trial
        layers = 1 if name == "small window in one layer" else 2
        assert len(seen) == 1 + layers * (NEW - 1 + 1)  # the capture runs, too


@pytest.mark.parametrize(
    ("config", "mask"),
    [
        (CONFIGS["groups"], True),
        (MPTConfig(**SIZES), False),
        (Gemma2Config(**GROUPS, head_size=8, window=16), False),
    ],
    ids=["padding", "ALiBi", "soft cap"],
)
def test_masks_remain_where_they_are_needed(config, mask):
    model = model_of(config)
    expected = generated(model, 60, mask=mask)
    with pages() as seen, static_steps(graphs=True) as steps:
        assert torch.equal(generated(model, 60, mask=mask), expected)
    assert len(seen) <= 1  # the trial
    assert {capture for _, capture, _ in steps} == {1, 2}  # 64 slots, then 128


@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_of_pages_are_those_of_masks(name):
    model, ids = model_of(CONFIGS[name]).eval(), prompts(batch=3, length=262)[0]
    with pages() as seen:
        by_masks, by_pages = (logits_of_steps(model, ids, 250, paged) for paged in (False, True))
    torch.testing.assert_close(by_pages, by_masks, atol=2e-6, rtol=1e-5)
    assert len(seen) == 12 * (1 if name == "small window in one layer" else 2)


def test_a_prefix_of_all_rows_keeps_what_it_had():
    """With ALiBi the prefix has a mask, and so have the steps, by 64 and 128 slots; without it,
    pages."""
    for config, captures in ((MPTConfig(**SIZES), {1, 2}), (CONFIGS["groups"], {1})):
        model, ids = model_of(config), prompts(batch=3, length=60)[0]
        ids[:, :30] = ids[0, :30]
        plain = model.generate(ids, max_new_tokens=NEW)
        with pages() as seen, static_steps(graphs=True) as steps:
            assert torch.equal(model.generate(ids, max_new_tokens=NEW), plain)
        assert (len(seen) > 1) is (captures == {1})
        assert {capture for _, capture, _ in steps} == captures


def test_fp32_has_no_pages():
    with pages(dtypes=(torch.bfloat16,)) as seen, static_steps():
        generated(model_of(CONFIGS["groups"]), 60)
    assert not seen


def test_the_trial():
    cpu = torch.device("cpu")
    assert not takes_pages(cpu, torch.bfloat16), "torch has no kernel"
    takes_pages.cache_clear()

    def all_slots(*given, seqused_k, **options):
        full = torch.full_like(seqused_k, given[1].shape[1])
        return by_hand(*given, seqused_k=full, **options)

    def other_heads(q, *given, **options):
        return by_hand(q.flip(1), *given, **options)

    def failing(*given, **options):
        raise RuntimeError("no kernel image is available")

    for kernel, works in (
        (by_hand, True),
        *((k, False) for k in (all_slots, other_heads, failing)),
    ):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            with pages(kernel):
                assert takes_pages(cpu, dtype) is works, (kernel, dtype)
