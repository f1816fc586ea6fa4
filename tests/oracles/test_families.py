"""The families beside GPT-2, LLaMA and MPT against transformers, in layouts: logits, losses, ten
steps of training, and what they generate."""

import copy
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file

import megazoo
from tests.support.families import ONE_OF_EACH, REPEATS, TWINS, has_experts, saved, twin
from tests.support.generation import of_transformers, prompts
from tests.support.sampling import marked_slow
from tests.support.training import context, inputs_for, layout_name, run_in_layout

LAYOUTS = [dict(), dict(tp=2), dict(pp=2), dict(tp=2, pp=2), dict(tp=2, sp=True)]


def in_every_layout(in_one: list[int], in_ranks: list[int], without=()) -> list:
    """Models and layouts, of which those families of ONE_OF_EACH are fast in one process, and the
    others in four."""
    fast = [(ONE_OF_EACH[number], {}) for number in in_one]
    fast += [(ONE_OF_EACH[number], dict(tp=2, pp=2)) for number in in_ranks]
    return marked_slow(
        list(product([name for name in TWINS if name not in without], LAYOUTS)),
        lambda _, case: case not in fast,
        name=lambda case: f"{case[0]}-{layout_name(case[1])}",
    )


STEPS, RATE = 10, 1e-3
# Of AdamW: with less of it torch's own fp32 is 7e-5 away from its fp64, where gradients are all but
# 0, as those of Pythia's key biases are beyond the rotary part.
EPSILON = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@cache
def expected_outputs(name):
    with torch.no_grad():
        return {
            kind: (out.get("loss"), out.logits)
            for kind, arguments in inputs_for(21).items()
            for out in [twin(name)(**arguments)]
        }


def outputs_of(paths, layout):
    """Loss and logits of each directory's model, of all inputs."""
    ctx, found = context(**layout), []
    for path in paths:
        model = megazoo.from_pretrained(path, ctx).eval()
        with torch.no_grad():
            outputs = {
                kind: model(**arguments, return_logits=True)
                for kind, arguments in inputs_for(21).items()
            }
        found.append({kind: (out.loss, out.logits) for kind, out in outputs.items()})
    return found


@pytest.mark.parametrize(
    ("layout", "names"),
    # fast: all of them in one process, and one of each family in four
    [
        pytest.param({}, list(TWINS), id="one process"),
        pytest.param(dict(tp=2, pp=2), ONE_OF_EACH, id="one of each, tp2pp2"),
    ]
    + [
        pytest.param(layout, list(TWINS), id=layout_name(layout), marks=pytest.mark.slow)
        for layout in LAYOUTS[1:]
    ],
)
def test_logits_and_losses_are_transformers(ranks, directory, layout, names):
    """Longer than every window, with padding on each side."""
    paths = [saved(name, directory) for name in names]
    results = run_in_layout(ranks, outputs_of, layout, paths)
    for rank in results:
        for name, outputs in zip(names, rank, strict=True):
            for kind, (loss, logits) in outputs.items():
                theirs, their_logits = expected_outputs(name)[kind]
                if theirs is not None:
                    assert abs(loss - theirs) < 1e-5, (name, kind)
                if logits is not None:
                    mask = inputs_for(21)[kind].get("attention_mask")
                    mask = torch.ones(logits.shape[:2]) if mask is None else mask
                    difference = (logits - their_logits)[mask.bool()].abs().max()
                    assert difference < 1e-5 * max(1, their_logits.abs().max()), (name, kind)
    assert all(logits is not None for out in results[-1] for _, logits in out.values())


