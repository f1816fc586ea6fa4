"""What a user's own loop may get wrong is refused in one line, before anything is trained; where
one rank is wrong, by all."""

import math
import re
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.generate import GenerationSettings
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel import failure
from megazoo.programs import check_parallel, plan
from megazoo.testing import check_parallel as check
from tests.support.sampling import marked_slow
from tests.support.training import context, tiny_config

IDS = torch.arange(32).view(4, 8)


def assert_refused(message: str, call, *args, **kwargs):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        call(*args, **kwargs)


@pytest.fixture(scope="module")
def model():
    return megazoo.from_config(tiny_config(layers=1))


BATCHES = {
    "num_microbatches 0 must be 1 or more": dict(num_microbatches=0),
    "num_microbatches -2 must be 1 or more": dict(num_microbatches=-2),
    "num_microbatches must be a whole number, not 2.0": dict(num_microbatches=2.0),
    "num_microbatches must be a whole number, not '2'": dict(num_microbatches="2"),
    "num_microbatches must be a whole number, not True": dict(num_microbatches=True),
    "num_microbatches 3 does not divide the batch of 4": dict(num_microbatches=3),
    "input_ids must be a tensor, not list": dict(input_ids=IDS.tolist()),
    "input_ids must be a tensor, not ndarray": dict(input_ids=IDS.numpy()),
    "input_ids must be whole numbers, int64, not float32": dict(input_ids=IDS.float()),
    "input_ids must be whole numbers, int64, not bool": dict(input_ids=IDS > 3),
    "input_ids has the shape [32], not [batch, sequence]": dict(input_ids=IDS.flatten()),
    "labels must be a tensor, not list": dict(labels=IDS.tolist()),
    "labels must be whole numbers, int64, not float32": dict(labels=IDS.float()),
    "targets must be a tensor, not tuple": dict(labels=None, targets=(1, 2)),
    "targets must be whole numbers, int64, not float16": dict(labels=None, targets=IDS.half()),
    "attention_mask must be a tensor, not list": dict(attention_mask=[[1]]),
    "attention_mask must be 1 for tokens and 0 for padding, not a mask that is added": dict(
        attention_mask=torch.zeros(IDS.shape)
    ),
    "attention_mask must be 1 for tokens": dict(
        attention_mask=torch.zeros(IDS.shape).masked_fill(IDS > 3, -torch.inf)
    ),
    "position_ids must be whole numbers, int64, not complex64": dict(
        position_ids=IDS.to(torch.complex64)
    ),
    "document_ids must be a tensor, not int": dict(document_ids=3),
    "token id 64 is outside the vocabulary of 61": dict(input_ids=IDS + 33),
    "token id -1 is outside the vocabulary of 61": dict(input_ids=IDS - 1),
}


def test_batches_that_are_none(model):
    for message, wrong in BATCHES.items():
        for call in (model.train_batch, model.eval_batch):
            with pytest.raises(UserError, match=f"^{re.escape(message)}"):
                call(**{"input_ids": IDS, "labels": IDS, **wrong})


def test_forward_and_generate_refuse_what_is_no_tensor(model):
    for call in (model, model.generate):
        with pytest.raises(UserError, match="input_ids must be a tensor, not list"):
            call(IDS.tolist())
        with pytest.raises(UserError, match="input_ids must be whole numbers, int64, not float32"):
            call(IDS.float())
    with pytest.raises(UserError, match="attention_mask must be a tensor, not list"):
        model.generate(IDS, [[1]])
    with pytest.raises(UserError, match="attention_mask must be 1 for tokens"):
        model.generate(IDS, torch.zeros(IDS.shape))


def test_ids_of_any_whole_type_are_taken(model):
    losses = {
        kind: model.eval_batch(IDS.to(kind), IDS.to(kind)).item()
        for kind in (torch.int64, torch.int32, torch.int16, torch.uint8)
    }
    assert len(set(losses.values())) == 1


OPTIMIZERS = {
    "lr nan must be 0 or more": dict(lr=math.nan),
    "lr -0.1 must be 0 or more": dict(lr=-0.1),
    "lr inf must be finite": dict(lr=math.inf),
    "lr must be a number, not '1e-3'": dict(lr="1e-3"),
    "betas must be two numbers, got 0.9": dict(betas=0.9),
    "betas must be two numbers, got (0.9,)": dict(betas=(0.9,)),
    "beta 1.0 must be below 1": dict(betas=(0.9, 1.0)),
    "beta nan must be 0 or more": dict(betas=(math.nan, 0.9)),
    "eps -1 must be 0 or more": dict(eps=-1),
    "weight_decay nan must be 0 or more": dict(weight_decay=math.nan),
    "clip_grad nan must be 0 or more": dict(clip_grad=math.nan),
    "clip_grad must be a number, not None": dict(clip_grad=None),
    "zero must be 0, 1, 2 or 3, got 4": dict(zero=4),
}


