"""The check of layouts: it passes for every preset, and names the place of each of a list of
planted bugs."""

import random
import re
import textwrap
from dataclasses import replace
from functools import cache

import pytest
from test_tools import run

from megazoo.errors import UserError
from megazoo.models.registry import FAMILIES, find_config
from megazoo.testing import Layout, all_layouts, check_parallel, shrink

PRESETS = [preset for family in FAMILIES.values() for preset in family.presets]

# In each file of a bug: a function is replaced in every module that has imported it.
REPLACE = """
import sys
def replace(name, make):
    for key, module in list(sys.modules.items()):
        if key.startswith("megazoo.") and name in vars(module):
            setattr(module, name, make(vars(module)[name]))
"""
# What breaks, where it must be noticed, and how it must be told.
BUGS = {
    "a missing all-reduce": (
        "gpt2",
        "tp2",
        r"module layers\.0\.attention\.output: its output differs on ranks 0 .*, 1",
        """
        from megazoo.layers import linear
        linear.leave_tensor_parallel = lambda x, ctx: x
        """,
    ),
    "a missing all-reduce in backward": (
        "gpt2",
        "tp2",
        r"gradient of norm\.bias: differs at step 1 on ranks 0 .*, 1",
        """
        replace("enter_tensor_parallel", lambda enter: lambda x, ctx: x)
        """,
    ),
    "a wrong slice of the fused QKV": (
        "gpt2",
        "tp2",
        r"module layers\.0\.attention\.output: its input differs on ranks 0 .*, 1",
        """
        from megazoo.parallel.shard import Cut, Shard
        cuts = Shard.cuts
        def contiguous(self, tp_size, tp_rank):
            if tp_size == 1 or len(self.parts) != 3:
                return cuts(self, tp_size, tp_rank)
            each, first = self.parts[0] // tp_size, tp_rank * sum(self.parts) // tp_size
            return [Cut(first + part * each, part * each, each, True) for part in range(3)]
        Shard.cuts = contiguous
        """,
    ),
    "a bias added tp times": (
        "gpt2",
        "tp2",
        r"module layers\.0\.attention\.output: its output differs on ranks 0 .*, 1",
        """
        from megazoo.layers import RowParallelLinear
        forward = RowParallelLinear.forward
        def biased(self, *arguments):
            return forward(self, *arguments) + (self.ctx.tp_size - 1) * self.bias
        RowParallelLinear.forward = biased
        """,
    ),
    "a local layer index": (
        "gpt2",
        "pp2",
        r"module layers\.2\.attention\.output: its input differs on rank 1",
        """
        from dataclasses import replace
        from megazoo.layers import CausalSelfAttention
        from megazoo.models.gpt2 import GPT2
        init = GPT2.__init__
        def scaled(self, *arguments):
            init(self, *arguments)
            for index, layer in enumerate(self.layers.values()):
                layer.attention.scale /= index + 1
        GPT2.__init__ = scaled
        """,
    ),
    "an unscaled loss": (
        "gpt2",
        "dp2",
        r"loss: .* instead of .*, though no module's output differs",
        """
        import torch
        from megazoo.engine import pipeline
        reduce = pipeline.all_reduce
        calls = []
        def forgets_the_labels(tensor, group):
            calls.append(tensor)
            if len(calls) % 2 == 0:
                reduce(tensor, group)
        pipeline.all_reduce = forgets_the_labels
        """,
    ),
    "gradients that are not divided by the loss scale": (
        "gpt2",
        "dp2",
        r"loss scale: every gradient is 2 x what it should be",
        """
        from megazoo.parallel.buckets import GradientBuckets
        finish = GradientBuckets.finish
        def doubled(self, loss_scale=1.0):
            finish(self, loss_scale / self.ctx.dp_size)
        GradientBuckets.finish = doubled
        """,
    ),
    "a double tied gradient": (
        "gpt2",
        "pp2",
        r"tie: the gradient of embedding\.weight, which stages share, is 2 x what it should be",
        """
        def twice(between):
            def summed(tensor, *arguments):
                between(tensor, *arguments)
                between(tensor, *arguments)
            return summed
        replace("sum_between_stages", twice)
        """,
    ),
    "ALiBi slopes not sliced": (
        "mpt",
        "tp2",
        r"module layers\.0\.attention\.output: its input differs on rank 1 ",
        """
        from megazoo.layers import CausalSelfAttention
        heads = CausalSelfAttention.heads.fget
        CausalSelfAttention.heads = property(lambda self: range(len(heads(self))))
        """,
    ),
    "queries normalised with the moments of a rank's own heads": (
        replace(find_config("mpt"), qk_norm=True),
        "tp2",
        r"module layers\.0\.attention\.q_norm: its output differs on ranks 0 .*, 1",
        """
        from megazoo.layers import norm
        norm.reduce_from_tensor_parallel = lambda x, ctx: x * ctx.tp_size
        """,
    ),
    "dropout in step across dp": (
        "gpt2",
        "dp2",
        r"dropout embedding_dropout: the same masks on ranks 0 .*, 1",
        """
        from megazoo.engine import batch
        derive_seed = batch.derive_seed
        batch.derive_seed = lambda *what: derive_seed(*what[:-1])
        """,
    ),
    "a norm that counts copies twice": (
        "gpt2",
        "tp2",
        r"gradient norm: .* instead of .* at step 1, though no gradient differs",
        """
        from megazoo.parallel.module import Entry
        Entry.counted_pieces = lambda self, ctx: self.spec.pieces(ctx.tp_size, ctx.tp_rank)
        """,
    ),
    "a norm's gradient not summed under sequence parallelism": (
        "llama",
        "tp2+sp",
        r"gradient of norm\.weight: differs at step 1 on ranks 0 .*, 1 .*, and of 8 more",
        """
        replace("sum_over_copies", lambda _: lambda *_: None)
        """,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_named(bug, tmp_path):
    model, layout, told, code = BUGS[bug]
    (tmp_path / "bug.py").write_text(REPLACE + textwrap.dedent(code))
    config = find_config(model) if isinstance(model, str) else model
    (verdict,) = check_parallel(shrink(config), [layout], import_=tmp_path / "bug.py")
    assert re.match(told, verdict.cause or "it passed"), verdict


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_pass(preset):
    """Shrunk; of the layouts of four ranks some."""
    config = shrink(find_config(preset))
    layouts = random.Random(preset).sample(all_layouts(config, 4), 2)
    assert [verdict.cause for verdict in check_parallel(config, layouts)] == [None, None]


@cache
def dealt_layouts() -> dict[str, list[Layout]]:
    """All layouts of eight ranks, each for one preset of every family, in turns among those that
    can be cut so."""
    hands = {preset: [] for preset in PRESETS}
    for family in FAMILIES.values():
        fitting = {
            preset: set(all_layouts(shrink(find_config(preset)), 8)) for preset in family.presets
        }
        for number, layout in enumerate(sorted(set().union(*fitting.values()), key=str)):
            able = [preset for preset in fitting if layout in fitting[preset]]
            hands[able[number % len(able)]].append(layout)
    return hands


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_families_pass_in_all_layouts(preset):
    layouts = dealt_layouts()[preset]
    assert len(layouts) > 5
    for verdict in check_parallel(shrink(find_config(preset)), layouts):
        assert verdict.passed, f"{verdict.layout}: {verdict.cause}"


FAILS = """
from megazoo.layers import linear
leave = linear.leave_tensor_parallel
def fails(x, ctx):
    if ctx.tp_size > 1:
        raise RuntimeError("ranks can't sum")
    return leave(x, ctx)
linear.leave_tensor_parallel = fails
"""


def test_the_tool_prints_a_table_and_exits_with_1_if_a_layout_fails(tmp_path):
    passing = run("check_parallel.py", "--model", "gpt2", "--shrink", "--layouts", "dp2+zero")
    assert passing.returncode == 0, passing.stderr
    assert re.search(r"^dp2\+zero +\d\.\de.\d\d  \d.* - .*  pass$", passing.stdout, re.MULTILINE), (
        passing.stdout
    )
    (tmp_path / "bug.py").write_text(FAILS)
    done = run(
        "check_parallel.py", "--model", "gpt2", "--layouts", "tp2", "--import", tmp_path / "bug.py"
    )
    assert (done.returncode, done.stderr) == (
        1,
        "check_parallel.py: error: 1 of 1 layouts failed\n",
    )
    assert "FAIL  it ends with RuntimeError: ranks can't sum" in done.stdout


def test_shrinking_keeps_the_structure():
    for preset in PRESETS:
        config, small = find_config(preset), shrink(find_config(preset))
        for name in (
            "heads",
            "kv_heads",
            "tie_embeddings",
            "alibi",
            "qk_norm",
            "activation",
            "rope_scaling",
        ):
            assert getattr(small, name, None) == getattr(config, name, None)
        assert small.vocab_size * small.hidden_size * small.layers < 1e6


def test_layouts_by_name():
    for name in ("tp2", "tp2pp4dp2v2+sp+zero", "pp4+zb-h1", "dp8+zero"):
        assert str(Layout.named(name)) == name
    assert Layout.named("pp2tp4") == Layout(tp=4, pp=2)
    for name in ("", "tp", "tp0", "tp2 pp2", "tp2+fast", "2"):
        with pytest.raises(UserError, match="unknown layout"):
            Layout.named(name)
    layouts = all_layouts(shrink(find_config("gpt2")), 8)
    assert len(set(layouts)) == len(layouts) > 80
    assert Layout.named("tp2pp2dp2+sp+zero+zb-h1") in layouts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --model, --preset and --load"),
        (("--model", "gpt2", "--layouts", "tp2,x"), "unknown layout 'x'"),
        (("--model", "gpt2", "--layouts", "tp3"), "tp3: "),
        (("--model", "gpt2", "--layouts", "dp5"), "dp5: dp 5 must divide the 24 rows of the check"),
        (
            ("--model", "gpt2", "--layouts", "tp1+sp"),
            "tp1+sp: sequence parallelism needs tp above 1",
        ),
        (
            ("--model", "gpt2", "--layouts", "pp2v2+zb-h1"),
            "pp2v2+zb-h1: schedule zb-h1 has one stage a rank",
        ),
        (("--model", "gpt2", "--steps", "0"), "steps 0 must be at least 1, and ranks 4 at least 2"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message):
    done = run("check_parallel.py", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"check_parallel.py: error: {message}")
    assert done.stderr.count("\n") == 1
