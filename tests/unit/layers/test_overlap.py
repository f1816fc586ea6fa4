"""Linear layers whose backward communicates beside its products, as on CUDA, here over gloo: equal
to the plain ones bit for bit, and in the order that lets the two run together."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megazoo.cli.parsing import CommandLine
from megazoo.layers import ColumnParallelLinear, matmul
from megazoo.parallel import context as context_module
from megazoo.parallel.context import ParallelContext
from tests.support.layouts import case_name
from tests.support.sampling import marked_slow
from tests.support.training import MODELS, context, train_and_keep_gradients, world

CPU = torch.device("cpu")


def overlapped():
    return mock.patch.object(matmul, "hides_communication", return_value=True)


def train_both_ways(*args, **kwargs):
    plain = train_and_keep_gradients(*args, **kwargs)
    entered = mock.patch.object(matmul, "_entered_linears", side_effect=matmul._entered_linears)
    with overlapped(), entered as count:
        return plain, train_and_keep_gradients(*args, **kwargs), count.call_count


CASES = [
    ("gpt2", dict(tp=2), "1f1b", "full"), ("llama", dict(tp=2, sp=True), "1f1b", "selective"),
    ("llama, one KV head", dict(tp=2, pp=2), "zb-h1", "none"),
    # slow
    ("mpt", dict(tp=2, dp=2, sp=True), "1f1b", "full"), ("gpt2", dict(tp=2), "1f1b", "none"),
    ("gpt2", dict(tp=2, pp=2, sp=True), "zb-h1", "none"),
]  # fmt: skip
IN_LAYOUTS = marked_slow(
    CASES, lambda number, _: number not in (1, 2), name=lambda case: "-".join(map(case_name, case))
)


@pytest.mark.parametrize(("model", "layout", "schedule", "recompute"), IN_LAYOUTS)
def test_gradients_are_those_of_the_plain_layers(ranks, model, layout, schedule, recompute):
    options = {"schedule": schedule, "recompute": (recompute,)}
    results = ranks(train_both_ways, world(layout), MODELS[model], layout, 2, **options)
    for (losses, gradients), (ours, our_gradients), count in results:
        assert count
        assert ours == losses
        for expected, step in zip(gradients, our_gradients, strict=True):
            for name, pieces in expected.items():
                for (_, its), (_, mine) in zip(pieces, step[name], strict=True):
                    assert torch.equal(mine, its), name


def order_of_backward(sp, frozen):
    """What a layer's backward begins, computes and waits for, in its order."""
    layer, done = ColumnParallelLinear(8, 12, ctx=context(tp=2, sp=sp)), []
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(2, 6, 8, requires_grad=True)

    def noted(name):
        begin = getattr(matmul, name)

        def run(*args):
            done.append(name)
            wait = begin(*args)
            return lambda: (done.append("wait"), wait())[1]

        return mock.patch.object(matmul, name, run)

    product = matmul._gradients_of_weights

    def weights(*args):
        done.append("weights")
        return product(*args)

    with (
        overlapped(),
        noted("begin_sum"),
        noted("begin_reduce_scatter_sequence"),
        noted("begin_all_gather_sequence"),
        mock.patch.object(matmul, "_gradients_of_weights", weights),
    ):
        layer(x).sum().backward()
    return done


def test_the_weights_gradient_is_computed_while_the_inputs_is_summed(ranks):
    assert ranks(order_of_backward, 2, False, False)[0] == ["begin_sum", "weights", "wait"]


def test_under_sequence_parallelism_the_input_is_gathered_while_its_gradient_is_computed(ranks):
    gather, scatter = "begin_all_gather_sequence", "begin_reduce_scatter_sequence"
    expected = [gather, scatter, "wait", "weights", "wait"]
    assert ranks(order_of_backward, 2, True, False)[0] == expected
    without_the_weights = [scatter, "weights", "wait"]
    assert ranks(order_of_backward, 2, True, True)[0] == without_the_weights


def cuts_the_sequence():
    return [asked_on(device) for device in ("cpu", "cuda")]


def asked_on(device):
    context(tp=2)  # takes the device that there is
    name = "megazoo.parallel.context."
    mesh, groups_of = DeviceMesh.from_group, context_module.groups_of
    with (
        mock.patch(name + "choose_device", return_value=torch.device(device)),
        mock.patch(name + "take"),
        mock.patch(name + "warm_up"),
        mock.patch(name + "groups_of", lambda ranks, _, timeout: groups_of(ranks, CPU, timeout)),
        mock.patch.object(
            DeviceMesh, "from_group", lambda groups, _, **kw: mesh(groups, "cpu", **kw)
        ),
    ):
        return [
            ParallelContext.from_torch(2, sequence_parallel=asked).sequence_parallel
            for asked in (None, False, True)
        ]


def test_unless_told_the_sequence_is_cut_on_cuda(ranks):
    assert ranks(cuts_the_sequence, 2)[0] == [[False, False, True], [True, False, True]]


def test_the_flag_may_be_left_out():
    flags = {"": None, "--sequence-parallel --tp 2": True, "--tp 2 --no-sequence-parallel": False}
    for words, expected in flags.items():
        assert CommandLine.read(words.split()).options().parallel.sequence_parallel is expected, (
            words
        )
