"""Steps of fixed shapes of a compiled model: one graph for all layers and tokens."""

import pytest
import torch

import megazoo
from megazoo.generate import group as groups
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.qwen2 import Qwen2Config
from tests.support.generation import prompts
from tests.support.pages import WHY_NOT, pages
from tests.support.static_steps import static_steps
from tests.support.training import randomize

SIZES = {"vocab_size": 61, "max_positions": 600, "hidden_size": 32, "layers": 2, "heads": 4}
GROUPS = {**SIZES, "kv_heads": 2, "ffn_size": 48}
needs_pages = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))


@pytest.mark.parametrize(
    ("config", "way", "padded", "graphs"),
    [
        pytest.param(LlamaConfig(**GROUPS), "pages", False, 1, marks=needs_pages),
        pytest.param(GPT2Config(**SIZES), "pages", False, 1, marks=[needs_pages, pytest.mark.slow]),
        # for 64 slots and for 128
        pytest.param(LlamaConfig(**GROUPS), "masks", True, 2, marks=pytest.mark.slow),
        pytest.param(
            Qwen2Config(**GROUPS, window=5, full_layers=1), "masks", False, 3,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["pages, groups", "pages", "masks, padded", "masks, windows"],
)  # fmt: skip
def test_steps_compile_once_for_all_layers_and_tokens(monkeypatch, config, way, padded, graphs):
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds

    (ids, mask), settings = prompts(length=60), {"max_new_tokens": 7}
    mask = mask if padded else None
    model = randomize(megazoo.from_config(config, seed=3))
    expected = model.generate(ids, mask, **settings)
    torch._dynamo.reset()
    counter, before = CompileCounterWithBackend("eager"), []
    model.compile(backend=counter)
    begin = groups.Group._begin_steps
    monkeypatch.setattr(
        groups.Group,
        "_begin_steps",
        lambda *given: [before.append(counter.frame_count), begin(*given)],
    )
    torch_has = pages(dtypes=(torch.float32,) if way == "pages" else ())
    with torch_has as calls, static_steps():
        assert torch.equal(model.generate(ids, mask, **settings), expected)
        assert counter.frame_count - before[0] == graphs
        assert torch.equal(model.generate(ids, mask, **settings), expected)
    assert counter.frame_count - before[0] == graphs, "nothing more for other caches"
    assert bool(calls) == (way == "pages")
    torch._dynamo.reset()
