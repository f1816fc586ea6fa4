"""The check of layouts: it passes for every preset, and tells mistakes of users. The bugs that it
finds are in test_gallery.py."""

import random
import re
from unittest import mock

import pytest
import torch.nn.functional as F

from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES
from megazoo.losses import Loss
from megazoo.models.registry import find_config
from megazoo.parallel.sequence import SequenceCut
from megazoo.programs import check_parallel as tool
from megazoo.testing import Layout, all_layouts, check_parallel, shrink
from megazoo.testing.batches import make_batch
from tests.support.programs import run_tool
from tests.support.sampling import commit_seed, marked_slow

PRESETS = [preset for family in FAMILIES.values() for preset in family.presets]


@pytest.mark.parametrize("preset", marked_slow(PRESETS, lambda _, preset: preset != "mistral-tiny"))
def test_presets_pass(preset):
    """Shrunk; in one of the layouts of four ranks."""
    config = shrink(find_config(preset))
    layout = random.Random(preset).choice(all_layouts(config, 4))
    assert [verdict.cause for verdict in check_parallel(config, [layout])] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_pass_in_layouts_of_eight_ranks(preset):
    """A few of a preset's layouts, of which there are 25 to 300: each commit draws others."""
    config = shrink(find_config(preset))
    drawn = random.Random(f"{commit_seed()} {preset}").sample(all_layouts(config, 8), 3)
    for verdict in check_parallel(config, drawn):
        assert verdict.passed, f"{verdict.layout}: {verdict.cause}"


@pytest.mark.slow
def test_an_overflow_of_experts_is_found_on_a_replica_that_does_not_count():
    """Under ep the norm counts only the first replica of each expert."""
    config = shrink(find_config("mixtral-tiny"))
    assert [verdict.cause for verdict in check_parallel(config, ["dp4ep2"])] == [None]


@pytest.mark.parametrize(
    ("model", "loss", "layout", "lora_rank"),
    marked_slow(
        [
            ("gpt2", "distill", "tp2", 2),
            ("mixtral", "dpo", "tp2ep2", 0),
            ("gpt2", "distill", "tp2", 0),
            ("gpt2", "dpo", "cp2", 0),
            ("gpt2", "dpo", "pp2", 2),
            ("mixtral", "distill", "cp2ep2", 0),
        ],
        lambda number, _: number > 0,
    ),
)
def test_a_loss_passes(model, loss, layout, lora_rank):
    config = shrink(find_config(f"{model}-tiny"))
    (verdict,) = check_parallel(config, [layout], loss=loss, lora_rank=lora_rank)
    assert verdict.passed, verdict.cause


def pairs_counted_on_every_cp_rank():
    return mock.patch.object(Loss, "counted_once", lambda _, value: value)


def test_a_wrong_loss_is_found():
    how = {"loss": "dpo", "within": pairs_counted_on_every_cp_rank}
    (verdict,) = check_parallel(shrink(find_config("gpt2-tiny")), ["cp2"], **how)
    assert re.match("loss: .* though no module's output differs", verdict.cause or "")


def test_an_unknown_loss_is_one_line():
    with pytest.raises(UserError, match="--loss ppo is not registered: use lm, distill, dpo"):
        next(check_parallel("gpt2", ["tp2"], loss="ppo"))


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
    (tmp_path / "bug.py").write_text(FAILS)
    arguments = ("--model", "gpt2", "--shrink", "--layouts", "dp2+zero,tp2", "--import")
    done = run_tool("check_parallel.py", *arguments, tmp_path / "bug.py")
    found = done.returncode, done.stderr
    assert found == (1, "check_parallel.py: error: 1 of 2 layouts failed\n"), done.stdout
    passing = r"^dp2\+zero( +\d\.\de.\d\d){4}  pass$"
    assert re.search(passing, done.stdout, re.MULTILINE), done.stdout
    assert "FAIL  it ends with RuntimeError: ranks can't sum" in done.stdout


