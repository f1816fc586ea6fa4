"""The static check gives no finding for models without mistakes, and finds missing and doubled
sums, without processes."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES, tiny_preset
from megazoo.layers import RMSNorm, RowParallelLinear, linear, norm
from megazoo.lora import LoRASettings
from megazoo.lora.settings import every_target
from megazoo.models.counts import whole_model
from megazoo.models.registry import find_config
from megazoo.parallel import regions
from megazoo.parallel.context import ParallelContext
from megazoo.programs import check_parallel as tool
from megazoo.testing import check_types, gallery, shrink
from megazoo.testing.gallery.planting import replaced, replaced_everywhere
from megazoo.testing.type_mode import Type, TypeMode, joined
from tests.support.sampling import marked_slow

LAYOUTS = ["tp2", "tp2+sp", "tp4", "pp2v2", "tp2cp2", "tp2cp2+ulysses", "dp2+zero"]
QUICK = {("llama", "tp2+sp"), ("gpt2", "tp2cp2"), ("mpt", "tp4"), ("mixtral", "tp2ep2+sp")}
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
CASES += [("mixtral", "ep2"), ("mixtral", "tp2ep2+sp")]


def adapters_of(config) -> LoRASettings:
    return LoRASettings(2, 2, targets=every_target(whole_model(config)))


def small(family: str, layers: int = 1):
    return replace(shrink(find_config(tiny_preset(family))), layers=layers)


@pytest.mark.parametrize(
    ("family", "layout"), marked_slow(CASES, lambda _, case: case not in QUICK)
)
def test_models_without_mistakes_have_no_findings(family, layout):
    assert check_types(small(family, 4), layout) == []


@pytest.mark.parametrize(
    ("family", "layout"), [("llama", "tp2"), ("llama", "tp2+sp"), ("mixtral", "tp2ep2+sp")]
)
def test_adapters_have_no_findings(family, layout):
    config = small(family)
    assert check_types(config, layout, attached=adapters_of(config)) == []


def test_a_layout_larger_than_this_machine_is_checked():
    assert check_types("llama-7b", "tp8pp16cp4dp64") == []


# Bugs of the gallery, by their titles, and the beginning of the first finding.
FOUND = {
    "A row-parallel layer's missing sum": "module layers.0.attention.output: a part of a sum over "
    "tp is added to layers.0.attention.output.bias",
    "A column-parallel layer's missing sum in backward": "gradient of norm.bias (and of ",
    "A norm of queries with the moments of a rank's own heads": "module layers.0.attention.q_norm: "
    "a tensor-parallel region gets a tensor that differs",
    "Gradients of replicated KV heads not summed": "gradient of layers.0.attention.qkv.weight",
    "Norms' gradients not summed under sequence parallelism": "gradient of norm.weight (and of ",
    "Adapter's output summed with the layer's and before it": "module layers.0.attention.output."
    "lora: a part of a sum over tp is added to a tensor",
    "Adapter's replicated factor whose gradient is never summed": "gradient of layers.0.mlp.down."
    "lora.down.B (and of ",
    "Expert adapter's inner activations summed over tp, and its output again": "module layers.0."
    "moe.down.lora: a part of a sum over tp is added to a tensor",
}


@pytest.mark.parametrize("title", FOUND)
def test_bugs_of_the_gallery_are_found(title):
    bug = gallery.named(title)
    with bug.plant():
        config = replace(bug.config, layers=1)
        attached = adapters_of(config) if bug.lora_rank else None
        findings = check_types(config, bug.layout, attached=attached)
    assert findings[0].startswith(FOUND[title])


def doubled():
    """A row-parallel layer's output is summed twice."""

    def make(leave):
        return lambda x, ctx: leave(leave(x, ctx), ctx)

    return replaced(linear, "leave_tensor_parallel", make)


def bias_before_the_sum():
    """The bias is added to each rank's part."""

    def make(_):
        def forward(self, x, recompute=None):
            x = recompute(x) if recompute else x
            return regions.leave_tensor_parallel(F.linear(x, self.weight, self.bias), self.ctx)

        return forward

    return replaced(RowParallelLinear, "forward", make)


def part_without_sum():
    """Under sequence parallelism, a rank takes its part of the sequence of its own summand."""

    def make(_):
        return lambda x, ctx: x.chunk(ctx.tp_size, dim=-2)[ctx.tp_rank]

    return replaced(linear, "leave_tensor_parallel", make)


def embedding_without_sum():
    """The ranks' parts of the vocabulary are not summed."""
    return replaced_everywhere("leave_tensor_parallel_in_place", lambda _: lambda x, ctx: x)


