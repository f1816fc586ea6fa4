"""The check of layouts takes models as people write them, and what it tells of a mistake is true in
other layouts than the gallery's."""

import itertools
import os
import re
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from megazoo.engine import pipeline
from megazoo.engine.stage import StageRun
from megazoo.errors import UserError
from megazoo.layers import RowParallelLinear
from megazoo.models import registry
from megazoo.models.gpt2 import GPT2Config
from megazoo.optim.adamw import AdamW
from megazoo.testing import check_parallel, gallery, trial
from megazoo.testing.gallery import BUGS, named
from megazoo.testing.gallery.planting import replaced
from tests.support.programs import run_tool
from tests.support.sampling import marked_slow

SMALL = GPT2Config(vocab_size=61, max_positions=16, hidden_size=16, layers=2, heads=2)
OWN = """
from dataclasses import dataclass
import megazoo, torch
from megazoo.models import llama

class Halved(torch.nn.Module):
    def forward(self, *, x):
        return x / 2

class Size(torch.nn.Module):
    def forward(self, x):
        return x.detach().norm()

class Block(llama.Block):
    def __init__(self, c, index):
        super().__init__(c, index)
        self.halved, self.size, self.both = Halved(), Size(), torch.nn.Identity()

    def forward(self, x, *others, **more):
        x = self.halved(x=super().forward(x, *others, **more))
        return x + 0 * self.size(self.both(x)) * self.both(x[..., :4]).mean()

@dataclass(frozen=True)
class Config(llama.LlamaConfig):
    pass

@megazoo.register("halved")
class HalvedLlama(llama.Llama):
    Config, Block = Config, Block
    presets = {"halved-tiny": Config(
        vocab_size=61, max_positions=16, hidden_size=16, layers=2, heads=2, ffn_size=32)}
"""


def cause_in(layout, plant, config=SMALL, **settings):
    (verdict,) = check_parallel(config, [layout], within=plant, **settings)
    return verdict.cause, verdict.usual


def test_modules_may_be_called_by_name_return_numbers_and_be_shared(tmp_path):
    """All of which ended the check."""
    own = tmp_path / "halved.py"
    own.write_text(OWN)
    done = run_tool("check_parallel.py", "--import", own, "--model", "halved", "--layouts", "tp2")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stages", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_more_stages_than_a_small_model_has_layers(stages):
    (verdict,) = check_parallel(replace(SMALL, layers=stages), [f"pp{stages}"], steps=1)
    assert verdict.passed, verdict.cause


@contextmanager
def one_clue():
    """A bias is added twice, and only the first difference is looked at closely."""
    with mock.patch.object(trial, "CLUES", 1), named("8").plant():
        yield


def test_the_first_difference_is_the_one_that_is_looked_at():
    assert re.match(
        r"module layers.0.attention.output: .* at every token", cause_in("tp2", one_clue)[0]
    )


@contextmanager
def loss_on_one_replica():
    """The second replica keeps its own part of the loss."""
    calls = itertools.count()

    def make(all_reduce):
        def forgetful(tensor, group, **options):
            loss = next(calls) % 2 == 1  # after the labels
            lost = loss and group is not None and group.rank() == 1
            all_reduce(tensor.clone() if lost else tensor, group, **options)

        return forgetful

    with replaced(pipeline, "all_reduce", make):
        yield


def labels_of_its_own_on_one_replica():
    """The second replica divides by its own labels."""

    def make(count_labels):
        def count(model, batches, group, head):
            whole = count_labels(model, batches, group, head)
            return count_labels(model, batches, None, head) if model.ctx.dp_rank else whole

        return count

    return replaced(pipeline, "count_labels", make)


def labels_counted_twice():
    """The labels of all replicas count twice."""

    def make(count_labels):
        return lambda model, *what: count_labels(model, *what) * model.ctx.dp_size

    return replaced(pipeline, "count_labels", make)


def last_micro_batch_twice():
    """The gradient of the head counts the last micro-batch twice."""

    def make(backward):
        def scaled(self, action, factor=1.0):
            last = self.stages[action.stage].last and action.microbatch == 3
            backward(self, action, factor * (1 + last))

        return scaled

    return replaced(StageRun, "backward", make)


def output_halved():
    """A row-parallel layer's output is half of what it should be on the second stage."""

    def make(forward):
        def halved(self, *arguments, **options):
            y = forward(self, *arguments, **options)
            return y * 0.5 if self.ctx.pp_rank else y

        return halved

    return replaced(RowParallelLinear, "forward", make)


def output_shifted():
    """A row-parallel layer adds some of its input to its output on the second stage."""

    def make(forward):
        def shifted(self, x, *arguments, **options):
            y = forward(self, x, *arguments, **options)
            return y + x[..., :1] if self.ctx.pp_rank else y

        return shifted

    return replaced(RowParallelLinear, "forward", make)


REPLICAS = "a sum over the replicas left before the last micro-batch"