def test_shrinking_keeps_the_structure():
    for preset in PRESETS:
        config, small = find_config(preset), shrink(find_config(preset))
        kept = "heads kv_heads tie_embeddings alibi qk_norm activation rope_scaling"
        for name in kept.split():
            assert getattr(small, name, None) == getattr(config, name, None)
        assert small.vocab_size * small.hidden_size * small.layers < 1e6


OF_CONTEXT = (
    "cp2 cp4 tp2cp2 tp2cp2+sp cp2pp2v2 cp2pp2+zb-h1 cp2+zero cp2dp2 cp2+ulysses "
    "tp2cp2pp2dp2v2+sp+zero+ulysses"
).split()


def test_layouts_by_name():
    for name in ("tp2", "tp2pp4dp2v2+sp+zero", "pp4+zb-h1", "dp8+zero", *OF_CONTEXT):
        assert str(Layout.named(name)) == name
    assert Layout.named("pp2tp4") == Layout(tp=4, pp=2)
    assert Layout.named("dp2cp4") == Layout(dp=2, cp=4)
    assert Layout.named("tp2cp3pp2dp5v2").ranks == 60
    for name in ("", "tp", "tp0", "cp", "cp0", "tp2 pp2", "tp2+fast", "2", "cp2cp4"):
        with pytest.raises(UserError, match="unknown layout"):
            Layout.named(name)
    layouts = all_layouts(shrink(find_config("gpt2-tiny")), 8)
    assert len(set(layouts)) == len(layouts) > 80
    assert Layout.named("tp2pp2dp2+sp+zero+zb-h1") in layouts
    for name in OF_CONTEXT[:-1]:
        assert Layout.named(name) in layouts
    assert "tp2cp4+ulysses" not in map(str, layouts)  # two heads on a tp rank


def test_the_three_kinds_of_batches():
    """Packed documents of odd lengths, and padding: on either side, and all that a rank has."""
    _, packed, padded = (make_batch(step, 61, 32) for step in range(3))
    lengths = packed["document_ids"][0].unique_consecutive(return_counts=True)[1].tolist()
    assert lengths == [5, 3, 7, 1]
    expected = [place for length in lengths for place in range(length)]
    assert packed["position_ids"][0].tolist() == expected
    mask, targets = padded["attention_mask"], padded["targets"]
    assert mask.shape == (24, 15)
    assert not (targets[mask == 0] != -100).any()
    in_rows = {"".join(map(str, row)) for row in mask[6:].tolist()}
    assert in_rows == {"1" * 15, "1" * 12 + "0" * 3, "0" * 4 + "1" * 11}
    whole = F.pad(mask, (0, 1))
    for cp in (2, 4):
        assert not SequenceCut(16, cp, 0, "allgather").own(whole)[:6].any()


MISTAKES = {
    "": "use exactly one of --model, --preset and --load",
    "--model gpt2 --layouts tp2,x": "unknown layout 'x'",
    "--model gpt2 --layouts tp3": "tp3: ",
    "--model gpt2 --layouts dp5": "dp5: dp 5 must divide the 24 rows of the check",
    "--model gpt2 --layouts tp1+sp": "tp1+sp: sequence parallelism needs tp above 1",
    "--model gpt2 --layouts tp2+ulysses": "tp2+ulysses: ulysses needs cp above 1",
    "--model gpt2 --shrink --layouts tp2cp4+ulysses": (
        "tp2cp4+ulysses: cp-method ulysses can't split the 2 heads of a tensor-parallel rank"
    ),
    "--model gpt2 --layouts pp2v2+zb-h1": "pp2v2+zb-h1: schedule zb-h1 supports one stage per rank",
    "--model gpt2 --steps 0": "--steps 0 must be at least 1, and --ranks 4 at least 2",
}


def test_mistakes_are_told_in_one_line(capsys):
    for arguments, message in MISTAKES.items():
        with pytest.raises(UserError) as told:
            tool.main(arguments.split())
        assert str(told.value).startswith(message), arguments
        assert "\n" not in str(told.value), arguments