def batches():
    """The same two batches again and again, so that there is something to learn."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 61, (4, 16), generator=generator) for _ in range(2)] * (STEPS // 2)


@cache
def trained_by_torch(name, dtype=torch.float32):
    """The losses of ten steps, and the weights after them."""
    model = copy.deepcopy(twin(name)).to(dtype).train()
    if has_experts(name):  # then the loss has its auxiliary loss
        model.config.output_router_logits = True
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    losses = []
    for ids in batches():
        optimizer.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        optimizer.step()
        added = model.config.router_aux_loss_coef * out.aux_loss if has_experts(name) else 0.0
        losses.append(float(out.loss - added))
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)  # whose names are not always those in memory
        return losses, load_file(Path(directory) / "model.safetensors")


@cache
def rounding(name):
    """How far rounding may take losses and weights: twice as far as it takes torch's from those of
    its fp64, which on some CPUs is 1e-5. The experts of transformers have no fp64."""
    if has_experts(name):
        return 1e-5
    (losses, weights), (exact, exact_weights) = (
        trained_by_torch(name, dtype) for dtype in (torch.float32, torch.float64)
    )
    own = [abs(a - b) for a, b in zip(losses, exact, strict=True)]
    own += [(weights[key] - exact_weights[key]).abs().max().item() for key in weights]
    return max(1e-5, 2 * max(own))


def trained(path, made, more, layout):
    """The losses; the weights are saved as a directory of transformers. more: fields of the
    config."""
    model = megazoo.from_pretrained(path, context(**layout), **more).train()
    options = dict(lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0, clip_grad=0.0)
    optimizer, losses = megazoo.optim.AdamW(model, **options), []
    for ids in batches():
        optimizer.zero_grad()
        how = {"num_microbatches": 2, "schedule": "gpipe" if more else "1f1b"}
        losses.append(model.train_batch(ids, labels=ids, **how).item())
        optimizer.step()
    model.save_parallelized(made, merge_checkpoints=True)
    return losses


@pytest.mark.parametrize(("name", "layout"), in_every_layout([0, 2], [1, 9]))
def test_ten_steps_are_those_of_torch(ranks, directory, tmp_path, name, layout):
    """The losses of all ranks, and every weight."""
    expected, weights = trained_by_torch(name)
    assert expected[-1] < expected[0] - 0.01
    made, more = tmp_path / "made", {"router_balance": "batch"} if has_experts(name) else {}
    for losses in run_in_layout(ranks, trained, layout, saved(name, directory), made, more):
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        assert worst < rounding(name), worst
    found = load_file(made / "model.safetensors")
    assert found.keys() == weights.keys()
    for key, tensor in found.items():
        assert (tensor - weights[key]).abs().max() < rounding(name), key


TOKENS = 24  # more than any window
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.5},
}


def generated(path, layout):
    """What a model generates in every way, from prompts as they are and padded on the left."""
    model = megazoo.from_pretrained(path, context(**layout)).eval()
    ids, mask = prompts()
    return [
        model.generate(
            ids, given, max_new_tokens=TOKENS, eos_token_id=[], pad_token_id=0, **settings
        )
        for settings in WAYS.values()
        for given in (None, mask)
    ]


@cache
def expected_tokens(name):
    """What transformers generates, and how close its closest decision was."""
    ids, mask = prompts()
    return [
        of_transformers(twin(name), ids, given, max_new_tokens=TOKENS, pad_token_id=0, **settings)
        for settings in WAYS.values()
        for given in (torch.ones_like(ids), mask)
    ]


@pytest.mark.parametrize(("name", "layout"), in_every_layout([1], [5, 10], without=REPEATS))
def test_generation_is_that_of_transformers(ranks, directory, name, layout):
    """Past every window, token for token, and not the same token again and again."""
    for theirs, least in expected_tokens(name):
        assert least > 1e-4, "SEEDS: candidates are too close"
        assert all(row.unique().numel() > 4 for row in theirs[:, 9:]), "SEEDS: too few tokens"
    for outputs in run_in_layout(ranks, generated, layout, saved(name, directory)):
        for ours, (theirs, _) in zip(outputs, expected_tokens(name), strict=True):
            assert torch.equal(ours, theirs)