def norm_without_sync():
    """A norm uses its weight without a sum of its gradient under sequence parallelism."""

    def make(_):
        return lambda self, x: norm.rms_norm(x, self.weight, self.eps)

    return replaced(RMSNorm, "forward", make)


def summed_over_cp_in_backward():
    """The gradient of a norm is summed over cp in backward, and again after it."""

    def make(_):
        def forward(self, x):
            weight = regions._CopyToTensorParallel.apply(self.weight, self.ctx.cp_group)
            return norm.rms_norm(x, weight, self.eps)

        return forward

    return replaced(RMSNorm, "forward", make)


@contextmanager
def another_collective_on_the_last_rank():
    """Only one rank sums."""

    def make(forward):
        def summing(self, x, *others, **options):
            if self.ctx.tp_rank:
                regions.summed(self.weight, self.ctx.tp_group)
            return forward(self, x, *others, **options)

        return summing

    with replaced(RowParallelLinear, "forward", make):
        yield


@pytest.mark.parametrize(
    ("plant", "layout", "told"),
    [
        (doubled, "tp2", "module layers.0.attention.output: a tensor is summed over tp, and is "),
        (bias_before_the_sum, "tp2", "module layers.0.attention.output: a part of a sum over tp "),
        (part_without_sum, "tp2+sp", "module layers.0.mlp_norm: "),
        (embedding_without_sum, "tp2", "module layers.0.attention_norm: its input differs on the"),
        (norm_without_sync, "tp2+sp", "gradient of norm.weight (and of "),
        (summed_over_cp_in_backward, "cp2", "gradient of norm.weight (and of "),
        (another_collective_on_the_last_rank, "tp2", "stage 0: tp ranks 0 and 1 call different "),
    ],
)
def test_planted_mistakes_are_found(plant, layout, told):
    config = small("gpt2" if plant is bias_before_the_sum else "llama")
    with plant():
        findings = check_types(config, layout)
    assert findings[0].startswith(told)


def test_an_error_of_a_layer_is_a_finding():
    def make(_):
        return lambda self, x, recompute=None: x

    with replaced(RowParallelLinear, "forward", make):
        (finding, *_) = check_types(small("llama"), "tp2")
    assert "the run on meta ends with RuntimeError" in finding


def test_types_of_operators():
    mode = TypeMode(ParallelContext.virtual(tp=2))
    with torch.device("meta"), mode:
        x, cut = torch.empty(4, 4), torch.empty(4, 4)
        mode.set_type(cut, tp=Type.VARYING)
        part = cut @ cut
        both = torch.zeros(2, 4, 4)
        both[0].copy_(cut)
        known = {"x": x, "x @ x": x @ x, "x @ cut": x @ cut, "part": part, "part * x": part * x}
        known |= {"part + part": part + part, "part.sum": part.sum(), "view": part[0], "both": both}
    assert {name: mode.type_of(tensor, "tp").value for name, tensor in known.items()} == {
        "x": "replicated",
        "x @ x": "replicated",
        "x @ cut": "varying",
        "part": "partial",
        "part * x": "partial",
        "part + part": "partial",
        "part.sum": "partial",
        "view": "partial",
        "both": "varying",
    }
    assert mode.findings == []
    with torch.device("meta"), mode:
        part.exp()
        assert mode.findings == ["exp gets a part of a sum over tp: the sum is missing before it"]
    assert joined(Type.REPLICATED, Type.PARTIAL) is Type.PARTIAL
    assert joined(Type.VARYING, Type.PARTIAL) is Type.VARYING


def test_the_program_prints_a_line_per_layout(capsys):
    tool.main(["--types", "--model", "llama", "--shrink", "--layouts", "pp2,dp2"])
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["pp2", "pass"], ["dp2", "pass"]]


def test_the_program_fails_and_names_the_cause(capsys):
    with doubled(), pytest.raises(UserError, match="1 of 1 layouts failed") as raised:
        tool.main(["--types", "--model", "llama", "--shrink", "--layouts", "tp2"])
    assert raised.value.exit_code == 1
    assert "tp2                     FAIL  module layers.0.attention.output: a tensor is summed" in (
        capsys.readouterr().out
    )


def test_no_process_group_and_no_process_are_started():
    with (
        mock.patch("torch.distributed.init_process_group") as group,
        mock.patch("subprocess.Popen") as process,
    ):
        assert check_types(small("llama", 2), "pp2") == []
    assert not group.called
    assert not process.called


def test_flags_of_training_are_refused():
    with pytest.raises(UserError, match="--types trains no steps"):
        tool.main(["--types", "--model", "llama", "--steps", "4"])