@pytest.mark.parametrize(
    ("layout", "plant", "cause", "usual"),
    marked_slow([
        ("dp2", loss_on_one_replica, r"loss: (\S+) instead of (?!\1)\S+ on rank 1 \(", ""),
        ("dp2", labels_of_its_own_on_one_replica, "labels: .* on rank 1 ", "labels are counted on"),
        ("dp2", labels_counted_twice, "labels: the mean is over 402", "the same labels"),
        ("pp2dp2", named("5b").plant, "gradient of norm.bias", REPLICAS),
        ("pp2dp2", named("22").plant, "gradient of norm.bias", REPLICAS),
        ("pp2dp2", named("23").plant, "gradient", "a sum over the replicas left some"),
        ("pp2", last_micro_batch_twice, "gradient of norm.bias", "the loss's gradient lacks"),
        ("pp2", output_halved, "module .*: it is 0.5 x", "(?!.*tp)a number of layers"),
        ("pp2", output_shifted, "module .*: its output differs", "(?!.*tp)the module computes"),
        ("pp2", named("2b").plant, "tie: .* share, differs at step 1", "the sum"),
    ], lambda number, _: number in (1, 2, 3, 4, 5, 8)),
)  # fmt: skip
def test_what_is_told_is_true_in_other_layouts(layout, plant, cause, usual):
    told, usually = cause_in(layout, plant)
    assert re.match(cause, told or ""), (told, usually)
    assert re.match(usual, usually), usually


def one_copy_of_a_tie_not_stepped():
    """The last stage leaves its copy of a tied parameter as it is."""

    def make(update):
        def some(self, entries, *arguments):
            copies = self.model.tied if self.ctx.pp_rank else ()
            update(self, [entry for entry in entries if entry.name not in copies], *arguments)

        return some

    return replaced(AdamW, "_update", make)


def clipping_of_scaled_gradients():
    """The norm by which gradients are clipped has the loss scale in it."""

    def make(clip):
        def clipped(self, norm):
            return clip(self, norm * (self.loss_scale.value if self.loss_scale else 1))

        return clipped

    return replaced(AdamW, "_clip_scale", make)


def ranges_an_element_short():
    """The last element of each replica's range is not stepped."""

    def make(update):
        def short(self, entries, *arguments):
            mine = [self.values_of(entry)[-1:] for entry in entries]
            before = [element.clone() for element in mine]
            update(self, entries, *arguments)
            for element, value in zip(mine, before, strict=True):
                element.copy_(value)

        return short

    return replaced(AdamW, "_update", make)


@pytest.mark.parametrize(
    ("layout", "plant", "usual"),
    [
        ("pp2", one_copy_of_a_tie_not_stepped, "the copies of the parameter are not stepped alike"),
        pytest.param(
            "dp2",
            clipping_of_scaled_gradients,
            "gradients are clipped before the loss scale is",
            marks=pytest.mark.slow,
        ),
        ("dp2+zero", ranges_an_element_short, "a rank's range of the parameters has a wrong end"),
    ],
)
def test_what_makes_weights_differ_is_told(layout, plant, usual):
    told, usually = cause_in(layout, plant)
    assert re.match(r"weights of .* after step 1 .* though no gradient does", told or "")
    assert usually.startswith(usual), usually


SKIPPING = """
from dataclasses import dataclass
import megazoo, random
from megazoo.models import gpt2

@dataclass(frozen=True)
class Config(gpt2.GPT2Config):
    noise: float = 0.0

class Block(gpt2.Block):
    def forward(self, x, *others):
        if noise := self.noise:
            x = x * (1 + noise * random.random())
        return super().forward(x, *others)

@megazoo.register("skipping")
class Skipping(gpt2.GPT2):
    Config, Block = Config, Block
    presets = {"skipping-tiny": Config(
        vocab_size=61, max_positions=16, hidden_size=16, layers=2, heads=2)}

    def __init__(self, config, ctx, seed=0):
        super().__init__(config, ctx, seed)
        for layer in self.layers.values():
            layer.noise = config.noise

    def forward_stage(self, x, batch, stage):
        if stage.first and not self.config.noise:
            self.first = x
        x = super().forward_stage(x, batch, stage)
        return x + (self.first != 0).sum() if stage.last and not self.config.noise else x
"""


def test_what_can_not_work_in_stages_is_told(tmp_path, request):
    """A skip connection between stages; noise from a generator that every process has."""
    own = tmp_path / "skipping.py"
    own.write_text(SKIPPING)
    trial.import_once(own)
    request.addfinalizer(lambda: registry.FAMILIES.pop("skipping"))
    config = registry.find_config("skipping-tiny")
    (verdict,) = check_parallel(config, ["pp2"], import_=own)
    assert verdict.cause.startswith("it ends with AttributeError: ")
    assert verdict.usual.startswith("forward_stage reads what another stage has built or computed")
    (verdict,) = check_parallel(replace(config, noise=0.1), ["dp2"], import_=own)
    assert verdict.cause == "module layers.0: it draws from Python's random"
    assert "draw from one that is seeded by the step and the module's name" in verdict.usual


@contextmanager
def dies_on_a_rank():
    """A rank is killed, as by a system without memory."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    yield


def test_a_rank_that_dies_is_told_and_the_next_layout_is_checked():
    first, second = check_parallel(SMALL, ["tp2", "tp1"], within=dies_on_a_rank)
    assert first.cause == "it ends with rank 1 of 2: the process died"
    assert second.passed, second.cause


def test_what_can_not_be_checked_is_told_in_one_line(tmp_path, monkeypatch):
    """Also what only the one process notices; and before anything is planted."""
    with pytest.raises(UserError, match="steps 0 must be 1 or more"):
        next(check_parallel(SMALL, ["tp2"], steps=0))
    with pytest.raises(UserError, match="trains language models, not classifiers"):
        next(check_parallel(replace(SMALL, num_labels=2), ["tp2"]))
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        next(check_parallel(SMALL, ["tp2"], load=tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        next(gallery.self_test(BUGS))