def test_optimizers_that_can_not_be(model):
    for message, wrong in OPTIMIZERS.items():
        assert_refused(message, megazoo.optim.AdamW, model, **wrong)


def test_a_learning_rate_that_becomes_no_number_changes_no_weight():
    model = megazoo.from_config(tiny_config(layers=1))
    optimizer = megazoo.optim.AdamW(model, lr=np.float32(1e-3), clip_grad=math.inf)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.train_batch(IDS, IDS)
    for lr in (math.nan, -1.0):
        optimizer.lr = lr
        with pytest.raises(UserError, match=f"lr {lr} must be 0 or more"):
            optimizer.step()
    for norm in (math.nan, -1.0, "1"):
        with pytest.raises(UserError, match="max_norm "):
            megazoo.optim.clip_grad_norm(model, norm)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.lr = torch.tensor(1e-3)  # as torch's schedulers may have it
    optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))


def test_loss_scales_that_can_not_be():
    for message, wrong in {
        "value nan must be 1 or more": dict(value=math.nan),
        "value 0.5 must be 1 or more": dict(value=0.5),
        "value inf must be finite": dict(value=math.inf),
        "growth_interval 0 must be 1 or more": dict(growth_interval=0),
        "hysteresis must be a whole number, not 1.5": dict(hysteresis=1.5),
    }.items():
        assert_refused(f"the loss scale's {message}", LossScale, **wrong)


def test_contexts_that_can_not_be():
    make = megazoo.ParallelContext.from_torch
    for size in (0, -1, "2", 2.0, True, None):
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size"):
            message = f"{name} must be a whole number of at least 1, not {size!r}"
            assert_refused(message, make, **{name: size})
    for timeout in (60, math.nan, timedelta(0), timedelta(seconds=-1), None):
        assert_refused(
            f"timeout must be a timedelta above 0, not {timeout!r}", make, timeout=timeout
        )


def test_an_interval_of_recomputation_is_at_least_1(model):
    for interval in (0, -1, 1.5):
        with pytest.raises(UserError, match=r"interval .*(1 or more|whole number)"):
            model.recompute("full", interval)


def test_settings_of_generation_that_are_no_numbers():
    for name in ("temperature", "length_penalty", "repetition_penalty"):
        for value in (math.nan, math.inf):
            with pytest.raises(UserError, match=f"{name} {value} is out of range"):
                GenerationSettings(**{name: value}).check(61)


def test_a_tolerance_that_would_pass_everything_or_nothing():
    for tolerance in ("nan", "-1", "inf"):
        for call in (
            lambda text: check_parallel.main(["--preset", "gpt2-tiny", f"--tolerance={text}"]),
            lambda text: next(check("gpt2-tiny", ["tp2"], tolerance=float(text))),
        ):
            with pytest.raises(
                UserError, match=f"tolerance {tolerance}.* must be (0 or more|finite)"
            ):
                call(tolerance)


@pytest.mark.parametrize(
    ("mode", "value"),
    marked_slow(
        [([], 0), (["--search"], -1), ([], -1), (["--search"], 0)], lambda number, _: number > 1
    ),
)
def test_sizes_of_a_plan_are_at_least_1(mode, value):
    sizes = ("gpus", "tp", "pp", "dp", "virtual-pp", "micro-batch-size", "global-batch-size")
    for flag in sizes:
        arguments = ["--preset", "gpt2-tiny", *mode, f"--{flag}={value}"]
        assert_refused(f"--{flag} {value} must be at least 1", plan.main, arguments)


def wrong_on_rank_1(kind, directory):
    """What each rank is told where rank 1 alone is wrong. directory: of a model."""
    ctx = context(pp=2)
    model, wrong = megazoo.from_config(tiny_config(layers=2), ctx), ctx.rank == 1
    calls = {
        "batch": lambda: model.train_batch(IDS, None if wrong else IDS),
        "optimizer": lambda: megazoo.optim.AdamW(model, lr=math.nan if wrong else 1e-3),
        "weights": lambda: model.from_parallelized(3 if wrong else directory),
    }
    with pytest.raises(UserError) as caught, mock.patch.object(failure, "PATIENCE", 0.3):
        calls[kind]()
    torch.distributed.destroy_process_group()  # it is no longer fit for a barrier
    return str(caught.value), caught.value.exit_code


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("batch", "the last stage needs labels or targets"),
        ("optimizer", "lr nan must be 0 or more"),
        (
            "weights",
            "weights are read from a directory, not from int: for random weights, call "
            "megazoo.from_config",
        ),
    ],
)
def test_where_one_rank_is_wrong_all_are_told(ranks, tmp_path, kind, message):
    megazoo.from_config(tiny_config(layers=2)).save_parallelized(tmp_path / "model")
    others, wrong = ranks(wrong_on_rank_1, 2, kind, tmp_path / "model", timeout=240)
    assert wrong == (message, 2)
    assert others == (f"rank 1 failed: {message}", 1)
